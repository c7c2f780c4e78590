"""Norms of queries, keys and values: compared with results on paper, and in layers."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

import parity
from mha_spec import AttentionSpec, Norm, Rope

TINY = {"eps": 1e-12}
X = np.array([[[[3.0, 4.0]]]], np.float32)
RMS = np.array([3.0, 4.0]) / np.sqrt(12.5)
LAYER = np.array([-1.0, 1.0])
EPSILON = np.finfo(np.float32).eps
W, B = np.array([2.0, 0.5]), np.array([1.0, -1.0])

SPECS = {
    "head": AttentionSpec(16, 4, num_kv_heads=2, rope=Rope(), qk_norm=Norm(), v_norm=Norm("layer")),
    "width": AttentionSpec(
        16, 4, num_kv_heads=2, fused_qkv=True, qk_norm=Norm(over="width", weight="1+w")
    ),
    "per head": AttentionSpec(
        16, 4, rope=Rope(), qk_norm=Norm("layer", per_head=True, bias=True, after_rope=True)
    ),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))


def normed(sibling, x, norm, *parameters, dtype=np.float32):
    arrays = [None if p is None else sibling.array(np.asarray(p, dtype)) for p in parameters]
    return sibling.numpy(sibling.package.apply_norm(sibling.array(x.astype(dtype)), norm, *arrays))


# ---- On paper ------------------------------------------------------------------------------------


@sample(jax=1)
@pytest.mark.parametrize(
    ("norm", "parameters", "expected"),
    [
        (Norm(weight=None, **TINY), [], RMS),
        (Norm("layer", weight=None, **TINY), [], LAYER),
        (Norm(**TINY), [W], W * RMS),
        (Norm(weight="1+w", **TINY), [W], (1 + W) * RMS),
        (Norm("layer", bias=True, **TINY), [W, B], W * LAYER + B),
        (Norm(weight=None, eps=3.5), [], np.array([3.0, 4.0]) / 4.0),
        (Norm("layer", weight=None, eps=0.75), [], np.array([-0.5, 0.5])),
    ],
)
def test_two_features_are_normalized(sibling, norm, parameters, expected):
    """Norms of two features match results on paper: RMS and layer norm, with
    weights, biases and `eps`.
    """
    actual = normed(sibling, X, norm, *parameters)[0, 0, 0]
    assert np.abs(actual - expected).max() <= 4 * EPSILON * np.abs(expected).max()


def test_per_head_norm_weights(sibling):
    """With `per_head=True`, each head is multiplied by its own weight."""
    weight = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    heads = np.broadcast_to(X, (2, 3, 5, 2))
    actual = normed(sibling, heads, Norm(per_head=True, **TINY), weight)
    assert np.abs(actual - weight[:, None] * RMS).max() <= 16 * EPSILON


def test_norm_over_the_whole_width(sibling):
    """A norm over the width divides by the root mean square of all features of a token."""
    tokens = np.array([[[3.0, 4.0, 0.0, 0.0]]], np.float32)
    actual = normed(sibling, tokens, Norm(over="width", weight=None, **TINY))
    assert np.abs(actual - np.array([3.0, 4.0, 0.0, 0.0]) / 2.5).max() <= 4 * EPSILON


def test_half_precision_norm_rounds_once(sibling, rng):
    """In float16, a norm is the exact result, rounded once, in more than 99.9% of elements; Llama's
    variant, which rounds before the weight, is off by more.
    """
    x, weight = (rng.standard_normal(shape).astype(np.float16) for shape in ((1, 2, 64, 32), (32,)))
    wide = x.astype(np.float64)
    exact = (
        wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
    )
    actual = normed(sibling, x, Norm(), weight, dtype=np.float16)
    assert actual.dtype == np.float16
    nearest = exact.astype(np.float16)
    assert (
        np.abs(actual.astype(np.float64) - nearest).max()
        <= np.spacing(np.abs(nearest).max()).astype(np.float64) / 2
    )
    assert (actual == nearest).mean() > 0.999


def test_norm_of_integers_raises(sibling):
    """`apply_norm` raises an error for integers."""
    with rejects_type("x", {"x.dtype": ...}):
        sibling.package.apply_norm(
            sibling.array(np.ones((1, 1, 1, 2), np.int32)), Norm(weight=None)
        )


# ---- In layers -----------------------------------------------------------------------------------


def test_random_norm_weights_are_not_trivial():
    """The factors of random norm weights are at least 0.5 and differ from 1 by at least 0.2."""
    for weight, offset in (("w", 0.0), ("1+w", 1.0)):
        drawn = parity.random_weights(AttentionSpec(64, 2, qk_norm=Norm(weight=weight)))[
            "q_norm.weight"
        ]
        assert ((np.abs(drawn + offset - 1.0) >= 0.2) & (drawn + offset >= 0.5)).all()


@sample(jax=1)
@every_spec
def test_norms_change_the_output(sibling, spec, rng):
    """Without its norms, a layer has a different output, by more than 0.01."""
    x = sibling.array(rng.standard_normal((2, 5, 16)).astype(np.float32))
    weights = parity.random_weights(spec)
    bare = replace(spec, qk_norm=None, v_norm=None)
    left = {name: w for name, w in weights.items() if name not in spec.parameters}
    outputs = [
        sibling.numpy(
            parity.load_into(
                sibling.module("MultiHeadAttention", spec_of_layer), weights_of_layer, spec_of_layer
            )(x)[0]
        )
        for spec_of_layer, weights_of_layer in ((spec, weights), (bare, left))
    ]
    assert np.abs(outputs[0] - outputs[1]).max() > 0.01


@sample(jax=0)
@every_spec
def test_norms_with_cache_match_one_pass(sibling, spec, rng):
    """With norms and a cache, sequences of different lengths, in a prompt and then token by token,
    have the outputs of one causal pass.
    """
    x = rng.standard_normal((3, 6, 16)).astype(np.float32)
    weights, lengths = parity.random_weights(spec), [3, 1, 2]
    plain = parity.load_into(sibling.module("MultiHeadAttention", spec), weights, spec)
    expected = sibling.numpy(plain(sibling.array(x), is_causal=True)[0])
    module = parity.load_into(sibling.module("MultiHeadAttentionWithCache", spec), weights, spec)
    output, cache = module(
        sibling.array(x[:, :3]), module.init_cache(3, 6), new_lengths=sibling.array(lengths)
    )
    actual = [sibling.numpy(output)[b, : lengths[b]] for b in range(3)]
    for step in range(3):
        tokens = np.stack([x[b, [lengths[b] + step]] for b in range(3)])
        output, cache = module(sibling.array(tokens), cache)
        actual = [np.concatenate([actual[b], sibling.numpy(output)[b]]) for b in range(3)]
    for b, rows in enumerate(actual):
        assert (
            np.abs(rows - expected[b, : len(rows)]).max() <= 16 * EPSILON * np.abs(expected).max()
        )


def test_missing_norm_weight_raises(sibling, rng):
    """Weights without the norm of the keys raise an error that lists it as missing."""
    spec = SPECS["head"]
    x = sibling.array(rng.standard_normal((1, 3, 16)).astype(np.float32))
    weights = sibling.backend
    other_weights = {
        name: w for name, w in parity.random_weights(spec).items() if name != "k_norm.weight"
    }
    container = (
        weights.to_params(other_weights, spec)
        if sibling.name == "jax"
        else weights.to_state_dict(other_weights, spec)
    )
    with rejects("weights", missing=["k_norm.weight"], unexpected=[]):
        sibling.package.multi_head_attention(x, container, spec)
