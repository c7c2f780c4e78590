"""Packed sequences: in every kernel, tokens attend only to their own segment, as if each sequence
were alone.
"""

import jax
import numpy as np
import pytest
import torch
from helpers.heads import fused_attention, plain_attention
from helpers.input_errors import rejects, rejects_type
from helpers.kernels import attend_with, contained
from helpers.samples import sample
from torch.nn.attention import flex_attention as library

import mha_jax
import mha_torch
from mha_jax.kernels.fused import FusedAttention
from mha_spec import AttentionSpec, Rope
from mha_spec.heads import BareHeads
from mha_torch.kernels import flex, sdpa
from mha_torch.masks import Mask
from mha_torch.parallel.ring import check_ring_supports
from mha_torch.scores import Scores

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # read by flex_attention
]

BLOCKS = FusedAttention(few_scores=0, queries=16, keys=16)
PACKED = np.array([[0] * 4 + [1] * 7 + [2] * 2, [5] * 6 + [-3] * 7], np.int32)
IDS = np.random.default_rng(1).permuted(
    np.sort(np.random.default_rng(0).integers(0, 4, (2, 70)), axis=1), axis=1
)
IDS[0].sort()
IDS = IDS.astype(np.int32)
HIDING = {
    "alone": {},
    "joined": {"is_causal": True, "key_padding_lengths": [45, 9], "seq_len_k": 45},
    "window": {"is_causal": True, "window_size": 9},
}


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- Layers --------------------------------------------------------------------------------------


@sample(jax=1)
@pytest.mark.parametrize("window_size", [None, 3])
def test_packed_sequences_match_single_ones(sibling, window_size):
    """Each segment of a packed sequence matches the sequence alone, with and without a window."""
    spec = AttentionSpec(16, 4, num_kv_heads=2, rope=Rope(10000.0), window_size=window_size)
    layer, x = sibling.module("MultiHeadSelfAttention", spec), drawn(2, 13, 16)
    positions = np.tril(PACKED[:, :, None] == PACKED[:, None], -1).sum(axis=2).astype(np.int32)
    options = {"segment_ids": sibling.array(PACKED), "positions": sibling.array(positions)}
    packed = sibling.numpy(layer(sibling.array(x), is_causal=True, **options))
    for row, ids in enumerate(PACKED):
        for own in np.unique(ids):
            alone = sibling.numpy(layer(sibling.array(x[None, row, ids == own]), is_causal=True))
            np.testing.assert_allclose(packed[row, ids == own], alone[0], atol=1e-6)


def test_nan_stays_in_its_segment(sibling):
    """With a contained kernel, NaN in a segment spoils exactly the outputs of that segment."""
    layer, x = sibling.module("MultiHeadSelfAttention", AttentionSpec(16, 4)), drawn(2, 13, 16)
    layer.kernel = contained[sibling.name](sibling.package.fused.attend)
    x[0, 5, 3] = np.nan
    output = sibling.numpy(layer(sibling.array(x), segment_ids=sibling.array(PACKED)))
    assert np.array_equal(np.isnan(output).any(axis=2), (PACKED == 1))


def test_cross_attention_accepts_id_pairs(sibling):
    """With ids of queries and of keys, each query attends exactly to the keys with its id."""
    layer, x, memory = (
        sibling.module("MultiHeadAttention", AttentionSpec(16, 4)),
        drawn(1, 3, 16),
        drawn(1, 5, 16),
    )
    pair = tuple(map(sibling.array, ([[0, 1, 2]], [[1, 1, 0, 0, 0]])))
    _, weights = layer(sibling.array(x), sibling.array(memory), segment_ids=pair, need_weights=True)
    is_visible = np.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    assert np.array_equal(sibling.numpy(weights)[0, 0] > 0, is_visible)


def test_segment_mask_matches_table(sibling):
    """A causal mask of segments equals a table written by hand."""
    ids = sibling.array([[7, 7, 2]])
    mask = sibling.package.create_attention_mask(3, is_causal=True, segment_ids=ids)
    assert sibling.numpy(mask).astype(int).tolist() == [[[[0, 1, 1], [0, 0, 1], [1, 1, 0]]]]


@pytest.mark.parametrize(
    ("ids", "input_error"),
    {
        "floats": (
            np.zeros((2, 13), np.float32),
            rejects_type("segment_ids", {"segment_ids.dtype": ...}),
        ),
        "booleans": (
            np.zeros((2, 13), bool),
            rejects_type("segment_ids", {"segment_ids.dtype": ...}),
        ),
        "short": (PACKED[:, 1:], rejects("segment_ids", {"segment_ids.shape": (2, 12)})),
        "one row": (PACKED[:1], rejects("segment_ids", {"segment_ids.shape": (1, 13)})),
        "a number": (np.array(3), rejects("segment_ids", {"segment_ids.shape": ()})),
        "a pair of others": (
            (PACKED, PACKED[:, 1:]),
            rejects("segment_ids", {"segment_ids.shape": (2, 12)}),
        ),
    }.values(),
)
def test_invalid_segment_ids_raise(sibling, ids, input_error):
    """Ids of a wrong dtype, length, batch or rank raise an error in layers and functions of
    masks.
    """
    layer, x = (
        sibling.module("MultiHeadSelfAttention", AttentionSpec(16, 4)),
        sibling.array(drawn(2, 13, 16)),
    )
    ids = tuple(map(sibling.array, ids)) if isinstance(ids, tuple) else sibling.array(ids)
    with input_error:
        layer(x, segment_ids=ids)
    if getattr(ids, "shape", None) != (1, 13):  # a mask may have one row
        with input_error:
            sibling.package.create_attention_mask(13, segment_ids=ids)


