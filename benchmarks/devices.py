"""Tabulate memory and communication of an mha_jax layer on 1, 2, 4 and 8 devices.

    python benchmarks/devices.py [PATTERN] [--json PATH]

Programs are compiled for virtual CPU devices, but not run: XLA reports their memory, and their text
shows what they send. benchmarks/README.md describes the file.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mha_jax
from mha_jax import parallel
from mha_spec import AttentionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

from parity_lab.mesh.hlo import collectives_in, counts_of, nbytes_of

SPEC = AttentionSpec(512, 8)
DEVICES = (1, 2, 4, 8)
AXIS = "x"

QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
"""Options for fast compilation; they do not affect memory, and compiled programs are not run."""

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def mesh_of(count: int) -> Mesh:
    return jax.make_mesh(
        (count,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )


def array(mesh: Mesh, shape: tuple[int, ...], *axes: str | None, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def layer_on(mesh: Mesh, kind: Any = mha_jax.MultiHeadSelfAttention, **how: Any) -> tuple[Any, Any]:
    layer = nnx.eval_shape(lambda: kind(SPEC, rngs=nnx.Rngs(0)))
    return nnx.split(parallel.shard(layer, mesh, **how))


def forward_of(graph: Any, **options: Any) -> Callable[..., Any]:
    return lambda state, x: nnx.merge(graph, state)(x, is_causal=True, **options)


def gradient_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(state: Any, x: Any, cotangent: Any) -> Any:
        return jax.vjp(forward, state, x)[1](cotangent)

    return gradient


def layers(
    mesh: Mesh, shape: tuple[int, int, int], placement: tuple[str | None, ...], **how: Any
) -> list[Program]:
    """Return a layer's forward pass, and its gradient."""
    graph, state = layer_on(mesh, **how)
    forward, x = forward_of(graph), array(mesh, shape, *placement)
    return [(forward, (state, x)), (gradient_of(forward), (state, x, x))]


def rings(
    mesh: Mesh, shape: tuple[int, int, int], placement: tuple[str | None, ...]
) -> list[Program]:
    """Return the same programs with keys and values passed around a ring, although heads could be
    divided.
    """
    graph, state = layer_on(mesh, tokens=AXIS)

    def forward(state: Any, x: Any) -> Any:
        layer = nnx.merge(graph, state)
        layer.kernel = replace(layer.kernel, passes_keys=True)
        return layer(x, is_causal=True)

    x = array(mesh, shape, *placement)
    return [(forward, (state, x)), (gradient_of(forward), (state, x, x))]


def cached(mesh: Mesh, tokens: int, *, heads: str | None = None, **how: str) -> list[Program]:
    """Return a call with a cache of 8 sequences and 4096 slots, which it may reuse."""
    token_axis = {"tokens": AXIS} if "slots" in how else {}
    graph, state = layer_on(mesh, mha_jax.MultiHeadAttentionWithCache, heads=heads, **token_axis)
    cache = jax.eval_shape(lambda: mha_jax.init_cache(8, SPEC.num_kv_heads, 4096, SPEC.head_dim))
    cache = parallel.shard_cache(cache, mesh, heads=heads, **how)
    x = array(mesh, (8, tokens, SPEC.d_model), how.get("batch"))
    return [(lambda state, x, cache: nnx.merge(graph, state)(x, cache), (state, x, cache))]


PLANS: dict[str, Callable[[Mesh], list[Program]]] = {
    "data (B 8, T 2048)": lambda mesh: layers(mesh, (8, 2048, 512), (AXIS,)),
    "fully sharded (B 8, T 2048)": lambda mesh: layers(
        mesh, (8, 2048, 512), (AXIS,), features=AXIS
    ),
    "tensor (B 1, T 2048)": lambda mesh: layers(mesh, (1, 2048, 512), (), heads=AXIS),
    "context, heads for tokens (B 1, T 8192)": lambda mesh: layers(
        mesh, (1, 8192, 512), (None, AXIS), tokens=AXIS
    ),
    "context, ring (B 1, T 8192)": lambda mesh: rings(mesh, (1, 8192, 512), (None, AXIS)),
    "step, cache by sequences": lambda mesh: cached(mesh, 1, batch=AXIS),
    "step, cache by heads": lambda mesh: cached(mesh, 1, heads=AXIS),
    "step, cache by slots": lambda mesh: cached(mesh, 1, slots=AXIS),
    "prompt of 512, cache by heads": lambda mesh: cached(mesh, 512, heads=AXIS),
    "prompt of 512, cache by slots": lambda mesh: cached(mesh, 512, slots=AXIS),
}


def measured(pattern: str) -> Iterator[dict[str, Any]]:
    """Yield the row of each matching plan and program; lists have a value for each number of
    devices.
    """
    for plan, make in PLANS.items():
        programs = ("forward", "gradient") if len(make(mesh_of(1))) == 2 else ("forward",)
        for index, program in enumerate(programs):
            if not re.search(pattern, f"{plan}, {program}"):
                continue
            row = {
                "plan": plan,
                "program": program,
                "devices": DEVICES,
                "temporary_bytes": [],
                "input_bytes": [],
            }
            row |= {"received_bytes": [], "collectives": []}
            for count in DEVICES:
                function, arguments = make(mesh_of(count))[index]
                donated = (2,) if "cache" in plan else ()
                compiled = (
                    jax.jit(function, donate_argnums=donated).lower(*arguments).compile(QUICKLY)
                )
                memory: Any = compiled.memory_analysis()
                received = collectives_in(compiled.as_text())
                row["temporary_bytes"].append(memory.temp_size_in_bytes)
                row["input_bytes"].append(memory.argument_size_in_bytes)
                row["received_bytes"].append(nbytes_of(received))
                row["collectives"].append(counts_of(received))
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "pattern", nargs="?", default="", metavar="PATTERN", help="regular expression of plans"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write the rows to this file"
    )
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    rows = []
    print(f"MB of a device, on {' / '.join(map(str, DEVICES))} devices")
    print(
        "| plan | program | temporary | inputs | received | collectives on 8 "
        "|\n|---|---|---|---|---|---|"
    )
    for row in measured(options.pattern):
        rows.append(row)
        keys = ("temporary_bytes", "input_bytes", "received_bytes")
        columns = [" / ".join(f"{nbytes / 1e6:.3g}" for nbytes in row[key]) for key in keys]
        by = ", ".join(f"{count} {kind}" for kind, count in row["collectives"][-1].items()) or "—"
        print(f"| {row['plan']} | {row['program']} | {' | '.join(columns)} | {by} |", flush=True)
    if options.json is not None:
        about = f"a layer of E {SPEC.d_model} and {SPEC.num_heads} heads, float32, causal"
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        head = (
            f' "format": 1,\n "about": {json.dumps(about)},\n "packages": {{"jax": '
            f'"{jax.__version__}"}}'
        )
        options.json.write_text(f'{{\n{head},\n "rows": [\n{lines}\n ]\n}}\n', "utf-8")


if __name__ == "__main__":
    main()
