"""A program: attention of mha_jax with tokens, or slots of a cache, divided over virtual devices.

It prints its results for test_sharded_tokens.py of mha_jax as JSON. It runs in its own process,
because the number of JAX's devices is fixed when it starts.
"""

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mha_jax
import parity
from helpers.heads import fused_attention
from mha_jax import parallel
from mha_jax.kernels.fused import FusedAttention
from mha_jax.parallel import ContextParallel
from mha_spec import Alibi, AttentionSpec, Norm, RelativeBias, Rope
from parity.measure.backends.jax import QUICKLY
from parity_lab.costs import cost_of
from parity_lab.mesh.hlo import collectives_in, counts_of
from parity_lab.mesh.plan import MeshPlan
from parity_lab.mesh.run import run_on_mesh

KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
SMALL_BLOCKS = FusedAttention(few_scores=0, queries=8, keys=8, last_keys=4)


def mesh_of(kind, **axes):
    shape = tuple(axes.values())
    return jax.make_mesh(
        shape,
        tuple(axes),
        axis_types=(KINDS[kind],) * len(axes),
        devices=jax.devices()[: math.prod(shape)],
    )


def using(mesh):
    return jax.set_mesh(mesh) if AxisType.Explicit in mesh.axis_types else nullcontext()


def on(mesh, *axes):
    return NamedSharding(
        mesh, PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in axes))
    )


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile(QUICKLY)


def sent_by(program):
    return counts_of(collectives_in(program.as_text()))


def mismatch(actual, expected, same):
    """Return the error of the comparison, or None if results match."""
    try:
        parity.assert_parity(actual, expected, same_precision=same, diagnose=False)
    except AssertionError as error:
        return str(error)
    return None


# ---- Attention of heads, and its gradients -------------------------------------------------------


def heads(num_heads, num_kv_heads, **fields):
    return AttentionSpec(8 * num_heads, num_heads, num_kv_heads=num_kv_heads, **fields)


ATTENTION = {
    # name: kind of axes, mesh, layer, options
    "heads for tokens": ("automatic", {"sequence": 8}, heads(8, 8), {"is_causal": True}),
    "heads for tokens, all that hides": (
        *(
            "explicit",
            {"data": 2, "tensor": 2, "sequence": 2},
            heads(8, 4, sinks=True, window_size=9),
        ),
        {"mask": (2, 8, 32, 32), "bias": (2, 8, 32, 32), "key_padding_lengths": [32, 9]},
    ),
    "ring, causal": (
        "automatic",
        {"data": 2, "sequence": 4},
        heads(4, 2, alibi=Alibi(), sinks=True),
        {"is_causal": True},
    ),
    "ring, two": ("explicit", {"tensor": 2, "sequence": 2}, heads(4, 2), {"is_causal": True}),
    "ring, eight": (
        "automatic",
        {"sequence": 8},
        heads(2, 1, soft_cap=3.0, scale=0.7, relative_bias=RelativeBias(8, 16)),
        {"key_padding_lengths": [0, 19]},
    ),
    "ring, window, both ways": ("automatic", {"sequence": 8}, heads(2, 1, window_size=5), {}),
    "ring, chunks": ("explicit", {"sequence": 4}, heads(2, 1, chunk_size=8), {"is_causal": True}),
    "ring, mask and bias": (
        "explicit",
        {"sequence": 4},
        heads(2, 1),
        {"mask": (2, 1, 32, 32), "bias": (1, 2, 32, 32)},
    ),
}


