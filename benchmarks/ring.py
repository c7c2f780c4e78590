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
    arrays, structure = jax.tree.flatten(arguments)
    keys = jax.random.split(jax.random.key(0), len(arrays))
    drawn = [random_like(array, key) for array, key in zip(arrays, keys, strict=True)]
    drawn_arguments = jax.tree.unflatten(structure, drawn)
    return lambda: jax.block_until_ready(program(*drawn_arguments))


def random_like(array: Any, key: jax.Array) -> jax.Array:
    """Return small random values in the shape of an array, divided over devices in the same way."""
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=array.sharding)
    return draw(key, array.shape, array.dtype) * 0.05


def measured_row(tokens: int, index: int, side: Any) -> Row:
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
    compiler_options = None
    if not is_run:
        compiler_options = QUICKLY
    executables = {}
    peaks = {}
    for name, program in programs.items():
        executable = compiled(program, compiler_options)
        executables[name] = executable
        peaks[name] = int(executable.memory_analysis().temp_size_in_bytes)
    times: dict[str, Any] = {}
    left_out = {}
    if is_run:
        probe = side.matmul("float32")
        runs = {}
        for name, executable in executables.items():
            _, arguments = programs[name]
            runs[name] = runner(executable, arguments)
        for run in runs.values():
            run()
        seconds = run_in_turn({**runs, LIMIT: probe.run}, budget_s=10.0, rounds=(3, 9))
        times = times_of(seconds, amount=work.flops, probe=probe.amount)
    else:
        left_out["time"] = f"sequences of more than {MOST_RUN} tokens are only compiled"
    passes = "forward+backward" if index else "forward"
    return Row(
        f"growth-long ring on {COUNT} devices, {passes}",
        "jax",
        list(shape),
        "float32",
        group="growth-long",
        axes="B S E",
        peak_bytes=peaks.pop(OURS),
        peers_peak_bytes=peaks,
        left_out=left_out,
        **times,
    )


def line_of(row: Row, tokens: int) -> str:
    """Return a row in words."""
    times = "not run"
    if row.ours_ms is not None:
        times = f"{row.ours_ms:.0f} ms, {row.peers['one device']:.0f} on one"
    peak = (row.peak_bytes or 0) / 1e6
    peak_alone = row.peers_peak_bytes["one device"] / 1e6
    memory = f"{peak:.0f} MB a device, {peak_alone:.0f} on one"
    return f"{row.what}, {tokens} tokens: {times}; {memory}"


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
    side = Side()
    rows = []
    for length in options.tokens.split(","):
        tokens = int(length)
        for index in (0, 1):
            row = measured_row(tokens, index, side)
            rows.append(row.to_dict())
            print(line_of(row, tokens), flush=True)
    environment = {"platform": platform.platform(), "cpus": os.cpu_count(), "packages": installed()}
    content = headed(
        "bench",
        {"environment": environment, "rows": rows, "growth": [], "left_out": [], "names": {}},
    )
    options.json.write_text(f"{json.dumps(content, indent=1)}\n", "utf-8")


if __name__ == "__main__":
    main()
