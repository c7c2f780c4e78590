"""Attention of sequences whose tokens are divided over processes: keys and values go round, queries stay (ring).

Each process joins what it finds for its own queries by the logarithms of their sums of exponentials. With causality
the halves of the parts are exchanged first, so that of n processes the i-th works on halves i and 2 n - 1 - i, and all
have as much to do (zigzag). What nobody sees is neither multiplied nor, behind a window, passed on.

Source: Ring Attention, arXiv:2310.01889; the order of zigzag as in Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from mha_spec import AttentionSpec, GridBias, Refusal
from mha_torch.arrays import at_least_float32
from mha_torch.checks import check_lengths
from mha_torch.kernels.nonfinite import attends_to_any, nonfinite_tokens, zero_where
from mha_torch.masks import Mask, as_lengths
from mha_torch.scores import Scores
from mha_torch.stages import attention_context, attention_scores, check_attention

_SCORES = 2**24
"""How many scores a process holds at a time, about."""


@dataclass(frozen=True)
class RingAttention:
    """Kernel of layers whose tokens are divided over the processes of a group: each has as many, in order.

    Attributes:
        group: the processes.
        num_parts: their number.
        rank: which of them this is.
    """

    group: dist.ProcessGroup
    num_parts: int
    rank: int

    @classmethod
    def over(cls, group: dist.ProcessGroup) -> RingAttention:
        """Return the kernel of this process of a group."""
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    def positions(self, seq_len: int, device: torch.device) -> Int[Tensor, "1 T"]:
        """Return the positions of this process's tokens in the whole sequence."""
        return self.rank * seq_len + torch.arange(seq_len, device=device)[None]

    def check(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> None:
        """Refuse what does not fit; lengths are those of whole sequences."""
        check_known_to_ring(mask, scores)
        check_attention(query, key, value, replace(mask, key_padding_lengths=None), scores)
        check_parts(query, key, self)
        if mask.key_padding_lengths is not None:
            seq_len_k = self.num_parts * key.shape[2]
            check_lengths("key_padding_lengths", mask.key_padding_lengths, query.shape[0], seq_len_k)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> Tensor:
        """Return the context of this process's own tokens."""
        lengths = mask.key_padding_lengths
        mask = replace(mask, key_padding_lengths=None if lengths is None else as_lengths(lengths).cpu())
        ring = _Ring(self, mask, scores.spec, query.shape[2], key.shape[2])
        return _Attention.apply(ring, query, key, value, scores.sinks, scores.relative_bias)  # pyright: ignore


def ring_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    group: dist.ProcessGroup,
    spec: AttentionSpec | None = None,
    *,
    is_causal: bool = False,
    key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    sinks: Float[Tensor, " N"] | None = None,
    relative_bias: Float[Tensor, "buckets N"] | None = None,
) -> Float[Tensor, "B N T Hv"]:
    """Attention of split heads over the tokens of all processes, each of which has a part of them.

    The parts are in order, and of one length: process r of n has queries r T to (r + 1) T. All processes of the group
    must call it, backward too. Its gradient has no second one.

    Args:
        query: of the process's own tokens, (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        group: the processes.
        spec: the layer that these are the heads of: its scale, windows and chunks, soft cap, ALiBi; 1 / sqrt(H) when
            absent.
        is_causal: hide every key after the query's own position in the whole sequence.
        key_padding_lengths: number of real keys of each whole sequence, (B,), the same on all processes.
        sinks: the logit of each head that takes part in the softmax and has no value, (N,), where the layer has them.
        relative_bias: what scores gain for the distance of their keys, (num_buckets, N), where the layer has that.

    Returns:
        The context of the process's own tokens, (B, N, T, Hv), in the dtype of query. The gradients of `sinks` and
        `relative_bias` are of them, too: the sum over the processes is that of the whole sequence.

    Raises:
        TypeError: if an input is not floating point, or the dtypes differ.
        ValueError: if the shapes do not fit, a length lies outside of the whole sequence, or parts on CPUs have not one
            length.

    Source: Ring Attention, arXiv:2310.01889.
    """
    kernel, mask = RingAttention.over(group), Mask(None, is_causal, key_padding_lengths).within(spec)
    scores = Scores(spec, sinks=sinks, relative_bias=relative_bias)
    kernel.check(query, key, value, mask, scores)
    return kernel(query, key, value, mask, scores)


