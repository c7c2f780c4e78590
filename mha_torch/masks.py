"""Masks: boolean, True = masked (cannot attend); broadcast to the scores (B, N, T, S)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_spec import AttentionSpec
from mha_spec.heads import BareHeads
from mha_spec.rules import as_pair_of_segments, check_broadcasts
from mha_spec.span import Span, span_of
from mha_torch.checks import check_count, check_device, check_integers, check_lengths


def create_attention_mask(
    seq_len_q: int,
    seq_len_k: int | None = None,
    *,
    is_causal: bool = False,
    key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    window_size: int | None = None,
    chunk_size: int | None = None,
    segment_ids: Int[Tensor, "B T"] | tuple[Int[Tensor, "B T"], Int[Tensor, "B S"]] | None = None,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "#B 1 T S"]:
    """Return a mask of the keys that any of the arguments hides from a query.

    Args:
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S; default: T.
        is_causal: hide keys after the query's own position, see `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), see `create_padding_mask`.
        window_size: hide keys that are this many positions away or more, on either side.
        chunk_size: hide keys of other chunks; chunks are this many positions long.
        segment_ids: hide keys of other segments, see `Mask`.
        device: device of the mask.

    Raises:
        TypeError: if the lengths or the ids are not integers.
        ValueError: if a length lies outside its range, the ids do not fit, or both a window and
            chunks are set.

    Example: create_attention_mask(2, is_causal=True, key_padding_lengths=[1])
        [[[[False, True],
           [False, True]]]]
    """
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    check_count("seq_len_q", seq_len_q)
    check_count("seq_len_k", seq_len_k)
    span = span_of(window_size, chunk_size)
    batch_size = None
    full_mask = Mask(None, is_causal, key_padding_lengths, segment_ids, span)
    if full_mask.segments is not None:
        batch_size = _batch_size_of(full_mask.segments)
        _check_segments(full_mask.segments, batch_size, seq_len_q, seq_len_k)
    if key_padding_lengths is not None:
        check_lengths("key_padding_lengths", key_padding_lengths, batch_size, seq_len_k)
    return full_mask.implicit_bool(seq_len_q, seq_len_k, device)


def _batch_size_of(segments: tuple[Any, ...]) -> int:
    """Return the batch size of ids, which are unchecked; 0 for anything without axes, which
    `_check_segments` then rejects.
    """
    shape = getattr(segments[0], "shape", ())
    if not shape:
        return 0
    return shape[0]


@dataclass(frozen=True, eq=False)  # comparing arrays yields no single truth value
class Mask:
    """Keys that each query cannot attend to, as an array or in implicit form; any attribute
    suffices to hide a key.

    Attributes:
        mask: boolean, True = masked; broadcasts to (B, N, T, S). The output of a fully masked row
            is 0.
        is_causal: hide keys after the query's own position, see `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), see `create_padding_mask`.
        segment_ids: segment of each token, (B, T): hide keys whose id is not the query's. A pair if
            keys have different ids: (B, T) of the queries and (B, S) of the keys.
        span: attention span of the layer, a window or chunks; None for all keys.
        q_offset: position of the first query among the keys, for all sequences or each, (1,) or
            (B,); default: 0.
    """

    mask: Bool[Tensor, "*#scores"] | None = None
    is_causal: bool = False
    key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None
    segment_ids: Int[Tensor, "B T"] | tuple[Int[Tensor, "B T"], Int[Tensor, "B S"]] | None = None
    span: Span | None = None
    q_offset: Int[Tensor, " #B"] | None = None

    def check(self, scores_shape: tuple[int, ...], query: Tensor) -> None:
        """Reject a mask that does not fit the scores (B, N, T, S) or their queries. `find_padding`
        checks lengths.
        """
        if self.mask is not None:
            check_broadcasts("mask", tuple(self.mask.shape), scores_shape)
            check_device("mask", self.mask, query.device, "query")
        if self.segments is not None:
            _check_segments(self.segments, scores_shape[0], *scores_shape[2:])
            for ids in self.segments:
                check_device("segment_ids", ids, query.device, "query")

    @property
    def segments(self) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B S"]] | None:
        """Segments of the queries, (B, T), and of the keys, (B, S).

        Raises:
            ValueError: if `segment_ids` is a tuple that is not a pair.
        """
        if self.segment_ids is None:
            return None
        return as_pair_of_segments(self.segment_ids)

    def fields_beyond(self, *known: str) -> list[str]:
        """Return the names of other fields in use, so that kernels can reject fields they do not
        support.
        """
        names = []
        for name, x in vars(self).items():
            if x is not None and x is not False and name not in known:
                names.append(name)
        return names

    def has_only(self, *known: str) -> bool:
        """Return whether no other field is in use."""
        return not self.fields_beyond(*known)

    def within(self, spec: AttentionSpec | BareHeads) -> "Mask":
        """Return the mask with the attention span of a layer."""
        if spec.span is None:
            return self
        return replace(self, span=spec.span)

    def with_bias(self, bias: Float[Tensor, "*#scores"] | None) -> "Mask":
        """Fold biases of -inf into the mask, so that rows of -inf count as fully masked."""
        if bias is None:
            return self
        is_hidden = torch.isneginf(bias)
        if self.mask is not None:
            is_hidden = self.mask | is_hidden
        return replace(self, mask=is_hidden)

    def to_bool(
        self, seq_len_q: int, seq_len_k: int, device: torch.device | str | None = None
    ) -> Bool[Tensor, "..."] | None:
        """Return the boolean mask, including causality, padding, span and segments; None if nothing
        is hidden.
        """
        if self.has_only("mask", "q_offset"):
            return self.mask
        hidden = self.implicit_bool(seq_len_q, seq_len_k, device)
        if self.mask is None:
            return hidden
        return hidden | self.mask

    def block(self, rows: slice, keys: slice) -> "Mask":
        """Return the mask of a block of queries and keys."""
        lengths = self.key_padding_lengths
        q_offset = as_lengths([0] if self.q_offset is None else self.q_offset)
        if lengths is not None:
            lengths = (as_lengths(lengths) - keys.start).clamp(min=0)
        segments = self.segments
        if segments is not None:
            segments = segments[0][:, rows], segments[1][:, keys]
        return replace(
            self,
            mask=block_of(self.mask, rows, keys),
            key_padding_lengths=lengths,
            q_offset=q_offset + (rows.start - keys.start),
            segment_ids=segments,
        )

    def implicit_bool(
        self, seq_len_q: int, seq_len_k: int, device: torch.device | str | None = None
    ) -> Bool[Tensor, "#B 1 T S"]:
        """Return the boolean mask of causality, padding, span and segments, even of zero tokens."""
        if device is None and self.segments is not None:
            device = self.segments[0].device
        first, stop = self.key_range(seq_len_q, seq_len_k, device)
        keys = _positions(seq_len_k, stop.device)
        hidden = keys >= stop[:, None, :, None]
        if self.span is not None:  # without a span one comparison and one mask in memory suffice
            hidden = hidden.logical_or_(keys < first[:, None, :, None])
        if self.segments is None:
            return hidden
        query_ids, key_ids = (ids.to(stop.device) for ids in self.segments)
        return hidden | (query_ids[:, None, :, None] != key_ids[:, None, None, :])

    def key_range(
        self, seq_len_q: int, seq_len_k: int, device: torch.device | str | None = None
    ) -> tuple[Int[Tensor, "#B T"], Int[Tensor, "#B T"]]:
        """Return each query's first key under causality, padding and span, and the one after its
        last.

        Both may lie outside 0..S. Clipped to it, a first key that is not before the end means a
        fully masked row. Segments may hide more keys in between.
        """
        if self.key_padding_lengths is None:
            lengths = None
        else:
            lengths = as_lengths(self.key_padding_lengths, device)
            device = lengths.device
        positions = _positions(seq_len_q, device)[None]  # (B or 1, T)
        if self.q_offset is not None:
            positions = self.q_offset.to(positions)[:, None] + positions
        first = torch.zeros_like(positions)
        if self.is_causal:
            stop = positions + 1
        else:
            stop = torch.full_like(positions, seq_len_k)
        if lengths is not None:
            stop = torch.minimum(stop, lengths[:, None])
        if self.span is not None:
            first = self.span.first(positions)
            stop = torch.minimum(stop, self.span.stop(positions))
        return first, stop


def block_of(
    x: Float[Tensor, "..."] | Bool[Tensor, "..."] | None, rows: slice, keys: slice
) -> Tensor | None:
    """Return the block of some queries and keys of an array that broadcasts to the scores."""
    if x is None or x.ndim == 0:
        return x
    if x.shape[-1] > 1:
        x = x[..., keys]
    if x.ndim > 1 and x.shape[-2] > 1:
        return x[..., rows, :]
    return x


def as_lengths(
    lengths: Tensor | Sequence[int], device: torch.device | str | None = None
) -> Int[Tensor, " B"]:
    """Return lengths as an array, even for zero sequences."""
    return torch.as_tensor(lengths, dtype=torch.int64, device=device)


def _positions(seq_len: int, device: torch.device | str | None) -> Int[Tensor, " L"]:
    return torch.arange(seq_len, device=device)


def _check_segments(
    segments: tuple[Tensor, Tensor], batch_size: int, seq_len_q: int, seq_len_k: int
) -> None:
    """Reject segments that are not integers (B, T), or a pair (B, T) of queries and (B, S) of
    keys.
    """
    for ids, axes, seq_len in zip(
        segments, ("(B, T)", "(B, S)"), (seq_len_q, seq_len_k), strict=True
    ):
        shape = (batch_size, seq_len)
        check_integers("segment_ids", ids, [shape], f"{axes} = {shape}")
