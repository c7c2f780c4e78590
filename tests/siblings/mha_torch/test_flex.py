"""FlexAttention in torch: the function of the plain path, run on a CPU without the compiler that
CUDA needs.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers.heads import fused_attention, plain_attention
from helpers.kernels import attend_with, contained
from helpers.samples import sample
from torch.nn.attention import flex_attention as library

import mha_torch
from mha_spec import Alibi, AttentionSpec
from mha_torch import stages
from mha_torch.kernels import flex, sdpa
from mha_torch.masks import Mask

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # read by flex_attention
]

BATCH, HEADS, WIDTH = 3, (4, 2), 16

FEATURES = {
    "soft_cap": {"soft_cap": 2.0},
    "alibi": {"alibi": Alibi()},
    "window": {"window_size": 7},
    "chunk": {"chunk_size": 8},
    "sinks": {"sinks": True},
    "lengths": {},
}
TOGETHER = [
    ("soft_cap", "window", "lengths"),
    ("alibi", "chunk", "sinks"),
    ("soft_cap", "alibi", "window", "sinks", "lengths"),
]
COMBINATIONS = [*((name,) for name in FEATURES), *TOGETHER]


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Make the module support the calls it supports on CUDA, with the library's uncompiled function
    as its kernel.
    """
    monkeypatch.setattr(flex, "is_on_device", lambda x: x.is_cpu)
    monkeypatch.setattr(flex, "_runs_here", lambda query, value: True)
    monkeypatch.setattr(flex, "MANY_SCORES", 0)
    monkeypatch.setattr(flex, "_kernel", lambda: library.flex_attention)
    monkeypatch.setattr(
        library, "_validate_device", lambda *heads: None
    )  # it rejects gradients on a CPU
    torch.compiler.reset()


def problem(features, lengths=(29, 41), dtype=torch.float64):
    """Return split heads, and the spec and lengths of a call."""
    generator, (num_heads, num_kv_heads) = torch.Generator().manual_seed(0), HEADS
    shapes = {
        "query": (num_heads, lengths[0], WIDTH),
        "key": (num_kv_heads, lengths[1], WIDTH),
        "value": (num_kv_heads, lengths[1], WIDTH + 2),
    }
    leaves = {
        name: torch.randn(BATCH, *shape, dtype=dtype, generator=generator)
        for name, shape in shapes.items()
    }
    if "sinks" in features:
        leaves["sinks"] = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=dtype)
    options = {name: value for feature in features for name, value in FEATURES[feature].items()}
    spec = AttentionSpec(num_heads * WIDTH, num_heads, num_kv_heads=num_kv_heads, **options)
    hides = (
        {"key_padding_lengths": torch.tensor([0, 5, lengths[1]])} if "lengths" in features else {}
    )
    return leaves, {"spec": spec, **hides}


def with_gradients(function, leaves, options):
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    context, _ = function(**leaves, **options)
    return context, *torch.autograd.grad(context.square().sum(), [*leaves.values()])


def contained_attention(query, key, value, **options):
    return attend_with(
        contained["torch"](mha_torch.fused.attend), query, key, value, **options
    ), None


@pytest.fixture
def calls(monkeypatch):
    """Return a list to which the arrays of each FlexAttention call are appended."""
    flex_calls, attend = [], flex.attend

    def note(*arrays, **keywords):
        flex_calls.append(arrays)
        return attend(*arrays, **keywords)

    monkeypatch.setattr(flex, "attend", note)
    return flex_calls