def attended(name):
    """Return the error of output and gradients, the collectives forward and with gradients, and the
    error of a bug.

    The bug exchanges the keys of two devices, and must be detected.
    """
    kind, shape, spec, options = ATTENTION[name]
    rng, mesh = np.random.default_rng(0), mesh_of(kind, **shape)
    drawn = {
        "q": (2, spec.num_heads, 32, 8),
        "k": (2, spec.num_kv_heads, 32, 8),
        "v": (2, spec.num_kv_heads, 32, 8),
    }
    drawn |= {"sinks": (spec.num_heads,)} if spec.sinks else {}
    drawn |= {"relative_bias": (8, spec.num_heads)} if spec.relative_bias else {}
    drawn |= {"bias": options["bias"]} if "bias" in options else {}
    arrays = {key: rng.standard_normal(size) for key, size in drawn.items()}
    cotangent = rng.standard_normal((2, spec.num_heads, 32, 8))
    fixed = {key: x for key, x in options.items() if key not in ("mask", "bias")}
    if "mask" in options:
        fixed["mask"] = jnp.asarray(rng.random(options["mask"]) < 0.4)

    def forward(kernel, arrays):
        more = {key: x for key, x in arrays.items() if key not in "qkv"}
        attend = fused_attention(mha_jax)
        return attend(*(arrays[key] for key in "qkv"), spec, **fixed, **more, kernel=kernel)[0]

    def everything(kernel, arrays, cotangent):
        output, pull_back = jax.vjp(partial(forward, kernel), arrays)
        return {
            "output": output,
            **{f"grad.{key}": x for key, x in pull_back(cotangent)[0].items()},
        }

    def undivided(dtype):
        with jax.enable_x64(dtype == np.float64):
            tensors = {
                key: jnp.asarray(x.astype(dtype))
                for key, x in (arrays | {"cotangent": cotangent}).items()
            }
            program = jax.jit(partial(everything, replace(SMALL_BLOCKS, few_scores=2**20)))
            results = program({key: tensors[key] for key in arrays}, tensors["cotangent"])
            return {key: np.asarray(x) for key, x in results.items()}

    def shard(key, x):
        of_heads = (
            "tensor" if key in "qc" or spec.num_kv_heads % shape.get("tensor", 1) == 0 else None
        )
        x = jnp.asarray(x.astype(np.float32))
        return jax.device_put(
            x, on(mesh, "data", of_heads, "sequence") if key in "qkvc" else on(mesh)
        )

    kernel = ContextParallel("sequence", SMALL_BLOCKS) if kind == "automatic" else SMALL_BLOCKS
    with using(mesh):
        sharded, cotangent_on_mesh = (
            {key: shard(key, x) for key, x in arrays.items()},
            shard("c", cotangent),
        )
        if "mask" in fixed:
            fixed["mask"] = jax.device_put(fixed["mask"], on(mesh))
        rolled = jax.device_put(
            jnp.roll(arrays["k"].astype(np.float32), 8, axis=2), sharded["k"].sharding
        )
        program = compiled(partial(everything, kernel), sharded, cotangent_on_mesh)
        actual, swapped = (
            {
                key: np.asarray(x)
                for key, x in program({**sharded, "k": k}, cotangent_on_mesh).items()
            }
            for k in (sharded["k"], rolled)
        )
        sent = sent_by(compiled(partial(forward, kernel), sharded)), sent_by(program)
    fixed.update({"mask": jnp.asarray(np.asarray(fixed["mask"]))} if "mask" in fixed else {})
    right = undivided(np.float64), undivided(np.float32)
    return [mismatch(actual, *right), *sent, mismatch(swapped, *right)]


# ---- Layers --------------------------------------------------------------------------------------


def compare_plans():
    """Return the number of passed stages in `mha-parity mesh` of cases with divided tokens, and the
    errors.
    """
    results = {}
    width = parity.CASES["norm-width"]
    width = replace(
        width,
        spec=replace(width.spec, fused_qkv=False, v_norm=Norm("layer", over="width", bias=True)),
    )
    for plan, case in (
        (MeshPlan(tensor=2, sequence=3), width),
        (MeshPlan(data=2, sequence=3, axes="explicit"), parity.CASES["norm-width"]),
    ):
        report = run_on_mesh([case], ["jax"], plan, with_gradients=True)
        wrong = [f"{failure.case} {failure.stage}: {failure.reason}" for failure in report.failed]
        wrong += [
            f"{program.case} {program.program}: {program.counted}" for program in report.needless
        ]
        results[f"{plan} {plan.axes}"] = [report.summary["passed"], wrong]
    return results


