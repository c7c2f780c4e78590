"""The fast path: the same function without attention weights.

It is PyTorch's own scaled_dot_product_attention behind the masks and the empty rows of this package. By itself that
gives 0 for some rows of NaN, and lets a NaN that is hidden through to rows that do not see it; here neither happens.
On CUDA, what that function has no words for goes to FlexAttention.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import forward_ad

from mha_spec import AttentionSpec, Refusal, RelativeBias
from mha_spec.attention import check_spec
from mha_spec.reach import Reach
from mha_spec.rules import as_rate
from mha_torch import flex, stages
from mha_torch.alibi import alibi_bias
from mha_torch.arrays import values_of
from mha_torch.masks import Masking
from mha_torch.not_finite import emptied, not_finite, sees_any, spoilt
from mha_torch.relative_bias import relative_position_bias
from mha_torch.rope import at_least_float32
from mha_torch.stages import Dropout, check_attention

_QUERIES_WITH_BIAS = 128
"""How many queries go together where each score has a bias that is made for the call."""


def scaled_dot_product_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    spec: AttentionSpec | None = None,
    *,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[Tensor, "B N T S"] | None = None,
    sinks: Float[Tensor, "..."] | None = None,
    relative_bias: Float[Tensor, "..."] | None = None,
) -> tuple[Float[Tensor, "B N T Hv"], None]:
    """Attention of split heads without the attention weights: the function of `stages`, in the fastest form there is.

    With a soft cap it is the plain path, for the kernel has none, but on CUDA FlexAttention. It is the plain path in
    forward mode (`jvp`, `jacfwd`, `hessian`), in which the kernel on a CPU has no derivative. Nor has it a second one
    in reverse mode (`create_graph=True`): there the plain path must be called.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        spec: the layer that these are the heads of, of which the scale of the scores is taken; 1 / sqrt(H) when absent.
        mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0.
        bias: added to the scores, in the dtype of query; broadcasts to (B, N, T, S). -inf masks a key.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
        need_weights: must be False, the weights are never stored here.
        dropout: rate at which attention weights are dropped; 0 outside training.
        dropout_keep: must be absent, a fused kernel draws its own.
        sinks: the logit of each head that takes part in the softmax and has no value, (N,), where the layer has them.
        relative_bias: what scores gain for the distance of their keys, (num_buckets, N), where the layer has that.

    Returns:
        The context (B, N, T, Hv), in the dtype of query, and None.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit, or the weights or a given dropout are asked for.

    Source: torch.nn.functional.scaled_dot_product_attention.
    """
    if need_weights or dropout_keep is not None:
        raise Refusal("need_weights and dropout_keep", "be left out on the fused path, which stores no weights")
    masking = Masking(mask, bias, is_causal, key_padding_lengths, sinks=sinks, relative_bias=relative_bias)
    masking = masking.of_layer(spec)
    return attend(query, key, value, masking, Dropout(dropout), spec=spec), None


def attend(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    masking: Masking,
    dropout: Dropout,
    *,
    spec: AttentionSpec | None,
) -> Float[Tensor, "B N T Hv"]:
    """`scaled_dot_product_attention` as the layers call it: the context."""
    check_attention(query, key, value, masking, spec)
    rate = as_rate("dropout", dropout.rate)
    if spec is not None:
        check_spec(spec)
    scoring = _Scoring()
    if spec is not None:
        scoring = _Scoring(spec.score_scale, spec.alibi_slopes, spec.relative_bias, masking.relative_bias)
    scale = scoring.scale
    is_forward_mode = _is_forward_mode()
    if not rate and not is_forward_mode and flex.takes(query, value, masking, spec):
        return flex.attend_by_flex(query, key, value, masking, spec=spec)
    if is_forward_mode or not kernel_takes(spec):
        return stages.attend(query, key, value, masking, dropout, spec=spec, need_weights=False)[0]
    if query.device.type == "cpu" and not torch.compiler.is_compiling():  # where looking costs little
        has_gradient = _takes_gradient(query, key, value)
        # In a gradient what is hidden is multiplied by 0.
        if has_gradient and _are_moderate(query, key, value, masking.bias, scale):
            return _attend_hidden(query, key, value, masking, rate, scoring)
        if not has_gradient:
            context = _attend_hidden(query, key, value, masking, rate, scoring)
            if _is_sound(context) or _are_moderate(query, key, value, masking.bias, scale):
                return context
    return _attend_not_finite(query, key, value, masking, rate, scoring)


def kernel_takes(spec: AttentionSpec | None) -> bool:
    """Whether the framework's kernel can do with scores what a layer does."""
    return spec is None or spec.soft_cap is None