@sample(is_causal=[True])
@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("features", COMBINATIONS, ids="-".join)
def test_flex_matches_plain_path(calls, features, is_causal):
    """Context and gradients of every feature, alone and combined, match the plain path in
    float64.
    """
    lengths = (
        (41, 29) if "window" in features else (29, 41)
    )  # some rows are beyond the window of every key
    leaves, options = problem(features, lengths)
    actual = with_gradients(fused_attention(mha_torch), leaves, {**options, "is_causal": is_causal})
    assert len(calls) == 1
    expected = with_gradients(
        plain_attention(mha_torch), leaves, {**options, "is_causal": is_causal}
    )
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("on_a_cpu")
def test_bfloat16_error_is_near_plain_path():
    """In bfloat16, the error is at most twice the error of the plain path."""
    leaves, options = problem(TOGETHER[-1])
    options["is_causal"] = True
    expected, _ = plain_attention(mha_torch)(**leaves, **options)
    leaves = {name: x if name == "sinks" else x.bfloat16() for name, x in leaves.items()}
    actual, plain = (
        attend(**leaves, **options)[0]
        for attend in (fused_attention(mha_torch), plain_attention(mha_torch))
    )
    assert actual.dtype == torch.bfloat16
    errors = [(x.double() - expected).norm() for x in (actual, plain)]
    assert 0 < errors[0] <= 2 * errors[1]


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("features", [("window", "lengths"), ("sinks", "lengths")], ids="-".join)
def test_nan_stays_in_attending_rows(features):
    """Contained NaN and infinity give the context of the contained plain path; a sequence without
    keys has outputs and gradients of 0.
    """
    leaves, options = problem(features, (41, 41), torch.float32)
    options["is_causal"] = True
    leaves["key"][2, 0, 9, 3] = leaves["value"][1, :, 4, 0] = leaves["query"][:, 1, 3, 2] = (
        torch.nan
    )
    leaves["key"][0] = leaves["value"][1, :, 5:] = torch.inf  # hidden
    actual, *gradients = with_gradients(contained_attention, leaves, options)
    plain = contained["torch"](lambda *arguments: stages.attend(*arguments)[0])
    expected = attend_with(plain, **leaves, **options)
    assert torch.isnan(expected).any()
    assert not actual[0].any()
    torch.testing.assert_close(actual, expected, equal_nan=True)
    for gradient in gradients[:3]:
        assert not gradient[0].any()


@pytest.mark.usefixtures("on_a_cpu")
def test_row_of_infinite_scores_is_nan():
    """A contained row whose scores are all -inf is NaN instead of an empty row, and other sequences
    are finite.
    """
    leaves, options = problem(("lengths",), dtype=torch.float32)
    leaves["query"][2, 1, 4], leaves["key"][2, 0] = 1e30, -1e30
    actual, _ = contained_attention(**leaves, **options)
    assert torch.isnan(actual[2, 1, 4]).all()
    assert torch.isfinite(actual[2, 2:]).all()


SPANS = [{}, {"window_size": 130}, {"window_size": 300}, {"chunk_size": 200}, {"chunk_size": 128}]