def generated(kind):
    """Return the error and the collectives of a ragged prompt and 32 steps over a cache with
    divided slots.
    """
    spec = AttentionSpec(64, 8, num_kv_heads=4, rope=Rope(10000.0), sinks=True, window_size=21)
    mesh = mesh_of(kind, data=2, slots=4)
    x = np.random.default_rng(0).standard_normal((4, 48, 64))
    lengths = [np.array([16, 3, 9, 0], np.int32), *np.ones((32, 4), np.int32)]
    sent, drawn = [], mha_jax.MultiHeadAttentionWithCache(spec, rngs=nnx.Rngs(0))

    def outputs(dtype, shard=None, shard_input=jnp.asarray):
        with jax.enable_x64(dtype == np.float64):
            module = nnx.clone(drawn)
            nnx.update(
                module, jax.tree.map(lambda x: x.astype(dtype), nnx.state(module, nnx.Param))
            )
            module.kernel, cache = SMALL_BLOCKS, module.init_cache(4, 64)
            if shard is not None:
                module, cache = shard(module, cache)
            graph, state = nnx.split(module)
            programs = {}
            outputs, begin = {}, 0
            for index, new in enumerate(lengths):
                end = begin + (16 if index == 0 else 1)
                arguments = (
                    state,
                    shard_input(x[:, begin:end].astype(dtype)),
                    cache,
                    shard_input(new),
                )
                if end - begin not in programs:

                    def call(state, x, cache, new, graph=graph):
                        return nnx.merge(graph, state)(x, cache, new_lengths=new)

                    programs[end - begin] = compiled(call, *arguments)
                output, cache = programs[end - begin](*arguments)
                outputs[f"step{index}"], begin = np.asarray(output), end
            if shard is not None:
                sent.extend(map(sent_by, programs.values()))
            return outputs | {"keys": np.asarray(cache.keys), "values": np.asarray(cache.values)}

    def shard(module, cache):
        return parallel.shard(module, mesh, tokens="slots"), parallel.shard_cache(
            cache, mesh, batch="data", slots="slots"
        )

    with using(mesh):
        actual = outputs(np.float32, shard, lambda x: jax.device_put(x, on(mesh, "data")))
    return [mismatch(actual, outputs(np.float64), outputs(np.float32)), *sent]


def mapped():
    """Return the largest difference of a ring in the user's own `shard_map`, with NaN in the
    padding of a sequence that ends within the tokens of a device, and in the queries of an empty
    one.
    """
    mesh, spec = mesh_of("explicit", sequence=4), heads(4, 1)
    q, k, v = (jax.random.normal(jax.random.key(i), (3, n, 32, 8)) for i, n in enumerate((4, 1, 1)))
    lengths = jnp.array([19, 32, 0])
    attend = partial(fused_attention(mha_jax), spec=spec, is_causal=True)
    expected = jax.jit(attend)(q, k, v, key_padding_lengths=lengths)[0]
    k, v = (x.at[0, :, 19:].set(jnp.nan) for x in (k, v))
    q = q.at[2].set(jnp.nan)
    spread = PartitionSpec(None, None, "sequence")

    def own(q, k, v, lengths):
        kernel = ContextParallel("sequence", SMALL_BLOCKS)
        return attend(q, k, v, key_padding_lengths=lengths, kernel=kernel)[0]

    mapped = jax.jit(
        jax.shard_map(own, mesh=mesh, in_specs=(*(spread,) * 3, PartitionSpec()), out_specs=spread)
    )
    sharded = [jax.device_put(x, NamedSharding(mesh, spread)) for x in (q, k, v)]
    lengths = jax.device_put(lengths, on(mesh))
    return float(jnp.abs(np.asarray(mapped(*sharded, lengths)) - expected).max())


