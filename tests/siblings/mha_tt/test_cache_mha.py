"""Tests of the key/value cache: tokens in chunks of any size give the results of one full causal
pass.

The device writes whole tiles of 32 slots or single slots, so the boundaries of chunks matter.
"""

import numpy as np
import pytest
import ttnn
from helpers.input_errors import rejects, rejects_type
from helpers.tt.formulas import (
    assert_close,
    attend,
    both_dtypes,
    every_dtype,
    full_pass,
    layer,
    module_of,
    project_heads,
    rounded,
    rounded_weights,
    without_padding,
)

import mha_tt
import parity
from mha_spec import AttentionSpec, Norm
from mha_tt import device as devices
from mha_tt.kernels.nonfinite import contained

SPECS = {
    "mha": parity.AttentionSpec(24, 4),
    "gqa-rope": parity.AttentionSpec(24, 4, num_kv_heads=2, rope=parity.Rope(10000.0)),
    "mqa-no-out-proj": parity.AttentionSpec(24, 4, num_kv_heads=1, qkv_bias=False, out_proj=False),
    "fused-qkv-head-dim": parity.AttentionSpec(
        24, 4, num_kv_heads=2, head_dim=10, fused_qkv=True, rope=parity.Rope(500.0)
    ),
    "head-dim-48": parity.AttentionSpec(
        24, 2, head_dim=48, rope=parity.Rope(500.0), out_proj=False
    ),
}
GQA_ROPE = SPECS["gqa-rope"]
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def random_tokens(num_tokens, dtype=ttnn.bfloat16, batch=3, seed=1, width=24):
    """Return the first `num_tokens` tokens of random sequences."""
    return rounded(
        np.random.default_rng(seed).standard_normal((batch, 80, width))[:, :num_tokens], dtype
    )


def cached_layer(spec, device, dtype=ttnn.bfloat16, **options):
    return module_of("MultiHeadAttentionWithCache", spec, device, dtype, **options)


def feed(module, x, chunks, capacity, cache=None):
    """Feed all tokens in chunks of these sizes; return the outputs and the cache."""
    cache = module.init_cache(len(x), capacity) if cache is None else cache
    outputs = []
    for chunk in np.split(x, np.cumsum(chunks)[:-1], axis=1):
        output, cache = module(
            mha_tt.upload(chunk, device=module.device, dtype=module.dtype), cache
        )
        outputs.append(mha_tt.download(output))
    return np.concatenate(outputs, axis=1), cache


def filled_cache(module, lengths, capacity):
    """Return a cache that holds the first few random tokens of each sequence."""
    x = random_tokens(max(*lengths, 1), module.dtype, len(lengths), seed=2)
    cache = module.init_cache(len(lengths), capacity)
    return module(
        mha_tt.upload(x, device=module.device, dtype=module.dtype), cache, new_lengths=lengths
    )[1]


def contents(cache):
    """Return copies of keys, values and lengths as arrays."""
    return mha_tt.download(cache.keys), mha_tt.download(cache.values), cache.lengths.copy()


def sharing(source):
    """Return a cached layer with the source's weights that shares its keys and values."""
    weights = {
        name: x for name, x in parity.weights_of(source).items() if name[:2] not in ("k_", "v_")
    }
    spec = source.spec.replace(shared_kv=True)
    return module_of("MultiHeadAttentionWithCache", spec, source.device, source.dtype, weights)


@pytest.mark.parametrize("window_size", [None, 3])
@pytest.mark.parametrize(
    "steps", [[None] * 3, [[4, 2, 0], [1, 1, 1], [0, 1, 1]]], ids=["even", "ragged"]
)
@pytest.mark.parametrize("page_size", [None, 32])
def test_shared_keys_use_source_cache(device, window_size, steps, page_size):
    """A layer with shared keys attends to the source layer's cache, returns the same cache object
    and does not modify it; outputs match the source's.
    """
    spec = parity.AttentionSpec(
        24,
        4,
        num_kv_heads=2,
        qk_norm=Norm(),
        rope=parity.Rope(500.0),
        window_size=window_size,
    )
    source, x = cached_layer(spec, device), random_tokens(6)
    shared, cache = sharing(source), source.init_cache(3, 6, page_size=page_size)
    for chunk, new_lengths in zip(np.split(x, [4, 5], axis=1), steps, strict=True):
        tokens = mha_tt.upload(chunk, device=device, dtype=source.dtype)
        expected, cache = source(tokens, cache, new_lengths=new_lengths)
        before = contents(cache)
        actual, after = shared(tokens, cache, new_lengths=new_lengths)
        assert after is cache
        assert_close(mha_tt.download(actual), mha_tt.download(expected), ttnn.bfloat16)
        assert all(map(np.array_equal, contents(after), before))


def test_shared_keys_without_tokens_raise(device):
    """A layer with shared keys raises an error if the cache lacks the new tokens."""
    source = cached_layer(GQA_ROPE, device)
    shared, x = sharing(source), mha_tt.upload(random_tokens(2), device=device, dtype=source.dtype)
    with rejects("cache", lengths=[0, 0, 0], new_lengths=[2, 2, 2]):
        shared(x, source.init_cache(3, 6))


def real_slots(slots, spec, lengths):
    """Return the filled slots without the padding of heads: (tokens of all sequences, K, H)."""
    features = mha_tt.feature_indices(spec.head_dim, rope=spec.rope)
    is_filled = np.arange(slots.shape[2]) < np.asarray(lengths)[:, None]
    return slots.swapaxes(1, 2)[is_filled][..., features]


def assert_holds(slots, part, spec, dtype, x):
    """Check that the slots begin with the projected keys or values of all tokens."""
    slots_in_use = real_slots(slots, spec, [x.shape[1]] * len(x))
    expected = project_heads(spec, rounded_weights(spec, dtype), part, x)
    assert_close(slots_in_use, expected.swapaxes(1, 2).reshape(slots_in_use.shape), dtype)


# ---- Chunking ------------------------------------------------------------------------------------