def test_three_segment_id_arrays_raise(sibling):
    """A tuple of three arrays of ids raises an error, in a mask and in a layer with two batch
    axes.
    """
    with rejects("segment_ids"):
        sibling.package.create_attention_mask(13, segment_ids=(sibling.array(PACKED),) * 3)
    layer = sibling.module("MultiHeadSelfAttention", AttentionSpec(8, 2))
    x = sibling.array(np.zeros((1, 2, 13, 8), np.float32))
    with rejects("segment_ids"):
        layer(x, segment_ids=(sibling.array(PACKED[None]),) * 3)


# ---- Kernels -------------------------------------------------------------------------------------


def problem(options):
    """Return split heads, the ids, spec and options of a call, and the equivalent mask."""
    keys = options.get("seq_len_k", 70)
    pair = (IDS, IDS[:, :keys])
    arrays = [
        drawn(2, heads, count, 16, seed=heads + count)
        for heads, count in ((4, 70), (2, keys), (2, keys))
    ]
    spec = AttentionSpec(64, 4, num_kv_heads=2, window_size=options.get("window_size"))
    hiding_options = {
        name: x for name, x in options.items() if name in ("is_causal", "key_padding_lengths")
    }
    t, s = np.arange(70)[:, None], np.arange(keys)
    hidden = (pair[0][:, :, None] != pair[1][:, None])[:, None]
    if "is_causal" in hiding_options:
        hidden = hidden | (s > t)
    if "key_padding_lengths" in hiding_options:
        hidden = hidden | (
            s >= np.array(hiding_options["key_padding_lengths"])[:, None, None, None]
        )
    return arrays, pair, spec, hiding_options, hidden


@sample(hiding=["window"])
@pytest.mark.parametrize("hiding", ["joined", "window"])
def test_jax_blocks_match_segment_mask(hiding):
    """Context and gradients of blocks in JAX match the plain path with the equivalent mask."""
    arrays, pair, spec, hiding_options, hidden = problem(HIDING[hiding])

    @jax.jit
    def packed(arrays, pair):
        return fused_attention(mha_jax)(
            *arrays, spec, **hiding_options, segment_ids=pair, kernel=BLOCKS
        )[0]

    def masked(arrays, _):
        return plain_attention(mha_jax)(*arrays, spec, mask=hidden)[0]

    def with_gradients(function):
        return jax.value_and_grad(lambda arrays: (function(arrays, pair) ** 2).sum())(arrays)

    actual, expected = with_gradients(packed), with_gradients(masked)
    np.testing.assert_allclose(packed(arrays, pair), masked(arrays, pair), atol=2e-6)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.fixture(params=["sdpa", "flex"])
def of_torch(request, monkeypatch):
    """Return the fused function of torch, with the kernel for a CPU or the one for CUDA in small
    blocks.
    """
    if request.param == "flex":
        monkeypatch.setattr(flex, "is_on_device", lambda x: x.is_cpu)
        monkeypatch.setattr(flex, "_runs_here", lambda query, value: True)
        monkeypatch.setattr(flex, "MANY_SCORES", 0)
        monkeypatch.setattr(flex, "_kernel", lambda: library.flex_attention)
        monkeypatch.setattr(flex, "_BLOCK_SIZE", 16)
        monkeypatch.setattr(
            library, "_validate_device", lambda *heads: None
        )  # it rejects gradients on a CPU
    return fused_attention(mha_torch)


@pytest.mark.parametrize("hiding", HIDING)
def test_torch_kernels_match_segment_mask(of_torch, hiding):
    """Context and gradients of both kernels of torch match the plain path with the equivalent
    mask.
    """
    arrays, pair, spec, hiding_options, hidden = problem(HIDING[hiding])

    def with_gradients(function, **options):
        leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
        context, _ = function(*leaves, spec, **options)
        return context, *torch.autograd.grad(context.square().sum(), leaves)

    ids = tuple(map(torch.from_numpy, pair))
    actual = with_gradients(of_torch, **hiding_options, segment_ids=ids)
    expected = with_gradients(plain_attention(mha_torch), mask=torch.from_numpy(hidden))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("of_torch")
