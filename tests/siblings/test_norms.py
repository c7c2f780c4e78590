"""Norms of queries, keys and values in every implementation."""

import numpy as np
import pytest
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

import parity
from mha_spec import AttentionSpec, Norm, Rope

HEADS = (1, 2, 3, 32)
W, B = np.ones(32, np.float32), np.zeros(32, np.float32)
SPECS = {
    "head": AttentionSpec(16, 4, num_kv_heads=2, rope=Rope(), qk_norm=Norm(), v_norm=Norm("layer")),
    "width": AttentionSpec(
        16, 4, num_kv_heads=2, fused_qkv=True, qk_norm=Norm(over="width", weight="1+w")
    ),
    "per head": AttentionSpec(
        16, 4, rope=Rope(), qk_norm=Norm("layer", per_head=True, bias=True, after_rope=True)
    ),
    "both": AttentionSpec(
        24,
        2,
        fused_qkv=True,
        qk_norm=Norm(over="width"),
        v_norm=Norm("layer", per_head=True, bias=True, weight="1+w"),
    ),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))


@pytest.mark.parametrize(
    ("norm", "parameters", "input_error"),
    [
        (Norm(), [], rejects("weight", {"weight.shape": None})),
        (Norm(weight=None), [W], rejects("weight", {"weight.shape": ...})),
        (Norm(), [W[:3]], rejects("weight", {"weight.shape": ...})),
        (Norm(), [W, B], rejects("bias", {"bias.shape": ...})),
        (Norm(per_head=True), [W], rejects("weight", {"weight.shape": ...})),
        ("rms", [W], rejects_type("norm", norm="rms")),
    ],
    ids=["none", "unexpected", "shape", "bias", "heads", "kind"],
)
def test_norm_rejects_other_parameters(sibling, norm, parameters, input_error):
    """Parameters that a norm does not have, or of the wrong shape, raise an error."""
    x = sibling.array(np.ones(HEADS, np.float32))
    parameters = [sibling.stage_weight("norm", parameter) for parameter in parameters]
    with input_error:
        sibling.package.apply_norm(x, norm, *parameters)


@sample(jax=1)
@every_spec
def test_new_layer_multiplies_by_one(sibling, spec):
    """The norms of a new layer multiply by one and add nothing."""
    weights = parity.weights_of(sibling.module("MultiHeadAttention", spec))
    for name, shape in spec.parameters.items():
        is_one = name.endswith("weight") and spec.norms[name.split(".")[0]].weight != "1+w"
        assert np.array_equal(weights[name], np.full(shape, 1.0 if is_one else 0.0))


@sample(jax=1)
@every_spec
def test_weights_of_norms_return_exactly(sibling, spec):
    """Weights that were loaded into a layer with norms are returned bit for bit."""
    weights = parity.random_weights(spec, 3)
    weights_again = parity.weights_of(sibling.filled("MultiHeadAttention", spec, weights))
    assert list(weights_again) == list(weights)
    assert all(np.array_equal(weights_again[name], weights[name]) for name in weights)
