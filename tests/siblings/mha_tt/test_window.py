"""Tests of sliding windows, which the prompt kernel applies itself: no mask is uploaded for
them.
"""

import numpy as np
import pytest
import ttnn
from helpers.heads import fused_attention, plain_attention
from helpers.tt.formulas import (
    assert_close,
    attend,
    both_dtypes,
    layer,
    module_of,
    rounded,
    rounded_weights,
)

import mha_tt
import parity
from mha_spec.span import Span
from mha_tt.kernels import fused
from mha_tt.kernels.nonfinite import contained
from mha_tt.masks import CausalMask, Mask
from mha_tt.scores import Scores

KERNEL = "ttnn.transformer.scaled_dot_product_attention"
STEP_KERNEL = "ttnn.transformer.scaled_dot_product_attention_decode"
SPEC = parity.AttentionSpec(24, 4, num_kv_heads=2, window_size=3)


def spec_of(window_size, **fields):
    return parity.AttentionSpec(128, 4, head_dim=32, window_size=window_size, **fields)


def split_heads(seq_len, rng, num_kv_heads=2, dtype=ttnn.bfloat16):
    return [
        rounded(rng.standard_normal((2, n, seq_len, 32)), dtype)
        for n in (4, num_kv_heads, num_kv_heads)
    ]


# ---- Recognizing window masks --------------------------------------------------------------------

NOT_OF_A_WINDOW = {
    "both-ways": mha_tt.create_attention_mask(5, window_size=3),
    "more-keys": mha_tt.create_sliding_window_mask(5, 6, window_size=3),
    "fewer-keys": mha_tt.create_sliding_window_mask(6, 5, window_size=3),
    "chunks": mha_tt.create_attention_mask(5, is_causal=True, chunk_size=2),
    "padding-too": mha_tt.create_attention_mask(
        5, is_causal=True, window_size=3, key_padding_lengths=[4]
    ),
    "one-more": mha_tt.create_sliding_window_mask(5, window_size=3)
    | (np.arange(25).reshape(5, 5) == 12),
    "one-less": mha_tt.create_sliding_window_mask(5, window_size=3)
    & (np.arange(25).reshape(5, 5) != 15),
    "of-each-head": np.stack([mha_tt.create_sliding_window_mask(5, window_size=3)] * 2)[None],
}


@pytest.mark.parametrize("window_size", [1, 2, 4])
def test_device_mask_recognizes_window(device, window_size):
    """A mask that hides future keys and those beyond a window is recognized with its window
    size.
    """
    for mask in (
        mha_tt.create_sliding_window_mask(5, window_size=window_size),
        mha_tt.create_attention_mask(5, is_causal=True, window_size=window_size),
    ):
        known = mha_tt.DeviceMask(mask, device=device)
        assert (known.is_causal, known.window_size) == (True, window_size)


@pytest.mark.parametrize("name", NOT_OF_A_WINDOW)
def test_other_masks_are_not_windows(device, name):
    """Masks that differ from a causal window in any element or shape are not recognized as one."""
    known = mha_tt.DeviceMask(NOT_OF_A_WINDOW[name], device=device)
    assert (known.is_causal, known.window_size) == (False, None)


@pytest.mark.parametrize("window_size", [1, 4, 32, 33])
def test_lazy_window_mask_matches_its_table(device, window_size):
    """A window mask that is computed when needed equals its table in every form."""
    table = mha_tt.DeviceMask(
        mha_tt.create_sliding_window_mask(40, window_size=window_size), device=device
    )
    late = CausalMask(40, window_size, device=device)
    assert (late.shape, late.window_size, late.rows_with_keys, late.real_keys) == (
        table.shape,
        window_size,
        None,
        None,
    )
    for form in (
        lambda mask: mask.hidden,
        lambda mask: mask.additive(40, 40),
        lambda mask: mask.shown(40, 40),
    ):
        assert np.array_equal(*(mha_tt.download(form(mask)) for mask in (late, table)))


def test_lazy_window_mask_allocates_no_table(device):
    """A window mask of 2^20 tokens, whose table would have 2^40 elements, can be created."""
    mask = CausalMask(2**20, 4096, device=device)  # its table would have 2^40 elements
    assert (mask.is_causal, mask.window_size, mask.shape) == (True, 4096, (1, 1, 2**20, 2**20))


