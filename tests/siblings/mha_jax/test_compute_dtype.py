"""The dtype of computation in JAX, if it differs from the weights': the same bits as weights
cast beforehand.
"""

from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.input_errors import rejects
from helpers.samples import sample

import mha_jax
from mha_spec import AttentionSpec, Gate, Latent, Norm, RelativeBias, Rope

DTYPE = jnp.bfloat16
SPECS = {
    "biases-gqa-sinks": AttentionSpec(16, 4, num_kv_heads=2, sinks=True, rope=Rope()),
    "norms-gate-table": AttentionSpec(
        16,
        2,
        qk_norm=Norm("rms"),
        gate=Gate(),
        relative_bias=RelativeBias(num_buckets=8, max_distance=16),
    ),
}
LATENTS = AttentionSpec(
    16, 2, head_dim=8, rope=Rope(rotary_dim=4, rotated="last"), latent=Latent(kv_rank=6, rope_dim=4)
)
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def layers(kind, spec):
    """Return a float32 layer that computes in bfloat16, a layer with cast weights, and the weights
    of both.
    """
    layer = kind(spec, dtype=DTYPE, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    weights = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32),
        nnx.to_pure_dict(nnx.state(layer, nnx.Param)),
    )
    by_hand = kind(spec, param_dtype=DTYPE, rngs=nnx.Rngs(0))
    narrow = cast(weights)
    for module, values in ((layer, weights), (by_hand, narrow)):
        state = nnx.state(module, nnx.Param)
        nnx.replace_by_pure_dict(state, values)
        nnx.update(module, state)
    return layer, by_hand, weights, narrow


def cast(tree):
    return jax.tree.map(lambda x: x.astype(DTYPE), tree)


def tokens(seq_len=5):
    return jnp.asarray(np.random.default_rng(2).standard_normal((2, seq_len, 16)), jnp.float32)


def assert_same(actual, expected):
    for x, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == other.dtype
        np.testing.assert_array_equal(x, other)


@sample(need_weights=[False])
@each_spec
@pytest.mark.parametrize("need_weights", [False, True])
def test_compute_dtype_equals_cast_weights(spec, need_weights):
    """A layer and function with float32 weights and dtype=bfloat16 give the bits of weights and
    inputs cast beforehand.
    """
    layer, by_hand, weights, narrow = layers(mha_jax.MultiHeadAttention, spec)
    x, bias = tokens(), jnp.asarray(np.random.default_rng(3).standard_normal((5, 5)), jnp.float32)
    options = {"is_causal": True, "need_weights": need_weights}
    expected = by_hand(cast(x), bias=cast(bias), **options)
    assert expected[0].dtype == DTYPE
    assert_same(layer(x, bias=bias, **options), expected)
    assert_same(
        mha_jax.multi_head_attention(x, weights, spec, bias=bias, dtype=DTYPE, **options), expected
    )
    assert_same(
        mha_jax.multi_head_attention(cast(x), narrow, spec, bias=cast(bias), **options), expected
    )


@each_spec
def test_gradients_have_dtype_of_weights(spec):
    """Gradients of float32 weights are float32, with the bits of the bfloat16 computation."""
    _, _, weights, narrow = layers(mha_jax.MultiHeadAttention, spec)

    def loss(weights, x, dtype):
        return (
            mha_jax.multi_head_attention(x, weights, spec, dtype=dtype)[0].astype(jnp.float32).sum()
        )

    actual = jax.grad(loss)(weights, tokens(), DTYPE)
    expected = jax.grad(loss)(narrow, cast(tokens()), None)
    assert_same(actual, jax.tree.map(lambda x: x.astype(jnp.float32), expected))


