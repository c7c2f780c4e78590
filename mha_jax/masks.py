"""Masks: boolean, True = masked (cannot attend), and they broadcast against the scores (B, N, T, S)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mha_jax.checks import check_count, check_integers, check_lengths, check_mask
from mha_jax.compiled import compiled
from mha_spec import AttentionSpec, Refusal
from mha_spec.attention import check_spec
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
    """True where a query may not see a key, by any of the arguments.

    Args:
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S; default: as many as queries.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
        window_size: hide every key this many places away, or more, on either side.
        chunk_size: hide every key of another chunk, the chunks being so many places long.
        segment_ids: hide every key of another segment, as `MaskKeywords` says.

    Raises:
        TypeError: if the lengths or the ids are not integers.
        ValueError: if a length lies outside its range, the ids do not fit, or there are both a window and chunks.

    Example: create_attention_mask(2, is_causal=True, key_padding_lengths=[1])
        [[[[False, True],
           [False, True]]]]
    """
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    check_count("seq_len_q", seq_len_q)
    check_count("seq_len_k", seq_len_k)
    span, batch_size = span_of(window_size, chunk_size), None
    visible = Mask(None, is_causal, key_padding_lengths, span, segment_ids=segment_ids)
    if visible.segments is not None:
        batch_size = next(iter(getattr(next(iter(visible.segments), None), "shape", ())), 0)
        _check_segments(visible.segments, batch_size, seq_len_q, seq_len_k)
    if key_padding_lengths is not None:
        check_lengths("key_padding_lengths", key_padding_lengths, batch_size, seq_len_k)
    return visible.implicit_bool(seq_len_q, seq_len_k)


class MaskKeywords(TypedDict, total=False):
    """Keywords of a call that hide keys from queries; a key is hidden if any of them hides it.

    Attributes:
        mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
        segment_ids: segment of each token, (B, T): hide every key whose id is not the query's. A pair where keys
            have others: (B, T) of the queries and (B, S) of the keys.
    """

    mask: Bool[Array, "..."] | None
    is_causal: bool
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # arrays have no single truth value to compare by
class Mask:
    """Keys that each query may not attend to, in whichever form they were told.

    Attributes:
        mask, is_causal, key_padding_lengths, segment_ids: as `MaskKeywords` has them.
        span: attention span of the layer, a window or chunks; None for all keys.
        q_offset: position of the first query among the keys, of every sequence or of each, (1,) or (B,); 0 by default.
    """

    mask: Bool[Array, "..."] | None = None
    is_causal: bool = field(default=False, metadata={"static": True})
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None
    span: Span | None = field(default=None, metadata={"static": True})
    q_offset: Int[Array, " B"] | None = None
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None

    def check(self, scores_shape: tuple[int, ...]) -> None:
        """Refuse a mask that does not fit the scores (B, N, T, S)."""
        check_mask(self.mask, scores_shape)
        if self.key_padding_lengths is not None:
            check_lengths("key_padding_lengths", self.key_padding_lengths, scores_shape[0], scores_shape[3])
        if self.segments is not None:
            _check_segments(self.segments, scores_shape[0], *scores_shape[2:])

    @classmethod
    def of(cls, keywords: MaskKeywords) -> "Mask":
        """Return the mask of a call with these keywords."""
        for name in keywords:
            if name not in MaskKeywords.__annotations__:
                raise TypeError(f"attention got an unexpected keyword argument {name!r}")
        return cls(**keywords)

    @property
    def segments(self) -> tuple[Int[Array, "B T"], Int[Array, "B S"]] | None:
        """The segments of the queries, (B, T), and of the keys, (B, S)."""
        ids = self.segment_ids
        return ids if ids is None or isinstance(ids, tuple) else (ids, ids)

    def fields_beyond(self, *known: str) -> list[str]:
        """Return the names of the other fields in use: kernels ask, so that none ignores a field by mistake."""
        return [name for name, x in vars(self).items() if x is not None and x is not False and name not in known]

    def has_only(self, *known: str) -> bool:
        """Return whether no field but these is in use."""
        return not self.fields_beyond(*known)

    @property
    def is_trivial(self) -> bool:
        """True if every query attends to every key."""
        return self.has_only("q_offset")

    def within(self, spec: AttentionSpec | None) -> "Mask":
        """Return the mask with the attention span of a layer."""
        if spec is None:
            return self
        check_spec(spec)
        return self if spec.span is None else replace(self, span=spec.span)

    def as_arrays(self) -> "Mask":
        """Return the mask with its lengths as an array, which compiled functions take."""
        if self.key_padding_lengths is None:
            return self
        return replace(self, key_padding_lengths=jnp.asarray(self.key_padding_lengths, jnp.int32))

    def with_bias(self, bias: Float[Array, "..."] | None) -> "Mask":
        """Return the mask with the keys that a bias of -inf hides: a row of -inf is a fully masked row."""
        if bias is None:
            return self
        is_hidden = jnp.isneginf(bias)
        return replace(
            self, mask=is_hidden if self.mask is None else to_scores_rank(self.mask) | to_scores_rank(is_hidden)
        )

    def to_bool(self, seq_len_q: int, seq_len_k: int) -> Bool[Array, "..."] | None:
        """Return the boolean mask, with what causality, padding, span and segments hide; None if nothing is hidden."""
        if self.has_only("mask", "q_offset"):
            return self.mask
        hidden = self.implicit_bool(seq_len_q, seq_len_k)
        return hidden if self.mask is None else hidden | to_scores_rank(self.mask)

    def implicit_bool(self, seq_len_q: int, seq_len_k: int) -> Bool[Array, "#B 1 T S"]:
        """Return what causality, padding, span and segments hide, of zero tokens too."""
        return _implicit_bool(replace(self.as_arrays(), mask=None), seq_len_q, seq_len_k)

    def key_range(self, seq_len_q: int, seq_len_k: int) -> tuple[Int[Array, "#B T"], Int[Array, "#B T"]]:
        """Return the first key that causality, padding and span leave each query, and the one after the last.

        They may lie before and behind the keys there are. A row whose first key is not before its last is fully masked.
        Segments hide keys between them, too.
        """
        lengths: Any = self.as_arrays().key_padding_lengths
        places = _positions(seq_len_q)[None]  # (B or 1, T)
        if self.q_offset is not None:
            places = self.q_offset[:, None] + places
        first, stop = jnp.zeros_like(places), places + 1 if self.is_causal else jnp.full_like(places, seq_len_k)
        if lengths is not None:
            stop = jnp.minimum(stop, lengths[:, None])
        if self.span is not None:
            first, stop = self.span.first(places), jnp.minimum(stop, self.span.stop(places))
        return first, stop


def to_scores_rank(x: Array) -> Array:
    """x with leading axes of length 1, so that it has the four axes of the scores."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


