"""FlexAttention: on CUDA, for large calls that scaled_dot_product_attention cannot express without
a mask.

A soft cap and ALiBi are compiled into the kernel. Masks become the first key of each query and the
one after its last, so that no mask or bias is stored and fully masked blocks are skipped. Sinks
need only the log-sum-exp, which the kernel returns. Segments are compared in the kernel.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import flex_attention as library

from mha_torch.arrays import at_least_float32, constant, is_transformed, needs_gradient, zero_where
from mha_torch.masks import Mask
from mha_torch.scores import Scores

# Missing in older PyTorch.
_CAN_COMPILE = find_spec("triton") is not None and hasattr(library, "AuxRequest")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDTHS = range(16, 257)
_BLOCK_SIZE = 128
"""Number of queries, and of keys, that are computed or skipped together."""

MANY_SCORES = 2**25
"""Number of scores (B·N·T·S) from which it is faster than other kernels; below, its dispatch
dominates.
"""


def is_on_device(x: Tensor) -> bool:
    """Return whether x is on a device for which it is compiled into one kernel; elsewhere it is
    slow.
    """
    return x.is_cuda


def supports(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> bool:
    """Return whether to use FlexAttention on its device: the call is large, and another kernel
    would need a mask or a bias.
    """
    # A graph that also builds the blocks is wrong: PyTorch 2.11 on an H200.
    if torch.compiler.is_compiling():
        return False
    if not _runs_here(query, value) or query.shape[:3].numel() * key.shape[2] < MANY_SCORES:
        return False
    spec = scores.spec
    changes = (scores.learned.get("sinks"), spec.soft_cap, spec.alibi_slopes)
    is_needed = not mask.has_only("is_causal") or any(x is not None for x in changes)
    is_needed = is_needed and mask.has_only(
        "is_causal", "key_padding_lengths", "span", "segment_ids"
    )
    others = (scores.bias, spec.relative_bias, spec.relative_products, scores.dropout_keep)
    return is_needed and not scores.dropout and all(x is None for x in others)


def _runs_here(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernel supports these heads and this kind of call."""
    if not (_CAN_COMPILE and type(query) is Tensor and query.numel() and value.numel()):
        return False
    if is_transformed():  # it has no batching rules for vmap
        return False
    return query.dtype in _DTYPES and query.shape[3] in _WIDTHS and value.shape[3] in _WIDTHS


def attend(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    mask: Mask,
    scores: Scores,
) -> Float[Tensor, "B N T Hv"]:
    """Return the context of a call that this module `supports`.

    Source: FlexAttention, arXiv:2412.05496; torch.nn.attention.flex_attention.
    """
    first, stop = _key_ranges(mask, query.shape[0], query.shape[2], key.shape[2], query.device)
    context, lse = _attend_between(query, key, value, first, stop, mask.segments, scores)
    return zero_where(context, torch.isneginf(lse))  # fully masked rows


