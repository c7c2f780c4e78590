"""NaN and infinity reach the rows that attend to them, and no others.

These tests need a mock board, whose golden functions follow IEEE 754; cards differ (`docs/reference/ttnn.md`).
"""

import numpy as np
import pytest
import ttnn
from helpers.refusals import refuses
from helpers.samples import sample
from helpers.tt.formulas import both_dtypes, module_of, rounded

import mha_tt
import parity
from mha_spec import AttentionSpec
from parity.backends import tt as backend

B, N, K, T, H = 2, 4, 2, 40, 32
TOKEN = 5  # of the first sequence, non-finite in the first key/value head

PATHS = {
    "plain": (mha_tt.scaled_dot_product_attention, ttnn.float32),
    "fused": (mha_tt.fused.scaled_dot_product_attention, ttnn.bfloat16),
}
every_path = pytest.mark.parametrize(("attend", "dtype"), PATHS.values(), ids=PATHS)

CAUSAL = mha_tt.create_causal_mask(T)
WINDOW = mha_tt.create_sliding_window_mask(T, window_size=3)
HEADS = np.arange(T) % np.arange(2, 2 + N)[:, None, None] == 1  # (N, 1, T): different in every head
RANDOM = np.random.default_rng(3).random((B, 1, T, T)) < 0.5
RANDOM[0, 0, 7] = True  # a row without a key

OPTIONS = {
    # name: (options, equivalent mask)
    "nothing": ({}, np.zeros((1, 1), bool)),
    "causal": ({"is_causal": True}, CAUSAL),
    "causal-mask": ({"mask": CAUSAL}, CAUSAL),
    "window": ({"mask": WINDOW}, WINDOW),
    "hidden-by-length": ({"key_padding_lengths": [5, 40]}, mha_tt.create_padding_mask([5, 40], T)),
    "seen-by-length": ({"key_padding_lengths": [6, 40]}, mha_tt.create_padding_mask([6, 40], T)),
    "no-key": ({"key_padding_lengths": [0, 40]}, mha_tt.create_padding_mask([0, 40], T)),
    "causal-and-length": (
        {"is_causal": True, "key_padding_lengths": [5, 40]},
        mha_tt.create_attention_mask(T, is_causal=True, key_padding_lengths=[5, 40]),
    ),
    "heads": ({"mask": HEADS}, HEADS),
    "heads-and-rows": ({"mask": HEADS | CAUSAL}, HEADS | CAUSAL),
    "random": ({"mask": RANDOM}, RANDOM),
    "rows": ({"mask": RANDOM[:, :, :, :1]}, RANDOM[:, :, :, :1]),
    "causal-and-bias": ({"is_causal": True, "bias": np.ones((N, 1, 1), np.float32)}, CAUSAL),
}
every_option = pytest.mark.parametrize(("options", "mask"), OPTIONS.values(), ids=OPTIONS)


def heads(dtype, seed):
    return rounded(np.random.default_rng(seed).standard_normal((B, N if seed == 0 else K, T, H)), dtype)


def run(device, attend, dtype, inputs, **options):
    context, _ = attend(*(mha_tt.upload(x, device=device, dtype=dtype) for x in inputs), **options)
    return mha_tt.download(context)


# ---- Split heads -----------------------------------------------------------------------------------------------------


