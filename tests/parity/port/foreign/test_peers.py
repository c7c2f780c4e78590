"""Our layers, with copied weights, match the attention layers of their frameworks."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.samples import sample

import parity
from parity import to_jax, to_numpy, to_torch
from parity.port.foreign import load_adapter

# Sums of 64 products of order 1 in float32: over many seeds, two summation orders differ by 1e-7 to
# 7e-7.
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
RANDOM_MASK = (np.random.default_rng(3).random((2, 8, 7, 9)) < 0.4) & (
    np.arange(9) > 0
)  # no empty row
CAUSAL = ~np.tri(7, dtype=bool)[None, None]


@pytest.fixture
def weights(spec):
    return parity.random_weights(spec)


@pytest.fixture
def inputs(spec, rng):
    """Seven queries and nine keys for each of two sequences."""
    query, key = (
        rng.standard_normal((2, *shape)).astype(np.float32)
        for shape in ((7, spec.d_in), (9, spec.d_kv))
    )
    return query, key


def ours(sibling, spec, weights, inputs, need_weights=True, **options) -> Any:
    """Return output and attention weights of our module."""
    module = parity.load_into(sibling.module("MultiHeadAttention", spec), weights, spec)
    options = {name: sibling.array(x) for name, x in options.items()}
    results = module(*(sibling.array(x) for x in inputs), need_weights=need_weights, **options)
    return [x if x is None else sibling.numpy(x) for x in results]


def of_peer(name, spec, weights, inputs, **options) -> Any:
    """Return output and attention weights of another library's layer, built and called by its
    adapter.
    """
    adapter = load_adapter(name)
    convert = to_torch if name.startswith("torch") else to_jax
    layer = parity.load_into(adapter.make(spec), weights, spec)
    query, key = (convert(x) for x in inputs) if len(inputs) == 2 else [convert(*inputs)] * 2
    options = {name: convert(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return [
        x if x is None else to_numpy(x) for x in adapter.call(layer, query, key, key, **options)
    ]


of_torch = partial(of_peer, "torch.nn.MultiheadAttention")
of_linen = partial(of_peer, "flax.linen.MultiHeadDotProductAttention")
of_nnx = partial(of_peer, "flax.nnx.MultiHeadAttention")
of_flax = pytest.mark.parametrize("peer", [of_linen, of_nnx], ids=["linen", "nnx"])


# ---- torch.nn.MultiheadAttention -----------------------------------------------------------------


@sample(jax=1)
@every_path
@every_spec
def test_output_matches_torch(sibling, spec, weights, inputs, need_weights):
    """Outputs with and without attention weights match torch's layer within 1e-6."""
    output, _ = ours(sibling, spec, weights, inputs, need_weights)
    expected, _ = of_torch(spec, weights, inputs)
    assert np.abs(output - expected).max() <= TOLERANCE


@sample(jax=1)
@every_spec
def test_attention_weights_match_torch(sibling, spec, weights, inputs):
    """Attention weights per head match torch's layer within 1e-6."""
    _, attn_weights = ours(sibling, spec, weights, inputs)
    _, expected = of_torch(spec, weights, inputs, need_weights=True)
    assert np.abs(attn_weights - expected).max() <= TOLERANCE


@sample(jax=1)
@every_path
@pytest.mark.parametrize("spec", [BIASES, SPECS["cross"]], ids=["self", "cross"])
def test_output_with_padding_matches_torch(sibling, spec, weights, inputs, need_weights):
    """Outputs with padding match torch's layer within 1e-6, for
    self-attention and cross-attention.
    """
    output, _ = ours(sibling, spec, weights, inputs, need_weights, mask=PADDING[:, None, None])
    expected, _ = of_torch(spec, weights, inputs, padding=PADDING)  # True also means masked there
    assert np.abs(output - expected).max() <= TOLERANCE


@sample(jax=1)
@every_path
@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_mask_per_head_matches_torch(sibling, spec, weights, inputs, need_weights):
    """Outputs with a random mask per head match torch's layer within 1e-6."""
    output, _ = ours(sibling, spec, weights, inputs, need_weights, mask=RANDOM_MASK)
    expected, _ = of_torch(spec, weights, inputs, mask=RANDOM_MASK)
    assert np.abs(output - expected).max() <= TOLERANCE


