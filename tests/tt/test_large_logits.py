"""Logits so large that the kernel of prompts gives rows of zeros take the plain path, and nothing else does."""

import numpy as np
import pytest
import ttnn

import mha_tt
from mha_tt import device as devices
from mha_tt import fused

from .formulas import IS_MOCK, assert_close, rounded

KERNEL = "ttnn.transformer.scaled_dot_product_attention"


def heads(rng, gain=1.0, num_tokens=40):
    """Queries, keys and values (1, 2, T, 64), whose logits are about 5 times the gain at most."""
    sizes = (gain**0.5, gain**0.5, 1.0)
    return [rounded(size * rng.standard_normal((1, 2, num_tokens, 64)), ttnn.bfloat16) for size in sizes]


def attend(device, arrays, **options):
    return fused.scaled_dot_product_attention(*(mha_tt.upload(x, device=device) for x in arrays), **options)[0]


def expected_of(arrays, bias: float | np.ndarray = 0.0, hidden=None):
    q, k, v = (x.astype(np.float64) for x in arrays)
    scores = q @ k.swapaxes(2, 3) / 8.0 + bias
    shown = scores if hidden is None else np.where(hidden, -np.inf, scores)
    exponentials = np.exp(shown - shown.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True) @ v


def took_kernel(calls):
    return KERNEL in {call.name for call in calls}


@pytest.mark.board
@pytest.mark.parametrize(("gain", "takes"), [(1.0, True), (1e3, True), (1e4, False), (1e6, False)], ids=str)
def test_logits_beyond_what_the_kernel_can_tell_take_the_plain_path(device, rng, calls, gain, takes):
    arrays = heads(rng, gain)
    found = attend(device, arrays)
    assert took_kernel(calls) == takes
    if gain in (1.0, 1e6):  # between them a few keys are too close for the arithmetic of a card
        assert_close(mha_tt.download(found), expected_of(arrays), ttnn.bfloat16)


def test_no_more_than_one_number_is_read_back(device, rng, calls, monkeypatch):
    read = []
    arrays = [mha_tt.upload(x, device=device) for x in heads(rng)]
    monkeypatch.setattr(fused, "download", lambda tensor: read.append(tensor.shape) or mha_tt.download(tensor))
    fused.scaled_dot_product_attention(*arrays)
    assert [np.prod(shape) for shape in read] == [1]
    assert took_kernel(calls)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("largest", "takes"), [(1e3, True), (2e4, False)], ids=str)
def test_a_bias_counts_by_its_largest_value(device, rng, calls, largest, takes, on_device):
    arrays, bias = heads(rng), np.zeros((1, 2, 40, 40), np.float32)
    bias[..., 3], bias[..., 5] = largest, -np.inf if not on_device else -1e9
    found = attend(device, arrays, bias=mha_tt.upload(bias, device=device) if on_device else bias)
    assert took_kernel(calls) == takes
    assert_close(mha_tt.download(found), expected_of(arrays, rounded(bias, ttnn.bfloat16)), ttnn.bfloat16)


def test_sums_in_bfloat16_need_no_look(device, rng, calls, monkeypatch):
    """Their scores are in bfloat16, and so the largest of a row is exact."""
    arrays = [mha_tt.upload(x, device=device) for x in heads(rng, 1e6)]
    monkeypatch.setattr(fused, "download", lambda tensor: pytest.fail("a tensor was read back"))
    fused.scaled_dot_product_attention(*arrays, compute_kernel_config=mha_tt.fast_config(device))
    assert took_kernel(calls)


@pytest.mark.skipif(not IS_MOCK, reason="a device that computes has values")
def test_a_board_without_values_takes_the_kernel(device, rng, calls, monkeypatch):
    arrays = [mha_tt.upload(x, device=device) for x in heads(rng, 1e6)]
    monkeypatch.setattr(devices, "readers", [])
    fused.scaled_dot_product_attention(*arrays)
    assert took_kernel(calls)


def test_a_large_key_that_is_hidden_changes_no_other_row(device, rng):
    arrays = heads(rng)
    arrays[1][:, :, -1] *= 1e20
    hidden = np.triu(np.ones((40, 40), bool), 1)
    found = mha_tt.download(attend(device, arrays, is_causal=True))
    assert_close(found[:, :, :-1], expected_of(arrays, hidden=hidden)[:, :, :-1], ttnn.bfloat16)


@pytest.mark.skipif(not IS_MOCK, reason="a card's matrix unit takes NaN and infinity for numbers")
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("gain", [1.0, 1e6], ids=["small", "large"])
def test_a_query_that_is_not_finite_decides_nothing(device, rng, calls, gain, value):
    arrays = heads(rng, gain)
    expected = expected_of(arrays)
    arrays[0][:, :, 7] = value
    found = mha_tt.download(attend(device, arrays))
    assert took_kernel(calls) == (gain == 1.0)
    assert not np.isfinite(found[:, :, 7]).any()
    rest = np.arange(40) != 7
    assert_close(found[:, :, rest], expected[:, :, rest], ttnn.bfloat16)
