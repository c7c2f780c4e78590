"""Our golden functions for operations of other people's models: checked with the formulas, and
their traps.
"""

import numpy as np
import pytest
import ttnn
from helpers.tt.formulas import rotate, rounded

import mha_tt
from mha_tt.decode.slots import one_core_each
from mha_tt.device import upload_rows

pytestmark = pytest.mark.usefixtures("only_mock")

EXPERIMENTAL = ttnn.experimental
NEIGHBOURS = np.kron(np.eye(16), [[0, 1], [-1, 0]])  # (a, b) -> (-b, a)


def tables(num_tokens, head_dim, *, neighbours=False):
    """Return cos and sin of positions 0, 1, …, (1, 1, T, H)."""
    angles = np.arange(num_tokens)[:, None] * 10000.0 ** (
        -np.arange(head_dim // 2) / (head_dim // 2)
    )
    angles = (
        np.repeat(angles, 2, axis=1) if neighbours else np.concatenate([angles, angles], axis=1)
    )
    return np.cos(angles)[None, None], np.sin(angles)[None, None]


def on_cores(device, x):
    """Upload an array (1, B, rows, width), with the rows of each sequence on a separate core."""
    x = mha_tt.upload(x, device=device)
    rows = -(-x.shape[2] // 32) * 32
    return ttnn.to_memory_config(x, one_core_each(x.shape[1], rows, x.shape[3], device))


def in_rows(device, x):
    return upload_rows(np.array(x), device=device, dtype=ttnn.int32)


# ---- Masks ---------------------------------------------------------------------------------------


def test_golden_rows_of_hidden_scores(device):
    """A row of nothing but -inf is NaN in the softmax and 0 in fused attention; one of nothing but
    -1e9 has equal weights. Next to a visible key both hide theirs.
    """
    query, key, value = (
        mha_tt.upload(np.random.default_rng(seed).standard_normal((1, 1, 32, 32)), device=device)
        for seed in range(3)
    )
    values = mha_tt.download(value)[0, 0]
    for hidden, weight, context in ((-np.inf, np.nan, 0.0), (-1e9, 1 / 32, values.mean(axis=0))):
        scores = np.zeros((1, 1, 32, 32))
        scores[:, :, 0], scores[:, :, 1, 1:] = hidden, hidden
        mask = mha_tt.upload(scores, device=device)
        weights = mha_tt.download(ttnn.softmax(mask, dim=-1))[0, 0]
        np.testing.assert_array_equal(weights[0], np.full(32, weight))
        assert weights[1].tolist() == [1.0] + [0.0] * 31
        attended = mha_tt.download(
            ttnn.transformer.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=False
            )
        )[0, 0]
        np.testing.assert_allclose(attended[0], rounded(context, ttnn.bfloat16), atol=1e-3)
        assert np.array_equal(attended[1], values[0])


# ---- Rotary position embedding -------------------------------------------------------------------


def close(actual, expected):
    """Return whether results are close: tables, two products and their sum are each rounded by up
    to 2^-9.
    """
    return np.abs(actual - expected).max() <= 2**-7 * np.abs(expected).max()


@pytest.mark.parametrize("seq_len", [6, 64])
@pytest.mark.parametrize("kernel", ["rotary_embedding", "rotary_embedding_hf"])
def test_half_split_pairs_are_rotated(device, rng, kernel, seq_len):
    """The two kernels for half-split pairs match the formula for 6 and 64 tokens, padded as on a
    device.
    """
    x = rounded(rng.standard_normal((2, 3, seq_len, 64)), ttnn.bfloat16)
    cos, sin = (mha_tt.upload(table, device=device) for table in tables(96, 64))
    actual = mha_tt.download(
        getattr(EXPERIMENTAL, kernel)(mha_tt.upload(x, device=device), cos, sin)
    )
    assert close(actual[:, :, :seq_len], rotate(x, np.arange(seq_len)[None], 10000.0))
    assert actual.shape[2] == (
        seq_len if kernel == "rotary_embedding_hf" else -(-seq_len // 32) * 32
    )
    assert not actual[:, :, seq_len:].any()


def test_one_row_rotates_all_tokens(device, rng):
    """With a token index, all tokens are rotated by that row of the tables."""
    x = rounded(rng.standard_normal((1, 2, 32, 64)), ttnn.bfloat16)
    cos, sin = (mha_tt.upload(table, device=device) for table in tables(96, 64))
    actual = mha_tt.download(
        EXPERIMENTAL.rotary_embedding(mha_tt.upload(x, device=device), cos, sin, 41)
    )
    assert close(actual, rotate(x, np.full((1, 32), 41), 10000.0))


def test_interleaved_pairs_are_rotated(device, rng):
    """rotary_embedding_llama rotates interleaved pairs as the formula does."""
    x = rounded(rng.standard_normal((1, 3, 40, 64)), ttnn.bfloat16)
    cos, sin = (mha_tt.upload(table, device=device) for table in tables(96, 64, neighbours=True))
    trans_mat = mha_tt.upload(NEIGHBOURS[None, None], device=device)
    heads = mha_tt.upload(x, device=device)
    actual = mha_tt.download(
        EXPERIMENTAL.rotary_embedding_llama(heads, cos, sin, trans_mat, is_decode_mode=False)
    )
    halves = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=3)
    expected = rotate(halves, np.arange(40)[None], 10000.0)
    assert close(np.concatenate([actual[..., 0::2], actual[..., 1::2]], axis=3), expected)


@pytest.mark.parametrize("kernel", ["rotary_embedding_llama", "rotary_embedding_hf"])
def test_steps_are_rotated_by_their_own_rows(device, rng, kernel):
    """In a step, the heads of each sequence are rotated by the row of its position."""
    positions, is_llama = [5, 0, 77], kernel == "rotary_embedding_llama"
    x = rounded(rng.standard_normal((1, 3, 8, 64)), ttnn.bfloat16)
    cos, sin = (
        table[:, :, positions].swapaxes(1, 2) for table in tables(96, 64, neighbours=is_llama)
    )
    arguments = [on_cores(device, part) for part in (x, cos, sin)]
    if is_llama:
        of_each = mha_tt.upload(np.tile(NEIGHBOURS, (3, 1))[None, None], device=device)
        arguments.append(ttnn.to_memory_config(of_each, one_core_each(3, 32, 32, device)))
        x = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=3)
    actual = mha_tt.download(getattr(EXPERIMENTAL, kernel)(*arguments, is_decode_mode=True))
    actual = np.concatenate([actual[..., 0::2], actual[..., 1::2]], axis=3) if is_llama else actual
    assert close(actual.swapaxes(1, 2), rotate(x.swapaxes(1, 2), np.array([positions]), 10000.0))