@pytest.mark.parametrize("window_size", [5, 6, 100])
def test_window_over_all_tokens_is_causal(device, window_size):
    """A window of at least the number of tokens is a plain causal mask."""
    assert CausalMask(5, window_size, device=device).window_size is None
    joined = Mask(is_causal=True, span=Span(window_size)).to_bool(5, 5, device)
    assert (joined.is_causal, joined.window_size) == (True, None)


JOINED = {
    # name: (mask, number of keys, window applied by the kernel itself)
    "window": (Mask(is_causal=True, span=Span(3)), 5, 3),
    "and-a-causal-mask": (Mask(mha_tt.create_causal_mask(5), span=Span(3)), 5, 3),
    "more-keys": (Mask(is_causal=True, span=Span(3)), 6, None),
    "both-ways": (Mask(span=Span(3)), 5, None),
    "chunks": (Mask(is_causal=True, span=Span(chunk_size=3)), 5, None),
    "lengths": (Mask(is_causal=True, span=Span(3), key_padding_lengths=[4]), 5, None),
    "q_offset": (Mask(is_causal=True, span=Span(2), q_offset=np.array([1])), 5, None),
    "mask": (Mask(np.arange(5) == 1, is_causal=True, span=Span(3)), 5, None),
}


@pytest.mark.parametrize(
    "name", list(JOINED)
)  # a mark would keep its arguments alive after ttnn exits
def test_kernel_applies_only_a_pure_window(device, name):
    """The kernel applies the window only of causal self-attention without other masks; all masks
    are correct.
    """
    visible, seq_len_k, window_size = JOINED[name]
    joined = visible.to_bool(5, seq_len_k, device)
    assert joined.window_size == window_size
    hidden = visible.implicit_bool(5, seq_len_k) | (False if visible.mask is None else visible.mask)
    assert np.array_equal(joined.mask, hidden)


# ---- The prompt kernel ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq_len", "window_size"),
    [
        *((160, size) for size in (1, 2, 16, 31, 32, 33, 64, 100)),
        (100, 1),
        (100, 33),
        (100, 64),
        (64, 32),
        (64, 33),
    ],
)
def test_window_needs_no_mask_upload(device, calls, uploads, rng, seq_len, window_size):
    """The prompt kernel gets the window instead of a mask, nothing is uploaded, and the output
    matches the formula.
    """
    arrays = split_heads(seq_len, rng)
    heads = [mha_tt.upload(x, device=device) for x in arrays]
    uploads.clear()
    context, _ = fused_attention(mha_tt)(*heads, spec_of(window_size), is_causal=True)
    call, _ = (call for call in calls if call.name == KERNEL)  # twice: see test_large_logits.py
    keywords = [call.keywords[name] for name in ("is_causal", "sliding_window_size", "attn_mask")]
    assert (keywords, uploads) == ([True, window_size if window_size < seq_len else None, None], [])
    expected, _ = attend(
        *arrays, mask=mha_tt.create_sliding_window_mask(seq_len, window_size=window_size)
    )
    assert_close(mha_tt.download(context), expected, ttnn.bfloat16)


@pytest.mark.board
def test_window_and_sinks_match_plain_path(device, calls, rng):
    """With sinks, the prompt kernel applies the window, and the output matches the plain path."""
    heads = [mha_tt.upload(x, device=device) for x in split_heads(100, rng)]
    sinks = mha_tt.upload(
        np.array([1.0, -2.0, 3.0, 0.0]).reshape(1, 4, 1, 1), device=device, dtype=ttnn.float32
    )
    options = {"is_causal": True, "sinks": sinks}
    context, _ = fused_attention(mha_tt)(*heads, spec_of(33, sinks=True), **options)
    expected, _ = plain_attention(mha_tt)(*heads, spec_of(33, sinks=True), **options)
    assert [call.keywords["sliding_window_size"] for call in calls if call.name == KERNEL] == [
        33,
        33,
    ]
    assert_close(mha_tt.download(context), mha_tt.download(expected), ttnn.bfloat16)


@pytest.mark.board
@pytest.mark.parametrize(
    "options",
    [{"bias": np.ones((1, 100), np.float32)}, {"key_padding_lengths": [100, 90]}],
    ids=["bias", "lengths"],
)
def test_window_with_other_masks_uses_mask(device, calls, rng, options):
    """With padding lengths or a bias, a window is applied as a mask, and the output matches the
    formula.
    """
    arrays = split_heads(100, rng)
    heads = [mha_tt.upload(x, device=device) for x in arrays]
    context, _ = fused_attention(mha_tt)(*heads, spec_of(33), is_causal=True, **options)
    call, _ = (call for call in calls if call.name == KERNEL)  # twice: see test_large_logits.py
    assert (call.keywords["is_causal"], call.keywords["sliding_window_size"]) == (False, None)
    mask = mha_tt.create_sliding_window_mask(100, window_size=33)
    if "key_padding_lengths" in options:
        mask = mask | mha_tt.create_padding_mask([100, 90], 100)
    assert_close(mha_tt.download(context), attend(*arrays, mask=mask)[0], ttnn.bfloat16)


