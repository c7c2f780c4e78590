"""PyTorch's scaled_dot_product_attention with the cheapest form of the mask."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from threading import RLock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mha_spec import InputError, RelativeBias
from mha_torch.arrays import (
    at_least_float32,
    is_graph,
    is_transformed,
    values_at_hand,
    without_autocast,
)
from mha_torch.features.alibi import alibi_bias
from mha_torch.features.relative_bias import relative_position_bias
from mha_torch.heads import repeat_kv_heads
from mha_torch.masks import Mask
from mha_torch.scores import Scores

_KERNEL = F.scaled_dot_product_attention

_QUERIES_WITH_BIAS = 128
"""Queries per block if each score has a bias that is computed for the call: the bias of a block
stays small, and the kernel has enough queries for its own blocks.
"""

_SHORT_SEGMENT = 8
"""Tokens of a segment, on average, below which one call with a mask is faster than a call for each
segment. Measured.
"""

_FEW_QUERIES = 32
"""Maximum number of queries of a decoding step, for which cuDNN would plan each time."""

_NOT_CUDNN = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}
"""PyTorch's kernels except cuDNN's, and the functions that return whether the user allows them."""

_SWITCHES = RLock()
"""Guards the kernel switches, which are global to the process."""


def supports(scores: Scores) -> bool:
    """Return whether the kernel supports these changes to the scores."""
    return (
        scores.spec.soft_cap is None
        and scores.spec.relative_products is None
        and scores.dropout_keep is None
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> Tensor:
    """Return the context, with the cheapest form of the mask."""
    spec = scores.spec
    scale = spec.score_scale
    rate = scores.dropout
    sinks = scores.learned.get("sinks")
    has_bias = scores.bias is not None or spec.has_distance_bias
    if not has_bias and mask.has_only("is_causal", "key_padding_lengths"):
        if mask.key_padding_lengths is None:  # no mask, or one that the kernel supports
            return sdpa(
                query, key, value, sinks, is_causal=mask.is_causal, dropout=rate, scale=scale
            )
        lengths = known_lengths(query, mask)
        if lengths and all(lengths):  # no row is fully masked
            return _attend_by_sequence(query, key, value, lengths, scores, is_causal=mask.is_causal)
    is_packed = mask.segment_ids is not None and mask.has_only("is_causal", "segment_ids")
    if is_packed and not has_bias:
        segments = known_segments(query, mask)
        if segments is not None:
            return _attend_by_segment(query, key, value, segments, scores, is_causal=mask.is_causal)
    # Blocks of queries share a bias that depends on distances only, unlike the bias of a grid.
    # Without causality it is faster to compute a relative bias at once.
    in_blocks = spec.alibi_slopes is not None or (
        isinstance(spec.relative_bias, RelativeBias) and mask.is_causal
    )
    if in_blocks and query.shape[2] > _QUERIES_WITH_BIAS:
        return _attend_in_query_blocks(query, key, value, mask, scores)
    seq_len_k = key.shape[2]
    bias = scores.bias
    hidden = mask.with_bias(bias).to_bool(query.shape[2], seq_len_k, query.device)
    if spec.has_distance_bias:
        by_distance = _distance_bias(query, seq_len_k, mask.q_offset, scores)
        if bias is None:
            bias = by_distance
        else:
            bias = by_distance + bias
    masked_rows = None
    attn_mask = bias
    if hidden is not None:
        # Some kernels return NaN for a fully masked row, or for its gradient. Such rows attend to
        # all keys instead and are set to 0 afterwards.
        hidden = hidden.broadcast_to((*hidden.shape[:-1], seq_len_k))
        masked_rows = hidden.all(dim=-1, keepdim=True)
        hidden = hidden & ~masked_rows
        # SDPA has the opposite polarity: True = attend.
        if bias is None:
            attn_mask = ~hidden
        else:
            attn_mask = torch.where(hidden, -torch.inf, bias.where(~masked_rows, 0.0))
    context = sdpa(query, key, value, sinks, attn_mask=attn_mask, dropout=rate, scale=scale)
    if masked_rows is None:
        return context
    return context.masked_fill(masked_rows, 0.0)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float,
    scale: float,
) -> Tensor:
    """Call PyTorch's function; also with sinks, and with values whose width differs from the
    keys'.
    """
    dtype = query.dtype
    if sinks is not None:
        value_width = value.shape[-1]
        # A dummy query shifts causality by one, so that every query attends to the sink.
        num_before = int(is_causal)
        query, key, value, attn_mask = _with_sinks(
            query, key, value, sinks, attn_mask, scale, num_before=num_before
        )
        context = sdpa(
            query,
            key,
            value,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout=dropout,
            scale=scale,
        )
        return context[:, :, num_before:, :value_width]
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)].expand(-1, -1, -1, key.shape[2])
        if query.is_cuda:  # masked CUDA kernels need N key heads and a bias in the dtype of queries
            key, value = (repeat_kv_heads(x, query.shape[1]) for x in (key, value))
            if attn_mask.is_floating_point():
                query, key, value = (x.to(attn_mask.dtype) for x in (query, key, value))
    width = value.shape[3]
    # Most kernels need equal widths, as does the only fast one on a CPU.
    if query.shape[3] != width:
        widest = max(query.shape[3], width)
        query, key, value = (F.pad(x, (0, widest - x.shape[3])) for x in (query, key, value))
    # A statement: a comparison of symbolic numbers of heads is not a boolean of Python.
    is_grouped = False
    if query.shape[1] != key.shape[1]:
        is_grouped = True
    options: dict[str, Any] = {
        "attn_mask": attn_mask,
        # Top-left aligned, like ours. SDPA requires a boolean of Python, not NumPy.
        "is_causal": bool(is_causal),
        "dropout_p": dropout,
        "scale": scale,
        "enable_gqa": is_grouped,
    }
    if query.is_cuda:
        context = _call_on_cuda(query, key, value, options, is_cast=query.dtype != dtype)
    else:
        context = F.scaled_dot_product_attention(query, key, value, **options)
    if context.shape[3] != width:
        context = context[..., :width]
    if context.dtype != dtype:
        context = context.to(dtype)
    return context


def _call_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], *, is_cast: bool
) -> Tensor:
    """Call PyTorch's function without kernels that are wrong or slow for the call; without autocast
    if inputs were cast to the dtype of a bias, which it would undo.
    """
    with (
        _kernels_for(query, options["attn_mask"]),
        without_autocast("cuda") if is_cast else nullcontext(),
    ):
        return F.scaled_dot_product_attention(query, key, value, **options)


def _kernels_for(query: Tensor, attn_mask: Tensor | None) -> AbstractContextManager[Any]:
    """Return a context without cuDNN, if the call on CUDA is one that cuDNN gets wrong or plans too
    long.

    With a mask cuDNN is wrong: at logits of 1e5 it masks nothing, it reads float32 biases in the
    dtype of queries, and gradients may be NaN (pytorch/pytorch 191612, 196678). It plans for 60 ms
    for each new number of keys, that is, in each decoding step. Compiled graphs cannot query which
    kernels the user allows, and allow all.
    """
    if attn_mask is None and query.shape[2] > _FEW_QUERIES:
        return nullcontext()
    if torch.compiler.is_compiling():
        return sdpa_kernel([*_NOT_CUDNN])
    return _without_cudnn()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    with _SWITCHES:
        allowed = [kernel for kernel, is_allowed in _NOT_CUDNN.items() if is_allowed()]
        with sdpa_kernel(allowed) if allowed else nullcontext():
            yield


def _with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    attn_mask: Tensor | None,
    scale: float,
    *,
    num_before: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k and v with sinks as a first key of value 0, and `num_before` dummy queries for
    causality.

    The key is 0 except for two extra features, in which each query has the sink of its head, split
    in two for half precision.
    """
    products = at_least_float32(sinks) / scale  # dot products whose scores are the sinks
    rounded = products.to(query.dtype)
    parts = torch.stack([rounded, (products - rounded).to(query.dtype)], dim=-1)  # (N, 2)
    parts = parts[:, None].expand(*query.shape[:3], 2)
    query = F.pad(torch.cat([query, parts], dim=-1), (0, 0, num_before, 0))
    first = F.pad(key.new_zeros(*key.shape[:2], 1, key.shape[3]), (0, 2), value=1.0)
    key = torch.cat([first, F.pad(key, (0, 2))], dim=2)
    # Two features more, so that values stay as wide as keys, which most kernels need.
    value = F.pad(value, (0, 2, 1, 0))
    if attn_mask is None:
        return query, key, value, None
    attn_mask = attn_mask.broadcast_to(
        torch.broadcast_shapes(attn_mask.shape, (1, key.shape[2] - 1))
    )
    # Every query attends to the sink: True in a boolean mask, 0 in one that is added.
    is_boolean = attn_mask.dtype == torch.bool
    return query, key, value, F.pad(attn_mask, (1, 0), value=is_boolean)


