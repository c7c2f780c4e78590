"""Masks: boolean, True = masked (cannot attend); broadcast to the scores (B, N, T, S)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from mha_jax.arrays import Array
from mha_jax.checks import check_count, check_integers, check_lengths
from mha_jax.compiled import compiled
from mha_spec import AttentionSpec
from mha_spec.heads import BareHeads
from mha_spec.rules import as_pair_of_segments, check_broadcasts
from mha_spec.span import Span, span_of


def create_attention_mask(
    seq_len_q: int,
    seq_len_k: int | None = None,
    *,
    is_causal: bool = False,
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    window_size: int | None = None,
    chunk_size: int | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
) -> Bool[Array, "#B 1 T S"]:
    """Return a mask of the keys that any of the arguments hides from a query.

    Args:
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S; default: T.
        is_causal: hide keys after the query's own position, see `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), see `create_padding_mask`.
        window_size: hide keys that are this many positions away or more, on either side.
        chunk_size: hide keys of other chunks; chunks are this many positions long.
        segment_ids: hide keys of other segments, see `Mask`.

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
    return full_mask.implicit_bool(seq_len_q, seq_len_k)


def _batch_size_of(segments: tuple[Any, ...]) -> int:
    """Return the batch size of ids, which are unchecked; 0 for anything without axes, which
    `_check_segments` then rejects.
    """
    shape = getattr(segments[0], "shape", ())
    if not shape:
        return 0
    return shape[0]


@jax.tree_util.register_dataclass
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

    mask: Bool[Array, "*#scores"] | None = None
    is_causal: bool = field(default=False, metadata={"static": True})
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None
    span: Span | None = field(default=None, metadata={"static": True})
    q_offset: Int[Array, " #B"] | None = None

    def check(self, scores_shape: tuple[int, ...]) -> None:
        """Reject a mask that does not fit the scores (B, N, T, S). `find_padding` checks
        lengths.
        """
        if self.mask is not None:
            check_broadcasts("mask", self.mask.shape, scores_shape)
        if self.segments is not None:
            _check_segments(self.segments, scores_shape[0], *scores_shape[2:])

    @property
    def segments(self) -> tuple[Int[Array, "B T"], Int[Array, "B S"]] | None:
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

    def as_arrays(self) -> "Mask":
        """Return the mask with lengths as an array, for compiled functions."""
        if self.key_padding_lengths is None:
            return self
        return replace(self, key_padding_lengths=jnp.asarray(self.key_padding_lengths, jnp.int32))

    def with_bias(self, bias: Float[Array, "*#scores"] | None) -> "Mask":
        """Fold biases of -inf into the mask, so that rows of -inf count as fully masked."""
        if bias is None:
            return self
        is_hidden = jnp.isneginf(bias)
        if self.mask is not None:
            is_hidden = to_scores_rank(self.mask) | to_scores_rank(is_hidden)
        return replace(self, mask=is_hidden)

    def to_bool(self, seq_len_q: int, seq_len_k: int) -> Bool[Array, "..."] | None:
        """Return the boolean mask, including causality, padding, span and segments; None if nothing
        is hidden.
        """
        if self.has_only("mask", "q_offset"):
            return self.mask
        hidden = self.implicit_bool(seq_len_q, seq_len_k)
        if self.mask is None:
            return hidden
        return hidden | to_scores_rank(self.mask)

    def implicit_bool(self, seq_len_q: int, seq_len_k: int) -> Bool[Array, "#B 1 T S"]:
        """Return the boolean mask of causality, padding, span and segments, even of zero tokens."""
        return _implicit_bool(replace(self.as_arrays(), mask=None), seq_len_q, seq_len_k)

    def key_range(
        self, seq_len_q: int, seq_len_k: int
    ) -> tuple[Int[Array, "#B T"], Int[Array, "#B T"]]:
        """Return each query's first key under causality, padding and span, and the one after its
        last.

        Both may lie outside 0..S. Clipped to it, a first key that is not before the end means a
        fully masked row. Segments may hide more keys in between.
        """
        lengths: Any = self.as_arrays().key_padding_lengths
        positions = _positions(seq_len_q)[None]  # (B or 1, T)
        if self.q_offset is not None:
            positions = self.q_offset[:, None] + positions
        first = jnp.zeros_like(positions)
        if self.is_causal:
            stop = positions + 1
        else:
            stop = jnp.full_like(positions, seq_len_k)
        if lengths is not None:
            stop = jnp.minimum(stop, lengths[:, None])
        if self.span is not None:
            first = self.span.first(positions)
            stop = jnp.minimum(stop, self.span.stop(positions))
        return first, stop


def to_scores_rank(x: Array) -> Array:
    """Return x with leading axes of size 1, so that it has the four axes of the scores."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


# Compiled, so that only the mask is stored, which may be large, without intermediate results.
@compiled("seq_len_q", "seq_len_k")
def _implicit_bool(mask: Mask, seq_len_q: int, seq_len_k: int) -> Array:
    first, stop = mask.key_range(seq_len_q, seq_len_k)
    keys = _positions(seq_len_k)[None, None, None]
    hidden = keys >= stop[:, None, :, None]
    if mask.span is not None:  # without a span one comparison suffices
        hidden = hidden | (keys < first[:, None, :, None])
    if mask.segments is not None:
        query_ids, key_ids = mask.segments
        hidden = hidden | (query_ids[:, None, :, None] != key_ids[:, None, None, :])
    return hidden


def _positions(seq_len: int) -> Int[Array, " L"]:
    return jnp.arange(seq_len, dtype=jnp.int32)


def _check_segments(
    segments: tuple[Array, Array], batch_size: int, seq_len_q: int, seq_len_k: int
) -> None:
    """Reject segments that are not integers (B, T), or a pair (B, T) of queries and (B, S) of
    keys.
    """
    for ids, axes, seq_len in zip(
        segments, ("(B, T)", "(B, S)"), (seq_len_q, seq_len_k), strict=True
    ):
        shape = (batch_size, seq_len)
        check_integers("segment_ids", ids, [shape], f"{axes} = {shape}")