@both_dtypes
@pytest.mark.parametrize("need_weights", [False, True])
def test_layer_with_window_matches_formula(device, dtype, need_weights):
    """Layers and the function with a window match the formula, and each other bit for bit."""
    module = module_of(
        "MultiHeadSelfAttention" if not need_weights else "MultiHeadAttention", SPEC, device, dtype
    )
    x = rounded(np.random.default_rng(1).standard_normal((2, 40, 24)), dtype)
    options = {"need_weights": True} if need_weights else {}
    on_device = mha_tt.upload(x, device=device, dtype=dtype)
    actual = module(on_device, is_causal=True, **options)
    of_function, _ = mha_tt.multi_head_attention(
        on_device, module.weights, SPEC, is_causal=True, **options
    )
    mask = mha_tt.create_sliding_window_mask(40, window_size=3)
    expected, _ = layer(SPEC, rounded_weights(SPEC, dtype), x, mask=mask)
    actual = mha_tt.download(actual[0] if need_weights else actual)
    assert np.array_equal(mha_tt.download(of_function), actual)
    assert_close(actual, expected, dtype)


@pytest.mark.board
def test_windowed_prompt_uploads_no_mask(device, calls, uploads):
    """The prompt of a layer with a window and a cache runs the kernel with the window and uploads
    no mask.
    """
    module = module_of("MultiHeadAttentionWithCache", SPEC, device)
    x = mha_tt.upload(np.ones((2, 40, 24)), device=device)
    cache = module.init_cache(2, 64)
    uploads.clear()
    module(x, cache)
    call, _ = (call for call in calls if call.name == KERNEL)  # twice: see test_large_logits.py
    assert (call.keywords["sliding_window_size"], call.keywords["attn_mask"]) == (3, None)
    assert [array for array in uploads if array.shape[-2:] == (40, 40)] == []


@pytest.mark.board
def test_window_builds_no_table_on_host(device, uploads, monkeypatch):
    """A causal layer with a window runs although the functions that build its table are removed."""
    module = module_of("MultiHeadSelfAttention", SPEC, device)
    x = mha_tt.upload(np.ones((2, 40, 24)), device=device)
    uploads.clear()
    monkeypatch.setattr(mha_tt.masks, "create_sliding_window_mask", None)
    monkeypatch.setattr(Mask, "implicit_bool", None)
    module(x, is_causal=True)
    assert uploads == []


@pytest.mark.board
def test_window_table_is_uploaded_once(device, uploads):
    """Two calls that return attention weights upload the table of the window once."""
    module = module_of("MultiHeadAttention", SPEC, device)
    x = mha_tt.upload(np.ones((2, 40, 24)), device=device)
    uploads.clear()
    for _ in range(2):
        module(x, is_causal=True, need_weights=True)
    assert [array.shape for array in uploads] == [(1, 1, 40, 40)]


@pytest.mark.parametrize(("window_size", "expected"), [(None, 3), (5, 3), (3, 3), (2, 2)])
def test_narrower_of_two_windows_applies(device, window_size, expected):
    """A window within another one is the narrower of them, and the same mask if nothing changes."""
    mask = CausalMask(5, 3, device=device)
    within = mask.narrowed_to(window_size)
    assert within.window_size == expected
    assert (within is mask) == (expected == 3)


# ---- Non-finite values ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("window_size", [1, 3, 32, 33])
def test_nan_affects_only_windows_with_it(device, calls, uploads, rng, window_size, name):
    """In a contained kernel, NaN in a key or value reaches exactly the queries whose window
    contains it; other outputs keep their bits.
    """
    arrays = split_heads(100, rng)
    clean = [mha_tt.upload(x, device=device) for x in arrays]
    for token in (5, 6, 40):
        arrays[1 if name == "key" else 2][0, 0, token, 3] = np.nan
    dirty = [mha_tt.upload(x, device=device) for x in arrays]
    uploads.clear()
    spec = spec_of(window_size)
    arguments = Mask(is_causal=True, span=spec.span), Scores(spec)
    expected, context = (
        mha_tt.download(contained(fused.attend)(*heads, *arguments)) for heads in (clean, dirty)
    )
    assert uploads == []
    sees = ~mha_tt.create_sliding_window_mask(100, window_size=window_size)[:, [5, 6, 40]].all(
        axis=1
    )
    is_spoilt = np.zeros((2, 4, 100), bool)
    is_spoilt[0, :2] = sees
    assert np.array_equal(np.isnan(context).any(axis=-1), is_spoilt)
    assert np.array_equal(context[~is_spoilt], expected[~is_spoilt])