# ---- Who sees what ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ring:
    """The parts of whole sequences, and which keys are seen from where; all places are those in the whole sequence.

    Attributes:
        tokens: how they are divided.
        hidden: causality, lengths and span.
        spec: the layer, or None.
        seq_len_q, seq_len_k: queries and keys of a process.
    """

    tokens: RingAttention
    hidden: Mask
    spec: AttentionSpec | None
    seq_len_q: int
    seq_len_k: int

    @cached_property
    def is_zigzag(self) -> bool:
        """Whether halves are exchanged: where causality alone makes the work of the parts unequal."""
        is_even = self.seq_len_q == self.seq_len_k and self.seq_len_q % 2 == 0
        return self.tokens.num_parts > 1 and self.hidden.is_causal and self.hidden.span is None and is_even

    def pieces(self, rank: int, seq_len: int) -> list[range]:
        """The places of what a process works on, piece by piece."""
        if not self.is_zigzag:
            return [range(rank * seq_len, (rank + 1) * seq_len)]
        half, last = seq_len // 2, 2 * self.tokens.num_parts - 1
        return [range(place * half, (place + 1) * half) for place in (rank, last - rank)]

    def steps(self) -> int:
        """How often parts are passed on: until nobody needs another one."""
        if self.hidden.span is None:
            return self.tokens.num_parts - 1
        size = self.tokens.num_parts
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
        """Whose keys are here after so many steps."""
        return (self.tokens.rank - step) % self.tokens.num_parts

    def seen(self, rows: range) -> tuple[Tensor, Tensor]:
        """The first key that each row sees, and the one after the last, (B or 1, rows)."""
        hidden = replace(self.hidden, q_offset=torch.tensor([rows.start]))
        return hidden.key_range(len(rows), self.tokens.num_parts * self.seq_len_k)

    def sees(self, rows: range, keys: range) -> bool:
        """Whether any of some rows sees any of some keys."""
        ends = [self.seen(range(row, row + 1)) for row in (rows[0], rows[-1])] if len(rows) and len(keys) else []
        if not ends:
            return False
        (first, _), (_, stop) = ends  # both grow from row to row
        return bool(((first < keys.stop) & (stop > keys.start)).any())

    def mask(self, rows: range, keys: range, device: torch.device) -> Tensor | None:
        """True where a row does not see a key, (B or 1, 1, rows, keys); None if all see all."""
        first, stop = (x.to(device) for x in self.seen(rows))
        if bool(((first <= keys.start) & (stop >= keys.stop)).all()):
            return None
        places = torch.arange(keys.start, keys.stop, device=device)
        return ((places >= stop[..., None]) | (places < first[..., None]))[:, None]


# ---- What moves ------------------------------------------------------------------------------------------------------


class _Transfer:
    """Tensors that are on their way from another process, as others are to one."""

    def __init__(
        self, tokens: RingAttention, sent: Sequence[tuple[Tensor, int]], received: Iterable[tuple[Tensor, int]]
    ):
        operations, self.tensors = [], []
        self.sent = [x.contiguous() for x, _ in sent]  # kept until they are gone
        for x, (_, rank) in zip(self.sent, sent, strict=True):
            operations.append(self._operation(dist.isend, x, tokens, rank))
        for like, rank in received:
            self.tensors.append(torch.empty_like(like, memory_format=torch.contiguous_format))
            operations.append(self._operation(dist.irecv, self.tensors[-1], tokens, rank))
        self.works = dist.batch_isend_irecv(operations) if operations else []

    @staticmethod
    def _operation(which: Any, x: Tensor, tokens: RingAttention, rank: int) -> dist.P2POp:
        return dist.P2POp(which, x, dist.get_global_rank(tokens.group, rank), tokens.group)

    def wait(self) -> list[Tensor]:
        """What has come."""
        for work in self.works:
            work.wait()
        return self.tensors


def _send_next(ring: _Ring, tensors: Sequence[Tensor], by: int = 1) -> _Transfer:
    """To the process so many places ahead, from the one as far behind."""
    rank, size = ring.tokens.rank, ring.tokens.num_parts
    ahead, behind = (rank + by) % size, (rank - by) % size
    return _Transfer(ring.tokens, [(x, ahead) for x in tensors], [(x, behind) for x in tensors])