@pytest.mark.board
@both_dtypes
@every_spec
def test_chunk_and_tokens_match_full_pass(device, spec, dtype):
    """Two tokens, a chunk of 5 and two tokens match one full pass at every position; the cache
    contains the projected tokens.
    """
    x = random_tokens(9, dtype)
    output, cache = feed(cached_layer(spec, device, dtype), x, [1, 1, 5, 1, 1], 9)
    assert_close(without_padding(output, spec), full_pass(spec, dtype, x), dtype)
    assert_holds(mha_tt.download(cache.keys), "k", spec, dtype, x)
    assert_holds(mha_tt.download(cache.values), "v", spec, dtype, x)


# Each sequence is written separately, so length and batch size do not interact.
@both_dtypes
@pytest.mark.parametrize(
    ("seq_len", "batch"), [(2, 5), (31, 1), (32, 2), (33, 1), (64, 2), (70, 5)]
)
def test_prompt_and_token_match_full_pass(device, seq_len, batch, dtype):
    """A prompt of 2 to 70 tokens and one more token match one full pass, for batches of 1 to 5."""
    x = random_tokens(seq_len + 1, dtype, batch)
    output, _ = feed(cached_layer(GQA_ROPE, device, dtype), x, [seq_len, 1], seq_len + 1)
    assert_close(output, full_pass(GQA_ROPE, dtype, x), dtype)


CHUNKS = {
    "within-a-tile": [5, 4, 2],
    "to-the-tile": [5, 27, 1, 2],
    "past-the-tile": [5, 28, 2],
    "past-two-tiles": [5, 60, 4],
    "one-short": [31, 2, 31, 3],
    "tile-by-tile": [32, 32, 6],
    "one-over": [33, 31, 2, 1],
    "late": [40, 24, 5],
    "tokens-across-the-tile": [30, 1, 1, 1, 1],
    "all-at-once": [70],
    "a-token-first": [1, 33, 6],
}


# One dtype covers all chunk boundaries; float32 has its own attention path and covers one chunking
# of each kind.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, ttnn.bfloat16) for name in CHUNKS]
    + [
        (name, ttnn.float32)
        for name in ("past-two-tiles", "one-short", "tile-by-tile", "a-token-first")
    ],
)
def test_any_chunking_matches_full_pass(device, name, dtype):
    """Chunks that end within, at or beyond tiles match one full pass; the cache contains the
    projected tokens and zeros behind them.
    """
    x = random_tokens(sum(CHUNKS[name]), dtype)
    output, cache = feed(cached_layer(GQA_ROPE, device, dtype), x, CHUNKS[name], 75)
    assert_close(output, full_pass(GQA_ROPE, dtype, x), dtype)
    *slots, lengths = contents(cache)
    assert lengths.tolist() == [x.shape[1]] * 3
    for part, slot in zip("kv", slots, strict=True):
        assert_holds(slot, part, GQA_ROPE, dtype, x)
        assert not slot[:, :, x.shape[1] :].any()


RAGGED = {
    # name: number of tokens of each sequence in each step
    "prompts": [(3, 6, 1), (1, 1, 1), (1, 1, 1)],
    "one-by-one": [(1, 0, 1), (0, 0, 1), (1, 1, 0), (0, 1, 1)],
    "empty-at-first": [(4, 0, 2), (1, 0, 1), (0, 5, 3), (1, 1, 1)],
    "around-the-tile": [(31, 32, 33), (2, 1, 0), (1, 1, 1)],
    "across-the-tile": [(5, 31, 40), (30, 3, 28), (1, 1, 1), (0, 33, 2)],
}


@both_dtypes
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_batch_matches_full_passes(device, name, dtype):
    """Each sequence of a ragged batch matches a full pass; large values in padding have no
    effect.
    """
    steps, x = np.array(RAGGED[name]), random_tokens(80, dtype)
    module = cached_layer(GQA_ROPE, device, dtype)
    cache = module.init_cache(3, 80)
    output, num_fed = np.zeros(x.shape), np.zeros(3, int)
    for new_lengths in steps:
        new_tokens = rounded(
            np.full((3, new_lengths.max(), 24), 1e3), dtype
        )  # would change the output if attended to
        is_new = np.arange(new_lengths.max()) < new_lengths[:, None]
        rows, columns = np.nonzero(is_new)
        rows_and_columns = rows, num_fed[rows] + columns
        new_tokens[is_new] = x[rows_and_columns]
        stepped, cache = module(
            mha_tt.upload(new_tokens, device=device, dtype=dtype),
            cache,
            new_lengths=new_lengths.tolist(),
        )
        output[rows_and_columns] = mha_tt.download(stepped)[is_new]
        num_fed += new_lengths
    is_fed = np.arange(80) < num_fed[:, None]
    assert cache.lengths.tolist() == num_fed.tolist()
    assert_close(output, np.where(is_fed[..., None], full_pass(GQA_ROPE, dtype, x), 0.0), dtype)


@both_dtypes
@pytest.mark.parametrize("capacity", [31, 32, 33, 64])
def test_capacity_does_not_affect_output(device, capacity, dtype):
    """Capacities of 31 to 64 give outputs that match one full pass."""
    x = random_tokens(7, dtype)
    output, _ = feed(cached_layer(GQA_ROPE, device, dtype), x, [4, 2, 1], capacity)
    assert_close(output, full_pass(GQA_ROPE, dtype, x), dtype)


@pytest.mark.board
def test_batch_of_33_matches_full_pass(device):
    """A batch of 33 sequences, more than a tile, matches one full pass."""
    x = random_tokens(4, batch=33)
    output, _ = feed(cached_layer(GQA_ROPE, device), x, [2, 1, 1], 4)
    assert_close(output, full_pass(GQA_ROPE, ttnn.bfloat16, x), ttnn.bfloat16)


@pytest.mark.board
def test_bfloat8_b_cache_matches_full_pass(device):
    """Decoding in bfloat8_b matches one full pass within the tolerance of that dtype."""
    module, x = cached_layer(GQA_ROPE, device, ttnn.bfloat8_b), random_tokens(40, ttnn.bfloat8_b)
    weights = {
        name: weight.astype(np.float32) for name, weight in parity.weights_of(module).items()
    }
    output, _ = feed(module, x, [5, 33, 1, 1], 40)
    assert_close(
        output, layer(GQA_ROPE, weights, x, mask=mha_tt.create_causal_mask(40))[0], ttnn.bfloat8_b
    )


