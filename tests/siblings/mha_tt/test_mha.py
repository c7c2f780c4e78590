"""Multi-head attention on the device: against float64, in its dtypes, and through every way in.

A layer is reached by four paths: the function or the module, with attention weights (the plain
path) or without them (the fused one, except in float32, which the kernel does not support).
Properties that must hold on every path are tested on all four.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import ttnn
from helpers.heads import fused_attention, plain_attention
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.tt.formulas import (
    TOLERANCES,
    assert_close,
    attend,
    both_dtypes,
    layer,
    module_of,
    rounded,
    rounded_weights,
    without_padding,
)

import mha_tt
import parity
from mha_spec import Temperature
from mha_tt import device as devices

PATHS = ("function-plain", "function-fused", "module-plain", "module-fused")
SPEC = parity.AttentionSpec(8, 2)
BARE = parity.AttentionSpec(8, 2, out_proj=False)  # the context is the output
SPECS = {
    "mha": SPEC,
    "bare": BARE,
    "gqa": parity.AttentionSpec(24, 6, num_kv_heads=2),
    "mqa": parity.AttentionSpec(8, 4, num_kv_heads=1),
    "head-dim": parity.AttentionSpec(8, 2, head_dim=6),
    "no-biases": parity.AttentionSpec(8, 2, qkv_bias=False, out_bias=False),
    "qkv-bias-only": parity.AttentionSpec(8, 2, out_bias=False),
    "out-bias-only": parity.AttentionSpec(8, 2, qkv_bias=False),
    "rope": parity.AttentionSpec(16, 2, rope=parity.Rope(100.0)),
    "gqa-rope": parity.AttentionSpec(24, 4, num_kv_heads=2, rope=parity.Rope(500.0), head_dim=10),
    "fused-qkv": parity.AttentionSpec(24, 4, num_kv_heads=2, fused_qkv=True),
    "fused-qkv-rope-bare": parity.AttentionSpec(
        24, 4, head_dim=48, fused_qkv=True, rope=parity.Rope(500.0), out_proj=False
    ),
    "d-in": parity.AttentionSpec(8, 2, d_in=5),
    "tiny": parity.AttentionSpec(1, 1, d_in=1),
}
CROSS = parity.AttentionSpec(8, 2, d_in=5, d_kv=7)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_path = pytest.mark.parametrize("path", PATHS)
both_forms = pytest.mark.parametrize("form", ["plain", "fused"])

# Query 1 of the first sequence attends to no key, and no query attends to key 3.
MASK = np.array(
    [
        [[[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1]]],
        [[[0, 0, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1]]],
    ],
    bool,
)
EMPTY = (0, 1)  # the empty row of an output (B, T, E)


def draw(rng, dtype, *shape):
    """Return random values that the dtype represents exactly."""
    return rounded(rng.standard_normal(shape), dtype)


def crossed(dtype, spec=SPEC):
    """Return two sequences of three queries and four keys, as in `MASK`."""
    rng = np.random.default_rng(1)
    return {"query": draw(rng, dtype, 2, 3, spec.d_in), "key": draw(rng, dtype, 2, 4, spec.d_kv)}


def attended(path, spec, device, dtype, inputs, *, weights=None, **options):
    """Return output and attention weights of a layer on one of the paths, as NumPy arrays."""
    options["need_weights"] = path.endswith("plain")
    weights = rounded_weights(spec, dtype) if weights is None else weights
    inputs = {name: mha_tt.upload(x, device=device, dtype=dtype) for name, x in inputs.items()}
    module = module_of("MultiHeadAttention", spec, device, dtype, weights)
    if path.startswith("module"):
        output, attn_weights = module(**inputs, **options)
    else:
        query = inputs.pop("query")
        output, attn_weights = mha_tt.multi_head_attention(
            query, module.weights, spec, **inputs, **options
        )
    output = without_padding(mha_tt.download(output), spec)
    return output, None if attn_weights is None else mha_tt.download(attn_weights)


def split_attended(form, device, dtype, query, key, value, **options):
    """Return the context of split heads, padded to whole tiles on the device, as a NumPy array."""
    head_dim, attention = (
        query.shape[3],
        plain_attention(mha_tt) if form == "plain" else fused_attention(mha_tt),
    )
    spec = parity.AttentionSpec(
        query.shape[1] * head_dim, query.shape[1], num_kv_heads=key.shape[1]
    )
    width = [(0, 0)] * 3 + [(0, mha_tt.padded_head_dim(head_dim) - head_dim)]
    arrays = (
        mha_tt.upload(np.pad(x, width), device=device, dtype=dtype) for x in (query, key, value)
    )
    context, _ = attention(*arrays, spec, **options)
    return mha_tt.download(context)[..., :head_dim]


def dtype_of(form):
    """Return the widest dtype that a form supports."""
    return ttnn.float32 if form == "plain" else ttnn.bfloat16


# ---- By hand -------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("head_dim", [2, 12, 16, 32, 48, 64])
def test_split_heads_moves_heads_first(device, rng, head_dim, dtype):
    """For head widths of 2 to 64, the result equals NumPy's reshape and transpose."""
    x = draw(rng, dtype, 2, 5, 3 * head_dim)
    heads = mha_tt.split_heads(mha_tt.upload(x, device=device, dtype=dtype), 3)
    assert np.array_equal(mha_tt.download(heads), x.reshape(2, 5, 3, head_dim).swapaxes(1, 2))


