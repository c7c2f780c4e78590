"""NaN and infinity: never lost to the rows that see them, and kept from those that may not.

On a mock board, where golden functions follow IEEE 754. A card differs: `docs/reference/ttnn.md`.
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
TOKEN = 5  # of the first sequence, in the first key/value head, where something is not finite

PATHS = {
    "plain": (mha_tt.scaled_dot_product_attention, ttnn.float32),
    "fused": (mha_tt.fused.scaled_dot_product_attention, ttnn.bfloat16),
}
every_path = pytest.mark.parametrize(("attend", "dtype"), PATHS.values(), ids=PATHS)

CAUSAL = mha_tt.create_causal_mask(T)
WINDOW = mha_tt.create_sliding_window_mask(T, window_size=3)
HEADS = np.arange(T) % np.arange(2, 2 + N)[:, None, None] == 1  # (N, 1, T): another in every head
RANDOM = np.random.default_rng(3).random((B, 1, T, T)) < 0.5
RANDOM[0, 0, 7] = True  # a row without a key

OPTIONS = {
    # name: (options, the mask that they mean)
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
def test_key_that_is_not_finite_reaches_the_rows_that_see_it_and_no_others(
    device, name, value, options, mask, attend, dtype
):
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
def test_query_that_is_not_finite_spoils_its_row_unless_it_has_no_key(device, value, options, mask, attend, dtype):
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


def test_softmax_of_nothing_but_minus_infinity_is_nan_and_gives_a_masked_key_nothing(device):
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
def test_causal_layer_is_spoilt_from_the_token_on(device, need_weights, value, dtype):
    module = module_of("MultiHeadAttention", SPEC, device, dtype)
    options = {"is_causal": True, "need_weights": need_weights}
    clean, output = (apply(module, x, **options) for x in (tokens(dtype), tokens(dtype, 3, value)))
    is_spoilt = np.zeros((2, 6), bool)
    is_spoilt[0, 3:] = True
    assert np.array_equal((~np.isfinite(output)).all(axis=-1), is_spoilt)
    assert np.array_equal(output[~is_spoilt], clean[~is_spoilt])


@both_dtypes
def test_padding_that_is_not_finite_changes_no_real_token(device, dtype):
    module = module_of("MultiHeadSelfAttention", SPEC, device, dtype)
    for is_causal in (False, True):
        options = {"key_padding_lengths": [4, 6], "is_causal": is_causal}
        clean, output = (apply(module, x, **options) for x in (tokens(dtype), tokens(dtype, 4)))
        is_real = np.arange(6) < np.array([4, 6])[:, None]
        assert np.array_equal(output[is_real], clean[is_real])


@both_dtypes
def test_weights_that_became_nan_give_nan(device, dtype):
    module = module_of("MultiHeadSelfAttention", SPEC, device, dtype)
    name = "q_proj.weight"
    module.weights[name] = mha_tt.upload(np.full(tuple(module.weights[name].shape), np.nan), device=device, dtype=dtype)
    for options in ({}, {"is_causal": True}, {"key_padding_lengths": [4, 6]}):
        assert np.isnan(apply(module, tokens(dtype), **options)).all()


# ---- Caches ----------------------------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("chunks", [[2, 4], [3, 1, 1, 1]], ids=str)  # it comes in a chunk, or by itself before steps
@pytest.mark.parametrize("growing", [False, True], ids=["static", "growing"])
def test_cached_token_that_is_nan_spoils_itself_and_what_comes_after_it(device, growing, chunks, dtype):
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


# ---- What it costs where nothing is hidden ---------------------------------------------------------------------------

LOOKS = {"ttnn.isfinite", "ttnn.cumsum"}


@pytest.mark.parametrize("options", [{}, {"key_padding_lengths": [T, T]}, {"mask": np.zeros((T, T), bool)}], ids=str)
def test_nothing_is_looked_for_where_nothing_is_hidden(device, calls, options):
    inputs = [heads(ttnn.bfloat16, seed) for seed in range(3)]
    run(device, mha_tt.fused.scaled_dot_product_attention, ttnn.bfloat16, inputs, **options)
    assert not LOOKS & {call.name for call in calls}


def test_nothing_is_looked_for_in_a_step(device, calls):
    module = module_of("MultiHeadAttentionWithCache", SPEC, device)
    _, cache = module(mha_tt.upload(tokens(ttnn.bfloat16), device=device), module.init_cache(2, 8))
    calls.clear()
    module(mha_tt.upload(tokens(ttnn.bfloat16, seq_len=1), device=device), cache)
    assert not LOOKS & {call.name for call in calls}


@pytest.mark.board
@pytest.mark.parametrize("lengths", [[5, 40], [0, 40]], ids=str)
def test_padding_alone_is_cut_off_without_a_look_at_the_rest(device, calls, lengths):
    inputs = [heads(ttnn.bfloat16, seed) for seed in range(3)]
    run(device, mha_tt.fused.scaled_dot_product_attention, ttnn.bfloat16, inputs, key_padding_lengths=lengths)
    names = [call.name for call in calls]
    assert (names.count("ttnn.where"), names.count("ttnn.isfinite")) == (
        3 + (0 in lengths),
        0,
    )  # one is for rows that the kernel lost


# ---- What is read back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_what_pads_a_head_is_refused_but_where_the_head_is_lost(lost):
    """Kernels make a token that is NaN infinite where a product leaves it so, and the padding of its heads, too."""
    shapes = backend.Padded(backend, AttentionSpec(48, 4))
    padded = np.zeros((1, 4, 3, 32), np.float32)
    padded[:, :, 1] = lost
    assert shapes.real(padded, "v_proj").shape == (1, 4, 3, 12)
    padded[0, 0, 2, 31] = 1e-3
    with refuses("features that pad a head", "others in (1, 4, 3, 32)"):
        shapes.real(padded, "v_proj")
