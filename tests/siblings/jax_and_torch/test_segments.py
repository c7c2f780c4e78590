"""Packed sequences: tokens attend to those of their own segment, by every kernel, as if each sequence were alone."""

import jax
import numpy as np
import pytest
import torch
from helpers.refusals import refuses, refuses_type
from helpers.samples import sample
from torch.nn.attention import flex_attention as library

import mha_jax
import mha_torch
from mha_jax.kernels.fused import FusedAttention
from mha_spec import AttentionSpec, Rope
from mha_torch.kernels import flex
from mha_torch.masks import Mask
from mha_torch.parallel.ring import check_known_to_ring
from mha_torch.scores import Scores

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # which it looks for
]

BLOCKS = FusedAttention(few_scores=0, queries=16, keys=16)
PACKED = np.array([[0] * 4 + [1] * 7 + [2] * 2, [5] * 6 + [-3] * 7], np.int32)
IDS = np.random.default_rng(1).permuted(np.sort(np.random.default_rng(0).integers(0, 4, (2, 70)), axis=1), axis=1)
IDS[0].sort()
IDS = IDS.astype(np.int32)
HIDING = {
    "alone": {},
    "joined": {"is_causal": True, "key_padding_lengths": [45, 9], "seq_len_k": 45},
    "window": {"is_causal": True, "window_size": 9},
}


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- Layers ----------------------------------------------------------------------------------------------------------


@sample(jax=1)
@pytest.mark.parametrize("window_size", [None, 3])
def test_a_packed_sequence_is_what_it_is_alone(sibling, window_size):
    spec = AttentionSpec(16, 4, num_kv_heads=2, rope=Rope(10000.0), window_size=window_size)
    layer, x = sibling.module("MultiHeadSelfAttention", spec), drawn(2, 13, 16)
    positions = np.tril(PACKED[:, :, None] == PACKED[:, None], -1).sum(axis=2).astype(np.int32)
    told = {"segment_ids": sibling.array(PACKED), "positions": sibling.array(positions)}
    packed = sibling.numpy(layer(sibling.array(x), is_causal=True, **told))
    for row, ids in enumerate(PACKED):
        for own in np.unique(ids):
            alone = sibling.numpy(layer(sibling.array(x[None, row, ids == own]), is_causal=True))
            np.testing.assert_allclose(packed[row, ids == own], alone[0], atol=1e-6)


def test_nan_stays_in_its_segment(sibling):
    layer, x = sibling.module("MultiHeadSelfAttention", AttentionSpec(16, 4)), drawn(2, 13, 16)
    x[0, 5, 3] = np.nan
    output = sibling.numpy(layer(sibling.array(x), segment_ids=sibling.array(PACKED)))
    assert np.array_equal(np.isnan(output).any(axis=2), (PACKED == 1))


def test_cross_attention_takes_the_ids_of_queries_and_of_keys(sibling):
    layer, x, memory = sibling.module("MultiHeadAttention", AttentionSpec(16, 4)), drawn(1, 3, 16), drawn(1, 5, 16)
    pair = tuple(map(sibling.array, ([[0, 1, 2]], [[1, 1, 0, 0, 0]])))
    _, weights = layer(sibling.array(x), sibling.array(memory), segment_ids=pair, need_weights=True)
    seen = np.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    assert np.array_equal(sibling.numpy(weights)[0, 0] > 0, seen)


def test_mask_of_segments(sibling):
    ids = sibling.array([[7, 7, 2]])
    mask = sibling.package.create_attention_mask(3, is_causal=True, segment_ids=ids)
    assert sibling.numpy(mask).astype(int).tolist() == [[[[0, 1, 1], [0, 0, 1], [1, 1, 0]]]]


@pytest.mark.parametrize(
    ("ids", "refusal"),
    {
        "floats": (np.zeros((2, 13), np.float32), refuses_type("segment_ids", {"segment_ids.dtype": ...})),
        "booleans": (np.zeros((2, 13), bool), refuses_type("segment_ids", {"segment_ids.dtype": ...})),
        "short": (PACKED[:, 1:], refuses("segment_ids", {"segment_ids.shape": (2, 12)})),
        "one row": (PACKED[:1], refuses("segment_ids", {"segment_ids.shape": (1, 13)})),
        "a number": (np.array(3), refuses("segment_ids", {"segment_ids.shape": ()})),
        "a pair of others": ((PACKED, PACKED[:, 1:]), refuses("segment_ids", {"segment_ids.shape": (2, 12)})),
    }.values(),
)
def test_other_ids_are_refused(sibling, ids, refusal):
    layer, x = sibling.module("MultiHeadSelfAttention", AttentionSpec(16, 4)), sibling.array(drawn(2, 13, 16))
    ids = tuple(map(sibling.array, ids)) if isinstance(ids, tuple) else sibling.array(ids)
    with refusal:
        layer(x, segment_ids=ids)
    if getattr(ids, "shape", None) != (1, 13):  # a mask may be of one row
        with refusal:
            sibling.package.create_attention_mask(13, segment_ids=ids)


