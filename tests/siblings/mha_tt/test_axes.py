"""Batch axes: any number of them, or none, gives the bits of one batch axis."""

import numpy as np
import pytest
import ttnn
from helpers.refusals import refuses
from helpers.tt.formulas import module_of, rounded_weights

import mha_tt
import parity

SPEC = parity.AttentionSpec(8, 2, rope=parity.Rope())
AXES, T = (2, 3), 5
LENGTHS = np.array([[5, 0, 2], [4, 1, 5]])


def attended(device, x, **options):
    module = module_of("MultiHeadAttention", SPEC, device, ttnn.bfloat16, rounded_weights(SPEC, ttnn.bfloat16))
    found = module(mha_tt.upload(x, device=device), **options)
    return [mha_tt.download(x) for x in found if x is not None]


def assert_same(found, expected, axes):
    for several, one in zip(found, expected, strict=True):
        assert np.array_equal(several, one.reshape(*axes, *one.shape[1:]))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"key_padding_lengths": LENGTHS}])
def test_several_batch_axes_are_one(device, rng, options):
    x, mask, bias = rng.standard_normal((*AXES, T, 8)), rng.random((2, 1, 1, T, T)) > 0.5, rng.random((3, 1, T, T))
    of_one = {"mask": np.repeat(mask[:, 0], 3, axis=0), "bias": np.tile(bias, (2, 1, 1, 1))}
    of_one |= {"key_padding_lengths": LENGTHS.reshape(-1)} if "key_padding_lengths" in options else {}
    for hidden in ({}, {"mask": mask, "bias": bias}):
        one = {name: of_one.get(name, given) for name, given in {**options, **hidden}.items()}
        found = attended(device, x, **options, **hidden, need_weights=True)
        assert_same(found, attended(device, x.reshape(6, T, 8), **one, need_weights=True), AXES)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"key_padding_lengths": 3}])
def test_no_batch_axis_is_a_batch_of_one(device, rng, options):
    x, of_one = rng.standard_normal((T, 8)), {name: [3] if given == 3 else given for name, given in options.items()}
    assert_same(attended(device, x, **options), attended(device, x[None], **of_one), ())


def test_masks_and_biases_on_the_device_broadcast(device, rng):
    x, mask, bias = rng.standard_normal((*AXES, T, 8)), rng.random((3, 2, T, T)) > 0.5, rng.random((*AXES, 1, T, T))
    found = attended(device, x, mask=mha_tt.DeviceMask(mask, device=device), bias=mha_tt.upload(bias, device=device))
    of_one = {"mask": np.tile(mask, (2, 1, 1, 1)), "bias": mha_tt.upload(bias.reshape(6, 1, T, T), device=device)}
    assert_same(found, attended(device, x.reshape(6, T, 8), **of_one), AXES)


def test_some_batch_axes_of_a_bias_on_the_device_are_refused(device, rng):
    bias = mha_tt.upload(rng.random((3, 1, T, T)), device=device)
    with refuses("bias", {"bias.shape": (3, 1, T, T)}):
        attended(device, rng.standard_normal((*AXES, T, 8)), bias=bias)