def _attend_between(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Int[Tensor, "B T"],
    stop: Int[Tensor, "B T"],
    segments: tuple[Tensor, Tensor] | None,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Return the context over a range of keys for each query, and the log-sum-exp."""
    context, aux = _kernel()(
        query,
        key,
        value,
        _score_mod(query, scores),
        _block_mask(
            first, stop, key.shape[2], segments, has_gradient=needs_gradient(query, key, value)
        ),
        scale=scores.spec.score_scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=library.AuxRequest(lse=True),
    )
    lse = aux.lse[..., None]
    sinks = scores.learned.get("sinks")
    if sinks is not None:
        # The share of the keys in the weights, next to the sink.
        share = torch.sigmoid(lse - at_least_float32(sinks)[:, None, None])
        context = (context * share).to(context.dtype)
    return context, lse


@cache
def _kernel() -> Callable[..., Any]:
    return torch.compile(library.flex_attention)


def _score_mod(query: Tensor, scores: Scores) -> Callable[..., Tensor] | None:
    """Return the function that changes scaled scores by head, query and key; None to leave scores
    unchanged.
    """
    soft_cap = scores.spec.soft_cap
    slopes = None
    if soft_cap is None and scores.spec.alibi_slopes is None:
        return None
    if scores.spec.alibi_slopes is not None:
        slopes = constant(np.array(scores.spec.alibi_slopes), query, at_least_float32(query).dtype)

    def score_mod(
        score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor
    ) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if slopes is None:
            return score
        return score - slopes[head] * (row - column).abs()

    return score_mod


# ---- Masks ---------------------------------------------------------------------------------------


def _key_ranges(
    mask: Mask, batch_size: int, seq_len_q: int, seq_len_k: int, device: torch.device
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return the first key of each query and the one after its last; they are equal in a fully
    masked row.
    """
    first, stop = mask.key_range(seq_len_q, seq_len_k, device)
    first, stop = (
        x.to(torch.int32).clamp(0, seq_len_k).expand(batch_size, -1) for x in (first, stop)
    )
    return torch.minimum(first, stop), stop


def _block_mask(
    first: Int[Tensor, "B T"],
    stop: Int[Tensor, "B T"],
    seq_len_k: int,
    segments: tuple[Tensor, Tensor] | None = None,
    *,
    has_gradient: bool,
) -> Any:
    """Return FlexAttention's mask: full and partial blocks of keys for each block of queries, and
    the mask function.
    """

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        is_visible = (column >= first[batch, row]) & (column < stop[batch, row])
        if segments is None:
            return is_visible
        return is_visible & (segments[0][batch, row] == segments[1][batch, column])

    partial, full = _visible_blocks(first, stop, seq_len_k, segments)
    return library.BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=_BLOCK_SIZE,
        mask_mod=mask_mod,
        compute_q_blocks=has_gradient,
        seq_lengths=(first.shape[1], seq_len_k),
    )


def _visible_blocks(
    first: Int[Tensor, "B T"],
    stop: Int[Tensor, "B T"],
    seq_len_k: int,
    segments: tuple[Tensor, Tensor] | None = None,
) -> tuple[Bool[Tensor, "B 1 Tb Sb"], Bool[Tensor, "B 1 Tb Sb"]]:
    """Return the partial and the full blocks of keys of each block of queries; incomplete blocks
    count as partial.
    """
    is_empty = first == stop
    padding = (0, -first.shape[1] % _BLOCK_SIZE)
    # Fully masked and missing rows get the empty range: all keys before the first, or after the
    # last.
    first = F.pad(first.masked_fill(is_empty, seq_len_k), padding, value=seq_len_k).unflatten(
        1, (-1, _BLOCK_SIZE)
    )
    stop = F.pad(stop.masked_fill(is_empty, 0), padding).unflatten(1, (-1, _BLOCK_SIZE))
    begins = torch.arange(0, seq_len_k, _BLOCK_SIZE, device=first.device)
    ends = begins + _BLOCK_SIZE
    is_visible = (first.amin(2)[..., None] < ends) & (stop.amax(2)[..., None] > begins)
    is_full = (first.amax(2)[..., None] <= begins) & (stop.amin(2)[..., None] >= ends)
    if segments is not None:
        (least, largest), (least_key, largest_key) = (_id_ranges(ids) for ids in segments)
        is_visible = (
            is_visible
            & (least[..., None] <= largest_key[:, None])
            & (largest[..., None] >= least_key[:, None])
        )
        # Full only if both blocks have one and the same segment.
        is_full = (
            is_full
            & (least[..., None] == largest_key[:, None])
            & (largest[..., None] == least_key[:, None])
        )
    return (is_visible & ~is_full)[:, None], is_full[:, None]


def _id_ranges(ids: Int[Tensor, "B L"]) -> tuple[Int[Tensor, "B blocks"], Int[Tensor, "B blocks"]]:
    """Return the smallest and the largest segment id of each block."""
    # The last id again fills the last block.
    filling = ids[:, -1:].expand(-1, -ids.shape[1] % _BLOCK_SIZE)
    blocks = torch.cat([ids, filling], dim=1).unflatten(1, (-1, _BLOCK_SIZE))
    return blocks.amin(2), blocks.amax(2)


def _listed(
    blocks: Bool[Tensor, "B 1 Tb Sb"],
) -> tuple[Int[Tensor, "B 1 Tb"], Int[Tensor, "B 1 Tb Sb"]]:
    """Return the number of set flags, and the indices with the set ones first."""
    order = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)
