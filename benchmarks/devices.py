"""Tabulate memory and communication of an mha_jax layer on 1, 2, 4 and 8 devices, for benchmarks/results.md.

Programs are compiled for virtual CPU devices, but not run: XLA reports their memory, and their text shows what they
send. Usage: python benchmarks/devices.py [PATTERN]
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mha_jax
from mha_jax import parallel
from mha_spec import AttentionSpec
from parity.sharding.hlo import collectives_in, counts_of, nbytes_of

SPEC = AttentionSpec(512, 8)
DEVICES = (1, 2, 4, 8)
AXIS = "x"

QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
"""Options for fast compilation; they do not affect memory, and compiled programs are not run."""

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def mesh_of(count: int) -> Mesh:
    return jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


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


def layers(mesh: Mesh, shape: tuple[int, int, int], placement: tuple[str | None, ...], **how: Any) -> list[Program]:
    """Return a layer's forward pass, and its gradient."""
    graph, state = layer_on(mesh, **how)
    forward, x = forward_of(graph), array(mesh, shape, *placement)
    return [(forward, (state, x)), (gradient_of(forward), (state, x, x))]


def rings(mesh: Mesh, shape: tuple[int, int, int], placement: tuple[str | None, ...]) -> list[Program]:
    """Return the same programs with keys and values passed around a ring, although heads could be divided."""
    graph, state = layer_on(mesh, tokens=AXIS)

    def forward(state: Any, x: Any) -> Any:
        layer = nnx.merge(graph, state)
        layer.kernel = replace(layer.kernel, passes_keys=True)
        return layer(x, is_causal=True)

    x = array(mesh, shape, *placement)
    return [(forward, (state, x)), (gradient_of(forward), (state, x, x))]


def cached(mesh: Mesh, tokens: int, *, heads: str | None = None, **how: str) -> list[Program]:
    """Return a call with a cache of 8 sequences and 4096 slots, which it may reuse."""
    told = {"tokens": AXIS} if "slots" in how else {}
    graph, state = layer_on(mesh, mha_jax.MultiHeadAttentionWithCache, heads=heads, **told)
    cache = jax.eval_shape(lambda: mha_jax.init_cache(8, SPEC.num_kv_heads, 4096, SPEC.head_dim))
    cache = parallel.shard_cache(cache, mesh, heads=heads, **how)
    x = array(mesh, (8, tokens, SPEC.d_model), how.get("batch"))
    return [(lambda state, x, cache: nnx.merge(graph, state)(x, cache), (state, x, cache))]


PLANS: dict[str, Callable[[Mesh], list[Program]]] = {
    "data (B 8, T 2048)": lambda mesh: layers(mesh, (8, 2048, 512), (AXIS,)),
    "fully sharded (B 8, T 2048)": lambda mesh: layers(mesh, (8, 2048, 512), (AXIS,), features=AXIS),
    "tensor (B 1, T 2048)": lambda mesh: layers(mesh, (1, 2048, 512), (), heads=AXIS),
    "context, heads for tokens (B 1, T 8192)": lambda mesh: layers(mesh, (1, 8192, 512), (None, AXIS), tokens=AXIS),
    "context, ring (B 1, T 8192)": lambda mesh: rings(mesh, (1, 8192, 512), (None, AXIS)),
    "step, cache by sequences": lambda mesh: cached(mesh, 1, batch=AXIS),
    "step, cache by heads": lambda mesh: cached(mesh, 1, heads=AXIS),
    "step, cache by slots": lambda mesh: cached(mesh, 1, slots=AXIS),
    "prompt of 512, cache by heads": lambda mesh: cached(mesh, 512, heads=AXIS),
    "prompt of 512, cache by slots": lambda mesh: cached(mesh, 512, slots=AXIS),
}


def measured(pattern: str) -> Iterator[tuple[str, list[tuple[float, float, float, dict[str, int]]]]]:
    """Yield each matching plan with, per number of devices, temporary MB, received and sent MB, and the operations."""
    for name, plan in PLANS.items():
        titles = [name] if len(plan(mesh_of(1))) == 1 else [f"{name}, forward", f"{name}, gradient"]
        for index, title in enumerate(titles):
            if not re.search(pattern, title):
                continue
            rows = []
            for count in DEVICES:
                function, arguments = plan(mesh_of(count))[index]
                donated = (2,) if "cache" in title else ()
                program = jax.jit(function, donate_argnums=donated).lower(*arguments).compile(QUICKLY)
                memory: Any = program.memory_analysis()
                sent = collectives_in(program.as_text())
                held = (memory.temp_size_in_bytes, memory.argument_size_in_bytes, nbytes_of(sent))
                rows.append((*(x / 1e6 for x in held), counts_of(sent)))
            yield title, rows


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    print("| plan | temporary MB a device, 1 / 2 / 4 / 8 | given | sent | by, on 8 |")
    print("|---|---|---|---|---|")
    for title, rows in measured(sys.argv[1] if len(sys.argv) > 1 else ""):
        columns = [" / ".join(f"{row[i]:.3g}" for row in rows) for i in range(3)]
        by = ", ".join(f"{count} {kind}" for kind, count in rows[-1][3].items()) or "—"
        print(f"| {title} | {' | '.join(columns)} | {by} |", flush=True)


if __name__ == "__main__":
    main()