def test_dropout_is_active_in_training(device):
    """In training mode, dropout of attention weights changes the output of every token."""
    spec, x = parity.AttentionSpec(24, 4, dropout=0.5), random_tokens(6)
    dropped, _ = feed(
        cached_layer(spec, device, rng=np.random.default_rng(0)).train(), x, [4, 1, 1], 6
    )
    whole, _ = feed(cached_layer(spec, device), x, [4, 1, 1], 6)
    assert (dropped != whole).any(axis=2).all()


# ---- The function --------------------------------------------------------------------------------


@both_dtypes
@every_spec
def test_function_matches_module(device, spec, dtype):
    """The function returns the bits of the module for a ragged batch."""
    module, x = (
        cached_layer(spec, device, dtype),
        mha_tt.upload(random_tokens(4, dtype), device=device, dtype=dtype),
    )
    output, _ = mha_tt.multi_head_attention_with_cache(
        x, module.weights, spec, module.init_cache(3, 6), new_lengths=[4, 0, 3]
    )
    expected, _ = module(x, module.init_cache(3, 6), new_lengths=[4, 0, 3])
    assert np.array_equal(mha_tt.download(output), mha_tt.download(expected))


# ---- Custom masks, biases and positions ----------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("chunks", [[4, 5], [1, 4, 1, 1, 2]], ids=str)
def test_window_over_cache_matches_full_pass(device, chunks, dtype):
    """A window given as a mask in chunks matches one pass."""
    module, x = cached_layer(GQA_ROPE, device, dtype), random_tokens(9, dtype)
    window = mha_tt.create_sliding_window_mask(9, window_size=3)
    cache, outputs, begin = module.init_cache(3, 12), [], 0
    for count in chunks:
        end = begin + count
        chunk = mha_tt.upload(x[:, begin:end], device=device, dtype=dtype)
        output, cache = module(chunk, cache, mask=np.pad(window[begin:end], ((0, 0), (0, 3))))
        outputs.append(mha_tt.download(output))
        begin = end
    expected, _ = layer(GQA_ROPE, rounded_weights(GQA_ROPE, dtype), x, mask=window)
    assert_close(np.concatenate(outputs, axis=1), expected, dtype)


@both_dtypes
@pytest.mark.parametrize("value", [1.0, np.nan])
@pytest.mark.parametrize("chunks", [[4, 2, 1], [5, 1, 1]], ids=str)
def test_left_padding_matches_sequence_alone(device, chunks, value, dtype):
    """Sequences with left padding, hidden by a mask, match each sequence alone at every position;
    with a contained kernel, padding may be NaN.
    """
    module, x, paddings = (
        cached_layer(GQA_ROPE, device, dtype),
        random_tokens(7, dtype),
        np.array([0, 2, 3]),
    )
    hidden = (np.arange(8) < paddings[:, None])[:, None, None]  # (B, 1, 1, S)
    spoilt = np.where((np.arange(7) < paddings[:, None])[..., None], value, x)
    if np.isnan(value):
        module.kernel = contained(module.kernel)
    cache, outputs, begin = module.init_cache(3, 8), [], 0
    for count in chunks:
        chunk = mha_tt.upload(spoilt[:, begin : begin + count], device=device, dtype=dtype)
        positions = np.maximum(begin + np.arange(count) - paddings[:, None], 0)
        output, cache = module(chunk, cache, mask=hidden, positions=positions)
        outputs.append(mha_tt.download(output))
        begin += count
    output = np.concatenate(outputs, axis=1)
    for sequence, padding in enumerate(paddings):
        expected = full_pass(GQA_ROPE, dtype, x[sequence : sequence + 1, padding:])
        assert_close(output[sequence : sequence + 1, padding:], expected, dtype)


@pytest.mark.board
@both_dtypes
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("capacity", [7, 40])
def test_bias_over_cache_matches_full_pass(device, capacity, on_device, dtype):
    """A bias by distance in chunks, on the host or the device, matches one pass."""
    spec = SPECS["mha"]
    module, x = cached_layer(spec, device, dtype), random_tokens(7, dtype)
    distance = np.arange(capacity) - np.arange(7)[:, None]
    bias = rounded(
        0.25 * 2.0 ** -np.arange(4)[:, None, None] * distance, dtype
    )  # as ALiBi, (N, T, S)
    cache, outputs, begin = module.init_cache(3, capacity), [], 0
    for count in (4, 2, 1):
        rows = bias[:, begin : begin + count]
        rows = mha_tt.upload(rows[None], device=device, dtype=dtype) if on_device else rows
        chunk = mha_tt.upload(x[:, begin : begin + count], device=device, dtype=dtype)
        output, cache = module(chunk, cache, bias=rows)
        outputs.append(mha_tt.download(output))
        begin += count
    options = {"mask": mha_tt.create_causal_mask(7), "bias": bias[..., :7]}
    expected, _ = layer(spec, rounded_weights(spec, dtype), x, **options)
    assert_close(np.concatenate(outputs, axis=1), expected, dtype)


@both_dtypes
@pytest.mark.parametrize("num_new", [1, 3])
def test_function_options_match_module(device, num_new, dtype):
    """With mask, bias and positions, the function returns the bits of the module, which differ from
    those without.
    """
    module = cached_layer(GQA_ROPE, device, dtype)
    x = mha_tt.upload(random_tokens(num_new, dtype), device=device, dtype=dtype)
    options = {
        "mask": mha_tt.DeviceMask(np.arange(8) == 1, device=device),
        "bias": np.linspace(-1.0, 1.0, 8),
        "positions": 5 + np.arange(num_new)[None],
    }
    cache = filled_cache(module, [2, 4, 3], 8)
    expected, _ = module(x, cache.grow(8), **options)
    output, _ = mha_tt.multi_head_attention_with_cache(
        x, module.weights, GQA_ROPE, cache.grow(8), **options
    )
    plain, _ = module(x, cache.grow(8))
    assert np.array_equal(mha_tt.download(output), mha_tt.download(expected))
    assert not np.array_equal(mha_tt.download(output), mha_tt.download(plain))