def test_a_triple_of_ids_is_refused(sibling):
    with refuses("segment_ids"):
        sibling.package.create_attention_mask(13, segment_ids=(sibling.array(PACKED),) * 3)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def problem(options):
    """Split heads, what hides keys by segment, and the same as a mask of all that hides."""
    keys = options.get("seq_len_k", 70)
    pair = (IDS, IDS[:, :keys])
    arrays = [drawn(2, heads, count, 16, seed=heads + count) for heads, count in ((4, 70), (2, keys), (2, keys))]
    spec = AttentionSpec(64, 4, num_kv_heads=2, window_size=options.get("window_size"))
    told = {name: x for name, x in options.items() if name in ("is_causal", "key_padding_lengths")}
    t, s = np.arange(70)[:, None], np.arange(keys)
    hidden = (pair[0][:, :, None] != pair[1][:, None])[:, None]
    if "is_causal" in told:
        hidden = hidden | (s > t)
    if "key_padding_lengths" in told:
        hidden = hidden | (s >= np.array(told["key_padding_lengths"])[:, None, None, None])
    return arrays, pair, spec, told, hidden


@pytest.mark.parametrize("hiding", ["joined", "window"])
def test_blocks_of_jax_compare_ids(hiding):
    arrays, pair, spec, told, hidden = problem(HIDING[hiding])

    @jax.jit
    def packed(arrays, pair):
        return mha_jax.fused.scaled_dot_product_attention(*arrays, spec, **told, segment_ids=pair, kernel=BLOCKS)[0]

    def masked(arrays, _):
        return mha_jax.scaled_dot_product_attention(*arrays, spec, mask=hidden)[0]

    def with_gradients(function):
        return jax.value_and_grad(lambda arrays: (function(arrays, pair) ** 2).sum())(arrays)

    found, expected = with_gradients(packed), with_gradients(masked)
    np.testing.assert_allclose(packed(arrays, pair), masked(arrays, pair), atol=2e-6)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.fixture(params=["sdpa", "flex"])
def of_torch(request, monkeypatch):
    """The fused function of torch, by the kernel for a CPU, and by the one for CUDA in small blocks."""
    if request.param == "flex":
        monkeypatch.setattr(flex, "_runs_here", lambda query, value: True)
        monkeypatch.setattr(flex, "MANY_SCORES", 0)
        monkeypatch.setattr(flex, "_kernel", lambda: library.flex_attention)
        monkeypatch.setattr(flex, "_BLOCK_SIZE", 16)
        monkeypatch.setattr(library, "_validate_device", lambda *heads: None)  # it refuses gradients on a CPU
    return mha_torch.fused.scaled_dot_product_attention


@pytest.mark.parametrize("hiding", HIDING)
def test_kernels_of_torch_compare_ids(of_torch, hiding):
    arrays, pair, spec, told, hidden = problem(HIDING[hiding])

    def with_gradients(function, **options):
        leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
        context, _ = function(*leaves, spec, **options)
        return context, *torch.autograd.grad(context.square().sum(), leaves)

    ids = tuple(map(torch.from_numpy, pair))
    found = with_gradients(of_torch, **told, segment_ids=ids)
    expected = with_gradients(mha_torch.scaled_dot_product_attention, mask=torch.from_numpy(hidden))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_nan_stays_in_its_segment_by_every_kernel_of_torch(of_torch):
    (query, key, value), pair, spec, _, hidden = problem({})
    key[0, :, 9] = value[1, :, 30, 2] = np.nan
    arrays = [torch.from_numpy(x) for x in (query, key, value)]
    ids = tuple(map(torch.from_numpy, pair))
    found, _ = of_torch(*arrays, spec, segment_ids=ids)
    wrong = np.stack([hidden[0, 0, :, 9], hidden[1, 0, :, 30]])
    assert np.array_equal(torch.isnan(found).any(dim=3)[:, 0].numpy(), ~wrong)


def test_nan_stays_in_its_segment_in_blocks_of_jax():
    (query, key, value), pair, spec, _, hidden = problem({})
    key[0, :, 9] = value[1, :, 30, 2] = np.nan
    found, _ = mha_jax.fused.scaled_dot_product_attention(query, key, value, spec, segment_ids=pair, kernel=BLOCKS)
    wrong = np.stack([hidden[0, 0, :, 9], hidden[1, 0, :, 30]])
    assert np.array_equal(np.isnan(found).any(axis=3)[:, 0], ~wrong)


def test_ids_may_be_traced_by_torch():
    layer = mha_torch.MultiHeadSelfAttention(AttentionSpec(16, 4))
    x, ids = torch.from_numpy(drawn(2, 13, 16)), torch.from_numpy(PACKED)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for each in (ids, ids.flip(1)):
        expected = layer(x, is_causal=True, segment_ids=each)
        torch.testing.assert_close(compiled(x, is_causal=True, segment_ids=each), expected)


def test_a_ring_refuses_segments():
    with refuses("segment_ids"):
        check_known_to_ring(Mask(is_causal=True, segment_ids=torch.from_numpy(PACKED)), Scores())