@pytest.mark.board
@both_dtypes
@pytest.mark.parametrize("head_dim", [2, 12, 16, 32, 48, 64])
def test_combine_heads_inverts_split_heads(device, rng, head_dim, dtype):
    """Split heads of any width are combined to the original bits."""
    x = draw(rng, dtype, 2, 33, 3 * head_dim)
    heads = mha_tt.split_heads(mha_tt.upload(x, device=device, dtype=dtype), 3)
    assert np.array_equal(mha_tt.download(mha_tt.combine_heads(heads)), x)


@both_dtypes
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_repeated_key_heads_follow_groups(device, rng, num_kv_heads, dtype):
    """repeat_kv_heads gives each query head the key head of its group."""
    x = draw(rng, dtype, 2, num_kv_heads, 5, 32)
    repeated = mha_tt.download(
        mha_tt.repeat_kv_heads(mha_tt.upload(x, device=device, dtype=dtype), 6)
    )
    assert np.array_equal(repeated, x[:, np.arange(6) // (6 // num_kv_heads)])


def test_padding_scales_no_scores(device):
    """Scores are scaled by the width of a head of the spec, not by the width of its tiles."""
    ones = np.zeros((1, 1, 1, 32))
    ones[..., :4] = 1.0
    ones = mha_tt.upload(ones, device=device, dtype=ttnn.float32)
    assert (
        mha_tt.download(
            mha_tt.attention_scores(ones, ones, None, parity.AttentionSpec(4, 1))
        ).item()
        == 2.0
    )


@both_dtypes
def test_temperature_keeps_the_dtype(device, dtype):
    """A temperature is a product in the dtype of the queries, and no operation where it is 1."""
    x = mha_tt.upload(np.ones((2, 1, 4, 32)), device=device, dtype=dtype)
    positions = np.array([[0, 2, 3, 6], [7, 10, 27, 30]])
    temperature = Temperature(4, 1.0 / math.log(2.0), first_position=1)
    actual = mha_tt.download(mha_tt.apply_temperature(x, positions, temperature))
    expected = np.array([[1.0, 1.0, 2.0, 2.0], [1.0 + math.log2(3.0)] * 2 + [4.0] * 2])
    assert_close(actual, np.broadcast_to(expected[:, None, :, None], actual.shape), dtype)
    assert mha_tt.apply_temperature(x, positions[:1] * 0, temperature) is x


@both_dtypes
def test_temperature_counts_with_rope(device, dtype):
    """With RoPE and a temperature, both count positions from zero."""
    spec = parity.AttentionSpec(8, 2, rope=parity.Rope(), temperature=Temperature(4))
    module = mha_tt.MultiHeadAttention(spec, device=device, dtype=dtype)
    tokens = mha_tt.upload(
        np.random.default_rng(0).standard_normal((1, 5, 8)), device=device, dtype=dtype
    )
    counted, expected = module(tokens)[0], module(tokens, positions=np.arange(5)[None])[0]
    assert np.array_equal(mha_tt.download(counted), mha_tt.download(expected))


@both_dtypes
def test_attention_scores_are_float32(device, dtype):
    """Scores are float32 for every dtype of the heads."""
    ones = mha_tt.upload(np.ones((1, 1, 1, 4)), device=device, dtype=dtype)
    assert mha_tt.attention_scores(ones, ones).dtype == ttnn.float32


# ---- Compared with float64 -----------------------------------------------------------------------


@sample(12)
@pytest.mark.board
@both_dtypes
@both_forms
@every_spec
def test_self_attention_matches_formula(device, rng, spec, form, dtype):
    """Output and attention weights under a random mask match the formula, and the module equals the
    function bit for bit.
    """
    weights, x = rounded_weights(spec, dtype), draw(rng, dtype, 2, 5, spec.d_in)
    mask = rng.random((2, 1, 5, 5)) < 0.4
    mask[0, :, 3] = True
    output, attn_weights = attended(
        f"module-{form}", spec, device, dtype, {"query": x}, weights=weights, mask=mask
    )
    of_function, _ = attended(
        f"function-{form}", spec, device, dtype, {"query": x}, weights=weights, mask=mask
    )
    expected, expected_weights = layer(spec, weights, x, mask=mask)
    assert np.array_equal(output, of_function)
    assert_close(output, expected, dtype)
    if attn_weights is not None:
        assert_close(attn_weights, expected_weights, dtype)


@both_dtypes
@every_path
def test_cross_attention_matches_formula(device, path, dtype):
    """Cross-attention to keys of a different width and length matches the formula on every path."""
    weights, inputs = rounded_weights(CROSS, dtype), crossed(dtype, CROSS)
    output, _ = attended(path, CROSS, device, dtype, inputs, weights=weights, mask=MASK)
    assert_close(output, layer(CROSS, weights, **inputs, mask=MASK)[0], dtype)


@both_dtypes
@every_path
@pytest.mark.parametrize("fused_qkv", [False, True], ids=["three", "packed"])
def test_separate_values_match_formula(device, rng, fused_qkv, path, dtype):
    """Values other than the keys, with packed or separate projections, match the formula."""
    spec = parity.AttentionSpec(8, 2, fused_qkv=fused_qkv)
    weights, inputs = rounded_weights(spec, dtype), crossed(dtype, spec)
    inputs["value"] = draw(rng, dtype, *inputs["key"].shape)
    output, _ = attended(path, spec, device, dtype, inputs, weights=weights)
    assert_close(output, layer(spec, weights, **inputs)[0], dtype)


@sample(12)
@both_dtypes
@both_forms
@pytest.mark.parametrize("head_dim", [2, 12, 16, 48, 80])
def test_any_head_width_matches_formula(device, rng, head_dim, form, dtype):
    """Heads of 2 to 80 features match the formula."""
    spec = parity.AttentionSpec(20, 4, num_kv_heads=2, head_dim=head_dim)
    weights, x = rounded_weights(spec, dtype), draw(rng, dtype, 2, 7, 20)
    output, _ = attended(f"module-{form}", spec, device, dtype, {"query": x}, weights=weights)
    assert_close(output, layer(spec, weights, x)[0], dtype)


LENGTHS = [(1, 1), (1, 33), (33, 1), (31, 65), (40, 40), (129, 257)]
MASKS = {
    "none": lambda rng, t, s: None,
    "causal": lambda rng, t, s: mha_tt.create_causal_mask(t, s),
    "padding": lambda rng, t, s: mha_tt.create_padding_mask([s, max(s - 2, 0)], s),
    "causal-padding": lambda rng, t, s: mha_tt.create_attention_mask(
        t, s, is_causal=True, key_padding_lengths=[s // 2, s]
    ),
    "window": lambda rng, t, s: mha_tt.create_sliding_window_mask(t, s, window_size=3),
    "of-each-head": lambda rng, t, s: rng.random((2, 4, t, s)) < 0.5,
    "everything": lambda rng, t, s: np.ones((t, s), bool),
}


@sample(12)
@pytest.mark.board
@both_forms
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), LENGTHS)
def test_any_length_and_mask_match_formula(device, rng, seq_len_q, seq_len_k, mask, form):
    """Lengths within, at and beyond tiles match the formula under every kind of mask."""
    dtype = dtype_of(form)
    query, key, value = (
        draw(rng, dtype, 2, heads, length, 8)
        for heads, length in ((4, seq_len_q), (2, seq_len_k), (2, seq_len_k))
    )
    mask = MASKS[mask](rng, seq_len_q, seq_len_k)
    context = split_attended(form, device, dtype, query, key, value, mask=mask)
    expected, _ = attend(query, key, value, mask=False if mask is None else mask)
    assert context.shape == expected.shape
    # Relative to the largest value, because a mask that hides everything makes the context 0.
    assert np.abs(context - expected).max() <= TOLERANCES[dtype] * np.abs(value).max()


TOLD = {
    "causal": {"is_causal": True},
    "padding": {"key_padding_lengths": [3, 0]},
    "causal-padding": {"is_causal": True, "key_padding_lengths": [5, 2]},
    "lengths-array": {"key_padding_lengths": np.array([1, 5], np.int32)},
}


@sample(12)
@pytest.mark.board
@both_forms
@pytest.mark.parametrize("masked", [False, True], ids=["alone", "beside-a-mask"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "beside-a-bias"])
@pytest.mark.parametrize("options", TOLD.values(), ids=TOLD)
@pytest.mark.parametrize(
    ("seq_len_q", "seq_len_k"), [(5, 5), (7, 5), (5, 40)], ids=["square", "tall", "wide"]
)
def test_causal_and_lengths_match_formula(
    device, rng, seq_len_q, seq_len_k, options, biased, masked, form
):
    """is_causal and padding lengths, alone or with a mask or a bias, match the formula with the
    equivalent mask.
    """
    dtype = dtype_of(form)
    shapes = ((4, seq_len_q), (2, seq_len_k), (2, seq_len_k))
    query, key, value = (draw(rng, dtype, 2, heads, length, 8) for heads, length in shapes)
    bias = draw(rng, dtype, seq_len_q, seq_len_k) if biased else None
    mask = rng.random((4, seq_len_q, seq_len_k)) < 0.3 if masked else None
    context = split_attended(
        form, device, dtype, query, key, value, mask=mask, bias=bias, **options
    )
    hidden = mha_tt.create_attention_mask(seq_len_q, seq_len_k, **options) | (
        False if mask is None else mask
    )
    expected, _ = attend(query, key, value, mask=hidden, bias=0.0 if bias is None else bias)
    # Relative to the largest value, because a mask that hides everything makes the context 0.
    assert np.abs(context - expected).max() <= TOLERANCES[dtype] * np.abs(value).max()


@both_forms
def test_causal_and_lengths_equal_their_mask(device, rng, form):
    """is_causal with padding lengths gives the bits of the equivalent mask."""
    dtype, options = dtype_of(form), TOLD["causal-padding"]
    query, key, value = (draw(rng, dtype, 2, 2, 5, 8) for _ in range(3))
    mask = mha_tt.create_attention_mask(5, 5, **options)
    expected = split_attended(form, device, dtype, query, key, value, mask=mask)
    assert np.array_equal(
        split_attended(form, device, dtype, query, key, value, **options), expected
    )


@both_dtypes
@both_forms
@pytest.mark.parametrize("rope", [None, parity.Rope(100.0)], ids=["no-rope", "rope"])
def test_packed_projection_matches_three(device, rng, rope, form, dtype):
    """A layer with packed projections matches one with three, with and without RoPE."""
    spec = parity.AttentionSpec(24, 4, num_kv_heads=2, rope=rope)
    inputs = {"query": draw(rng, dtype, 2, 5, 24)}
    apart, _ = attended(f"module-{form}", spec, device, dtype, inputs)
    together, _ = attended(f"module-{form}", replace(spec, fused_qkv=True), device, dtype, inputs)
    assert_close(together, apart, dtype)


@pytest.mark.board
@every_path
def test_bfloat8_b_output_is_bfloat8_b(device, path):
    """Layers in bfloat8_b give their output in it, on every path."""
    dtype, need_weights = ttnn.bfloat8_b, path.endswith("plain")
    module = mha_tt.MultiHeadAttention(SPEC, device=device, dtype=dtype)
    x = mha_tt.upload(np.ones((2, 3, 8)), device=device, dtype=dtype)
    if path.startswith("module"):
        output, _ = module(x, need_weights=need_weights)
    else:
        output, _ = mha_tt.multi_head_attention(x, module.weights, SPEC, need_weights=need_weights)
    assert output.dtype == dtype


# ---- Causal modules ------------------------------------------------------------------------------

SELF = {
    "full": {},
    "causal": {"is_causal": True},
    "padded": {"key_padding_lengths": [3, 5]},
    "causal-padded": {"is_causal": True, "key_padding_lengths": (0, 4)},
}


@sample(12)
@both_dtypes
@pytest.mark.parametrize("name", SELF)
@pytest.mark.parametrize(
    "spec", [SPECS["mha"], SPECS["gqa-rope"], SPECS["fused-qkv"]], ids=["mha", "gqa-rope", "packed"]
)
def test_self_attention_builds_its_mask(device, rng, spec, name, dtype):
    """The self-attention module with is_causal and lengths matches the formula with the equivalent
    mask.
    """
    weights, x = rounded_weights(spec, dtype), draw(rng, dtype, 2, 5, spec.d_in)
    module = module_of("MultiHeadSelfAttention", spec, device, dtype, weights)
    output = module(mha_tt.upload(x, device=device, dtype=dtype), **SELF[name])
    expected, _ = layer(spec, weights, x, mask=mha_tt.create_attention_mask(5, **SELF[name]))
    assert_close(mha_tt.download(output), expected, dtype)


@both_dtypes
def test_causal_module_accepts_other_length(device, rng, dtype):
    """A causal module called with 4 and then 9 tokens matches the formula for 9."""
    module = module_of("MultiHeadSelfAttention", SPEC, device, dtype)
    x = draw(rng, dtype, 2, 9, 8)
    for seq_len in (4, 9):
        output = module(mha_tt.upload(x[:, :seq_len], device=device, dtype=dtype), is_causal=True)
    expected, _ = layer(SPEC, rounded_weights(SPEC, dtype), x, mask=mha_tt.create_causal_mask(9))
    assert_close(mha_tt.download(output), expected, dtype)


@both_dtypes
def test_later_tiles_change_no_earlier_ones(device, rng, dtype):
    """A later token changes no bit of earlier outputs, also within its tile and the one before."""
    module, x = module_of("MultiHeadSelfAttention", SPEC, device, dtype), draw(rng, dtype, 2, 40, 8)
    before = mha_tt.download(module(mha_tt.upload(x, device=device, dtype=dtype), is_causal=True))
    x[:, 33] = 100.0
    after = mha_tt.download(module(mha_tt.upload(x, device=device, dtype=dtype), is_causal=True))
    assert np.array_equal(after[:, :33], before[:, :33])
    assert (after[:, 33:] != before[:, 33:]).any(axis=2).all()


# ---- Rows without a key --------------------------------------------------------------------------


@both_dtypes
@every_path
def test_device_mask_and_bias_empty_a_row(device, path, dtype):
    """A row is empty if a mask on the device hides some keys and an infinite bias the others."""
    bias = np.zeros((2, 1, 3, 4), np.float32)
    bias[0, :, 1, :2] = -np.inf
    mask = np.zeros((2, 1, 3, 4), bool)
    mask[0, :, 1, 2:] = True
    mask = mha_tt.DeviceMask(mask, device=device)
    output, _ = attended(path, BARE, device, dtype, crossed(dtype), bias=bias, mask=mask)
    assert not output[EMPTY].any()


@sample(12)
@both_dtypes
@every_path
@pytest.mark.parametrize(
    "mask",
    [np.ones((1, 1), bool), np.ones((3, 1), bool), np.ones((2, 1, 1, 4), bool)],
    ids=np.shape,
)
def test_broadcast_mask_can_empty_all_rows(device, mask, path, dtype):
    """A mask of True that broadcasts over keys, queries or heads makes every row exactly 0."""
    output, _ = attended(path, BARE, device, dtype, crossed(dtype), mask=mask)
    assert not output.any()


@both_dtypes
@every_path
@pytest.mark.parametrize("of", [np.float32, np.float64], ids=["of-float32", "of-float64"])
def test_lowest_bias_outweighs_a_mask(device, of, path, dtype):
    """Two keys with the lowest finite bias share the weight of a row whose other keys are
    masked.
    """
    # All keys of the first query have the lowest finite bias; two are masked, and the other two
    # share the weight.
    inputs, weights = crossed(dtype), rounded_weights(BARE, dtype)
    bias = np.zeros((3, 4), of)
    bias[0] = np.finfo(of).min
    mask = np.zeros((3, 4), bool)
    mask[0, :2] = True
    output, _ = attended(path, BARE, device, dtype, inputs, weights=weights, bias=bias, mask=mask)
    value = inputs["key"] @ weights["v_proj.weight"].T + weights["v_proj.bias"]
    assert_close(output[:, 0], value[:, 2:].mean(axis=1), dtype)


# ---- Biases --------------------------------------------------------------------------------------

BIASES = {
    "(S,)": (4,),
    "(T, S)": (3, 4),
    "(T, 1)": (3, 1),
    "(1, S)": (1, 4),
    "(N, T, S)": (2, 3, 4),
    "(N, 1, 1)": (2, 1, 1),
    "(B, 1, T, S)": (2, 1, 3, 4),
    "(B, N, 1, S)": (2, 2, 1, 4),
    "(B, N, T, 1)": (2, 2, 3, 1),
    "(B, N, T, S)": (2, 2, 3, 4),
}


# The memory of a bias, a mask next to it and its dtype are combined; its shape is combined only
# with a mask.
@sample(12)
@both_dtypes
@both_forms
@pytest.mark.parametrize(
    ("axes", "on", "masked"),
    [
        (axes, ("host", "device")[(number + masked) % 2], masked)
        for number, axes in enumerate(BIASES)
        for masked in (0, 1)
    ],
)
def test_bias_of_any_shape_matches_formula(device, rng, axes, masked, on, form, dtype):
    """A bias of any broadcastable shape, on the host or the device, with or without a mask, matches
    the formula.
    """
    bias, inputs, weights = (
        draw(rng, dtype, *BIASES[axes]),
        crossed(dtype),
        rounded_weights(BARE, dtype),
    )
    options = {"mask": MASK} if masked else {}
    bias_given = mha_tt.upload(bias, device=device, dtype=dtype) if on == "device" else bias
    output, _ = attended(
        f"module-{form}", BARE, device, dtype, inputs, weights=weights, bias=bias_given, **options
    )
    assert_close(output, layer(BARE, weights, **inputs, bias=bias, **options)[0], dtype)


@both_forms
def test_bias_of_blocks_may_be_bfloat16(device, rng, form):
    """A bfloat16 bias on the device gives a bfloat8_b layer the bits of the bias on the host."""
    bias, inputs = draw(rng, ttnn.bfloat16, 3, 4), crossed(ttnn.bfloat8_b)
    uploaded = mha_tt.upload(bias, device=device)
    output, _ = attended(f"module-{form}", BARE, device, ttnn.bfloat8_b, inputs, bias=uploaded)
    expected, _ = attended(f"module-{form}", BARE, device, ttnn.bfloat8_b, inputs, bias=bias)
    assert np.array_equal(output, expected)


@pytest.mark.board
@both_forms
def test_infinite_bias_on_device_hides_keys(device, form):
    """Elements of -inf in a bias on the device hide their keys as in the formula."""
    bias = np.array([[0.0, -np.inf, 0.5, -np.inf]], np.float32)
    inputs, weights = crossed(ttnn.bfloat16), rounded_weights(BARE, ttnn.bfloat16)
    uploaded = mha_tt.upload(bias, device=device)
    output, _ = attended(
        f"module-{form}", BARE, device, ttnn.bfloat16, inputs, weights=weights, bias=uploaded
    )
    assert_close(output, layer(BARE, weights, **inputs, bias=bias)[0], ttnn.bfloat16)


def test_causal_mask_and_bias_match_formula(device, rng):
    """A causal mask and a bias together match the formula on the fused path."""
    # Without a bias, the kernel gets a flag instead of the causal mask.
    query, key, value = (draw(rng, ttnn.bfloat16, 1, 2, 40, 8) for _ in range(3))
    bias, mask = draw(rng, ttnn.bfloat16, 40, 40), mha_tt.create_causal_mask(40)
    context = split_attended(
        "fused", device, ttnn.bfloat16, query, key, value, bias=bias, mask=mask
    )
    assert_close(context, attend(query, key, value, bias=bias, mask=mask)[0], ttnn.bfloat16)


# ---- Masks and keys on the device ----------------------------------------------------------------


@both_dtypes
@both_forms
def test_mask_on_device_equals_mask_on_host(device, form, dtype):
    """A DeviceMask gives the bits of its array."""
    on_host, _ = attended(f"module-{form}", SPEC, device, dtype, crossed(dtype), mask=MASK)
    mask = mha_tt.DeviceMask(MASK, device=device)
    on_device, _ = attended(f"module-{form}", SPEC, device, dtype, crossed(dtype), mask=mask)
    assert np.array_equal(on_device, on_host)


# ---- bfloat8_b -----------------------------------------------------------------------------------

NARROW = {name: SPECS[name] for name in ("mha", "gqa-rope", "fused-qkv", "fused-qkv-rope-bare")}
narrow_specs = pytest.mark.parametrize("spec", NARROW.values(), ids=NARROW)


@pytest.mark.board
@both_forms
@narrow_specs
def test_bfloat8_b_weights_equal_bfloat16(device, rng, spec, form):
    """A layer with bfloat8_b weights returns the bits of a bfloat16 layer with the same values."""
    narrow = module_of("MultiHeadAttention", spec, device, weight_dtype=ttnn.bfloat8_b)
    wide = module_of("MultiHeadAttention", spec, device, weights=parity.weights_of(narrow))
    x = mha_tt.upload(rng.standard_normal((2, 5, spec.d_in)), device=device)
    outputs = [
        mha_tt.download(module(x, need_weights=form == "plain")[0]) for module in (narrow, wide)
    ]
    assert np.array_equal(*outputs)


def test_bfloat8_b_rounds_given_weights(device):  # the control of the test above
    """Control: bfloat8_b weights differ from the given ones."""
    narrow = module_of("MultiHeadAttention", SPEC, device, weight_dtype=ttnn.bfloat8_b)
    rounded = rounded_weights(SPEC, ttnn.bfloat16)["q_proj.weight"]
    assert not np.array_equal(
        parity.weights_of(narrow)["q_proj.weight"].astype(np.float32), rounded
    )


@pytest.mark.board
@both_forms
@narrow_specs
def test_bfloat8_b_inputs_match_formula(device, rng, spec, form):
    """Layers with inputs in bfloat8_b match the formula within the tolerance of that dtype."""
    module = module_of("MultiHeadAttention", spec, device, ttnn.bfloat8_b)
    weights = {
        name: weight.astype(np.float32) for name, weight in parity.weights_of(module).items()
    }
    x, mask = (
        draw(rng, ttnn.bfloat8_b, 2, 5, spec.d_in),
        mha_tt.create_attention_mask(5, key_padding_lengths=[3, 0]),
    )
    output, _ = module(
        mha_tt.upload(x, device=device, dtype=ttnn.bfloat8_b),
        mask=mask,
        need_weights=form == "plain",
    )
    output = without_padding(mha_tt.download(output), spec)
    assert_close(output, layer(spec, weights, x, mask=mask)[0], ttnn.bfloat8_b)


# ---- Dropout -------------------------------------------------------------------------------------


def dropping(device, dtype=ttnn.bfloat16, seed=0, **rates):
    """Return a module in training mode with the random weights of `SPEC` and dropout from the
    seed.
    """
    spec = replace(SPEC, **rates)
    module = mha_tt.MultiHeadAttention(
        spec, device=device, dtype=dtype, rng=np.random.default_rng(seed)
    )
    module.load_weights(parity.random_weights(SPEC))
    return module


def output_of(module, x, **options):
    output, _ = module(mha_tt.upload(x, device=module.device, dtype=module.dtype), **options)
    return mha_tt.download(output)


@pytest.mark.board
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_rate_and_scale_are_correct(device, rate):
    """The share of dropped elements is within 5 deviations of the rate, and others are scaled by 1
    / (1 - rate).
    """
    ones = mha_tt.upload(np.ones((1, 2, 64, 64)), device=device)
    dropped = mha_tt.download(mha_tt.apply_dropout(ones, rate, seed=7))
    deviation = math.sqrt(rate * (1 - rate) / dropped.size)
    assert abs((dropped == 0.0).mean() - rate) <= 5 * deviation
    assert dropped[dropped != 0.0] == pytest.approx(1.0 / (1.0 - rate), rel=2**-7)


def test_zero_dropout_returns_same_tensor(device):
    """Dropout with rate 0 returns the same tensor object."""
    ones = mha_tt.upload(np.ones((1, 2, 4, 4)), device=device, dtype=ttnn.float32)
    assert mha_tt.apply_dropout(ones, 0.0) is ones


@pytest.mark.board
def test_output_dropout_rate_is_correct(device, rng):
    """The share of outputs that are 0 is within 5 deviations of the rate."""
    module = dropping(device, output_dropout=0.25)
    dropped = output_of(module, rng.standard_normal((4, 64, 8))) == 0.0
    assert abs(dropped.mean() - 0.25) <= 5 * math.sqrt(0.25 * 0.75 / dropped.size)


@pytest.mark.board
def test_training_can_be_switched_on_again(device, rng):
    """After eval() and train(), dropout gives the bits of a new layer."""
    module, x = dropping(device, dropout=0.5), rng.standard_normal((2, 5, 8))
    assert np.array_equal(
        output_of(module.eval().train(), x), output_of(dropping(device, dropout=0.5), x)
    )


@pytest.mark.parametrize("rates", [{"dropout": 0.5}, {"output_dropout": 0.5}], ids=str)
def test_random_dropout_in_float32_raises(device, rng, rates):
    """Random dropout in float32 raises an error that names the dtype."""
    with rejects_type("the module", dtype=...):
        output_of(dropping(device, ttnn.float32, **rates), rng.standard_normal((2, 5, 8)))


@pytest.mark.parametrize("rates", [{"dropout": 0.5}, {"output_dropout": 0.5}], ids=str)
def test_function_drops_by_its_seed(device, rng, rates):
    """A function in training drops the same for the same seed, and other values for another."""
    x, spec = mha_tt.upload(rng.standard_normal((2, 5, 8)), device=device), replace(SPEC, **rates)
    weights = mha_tt.upload_weights(parity.random_weights(SPEC), SPEC, device=device)
    outputs = (
        mha_tt.multi_head_attention(x, weights, spec, training=True, seed=seed)[0]
        for seed in (3, 3, 4)
    )
    first, again, other = (mha_tt.download(output) for output in outputs)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.board
@both_dtypes
@pytest.mark.parametrize("path", ["function-plain", "function-fused"])
@pytest.mark.parametrize("shape", [(2, 2, 3, 4), (3, 4), (4,)], ids=str)
def test_given_dropout_matches_formula(device, rng, shape, path, dtype):
    """With dropout_keep of any broadcastable shape, output and weights match the formula."""
    spec, keep = replace(SPEC, dropout=0.25), rng.random(shape) < 0.7
    inputs, weights = crossed(dtype), rounded_weights(spec, dtype)
    options = {"training": True, "dropout_keep": keep}
    output, attn_weights = attended(
        path, spec, device, dtype, inputs, weights=weights, mask=MASK, **options
    )
    expected, expected_weights = layer(spec, weights, **inputs, mask=MASK, multiplier=keep / 0.75)
    assert_close(output, expected, dtype)
    if attn_weights is not None:
        assert_close(attn_weights, expected_weights, dtype)


# ---- Between the host and the device -------------------------------------------------------------

READS = {"ttnn.from_device", "ttnn.to_torch", "ttnn.to_dtype"}


@pytest.fixture
def no_downloads(device, monkeypatch):
    """Fail the test if a tensor is read back."""

    def reject(tensor):
        pytest.fail("a tensor was read back")

    with monkeypatch.context() as patch:
        patch.setattr(devices, "readers", [reject])
        yield


@pytest.mark.usefixtures("no_downloads")
@both_dtypes
@pytest.mark.parametrize(
    "spec", [SPECS["mha"], SPECS["gqa-rope"], SPECS["fused-qkv"]], ids=["mha", "gqa-rope", "packed"]
)
def test_second_causal_call_moves_nothing(device, calls, uploads, spec, dtype):
    """The second causal call of a module uploads nothing and reads nothing back."""
    module = module_of("MultiHeadSelfAttention", spec, device, dtype)
    x = mha_tt.upload(np.ones((2, 5, spec.d_in)), device=device, dtype=dtype)
    module(x, is_causal=True)
    uploads.clear()
    calls.clear()
    module(x, is_causal=True)
    assert uploads == []
    assert READS & {call.name for call in calls} == set()


@pytest.mark.usefixtures("no_downloads")
@both_dtypes
@both_forms
def test_device_mask_is_uploaded_once(device, uploads, form, dtype):
    """The second call with the same DeviceMask uploads nothing, and no call reads anything back."""
    module = module_of("MultiHeadAttention", SPEC, device, dtype)
    query, key = (mha_tt.upload(x, device=device, dtype=dtype) for x in crossed(dtype).values())
    mask = mha_tt.DeviceMask(MASK, device=device)
    module(query, key, mask=mask, need_weights=form == "plain")
    uploads.clear()
    module(query, key, mask=mask, need_weights=form == "plain")
    assert uploads == []


def test_fused_path_uploads_no_causal_mask(device, calls, uploads):
    """A causal mask is recognized: the kernel gets is_causal instead of a mask, and nothing is
    uploaded.
    """
    module = module_of("MultiHeadAttention", SPEC, device)
    x = mha_tt.upload(np.ones((2, 40, 8)), device=device)
    uploads.clear()
    module(x, mask=mha_tt.create_causal_mask(40))
    call, _ = (
        call for call in calls if call.name == "ttnn.transformer.scaled_dot_product_attention"
    )
    assert (call.keywords["is_causal"], call.keywords["attn_mask"], uploads) == (True, None, [])


def test_packed_self_attention_projects_once(device, calls):
    """Self-attention with packed weights runs two linear operations, one of them for the output."""
    module = module_of("MultiHeadAttention", SPECS["fused-qkv"], device)
    module(mha_tt.upload(np.ones((2, 5, 24)), device=device))
    assert [call.name for call in calls].count("ttnn.linear") == 2  # in and out


def test_inputs_are_not_modified(device, rng):
    """A call does not modify its input tensor."""
    x = draw(rng, ttnn.bfloat16, 2, 5, 24)
    tensor = mha_tt.upload(x, device=device)
    module_of("MultiHeadAttention", SPECS["gqa-rope"], device)(tensor)
    assert np.array_equal(mha_tt.download(tensor), x)


# ---- Modules -------------------------------------------------------------------------------------


def test_module_repr_shows_its_dtypes(device):
    """The repr of a module begins with its spec, dtype and weight_dtype."""
    shown = repr(mha_tt.MultiHeadAttention(SPEC, device=device, weight_dtype=ttnn.bfloat8_b))
    assert shown.startswith(
        "MultiHeadAttention(AttentionSpec(8, 2), dtype=bfloat16, weight_dtype=bfloat8_b, "
    )


@both_forms
def test_loaded_weights_apply_to_next_call(device, rng, form):
    """After load_weights, the output matches the formula with these weights."""
    module = module_of("MultiHeadAttention", SPEC, device, ttnn.float32)
    x = rng.standard_normal((2, 5, 8)).astype(np.float32)
    output_of(module, x, need_weights=form == "plain")
    weights = {name: 2.0 * weight for name, weight in parity.random_weights(SPEC).items()}
    module.load_weights(weights)
    expected, _ = layer(SPEC, weights, x)
    assert_close(output_of(module, x, need_weights=form == "plain"), expected, ttnn.float32)


# ---- Wide heads and positions --------------------------------------------------------------------


@pytest.mark.board
@pytest.mark.parametrize(
    ("dtype", "heads"), [(ttnn.float32, 64), (ttnn.bfloat16, 96)], ids=["float32", "bfloat16"]
)
def test_wide_heads_are_combined_exactly(device, dtype, heads):
    """64 float32 or 96 bfloat16 heads of 128 features are combined to the exact values."""
    x = np.random.default_rng(0).integers(-9, 9, (1, heads, 3, 128))
    combined = mha_tt.combine_heads(mha_tt.upload(x.astype(np.float32), device=device, dtype=dtype))
    assert np.array_equal(mha_tt.download(combined), x.swapaxes(1, 2).reshape(1, 3, -1))


@pytest.mark.parametrize(
    ("positions", "error"),
    [
        ([[5]], ValueError),
        ([5, 6, 7], ValueError),
        ([[0, 1, 2]] * 3, ValueError),
        ([[0.0, 1.0, 2.0]], TypeError),
    ],
    ids=["one", "rank 1", "batch", "float"],
)
def test_invalid_projected_positions_raise(device, positions, error):
    """Positions of a wrong length, rank, batch or dtype raise an error in project_qkv."""
    spec = parity.AttentionSpec(8, 2, rope=parity.Rope(1e4))
    uploaded = mha_tt.upload_weights(parity.random_weights(spec), spec, device=device)
    x = mha_tt.upload(np.ones((2, 3, 8)), device=device)
    with rejects("positions").of(error):
        mha_tt.project_qkv(mha_tt.project_with(uploaded), x, x, x, spec, np.array(positions))


def test_rotations_of_wrong_positions_raise(device):
    """A Rotation whose positions do not fit the tokens raises an error."""
    spec = parity.AttentionSpec(8, 2, rope=parity.Rope(1e4))
    uploaded = mha_tt.upload_weights(parity.random_weights(spec), spec, device=device)
    rotations = mha_tt.Rotation(np.array([[0]]), spec.rope, head_dim=4, padded=64, device=device)
    x = mha_tt.upload(np.ones((2, 3, 8)), device=device)
    with rejects("positions", "a Rotation for (1, 1)"):
        mha_tt.multi_head_attention(x, uploaded, spec, positions=rotations)


@pytest.mark.parametrize("has_key", [False, True], ids=["self", "cross"])
@every_path
def test_rotation_without_use_is_ignored(device, path, has_key):
    """A layer takes a rotation on the device even if nothing depends on positions."""
    inputs = {name: x for name, x in crossed(ttnn.bfloat16).items() if has_key or name != "key"}
    rotation = mha_tt.Rotation(
        np.array([[7, 3, 5]]), parity.Rope(), head_dim=4, padded=64, device=device
    )
    expected, _ = attended(path, SPEC, device, ttnn.bfloat16, inputs)
    actual, _ = attended(path, SPEC, device, ttnn.bfloat16, inputs, positions=rotation)
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("seq_len", [1, 5, 40])
def test_lazy_causal_mask_equals_table(device, seq_len):
    """A lazy causal mask has the shape, flags and hidden form of its table."""
    late, early = (
        mha_tt.masks.CausalMask(seq_len, device=device),
        mha_tt.DeviceMask(mha_tt.create_causal_mask(seq_len), device=device),
    )
    assert late.is_causal
    assert early.is_causal
    assert late.shape == early.shape
    assert late.rows_with_keys is None
    assert np.array_equal(mha_tt.download(late.hidden), mha_tt.download(early.hidden))


# ---- Empty inputs --------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize(
    "spec", [{}, {"fused_qkv": True}, {"rope": parity.Rope(100.0)}, {"out_proj": False}], ids=str
)
@pytest.mark.parametrize("shape", [(2, 0, 24), (0, 3, 24)])
def test_self_attention_accepts_empty_input(device, shape, spec, dtype):
    """Self-attention without tokens or sequences has an output of the same size."""
    module = module_of("MultiHeadSelfAttention", parity.AttentionSpec(24, 4, **spec), device, dtype)
    x = mha_tt.upload(np.ones(shape), device=device, dtype=dtype)
    for options in ({}, {"is_causal": True}, {"key_padding_lengths": [0] * shape[0]}):
        assert tuple(module(x, **options).shape)[:2] == shape[:2]