def padded(kind):
    """Return the largest difference of gradients of a layer with divided tokens and NaN in padding,
    relative to the largest gradient; infinite if one is not finite.
    """
    mesh, lengths = mesh_of(kind, sequence=4), [19, 32]
    layer = mha_jax.MultiHeadSelfAttention(heads(4, 1), rngs=nnx.Rngs(0))
    x, is_real = (
        jax.random.normal(jax.random.key(9), (2, 32, 32)),
        np.arange(32)[None] < np.array(lengths)[:, None],
    )

    def gradients(layer, x, is_real):
        graph, state = nnx.split(layer)

        def loss(state, x, is_real):
            output = nnx.merge(graph, state)(x, key_padding_lengths=lengths, is_causal=True)
            return jnp.where(is_real[..., None], output**2, 0.0).sum()

        return [
            np.asarray(grad)
            for grad in jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(state, x, is_real))
        ]

    layer.kernel = SMALL_BLOCKS
    expected = gradients(layer, x, is_real)
    with using(mesh):
        parallel.shard(layer, mesh, tokens="sequence")
        sharded = [
            jax.device_put(x_or_mask, on(mesh, None, "sequence"))
            for x_or_mask in (x.at[0, 19:].set(jnp.nan), is_real)
        ]
        actual = gradients(layer, *sharded)
    if not all(np.isfinite(grad).all() for grad in actual):
        return math.inf
    differences = [
        np.abs(ours - theirs).max() for ours, theirs in zip(actual, expected, strict=True)
    ]
    return float(max(differences) / max(np.abs(grad).max() for grad in expected))


# ---- Costs ---------------------------------------------------------------------------------------


def grown():
    """Return temporary memory, bytes sent and bytes expected by formulas, on 2 and on 8 devices."""
    spec, sizes = AttentionSpec(256, 8, num_kv_heads=8), {}
    for name, how, placement, passes in (
        ("data", {}, ("x",), False),
        ("tensor", {"heads": "x"}, (), False),
        ("heads for tokens", {"tokens": "x"}, (None, "x"), False),
        ("ring", {"tokens": "x"}, (None, "x"), True),
    ):
        batch, length = (8, 512) if name == "data" else (1, 2048)
        rows = []
        for count in (2, 8):
            mesh = mesh_of("automatic", x=count)
            layer = nnx.eval_shape(lambda: mha_jax.MultiHeadSelfAttention(spec, rngs=nnx.Rngs(0)))
            graph, state = nnx.split(parallel.shard(layer, mesh, **how))

            def forward(state, x, graph=graph, passes=passes):
                layer = nnx.merge(graph, state)
                blocks = FusedAttention(few_scores=0)
                is_divided = isinstance(layer.kernel, ContextParallel)
                layer.kernel = (
                    replace(layer.kernel, kernel=blocks, passes_keys=passes)
                    if is_divided
                    else blocks
                )
                return layer(x, is_causal=True)

            x = jax.ShapeDtypeStruct(
                (batch, length, 256), jnp.float32, sharding=on(mesh, *placement)
            )
            program = compiled(forward, state, x)
            sent = [
                collective
                for collective in collectives_in(program.as_text())
                if not collective.is_of_flags
            ]
            expected = cost_of(spec, name, count, batch=batch, tokens=length, itemsize=4).forward
            rows.append(
                [
                    program.memory_analysis().temp_size_in_bytes,
                    sum(collective.nbytes * collective.times for collective in sent),
                    sum(collective.nbytes * collective.times for collective in expected),
                ]
            )
        sizes[name] = rows
    return sizes


def rejected():
    """Return the errors for tokens that cannot be divided."""
    mesh, x = mesh_of("automatic", sequence=4), jnp.zeros((1, 4, 30, 8))
    errors = {}
    for name, array, axis in (
        ("uneven", jax.device_put(x, on(mesh)), "sequence"),
        ("unknown", jax.device_put(x, on(mesh)), "tokens"),
        ("undivided", x, "sequence"),
    ):
        try:
            fused_attention(mha_jax)(
                array, array, array, kernel=ContextParallel(axis, SMALL_BLOCKS)
            )
        except ValueError as error:
            errors[name] = str(error)
    return errors


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    wanted = sys.argv[1:]
    results = {
        "attended": {name: attended(name) for name in ATTENTION if not wanted or name in wanted},
    }
    if not wanted:
        results |= {
            "compared": compare_plans(),
            "generated": {kind: generated(kind) for kind in KINDS},
            "mapped": mapped(),
        }
        results |= {"padded": {kind: padded(kind) for kind in KINDS}}
        results |= {"grown": grown(), "rejected": rejected()}
    print(json.dumps(results))