@pytest.mark.parametrize("lengths", [(300, 517), (517, 300), (256, 256)], ids=str)
@pytest.mark.parametrize("span", SPANS, ids=str)
def test_blocks_match_visible_keys(lengths, span):
    """On CUDA, blocks without visible keys are never read, and nothing is hidden in fully visible
    ones.

    The block masks of all spans, lengths and paddings agree with the table of hidden keys.
    """
    num_queries, num_keys = lengths
    for is_causal, padding in itertools.product([False, True], [None, [0, 127, num_keys]]):
        span_of_spec = AttentionSpec(16, 1, **span).span
        visible = Mask(None, is_causal, padding, span=span_of_spec)
        hidden = visible.implicit_bool(num_queries, num_keys).expand(BATCH, 1, -1, -1).numpy()
        more = [(0, 0), (0, 0), (0, -num_queries % 128), (0, -num_keys % 128)]
        padded = np.pad(hidden, more, constant_values=True).reshape(
            BATCH, -(-num_queries // 128), 128, -1, 128
        )
        first, stop = flex._key_ranges(visible, BATCH, num_queries, num_keys, torch.device("cpu"))
        block_mask = flex._block_mask(first, stop, num_keys, has_gradient=True)
        visible_blocks = [np.zeros((BATCH, *padded.shape[1::2]), bool) for _ in range(2)]
        lists = [
            (block_mask.kv_num_blocks, block_mask.kv_indices),
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        ]
        for blocks, (counts, indices) in zip(visible_blocks, lists, strict=True):
            for batch, row in np.ndindex(blocks.shape[:2]):
                blocks[batch, row, indices[batch, 0, row, : counts[batch, 0, row]]] = True
        in_part, whole = visible_blocks
        np.testing.assert_array_equal(whole, ~padded.any(axis=(2, 4)))
        assert not (in_part & whole).any()
        assert not (~padded.all(axis=(2, 4)) & ~(in_part | whole)).any()
        batch, row, key = (torch.arange(count) for count in (BATCH, num_queries, num_keys))
        visible = block_mask.mask_mod(batch[:, None, None], None, row[:, None], key)
        np.testing.assert_array_equal(visible, ~hidden[:, 0])


def test_blocks_out_of_reach_are_skipped():
    """With a window and lengths, only blocks within reach are computed."""
    visible = Mask(None, True, [1024, 100], span=AttentionSpec(16, 1, window_size=128).span)
    partial, full = flex._visible_blocks(
        *flex._key_ranges(visible, 2, 1024, 1024, torch.device("cpu")), 1024
    )
    assert not full.any()
    assert partial[0, 0].sum(dim=1).tolist() == [1] + [2] * 7
    assert partial[1, 0].sum(dim=1).tolist() == [1, 1] + [0] * 6


def test_flex_replaces_only_masked_sdpa(monkeypatch):
    """FlexAttention is used for features that need a mask otherwise, but never with masks, biases,
    dropout, few scores or forward mode.
    """
    monkeypatch.setattr(flex, "is_on_device", lambda x: x.is_cpu)
    monkeypatch.setattr(flex, "_runs_here", lambda query, value: True)
    monkeypatch.setattr(flex, "MANY_SCORES", 3 * 4 * 5 * 5)
    monkeypatch.setattr(flex, "attend", lambda query, *others, **options: "flex")

    def takes(features, **options):
        leaves, of_layer = problem(features, (5, 5), torch.float32)
        return fused_attention(mha_torch)(**leaves, **{**of_layer, **options})[0] == "flex"

    for features in COMBINATIONS:
        assert takes(features)
    assert not takes(())
    assert not takes((), is_causal=True)
    rejected = [
        {"mask": torch.zeros(5, 5, dtype=torch.bool)},
        {"bias": torch.zeros(5, 5)},
        {"dropout": 0.5},
    ]
    for options, features in itertools.product(rejected, [("soft_cap",), ("lengths",)]):
        assert not takes(features, **options)
    monkeypatch.setattr(flex, "MANY_SCORES", 3 * 4 * 5 * 5 + 1)
    assert not takes(("soft_cap",))
    monkeypatch.setattr(flex, "MANY_SCORES", 0)
    monkeypatch.setattr(torch.autograd.forward_ad, "_current_level", 0)
    assert not takes(("soft_cap",))


def test_flex_is_not_used_on_cpu(calls):
    """On a CPU, a call does not use FlexAttention."""
    leaves, options = problem(("soft_cap",))
    fused_attention(mha_torch)(**leaves, **options)
    assert not calls


class Heads(NamedTuple):
    """Properties of heads that the module checks; a CPU has no heads on CUDA."""

    shape: tuple[int, ...] = (2, 4, 8, 64)
    dtype: torch.dtype = torch.bfloat16

    def numel(self):
        return math.prod(self.shape)


RUNS = {
    "as-they-are": (Heads(), True),
    "wide": (Heads((2, 4, 8, 256), torch.float32), True),
    "float64": (Heads(dtype=torch.float64), False),
    "too-narrow": (Heads((2, 4, 8, 8)), False),
    "too-wide": (Heads((2, 4, 8, 320)), False),
    "empty": (Heads((0, 4, 8, 64)), False),
}


@pytest.mark.parametrize(("heads", "expected"), RUNS.values(), ids=RUNS)
def test_flex_checks_dtype_and_width(monkeypatch, heads, expected):
    """FlexAttention is used only for supported dtypes and widths, for non-empty heads, and
    with a compiler.
    """
    monkeypatch.setattr(flex, "_CAN_COMPILE", True)
    monkeypatch.setattr(flex, "Tensor", Heads)
    assert flex._runs_here(heads, heads) == expected
    monkeypatch.setattr(flex, "_CAN_COMPILE", False)
    assert not flex._runs_here(heads, heads)


def test_flex_is_not_used_under_vmap(monkeypatch):
    """Under vmap, FlexAttention is not used."""
    monkeypatch.setattr(flex, "_CAN_COMPILE", True)
    monkeypatch.setattr(flex, "Tensor", Heads)

    def of_one(x):
        assert not flex._runs_here(Heads(), Heads())
        return x

    assert torch.func.vmap(of_one)(torch.ones(2)).sum() == 2
    assert flex._runs_here(Heads(), Heads())


@pytest.mark.usefixtures("on_a_cpu")
def test_compiled_graph_does_not_use_flex(calls):
    """A compiled graph has no breaks, uses a different kernel and matches the plain path."""
    leaves, options = problem(TOGETHER[-1], dtype=torch.float32)

    def attend(leaves, options):
        return fused_attention(mha_torch)(**leaves, **options)[0]

    actual = torch.compile(attend, fullgraph=True, backend="eager")(leaves, options)
    expected, _ = plain_attention(mha_torch)(**leaves, **options)
    torch.testing.assert_close(actual, expected)
    assert not calls


class OnCuda(torch.Tensor):
    """Tensor that claims to be on CUDA; PyTorch computes with it on a CPU."""

    is_cuda = True


@pytest.fixture
def cudnn(monkeypatch):
    """Return a list of whether cuDNN is enabled in each call of SDPA; biases must have the dtype of
    queries.
    """
    cudnn_calls, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def note(query, *others, attn_mask=None, **options):
        assert attn_mask is None or attn_mask.dtype in (torch.bool, query.dtype)
        cudnn_calls.append(torch.backends.cuda.cudnn_sdp_enabled())
        return kernel(query, *others, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    return cudnn_calls


def test_cudnn_gets_no_mask_or_step(cudnn, monkeypatch):
    """cuDNN is disabled for masks and single tokens, unless the user allows no other kernel, and
    restored afterwards.
    """
    x, one = (torch.randn(1, 2, n, 16).as_subclass(OnCuda) for n in (40, 1))
    attend = fused_attention(mha_torch)
    for query, options, is_on in (
        (x, {}, True),
        (x, {"is_causal": True}, True),
        (x, {"mask": torch.zeros(40, 40, dtype=torch.bool)}, False),
        (one, {}, False),
    ):
        attend(query, x, x, **options)
        assert cudnn.pop() == is_on
        assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(
        sdpa, "_NOT_CUDNN", dict.fromkeys(sdpa._NOT_CUDNN, lambda: False)
    )  # the user allows no other kernel
    attend(one, x, x)
    assert cudnn.pop()


@pytest.mark.usefixtures("cudnn")
def test_alibi_distances_stay_float32():
    """ALiBi with bfloat16 heads on CUDA matches the plain path within 2%."""
    spec, heads = AttentionSpec(16, 2, alibi=Alibi()), torch.randn(3, 1, 2, 40, 8).bfloat16()
    actual = fused_attention(mha_torch)(*heads.as_subclass(OnCuda), spec, is_causal=True)[0]
    expected = plain_attention(mha_torch)(*heads, spec, is_causal=True)[0]
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.as_subclass(torch.Tensor), expected, rtol=2e-2, atol=2e-2)
