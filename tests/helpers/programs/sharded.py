"""A program: layers of mha_jax on a mesh of eight virtual devices, with automatic and with explicit
axes.

It prints its results for test_sharded.py of mha_jax as JSON. It runs in its own process, because
the number of JAX's devices is fixed when it starts.
"""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from functools import partial

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mha_jax
import parity
from mha_jax import parallel
from mha_jax.kernels.fused import FusedAttention
from mha_spec import Alibi, AttentionSpec, Gate, Latent, Norm, Rope
from parity.measure.core.cases import CASES
from parity_lab.mesh.plan import MeshPlan
from parity_lab.mesh.run import run_on_mesh

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


def varied(name, spec, **fields):
    return replace(CASES[name], spec=replace(CASES[name].spec, **spec), **fields)


COMPARED = {"automatic": [varied("relative-bias-padded", {"out_proj": False})]}
# With explicit axes, each operation must declare the type of its result.
COMPARED["explicit"] = [
    CASES["latent-window"],
    varied(
        "nan-hidden-norm", {"gate": Gate(), "value_head_dim": 8}, random_mask=True, not_finite=None
    ),
    *(CASES[name] for name in ("decode-sinks", "decode-latent-yarn")),
]
"""Cases that two devices divide by heads, and two by sequences."""


def mesh_of(kind, **axes):
    count = int(np.prod([*axes.values()]))
    types = (KINDS[kind],) * len(axes)
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=types, devices=jax.devices()[:count]
    )


def on(mesh, *axes):
    return NamedSharding(mesh, PartitionSpec(*axes))


# ---- Stages of cases, compared within the budget -------------------------------------------------


def comparisons_of(kind):
    """Return the number of compared stages of each case in `mha-parity mesh`, and the errors."""
    plan = MeshPlan(data=2, tensor=2, axes=kind)
    report = run_on_mesh(COMPARED[kind], ["jax"], plan, with_gradients=True)
    wrong = [f"{failure.case} {failure.stage}: {failure.reason}" for failure in report.failed]
    wrong += [f"{program.case} {program.program}: {program.counted}" for program in report.needless]
    return [Counter(comparison.case for comparison in report.comparisons), wrong]


# ---- Communication of compiled programs ----------------------------------------------------------

SMALL_BLOCKS = FusedAttention(few_scores=0, queries=8, keys=8, last_keys=4)

GROUPED = AttentionSpec(64, 8, num_kv_heads=4, rope=Rope(10000.0), qk_norm=Norm())
LAYERS = {
    "grouped": replace(GROUPED, window_size=9, alibi=Alibi(), sinks=True, gate=Gate(per_head=True)),
    "latent": AttentionSpec(
        64, 8, head_dim=24, latent=Latent(16, 8), rope=Rope(10000.0, rotary_dim=8, rotated="last")
    ),
}


def collectives(function, *arguments):
    """Return the number of collectives of a compiled program by name and type, and the number in
    loops.
    """
    text = jax.jit(function).lower(*arguments).compile().as_text()
    names = (
        "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    )
    collective = re.compile(rf"= \(?(\w+)\[.* ({names})(?:-start)?\(")
    of_entry = collective.findall(text[text.index("\nENTRY ") :])
    counts = Counter(f"{name} {dtype}" for dtype, name in of_entry)
    return dict(counts) | {"in loops": len(collective.findall(text)) - len(of_entry)}


def divided(spec, mesh, kind=mha_jax.MultiHeadSelfAttention):
    """Return an abstract layer on a mesh, divided by heads if the mesh has the dimension, or
    replicated.
    """
    module = nnx.eval_shape(lambda: kind(spec, rngs=nnx.Rngs(0)))
    if "heads" in mesh.axis_names:
        return parallel.shard(module, mesh, heads="heads")
    state = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda x: x.update(sharding=on(mesh)), state))
    return module