def test_nan_stays_in_segment_in_torch():
    """In both kernels of torch, contained, NaN spoils exactly the rows that attend to it."""
    (query, key, value), pair, spec, _, hidden = problem({})
    key[0, :, 9] = value[1, :, 30, 2] = np.nan
    arrays = [torch.from_numpy(x) for x in (query, key, value)]
    ids = tuple(map(torch.from_numpy, pair))
    actual = attend_with(contained["torch"](mha_torch.fused.attend), *arrays, spec, segment_ids=ids)
    wrong = np.stack([hidden[0, 0, :, 9], hidden[1, 0, :, 30]])
    assert np.array_equal(torch.isnan(actual).any(dim=3)[:, 0].numpy(), ~wrong)


def test_nan_stays_in_segment_in_jax_blocks():
    """In blocks of JAX, contained, NaN spoils exactly the rows that attend to it."""
    (query, key, value), pair, spec, _, hidden = problem({})
    key[0, :, 9] = value[1, :, 30, 2] = np.nan
    actual = attend_with(contained["jax"](BLOCKS), query, key, value, spec, segment_ids=pair)
    wrong = np.stack([hidden[0, 0, :, 9], hidden[1, 0, :, 30]])
    assert np.array_equal(np.isnan(actual).any(axis=3)[:, 0], ~wrong)


@pytest.mark.parametrize(
    ("row", "in_pieces"),
    [
        ([3] * 20 + [1] * 9 + [2] * 41, False),
        ([3] * 70, False),
        ([3] * 20 + [1] * 9 + [3] * 41, True),
        ([*range(35)] * 2, True),
    ],
    ids=["segments", "one segment", "a segment in two pieces", "pieces of one token"],
)
def test_segments_in_torch_need_no_mask(monkeypatch, row, in_pieces):
    """Packed segments match the plain path, with gradients and sinks, and need no mask unless one
    is in pieces.
    """
    ids = torch.tensor([[5] * 30 + [4] * 40, row])
    spec = AttentionSpec(64, 4, num_kv_heads=2, sinks=True)
    masks, attend = [], sdpa.sdpa

    def recorded(*arrays, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*arrays, attn_mask=attn_mask, **options)

    def with_gradients(function):
        leaves = [
            torch.from_numpy(drawn(2, heads, 70, 16, seed=heads)).requires_grad_()
            for heads in (4, 2, 2)
        ]
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
        options = {"is_causal": row[0] == row[-1], "segment_ids": ids, "learned": {"sinks": sinks}}
        context, _ = function(*leaves, spec, **options)
        return context, *torch.autograd.grad(context.square().sum(), [*leaves, sinks])

    expected = with_gradients(plain_attention(mha_torch))
    monkeypatch.setattr(sdpa, "sdpa", recorded)
    actual = with_gradients(fused_attention(mha_torch))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    # A call with sinks calls the function again, without causality's own mask.
    assert any(mask is not None for mask in masks) == in_pieces


def test_batch_axes_keep_segments_apart(monkeypatch):
    """Sequences on two batch axes need no mask of segments either, and match those on one."""
    layer = mha_torch.MultiHeadSelfAttention(AttentionSpec(16, 4)).eval()
    x = torch.from_numpy(drawn(2, 3, 20, 16))
    ids = torch.tensor([0] * 8 + [1] * 12).expand(2, 3, 20)
    expected = layer(x.flatten(0, 1), segment_ids=ids.flatten(0, 1)).unflatten(0, (2, 3))
    masks, attend = [], sdpa.sdpa

    def recorded(*arrays, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*arrays, attn_mask=attn_mask, **options)

    monkeypatch.setattr(sdpa, "sdpa", recorded)
    torch.testing.assert_close(layer(x, segment_ids=ids), expected)
    assert masks == [None] * 12


def test_short_segments_share_a_mask():
    """A call for each segment is worth it from eight tokens of a segment on."""
    for tokens, expected in ((8, [[8] * 4]), (7, None)):
        ids = torch.arange(4).repeat_interleave(tokens)[None]
        query = torch.zeros(1, 1, 4 * tokens, 2)
        assert sdpa.known_segments(query, Mask(segment_ids=ids)) == expected


def test_compiled_torch_layer_accepts_ids():
    """A compiled layer matches the uncompiled one for two arrays of ids."""
    layer = mha_torch.MultiHeadSelfAttention(AttentionSpec(16, 4))
    x, ids = torch.from_numpy(drawn(2, 13, 16)), torch.from_numpy(PACKED)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for segment_ids in (ids, ids.flip(1)):
        expected = layer(x, is_causal=True, segment_ids=segment_ids)
        torch.testing.assert_close(compiled(x, is_causal=True, segment_ids=segment_ids), expected)


def test_ring_rejects_segments():
    """A ring raises an error for segments."""
    with rejects("segment_ids"):
        check_ring_supports(
            Mask(is_causal=True, segment_ids=torch.from_numpy(PACKED)), Scores(BareHeads(4))
        )