@pytest.mark.parametrize("kernel", ["rotary_embedding", "rotary_embedding_hf"])
def test_halves_within_a_tile_raise(device, kernel):
    """Kernels for half-split pairs raise an error for heads of 16 features, half a tile."""
    x, table = (mha_tt.upload(np.ones((1, heads, 32, 16)), device=device) for heads in (2, 1))
    with pytest.raises(AssertionError, match=r"^heads "):
        getattr(EXPERIMENTAL, kernel)(x, table, table)


# ---- Heads ---------------------------------------------------------------------------------------


def test_nlp_concat_heads_joins_heads(device, rng):
    """nlp_concat_heads puts heads of whole tiles side by side."""
    x = rounded(rng.standard_normal((2, 4, 40, 64)), ttnn.bfloat16)
    actual = mha_tt.download(EXPERIMENTAL.nlp_concat_heads(mha_tt.upload(x, device=device)))
    assert np.array_equal(actual, x.swapaxes(1, 2).reshape(2, 1, 40, 256))


def test_nlp_concat_heads_rejects_part_tiles(device):
    """nlp_concat_heads raises an error for heads of 16 features."""
    with pytest.raises(AssertionError, match=r"head_dim .*nlp_concat_heads, got 16"):
        EXPERIMENTAL.nlp_concat_heads(mha_tt.upload(np.ones((1, 2, 32, 16)), device=device))