@both_dtypes
def test_fully_masked_row_is_output_bias(device, dtype):
    """A sequence with all keys masked outputs exactly the bias of the output projection."""
    module, x = cached_layer(SPECS["mha"], device, dtype), random_tokens(2, dtype)
    mask = np.array([True, False, False])[:, None, None, None]
    for num_new in (1, 2):
        output, _ = module(
            mha_tt.upload(x[:, :num_new], device=device, dtype=dtype),
            module.init_cache(3, 4),
            mask=mask,
        )
        bias = mha_tt.download(module.weights["out_proj.bias"])[0]
        assert np.array_equal(mha_tt.download(output)[0], np.broadcast_to(bias, (num_new, 24)))


# ---- Copies of a cache ---------------------------------------------------------------------------


def in_every_dtype(name, values):
    """Parametrize over all values in bfloat16, and over the first one in the other dtypes."""
    first = [(values[0], ttnn.float32), (values[0], ttnn.bfloat8_b)]
    return pytest.mark.parametrize(
        (name, "dtype"), [*((value, ttnn.bfloat16) for value in values), *first], ids=str
    )


def is_own(cache, other):
    """Return True if the caches share no storage."""
    return not {cache.keys.buffer_address(), cache.values.buffer_address()} & {
        other.keys.buffer_address(),
        other.values.buffer_address(),
    } and not np.shares_memory(cache.lengths, other.lengths)


# The slots to copy do not depend on their contents: other dtypes use only the first of these.
@pytest.mark.board
@in_every_dtype("indices", [[2, 0], [1], [0, 0, 0, 2, 1], [0, 1, 2], [], np.array([2, 2])])
def test_reordered_cache_holds_given_order(device, indices, dtype):
    """A reordered cache is a copy with the named sequences, in their order."""
    cache = filled_cache(cached_layer(GQA_ROPE, device, dtype), [2, 33, 0], 40)
    keys, values, lengths = contents(cache)
    reordered = cache.reorder(indices)
    actual = contents(reordered)
    indices = np.asarray(indices, int)
    for array, expected in zip(
        actual, (keys[indices], values[indices], lengths[indices]), strict=True
    ):
        np.testing.assert_array_equal(array, expected, strict=True)
    assert (reordered.capacity, reordered.keys.dtype) == (40, dtype)
    assert is_own(reordered, cache)


def test_cache_copies_share_no_storage(device):
    """Copies of a cache that change nothing have equal contents and separate storage."""
    cache = filled_cache(cached_layer(GQA_ROPE, device), [3], 8)
    for other in (cache.reorder([0]), cache.repeat(1), cache.grow(8), cache.crop(3)):
        assert is_own(other, cache)
        assert [
            np.array_equal(*pair) for pair in zip(contents(other), contents(cache), strict=True)
        ] == [True] * 3


