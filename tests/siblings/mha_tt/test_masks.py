"""Masks: literal tables, and the forms that a mask has on the device."""

import tracemalloc

import numpy as np
import pytest
import ttnn
from helpers.refusals import refuses

import mha_tt
from mha_tt.masks import MASKED, CausalMask, Mask, on_device
from mha_tt.scores import LOWEST_BIAS, bias_on_device

# Query 1 of the first sequence sees no key, and nobody sees key 3.
MASK = np.array(
    [
        [[[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]]],
        [[[0, 0, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1]]],
    ],
    bool,
)


def with_padding(tensor):
    """What a tensor on the host holds, its last tiles whole."""
    return tensor.to_torch_with_padded_shape().float().numpy()


# ---- On the host -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [np.zeros((1, 3), np.float32), np.zeros((1, 2), int), [[0, 0, 0]], (), np.array(3)])
def test_other_segments_are_refused(ids):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        mha_tt.create_attention_mask(3, segment_ids=ids)
    assert caught.value.argument == "segment_ids"


# ---- Recognised ------------------------------------------------------------------------------------------------------

CAUSAL = {
    "1": mha_tt.create_causal_mask(1),
    "33": mha_tt.create_causal_mask(33),
    "four-axes": mha_tt.create_attention_mask(5, is_causal=True),
    "from-an-empty-cache": mha_tt.create_causal_mask_with_cache(5, 5, 0),
    "wide-window": mha_tt.create_sliding_window_mask(5, window_size=5),
}
NOT_CAUSAL = {
    "nothing": np.zeros((5, 5), bool),
    "everything": np.ones((5, 5), bool),
    "more-keys": mha_tt.create_causal_mask(5, 6),
    "fewer-keys": mha_tt.create_causal_mask(6, 5),
    "padding-too": mha_tt.create_attention_mask(5, is_causal=True, key_padding_lengths=[4]),
    "with-a-cache": mha_tt.create_causal_mask_with_cache(5, 7, 2),
    "the-past": mha_tt.create_causal_mask(5).T,
    "one-more": mha_tt.create_causal_mask(5) | np.eye(5, dtype=bool)[::-1],
    "of-each-sequence": np.stack([mha_tt.create_causal_mask(5)[None]] * 2),
    "of-each-head": np.stack([mha_tt.create_causal_mask(5)] * 2)[None],
}


@pytest.mark.parametrize("name", CAUSAL)
def test_device_mask_knows_the_causal_mask(device, name):
    assert mha_tt.DeviceMask(CAUSAL[name], device=device).is_causal


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_device_mask_takes_no_other_for_the_causal_mask(device, name):
    assert not mha_tt.DeviceMask(NOT_CAUSAL[name], device=device).is_causal


# ---- On the device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attend", [mha_tt.scaled_dot_product_attention, mha_tt.fused.scaled_dot_product_attention])
@pytest.mark.parametrize("told", [{}, {"is_causal": True}], ids=str)
def test_segments_are_hidden_as_by_their_mask(device, attend, told):
    rng, ids = np.random.default_rng(0), np.array([[0] * 9 + [1] * 24 + [2] * 7, [4] * 30 + [3] * 10])
    arrays = [rng.standard_normal((2, 2, 40, 32)).astype(np.float32) for _ in range(3)]
    arrays[2][0, :, 12] = np.nan  # of the second segment
    tensors = [mha_tt.upload(x, device=device, dtype=ttnn.bfloat16) for x in arrays]
    mask = mha_tt.create_attention_mask(40, segment_ids=ids, **told)
    found, expected = (
        mha_tt.download(attend(*tensors, **hides)[0]) for hides in ({**told, "segment_ids": ids}, {"mask": mask})
    )
    np.testing.assert_array_equal(found, expected)
    assert np.array_equal(np.isnan(found[0, 0]).any(axis=1), ~mask[0, 0, :, 12])


@pytest.mark.parametrize(("shape", "expected"), [((4,), (1, 1, 1, 4)), ((3, 4), (1, 1, 3, 4)), ((2, 1, 3, 4),) * 2])
def test_device_mask_has_four_axes(device, shape, expected):
    assert mha_tt.DeviceMask(np.zeros(shape, bool), device=device).shape == expected


def test_hidden_is_one_at_masked_keys_and_nowhere_in_an_empty_row(device):
    hidden = mha_tt.download(mha_tt.DeviceMask(MASK, device=device).hidden)
    expected = MASK.astype(np.float32)
    expected[0, 0, 1] = 0.0
    np.testing.assert_array_equal(hidden, expected)


def test_keep_is_zero_in_an_empty_row(device):
    keep = mha_tt.download(mha_tt.DeviceMask(MASK, device=device).keep)
    assert keep[..., 0].tolist() == [[[1, 0, 1]], [[1, 1, 1]]]


@pytest.mark.parametrize("name", CAUSAL)
def test_keep_is_absent_where_every_row_has_a_key(device, name):
    assert mha_tt.DeviceMask(CAUSAL[name], device=device).keep is None