def test_nlp_concat_heads_decode_joins_heads(device, rng):
    """nlp_concat_heads_decode puts the heads of three sequences side by side; rows beyond them are
    NaN, because the kernel does not write them.
    """
    x = rounded(rng.standard_normal((1, 3, 8, 64)), ttnn.bfloat16)
    actual = mha_tt.download(EXPERIMENTAL.nlp_concat_heads_decode(on_cores(device, x), num_heads=8))
    assert actual.shape == (1, 1, 32, 512)
    assert np.array_equal(actual[0, 0, :3], x.reshape(3, 512))
    assert np.isnan(actual[0, 0, 3:]).all()  # the kernel does not write them


def test_nlp_create_qkv_heads_decode_splits(device, rng):
    """nlp_create_qkv_heads_decode splits queries, keys and values, on shared or separate cores."""
    x = rounded(rng.standard_normal((1, 1, 3, 8 * 64)), ttnn.bfloat16)
    narrow = ttnn.create_sharded_memory_config(
        (32, 64),
        core_grid=ttnn.num_cores_to_corerangeset(
            8, device.compute_with_storage_grid_size(), row_wise=True
        ),
        strategy=ttnn.ShardStrategy.WIDTH,
        use_height_and_width_as_shard_shape=True,
    )
    packed = mha_tt.upload(x, device=device)
    split = EXPERIMENTAL.nlp_create_qkv_heads_decode
    together = split(packed, num_heads=4, num_kv_heads=2)
    apart = split(
        ttnn.to_memory_config(packed, narrow),
        num_heads=4,
        num_kv_heads=2,
        overlap_qk_coregrid=False,
    )
    parts = np.split(x.reshape(1, 3, 8, 64), [4, 6], axis=2)
    for actual, expected in zip((*together, *apart), parts * 2, strict=True):
        assert np.array_equal(mha_tt.download(actual), expected)
    grids = [part.memory_config().shard_spec.grid for part in apart]
    assert grids[0] == grids[2] != grids[1]


# ---- Paged caches --------------------------------------------------------------------------------

PAGES = np.array([[3, 0, 4], [1, 5, 2]])  # of two sequences, pages of 32 slots


def paged(x):
    """Return slots (2, K, 96, H) in pages."""
    cache = np.zeros((6, x.shape[1], 32, x.shape[3]), x.dtype)
    cache[PAGES] = x.reshape(2, x.shape[1], 3, 32, -1).swapaxes(1, 2)
    return cache


def test_paged_caches_match_slots(device, rng):
    """Filling, updating and attending to a paged cache matches one in slots: exact contents,
    outputs within 2^-8.
    """
    keys, values = (rounded(rng.standard_normal((2, 2, 96, 64)), ttnn.bfloat16) for _ in "kv")
    table, positions = in_rows(device, PAGES), [40, 70]
    caches = [mha_tt.upload(np.zeros((6, 2, 32, 64)), device=device) for _ in "kv"]
    for cache, x in zip(caches, (keys, values), strict=True):
        for sequence, length in enumerate(positions):  # a prompt, then one more token
            prompt = mha_tt.upload(x[sequence : sequence + 1, :, :length], device=device)
            EXPERIMENTAL.paged_fill_cache(cache, prompt, table, batch_idx=sequence)
        token = np.stack([x[sequence, :, slot] for sequence, slot in enumerate(positions)])[None]
        slots = in_rows(device, positions)
        EXPERIMENTAL.paged_update_cache(
            cache, on_cores(device, token), update_idxs_tensor=slots, page_table=table
        )
        is_filled = np.arange(96)[:, None] <= np.array(positions)[:, None, None, None]
        assert np.array_equal(mha_tt.download(cache), paged(np.where(is_filled, x, 0.0)))
    q = mha_tt.upload(rng.standard_normal((1, 2, 32, 64)), device=device)
    last = in_rows(device, positions)
    in_pages = ttnn.transformer.paged_scaled_dot_product_attention_decode(
        q, *caches, table, cur_pos_tensor=last
    )
    slots = (mha_tt.upload(x, device=device) for x in (keys, values))
    in_slots = ttnn.transformer.scaled_dot_product_attention_decode(q, *slots, cur_pos_tensor=last)
    assert np.abs(mha_tt.download(in_pages) - mha_tt.download(in_slots)).max() <= 2**-8


