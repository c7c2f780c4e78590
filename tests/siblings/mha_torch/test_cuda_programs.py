"""Programs of mha_torch for CUDA, inspected without a device: the operations of a call on tensors
without values.

Kernels are replaced by functions that note their arguments. Everything around them runs on the meta
device, where no value can be read: a program that tries ends in an error. The one function that
reads values is noted instead.
"""

import math
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.heads import fused_attention
from helpers.samples import sample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mha_torch
from mha_spec import Alibi, AttentionSpec, Rope
from mha_torch.kernels import flex

SMALL, LARGE = (
    512,
    4096,
)  # tokens: below and above the number of scores from which FlexAttention is used
BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 8, 2, 64


class OnCuda(Tensor):
    """Tensor that claims to be on CUDA."""

    is_cuda = True


class Program(TorchDispatchMode):
    """Counts of tensors a program makes: with at least T x S elements in the last two axes, and in
    float64.
    """

    def __init__(self, num_scores):
        super().__init__()
        self.num_scores, self.totals = num_scores, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        if not any(
            output.alias_info is not None for output in function._schema.returns
        ):  # views make no tensors
            for x in torch.utils._pytree.tree_leaves(outputs):
                if isinstance(x, Tensor):
                    self.totals["square"] += (
                        x.ndim >= 2 and math.prod(x.shape[-2:]) >= self.num_scores
                    )
                    self.totals["float64"] += x.dtype == torch.float64
        return outputs


def kernel_of(counts, name):
    """Return a kernel that notes its call, with a context that depends on all heads."""

    def kernel(query, key, value, *others, attn_mask=None, **keywords):
        counts[name] += 1
        counts["mask"] += attn_mask is not None
        context = query.new_empty(*query.shape[:3], value.shape[3]) + (
            query.sum() + key.sum() + value.sum()
        )
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        return context if name == "SDPA" else (context, SimpleNamespace(lse=lse))

    return kernel


def modules_with(name):
    return [
        module
        for path, module in [*sys.modules.items()]
        if path.startswith("mha_torch.") and hasattr(module, name)
    ]


@pytest.fixture
def count(monkeypatch):
    """Return a function that runs a program as on CUDA and returns the counts that are not 0.

    With `is_graph` it runs as in a captured CUDA graph, with `is_compiled` as under torch.compile.
    """

    def run(program, num_scores, *, is_graph=False, is_compiled=False):
        totals, no_values = Counter(), is_graph or is_compiled

        def values_of(x):
            if no_values:
                return None
            totals["sync"] += 1
            return torch.ones(x.shape).tolist()

        replaced = {
            "values_of": values_of,
            "is_transformed": lambda: False,
            "is_graph": lambda: no_values,
        }
        with monkeypatch.context() as patch:
            for name, function in replaced.items():
                for module in modules_with(name):
                    patch.setattr(module, name, function)
            patch.setattr(
                torch.compiler, "_is_compiling_flag", is_compiled
            )  # Dynamo replaces the function itself
            patch.setattr(F, "scaled_dot_product_attention", kernel_of(totals, "SDPA"))
            patch.setattr(flex, "is_on_device", lambda x: x.is_meta)
            patch.setattr(flex, "_CAN_COMPILE", True)
            patch.setattr(flex, "_kernel", lambda: kernel_of(totals, "FlexAttention"))
            patch.setattr(flex, "Tensor", OnCuda)
            with Program(num_scores) as counts:
                program()
        return {name: number for name, number in (totals + counts.totals).items() if number}

    return run


def on_cuda(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, device="meta", dtype=dtype).as_subclass(OnCuda)