def _to_zigzag(ring: _Ring, tensors: Sequence[Tensor], *, back: bool = False) -> list[Tensor]:
    """Halves (…, T, ·) of sequences from their order to that of zigzag, or back."""
    rank, size = ring.tokens.rank, ring.tokens.num_parts

    def home(place: int) -> int:
        return min(place, 2 * size - 1 - place)

    in_order, in_zigzag = (2 * rank, 2 * rank + 1), (rank, 2 * size - 1 - rank)
    held, wanted = (in_zigzag, in_order) if back else (in_order, in_zigzag)
    to, whence = (lambda place: place // 2, home) if back else (home, lambda place: place // 2)
    halves = {place: [x.chunk(2, dim=-2)[i] for x in tensors] for i, place in enumerate(held)}
    sent = [(x, to(place)) for place in held if to(place) != rank for x in halves[place]]
    received = [(x, whence(place)) for place in wanted if whence(place) != rank for x in halves[held[0]]]
    come = iter(_Transfer(ring.tokens, sent, received).wait())
    found = [halves[place] if whence(place) == rank else [next(come) for _ in tensors] for place in wanted]
    return [torch.cat(pair, dim=-2) for pair in zip(*found, strict=True)]


# ---- The ring --------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Forward: context and logarithm of the sum of exponentials of each row. Backward: with both of the whole row."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, ring: _Ring, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, table: Tensor | None
    ) -> Tensor:
        dtype = query.dtype
        if ring.is_zigzag:
            query, key, value = _to_zigzag(ring, [query, key, value])
        nonfinite_rows = nonfinite_tokens(query)
        query = zero_where(query, nonfinite_rows)
        context = torch.zeros((*query.shape[:3], value.shape[3]), dtype=at_least_float32(query).dtype)
        context = context.to(query.device)
        lse = torch.full_like(context[..., :1], -torch.inf)
        held, steps = [key, value], ring.steps()
        for step in range(steps + 1):
            moved = _send_next(ring, held) if step < steps else None
            for part in _parts(ring, query, held, ring.source(step)):
                own, own_lse, wrong = _attended(part, table, ring.spec)
                rows = part.rows
                before = context[:, :, rows], lse[:, :, rows]
                context[:, :, rows], lse[:, :, rows] = _joined(*before, own, own_lse)
                nonfinite_rows[:, :, rows] |= wrong
            held = held if moved is None else moved.wait()
        has_key = ~torch.isneginf(lse)
        if sinks is not None:
            total = torch.logaddexp(lse, at_least_float32(sinks)[:, None, None])
            context, lse = context * (lse - total).exp(), torch.where(has_key, total, lse)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, sinks, table, context, lse)
        found = context.masked_fill(nonfinite_rows & has_key, torch.nan)
        return (_to_zigzag(ring, [found], back=True)[0] if ring.is_zigzag else found).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ring: _Ring = ctx.ring
        query, key, value, sinks, table, context, lse = ctx.saved_tensors
        (cotangent,) = cotangents
        if ring.is_zigzag:
            (cotangent,) = _to_zigzag(ring, [cotangent])
        cotangent = at_least_float32(cotangent)
        # Of rows whose output nobody asked for nothing comes back, whatever they hold.
        reduced = torch.where(cotangent == 0, 0.0, cotangent * context).sum(dim=-1, keepdim=True)
        grads = [torch.zeros_like(at_least_float32(x)) for x in (query, key, value)]
        grad_table = None if table is None else torch.zeros_like(at_least_float32(table))
        held, steps = [key, value], ring.steps()
        for step in range(steps + 1):
            moved = _send_next(ring, held) if step < steps else None
            for part in _parts(ring, query, held, ring.source(step)):
                rows, keys = part.rows, part.keys
                of_rows = (x[:, :, rows] for x in (lse, cotangent, reduced))
                *own, own_table = _block_backward(part, table, ring.spec, *of_rows)
                for grad, which, found in zip(grads, (rows, keys, keys), own, strict=True):
                    grad[:, :, which] += found
                if grad_table is not None and own_table is not None:
                    grad_table += own_table
            if moved is not None:
                held = moved.wait()
                grads[1:] = _send_next(ring, grads[1:]).wait()
        if steps:  # what came here is of keys that are so many places behind
            grads[1:] = _send_next(ring, grads[1:], -steps).wait()
        if ring.is_zigzag:
            grads = _to_zigzag(ring, grads, back=True)
        grad_sinks = None
        if sinks is not None:
            lost = (at_least_float32(sinks)[:, None, None] - lse).exp() * reduced
            grad_sinks = -lost.masked_fill(torch.isneginf(lse), 0.0).sum(dim=(0, 2, 3)).to(sinks.dtype)
        of_inputs = [grad.to(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True)]
        return None, *of_inputs, grad_sinks, None if table is None or grad_table is None else grad_table.to(table.dtype)


class _Part(NamedTuple):
    """Some rows of this process, and the keys of a visiting part that they see something of.

    Attributes:
        rows, keys: which they are, of those that the process, and the part, have.
        query, key, value: they themselves.
        mask: True where a row does not see a key; None if all see all.
        offset: the place of the first row among the keys.
    """

    rows: slice
    keys: slice
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    offset: int


def _parts(ring: _Ring, query: Tensor, held: Sequence[Tensor], source: int) -> Iterator[_Part]:
    """What is to be multiplied of the keys and values of a visiting part, a limited number of scores at a time."""
    key, value = held
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


