"""Batch axes: with any number of them, or none, results are bit-identical to one batch axis."""

import numpy as np
import ttnn
from helpers.input_errors import rejects
from helpers.tt.formulas import module_of, rounded_weights

import mha_tt
import parity

SPEC = parity.AttentionSpec(8, 2, rope=parity.Rope())
AXES, T = (2, 3), 5


def attended(device, x, **options):
    module = module_of(
        "MultiHeadAttention", SPEC, device, ttnn.bfloat16, rounded_weights(SPEC, ttnn.bfloat16)
    )
    output = module(mha_tt.upload(x, device=device), **options)
    return [mha_tt.download(x) for x in output if x is not None]


def assert_same(actual, expected, axes):
    for several, one in zip(actual, expected, strict=True):
        assert np.array_equal(several, one.reshape(*axes, *one.shape[1:]))


def test_masks_on_device_broadcast(device, rng):
    """Masks and biases on the device broadcast over two batch axes, bit for bit."""
    x, mask, bias = (
        rng.standard_normal((*AXES, T, 8)),
        rng.random((3, 2, T, T)) > 0.5,
        rng.random((*AXES, 1, T, T)),
    )
    actual = attended(
        device,
        x,
        mask=mha_tt.DeviceMask(mask, device=device),
        bias=mha_tt.upload(bias, device=device),
    )
    of_one = {
        "mask": np.tile(mask, (2, 1, 1, 1)),
        "bias": mha_tt.upload(bias.reshape(6, 1, T, T), device=device),
    }
    assert_same(actual, attended(device, x.reshape(6, T, 8), **of_one), AXES)


def test_bias_on_device_needs_all_batch_axes(device, rng):
    """A bias on the device with only one of two batch axes raises an error with its shape."""
    bias = mha_tt.upload(rng.random((3, 1, T, T)), device=device)
    with rejects("bias", {"bias.shape": (3, 1, T, T)}):
        attended(device, rng.standard_normal((*AXES, T, 8)), bias=bias)