@pytest.mark.board
@every_dtype
def test_beams_match_single_sequences(device, dtype):
    """A step of repeated sequences matches each of them alone, and the original cache stays the
    same.
    """
    module, x = cached_layer(GQA_ROPE, device, dtype), random_tokens(6, dtype, batch=6)
    cache = filled_cache(module, [3, 5], 8)
    beams = cache.repeat(3)
    assert beams.lengths.tolist() == [3, 3, 3, 5, 5, 5]
    token = mha_tt.upload(x[:, :1], device=device, dtype=dtype)
    output, beams = module(token, beams)
    for beam in (0, 2, 4):
        alone = cache.reorder([beam // 3])
        expected, _ = module(
            mha_tt.upload(x[beam : beam + 1, :1], device=device, dtype=dtype), alone
        )
        assert_close(mha_tt.download(output)[beam : beam + 1], mha_tt.download(expected), dtype)
    assert cache.lengths.tolist() == [3, 5]


@pytest.mark.board
@in_every_dtype("capacity", [33, 6, 7, 32, 100])
def test_grown_cache_keeps_tokens(device, capacity, dtype):
    """A grown cache is a copy with the same tokens and zeros behind them, and accepts one more
    token.
    """
    module = cached_layer(GQA_ROPE, device, dtype)
    cache = filled_cache(module, [2, 6, 0], 6)
    grown = cache.grow(capacity)
    keys, values, lengths = contents(grown)
    assert (grown.capacity, keys.shape[2], grown.keys.dtype) == (
        capacity,
        -(-capacity // 32) * 32,
        dtype,
    )
    for tensor_of_cache, original in ((keys, cache.keys), (values, cache.values)):
        assert np.array_equal(tensor_of_cache[:, :, :32], mha_tt.download(original))
        assert not tensor_of_cache[:, :, 32:].any()
    assert lengths.tolist() == [2, 6, 0]
    assert is_own(grown, cache)
    if capacity > 6:
        x = mha_tt.upload(random_tokens(1, dtype), device=device, dtype=dtype)
        assert module(x, grown)[1].lengths.tolist() == [3, 7, 1]


@pytest.mark.board
@in_every_dtype("lengths", [[0, 5, 0], 0, 2, np.int64(1), [2, 33, 0], np.array([1, 32, 0])])
def test_cropped_cache_keeps_first_tokens(device, lengths, dtype):
    """A cropped cache is a copy with the first tokens of each sequence and zeros behind them."""
    cache = filled_cache(
        cached_layer(GQA_ROPE, device, dtype), [2, 33, 2 if np.ndim(lengths) == 0 else 0], 40
    )
    keys, values, _ = contents(cache)
    cropped = cache.crop(lengths)
    is_kept = (np.arange(64) < np.broadcast_to(lengths, 3)[:, None])[:, None, :, None]
    for cropped_slots, original in ((cropped.keys, keys), (cropped.values, values)):
        np.testing.assert_array_equal(
            mha_tt.download(cropped_slots), np.where(is_kept, original, 0.0), strict=True
        )
    np.testing.assert_array_equal(
        cropped.lengths, np.broadcast_to(lengths, 3).astype(np.int32), strict=True
    )
    assert (cropped.capacity, cropped.keys.dtype) == (40, dtype)
    assert is_own(cropped, cache)


@both_dtypes
def test_decoding_continues_after_cropping(device, dtype):
    """After cropping wrong tokens, decoding matches one full pass."""
    module, x = cached_layer(GQA_ROPE, device, dtype), random_tokens(8, dtype)
    _, cache = feed(module, np.concatenate([x[:, :4], -x[:, :3]], axis=1), [7], 8)
    output, _ = feed(module, x[:, 4:], [2, 1, 1], 8, cache.crop(4))
    assert_close(output, full_pass(GQA_ROPE, dtype, x)[:, 4:], dtype)


# ---- Contents of the cache -----------------------------------------------------------------------


@pytest.mark.board
@both_dtypes
@every_spec
def test_cache_holds_projected_tokens(device, spec, dtype):
    """The slots of the cache are the projected keys and values of all tokens."""
    x = random_tokens(8, dtype)
    _, cache = feed(cached_layer(spec, device, dtype), x, [5, 2, 1], 8)
    assert_holds(mha_tt.download(cache.keys), "k", spec, dtype, x)
    assert_holds(mha_tt.download(cache.values), "v", spec, dtype, x)


@pytest.mark.board
@every_dtype
def test_slots_beyond_tiles_stay_zero(device, dtype):
    """Slots that hold no real token are zero, also in the next tile and where padding was
    written.
    """
    module = cached_layer(GQA_ROPE, device, dtype)
    lengths, x = [2, 33, 0], mha_tt.upload(random_tokens(7, dtype), device=device, dtype=dtype)
    _, cache = module(x, filled_cache(module, lengths, 40), new_lengths=[7, 0, 5])
    for part in (cache.keys, cache.values):
        slots = mha_tt.download(part).swapaxes(1, 2)  # (B, S, K, H)
        assert not slots[np.arange(64) >= np.array([9, 33, 5])[:, None]].any()


@both_dtypes
@pytest.mark.parametrize("seq_len", [1, 4])
@pytest.mark.parametrize("lengths", [[0, 0, 0], [3, 0, 6], [6, 6, 6]], ids=str)
def test_no_new_tokens_output_zero(device, lengths, seq_len, dtype):
    """A call without new tokens outputs zeros and keeps the lengths."""
    module = cached_layer(GQA_ROPE, device, dtype)
    x = mha_tt.upload(random_tokens(seq_len, dtype), device=device, dtype=dtype)
    output, cache = module(x, filled_cache(module, lengths, 6), new_lengths=[0, 0, 0])
    assert not mha_tt.download(output).any()
    assert cache.lengths.tolist() == lengths


def test_cache_is_updated_in_place(device):
    """After chunks and steps, keys and values have the same buffer addresses."""
    module = cached_layer(GQA_ROPE, device)
    cache = module.init_cache(3, 40)
    _, appended = feed(module, random_tokens(36), [3, 31, 1, 1], 40, cache)
    assert (appended.keys.buffer_address(), appended.values.buffer_address()) == (
        cache.keys.buffer_address(),
        cache.values.buffer_address(),
    )


# ---- Values without effect -----------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("value", [-1e30, np.nan, np.inf])
@pytest.mark.parametrize("num_new", [1, 2])
def test_stale_slots_have_no_effect(device, num_new, value, dtype):
    """Large values in free slots change no bit of the output. NaN and infinity change none of a
    step by the kernel of steps, or with a contained kernel.
    """
    module = cached_layer(GQA_ROPE, device, dtype)
    has_step_kernel = num_new == 1 and dtype == ttnn.bfloat16
    if not np.isfinite(value) and not has_step_kernel:
        module.kernel = contained(module.kernel)
    x = mha_tt.upload(random_tokens(num_new, dtype), device=device, dtype=dtype)
    if dtype == ttnn.bfloat16 and num_new > 1 and np.isfinite(value):
        value = min(
            abs(value), 1e4
        )  # a mask adds -1e9 to a score, which must be far smaller in magnitude
    cache = filled_cache(module, [2, 4, 0], 6)
    keys, values, lengths = contents(cache)
    expected, _ = module(x, cache)
    is_stale = np.arange(32)[:, None] >= lengths[:, None, None, None]
    keys, values = (
        mha_tt.upload(np.where(is_stale, value, slots), device=device, dtype=dtype)
        for slots in (keys, values)
    )
    output, _ = module(x, mha_tt.KVCache(keys, values, lengths, 6))
    assert np.array_equal(mha_tt.download(output), mha_tt.download(expected))


@both_dtypes
@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
def test_idle_sequence_token_has_no_effect(device, value, dtype):
    """The token of a sequence without new tokens, even NaN, changes no bit of outputs or cache."""
    module = cached_layer(GQA_ROPE, device, dtype)
    results = []
    for filler in (0.0, value):
        x = random_tokens(1, dtype)
        x[1] = filler
        x = mha_tt.upload(x, device=device, dtype=dtype)
        output, cache = module(x, filled_cache(module, [2, 4, 0], 6), new_lengths=[1, 0, 1])
        results.append([mha_tt.download(output), *contents(cache)])
    assert [np.array_equal(*pair) for pair in zip(*results, strict=True)] == [True] * 4


# ---- Caches in other dtypes ----------------------------------------------------------------------


@pytest.mark.board
def test_bfloat8_b_cache_holds_rounded_slots(device):
    """A bfloat8_b cache holds the keys and values of a bfloat16 one, rounded to blocks."""
    chunks = CHUNKS["one-over"]
    module, x = cached_layer(GQA_ROPE, device), random_tokens(sum(chunks))
    *wide, _ = contents(feed(module, x, chunks, 75)[1])
    *narrow, _ = contents(feed(module, x, chunks, 75, module.init_cache(3, 75, ttnn.bfloat8_b))[1])
    assert not np.array_equal(wide, narrow)
    assert np.array_equal([rounded(slots, ttnn.bfloat8_b) for slots in wide], narrow)


@pytest.mark.board
@pytest.mark.parametrize("num_new", [1, 3])
def test_bfloat8_b_cache_matches_formula(device, num_new):
    """The output over a bfloat8_b cache matches the formula for its contents."""
    spec = parity.AttentionSpec(24, 4, num_kv_heads=2)
    weights = rounded_weights(spec, ttnn.bfloat16)
    module, x = cached_layer(spec, device), random_tokens(40 + num_new)
    _, cache = feed(module, x[:, :40], [40], 50, module.init_cache(3, 50, ttnn.bfloat8_b))
    output, cache = module(mha_tt.upload(x[:, 40:], device=device), cache)
    keys, values = (slots[:, :, : 40 + num_new, :6] for slots in contents(cache)[:2])
    query = project_heads(spec, weights, "q", x[:, 40:])
    context, _ = attend(
        query, keys, values, mask=mha_tt.create_causal_mask_with_cache(num_new, 40 + num_new, 40)
    )
    combined = context.swapaxes(1, 2).reshape(3, num_new, 24)
    expected = combined @ weights["out_proj.weight"].T + weights["out_proj.bias"]
    assert_close(mha_tt.download(output), expected, ttnn.bfloat16)


@every_dtype
def test_cache_has_module_dtype_by_default(device, dtype):
    """A cache created by a module has the dtype of the module."""
    cache = cached_layer(GQA_ROPE, device, dtype).init_cache(3, 5)
    assert (cache.keys.dtype, cache.values.dtype) == (dtype, dtype)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(ttnn.bfloat16, ttnn.float32), (ttnn.float32, ttnn.bfloat16)],
    ids=["wider", "narrower"],
)
@pytest.mark.parametrize("seq_len", [1, 3])
def test_mixing_dtypes_with_cache_raises(device, seq_len, dtype, cache_dtype):
    """A float32 layer with a bfloat16 cache, or the reverse, raises an error."""
    module = cached_layer(GQA_ROPE, device, dtype)
    x = mha_tt.upload(random_tokens(seq_len, dtype), device=device, dtype=dtype)
    with rejects_type("x", {"x.dtype": dtype, "cache.keys.dtype": cache_dtype}):
        module(x, module.init_cache(3, 6, cache_dtype))


# ---- Capacity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_new", [1, 2])
def test_append_overflow_changes_nothing(device, num_new):
    """append_to_cache with too many tokens raises an error and leaves the cache unchanged."""
    cache = filled_cache(cached_layer(GQA_ROPE, device), [6, 5, 2], 6)
    before = contents(cache)
    new = mha_tt.upload(np.ones((3, 2, num_new, 64)), device=device)
    with rejects("lengths + new tokens", lengths=[6, 5, 2], new_lengths=...):
        mha_tt.append_to_cache(cache, new, new)
    assert [np.array_equal(*pair) for pair in zip(contents(cache), before, strict=True)] == [
        True
    ] * 3


@pytest.mark.board
@both_dtypes
def test_padding_may_exceed_capacity(device, dtype):
    """A chunk whose padding exceeds the capacity matches the same chunk in a larger cache."""
    module = cached_layer(GQA_ROPE, device, dtype)
    x = mha_tt.upload(random_tokens(40, dtype), device=device, dtype=dtype)
    output, cache = module(x, filled_cache(module, [31, 28, 32], 32), new_lengths=[1, 4, 0])
    expected, _ = module(x, filled_cache(module, [31, 28, 32], 99), new_lengths=[1, 4, 0])
    assert cache.lengths.tolist() == [32, 32, 32]
    assert_close(mha_tt.download(output), mha_tt.download(expected), dtype)


@both_dtypes
def test_mask_width_is_the_capacity(device, dtype):
    """A mask has the width of the capacity even if the padding of a prompt exceeds it."""
    module, mask = cached_layer(GQA_ROPE, device, dtype), np.arange(6) == 1
    x = mha_tt.upload(random_tokens(9, dtype), device=device, dtype=dtype)
    output, cache = module(x, module.init_cache(3, 6, dtype), new_lengths=[1, 6, 4], mask=mask)
    expected, _ = module(
        x, module.init_cache(3, 9, dtype), new_lengths=[1, 6, 4], mask=np.arange(9) == 1
    )
    assert cache.lengths.tolist() == [1, 6, 4]
    assert_close(mha_tt.download(output), mha_tt.download(expected), dtype)


@pytest.mark.board
@both_dtypes
@pytest.mark.parametrize("filled", [[0] * 8, [3] * 8], ids=["step", "chunk"])
def test_batch_above_core_count_raises(device, filled, dtype):
    """Writing rows of more sequences than the device has cores raises an error and leaves the keys
    unchanged.
    """
    grid = device.compute_with_storage_grid_size()
    batch = grid.x * grid.y + 1
    cache = mha_tt.init_cache(batch, 1, 64, 32, dtype, device=device)
    num_new = 1 if filled[0] == 0 else 4
    cache = mha_tt.KVCache(cache.keys, cache.values, np.full(batch, filled[0], np.int32), 64)
    new = mha_tt.upload(np.ones((batch, 1, num_new, 32)), device=device, dtype=dtype)
    with rejects("the batch", f"{batch} sequences"):
        mha_tt.append_to_cache(cache, new, new)
    assert not mha_tt.download(cache.keys).any()


@pytest.mark.board
def test_prompt_above_core_count_is_cached(device):
    """A prompt of more sequences than the device has cores is cached."""
    grid = device.compute_with_storage_grid_size()
    batch = grid.x * grid.y + 1
    new = mha_tt.upload(np.ones((batch, 1, 2, 32)), device=device)
    cache = mha_tt.append_to_cache(mha_tt.init_cache(batch, 1, 32, 32, device=device), new, new)
    assert (mha_tt.download(cache.keys)[:, :, :2] == 1.0).all()


# ---- Transfers between host and device -----------------------------------------------------------

STEPS = {
    # name: (layer, shapes uploaded by a step of some of 3 sequences: sequence selection, RoPE
    # rotations, slots to write, last visible slots); a step of all sequences uploads nothing
    # (test_step)
    "mha": (SPECS["mha"], [(3, 1, 1), (3,), (3,)]),
    "gqa-rope": (GQA_ROPE, [(3, 1, 1)] + [(1, 1, 3, 64)] * 2 + [(3,), (3,)]),
}


@pytest.mark.parametrize("name", STEPS)
def test_partial_step_uploads_only_positions(device, uploads, calls, monkeypatch, name):
    """A step of some sequences uploads only positions and the selection of sequences, and reads
    nothing back.
    """
    spec, expected = STEPS[name]
    module, x = cached_layer(spec, device), mha_tt.upload(random_tokens(1), device=device)
    cache = filled_cache(module, [3, 1, 0], 40)
    uploads.clear()
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(devices, "readers", [lambda tensor: pytest.fail("a tensor was read back")])
        module(x, cache, new_lengths=[1, 0, 1])
    assert [array.shape for array in uploads] == expected
    assert {"ttnn.from_device", "ttnn.to_torch", "ttnn.to_dtype"} & {
        call.name for call in calls
    } == set()


def test_step_uses_only_the_step_kernel(device, calls):
    """A step runs the step kernel once and the prompt kernel never."""
    module, x = cached_layer(GQA_ROPE, device), mha_tt.upload(random_tokens(1), device=device)
    cache = filled_cache(module, [3, 1, 0], 40)
    calls.clear()
    module(x, cache)
    names = [call.name for call in calls]
    assert names.count("ttnn.transformer.scaled_dot_product_attention_decode") == 1
    assert names.count("ttnn.transformer.scaled_dot_product_attention") == 0


def test_prepared_sinks_equal_given_ones(device, rng):
    """A step with sinks that were prepared once equals a step with the sinks bit for bit, and
    differs from a step without any.
    """
    spec = AttentionSpec(128, 4, sinks=True)
    last_positions = np.array([5, 63])
    arrays = (rng.standard_normal(shape) for shape in ((1, 2, 4, 32), *[(2, 4, 64, 32)] * 2))
    q, k, v = (mha_tt.upload(rounded(x, ttnn.bfloat16), device=device) for x in arrays)
    sinks = mha_tt.upload(rounded(np.ones((1, 4, 1, 1)), ttnn.bfloat16), device=device)
    prepared = mha_tt.fused.sinks_of_step(sinks, q, k, spec)

    def step(spec, learned):
        context = mha_tt.fused.attend_to_cache(q, k, v, last_positions, spec, learned=learned)
        return mha_tt.download(context)

    expected = step(spec, {"sinks": sinks})
    np.testing.assert_array_equal(step(spec, {"sinks": prepared}), expected)
    assert not np.array_equal(step(None, None), expected)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "taken"),
    [(1, 1, 17), (4, 2, 20), (6, 6, 18), (16, 4, 32), (17, 1, 17)],
    ids=str,
)
def test_few_heads_are_repeated_in_a_step(device, rng, calls, num_heads, num_kv_heads, taken):
    """A step of up to 16 heads repeats them to 17 or more, which would be 2% off on a card
    otherwise.

    The output matches the formula, so each head attends to its own keys however it is repeated.
    """
    last_positions = np.array([5, 63])
    query = rounded(rng.standard_normal((1, 2, num_heads, 32)), ttnn.bfloat16)
    keys, values = (
        rounded(rng.standard_normal((2, num_kv_heads, 64, 32)), ttnn.bfloat16) for _ in "kv"
    )
    q, k, v = (mha_tt.upload(x, device=device) for x in (query, keys, values))
    actual = mha_tt.download(mha_tt.fused.attend_to_cache(q, k, v, last_positions))
    name = "ttnn.transformer.scaled_dot_product_attention_decode"
    assert [call.arguments[0].shape[2] for call in calls if call.name == name] == [taken]
    keys, values = (
        np.repeat(x, num_heads // num_kv_heads, axis=1).astype(np.float64) for x in (keys, values)
    )
    scores = np.einsum("bnh,bnsh->bns", query[0], keys) / np.sqrt(32)
    shown = np.exp(np.where(np.arange(64) <= last_positions[:, None, None], scores, -np.inf))
    expected = np.einsum("bns,bnsh->bnh", shown / shown.sum(-1, keepdims=True), values)
    assert_close(actual, expected[None], ttnn.bfloat16)


def test_heads_of_512_features_fit_a_step(device):
    """A step with heads of 512 features, such as latents, fits the memory of a core."""
    query = mha_tt.upload(np.zeros((1, 2, 32, 512)), device=device)
    slots = mha_tt.upload(np.ones((2, 1, 256, 512)), device=device)
    context = mha_tt.fused.attend_to_cache(query, slots, slots, np.array([255, 5]))
    assert_close(mha_tt.download(context), np.ones((1, 2, 32, 512)), ttnn.bfloat16)


@pytest.mark.parametrize(
    ("num_heads", "features", "num_slots"),
    [(4, 256, 1024), (128, 128, 1024), (32, 640, 1024)],
)
def test_wide_or_many_heads_fit_a_step(device, num_heads, features, num_slots):
    """A step of one sequence with wide or many heads that share a key fits the memory of a core."""
    query = mha_tt.upload(np.zeros((1, 1, num_heads, features)), device=device)
    slots = mha_tt.upload(np.ones((1, 1, num_slots, features)), device=device)
    context = mha_tt.fused.attend_to_cache(query, slots, slots, np.array([num_slots - 1]))
    assert_close(mha_tt.download(context), np.ones((1, 1, num_heads, features)), ttnn.bfloat16)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "features", "num_slots"),
    [(4, 2, 896, 128), (4, 1, 1024, 128), (96, 8, 128, 96), (160, 8, 128, 128)],
)
def test_step_of_unsupported_heads_raises(device, num_heads, num_kv_heads, features, num_slots):
    """Heads that do not fit a core in a step, or need larger blocks of keys, raise an error."""
    query = mha_tt.upload(np.zeros((1, 1, num_heads, features)), device=device)
    slots = mha_tt.upload(np.zeros((1, num_kv_heads, num_slots, features)), device=device)
    with rejects("heads", {"query.shape": ..., "keys.shape": ...}):
        mha_tt.fused.attend_to_cache(query, slots, slots, np.array([5]))


