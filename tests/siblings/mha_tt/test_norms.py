"""Norms of queries, keys and values: the formula, and padded heads on a device."""

import numpy as np
import pytest
import ttnn
from helpers.tt.formulas import assert_close

import mha_tt
import parity
from mha_spec import Norm

pytestmark = pytest.mark.board


def exact(x, norm, weight=None, bias=None):
    """Return the norm in float64, from its formula."""
    x = np.asarray(x, np.float64)
    x = x - x.mean(axis=-1, keepdims=True) if norm.kind == "layer" else x
    y = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + norm.eps)
    y = y if weight is None else y * (weight + (norm.weight == "1+w"))
    return y if bias is None else y + bias


@pytest.mark.parametrize("rope", [None, parity.Rope()], ids=["padded after", "padded between"])
@pytest.mark.parametrize(
    "norm",
    [
        Norm(weight=None, eps=0.01),
        Norm(weight="1+w"),
        Norm("layer", weight=None),
        Norm("layer", bias=True, per_head=True, eps=0.01),
    ],
    ids=str,
)
def test_padding_of_heads_is_not_normalized(device, rng, norm, rope):
    """The norm of a padded head matches the formula over its features, and its padding remains
    0.
    """
    heads, size = 3, 12
    indices, padded = (
        mha_tt.feature_indices(size, rope=rope),
        mha_tt.padded_head_dim(size, rope=rope is not None),
    )
    x = rng.standard_normal((2, heads, 5, size)).astype(np.float32) + 1
    weights_on_device = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in norm.shapes(heads, size).items()
    }

    def uploaded(array):
        wide = np.zeros((*array.shape[:-1], padded), np.float32)
        wide[..., indices] = array
        wide = wide[None, :, None] if array.ndim == 2 else wide[None] if array.ndim == 1 else wide
        return mha_tt.upload(wide, device=device, dtype=ttnn.float32)

    parameters = {name: uploaded(array) for name, array in weights_on_device.items()}
    actual = mha_tt.download(
        mha_tt.apply_norm(uploaded(x), norm, **parameters, feature_indices=indices)
    )
    expected = exact(
        x,
        norm,
        *(array[:, None] if array.ndim == 2 else array for array in weights_on_device.values()),
    )
    assert_close(actual[..., indices], expected, ttnn.float32)
    assert not np.delete(actual, indices, axis=-1).any()


def test_norm_of_empty_tensor_is_empty(device):
    """The norm of a tensor without sequences has the same shape."""
    empty = mha_tt.device.zeros((0, 2, 3, 32), ttnn.bfloat16, device)
    assert tuple(mha_tt.apply_norm(empty, Norm(weight=None)).shape) == (0, 2, 3, 32)


@pytest.mark.parametrize(
    "dtype", [ttnn.float32, ttnn.bfloat16, ttnn.bfloat8_b], ids=lambda dtype: dtype.name
)
def test_new_norms_are_exact_in_each_dtype(device, dtype):
    """The norms of a new layer hold exactly one and zero, in every dtype."""
    norm = Norm("layer", bias=True, per_head=True, weight="1+w")
    spec = parity.AttentionSpec(24, 2, rope=parity.Rope(), qk_norm=norm, v_norm=Norm(over="width"))
    layer = mha_tt.MultiHeadAttention(spec, device=device, dtype=dtype)
    downloaded = mha_tt.download_weights(layer.weights, spec)
    assert downloaded["q_norm.weight"].shape == (2, 12)
    for name in spec.parameters:
        assert np.array_equal(
            downloaded[name],
            np.full_like(downloaded[name], 1.0 if name == "v_norm.weight" else 0.0),
        )
