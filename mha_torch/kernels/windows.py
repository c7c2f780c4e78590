"""Windows and chunks, a block of queries at a time over the keys of its span: work linear in the
length.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mha_spec.span import Span
from mha_torch.arrays import needs_gradient
from mha_torch.kernels import sdpa
from mha_torch.kernels.flex import MANY_SCORES
from mha_torch.masks import Mask
from mha_torch.scores import Scores


def supports(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> bool:
    """Return whether there is more than one block of queries; for small calls a GPU is faster with
    a mask.
    """
    if query.is_cuda and query.shape[:3].numel() * key.shape[2] < MANY_SCORES:
        return False
    if mask.span is None or mask.q_offset is not None or not query.shape[0]:
        return False
    return query.shape[2] > _block_size(mask.span, key, value)


def _block_size(span: Span, key: Tensor, value: Tensor) -> int:
    """Return the number of queries in a block: a chunk, or few enough that their windows mostly
    overlap.
    """
    if span.chunk_size is not None:
        return span.chunk_size
    # Measured: smaller blocks read fewer keys outside their windows, in more calls of the kernel.
    # With gradients of slices each call costs more.
    size = max(64, (span.window_size or 0) // 8)
    if needs_gradient(key, value):
        return 2 * size
    return size


def _slicer(x: Tensor, size: int) -> Callable[[slice], Tensor]:
    """Return a function that slices x along its third axis, from multiples of `size`.

    The gradient of a slice is as large as x. If x requires one, slices are concatenated from pieces
    that are split once.
    """
    if not needs_gradient(x):
        return lambda among: x[:, :, among]
    pieces = x.split(size, dim=2)

    def joined(among: slice) -> Tensor:
        parts = pieces[among.start // size : -(-among.stop // size)]
        return torch.cat(parts, dim=2)[:, :, : among.stop - among.start]

    return joined


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> Tensor:
    """Return the context of a call that this module `supports`."""
    is_plain = mask.has_only("is_causal", "key_padding_lengths", "span") and scores.bias is None
    if is_plain and not scores.spec.has_distance_bias:
        lengths = sdpa.known_lengths(query, mask)
    else:
        lengths = None
    if not lengths:
        return _attend_in_blocks(query, key, value, mask, scores)
    mask = replace(mask, key_padding_lengths=None)
    sequences = zip(query, key, value, lengths, strict=True)
    return sdpa.concat(
        [
            _attend_in_blocks(q[None], k[None, :, :stop], v[None, :, :stop], mask, scores)
            for q, k, v, stop in sequences
        ]
    )


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores
) -> Tensor:
    span: Any = mask.span
    seq_len_q = query.shape[2]
    seq_len_k = key.shape[2]
    is_causal = mask.is_causal
    size = _block_size(span, key, value)
    sinks = scores.learned.get("sinks")
    options: Any = {"dropout": scores.dropout, "scale": scores.spec.score_scale}
    # Keys around a block.
    before = -(span.first(0) // size * size)
    if is_causal:
        after = 0
    else:
        after = span.stop(0) - 1
    keys_in = _slicer(key, size)
    values_in = _slicer(value, size)
    contexts = []
    nothing = value.new_zeros(value.shape[3])
    bias = None
    interior = range(0)
    is_window = span.chunk_size is None and mask.has_only("is_causal", "span")
    if is_window and scores.bias is None and not scores.spec.has_distance_bias:
        # Blocks have the same mask, apart from both ends of the keys. It is fastest as a bias.
        bias = _window_bias(
            query, mask, slice(before, before + size), slice(0, before + size + after)
        )
        if sinks is None and query.shape[3] == value.shape[3] and not needs_gradient(key, value):
            interior = range(before, min(seq_len_q, seq_len_k - after) - size + 1, size)
    for begin in range(0, seq_len_q, size):
        if bias is not None and begin in interior:
            if begin == before:
                sequences = zip(query, key, value, strict=True)
                parts = [
                    _attend_interior(*each, bias, interior, before, **options)[None]
                    for each in sequences
                ]
                contexts.append(sdpa.concat(parts))
            continue
        end = min(begin + size, seq_len_q)
        first = min(max(span.first(begin), 0) // size * size, seq_len_k)
        if is_causal:
            stop = end
        else:
            stop = span.stop(end - 1)
        stop = max(first, min(stop, seq_len_k))
        rows = slice(begin, end)
        keys = slice(first, stop)
        if stop == first:
            contexts.append(query[:, :, rows, :1] * nothing)
            continue
        parts = (query[:, :, rows], keys_in(keys), values_in(keys))
        if bias is not None and span.first(end - 1) < seq_len_k:  # no row is fully masked
            attn_mask = bias[: end - begin, before - begin + first : before - begin + stop]
            contexts.append(sdpa.sdpa(*parts, sinks, attn_mask=attn_mask, **options))
            continue
        inside = mask.block(rows, keys)
        if span.chunk_size is not None:  # a query attends to its chunk, up to itself if causal
            inside = replace(inside, span=None, q_offset=None)
        contexts.append(sdpa.attend(*parts, inside, scores.block(rows, keys)))
    return sdpa.concat(contexts, along_tokens=True)


def _window_bias(query: Tensor, mask: Mask, rows: slice, keys: slice) -> Tensor:
    """Return a bias (T, S): -inf for keys outside the window of a query, else 0."""
    sizes = (rows.stop - rows.start, keys.stop - keys.start)
    hidden = mask.block(rows, keys).implicit_bool(*sizes, query.device)[0, 0]
    return query.new_zeros(sizes).masked_fill_(hidden, -torch.inf)


def _attend_interior(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    begins: range,
    before: int,
    **options: Any,
) -> Tensor:
    """Attend blocks of a sequence, whose windows lie within the keys, as one batch; keys are
    overlapping views.
    """
    size = begins.step
    num_kv_heads = key.shape[0]
    num_keys = bias.shape[1]
    first = begins[0]
    last = begins[-1]
    # Queries of a group are concatenated, because the kernel would copy the keys for each: (blocks,
    # K, G size, H).
    rows = query[:, first : last + size].unflatten(0, (num_kv_heads, -1)).unflatten(2, (-1, size))
    rows = rows.permute(2, 0, 1, 3, 4).flatten(2, 3)
    within = slice(first - before, last - before + num_keys)
    keys, values = (
        x[:, within].unfold(1, num_keys, size).permute(1, 0, 3, 2) for x in (key, value)
    )
    context = sdpa.sdpa(
        rows, keys, values, attn_mask=bias.repeat(query.shape[0] // num_kv_heads, 1), **options
    )
    return context.unflatten(2, (-1, size)).permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1, 2)