# ---- Creating and measuring caches ---------------------------------------------------------------


@every_dtype
def test_new_cache_is_zero_in_whole_tiles(device, dtype):
    """A new cache contains zeros in whole tiles, lengths of 0 and the given capacity and dtype."""
    cache = mha_tt.init_cache(2, 3, 40, 12, dtype, device=device)
    assert (cache.keys.dtype, cache.values.dtype, cache.capacity) == (dtype, dtype, 40)
    for slots in (cache.keys, cache.values):
        np.testing.assert_array_equal(
            mha_tt.download(slots), np.zeros((2, 3, 64, 32), np.float32), strict=True
        )
    np.testing.assert_array_equal(cache.lengths, np.zeros(2, np.int32), strict=True)


@every_dtype
@pytest.mark.parametrize(
    "sizes", [(2, 3, 40, 12), (1, 1, 1, 1), (2, 1, 64, 96), (1, 2, 33, 80)], ids=str
)
def test_cache_size_matches_allocation(device, sizes, dtype):
    """kv_cache_nbytes equals the size of the allocated buffers in every dtype."""
    cache = mha_tt.init_cache(*sizes, dtype, device=device)
    num_bytes = sum(
        slots.buffer_num_pages() * slots.buffer_page_size() for slots in (cache.keys, cache.values)
    )
    assert mha_tt.kv_cache_nbytes(*sizes, dtype=dtype) == num_bytes


