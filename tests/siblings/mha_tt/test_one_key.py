"""One key, one query, or one of each: rows without a key are 0 on every path, whatever hides their
keys.

Tiles have 32 rows and columns, so all other elements of a matrix with one element are padding.
"""

import numpy as np
import pytest
import ttnn
from helpers.heads import fused_attention, plain_attention
from helpers.tt.formulas import assert_close, attend, layer, module_of, rounded, rounded_weights

import mha_tt
from mha_spec import Alibi, AttentionSpec, Latent, Rope

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 32

SIZES = {"one-key": (3, 1), "one-query": (1, 3), "one-of-each": (1, 1)}
"""Numbers of queries and of keys."""

PATHS = {
    "plain": (plain_attention(mha_tt), ttnn.float32),
    "fused": (fused_attention(mha_tt), ttnn.bfloat16),
}

OF_SECOND = np.array([False, True]).reshape(2, 1, 1, 1)
OF_SOME_HEADS = np.array([False, True, True, False]).reshape(1, 4, 1, 1)


def hidings(num_queries, num_keys):
    """Return all ways of hiding keys: fields of the layer, keywords of a call, and the hidden
    keys.
    """
    queries, keys = np.arange(num_queries)[:, None], np.arange(num_keys)
    segments = np.zeros((BATCH, num_queries), int), np.array([[0], [1]]).repeat(num_keys, axis=1)
    bias = np.where(OF_SECOND, -np.inf, 0.5) + np.zeros((num_queries, num_keys))
    lengths = {"key_padding_lengths": [num_keys, 0]}
    return {
        "nothing": ({}, {}, False),
        "mask": ({}, {"mask": OF_SECOND | np.zeros((num_queries, num_keys), bool)}, OF_SECOND),
        "mask of keys": ({}, {"mask": OF_SECOND}, OF_SECOND),
        "mask of heads": ({}, {"mask": OF_SOME_HEADS}, OF_SOME_HEADS),
        "lengths": ({}, lengths, OF_SECOND),
        "causal lengths": ({}, {"is_causal": True, **lengths}, OF_SECOND | (keys > queries)),
        "segments": ({}, {"segment_ids": segments}, OF_SECOND),
        "bias": ({}, {"bias": bias.astype(np.float32)}, OF_SECOND),
        "window": ({"window_size": 1}, {}, queries != keys),
        "causal window": (
            {"window_size": 2},
            {"is_causal": True},
            (keys > queries) | (queries - keys >= 2),
        ),
        "chunks": ({"chunk_size": 2}, lengths, OF_SECOND | (queries // 2 != keys // 2)),
        "soft cap": ({"soft_cap": 50.0}, lengths, OF_SECOND),
        "alibi": ({"alibi": Alibi()}, lengths, OF_SECOND),
    }


def expected_scores(fields, bias, num_queries, num_keys):
    """Return the values added to the products, (N, T, S)."""
    bias = np.where(np.isneginf(bias), 0.0, bias)
    if "alibi" not in fields:
        return bias
    slopes = 2.0 ** (-8.0 * np.arange(1, NUM_HEADS + 1) / NUM_HEADS)
    return bias - slopes[:, None, None] * abs(np.arange(num_queries)[:, None] - np.arange(num_keys))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", PATHS)
def test_one_key_or_query_matches_formula(device, path, size):
    """With one key, one query or one of each, all ways of hiding keys match the formula on both
    paths, and rows without a key are exactly 0.
    """
    (attention, dtype), (num_queries, num_keys) = PATHS[path], SIZES[size]
    rng = np.random.default_rng(2)
    shapes = [
        (BATCH, NUM_HEADS, num_queries, HEAD_DIM),
        *[(BATCH, NUM_KV_HEADS, num_keys, HEAD_DIM)] * 2,
    ]
    heads = [
        rounded(0.3 * rng.standard_normal(shape), dtype) for shape in shapes
    ]  # small scores: the cap is linear
    uploaded = [mha_tt.upload(x, device=device, dtype=dtype) for x in heads]
    for name, (fields, keywords, hidden) in hidings(num_queries, num_keys).items():
        spec = AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS, num_kv_heads=NUM_KV_HEADS, **fields)
        options = {"need_weights": True} if path == "plain" else {}
        context, attn_weights = attention(*uploaded, spec, **keywords, **options)
        hidden = np.broadcast_to(hidden, (BATCH, NUM_HEADS, num_queries, num_keys))
        bias = expected_scores(fields, keywords.get("bias", np.zeros(1)), num_queries, num_keys)
        expected, expected_weights = attend(*heads, mask=hidden, bias=bias)
        actual = mha_tt.download(context)
        tolerance = ttnn.bfloat16 if "soft_cap" in fields else dtype
        assert not actual[hidden.all(axis=-1)].any(), name
        assert_close(actual, expected, tolerance)
        if attn_weights is not None:
            assert_close(mha_tt.download(attn_weights), expected_weights, tolerance)


# ---- Layers and caches ---------------------------------------------------------------------------

PLAIN = AttentionSpec(64, 2)
LATENT = AttentionSpec(
    64,
    2,
    head_dim=64,
    value_head_dim=32,
    latent=Latent(32, 32),
    rope=Rope(rotary_dim=32, rotated="last"),
)


@pytest.mark.parametrize("dtype", [ttnn.float32, ttnn.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["MultiHeadAttention", "MultiHeadSelfAttention"])
def test_layer_without_keys_matches_formula(device, kind, dtype, need_weights):
    """A sequence whose single key is padding gets the output of the formula."""
    weights = rounded_weights(PLAIN, dtype)
    module = module_of(kind, PLAIN, device, dtype, weights)
    x, memory = (
        rounded(np.random.default_rng(i).standard_normal((2, length, 64)), dtype)
        for i, length in [(0, 3), (1, 1)]
    )
    inputs = (x, memory) if kind == "MultiHeadAttention" else (memory,)
    uploaded = [mha_tt.upload(tensor, device=device, dtype=dtype) for tensor in inputs]
    options = {"need_weights": True} if need_weights and kind == "MultiHeadAttention" else {}
    output = module(*uploaded, key_padding_lengths=[1, 0], **options)
    output = output[0] if isinstance(output, tuple) else output
    expected, _ = layer(PLAIN, weights, *inputs, mask=OF_SECOND)
    assert_close(mha_tt.download(output), expected, dtype)


@pytest.mark.parametrize("dtype", [ttnn.float32, ttnn.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "spec"),
    [("MultiHeadAttentionWithCache", PLAIN), ("MultiHeadLatentAttention", LATENT)],
    ids=["kv", "latent"],
)
@pytest.mark.parametrize("hides", ["mask", "bias", "ragged"])
def test_hidden_first_token_matches_formula(device, kind, spec, dtype, hides):
    """The first token of a cache, if a mask or bias hides it, matches the formula; a sequence
    without a token outputs 0.
    """
    weights = rounded_weights(spec, dtype)
    module = module_of(kind, spec, device, dtype, weights)
    x = rounded(np.random.default_rng(0).standard_normal((2, 1, 64)), dtype)
    options = {
        "mask": {"mask": OF_SECOND},
        "bias": {"bias": np.where(OF_SECOND, -np.inf, 0.0).astype(np.float32)},
        "ragged": {"new_lengths": [1, 0]},
    }[hides]
    output, _ = module(
        mha_tt.upload(x, device=device, dtype=dtype), module.init_cache(2, 32), **options
    )
    expected, _ = layer(spec, weights, x, mask=OF_SECOND)
    if hides == "ragged":
        expected[1] = 0.0  # it has no token
    assert_close(mha_tt.download(output), expected, dtype)