# Compiled, so that of all that is compared nothing but the mask is stored: it may be large.
@compiled("seq_len_q", "seq_len_k")
def _implicit_bool(mask: Mask, seq_len_q: int, seq_len_k: int) -> Array:
    first, stop = mask.key_range(seq_len_q, seq_len_k)
    keys = _positions(seq_len_k)[None, None, None]
    hidden = keys >= stop[:, None, :, None]
    hidden = hidden if mask.span is None else hidden | (keys < first[:, None, :, None])
    if mask.segments is None:
        return hidden
    of_queries, of_keys = mask.segments
    return hidden | (of_queries[:, None, :, None] != of_keys[:, None, None, :])


def _positions(seq_len: int) -> Int[Array, " L"]:
    return jnp.arange(seq_len, dtype=jnp.int32)


def _check_segments(segments: tuple[Array, Array], batch_size: int, seq_len_q: int, seq_len_k: int) -> None:
    """Refuse segments that are not integers (B, T), or a pair of these, of the queries and of the keys, (B, S)."""
    if len(segments) != 2:
        raise Refusal("segment_ids", "be ids or a pair of them, of queries and of keys", f"{len(segments)} in a tuple")
    for ids, axes, seq_len in zip(segments, ("(B, T)", "(B, S)"), (seq_len_q, seq_len_k), strict=True):
        shape = (batch_size, seq_len)
        check_integers("segment_ids", ids, [shape], f"{axes} = {shape}")