def _distance_bias(
    query: Tensor, seq_len_k: int, q_offset: Tensor | None, scores: Scores
) -> Tensor:
    """Return ALiBi or the relative bias for queries (B, N, T, H), in at least float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    seq_lens = (query.shape[2], seq_len_k)
    if scores.spec.relative_bias is not None:
        table = scores.learned["relative_bias"]
        return relative_position_bias(
            table, scores.spec.relative_bias, *seq_lens, q_offset, scores_dtype=dtype
        )
    slopes = scores.spec.alibi_slopes or ()
    return alibi_bias(slopes, *seq_lens, q_offset, scores_dtype=dtype, device=query.device)


def _attend_in_query_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores
) -> Tensor:
    """Attend a block of queries at a time over the keys up to its last query, with only its bias in
    memory.
    """
    seq_len_q = query.shape[2]
    seq_len_k = key.shape[2]
    size = _QUERIES_WITH_BIAS
    options: Any = {"dropout": scores.dropout, "scale": scores.spec.score_scale}
    contexts = []
    shared = None
    last_begin = (seq_len_q - 1) // size * size
    # A bias depends on distances only: the last block of queries has the most keys before it, and
    # its bias, shifted, contains the bias of each other block.
    if mask.has_only("is_causal") and scores.bias is None:
        if mask.is_causal:
            stop = last_begin + size
        else:
            stop = last_begin + seq_len_k
        q_offset = torch.full((1,), last_begin, device=query.device)
        shared = _distance_bias(query[:, :, :size], stop, q_offset, scores)
        if mask.is_causal:
            hidden = replace(mask, q_offset=q_offset).implicit_bool(size, stop, query.device)
            shared = shared.masked_fill_(hidden, -torch.inf)
    for begin in range(0, seq_len_q, size):
        end = min(begin + size, seq_len_q)
        if mask.is_causal and mask.q_offset is None:
            stop = min(end, seq_len_k)
        else:
            stop = seq_len_k
        parts = (query[:, :, begin:end], key[:, :, :stop], value[:, :, :stop])
        if shared is not None:
            attn_mask = shared[:, :, : end - begin, last_begin - begin : last_begin - begin + stop]
            contexts.append(
                sdpa(*parts, scores.learned.get("sinks"), attn_mask=attn_mask, **options)
            )
            continue
        rows = slice(begin, end)
        keys = slice(0, stop)
        contexts.append(attend(*parts, mask.block(rows, keys), scores.block(rows, keys)))
    return concat(contexts, along_tokens=True)


def _attend_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scores: Scores,
    *,
    is_causal: bool,
) -> Tensor:
    """Attend each sequence over its real keys only, without a mask and without work for padding."""
    sinks = scores.learned.get("sinks")
    options: Any = {"dropout": scores.dropout, "scale": scores.spec.score_scale}
    contexts = [
        sdpa(
            q[None],
            k[None, :, :length],
            v[None, :, :length],
            sinks,
            is_causal=is_causal,
            **options,
        )
        for q, k, v, length in zip(
            query.unbind(), key.unbind(), value.unbind(), lengths, strict=True
        )
    ]
    return concat(contexts)


def _attend_by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: list[list[int]],
    scores: Scores,
    *,
    is_causal: bool,
) -> Tensor:
    """Attend each segment of each row over itself only, without a mask."""
    sinks = scores.learned.get("sinks")
    options: Any = {"dropout": scores.dropout, "scale": scores.spec.score_scale}
    contexts = []
    for q, k, v, lengths in zip(query, key, value, segments, strict=True):
        # Split, because the gradient of each slice would be as large as the row.
        queries, keys, values = (x[None].split(lengths, dim=2) for x in (q, k, v))
        of_row = [
            sdpa(q_part, k_part, v_part, sinks, is_causal=is_causal, **options)
            for q_part, k_part, v_part in zip(queries, keys, values, strict=True)
        ]
        contexts.append(concat(of_row, along_tokens=True))
    return concat(contexts)


def known_segments(query: Tensor, mask: Mask) -> list[list[int]] | None:
    """Return the lengths of the segments of each row, in order, on a CPU; None if the values of
    ids are unavailable, if operations are intercepted, if queries and keys have ids of their own,
    if a segment is in pieces, which attend to each other, or if segments are short.
    """
    ids = mask.segment_ids
    if ids is None or isinstance(ids, tuple) or not query.is_cpu:
        return None
    # A tool that observes operations, as `parity.identify` does, finds the segments in a mask.
    if is_graph() or is_transformed():
        return None
    rows = values_at_hand(ids)
    if rows is None or not ids.numel():
        return None
    lengths_of_rows = []
    for row in rows:
        pieces = [(segment, len(list(tokens))) for segment, tokens in groupby(row)]
        if len({segment for segment, _ in pieces}) < len(pieces):
            return None
        lengths_of_rows.append([length for _, length in pieces])
    if sum(map(len, lengths_of_rows)) * _SHORT_SEGMENT > ids.numel():
        return None
    return lengths_of_rows


def known_lengths(query: Tensor, mask: Mask) -> list[int] | None:
    """Return the lengths of sequences on a CPU; None if there are none or their values are
    unavailable.
    """
    lengths = mask.key_padding_lengths
    if lengths is None or not query.is_cpu:
        return None
    if isinstance(lengths, (list, tuple)):
        return list(lengths)
    return values_at_hand(torch.as_tensor(lengths))


def concat(contexts: Sequence[Tensor], *, along_tokens: bool = False) -> Tensor:
    """Concatenate contexts (B, N, T, Hv) along B, or along T; in memory heads are inside tokens, as
    in SDPA.
    """
    if len(contexts) == 1:
        return contexts[0]
    return torch.cat([x.transpose(1, 2) for x in contexts], dim=int(along_tokens)).transpose(1, 2)


# ---- Validation ----------------------------------------------------------------------------------


def check_context_parallel(
    mask: Mask, scores: Scores, positions: Tensor | None, *, need_weights: bool
) -> None:
    """Reject arguments that torch's `context_parallel`, if on, would read as arguments of local
    tokens.
    """
    kernel = F.scaled_dot_product_attention  # which `context_parallel` replaces
    if kernel is _KERNEL or "_context_parallel" not in getattr(kernel, "__module__", ""):
        return
    if positions is None and scores.spec.has_positions:
        rule = "be a buffer of context_parallel: a process has a part of the tokens"
        raise InputError("positions", rule, positions=None)
    named = {
        "need_weights": need_weights or None,
        "mask": mask.mask,
        "bias": scores.bias,
        **{name: getattr(mask, name) for name in mask.fields_beyond("mask", "is_causal", "span")},
        "a window or chunks": mask.span,
        "sinks": scores.learned.get("sinks"),
        "alibi": scores.spec.alibi_slopes,
        "relative_bias": scores.spec.relative_bias,
        "relative_products": scores.spec.relative_products,
        "soft_cap": scores.spec.soft_cap,
    }
    unsupported = [name for name, value in named.items() if value is not None]
    if unsupported:
        raise InputError(
            unsupported[0],
            "be None under context_parallel, whose ring knows causality only",
            hint="mha_torch.parallel.shard(layer, mesh, tokens=…) takes lengths, windows, "
            "chunks, sinks and relative biases",
        )