def test_keep_of_a_mask_without_an_axis_of_keys_is_about_all_keys(device):
    keep = mha_tt.download(mha_tt.DeviceMask(np.array([[False], [True]]), device=device).keep)
    assert keep.tolist() == [[[[1], [0]]]]


def test_additive_is_the_stand_in_for_infinity_at_masked_keys_and_nowhere_in_an_empty_row(device):
    additive = mha_tt.download(mha_tt.DeviceMask(MASK, device=device).additive(3, 4))
    shown = ~MASK
    shown[0, 0, 1] = True
    assert np.array_equal(additive == 0.0, shown)
    assert additive[~shown].max() <= 0.99 * MASKED


@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 1), (3, 4), (2, 1, 1, 4), (1, 2, 3, 4)], ids=str)
def test_additive_has_every_query_and_every_key(device, shape):
    mask = mha_tt.DeviceMask(np.arange(np.prod(shape)).reshape(shape) % 3 == 1, device=device)
    expected = np.broadcast_to(mask.mask & ~mask.mask.all(axis=-1, keepdims=True), (*mask.shape[:2], 3, 4))
    np.testing.assert_array_equal(mha_tt.download(mask.additive(3, 4)) < 0.0, expected, strict=True)


@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), [(3, 4), (32, 33), (33, 32), (1, 65), (40, 1)])
def test_tiles_of_the_additive_form_hide_what_lies_beyond_the_last_key(device, host_tensors, seq_len_q, seq_len_k):
    mask = mha_tt.DeviceMask(mha_tt.create_causal_mask(seq_len_q, seq_len_k), device=device)
    mask.additive(seq_len_q, seq_len_k)
    (tensor,) = host_tensors
    assert (with_padding(tensor)[..., :seq_len_q, seq_len_k:] <= 0.99 * MASKED).all()


def test_masked_keys_are_hidden_alike_within_the_mask_and_beyond_it(device, host_tensors):
    mha_tt.DeviceMask(np.array([[False, True, False]]), device=device).additive(1, 3)
    (tensor,) = host_tensors
    first, second, third, *beyond = with_padding(tensor)[0, 0, 0]
    assert (first, third) == (0.0, 0.0)
    assert set(beyond) == {second}


def test_the_stand_in_for_infinity_survives_beside_zero_in_every_dtype():
    pairs = np.array([[0.0, MASKED]], np.float32)
    kept = [
        ttnn.Tensor(pairs, dtype, None, ttnn.TILE_LAYOUT).to_torch().float().tolist()[0]
        for dtype in (ttnn.bfloat16, ttnn.bfloat8_b, ttnn.float32)
    ]
    assert [zero for zero, _ in kept] == [0.0] * 3
    assert max(masked for _, masked in kept) <= 0.99 * MASKED


@pytest.mark.parametrize("form", ["hidden", "keep"])
def test_form_is_uploaded_once(device, uploads, form):
    mask = mha_tt.DeviceMask(MASK, device=device)
    assert getattr(mask, form) is getattr(mask, form)
    assert len(uploads) == 1


def test_additive_is_uploaded_once_for_the_same_lengths(device, uploads):
    mask = mha_tt.DeviceMask(np.array([True, False, False]), device=device)
    assert mask.additive(5, 3) is mask.additive(5, 3)
    assert len(uploads) == 1


def test_additive_is_made_anew_for_other_lengths(device):
    mask = mha_tt.DeviceMask(np.array([True, False, False]), device=device)
    shapes = [tuple(mask.additive(seq_len_q, 3).shape) for seq_len_q in (5, 2)]
    assert shapes == [(1, 1, 5, 3), (1, 1, 2, 3)]


def test_device_mask_uploads_nothing_before_it_is_needed(device, uploads):
    mha_tt.DeviceMask(MASK, device=device)
    assert uploads == []


def test_changing_the_array_afterwards_changes_no_form_that_is_uploaded(device):
    array = MASK.copy()
    mask = mha_tt.DeviceMask(array, device=device)
    before = mha_tt.download(mask.hidden)
    array[:] = ~array
    np.testing.assert_array_equal(mha_tt.download(mask.hidden), before)


def test_on_device_leaves_a_device_mask_as_it_is(device):
    mask = mha_tt.DeviceMask(MASK, device=device)
    assert on_device(mask, device) is mask


def test_on_device_leaves_no_mask_as_it_is(device):
    assert on_device(None, device) is None


# ---- The causal mask that is made late -------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [1, 5, 33])
def test_late_causal_mask_has_the_additive_form_of_its_table(device, seq_len):
    table = mha_tt.DeviceMask(mha_tt.create_causal_mask(seq_len), device=device)
    late, expected = (mask.additive(seq_len, seq_len) for mask in (CausalMask(seq_len, device=device), table))
    assert np.array_equal(mha_tt.download(late), mha_tt.download(expected))


def test_late_causal_mask_joins_an_infinite_bias(device):
    joined = Mask(CausalMask(2, device=device)).with_bias(BIAS)
    assert joined.mask.reshape(2, 2).tolist() == [[False, True], [False, False]]