def _scores(part: _Part, query: Tensor, key: Tensor, table: Tensor | None, spec: AttentionSpec | None) -> Tensor:
    q_offset = torch.tensor([part.offset], device=query.device)
    scores = attention_scores(query, key, None, spec, q_offset, table)
    return scores if part.mask is None else scores.masked_fill(part.mask, -torch.inf)


def _finite(part: _Part) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values in at least float32, non-finite keys and values as 0, and which these are."""
    wrong = nonfinite_tokens(part.key) | nonfinite_tokens(part.value)
    key, value = (zero_where(at_least_float32(x), wrong) for x in (part.key, part.value))
    return at_least_float32(part.query), key, value, wrong


def _attended(part: _Part, table: Tensor | None, spec: AttentionSpec | None) -> tuple[Tensor, Tensor, Tensor]:
    """The context of the keys of a part, the logarithm of their sum, and which rows see what is not finite."""
    query, key, value, wrong = _finite(part)
    scores = _scores(part, query, key, table, spec)
    lse = scores.logsumexp(dim=-1, keepdim=True)
    context = attention_context((scores - _known(lse)).exp(), value)
    marked = wrong[..., 0].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return context, lse, attends_to_any(marked, query.shape[2], Mask(part.mask))


def _block_backward(
    part: _Part,
    table: Tensor | None,
    spec: AttentionSpec | None,
    lse: Tensor,
    cotangent: Tensor,
    reduced: Tensor,
) -> list[Any]:
    """Gradients of query, key, value and the table of a relative bias, from the logarithms and contexts of whole rows.

    The weights are exp(score - log) of the whole row; what they are pulled towards is weighed by themselves:
    dS = P * (dP - sum(dO * O)).
    """
    query, key, value, _ = _finite(part)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    leaves += [] if table is None else [table.detach().requires_grad_()]
    with torch.enable_grad():
        scores = _scores(part, leaves[0], leaves[1], leaves[3] if table is not None else None, spec)
        weights = (scores - _known(lse)).exp()
        found = (attention_context(weights, leaves[2]), weights.sum(dim=-1, keepdim=True))
    grads = torch.autograd.grad(found, leaves, (cotangent, -reduced))
    return [*grads, *([None] if table is None else [])]


def _known(lse: Tensor) -> Tensor:
    """Logarithms, and 0 for rows without a key, whose weights are exp(-inf) then."""
    return lse.masked_fill(torch.isneginf(lse), 0.0)


def _joined(context: Tensor, lse: Tensor, own: Tensor, own_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two contexts of the same rows as one, each weighed by its sum."""
    total = torch.logaddexp(lse, own_lse)
    known = _known(total)
    return context * (lse - known).exp() + own * (own_lse - known).exp(), total


# ---- Validation ------------------------------------------------------------------------------------------------------


def check_parts(query: Tensor, key: Tensor, tokens: RingAttention) -> None:
    """Refuse parts that are not of one length: on a CPU, where to ask the other processes takes no time."""
    if query.device.type != "cpu":
        return
    own = torch.tensor([query.shape[0], query.shape[2], key.shape[2]])
    others = [rank for rank in range(tokens.num_parts) if rank != tokens.rank]
    found = {rank: torch.empty_like(own) for rank in others} | {tokens.rank: own}
    whole = {rank: dist.get_global_rank(tokens.group, rank) for rank in others}
    works = [dist.isend(own, whole[rank], tokens.group) for rank in others]
    works += [dist.irecv(found[rank], whole[rank], tokens.group) for rank in others]
    for work in filter(None, works):
        work.wait()
    for index, what in enumerate(("sequences", "queries", "keys")):
        counts = [int(found[rank][index]) for rank in range(tokens.num_parts)]
        if len({*counts}) > 1:
            raise Refusal(what, "be as many on each process where tokens are divided", {what: counts})


def check_known_to_ring(mask: Mask, scores: Scores) -> None:
    """Refuse masks and biases, whose columns would have to go round with the keys, and dropout."""
    unknown = mask.fields_beyond("is_causal", "key_padding_lengths", "span")
    named = {name: getattr(mask, name) for name in unknown} | {"bias": scores.bias}
    for name, given in named.items():
        if given is not None:
            raise Refusal(
                name,
                "be None where tokens are divided; causality, lengths, windows and chunks hold for whole sequences",
                {f"{name}.shape": tuple(given.shape)} if isinstance(given, Tensor) else type(given).__name__,
            )
    if isinstance(scores.buckets, GridBias):
        raise Refusal("relative_bias", "be one of distances where tokens are divided", relative_bias=scores.buckets)
    if scores.products is not None:
        rule = "be None where tokens are divided"
        raise Refusal("relative_products", rule, relative_products=scores.products)
    if scores.dropout or scores.dropout_keep is not None:
        raise Refusal("dropout", "be 0 where tokens are divided (eval() switches it off)", dropout=scores.dropout)