@sample(12)
@every_path
@every_option
@pytest.mark.parametrize(("name", "value"), [("key", np.nan), ("value", np.inf)])
def test_non_finite_key_spoils_only_its_rows(device, name, value, options, mask, attend, dtype):
    """NaN in a key or infinity in a value reaches exactly the rows that attend to it; other rows
    keep their bits.
    """
    inputs = [heads(dtype, seed) for seed in range(3)]
    clean = run(device, attend, dtype, inputs, **options)
    inputs[1 if name == "key" else 2][0, 0, TOKEN, 3] = value
    context = run(device, attend, dtype, inputs, **options)
    sees = np.zeros((B, N, T), bool)
    sees[0, : N // K] = ~np.broadcast_to(mask, (B, N, T, T))[0, : N // K, :, TOKEN]
    assert np.isfinite(clean).all()
    assert np.array_equal((~np.isfinite(context)).any(axis=-1), sees)
    assert np.array_equal(context[~sees], clean[~sees])


@sample(12)
@pytest.mark.board
@every_path
@every_option
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_non_finite_query_spoils_its_row(device, value, options, mask, attend, dtype):
    """NaN or infinity in a query spoils its row, unless the row has no key: then it is 0; others
    keep their bits.
    """
    inputs = [heads(dtype, seed) for seed in range(3)]
    clean = run(device, attend, dtype, inputs, **options)
    inputs[0][0, :, :8, 3] = value
    context = run(device, attend, dtype, inputs, **options)
    is_empty = np.broadcast_to(mask, (B, N, T, T)).all(axis=-1)
    is_spoilt = np.zeros((B, N, T), bool)
    is_spoilt[0, :, :8] = ~is_empty[0, :, :8]
    assert np.array_equal((~np.isfinite(context)).any(axis=-1), is_spoilt)
    assert np.array_equal(context[~is_spoilt], clean[~is_spoilt])
    assert not context[is_empty].any()


def test_softmax_of_infinite_scores_is_nan(device):
    """A row whose visible scores are all -inf is NaN; in another row, a score of -inf and a masked
    key have weight 0.
    """
    scores = mha_tt.upload(np.array([[[[-np.inf, -np.inf, 1.0], [-np.inf, 0.0, 1.0]]]]), device=device)
    attn_weights = mha_tt.download(mha_tt.masked_softmax(scores, np.array([False, False, True])))[0, 0]
    assert np.isnan(attn_weights[0]).all()
    assert attn_weights[1].tolist() == [0.0, 1.0, 0.0]


# ---- Layers ----------------------------------------------------------------------------------------------------------

SPEC = parity.AttentionSpec(24, 4, num_kv_heads=2, rope=parity.Rope(100.0))


def tokens(dtype, spoilt=None, value=np.nan, seq_len=6):
    x = rounded(np.random.default_rng(1).standard_normal((2, seq_len, 24)), dtype)
    if spoilt is not None:
        x[0, spoilt, 3] = value
    return x


def apply(module, x, **options):
    output = module(mha_tt.upload(x, device=module.device, dtype=module.dtype), **options)
    return mha_tt.download(output[0] if isinstance(output, tuple) else output)


@both_dtypes
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_nan_spoils_only_later_tokens(device, need_weights, value, dtype):
    """A NaN or infinite token spoils its own output and all later ones, and no bit of earlier ones."""
    module = module_of("MultiHeadAttention", SPEC, device, dtype)
    options = {"is_causal": True, "need_weights": need_weights}
    clean, output = (apply(module, x, **options) for x in (tokens(dtype), tokens(dtype, 3, value)))
    is_spoilt = np.zeros((2, 6), bool)
    is_spoilt[0, 3:] = True
    assert np.array_equal((~np.isfinite(output)).all(axis=-1), is_spoilt)
    assert np.array_equal(output[~is_spoilt], clean[~is_spoilt])


@both_dtypes
def test_non_finite_padding_has_no_effect(device, dtype):
    """NaN in padding changes no bit of a real token."""
    module = module_of("MultiHeadSelfAttention", SPEC, device, dtype)
    for is_causal in (False, True):
        options = {"key_padding_lengths": [4, 6], "is_causal": is_causal}
        clean, output = (apply(module, x, **options) for x in (tokens(dtype), tokens(dtype, 4)))
        is_real = np.arange(6) < np.array([4, 6])[:, None]
        assert np.array_equal(output[is_real], clean[is_real])


@both_dtypes
def test_nan_weights_yield_nan_outputs(device, dtype):
    """NaN in the projection of queries makes every output NaN."""
    module = module_of("MultiHeadSelfAttention", SPEC, device, dtype)
    name = "q_proj.weight"
    module.weights[name] = mha_tt.upload(np.full(tuple(module.weights[name].shape), np.nan), device=device, dtype=dtype)
    for options in ({}, {"is_causal": True}, {"key_padding_lengths": [4, 6]}):
        assert np.isnan(apply(module, tokens(dtype), **options)).all()


# ---- Caches ----------------------------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("chunks", [[2, 4], [3, 1, 1, 1]], ids=str)  # as part of a chunk, or as a step before others
@pytest.mark.parametrize("growing", [False, True], ids=["static", "growing"])
def test_cached_nan_spoils_only_later_tokens(device, growing, chunks, dtype):
    """A NaN token in a static or growing cache spoils its own output and all later ones, and no bit
    of others.
    """
    module = module_of("MultiHeadAttentionWithCache", SPEC, device, dtype)
    outputs = []
    for x in (tokens(dtype), tokens(dtype, 3)):
        cache, held, output = module.init_cache(2, 8), (None, None), []
        for chunk in np.split(x, np.cumsum(chunks)[:-1], axis=1):
            chunk = mha_tt.upload(chunk, device=device, dtype=dtype)
            if growing:
                result, *held = mha_tt.multi_head_attention_with_cache(chunk, module.weights, SPEC, *held)
            else:
                result, cache = module(chunk, cache)
            output.append(mha_tt.download(result))
        outputs.append(np.concatenate(output, axis=1))
    is_spoilt = np.zeros((2, 6), bool)
    is_spoilt[0, 3:] = True
    assert np.array_equal(np.isnan(outputs[1]).all(axis=-1), is_spoilt)
    assert np.array_equal(outputs[1][~is_spoilt], outputs[0][~is_spoilt])


# ---- Costs without hidden keys ---------------------------------------------------------------------------------------

LOOKS = {"ttnn.isfinite", "ttnn.cumsum"}


@pytest.mark.parametrize("options", [{}, {"key_padding_lengths": [T, T]}, {"mask": np.zeros((T, T), bool)}], ids=str)
def test_unmasked_call_skips_nan_search(device, calls, options):
    """If no key is hidden, the fused path does not search for non-finite values."""
    inputs = [heads(ttnn.bfloat16, seed) for seed in range(3)]
    run(device, mha_tt.fused.scaled_dot_product_attention, ttnn.bfloat16, inputs, **options)
    assert not LOOKS & {call.name for call in calls}


def test_step_skips_nan_search(device, calls):
    """A step does not search for non-finite values."""
    module = module_of("MultiHeadAttentionWithCache", SPEC, device)
    _, cache = module(mha_tt.upload(tokens(ttnn.bfloat16), device=device), module.init_cache(2, 8))
    calls.clear()
    module(mha_tt.upload(tokens(ttnn.bfloat16, seq_len=1), device=device), cache)
    assert not LOOKS & {call.name for call in calls}


@pytest.mark.board
@pytest.mark.parametrize("lengths", [[5, 40], [0, 40]], ids=str)
def test_padding_is_cut_without_nan_search(device, calls, lengths):
    """With padding lengths only, padding is set to 0 without a search for non-finite values."""
    inputs = [heads(ttnn.bfloat16, seed) for seed in range(3)]
    run(device, mha_tt.fused.scaled_dot_product_attention, ttnn.bfloat16, inputs, key_padding_lengths=lengths)
    names = [call.name for call in calls]
    assert (names.count("ttnn.where"), names.count("ttnn.isfinite")) == (
        3 + (0 in lengths),
        0,
    )  # one of them is for rows that the kernel loses


# ---- Reading heads back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_padding_of_finite_heads_must_be_0(lost):
    """Reading heads raises an error for non-zero padding, except in tokens that are NaN or infinite.

    Kernels may turn a NaN token, and the padding of its heads, into infinity.
    """
    shapes = backend.Padded(backend, AttentionSpec(48, 4))
    padded = np.zeros((1, 4, 3, 32), np.float32)
    padded[:, :, 1] = lost
    assert shapes.real(padded, "v_proj").shape == (1, 4, 3, 12)
    padded[0, 0, 2, 31] = 1e-3
    with refuses("features that pad a head", "others in (1, 4, 3, 32)"):
        shapes.real(padded, "v_proj")
