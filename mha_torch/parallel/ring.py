"""Ring attention: tokens are divided over ranks, keys and values circulate, queries stay.

Each rank merges the partial results for its queries by their log-sum-exp. With causality, ranks
first exchange halves, so that rank i of n works on halves i and 2 n - 1 - i and all have equal work
(zigzag). Fully masked blocks are skipped, and chunks or a causal window may end the ring early. A
window without causality also needs the keys of the next rank, which arrive last.

Source: Ring Attention, arXiv:2310.01889; zigzag order as in Llama 3, arXiv:2407.21783, section
3.3.2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from mha_spec import AttentionSpec, GridBias, InputError
from mha_spec.heads import BareHeads
from mha_torch.arrays import at_least_float32, zero_where
from mha_torch.checks import check_lengths
from mha_torch.kernels.nonfinite import attends_to_any, nonfinite_tokens
from mha_torch.masks import Mask, as_lengths
from mha_torch.padding import padding_after
from mha_torch.scores import Scores
from mha_torch.stages import attention_context, attention_scores, check_attention

_SCORES = 2**24
"""Approximate number of scores in memory at a time."""


@dataclass(frozen=True)
class RingAttention:
    """Kernel of layers whose tokens are divided over the ranks of a group, in equal parts and in
    order.

    Attributes:
        group: process group.
        num_parts: number of ranks.
        rank: rank of this process in the group.
    """

    group: dist.ProcessGroup
    num_parts: int
    rank: int

    @classmethod
    def over(cls, group: dist.ProcessGroup) -> RingAttention:
        """Return the kernel of this rank of a group."""
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    def positions(self, seq_len: int, device: torch.device) -> Int[Tensor, "1 T"]:
        """Return the positions of local tokens in the whole sequence."""
        return self.rank * seq_len + torch.arange(seq_len, device=device)[None]

    def find_padding(
        self, mask: Mask, batch_size: int, seq_len: int, device: torch.device
    ) -> tuple[Mask, Bool[Tensor, "B S"] | None]:
        """Return the mask, and which local tokens are padding; lengths are of whole sequences."""
        lengths = mask.key_padding_lengths
        if lengths is None:
            return mask, None
        # `check` compares them with the whole sequence, after it has compared the parts of all
        # ranks: if uneven parts were an error on one rank only, the others would wait for it.
        check_lengths("key_padding_lengths", lengths, batch_size, sys.maxsize)
        local_lengths = as_lengths(lengths) - self.rank * seq_len
        return mask, padding_after(local_lengths, seq_len, device)

    def check(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> None:
        """Reject arguments that do not fit; lengths are of whole sequences."""
        check_ring_supports(mask, scores)
        check_attention(query, key, value, mask, scores)
        check_parts(query, key, self)
        if mask.key_padding_lengths is not None:
            seq_len_k = self.num_parts * key.shape[2]
            check_lengths(
                "key_padding_lengths", mask.key_padding_lengths, query.shape[0], seq_len_k
            )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores
    ) -> Tensor:
        """Return the context of local tokens."""
        lengths = mask.key_padding_lengths
        mask = replace(
            mask, key_padding_lengths=None if lengths is None else as_lengths(lengths).cpu()
        )
        ring = _Ring(self, mask, scores.spec, query.shape[2], key.shape[2])
        learned = (scores.learned.get("sinks"), scores.learned.get("relative_bias"))
        return _Attention.apply(ring, query, key, value, *learned)  # pyright: ignore


def ring_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    group: dist.ProcessGroup,
    spec: AttentionSpec | None = None,
    *,
    is_causal: bool = False,
    key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    learned: Mapping[str, Float[Tensor, ...]] | None = None,
) -> Float[Tensor, "B N T Hv"]:
    """Attention of split heads over the tokens of all ranks.

    Parts are in order and of equal length: rank r of n has queries r T to (r + 1) T. All ranks of
    the group must call it, also in the backward pass. Second derivatives are not supported.

    Args:
        query: queries of local tokens, (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        group: process group.
        spec: layer of these heads: its scale, window or chunks, soft cap and ALiBi; default: the
            scale 1 / sqrt(H).
        is_causal: hide keys after the query's own position in the whole sequence.
        key_padding_lengths: number of real keys of each whole sequence, (B,), equal on all ranks.
        learned: weights of the layer that change scores, `sinks` and `relative_bias`, see `Scores`.

    Returns:
        Context of local tokens, (B, N, T, Hv), in the dtype of query. The gradients of `learned`
        are also of local tokens: their sum over ranks is the gradient of the whole sequence.

    Raises:
        TypeError: if an input is not floating point, or the dtypes differ.
        ValueError: if the shapes do not fit, a length lies outside the whole sequence, or parts on
            CPUs differ in length.

    Source: Ring Attention, arXiv:2310.01889.
    """
    rules = BareHeads(query.shape[3]) if spec is None else spec
    kernel = RingAttention.over(group)
    mask = Mask(None, is_causal, key_padding_lengths).within(rules)
    scores = Scores(rules, learned={} if learned is None else learned)
    kernel.check(query, key, value, mask, scores)
    return kernel(query, key, value, mask, scores)


# ---- Division and masks --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ring:
    """Division of whole sequences and masks between their parts. All positions are those in the
    whole sequence.

    Attributes:
        tokens: division of the tokens.
        hidden: mask of causality, lengths and span.
        spec: layer of these heads.
        seq_len_q, seq_len_k: local numbers of queries and keys.
    """

    tokens: RingAttention
    hidden: Mask
    spec: AttentionSpec | BareHeads
    seq_len_q: int
    seq_len_k: int

    @cached_property
    def is_zigzag(self) -> bool:
        """True if ranks exchange halves: if only causality makes the work of the parts unequal."""
        is_even = self.seq_len_q == self.seq_len_k and self.seq_len_q % 2 == 0
        return (
            self.tokens.num_parts > 1
            and self.hidden.is_causal
            and self.hidden.span is None
            and is_even
        )

    def pieces(self, rank: int, seq_len: int) -> list[range]:
        """Return the positions that a rank works on, as ranges."""
        if not self.is_zigzag:
            return [range(rank * seq_len, (rank + 1) * seq_len)]
        half = seq_len // 2
        last = 2 * self.tokens.num_parts - 1
        return [range(index * half, (index + 1) * half) for index in (rank, last - rank)]

    def steps(self) -> int:
        """Return the number of times that parts are passed on: until no rank needs another one."""
        size = self.tokens.num_parts
        if self.hidden.span is None:
            return size - 1
        far = (
            (rank - source) % size
            for rank in range(size)
            for source in range(size)
            if any(
                self.sees(rows, keys)
                for rows in self.pieces(rank, self.seq_len_q)
                for keys in self.pieces(source, self.seq_len_k)
            )
        )
        return max(far, default=0)

    def source(self, step: int) -> int:
        """Return the rank whose keys are local after this many steps."""
        return (self.tokens.rank - step) % self.tokens.num_parts

    def visible_keys(self, rows: range) -> tuple[Tensor, Tensor]:
        """Return the first key of each row and the one after its last, (B or 1, rows)."""
        hidden = replace(self.hidden, q_offset=torch.tensor([rows.start]))
        return hidden.key_range(len(rows), self.tokens.num_parts * self.seq_len_k)

    def sees(self, rows: range, keys: range) -> bool:
        """Return whether any of some rows attends to any of some keys."""
        if len(rows) and len(keys):
            ends = [self.visible_keys(range(row, row + 1)) for row in (rows[0], rows[-1])]
        else:
            ends = []
        if not ends:
            return False
        (first, _), (_, stop) = ends  # both are monotonic
        return bool(((first < keys.stop) & (stop > keys.start)).any())

    def mask(self, rows: range, keys: range, device: torch.device) -> Tensor | None:
        """Return the mask of some rows and keys, (B or 1, 1, rows, keys); None if nothing is
        hidden.
        """
        first, stop = (x.to(device) for x in self.visible_keys(rows))
        if bool(((first <= keys.start) & (stop >= keys.stop)).all()):
            return None
        key_positions = torch.arange(keys.start, keys.stop, device=device)
        return ((key_positions >= stop[..., None]) | (key_positions < first[..., None]))[:, None]


# ---- Transfers -----------------------------------------------------------------------------------


class _Transfer:
    """Tensors in transit between ranks."""

    def __init__(
        self,
        tokens: RingAttention,
        sent: Sequence[tuple[Tensor, int]],
        received: Iterable[tuple[Tensor, int]],
    ):
        operations, self.tensors = [], []
        self.sent = [x.contiguous() for x, _ in sent]  # kept until they are sent
        for x, (_, rank) in zip(self.sent, sent, strict=True):
            operations.append(self._operation(dist.isend, x, tokens, rank))
        for like, rank in received:
            self.tensors.append(torch.empty_like(like, memory_format=torch.contiguous_format))
            operations.append(self._operation(dist.irecv, self.tensors[-1], tokens, rank))
        if operations:
            self.works = dist.batch_isend_irecv(operations)
        else:
            self.works = []

    @staticmethod
    def _operation(which: Any, x: Tensor, tokens: RingAttention, rank: int) -> dist.P2POp:
        return dist.P2POp(which, x, dist.get_global_rank(tokens.group, rank), tokens.group)

    def wait(self) -> list[Tensor]:
        """Wait for and return the received tensors."""
        for work in self.works:
            work.wait()
        return self.tensors


def _send_next(ring: _Ring, tensors: Sequence[Tensor], by: int = 1) -> _Transfer:
    """Send to the rank this many positions ahead, and receive from the one as far behind."""
    rank = ring.tokens.rank
    size = ring.tokens.num_parts
    ahead = (rank + by) % size
    behind = (rank - by) % size
    return _Transfer(ring.tokens, [(x, ahead) for x in tensors], [(x, behind) for x in tensors])


def _to_zigzag(ring: _Ring, tensors: Sequence[Tensor], *, back: bool = False) -> list[Tensor]:
    """Move halves of (…, T, ·) from sequence order to zigzag order, or back."""
    rank = ring.tokens.rank
    size = ring.tokens.num_parts

    def rank_in_order(half_index: int) -> int:
        return half_index // 2

    def rank_in_zigzag(half_index: int) -> int:
        return min(half_index, 2 * size - 1 - half_index)

    in_order = (2 * rank, 2 * rank + 1)
    in_zigzag = (rank, 2 * size - 1 - rank)
    if back:
        own_halves = in_zigzag
        wanted_halves = in_order
        target_rank = rank_in_order
        source_rank = rank_in_zigzag
    else:
        own_halves = in_order
        wanted_halves = in_zigzag
        target_rank = rank_in_zigzag
        source_rank = rank_in_order
    parts_of_halves = {}
    for i, half_index in enumerate(own_halves):
        parts_of_halves[half_index] = [x.chunk(2, dim=-2)[i] for x in tensors]
    sent = []
    for half_index in own_halves:
        if target_rank(half_index) != rank:
            sent += [(x, target_rank(half_index)) for x in parts_of_halves[half_index]]
    received = []
    for half_index in wanted_halves:
        if source_rank(half_index) != rank:
            received += [(x, source_rank(half_index)) for x in parts_of_halves[own_halves[0]]]
    arriving = iter(_Transfer(ring.tokens, sent, received).wait())
    parts_of_wanted_halves = []
    for half_index in wanted_halves:
        if source_rank(half_index) == rank:
            parts = parts_of_halves[half_index]
        else:
            parts = [next(arriving) for _ in tensors]
        parts_of_wanted_halves.append(parts)
    return [torch.cat(pair, dim=-2) for pair in zip(*parts_of_wanted_halves, strict=True)]


# ---- Ring ----------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Forward returns the context and log-sum-exp of each row; backward uses the log-sum-exp of the
    whole row.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        ring: _Ring,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        table: Tensor | None,
    ) -> Tensor:
        dtype = query.dtype
        if ring.is_zigzag:
            query, key, value = _to_zigzag(ring, [query, key, value])
        nonfinite_rows = nonfinite_tokens(query)
        query = zero_where(query, nonfinite_rows)
        context = torch.zeros(
            (*query.shape[:3], value.shape[3]), dtype=at_least_float32(query).dtype
        )
        context = context.to(query.device)
        lse = torch.full_like(context[..., :1], -torch.inf)
        visiting = [key, value]
        steps = ring.steps()
        for step in range(steps + 1):
            if step < steps:
                moved = _send_next(ring, visiting)
            else:
                moved = None
            for part in _parts(ring, query, visiting, ring.source(step)):
                own, own_lse, wrong = _attended(part, table, ring.spec)
                rows = part.rows
                before = context[:, :, rows], lse[:, :, rows]
                context[:, :, rows], lse[:, :, rows] = _joined(*before, own, own_lse)
                nonfinite_rows[:, :, rows] |= wrong
            if moved is not None:
                visiting = moved.wait()
        has_key = ~torch.isneginf(lse)
        if sinks is not None:
            total = torch.logaddexp(lse, at_least_float32(sinks)[:, None, None])
            context = context * (lse - total).exp()
            lse = torch.where(has_key, total, lse)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, sinks, table, context, lse)
        output = context.masked_fill(nonfinite_rows & has_key, torch.nan)
        if ring.is_zigzag:
            (output,) = _to_zigzag(ring, [output], back=True)
        return output.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ring: _Ring = ctx.ring
        query, key, value, sinks, table, context, lse = ctx.saved_tensors
        (cotangent,) = cotangents
        if ring.is_zigzag:
            (cotangent,) = _to_zigzag(ring, [cotangent])
        cotangent = at_least_float32(cotangent)
        # Rows whose output was not used get no gradient, even if they are not finite.
        reduced = torch.where(cotangent == 0, 0.0, cotangent * context).sum(dim=-1, keepdim=True)
        grads = [torch.zeros_like(at_least_float32(x)) for x in (query, key, value)]
        if table is None:
            grad_table = None
        else:
            grad_table = torch.zeros_like(at_least_float32(table))
        visiting = [key, value]
        steps = ring.steps()
        for step in range(steps + 1):
            if step < steps:
                moved = _send_next(ring, visiting)
            else:
                moved = None
            for part in _parts(ring, query, visiting, ring.source(step)):
                rows = part.rows
                keys = part.keys
                of_rows = (x[:, :, rows] for x in (lse, cotangent, reduced))
                *own, own_table = _block_backward(part, table, ring.spec, *of_rows)
                for grad, tokens, own_grad in zip(grads, (rows, keys, keys), own, strict=True):
                    grad[:, :, tokens] += own_grad
                if grad_table is not None and own_table is not None:
                    grad_table += own_table
            if moved is not None:
                visiting = moved.wait()
                grads[1:] = _send_next(ring, grads[1:]).wait()
        if steps:  # the received gradient is of keys this many positions behind
            grads[1:] = _send_next(ring, grads[1:], -steps).wait()
        if ring.is_zigzag:
            grads = _to_zigzag(ring, grads, back=True)
        grad_sinks = None
        if sinks is not None:
            lost = (at_least_float32(sinks)[:, None, None] - lse).exp() * reduced
            grad_sinks = (
                -lost.masked_fill(torch.isneginf(lse), 0.0).sum(dim=(0, 2, 3)).to(sinks.dtype)
            )
        of_inputs = [grad.to(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True)]
        return (
            None,
            *of_inputs,
            grad_sinks,
            None if table is None or grad_table is None else grad_table.to(table.dtype),
        )


class _Part(NamedTuple):
    """Some local rows, and the keys of a visiting part that they attend to.

    Attributes:
        rows, keys: slices of the local rows and of the keys of the part.
        query, key, value: features of these rows and keys.
        mask: True = masked; None if nothing is hidden.
        offset: position of the first row among the keys.
    """

    rows: slice
    keys: slice
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    offset: int


def _parts(
    ring: _Ring, query: Tensor, key_and_value: Sequence[Tensor], source: int
) -> Iterator[_Part]:
    """Yield the blocks of a visiting part that are not fully masked, with a limited number of
    scores each.
    """
    key, value = key_and_value
    first_row = 0
    for rows in ring.pieces(ring.tokens.rank, query.shape[2]):
        first_key = 0
        for keys in ring.pieces(source, key.shape[2]):
            of_keys = slice(first_key, first_key + len(keys))
            first_key += len(keys)
            count = max(_SCORES // max(query.shape[0] * query.shape[1] * len(keys), 1), 1)
            for begin in range(0, len(rows), count):
                some = rows[begin : begin + count]
                if not ring.sees(some, keys):
                    continue
                of_rows = slice(first_row + begin, first_row + begin + len(some))
                parts = (query[:, :, of_rows], key[:, :, of_keys], value[:, :, of_keys])
                mask = ring.mask(some, keys, query.device)
                yield _Part(of_rows, of_keys, *parts, mask, some.start - keys.start)
        first_row += len(rows)


def _scores(
    part: _Part, query: Tensor, key: Tensor, table: Tensor | None, spec: AttentionSpec | BareHeads
) -> Tensor:
    q_offset = torch.tensor([part.offset], device=query.device)
    if table is None:
        learned = {}
    else:
        learned = {"relative_bias": table}
    scores = attention_scores(query, key, None, spec, q_offset, learned)
    if part.mask is None:
        return scores
    return scores.masked_fill(part.mask, -torch.inf)


def _finite(part: _Part) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v in at least float32, with non-finite keys and values as 0, and flags of
    these.
    """
    wrong = nonfinite_tokens(part.key) | nonfinite_tokens(part.value)
    key, value = (zero_where(at_least_float32(x), wrong) for x in (part.key, part.value))
    return at_least_float32(part.query), key, value, wrong


def _attended(
    part: _Part, table: Tensor | None, spec: AttentionSpec | BareHeads
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the context over the keys of a part, its log-sum-exp, and flags of rows that attend to
    non-finite keys.
    """
    query, key, value, wrong = _finite(part)
    scores = _scores(part, query, key, table, spec)
    lse = scores.logsumexp(dim=-1, keepdim=True)
    context = attention_context((scores - _finite_lse(lse)).exp(), value)
    marked = wrong[..., 0].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return context, lse, attends_to_any(marked, query.shape[2], Mask(part.mask))


def _block_backward(
    part: _Part,
    table: Tensor | None,
    spec: AttentionSpec | BareHeads,
    lse: Tensor,
    cotangent: Tensor,
    reduced: Tensor,
) -> list[Any]:
    """Return gradients of query, key, value and relative bias from the log-sum-exp and context of
    whole rows.

    Softmax backward with P = exp(score - log) of the whole row: dS = P * (dP - sum(dO * O)).
    """
    query, key, value, _ = _finite(part)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    leaves += [] if table is None else [table.detach().requires_grad_()]
    with torch.enable_grad():
        scores = _scores(part, leaves[0], leaves[1], leaves[3] if table is not None else None, spec)
        weights = (scores - _finite_lse(lse)).exp()
        context = attention_context(weights, leaves[2])
        sums = weights.sum(dim=-1, keepdim=True)
    grads = torch.autograd.grad((context, sums), leaves, (cotangent, -reduced))
    return [*grads, *([None] if table is None else [])]


def _finite_lse(lse: Tensor) -> Tensor:
    """Return the log-sum-exp, with 0 for fully masked rows, whose weights are then exp(-inf)."""
    return lse.masked_fill(torch.isneginf(lse), 0.0)


def _joined(context: Tensor, lse: Tensor, own: Tensor, own_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two contexts of the same rows by their log-sum-exp."""
    total = torch.logaddexp(lse, own_lse)
    known = _finite_lse(total)
    return context * (lse - known).exp() + own * (own_lse - known).exp(), total


# ---- Validation ----------------------------------------------------------------------------------


def check_parts(query: Tensor, key: Tensor, tokens: RingAttention) -> None:
    """Reject parts of unequal length; only on CPUs, where querying the other ranks is cheap."""
    if query.device.type != "cpu":
        return
    own = torch.tensor([query.shape[0], query.shape[2], key.shape[2]])
    others = [rank for rank in range(tokens.num_parts) if rank != tokens.rank]
    counts_of_rank = {rank: torch.empty_like(own) for rank in others} | {tokens.rank: own}
    whole = {rank: dist.get_global_rank(tokens.group, rank) for rank in others}
    works = [dist.isend(own, whole[rank], tokens.group) for rank in others]
    works += [dist.irecv(counts_of_rank[rank], whole[rank], tokens.group) for rank in others]
    for work in filter(None, works):
        work.wait()
    for index, what in enumerate(("sequences", "queries", "keys")):
        counts = [int(counts_of_rank[rank][index]) for rank in range(tokens.num_parts)]
        if len({*counts}) > 1:
            raise InputError(
                what, "be as many on each process where tokens are divided", {what: counts}
            )


def check_ring_supports(mask: Mask, scores: Scores) -> None:
    """Reject dropout, and masks and biases, whose columns would have to circulate with the keys."""
    unknown = mask.fields_beyond("is_causal", "key_padding_lengths", "span")
    named = {name: getattr(mask, name) for name in unknown} | {"bias": scores.bias}
    for name, value in named.items():
        if value is not None:
            raise InputError(
                name,
                "be None where tokens are divided; "
                "causality, lengths, windows and chunks hold for whole sequences",
                {f"{name}.shape": tuple(value.shape)}
                if isinstance(value, Tensor)
                else type(value).__name__,
            )
    spec = scores.spec
    if isinstance(spec.relative_bias, GridBias):
        raise InputError(
            "relative_bias",
            "be one of distances where tokens are divided",
            relative_bias=spec.relative_bias,
        )
    if spec.relative_products is not None:
        rule = "be None where tokens are divided"
        raise InputError("relative_products", rule, relative_products=spec.relative_products)
    if scores.dropout or scores.dropout_keep is not None:
        raise InputError(
            "dropout",
            "be 0 where tokens are divided (eval() switches it off)",
            dropout=scores.dropout,
        )