@both_dtypes
def test_nan_leaves_with_the_window(device, dtype):
    """With a contained kernel, a NaN token spoils steps until it leaves the window; all other
    outputs keep their bits.
    """
    module = module_of("MultiHeadAttentionWithCache", SPEC, device, dtype)
    module.kernel = contained(module.kernel)
    x, outputs = rounded(np.random.default_rng(1).standard_normal((1, 12, 24)), dtype), []
    for spoilt in (False, True):
        x[0, 2, 3] = np.nan if spoilt else x[0, 2, 3]
        cache, output = module.init_cache(1, 32), []
        for chunk in np.split(x, [4, 5, 6, 7, 8, 9, 10, 11], axis=1):
            result, cache = module(mha_tt.upload(chunk, device=device, dtype=dtype), cache)
            output.append(mha_tt.download(result))
        outputs.append(np.concatenate(output, axis=1)[0])
    is_spoilt = (np.arange(12) >= 2) & (np.arange(12) < 5)
    assert np.array_equal(np.isnan(outputs[1]).all(axis=-1), is_spoilt)
    assert np.array_equal(outputs[1][~is_spoilt], outputs[0][~is_spoilt])


# ---- The step kernel -----------------------------------------------------------------------------


@pytest.mark.board
@pytest.mark.parametrize("num_heads", [16, 20], ids=["few", "many"])
def test_step_with_sinks_uses_step_kernel(device, calls, num_heads):
    """A step with sinks runs only the step kernel, and equals the last token of a full pass."""
    spec = parity.AttentionSpec(64, num_heads, num_kv_heads=4, head_dim=8, sinks=True)
    module = module_of("MultiHeadAttentionWithCache", spec, device)
    x = rounded(np.random.default_rng(1).standard_normal((3, 7, 64)), ttnn.bfloat16)
    whole, _ = module(mha_tt.upload(x, device=device), module.init_cache(3, 32))
    _, cache = module(mha_tt.upload(x[:, :6], device=device), module.init_cache(3, 32))
    calls.clear()
    last, _ = module(mha_tt.upload(x[:, 6:], device=device), cache)
    assert [call.name for call in calls if call.name in (KERNEL, STEP_KERNEL)] == [STEP_KERNEL]
    assert_close(mha_tt.download(last), mha_tt.download(whole)[:, 6:], ttnn.bfloat16)


@pytest.mark.board
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "width"), [(4, 2, 32), (40, 8, 64), (40, 1, 384)], ids=str
)
def test_step_sinks_match_plain_path(device, rng, num_heads, num_kv_heads, width):
    """A step over a cache with sinks matches the plain path, for few and many heads."""
    last_positions = np.array([5, 63])
    query = rounded(rng.standard_normal((1, 2, num_heads, width)), ttnn.bfloat16)
    keys, values = (
        rounded(rng.standard_normal((2, num_kv_heads, 64, width)), ttnn.bfloat16) for _ in "kv"
    )
    sinks = mha_tt.upload(rng.standard_normal((1, num_heads, 1, 1)), device=device)
    q, k, v = (mha_tt.upload(x, device=device) for x in (query, keys, values))
    spec = parity.AttentionSpec(
        num_heads * width, num_heads, num_kv_heads=num_kv_heads, head_dim=width, sinks=True
    )
    actual = mha_tt.fused.attend_to_cache(q, k, v, last_positions, spec, learned={"sinks": sinks})
    prompts = (
        mha_tt.upload(query.swapaxes(0, 1).swapaxes(1, 2), device=device),
        k,
        v,
    )  # (B, N, 1, H)
    expected, _ = plain_attention(mha_tt)(
        *prompts, spec, key_padding_lengths=last_positions + 1, sinks=sinks
    )
    expected = mha_tt.download(expected).swapaxes(1, 2).swapaxes(0, 1)
    assert_close(mha_tt.download(actual), expected, ttnn.bfloat16)