def test_caches_have_compute_dtype():
    """Outputs and caches of a bfloat16 computation have the bits of cast weights; a given cache
    dtype is used.
    """
    spec = SPECS["biases-gqa-sinks"]
    layer, by_hand, weights, narrow = layers(mha_jax.MultiHeadAttentionWithCache, spec)
    x, caches = tokens(), [module.init_cache(2, 8) for module in (layer, by_hand, layer, by_hand)]
    expected = by_hand(cast(x), caches[1])
    assert_same(layer(x, caches[0]), expected)
    call = mha_jax.multi_head_attention_with_cache
    assert_same(call(x, weights, spec, caches[2], dtype=DTYPE), expected)
    assert_same(call(cast(x), narrow, spec, caches[3]), expected)
    assert layer.init_cache(2, 8, jnp.float32).keys.dtype == jnp.float32


@sample(absorb=[True])
@pytest.mark.parametrize("absorb", [False, True])
def test_latents_have_compute_dtype(absorb, monkeypatch):
    """Outputs and latent caches, absorbed or expanded, have the bits of cast weights."""
    monkeypatch.setattr(AttentionSpec, "absorbs", lambda *_: absorb)
    layer, by_hand, weights, _ = layers(mha_jax.MultiHeadLatentAttention, LATENTS)
    x, caches = tokens(), [module.init_cache(2, 8) for module in (layer, by_hand, layer)]
    expected = by_hand(cast(x), caches[1])
    assert_same(layer(x, caches[0]), expected)
    assert_same(
        mha_jax.multi_head_latent_attention(x, weights, LATENTS, caches[2], dtype=DTYPE), expected
    )


def test_replaced_projection_is_used():
    """A layer with dtype=bfloat16 and a float32 projection of a different class returns
    bfloat16.
    """
    layer = mha_jax.MultiHeadSelfAttention(16, 2, dtype=DTYPE, rngs=nnx.Rngs(0))
    layer.k_proj = nnx.Linear(16, 16, rngs=nnx.Rngs(1))  # computes in the dtype of its weights
    with jax.numpy_dtype_promotion("standard"):  # required by nnx.Linear
        assert layer(tokens()).dtype == DTYPE


def test_repr_shows_compute_dtype():
    """The repr of a layer shows the dtype of its computation."""
    layer = mha_jax.MultiHeadSelfAttention(16, 2, dtype=DTYPE, rngs=nnx.Rngs(0))
    assert repr(layer) == f"MultiHeadSelfAttention({layer.spec!r}, dtype=bfloat16)"


def test_integer_compute_dtype_raises():
    """dtype=int32 raises TypeError in modules and functions."""
    is_rejected = rejects("dtype", dtype=jnp.dtype(jnp.int32)).of(TypeError)
    with is_rejected:
        mha_jax.MultiHeadAttention(16, 2, dtype=jnp.int32, rngs=nnx.Rngs(0))
    layer = mha_jax.MultiHeadAttention(16, 2, rngs=nnx.Rngs(0))
    weights = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    with is_rejected:
        mha_jax.multi_head_attention(tokens(), weights, layer.spec, dtype=jnp.int32)


def test_same_input_is_projected_once(monkeypatch):
    """Passing one array as query, key and value projects it as often as passing it once."""
    layer = mha_jax.MultiHeadAttention(16, 2, fused_qkv=True, dtype=DTYPE, rngs=nnx.Rngs(0))
    x = tokens()
    assert str(jax.make_jaxpr(lambda x: layer(x, x, x)[0])(x)).count("dot_general") == str(
        jax.make_jaxpr(lambda x: layer(x)[0])(x)
    ).count("dot_general")


def test_weights_can_be_any_mapping():
    """Weights in read-only mappings give the same bits."""
    layer = mha_jax.MultiHeadAttention(16, 2, rngs=nnx.Rngs(0))
    weights = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    expected, _ = mha_jax.multi_head_attention(tokens(), weights, layer.spec, dtype=DTYPE)
    read_only = MappingProxyType(
        {name: MappingProxyType(leaves) for name, leaves in weights.items()}
    )
    actual, _ = mha_jax.multi_head_attention(tokens(), read_only, layer.spec, dtype=DTYPE)
    assert_same(actual, expected)
