"""A program that traces unsharded layers of mha_jax before and after the process creates a mesh.

It prints the results that test_undivided.py of mha_jax checks, as JSON. It runs in its own process,
without an earlier mesh.
"""

import json
import os
import re

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mha_jax
from mha_jax import parallel
from mha_jax.kernels.fused import FusedAttention
from mha_spec import AttentionSpec, Gate, Latent, Norm, RelativeBias, Rope

SPECS = {
    "gqa": AttentionSpec(
        64, 4, num_kv_heads=2, rope=Rope(10000.0), sinks=True, gate=Gate(), qk_norm=Norm()
    ),
    "relative": AttentionSpec(
        64, 4, relative_bias=RelativeBias(), window_size=7, fused_qkv=True, soft_cap=30.0
    ),
    "latent": AttentionSpec(
        64, 4, head_dim=24, latent=Latent(16, 8), rope=Rope(rotary_dim=8, rotated="last")
    ),
}
BLOCKS = FusedAttention(few_scores=1, queries=8, keys=8, last_keys=4)
X = jnp.ones((2, 16, 64))


def layer_of(spec):
    """Return a layer that computes in blocks, and one with a cache."""
    cached = (
        mha_jax.MultiHeadAttentionWithCache
        if spec.latent is None
        else mha_jax.MultiHeadLatentAttention
    )
    layers = [kind(spec, rngs=nnx.Rngs(0)) for kind in (mha_jax.MultiHeadAttention, cached)]
    for layer in layers:
        layer.kernel = BLOCKS
    return layers


def calls_of(spec):
    """Return functions of x: each path of a layer, its gradient, a prompt and a step; only two
    unless "gqa".
    """
    layer, cached = layer_of(spec)

    def output(x, **options):
        return layer(x, is_causal=True, key_padding_lengths=jnp.array([16, 9]), **options)[0]

    calls = {
        "forward": output,
        "with weights": lambda x: layer(x, need_weights=True),
        "gradient": jax.grad(lambda x: output(x).sum()),
        "prompt": lambda x: cached(x, cached.init_cache(2, 32)),
        "step": lambda x: cached(x[:, :1], cached.init_cache(2, 32)),
    }
    return calls if spec is SPECS["gqa"] else {what: calls[what] for what in ("gradient", "step")}


def programs():
    """Return the jaxpr of each function and its input to XLA."""
    results = {}
    for name, spec in SPECS.items():
        for what, call in calls_of(spec).items():
            traced = jax.jit(call).trace(X)
            jaxpr = re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))  # memory address of an object
            results[f"{name} {what}"] = [jaxpr, traced.lower().as_text()]
    return results


def divided():
    """Return the same for sharded layers, which must differ: by tokens, and by heads with explicit
    axes.
    """
    results = {}
    for what, kind, along in (
        ("tokens", AxisType.Auto, (None, "d")),
        ("heads", AxisType.Explicit, ()),
    ):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
        layer = parallel.shard(layer_of(SPECS["gqa"])[0], mesh, **{what: "d"})
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec(*along)))
        with jax.set_mesh(mesh):

            def call(x, layer=layer):
                return layer(x, is_causal=True)[0]

            jax.block_until_ready(jax.jit(call)(x))
            results[what] = [str(jax.make_jaxpr(call)(x)), jax.jit(call).lower(x).as_text()]
    return results


if __name__ == "__main__":
    before = programs()
    control = divided()
    print(json.dumps({"before": before, "divided": control, "after": programs()}))