@both_dtypes
def test_cache_supports_other_value_width(device, dtype):
    """Keys of two tiles and values of one, fed in chunks, without tokens and in steps, match one
    call.
    """
    spec = parity.AttentionSpec(
        24, 2, head_dim=12, value_head_dim=20, rope=parity.Rope(), fused_qkv=True
    )
    module = mha_tt.MultiHeadAttentionWithCache(spec, device=device, dtype=dtype)
    cache = module.init_cache(2, 40)
    assert (tuple(cache.keys.shape), tuple(cache.values.shape)) == ((2, 2, 64, 64), (2, 2, 64, 32))
    sizes = {"head_dim": 64, "value_head_dim": 32, "dtype": dtype}
    num_bytes = sum(
        slots.buffer_num_pages() * slots.buffer_page_size() for slots in (cache.keys, cache.values)
    )
    assert mha_tt.kv_cache_nbytes(2, 2, 40, **sizes) == num_bytes
    x = np.random.default_rng(0).standard_normal((2, 5, 24))
    whole, _ = module(mha_tt.upload(x, device=device, dtype=dtype), cache)
    cache, steps = module.init_cache(2, 40), []
    for begin, end in ((0, 3), (3, 3), (3, 4), (4, 5)):
        output, cache = module(mha_tt.upload(x[:, begin:end], device=device, dtype=dtype), cache)
        steps.append(mha_tt.download(output))
    assert_close(np.concatenate(steps, axis=1), mha_tt.download(whole), dtype)