def programs():
    """Return the collectives of each program, with heads over four devices or sequences over
    eight.
    """
    collectives_of = {}
    for name, spec in LAYERS.items():
        for axis, mesh in (
            ("heads", mesh_of("automatic", heads=4)),
            ("data", mesh_of("automatic", data=8)),
        ):
            of_inputs = on(mesh, "data" if axis == "data" else None)

            def array(*shape, dtype=jnp.float32, placement=of_inputs):
                return jax.ShapeDtypeStruct(shape, dtype, sharding=placement)

            graph, state = nnx.split(divided(spec, mesh))

            def forward(state, x, lengths, graph=graph):
                module = nnx.merge(graph, state)
                module.kernel = SMALL_BLOCKS
                return module(x, is_causal=True, key_padding_lengths=lengths)

            def loss(*inputs, forward=forward):
                return (forward(*inputs) ** 2).sum()

            x, lengths = array(8, 32, 64), array(8, dtype=jnp.int32)
            is_first = name == "grouped"
            if (
                axis == "heads" or not is_first
            ):  # with sequences, the gradient also shows that the output needs nothing
                collectives_of[f"{axis} forward {name}"] = collectives(forward, state, x, lengths)
            if is_first:
                collectives_of[f"{axis} gradient {name}"] = collectives(
                    jax.grad(loss, argnums=(0, 1)), state, x, lengths
                )
            if spec.latent is not None:
                continue
            graph, state = nnx.split(divided(spec, mesh, mha_jax.MultiHeadAttentionWithCache))
            cache = jax.eval_shape(
                partial(mha_jax.init_cache, 8, spec.num_kv_heads, 40, spec.head_dim)
            )
            cache = parallel.shard_cache(
                cache, mesh, **{"batch" if axis == "data" else "heads": axis}
            )

            def step(state, x, cache, lengths, graph=graph):
                module = nnx.merge(graph, state)
                module.kernel = SMALL_BLOCKS
                return module(x, cache, new_lengths=lengths)

            for title, tokens in (("prompt", 16), ("step", 1)):
                collectives_of[f"{axis} {title} {name}"] = collectives(
                    step, state, array(8, tokens, 64), cache, lengths
                )
    return collectives_of


# ---- Long generation, and division by users ------------------------------------------------------


def generated():
    """Return the error of a ragged prompt and 32 steps over a cache divided by sequences and heads,
    or None.
    """
    spec, mesh = GROUPED, mesh_of("automatic", data=2, heads=4)
    x = np.random.default_rng(0).standard_normal((4, 48, 64))
    lengths = [np.array([16, 3, 9, 0], np.int32), *np.ones((32, 4), np.int32)]
    drawn = mha_jax.MultiHeadAttentionWithCache(spec, rngs=nnx.Rngs(0))

    def outputs(dtype, shard=lambda module, cache: (module, cache), shard_input=jnp.asarray):
        with jax.enable_x64(dtype == np.float64):
            module = nnx.clone(drawn)
            nnx.update(
                module, jax.tree.map(lambda x: x.astype(dtype), nnx.state(module, nnx.Param))
            )
            module.kernel = SMALL_BLOCKS
            module, cache = shard(module, module.init_cache(4, 48))
            graph, state = nnx.split(module)
            step = jax.jit(
                lambda state, x, cache, new: nnx.merge(graph, state)(x, cache, new_lengths=new)
            )
            outputs, begin = {}, 0
            for index, new in enumerate(lengths):
                end = begin + (16 if index == 0 else 1)
                output, cache = step(
                    state, shard_input(x[:, begin:end].astype(dtype)), cache, shard_input(new)
                )
                outputs[f"step{index}"], begin = np.asarray(output), end
            return outputs | {"keys": np.asarray(cache.keys), "values": np.asarray(cache.values)}

    def shard(module, cache):
        cache = parallel.shard_cache(cache, mesh, batch="data", heads="heads")
        return parallel.shard(module, mesh, heads="heads"), cache

    actual = outputs(np.float32, shard, lambda x: jax.device_put(x, on(mesh, "data")))
    try:
        parity.assert_parity(actual, outputs(np.float64), same_precision=outputs(np.float32))
    except AssertionError as error:
        return str(error)
    return None


def mapped():
    """Return the largest difference and the collectives of a layer in a user's own `shard_map`,
    divided by heads.
    """
    spec, mesh = GROUPED, mesh_of("explicit", data=2, heads=4)
    own = replace(spec, num_heads=2, num_kv_heads=1, out_bias=False)
    layer = mha_jax.MultiHeadSelfAttention(spec, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 32, 64))
    expected = jax.jit(lambda x: layer(x, is_causal=True))(x)
    parallel.shard(layer, mesh, heads="heads")
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
    weights = nnx.to_pure_dict(nnx.state(layer, nnx.Param))

    def attend(x, weights, bias):
        output, _ = mha_jax.multi_head_attention(
            x, weights, own, is_causal=True, kernel=SMALL_BLOCKS
        )
        return jax.lax.psum(output, "heads") + bias[None, None]

    bias = weights["out_proj"].pop("bias")
    del specs["out_proj"]["bias"]
    in_specs = (PartitionSpec("data"), specs, PartitionSpec())
    function = jax.jit(
        jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec("data"))
    )
    arguments = jax.device_put(x, on(mesh, "data")), weights, bias
    return float(jnp.abs(np.asarray(function(*arguments)) - expected).max()), collectives(
        function, *arguments
    )


if __name__ == "__main__":
    results = {f.__name__: f() for f in (programs, generated, mapped)}
    print(json.dumps(results | {"compared": {kind: comparisons_of(kind) for kind in KINDS}}))
