"""Measure a causal layer of mha_jax whose tokens are divided over 8 devices in a ring, and the
layer on one device.

    python benchmarks/ring.py --json PATH [--tokens 1024,2048,…]

The devices are virtual and share this machine's cores, so the ring cannot be faster. Its memory is
per device. Longer sequences are compiled, but not run. benchmarks/README.md describes the file.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import jax
from devices import QUICKLY, SPEC, Program

sys.path.insert(0, str(Path(__file__).parents[1]))

from parity.measure.core.packages import installed
from parity.use.reporting.schemas import headed
from parity_lab.bench.jax import Side
from parity_lab.bench.measure import LIMIT, OURS, Row, run_in_turn, times_of
from parity_lab.bench.work import Work

COUNT = 8
TOKENS = tuple(2**power for power in range(10, 18))  # from 1024 to 131072
MOST_RUN = 2**14
"""Tokens of the longest sequence that is run; the time grows with their square."""


def compiled(program: Program, options: dict[str, Any] | None) -> Any:
    function, arguments = program
    return jax.jit(function).lower(*arguments).compile(options)


def runner(program: Any, arguments: Any) -> Callable[[], Any]:
    """Return a function that runs a program on random arguments, which lie as it expects them."""
    keys = iter(jax.random.split(jax.random.key(0), 100))

    def fill(array: Any) -> Any:
        draw = jax.jit(
            lambda key: jax.random.normal(key, array.shape, array.dtype),
            out_shardings=array.sharding,
        )
        return draw(next(keys)) * 0.05

    filled = jax.tree.map(fill, arguments)
    return lambda: jax.block_until_ready(program(*filled))


def row(tokens: int, index: int, side: Any) -> Row:
    """Measure a forward pass (index 0), or a gradient (1), which includes one."""
    shape = (1, tokens, SPEC.d_model)
    work = Work(
        "growth-long", "layer", 1, tokens, SPEC.num_heads, is_causal=True, backward=index == 1
    )
    programs = {
        OURS: devices.rings(devices.mesh_of(COUNT), shape, (None, devices.AXIS))[index],
        "one device": devices.layers(devices.mesh_of(1), shape, ())[index],
    }
    is_run = tokens <= MOST_RUN
    made = {
        name: compiled(program, None if is_run else QUICKLY) for name, program in programs.items()
    }
    peaks = {
        name: int(program.memory_analysis().temp_size_in_bytes) for name, program in made.items()
    }
    fields: dict[str, Any] = {}
    if is_run:
        probe = side.matmul("float32")
        runs = {name: runner(program, programs[name][1]) for name, program in made.items()}
        for run in runs.values():
            run()
        seconds = run_in_turn({**runs, LIMIT: probe.run}, budget_s=10.0, rounds=(3, 9))
        fields = times_of(seconds, amount=work.flops, probe=probe.amount)
    what = f"growth-long ring on {COUNT} devices, {'forward+backward' if index else 'forward'}"
    return Row(
        what,
        "jax",
        list(shape),
        "float32",
        group="growth-long",
        axes="B S E",
        peak_bytes=peaks.pop(OURS),
        peers_peak_bytes=peaks,
        left_out={}
        if is_run
        else {"time": f"sequences of more than {MOST_RUN} tokens are only compiled"},
        **fields,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--json", type=Path, metavar="PATH", required=True, help="write the rows to this file"
    )
    parser.add_argument(
        "--tokens", default=",".join(map(str, TOKENS)), metavar="A,B", help="lengths"
    )
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", COUNT)
    side, rows = Side(), []
    for tokens in map(int, options.tokens.split(",")):
        for index in (0, 1):
            found = row(tokens, index, side)
            rows.append(found.to_dict())
            ms = (
                "not run"
                if found.ours_ms is None
                else f"{found.ours_ms:.0f} ms, {found.peers['one device']:.0f} on one"
            )
            peak, alone = (
                nbytes / 1e6
                for nbytes in (found.peak_bytes or 0, found.peers_peak_bytes["one device"])
            )
            print(
                f"{found.what}, {tokens} tokens: {ms}; {peak:.0f} MB a device, {alone:.0f} on one",
                flush=True,
            )
    environment = {"platform": platform.platform(), "cpus": os.cpu_count(), "packages": installed()}
    content = headed(
        "bench",
        {"environment": environment, "rows": rows, "growth": [], "left_out": [], "names": {}},
    )
    options.json.write_text(f"{json.dumps(content, indent=1)}\n", "utf-8")


if __name__ == "__main__":
    main()
