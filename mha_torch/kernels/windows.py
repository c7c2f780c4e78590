"""Windows and chunks, a block of queries at a time over the keys of its span: work linear in the length.

All functions expect finite inputs: `nonfinite.contained` wraps them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mha_spec.span import Span
from mha_torch.arrays import needs_gradient
from mha_torch.kernels import sdpa
from mha_torch.kernels.flex import MANY_SCORES
from mha_torch.masks import Mask
from mha_torch.scores import Scores


def supports(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> bool:
    """Return whether there is more than one block of queries; for small calls a GPU is faster with a mask."""
    if query.is_cuda and query.shape[:3].numel() * key.shape[2] < MANY_SCORES:
        return False
    return mask.span is not None and mask.q_offset is None and query.shape[2] > _block_size(mask.span, key, value)


def _block_size(span: Span, key: Tensor, value: Tensor) -> int:
    """Return the number of queries in a block: a chunk, or few enough that their windows mostly overlap."""
    if span.chunk_size is not None:
        return span.chunk_size
    return max(64, (span.window_size or 0) // 8) * (2 if needs_gradient(key, value) else 1)  # measured


def _slicer(x: Tensor, size: int) -> Callable[[slice], Tensor]:
    """Return a function that slices x along its third axis, from multiples of `size`.

    The gradient of a slice is as large as x. If x requires one, slices are concatenated from pieces that are split
    once.
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
    span = mask.span or Span()
    seq_len_q, seq_len_k, is_causal = query.shape[2], key.shape[2], mask.is_causal
    size, how = _block_size(span, key, value), {"dropout": scores.dropout, "scale": scores.scale}
    keys_in, values_in = _slicer(key, size), _slicer(value, size)
    # With only a window no row is fully masked and most blocks have the same mask, which is fastest as a bias.
    is_alone = mask.has_only("is_causal", "span") and scores.bias is None
    is_alone = is_alone and span.chunk_size is None and not scores.has_distances and seq_len_q <= seq_len_k
    added: dict[tuple[int, int, int], Tensor] = {}
    contexts, nothing, interior = [], value.new_zeros(value.shape[3]), range(0)
    if is_alone and scores.sinks is None and query.shape[3] == value.shape[3] and not needs_gradient(key, value):
        interior = _interior_blocks(span, is_causal, seq_len_q, seq_len_k, size)
    for begin in range(0, seq_len_q, size):
        if begin in interior:
            if begin == interior[0]:
                contexts.append(_attend_interior(query, key, value, mask, span, interior, scores))
            continue
        end = min(begin + size, seq_len_q)
        first = min(max(span.first(begin), 0) // size * size, seq_len_k)
        stop = max(first, min(end if is_causal else span.stop(end - 1), seq_len_k))
        rows, keys = slice(begin, end), slice(first, stop)
        if stop == first:
            contexts.append(query[:, :, rows, :1] * nothing)
            continue
        parts = (query[:, :, rows], keys_in(keys), values_in(keys))
        if is_alone:
            place = (begin - first, end - begin, stop - first)
            if place not in added:
                added[place] = _window_bias(query, mask, rows, keys)
            contexts.append(sdpa.call(*parts, scores.sinks, attn_mask=added[place], **how))
            continue
        inside = mask.block(rows, keys)
        if span.chunk_size is not None:  # a query attends to its chunk, up to itself if causal
            inside = replace(inside, span=None, q_offset=None)
        contexts.append(sdpa.attend(*parts, inside, scores.block(rows, keys)))
    return _concat_tokens(contexts)


def _concat_tokens(contexts: Sequence[Tensor]) -> Tensor:
    """Concatenate contexts (B, N, ·, Hv) along queries; in memory heads are inside tokens, as in SDPA."""
    return torch.cat([x.transpose(1, 2) for x in contexts], dim=1).transpose(1, 2)


def _window_bias(query: Tensor, mask: Mask, rows: slice, keys: slice) -> Tensor:
    """Return a bias (T, S): -inf for keys outside the window of a query, else 0."""
    sizes = (rows.stop - rows.start, keys.stop - keys.start)
    hidden = mask.block(rows, keys).implicit_bool(*sizes, query.device)[0, 0]
    return query.new_zeros(sizes).masked_fill_(hidden, -torch.inf)


def _interior_blocks(span: Span, is_causal: bool, seq_len_q: int, seq_len_k: int, size: int) -> range:
    """Return the starts of the blocks whose windows lie entirely within the sequence."""
    before, after = -span.first(0), 0 if is_causal else span.stop(0) - 1
    return range(-(-before // size) * size, min(seq_len_q, seq_len_k - after) - size + 1, size)


def _attend_interior(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, span: Span, begins: range, scores: Scores
) -> Tensor:
    """Attend the interior blocks as one batch; keys are overlapping strided views."""
    size, num_parts, num_kv_heads = begins.step, len(begins), key.shape[1]
    first, last = begins[0], begins[-1]
    start, stop = span.first(first) // size * size, last + size if mask.is_causal else span.stop(last + size - 1)
    num_keys = stop - start - last + first  # of a block
    added = _window_bias(query, mask, slice(first, first + size), slice(start, start + num_keys))
    # Queries of a group are concatenated, because the kernel would copy the keys for each: (B, blocks, K, G size, H).
    rows = query[:, :, first : last + size].unflatten(1, (num_kv_heads, -1)).unflatten(3, (num_parts, size))
    rows = rows.permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
    keys, values = (x[:, :, start:stop].unfold(2, num_keys, size).permute(0, 2, 1, 4, 3) for x in (key, value))
    added = added.repeat(query.shape[1] // num_kv_heads, 1)
    contexts = [
        sdpa.call(*of_sequence, attn_mask=added, dropout=scores.dropout, scale=scores.scale)
        for of_sequence in zip(rows, keys, values, strict=True)
    ]
    context = torch.stack(contexts).unflatten(3, (-1, size)).permute(0, 1, 4, 2, 3, 5)  # (B, blocks, size, K, G, Hv)
    return context.flatten(3, 4).flatten(1, 2).transpose(1, 2)