@pytest.mark.parametrize("table", [None, [[2, 0], [1, 3]]], ids=["slots", "pages"])
def test_fused_update_writes_two_caches(device, rng, table):
    """paged_fused_update_cache writes one row per sequence to both caches, in slots or pages, and
    nothing else.
    """
    keys, values = (rounded(rng.standard_normal((1, 2, 2, 64)), ttnn.bfloat16) for _ in "kv")
    rows = [
        ttnn.to_memory_config(
            mha_tt.upload(x, device=device),
            ttnn.MemoryConfig(
                ttnn.TensorMemoryLayout.HEIGHT_SHARDED,
                ttnn.BufferType.L1,
                ttnn.ShardSpec(
                    ttnn.CoreRangeSet({ttnn.CoreRange(ttnn.CoreCoord(0, y), ttnn.CoreCoord(1, y))}),
                    [32, 64],
                    ttnn.ShardOrientation.ROW_MAJOR,
                ),
            ),
        )
        for y, x in enumerate((keys, values))
    ]
    shape, first, second = (
        ((2, 2, 64, 64), (0, 33), (1, 2)) if table is None else ((4, 2, 32, 64), (0, 1), (1, 2))
    )
    caches = [mha_tt.upload(np.zeros(shape), device=device) for _ in "kv"]
    where = {"update_idxs_tensor": in_rows(device, [33, 2])} | (
        {} if table is None else {"page_table": in_rows(device, table)}
    )
    EXPERIMENTAL.paged_fused_update_cache(caches[0], rows[0], caches[1], rows[1], **where)
    for cache, x in zip(map(mha_tt.download, caches), (keys, values), strict=True):
        for (page, slot), token in zip((first, second), x[0], strict=True):
            assert np.array_equal(cache[page, :, slot], token)
        assert np.count_nonzero(cache) == np.count_nonzero(x)


@pytest.mark.parametrize(
    ("slot", "pages", "message"),
    [
        (96, PAGES, "paged_update_cache .* 96 slots, got 96"),
        (33, PAGES + 5, "paged_update_cache .* 6 pages, got 10 for sequence 1"),
    ],
)
def test_write_outside_paged_cache_raises(device, slot, pages, message):
    """A write to a slot or page that a cache does not have raises an error that names the index."""
    cache = mha_tt.upload(np.zeros((6, 2, 32, 64)), device=device)
    token, slots = on_cores(device, np.ones((1, 2, 2, 64))), in_rows(device, [-1, slot])
    with pytest.raises(AssertionError, match=message):
        EXPERIMENTAL.paged_update_cache(
            cache, token, update_idxs_tensor=slots, page_table=in_rows(device, pages)
        )


def test_index_of_minus_one_is_not_written(device):
    """paged_update_cache writes nothing for a slot or page of -1."""
    cache = mha_tt.upload(np.zeros((6, 2, 32, 64)), device=device)
    token, slots = on_cores(device, np.ones((1, 2, 2, 64))), in_rows(device, [-1, 40])
    table = in_rows(device, np.where(PAGES == 5, -1, PAGES))
    EXPERIMENTAL.paged_update_cache(cache, token, update_idxs_tensor=slots, page_table=table)
    assert not mha_tt.download(cache).any()


def test_cache_position_modulo_has_no_golden(device):
    """paged_update_cache with cache_position_modulo raises NotImplementedError."""
    cache, token = (
        mha_tt.upload(np.zeros((6, 2, 32, 64)), device=device),
        on_cores(device, np.ones((1, 2, 2, 64))),
    )
    with pytest.raises(
        NotImplementedError,
        match="paged_update_cache with cache_position_modulo has no golden function",
    ):
        EXPERIMENTAL.paged_update_cache(
            cache,
            token,
            update_idxs_tensor=in_rows(device, [0, 1]),
            page_table=in_rows(device, PAGES),
            cache_position_modulo=64,
        )
