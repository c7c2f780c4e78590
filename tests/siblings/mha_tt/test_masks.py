"""Masks: literal tables, and the forms that a mask has on the device."""

import tracemalloc

import numpy as np
import pytest
import ttnn
from helpers.heads import fused_attention, plain_attention
from helpers.input_errors import rejects

import mha_tt
from mha_tt.masks import MASKED, CausalMask, Mask, on_device
from mha_tt.scores import LOWEST_BIAS, bias_on_device

# Query 1 of the first sequence attends to no key, and no query attends to key 3.
MASK = np.array(
    [
        [[[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]]],
        [[[0, 0, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1]]],
    ],
    bool,
)


def with_padding(tensor):
    """Return the contents of a tensor on the host, including the padding of its tiles."""
    return tensor.to_torch_with_padded_shape().float().numpy()


# ---- On the host ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids", [np.zeros((1, 3), np.float32), np.zeros((1, 2), int), [[0, 0, 0]], (), np.array(3)]
)
def test_invalid_segment_ids_raise(ids):
    """Segments of floats, a wrong length, a list, an empty tuple or a scalar raise ValueError."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        mha_tt.create_attention_mask(3, segment_ids=ids)
    assert caught.value.argument == "segment_ids"


# ---- Recognizing causal masks --------------------------------------------------------------------

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
def test_device_mask_recognizes_causal_mask(device, name):
    assert mha_tt.DeviceMask(CAUSAL[name], device=device).is_causal


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_other_masks_are_not_causal(device, name):
    """Masks that differ from the causal mask in any element or shape are not recognized as
    causal.
    """
    assert not mha_tt.DeviceMask(NOT_CAUSAL[name], device=device).is_causal


# ---- On the device -------------------------------------------------------------------------------


@pytest.mark.parametrize("attend", [plain_attention(mha_tt), fused_attention(mha_tt)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_segments_match_equivalent_mask(device, attend, options):
    """Attention with segments equals attention with their mask bit for bit."""
    rng, ids = (
        np.random.default_rng(0),
        np.array([[0] * 9 + [1] * 24 + [2] * 7, [4] * 30 + [3] * 10]),
    )
    arrays = [rng.standard_normal((2, 2, 40, 32)).astype(np.float32) for _ in range(3)]
    tensors = [mha_tt.upload(x, device=device, dtype=ttnn.bfloat16) for x in arrays]
    mask = mha_tt.create_attention_mask(40, segment_ids=ids, **options)
    actual, expected = (
        mha_tt.download(attend(*tensors, **hides)[0])
        for hides in ({**options, "segment_ids": ids}, {"mask": mask})
    )
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("shape", "expected"), [((4,), (1, 1, 1, 4)), ((3, 4), (1, 1, 3, 4)), ((2, 1, 3, 4),) * 2]
)
def test_device_mask_has_four_axes(device, shape, expected):
    """The shape of a device mask is extended to four axes."""
    assert mha_tt.DeviceMask(np.zeros(shape, bool), device=device).shape == expected


def test_hidden_form_spares_empty_rows(device):
    """The form `hidden` is 1 at masked keys, and 0 in rows without a visible key."""
    hidden = mha_tt.download(mha_tt.DeviceMask(MASK, device=device).hidden)
    expected = MASK.astype(np.float32)
    expected[0, 0, 1] = 0.0
    np.testing.assert_array_equal(hidden, expected)


def test_rows_with_keys_marks_empty_rows(device):
    """`rows_with_keys` is 0 in rows without a visible key, and 1 in all others."""
    rows_with_keys = mha_tt.download(mha_tt.DeviceMask(MASK, device=device).rows_with_keys)
    assert rows_with_keys[..., 0].tolist() == [[[1, 0, 1]], [[1, 1, 1]]]


@pytest.mark.parametrize("name", CAUSAL)
def test_rows_with_keys_may_be_absent(device, name):
    """`rows_with_keys` is None if every row has a visible key."""
    assert mha_tt.DeviceMask(CAUSAL[name], device=device).rows_with_keys is None


def test_rows_with_keys_broadcasts_to_keys(device):
    """For a mask of shape (T, 1), `rows_with_keys` is 0 in rows that hide all keys."""
    mask = mha_tt.DeviceMask(np.array([[False], [True]]), device=device)
    assert mha_tt.download(mask.rows_with_keys).tolist() == [[[[1], [0]]]]


def test_additive_form_spares_empty_rows(device):
    """The additive form is about -1e9 at masked keys, and 0 elsewhere and in rows without a visible
    key.
    """
    additive = mha_tt.download(mha_tt.DeviceMask(MASK, device=device).additive(3, 4))
    shown = ~MASK
    shown[0, 0, 1] = True
    assert np.array_equal(additive == 0.0, shown)
    assert additive[~shown].max() <= 0.99 * MASKED


@pytest.mark.parametrize(
    "shape", [(4,), (1, 4), (3, 1), (3, 4), (2, 1, 1, 4), (1, 2, 3, 4)], ids=str
)
def test_additive_form_is_broadcast(device, shape):
    """The additive form has all queries and keys, even if the mask broadcasts over them."""
    mask = mha_tt.DeviceMask(np.arange(np.prod(shape)).reshape(shape) % 3 == 1, device=device)
    expected = np.broadcast_to(
        mask.mask & ~mask.mask.all(axis=-1, keepdims=True), (*mask.shape[:2], 3, 4)
    )
    np.testing.assert_array_equal(mha_tt.download(mask.additive(3, 4)) < 0.0, expected, strict=True)


@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), [(3, 4), (32, 33), (33, 32), (1, 65), (40, 1)])
def test_additive_tiles_hide_padding(device, host_tensors, seq_len_q, seq_len_k):
    """Tiles of the additive form contain the masked value beyond the last key."""
    mask = mha_tt.DeviceMask(mha_tt.create_causal_mask(seq_len_q, seq_len_k), device=device)
    mask.additive(seq_len_q, seq_len_k)
    (tensor,) = host_tensors
    assert (with_padding(tensor)[..., :seq_len_q, seq_len_k:] <= 0.99 * MASKED).all()


def test_padding_equals_masked_value(device, host_tensors):
    """The additive form has the same value at masked keys and in the padding of its tile."""
    mha_tt.DeviceMask(np.array([[False, True, False]]), device=device).additive(1, 3)
    (tensor,) = host_tensors
    first, second, third, *beyond = with_padding(tensor)[0, 0, 0]
    assert (first, third) == (0.0, 0.0)
    assert set(beyond) == {second}


def test_masked_value_survives_any_dtype():
    """In one block, 0 and the masked value remain 0 and about -1e9 in all three dtypes."""
    pairs = np.array([[0.0, MASKED]], np.float32)
    converted = [
        ttnn.Tensor(pairs, dtype, None, ttnn.TILE_LAYOUT).to_torch().float().tolist()[0]
        for dtype in (ttnn.bfloat16, ttnn.bfloat8_b, ttnn.float32)
    ]
    assert [zero for zero, _ in converted] == [0.0] * 3
    assert max(masked for _, masked in converted) <= 0.99 * MASKED


@pytest.mark.parametrize("form", ["hidden", "rows_with_keys"])
def test_device_mask_form_is_uploaded_once(device, uploads, form):
    """Repeated use of `hidden` or `rows_with_keys` uploads one array."""
    mask = mha_tt.DeviceMask(MASK, device=device)
    assert getattr(mask, form) is getattr(mask, form)
    assert len(uploads) == 1


def test_additive_form_is_uploaded_once(device, uploads):
    """Repeated use of the additive form for the same lengths uploads one array."""
    mask = mha_tt.DeviceMask(np.array([True, False, False]), device=device)
    assert mask.additive(5, 3) is mask.additive(5, 3)
    assert len(uploads) == 1


def test_additive_form_follows_lengths(device):
    """The additive form is made again for other lengths."""
    mask = mha_tt.DeviceMask(np.array([True, False, False]), device=device)
    shapes = [tuple(mask.additive(seq_len_q, 3).shape) for seq_len_q in (5, 2)]
    assert shapes == [(1, 1, 5, 3), (1, 1, 2, 3)]


def test_device_mask_uploads_lazily(device, uploads):
    """Creating a device mask uploads nothing."""
    mha_tt.DeviceMask(MASK, device=device)
    assert uploads == []


def test_device_mask_ignores_later_changes(device):
    """Changing the array does not change a form that has been uploaded."""
    array = MASK.copy()
    mask = mha_tt.DeviceMask(array, device=device)
    before = mha_tt.download(mask.hidden)
    array[:] = ~array
    np.testing.assert_array_equal(mha_tt.download(mask.hidden), before)


def test_on_device_returns_same_device_mask(device):
    mask = mha_tt.DeviceMask(MASK, device=device)
    assert on_device(mask, device) is mask


def test_on_device_returns_none_for_none(device):
    assert on_device(None, device) is None


# ---- The lazy causal mask ------------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [1, 5, 33])
def test_lazy_causal_mask_matches_its_table(device, seq_len):
    """The additive form of a lazy causal mask equals the form of its table."""
    table = mha_tt.DeviceMask(mha_tt.create_causal_mask(seq_len), device=device)
    late, expected = (
        mask.additive(seq_len, seq_len) for mask in (CausalMask(seq_len, device=device), table)
    )
    assert np.array_equal(mha_tt.download(late), mha_tt.download(expected))


def test_lazy_causal_mask_joins_bias(device):
    """A lazy causal mask and the infinite elements of a bias are combined into one mask."""
    joined = Mask(CausalMask(2, device=device)).with_bias(BIAS)
    assert joined.mask.reshape(2, 2).tolist() == [[False, True], [False, False]]


def test_lazy_causal_mask_allocates_no_table(device):
    """A lazy causal mask of 2^20 tokens, whose table would have 2^40 elements, can be created."""
    mask = CausalMask(2**20, device=device)  # its table would have 2^40 elements
    assert (mask.is_causal, mask.shape, mask.rows_with_keys) == (True, (1, 1, 2**20, 2**20), None)


@pytest.mark.parametrize(("seq_len", "error"), [(-1, ValueError), (2.0, TypeError)])
def test_lazy_causal_mask_rejects_bad_length(device, seq_len, error):
    """A lazy causal mask rejects a negative or float length."""
    with rejects("seq_len", seq_len=seq_len).of(error):
        CausalMask(seq_len, device=device)


# ---- Biases --------------------------------------------------------------------------------------

BIAS = np.array([[0.5, -np.inf], [1e-3, float(np.finfo(np.float32).min)]], np.float32)


def test_infinite_bias_becomes_a_mask():
    """Elements of -inf in a bias become a mask; the lowest finite number does not."""
    assert Mask().with_bias(BIAS).mask.tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("mask", [None, MASK], ids=["no-mask", "mask"])
@pytest.mark.parametrize("bias", [None, np.zeros((3, 4), np.float32)], ids=["no-bias", "finite"])
def test_mask_is_kept_without_infinite_bias(mask, bias):
    """Without infinite elements in the bias, the mask object is returned unchanged."""
    assert Mask(mask).with_bias(bias).mask is mask


@pytest.mark.parametrize("on", ["host", "device"])
def test_infinite_bias_joins_the_mask(device, on):
    """Elements of -inf in a bias are combined with a mask on the host or the device."""
    mask = np.array([[True, False], [False, False]])
    mask = mha_tt.DeviceMask(mask, device=device) if on == "device" else mask
    assert Mask(mask).with_bias(BIAS).mask.reshape(2, 2).tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "plain"])
def test_call_joins_infinite_bias_once(device, monkeypatch, need_weights):
    """A call with a mask and an infinite bias creates one device mask."""
    made, init = [], mha_tt.DeviceMask.__init__
    monkeypatch.setattr(
        mha_tt.DeviceMask,
        "__init__",
        lambda mask, *of, **more: made.append(init(mask, *of, **more)),
    )
    heads = [mha_tt.upload(np.ones((1, 1, 2, 32)), device=device) for _ in range(3)]
    attend = plain_attention(mha_tt) if need_weights else fused_attention(mha_tt)
    attend(
        *heads, mask=np.array([[True, False], [False, False]]), bias=BIAS, need_weights=need_weights
    )
    assert len(made) == 1


@pytest.mark.parametrize("on", ["host", "device"])
def test_device_bias_is_above_masked_value(device, on):
    """A bias on the device is clipped from below, so that a masked key weighs less than any
    other.
    """
    bias = mha_tt.upload(BIAS, device=device, dtype=ttnn.float32) if on == "device" else BIAS
    downloaded = mha_tt.download(bias_on_device(bias, device, ttnn.float32))
    np.testing.assert_array_equal(downloaded, np.maximum(BIAS, np.float32(LOWEST_BIAS))[None, None])


@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize("dtype", [ttnn.float32, ttnn.bfloat16], ids=["float32", "bfloat16"])
def test_device_bias_has_requested_dtype(device, on, dtype):
    bias = np.ones((3, 4), np.float64)
    bias = mha_tt.upload(bias, device=device, dtype=ttnn.bfloat16) if on == "device" else bias
    assert bias_on_device(bias, device, dtype).dtype == dtype


# ---- Memory --------------------------------------------------------------------------------------

LARGE = {
    "causal": lambda: mha_tt.create_causal_mask(2048),
    "padding": lambda: mha_tt.create_padding_mask([5] * 64, 65536),
    "attention": lambda: mha_tt.create_attention_mask(2048, is_causal=True),
    "attention of lengths": lambda: mha_tt.create_attention_mask(
        1024, is_causal=True, key_padding_lengths=[5, 7, 9]
    ),
    "attention of nothing": lambda: mha_tt.create_attention_mask(2048),
    "with cache": lambda: mha_tt.create_causal_mask_with_cache(1024, 2048, 1024),
    "window": lambda: mha_tt.create_sliding_window_mask(2048, window_size=100),
    "cache": lambda: mha_tt.create_cache_mask([3, 5], 1024, 2048),
}


@pytest.mark.parametrize("name", LARGE)
def test_mask_creation_needs_little_memory(name):
    """Creating a mask allocates at most 1.5 times its size."""
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
        ("create_padding_mask", ([], 3), (0, 1, 1, 3)),
        ("create_cache_mask", ([], 2, 4), (0, 1, 2, 4)),
    ],
)
def test_empty_masks_have_empty_shapes(function, args, shape):
    """Masks without sequences have the expected empty shape and dtype bool."""
    mask = getattr(mha_tt, function)(*args)
    assert (mask.shape, mask.dtype) == (shape, bool)


def test_causal_mask_of_zero_tokens(device):
    """A layer of zero tokens has a causal mask without elements, and so does an array of them."""
    assert CausalMask(0, device=device).mask.shape == (1, 1, 0, 0)
    assert not mha_tt.DeviceMask(np.zeros((0, 0), bool), device=device).is_causal