# ---- Errors that the device does not report ------------------------------------------------------


def test_too_many_kv_heads_raise(device):
    """A cache of 33 key heads, more than the device can write, raises an error."""
    module = mha_tt.MultiHeadAttentionWithCache(
        parity.AttentionSpec(66, 33, head_dim=32), device=device
    )
    with rejects("num_kv_heads", num_kv_heads=33):
        module.init_cache(1, 4)


@both_dtypes
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_padding_has_no_effect(device, dtype, value):
    """NaN or infinity in padding changes no bit of outputs or cache."""
    module = cached_layer(GQA_ROPE, device, dtype)
    x = random_tokens(4, dtype, batch=2)
    poisoned = x.copy()
    poisoned[0, 2:] = value
    lengths = [2, 4]
    outputs = []
    for tokens in (x, poisoned):
        output, cache = module(
            mha_tt.upload(tokens, device=device, dtype=dtype),
            module.init_cache(2, 40),
            new_lengths=lengths,
        )
        outputs.append([mha_tt.download(tensor) for tensor in (output, cache.keys, cache.values)])
    assert all(np.array_equal(*arrays) for arrays in zip(*outputs, strict=True))


@pytest.mark.parametrize("rates", [{"dropout": 0.5}, {"output_dropout": 0.5}], ids=str)
def test_float32_dropout_changes_no_cache(device, rates):
    """Dropout in float32 raises an error and leaves the keys unchanged."""
    module = mha_tt.MultiHeadAttentionWithCache(
        parity.AttentionSpec(24, 4, **rates), dtype=ttnn.float32, device=device
    )
    cache = module.init_cache(1, 4)
    with rejects_type("the module", dtype=...):
        module(mha_tt.upload(np.ones((1, 1, 24)), device=device, dtype=ttnn.float32), cache)
    assert not mha_tt.download(cache.keys).any()


# ---- Empty inputs --------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize(
    "spec",
    [SPECS["mqa-no-out-proj"], SPECS["fused-qkv-head-dim"]],
    ids=["no-out-proj", "fused-qkv"],
)
@pytest.mark.parametrize(("filled", "new_lengths"), [(0, None), (3, None), (3, [0, 0])], ids=str)
def test_empty_chunk_leaves_cache_unchanged(device, new_lengths, filled, spec, dtype):
    """A call with 0 tokens returns an empty output and an unchanged cache."""
    module = cached_layer(spec, device, dtype)
    cache = filled_cache(module, [filled, filled], 6)
    before = contents(cache)
    x = mha_tt.upload(np.ones((2, 0, 24)), device=device, dtype=dtype)
    output, cache = module(x, cache, new_lengths=new_lengths)
    assert tuple(output.shape)[:2] == (2, 0)
    assert [np.array_equal(*pair) for pair in zip(contents(cache), before, strict=True)] == [
        True
    ] * 3


@both_dtypes
@pytest.mark.parametrize("seq_len", [1, 3])
def test_empty_batch_yields_empty_output(device, seq_len, dtype):
    """A batch of 0 sequences gives an empty output, and its cache grows."""
    module = cached_layer(GQA_ROPE, device, dtype)
    x = mha_tt.upload(np.ones((0, seq_len, 24)), device=device, dtype=dtype)
    output, cache = module(x, module.init_cache(0, 6), new_lengths=[])
    assert (tuple(output.shape), cache.lengths.tolist()) == ((0, seq_len, 24), [])
    assert tuple(cache.grow(40).keys.shape) == (0, 2, 64, 64)