def attention(seq_len, spec, arrays=(), *, backward=False, **keywords):
    """Return a call of attention as a function without arguments."""
    layer = AttentionSpec(NUM_HEADS * HEAD_DIM, NUM_HEADS, num_kv_heads=NUM_KV_HEADS, **spec)
    heads = [on_cuda(BATCH, n, seq_len, HEAD_DIM) for n in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    heads = [x.requires_grad_(backward) for x in heads]
    made = {
        "key_padding_lengths": lambda: on_cuda(BATCH, dtype=torch.int64),
        "segment_ids": lambda: on_cuda(BATCH, seq_len, dtype=torch.int64),
        "mask": lambda: on_cuda(seq_len, seq_len, dtype=torch.bool),
        "bias": lambda: on_cuda(NUM_HEADS, seq_len, seq_len),
        "sinks": lambda: on_cuda(NUM_HEADS),
    }
    keywords |= {name: made[name]() for name in arrays}

    def call():
        context, _ = fused_attention(mha_torch)(*heads, layer, **keywords)
        if backward:
            torch.autograd.grad(context.sum(), heads)

    return call


CAUSAL = {"is_causal": True}
WINDOW, CHUNK = {"window_size": 512}, {"chunk_size": 512}

# Neither masks nor scores: spec, names of arrays, keywords; kernel.
WITHOUT_MASK = {
    "full": (({}, (), {}), "SDPA"),
    "causal": (({}, (), CAUSAL), "SDPA"),
    "lengths": (({}, ("key_padding_lengths",), {}), "FlexAttention"),
    "causal-lengths": (({}, ("key_padding_lengths",), CAUSAL), "FlexAttention"),
    "segments": (({}, ("segment_ids",), CAUSAL), "FlexAttention"),
    "window": ((WINDOW, (), CAUSAL), "FlexAttention"),
    "window-both-ways": ((WINDOW, (), {}), "FlexAttention"),
    "window-lengths": ((WINDOW, ("key_padding_lengths",), CAUSAL), "FlexAttention"),
    "chunk": ((CHUNK, (), CAUSAL), "FlexAttention"),
    "alibi": (({"alibi": Alibi()}, (), CAUSAL), "FlexAttention"),
    "soft-cap": (({"soft_cap": 5.0}, (), CAUSAL), "FlexAttention"),
    "sinks": (({"sinks": True}, ("sinks",), CAUSAL), "FlexAttention"),
}


@sample(12)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", WITHOUT_MASK)
def test_large_calls_store_no_mask_or_scores(count, name, is_graph, backward):
    """Calls over 4096 tokens run one kernel without masks, scores or float64, and read no
    value, not even lengths.
    """
    (spec, arrays, keywords), kernel = WITHOUT_MASK[name]
    counts = count(
        attention(LARGE, spec, arrays, backward=backward, **keywords), LARGE**2, is_graph=is_graph
    )
    assert counts == {kernel: 1}


@pytest.mark.parametrize("name", ["full", "causal", "sinks"])
def test_small_calls_without_mask_use_sdpa(count, name):
    """Small full and causal calls, and calls with sinks, run one SDPA kernel without a mask."""
    (spec, arrays, keywords), _ = WITHOUT_MASK[name]
    assert count(attention(SMALL, spec, arrays, **keywords), SMALL**2) == {"SDPA": 1}


# Calls that make masks or scores, with the reason and all counts; `square` is the number of tensors
# of T x S.
SMALLER = "the dispatch of FlexAttention takes longer than a mask of few scores"
COMPILED = "PyTorch computes FlexAttention wrong in a graph that also makes its blocks"
WITH_MASK = {
    "lengths": (
        SMALLER,
        SMALL,
        ({}, ("key_padding_lengths",), {}),
        {},
        {"SDPA": 1, "mask": 1, "square": 3},
    ),
    "window": (SMALLER, SMALL, (WINDOW, (), CAUSAL), {}, {"SDPA": 1, "mask": 1, "square": 4}),
    "segments": (
        SMALLER,
        SMALL,
        ({}, ("segment_ids",), CAUSAL),
        {},
        {"SDPA": 1, "mask": 1, "square": 5},
    ),
    "alibi": (
        SMALLER,
        SMALL,
        ({"alibi": Alibi()}, (), CAUSAL),
        {},
        {"SDPA": 4, "mask": 4},
    ),  # by 128 queries
    "soft-cap": (
        SMALLER + "; it uses the plain path",
        SMALL,
        ({"soft_cap": 5.0}, (), CAUSAL),
        {},
        {"square": 10},
    ),
    "mask": (
        "it is an argument, True = masked, and SDPA has the opposite",
        LARGE,
        ({}, ("mask",), {}),
        {},
        {"SDPA": 1, "mask": 1, "square": 2},
    ),
    "bias": (
        "it is an argument that may hide rows",
        LARGE,
        ({}, ("bias",), {}),
        {},
        {"SDPA": 1, "mask": 1, "square": 4},
    ),
    "window-dropout": (
        "FlexAttention has no dropout; blocks have masks of their own",
        LARGE,
        (WINDOW, (), {"dropout": 0.1, **CAUSAL}),
        {},
        {"SDPA": 10, "mask": 10},
    ),
    "compiled-lengths": (
        COMPILED,
        LARGE,
        ({}, ("key_padding_lengths",), {}),
        {"is_compiled": True},
        {"SDPA": 1, "mask": 1, "square": 3},
    ),
    "compiled-window": (
        COMPILED,
        LARGE,
        (WINDOW, (), CAUSAL),
        {"is_compiled": True},
        {"SDPA": 10, "mask": 10},
    ),
    "compiled-soft-cap": (
        COMPILED + "; it uses the plain path",
        LARGE,
        ({"soft_cap": 5.0}, (), CAUSAL),
        {"is_compiled": True},
        {"square": 10},
    ),
}


@pytest.mark.parametrize("name", WITH_MASK)
def test_calls_with_masks_match_the_list(count, name):
    """Calls that make masks or scores are exactly those listed, with the listed counts."""
    reason, seq_len, (spec, arrays, keywords), mode, expected = WITH_MASK[name]
    assert count(attention(seq_len, spec, arrays, **keywords), seq_len**2, **mode) == expected, (
        reason
    )


# ---- Layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("span", [{}, WINDOW], ids=["causal", "window"])
def test_layer_stores_no_mask(count, span, is_graph):
    """A causal layer, with or without a window, runs one kernel without a mask and reads no
    value.
    """
    layer = mha_torch.MultiHeadSelfAttention(
        NUM_HEADS * HEAD_DIM, NUM_HEADS, rope=Rope(), device="meta", dtype=torch.bfloat16, **span
    )
    x = on_cuda(BATCH, LARGE, NUM_HEADS * HEAD_DIM)
    with torch.no_grad():
        counts = count(lambda: layer(x, is_causal=True), LARGE**2, is_graph=is_graph)
    assert counts == {"FlexAttention" if span else "SDPA": 1}


# ---- Controls of the counts ----------------------------------------------------------------------


def test_masks_scores_float64_are_counted(count):
    """Control: products, masks and float64 are counted, and views are not."""
    x = on_cuda(SMALL, HEAD_DIM)
    assert count(lambda: x @ x.mT, SMALL**2) == {"square": 1}
    assert count(
        lambda: torch.ones(SMALL, SMALL, dtype=torch.bool, device="meta").tril(), SMALL**2
    ) == {"square": 2}
    assert count(lambda: (x @ x.mT).mT[None], SMALL**2) == {"square": 1}  # views are not counted
    assert count(lambda: x.double(), SMALL**2) == {"float64": 1}
    assert count(lambda: x.sum(0), SMALL**2) == {}


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.nonzero, lambda x: x[x > 0]])
def test_reading_values_raises(count, read):
    """Control: a program that reads values raises an error."""
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        count(lambda: read(on_cuda(3).sum()), SMALL**2)


def test_mask_of_kernel_is_counted(count):
    """Control: a mask given to SDPA is counted."""
    x, mask = on_cuda(1, 2, SMALL, HEAD_DIM), on_cuda(SMALL, SMALL, dtype=torch.bool)
    assert count(lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask), SMALL**2) == {
        "SDPA": 1,
        "mask": 1,
    }