def test_late_causal_mask_of_very_many_tokens_takes_no_memory(device):
    mask = CausalMask(2**20, device=device)  # its table would have 2^40 elements
    assert (mask.is_causal, mask.shape, mask.keep) == (True, (1, 1, 2**20, 2**20), None)


@pytest.mark.parametrize(("seq_len", "error"), [(-1, ValueError), (2.0, TypeError)])
def test_late_causal_mask_refuses_a_length(device, seq_len, error):
    with refuses("seq_len", seq_len=seq_len).of(error):
        CausalMask(seq_len, device=device)


# ---- Biases ----------------------------------------------------------------------------------------------------------

BIAS = np.array([[0.5, -np.inf], [1e-3, float(np.finfo(np.float32).min)]], np.float32)


def test_infinite_bias_becomes_a_mask():
    assert Mask().with_bias(BIAS).mask.tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("mask", [None, MASK], ids=["no-mask", "mask"])
@pytest.mark.parametrize("bias", [None, np.zeros((3, 4), np.float32)], ids=["no-bias", "finite"])
def test_mask_stays_itself_where_no_bias_is_infinite(mask, bias):
    assert Mask(mask).with_bias(bias).mask is mask


@pytest.mark.parametrize("on", ["host", "device"])
def test_infinite_bias_joins_the_mask(device, on):
    mask = np.array([[True, False], [False, False]])
    mask = mha_tt.DeviceMask(mask, device=device) if on == "device" else mask
    assert Mask(mask).with_bias(BIAS).mask.reshape(2, 2).tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
def test_a_call_joins_an_infinite_bias_once(device, monkeypatch, need_weights):
    made, init = [], mha_tt.DeviceMask.__init__
    monkeypatch.setattr(mha_tt.DeviceMask, "__init__", lambda mask, *of, **more: made.append(init(mask, *of, **more)))
    heads = [mha_tt.upload(np.ones((1, 1, 2, 32)), device=device) for _ in range(3)]
    attend = mha_tt.scaled_dot_product_attention if need_weights else mha_tt.fused.scaled_dot_product_attention
    attend(*heads, mask=np.array([[True, False], [False, False]]), bias=BIAS, need_weights=need_weights)
    assert len(made) == 1


@pytest.mark.parametrize("on", ["host", "device"])
def test_bias_on_the_device_is_never_so_low_that_a_masked_key_weighs_as_much(device, on):
    bias = mha_tt.upload(BIAS, device=device, dtype=ttnn.float32) if on == "device" else BIAS
    held = mha_tt.download(bias_on_device(bias, device, ttnn.float32))
    np.testing.assert_array_equal(held, np.maximum(BIAS, np.float32(LOWEST_BIAS))[None, None])


@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize("dtype", [ttnn.float32, ttnn.bfloat16], ids=["float32", "bfloat16"])
def test_bias_on_the_device_has_the_dtype_asked_for(device, on, dtype):
    bias = np.ones((3, 4), np.float64)
    bias = mha_tt.upload(bias, device=device, dtype=ttnn.bfloat16) if on == "device" else bias
    assert bias_on_device(bias, device, dtype).dtype == dtype


# ---- Memory ----------------------------------------------------------------------------------------------------------

LARGE = {
    "causal": lambda: mha_tt.create_causal_mask(2048),
    "padding": lambda: mha_tt.create_padding_mask([5] * 64, 65536),
    "attention": lambda: mha_tt.create_attention_mask(2048, is_causal=True),
    "attention of lengths": lambda: mha_tt.create_attention_mask(1024, is_causal=True, key_padding_lengths=[5, 7, 9]),
    "attention of nothing": lambda: mha_tt.create_attention_mask(2048),
    "with cache": lambda: mha_tt.create_causal_mask_with_cache(1024, 2048, 1024),
    "window": lambda: mha_tt.create_sliding_window_mask(2048, window_size=100),
    "cache": lambda: mha_tt.create_cache_mask([3, 5], 1024, 2048),
}


@pytest.mark.parametrize("name", LARGE)
def test_mask_is_made_in_little_more_memory_than_it_takes(name):
    tracemalloc.start()
    try:
        mask = LARGE[name]()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert mask.nbytes <= peak <= 1.5 * mask.nbytes


@pytest.mark.parametrize(
    ("function", "args", "shape"),
    [
        ("create_causal_mask", (0,), (0, 0)),
        ("create_causal_mask", (3, 0), (3, 0)),
        ("create_padding_mask", ([], 3), (0, 1, 1, 3)),
        ("create_padding_mask", ([0, 0], 0), (2, 1, 1, 0)),
        ("create_attention_mask", (0, 3), (1, 1, 0, 3)),
        ("create_causal_mask_with_cache", (0, 2, 2), (0, 2)),
        ("create_cache_mask", ([1], 0, 4), (1, 1, 0, 4)),
        ("create_cache_mask", ([], 2, 4), (0, 1, 2, 4)),
    ],
)
def test_mask_of_nothing(function, args, shape):
    mask = getattr(mha_tt, function)(*args)
    assert (mask.shape, mask.dtype) == (shape, bool)


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)])
def test_window_of_nothing(lengths):
    assert mha_tt.create_sliding_window_mask(*lengths, window_size=2).shape == lengths
