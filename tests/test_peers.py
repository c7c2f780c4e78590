"""With copied weights the siblings equal the attention layers that the frameworks come with."""

from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import parity

# Sums of 64 products of order 1 in float32: over many seeds two orders of summation differ by 1e-7 to 7e-7.
TOLERANCE = 1e-6

SPECS = {
    "biases": parity.AttentionSpec(64, 8),
    "no-biases": parity.AttentionSpec(64, 8, qkv_bias=False, out_bias=False),
    "cross": parity.AttentionSpec(64, 8, d_kv=48),
    "cross-no-biases": parity.AttentionSpec(64, 8, d_kv=48, qkv_bias=False, out_bias=False),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
every_path = pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
BIASES = SPECS["biases"]
PADDING = np.array([[False] * 9, [False] * 5 + [True] * 4])
RANDOM_MASK = (np.random.default_rng(3).random((2, 8, 7, 9)) < 0.4) & (np.arange(9) > 0)  # no row is empty


@pytest.fixture
def weights(spec):
    return parity.random_weights(spec)


@pytest.fixture
def inputs(spec, rng):
    """Seven queries, and nine keys for two sequences."""
    query, key = (rng.standard_normal((2, *shape)).astype(np.float32) for shape in ((7, spec.d_in), (9, spec.d_kv)))
    return query, key


def ours(sibling, spec, weights, inputs, need_weights=True, **options) -> Any:
    """Output and attention weights of the sibling's module."""
    module = parity.load_into(sibling.module("MultiHeadAttention", spec), weights)
    options = {name: sibling.array(x) for name, x in options.items()}
    results = module(*(sibling.array(x) for x in inputs), need_weights=need_weights, **options)
    return [x if x is None else sibling.numpy(x) for x in results]


def of_torch(spec, weights, inputs, **options):
    """Output and attention weights of `torch.nn.MultiheadAttention`, which packs its weights if the widths allow it."""
    peer = torch.nn.MultiheadAttention(
        spec.d_model, spec.num_heads, bias=spec.qkv_bias, kdim=spec.d_kv, vdim=spec.d_kv, batch_first=True
    )
    kernels = {name: torch.from_numpy(x) for name, x in weights.items()}
    qkv = ("q_proj", "k_proj", "v_proj")
    state = {"out_proj.weight": kernels["out_proj.weight"]}
    if spec.d_kv == spec.d_model:
        state["in_proj_weight"] = torch.cat([kernels[f"{name}.weight"] for name in qkv])
    else:
        state |= {f"{name}_weight": kernels[f"{name}.weight"] for name in qkv}
    if spec.qkv_bias:
        state["in_proj_bias"] = torch.cat([kernels[f"{name}.bias"] for name in qkv])
        state["out_proj.bias"] = kernels["out_proj.bias"]
    peer.load_state_dict(state)
    options = {name: torch.from_numpy(x) for name, x in options.items()}
    query, key = (torch.from_numpy(x) for x in inputs)
    results = peer.eval()(query, key, key, average_attn_weights=False, **options)
    return [x.detach().numpy() for x in results]


def flax_params(spec, weights):
    """Weights as both layers of Flax hold them: kernels (in, N, H) and (N, H, out), biases (N, H) and (out,)."""
    heads = {"query": spec.num_heads, "key": spec.num_kv_heads, "value": spec.num_kv_heads, "out": spec.num_heads}
    params = {}
    for ours, theirs in {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}.items():
        shape = (heads[theirs], spec.head_dim)
        kernel = weights[f"{ours}.weight"].T
        params[theirs] = {"kernel": kernel.reshape(*shape, -1) if theirs == "out" else kernel.reshape(-1, *shape)}
        if f"{ours}.bias" in weights:
            bias = weights[f"{ours}.bias"]
            params[theirs]["bias"] = bias if theirs == "out" else bias.reshape(shape)
    return jax.tree.map(jnp.asarray, params)


def of_linen(spec, weights, inputs, **options) -> tuple[Any, Any]:
    """Output and attention weights of `flax.linen.MultiHeadDotProductAttention`."""
    peer = flax.linen.MultiHeadDotProductAttention(
        spec.num_heads, qkv_features=64, out_features=64, use_bias=spec.qkv_bias
    )
    params = {"params": flax_params(spec, weights)}
    inputs = (jnp.asarray(x) for x in inputs)
    output, state = peer.apply(params, *inputs, sow_weights=True, mutable="intermediates", **options)
    return output, state["intermediates"]["attention_weights"][0]


def of_nnx(spec, weights, inputs, **options) -> tuple[Any, None]:
    """Output of `flax.nnx.MultiHeadAttention`, which gives its attention weights by a deprecated way only."""
    sizes = {"num_kv_heads": spec.num_kv_heads, "in_kv_features": spec.d_kv}
    peer = nnx.MultiHeadAttention(
        spec.num_heads, spec.d_in, 64, 64, **sizes, use_bias=spec.qkv_bias, decode=False, rngs=nnx.Rngs(0)
    )
    nnx.update(peer, flax_params(spec, weights))
    return peer(*(jnp.asarray(x) for x in inputs), **options), None


of_flax = pytest.mark.parametrize("peer", [of_linen, of_nnx], ids=["linen", "nnx"])


# ---- torch.nn.MultiheadAttention -------------------------------------------------------------------------------------


@every_path
@every_spec
def test_output_equals_torch(sibling, spec, weights, inputs, need_weights):
    output, _ = ours(sibling, spec, weights, inputs, need_weights)
    expected, _ = of_torch(spec, weights, inputs)
    assert np.abs(output - expected).max() <= TOLERANCE


@every_spec
def test_attention_weights_of_each_head_equal_torch(sibling, spec, weights, inputs):
    _, attn_weights = ours(sibling, spec, weights, inputs)
    _, expected = of_torch(spec, weights, inputs)
    assert np.abs(attn_weights - expected).max() <= TOLERANCE


@every_path
@pytest.mark.parametrize("spec", [BIASES, SPECS["cross"]], ids=["self", "cross"])
def test_output_with_padding_equals_torch(sibling, spec, weights, inputs, need_weights):
    output, _ = ours(sibling, spec, weights, inputs, need_weights, mask=PADDING[:, None, None])
    expected, _ = of_torch(spec, weights, inputs, key_padding_mask=PADDING)  # True = masked there as well
    assert np.abs(output - expected).max() <= TOLERANCE


@every_path
@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_output_with_a_mask_of_each_head_equals_torch(sibling, spec, weights, inputs, need_weights):
    output, _ = ours(sibling, spec, weights, inputs, need_weights, mask=RANDOM_MASK)
    expected, _ = of_torch(spec, weights, inputs, attn_mask=RANDOM_MASK.reshape(16, 7, 9))
    assert np.abs(output - expected).max() <= TOLERANCE


@every_path
@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_output_with_a_bias_of_each_head_equals_torch(sibling, spec, weights, inputs, need_weights, rng):
    bias = rng.standard_normal((2, 8, 7, 9)).astype(np.float32)
    output, _ = ours(sibling, spec, weights, inputs, need_weights, bias=bias)
    expected, _ = of_torch(spec, weights, inputs, attn_mask=bias.reshape(16, 7, 9))
    assert np.abs(output - expected).max() <= TOLERANCE


@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_causal_self_attention_equals_torch(sibling, spec, weights, inputs):
    query, _ = inputs
    module = parity.load_into(sibling.module("MultiHeadSelfAttention", spec), weights)

    output = sibling.numpy(module(sibling.array(query), is_causal=True))

    expected, _ = of_torch(spec, weights, (query, query), attn_mask=np.triu(np.ones((7, 7), bool), k=1))
    assert np.abs(output - expected).max() <= TOLERANCE


# ---- Flax ------------------------------------------------------------------------------------------------------------


@of_flax
@every_path
@every_spec
def test_output_equals_flax(sibling, peer, spec, weights, inputs, need_weights):
    output, _ = ours(sibling, spec, weights, inputs, need_weights)
    expected, _ = peer(spec, weights, inputs)
    assert np.abs(output - expected).max() <= TOLERANCE


@every_spec
def test_attention_weights_equal_flax(sibling, spec, weights, inputs):
    _, attn_weights = ours(sibling, spec, weights, inputs)
    _, expected = of_linen(spec, weights, inputs)
    assert np.abs(attn_weights - expected).max() <= TOLERANCE


@of_flax
@every_path
@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_output_with_a_mask_equals_flax(sibling, peer, spec, weights, inputs, need_weights):
    output, _ = ours(sibling, spec, weights, inputs, need_weights, mask=RANDOM_MASK)
    expected, _ = peer(spec, weights, inputs, mask=jnp.asarray(~RANDOM_MASK))  # True = attend there
    assert np.abs(output - expected).max() <= TOLERANCE


@every_path
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_output_with_grouped_heads_equals_flax(sibling, rng, num_kv_heads, need_weights):
    spec = parity.AttentionSpec(64, 8, num_kv_heads=num_kv_heads)
    weights = parity.random_weights(spec)
    query = rng.standard_normal((2, 7, 64)).astype(np.float32)

    output, _ = ours(sibling, spec, weights, (query,), need_weights)

    expected, _ = of_nnx(spec, weights, (query,))  # linen has no grouped heads
    # Narrower key and value projections are drawn from larger numbers: outputs reach 3, and rounding grows along.
    assert np.abs(output - expected).max() <= TOLERANCE * np.abs(expected).max()


@of_flax
@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_causal_self_attention_equals_flax(sibling, peer, spec, weights, inputs):
    query, _ = inputs
    module = parity.load_into(sibling.module("MultiHeadSelfAttention", spec), weights)

    output = sibling.numpy(module(sibling.array(query), is_causal=True))

    expected, _ = peer(spec, weights, (query,), mask=flax.linen.make_causal_mask(jnp.ones((2, 7)), dtype=bool))
    assert np.abs(output - expected).max() <= TOLERANCE


@of_flax
@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_exchanged_projections_differ_from_flax(sibling, peer, spec, weights, inputs):  # the control
    exchanged = {**weights, "q_proj.weight": weights["k_proj.weight"], "k_proj.weight": weights["q_proj.weight"]}
    output, _ = ours(sibling, spec, exchanged, inputs)
    expected, _ = peer(spec, weights, inputs)
    assert np.abs(output - expected).max() > 100 * TOLERANCE