class _Scoring(NamedTuple):
    """What becomes of the products of queries and keys.

    Attributes:
        scale: what they are multiplied by; without one PyTorch takes 1 / sqrt(H).
        slopes: what each head takes from them for each token of distance, or None.
        relative_bias, table: what each head adds to them for the distance of a key, or None.
    """

    scale: float | None = None
    slopes: tuple[float, ...] | None = None
    relative_bias: RelativeBias | None = None
    table: Tensor | None = None

    @property
    def has_distances(self) -> bool:
        """Whether it depends on the distance of a key."""
        return self.slopes is not None or self.table is not None


def _is_forward_mode() -> bool:
    """Whether forward-mode differentiation is under way; tangents may lie below other transforms, out of sight."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def _is_sound(context: Tensor) -> bool:
    """Whether no row is NaN or infinite, nor 0, as rows are in which the kernel swallows that; no if not known."""
    if context.numel() == 0:
        return True
    smallest, largest = torch.linalg.vector_norm(context, dim=-1).aminmax()
    known = values_of(smallest)
    return known is not None and known > 0.0 and largest.item() < torch.inf


def _are_moderate(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None) -> bool:
    """Whether all is finite, and every score too; no if not known."""
    dtype = torch.promote_types(query.dtype, torch.float32)  # float64 would be read 20 times as slowly
    sizes = [values_of(torch.linalg.vector_norm(x.detach(), dtype=dtype)) for x in (query, key, value)]
    if bias is not None and bias.numel():
        sizes.append(values_of(bias.detach().amax()))  # -inf hides a key
    if any(size is None for size in sizes):
        return False
    return all(
        bound < torch.finfo(torch.float32).max for bound in (sizes[0] * sizes[1] * max(scale or 1.0, 1.0), *sizes[2:])
    )


def _attend_not_finite(
    query: Tensor, key: Tensor, value: Tensor, masking: Masking, dropout: float, scoring: _Scoring
) -> Tensor:
    """The same of anything: what is not finite is 0 to the kernel, and the rows that see it are NaN afterwards."""
    if query.numel() == 0 or key.numel() == 0:
        return _attend_hidden(query, key, value, masking, dropout, scoring)
    num_groups, seq_len_q = query.shape[1] // key.shape[1], query.shape[2]
    wrong_rows, wrong_keys = not_finite(query), not_finite(key) | not_finite(value)
    query, key, value = emptied(query, wrong_rows), emptied(key, wrong_keys), emptied(value, wrong_keys)
    wrong_keys = wrong_keys[..., 0].repeat_interleave(num_groups, dim=1)
    hidden = masking.with_infinite_bias()
    wrong_rows = wrong_rows | sees_any(wrong_keys, seq_len_q, hidden)
    if masking.bias is not None:
        wrong_bias = torch.isnan(masking.bias) | torch.isposinf(masking.bias)
        masking = replace(masking, bias=emptied(masking.bias, wrong_bias))
        joined = hidden.joined(seq_len_q, key.shape[2], query.device)
        wrong_rows = wrong_rows | (wrong_bias if joined is None else wrong_bias & ~joined).any(dim=-1, keepdim=True)
    context = _attend_hidden(query, key, value, masking, dropout, scoring)
    if masking.sinks is None:  # which have the weight of a row whose scores are all -inf
        # Where every score of a row overflows to -inf, the kernel gives 0.
        sizes = [torch.linalg.vector_norm(x.detach().double(), dim=-1, keepdim=True) for x in (query, key)]
        bound = sizes[0] * sizes[1].amax(dim=2, keepdim=True).repeat_interleave(num_groups, dim=1)
        may_overflow = bound * max(scoring.scale or 1.0, 1.0) > torch.finfo(torch.float32).max
        wrong_rows = wrong_rows | (may_overflow & (context == 0).all(dim=-1, keepdim=True))
    return spoilt(context, wrong_rows & sees_any(torch.ones_like(wrong_keys), seq_len_q, hidden))


def _attend_hidden(
    query: Tensor, key: Tensor, value: Tensor, masking: Masking, dropout: float, scoring: _Scoring
) -> Tensor:
    """The kernel with the cheapest form of what is hidden."""
    bias, is_causal, lengths = masking.bias, masking.is_causal, masking.key_padding_lengths
    reach, scale, has_distances = masking.reach, scoring.scale, scoring.has_distances
    if reach is not None and masking.offsets is None and query.shape[2] > _num_together(reach, key, value):
        return _attend_in_reach(query, key, value, masking, reach, dropout, scoring)
    # Where causality hides nothing, a relative bias is made at once, which is faster.
    in_parts = scoring.slopes is not None or (scoring.table is not None and is_causal)
    if in_parts and query.shape[2] > _QUERIES_WITH_BIAS:
        return _attend_in_parts(query, key, value, masking, dropout, scoring)
    if masking.mask is None and bias is None and reach is None and masking.offsets is None and not has_distances:
        if lengths is None:  # nothing is hidden, or what a kernel knows
            return _attend(query, key, value, masking.sinks, is_causal=is_causal, dropout=dropout, scale=scale)
        known = values_of(torch.as_tensor(lengths)) if query.device.type == "cpu" else None
        if known and all(known):  # no row is empty
            hidden = replace(masking, key_padding_lengths=known)
            return _attend_by_sequence(query, key, value, hidden, dropout=dropout, scale=scale)
    seq_len_k = key.shape[2]
    mask = masking.with_infinite_bias().joined(query.shape[2], seq_len_k, query.device)
    if has_distances:
        added = _added_by_distance(query, seq_len_k, masking.offsets, scoring)
        bias = added if bias is None else added + bias
    empty_rows = None
    attn_mask = bias
    if mask is not None:
        # Some kernels give NaN for a row without a key, in the result or in the gradient. Such a row is shown every
        # key instead, and emptied afterwards.
        mask = mask.broadcast_to((*mask.shape[:-1], seq_len_k))
        empty_rows = mask.all(dim=-1, keepdim=True)
        mask = mask & ~empty_rows
        # SDPA's polarity is the other one: True = attend.
        attn_mask = ~mask if bias is None else torch.where(mask, -torch.inf, bias.where(~empty_rows, 0.0))
    context = _attend(query, key, value, masking.sinks, attn_mask=attn_mask, dropout=dropout, scale=scale)
    return context if empty_rows is None else context.masked_fill(empty_rows, 0.0)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float,
    scale: float | None,
) -> Tensor:
    if sinks is not None:
        factor, head_dim, first = scale or query.shape[-1] ** -0.5, value.shape[-1], int(is_causal)
        query, key, value, attn_mask = _with_sinks(query, key, value, sinks, attn_mask, factor, num_before=first)
        context = _attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal, dropout=dropout, scale=factor)
        return context[:, :, first:, :head_dim]
    if attn_mask is not None:
        attn_mask = attn_mask.broadcast_to((*query.shape[:3], key.shape[2]))
    width = value.shape[3]
    if query.shape[3] != width:  # most kernels take heads of one width, on a CPU the only fast one
        scale, most = query.shape[3] ** -0.5 if scale is None else scale, max(query.shape[3], width)
        query, key, value = (F.pad(x, (0, most - x.shape[3])) for x in (query, key, value))
    context = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal,  # top-left, as ours
        dropout_p=dropout,
        scale=scale,
        enable_gqa=bool(query.shape[1] != key.shape[1]),
    )
    return context[..., :width]


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
    """The same with the sinks as a first key, whose value is 0, and so many first queries, for causality to count from.

    That key is 0 but for two features of its own, where each query has the sink of its head: in two parts, so that half
    precision keeps it.
    """
    wanted = at_least_float32(sinks) / scale
    coarse = wanted.to(query.dtype)
    parts = torch.stack([coarse, (wanted - coarse).to(query.dtype)], dim=-1)  # (N, 2)
    parts = parts[:, None].expand(*query.shape[:3], 2)
    query = F.pad(torch.cat([query, parts], dim=-1), (0, 0, num_before, 0))
    first = F.pad(key.new_zeros(*key.shape[:2], 1, key.shape[3]), (0, 2), value=1.0)
    key = torch.cat([first, F.pad(key, (0, 2))], dim=2)
    value = F.pad(value, (0, 2, 1, 0))
    if attn_mask is None:
        return query, key, value, None
    attn_mask = attn_mask.broadcast_to(torch.broadcast_shapes(attn_mask.shape, (1, key.shape[2] - 1)))
    return query, key, value, F.pad(attn_mask, (1, 0), value=attn_mask.dtype == torch.bool)


def _added_by_distance(query: Tensor, seq_len_k: int, offsets: Tensor | None, scoring: _Scoring) -> Tensor:
    """What ALiBi or a relative bias adds to the scores of queries (B, N, T, H), in at least float32."""
    dtype, lengths = torch.promote_types(query.dtype, torch.float32), (query.shape[2], seq_len_k)
    if scoring.table is not None and scoring.relative_bias is not None:
        return relative_position_bias(scoring.table, scoring.relative_bias, *lengths, offsets, scores_dtype=dtype)
    return alibi_bias(scoring.slopes or (), *lengths, offsets, scores_dtype=dtype, device=query.device)


def _attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, masking: Masking, dropout: float, scoring: _Scoring
) -> Tensor:
    """A few queries at a time, with no more than their bias in memory, over the keys up to the last of them."""
    seq_len_q, seq_len_k, size = query.shape[2], key.shape[2], _QUERIES_WITH_BIAS
    contexts, added, last = [], None, (seq_len_q - 1) // size * size
    others = (masking.mask, masking.bias, masking.key_padding_lengths, masking.reach, masking.offsets)
    if all(x is None for x in others):  # of the last part, in which that of any other is found
        stop = last + (size if masking.is_causal else seq_len_k)
        added = _added_by_distance(query[:, :, :size], stop, torch.tensor([last]), scoring)
        if masking.is_causal:
            hidden = replace(masking, offsets=torch.tensor([last])).hidden(size, stop, query.device)
            added = added.masked_fill_(hidden, -torch.inf)
    for begin in range(0, seq_len_q, size):
        end = min(begin + size, seq_len_q)
        stop = min(end, seq_len_k) if masking.is_causal and masking.offsets is None else seq_len_k
        parts = (query[:, :, begin:end], key[:, :, :stop], value[:, :, :stop])
        if added is not None:
            attn_mask = added[:, :, : end - begin, last - begin : last - begin + stop]
            contexts.append(_attend(*parts, masking.sinks, attn_mask=attn_mask, dropout=dropout, scale=scoring.scale))
            continue
        inside = masking.part(slice(begin, end), slice(0, stop))
        contexts.append(_attend_hidden(*parts, inside, dropout, scoring))
    return torch.cat(contexts, dim=2)


def _num_together(reach: Reach, key: Tensor, value: Tensor) -> int:
    """How many queries go together: those of a chunk, or so many that most keys of a window are those of them all."""
    if reach.chunk_size is not None:
        return reach.chunk_size
    return max(64, (reach.window_size or 0) // 8) * (2 if _takes_gradient(key, value) else 1)  # measured


def _takes_gradient(*arrays: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in arrays)


def _by_slices(x: Tensor, size: int) -> Callable[[slice], Tensor]:
    """What gives slices of x along its third axis, which begin at multiples of size.

    The gradient of a slice is as large as x. So where there is one, slices are joined from pieces that are cut once.
    """
    if not _takes_gradient(x):
        return lambda among: x[:, :, among]
    pieces = x.split(size, dim=2)

    def joined(among: slice) -> Tensor:
        parts = pieces[among.start // size : -(-among.stop // size)]
        return torch.cat(parts, dim=2)[:, :, : among.stop - among.start]

    return joined


def _attend_in_reach(
    query: Tensor, key: Tensor, value: Tensor, masking: Masking, reach: Reach, dropout: float, scoring: _Scoring
) -> Tensor:
    """A few queries at a time over the keys that they reach: the work grows with the length, not with its square."""
    seq_len_q, seq_len_k, is_causal = query.shape[2], key.shape[2], masking.is_causal
    size = _num_together(reach, key, value)
    keys_in, values_in = _by_slices(key, size), _by_slices(value, size)
    # Where only the window hides, every query sees itself, and most parts have the same mask: added, the fastest form.
    is_alone = masking.mask is None and masking.bias is None and masking.key_padding_lengths is None
    is_alone = is_alone and reach.chunk_size is None and not scoring.has_distances and seq_len_q <= seq_len_k
    added: dict[tuple[int, int, int], Tensor] = {}
    contexts, nothing, alike = [], value.new_zeros(value.shape[3]), range(0)
    if is_alone and masking.sinks is None and query.shape[3] == value.shape[3] and not _takes_gradient(key, value):
        alike = _alike(reach, is_causal, seq_len_q, seq_len_k, size)
    for begin in range(0, seq_len_q, size):
        if begin in alike:
            if begin == alike[0]:
                contexts.append(_attend_at_once(query, key, value, masking, reach, alike, dropout, scoring.scale))
            continue
        end = min(begin + size, seq_len_q)
        first = min(max(reach.first(begin), 0) // size * size, seq_len_k)
        stop = max(first, min(end if is_causal else reach.stop(end - 1), seq_len_k))
        rows, keys = slice(begin, end), slice(first, stop)
        if stop == first:
            contexts.append(query[:, :, rows, :1] * nothing)
            continue
        parts = (query[:, :, rows], keys_in(keys), values_in(keys))
        if is_alone:
            place = (begin - first, end - begin, stop - first)
            if place not in added:
                added[place] = _added_by_window(query, masking, rows, keys)
            contexts.append(
                _attend(*parts, masking.sinks, attn_mask=added[place], dropout=dropout, scale=scoring.scale)
            )
            continue
        inside = masking.part(rows, keys)
        if reach.chunk_size is not None:  # of its own chunk a query sees all, or all up to itself
            inside = replace(inside, reach=None, offsets=None)
        contexts.append(_attend_hidden(*parts, inside, dropout, scoring))
    return _joined(contexts)


def _joined(contexts: Sequence[Tensor]) -> Tensor:
    """Contexts (B, N, ·, Hv) of queries behind each other; in memory heads lie within tokens, as the kernel has it."""
    return torch.cat([x.transpose(1, 2) for x in contexts], dim=1).transpose(1, 2)


def _added_by_window(query: Tensor, masking: Masking, rows: slice, keys: slice) -> Tensor:
    """-inf for each of these keys that a window hides from one of these queries, (T, S), else 0."""
    sizes = (rows.stop - rows.start, keys.stop - keys.start)
    hidden = masking.part(rows, keys).hidden(*sizes, query.device)[0, 0]
    return query.new_zeros(sizes).masked_fill_(hidden, -torch.inf)


def _alike(reach: Reach, is_causal: bool, seq_len_q: int, seq_len_k: int, size: int) -> range:
    """Where so many queries begin that there are all keys before and after them that a window shows."""
    before, after = -reach.first(0), 0 if is_causal else reach.stop(0) - 1
    return range(-(-before // size) * size, min(seq_len_q, seq_len_k - after) - size + 1, size)


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masking: Masking,
    reach: Reach,
    begins: range,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Parts of a sequence as the sequences of one call: keys are read where they lie, though parts share them."""
    size, num_parts, num_kv_heads = begins.step, len(begins), key.shape[1]
    first, last = begins[0], begins[-1]
    start, stop = reach.first(first) // size * size, last + size if masking.is_causal else reach.stop(last + size - 1)
    num_keys = stop - start - last + first  # of a part
    added = _added_by_window(query, masking, slice(first, first + size), slice(start, start + num_keys))
    # Queries of a group go side by side, for the kernel would copy the keys for each: (B, parts, K, G size, H).
    rows = query[:, :, first : last + size].unflatten(1, (num_kv_heads, -1)).unflatten(3, (num_parts, size))
    rows = rows.permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
    keys, values = (x[:, :, start:stop].unfold(2, num_keys, size).permute(0, 2, 1, 4, 3) for x in (key, value))
    added = added.repeat(query.shape[1] // num_kv_heads, 1)
    contexts = [
        _attend(*of_sequence, attn_mask=added, dropout=dropout, scale=scale)
        for of_sequence in zip(rows, keys, values, strict=True)
    ]
    context = torch.stack(contexts).unflatten(3, (-1, size)).permute(0, 1, 4, 2, 3, 5)  # (B, parts, size, K, G, Hv)
    return context.flatten(3, 4).flatten(1, 2).transpose(1, 2)


def _attend_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masking: Masking,
    *,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Each sequence over its real keys alone: without a mask, and without the work that padding would be."""
    lengths, is_causal, sinks = masking.key_padding_lengths, masking.is_causal, masking.sinks
    contexts = [
        _attend(*parts, sinks, is_causal=is_causal, dropout=dropout, scale=scale)
        for parts in (
            (q[None], k[None, :, :length], v[None, :, :length])
            for q, k, v, length in zip(query.unbind(), key.unbind(), value.unbind(), lengths or (), strict=True)
        )
    ]
    return torch.cat(contexts)