@sample(jax=1)
@every_path
@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_bias_per_head_matches_torch(sibling, spec, weights, inputs, need_weights, rng):
    """Outputs with a bias per head match torch's layer with an additive mask within 1e-6."""
    bias = rng.standard_normal((2, 8, 7, 9)).astype(np.float32)
    output, _ = ours(sibling, spec, weights, inputs, need_weights, bias=bias)
    expected, _ = of_torch(spec, weights, inputs, mask=bias)
    assert np.abs(output - expected).max() <= TOLERANCE


@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_causal_self_attention_matches_torch(sibling, spec, weights, inputs):
    """Causal self-attention matches torch's layer with a causal mask within 1e-6."""
    query, _ = inputs
    module = parity.load_into(sibling.module("MultiHeadSelfAttention", spec), weights, spec)

    output = sibling.numpy(module(sibling.array(query), is_causal=True))

    expected, _ = of_torch(spec, weights, (query, query), mask=CAUSAL)
    assert np.abs(output - expected).max() <= TOLERANCE


# ---- Flax ----------------------------------------------------------------------------------------


@sample(12, jax=1)
@of_flax
@every_path
@every_spec
def test_output_matches_flax(sibling, peer, spec, weights, inputs, need_weights):
    """Outputs with and without attention weights match linen's and nnx's layers within 1e-6."""
    output, _ = ours(sibling, spec, weights, inputs, need_weights)
    expected, _ = peer(spec, weights, inputs)
    assert np.abs(output - expected).max() <= TOLERANCE


@sample(jax=1)
@every_spec
def test_attention_weights_match_flax(sibling, spec, weights, inputs):
    """Attention weights match linen's layer within 1e-6."""
    _, attn_weights = ours(sibling, spec, weights, inputs)
    _, expected = of_linen(spec, weights, inputs, need_weights=True)
    assert np.abs(attn_weights - expected).max() <= TOLERANCE


@sample(jax=1)
@of_flax
@every_path
@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_output_with_mask_matches_flax(sibling, peer, spec, weights, inputs, need_weights):
    """Outputs with a random mask match linen's and nnx's
    layers, which show keys by True, within 1e-6.
    """
    output, _ = ours(sibling, spec, weights, inputs, need_weights, mask=RANDOM_MASK)
    expected, _ = peer(spec, weights, inputs, mask=~RANDOM_MASK)  # True = attend there
    assert np.abs(output - expected).max() <= TOLERANCE


@sample(jax=1)
@every_path
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_grouped_heads_match_flax(sibling, rng, num_kv_heads, need_weights):
    """Outputs with 1, 2 and 4 key/value heads match nnx's layer
    within 1e-6 of the largest output.
    """
    spec = parity.AttentionSpec(64, 8, num_kv_heads=num_kv_heads)
    weights = parity.random_weights(spec)
    query = rng.standard_normal((2, 7, 64)).astype(np.float32)

    output, _ = ours(sibling, spec, weights, (query,), need_weights)

    expected, _ = of_nnx(spec, weights, (query,))  # linen has no grouped heads
    # Narrower key and value projections have larger weights: outputs reach 3, and rounding errors
    # scale with them.
    assert np.abs(output - expected).max() <= TOLERANCE * np.abs(expected).max()


@sample(jax=1)
@of_flax
@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_causal_self_attention_matches_flax(sibling, peer, spec, weights, inputs):
    """Causal self-attention matches linen's and nnx's layers with a causal mask within 1e-6."""
    query, _ = inputs
    module = parity.load_into(sibling.module("MultiHeadSelfAttention", spec), weights, spec)

    output = sibling.numpy(module(sibling.array(query), is_causal=True))

    expected, _ = peer(spec, weights, (query,), mask=~CAUSAL)
    assert np.abs(output - expected).max() <= TOLERANCE


@sample(jax=1)
@of_flax
@pytest.mark.parametrize("spec", [BIASES], ids=["biases"])
def test_exchanged_q_and_k_differ_from_flax(sibling, peer, spec, weights, inputs):  # control
    """As a control, exchanged projections of q and k differ from Flax by more than 1e-4."""
    exchanged = {
        **weights,
        "q_proj.weight": weights["k_proj.weight"],
        "k_proj.weight": weights["q_proj.weight"],
    }
    output, _ = ours(sibling, spec, exchanged, inputs)
    expected, _ = peer(spec, weights, inputs)
    assert np.abs(output - expected).max() > 100 * TOLERANCE
