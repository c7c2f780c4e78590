"""Masks: boolean, True = masked (cannot attend), and they broadcast against the scores (B, N, T, S)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mha_jax.arrays import check_array, check_broadcasts, check_count, check_lengths
from mha_jax.compiled import compiled
from mha_jax.relative_bias import check_relative_bias
from mha_spec import AttentionSpec, Refusal, WrongType
from mha_spec.attention import check_spec
from mha_spec.reach import Reach, reach_of


def create_causal_mask(seq_len_q: int, seq_len_k: int | None = None) -> Bool[Array, "T S"]:
    """True where a query may not see a key: every key after its own position, counted from the first key.

    Aligned top-left: query i sees keys 0..i, however many keys there are.

    Args:
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S; as many as queries when absent.

    Returns:
        Mask that broadcasts against the scores (B, N, T, S).

    Raises:
        ValueError: if a length is below 1.

    Example: create_causal_mask(2, 3)
        [[False, True,  True],
         [False, False, True]]
    """
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    check_count("seq_len_q", seq_len_q)
    check_count("seq_len_k", seq_len_k)
    return _hides_later(seq_len_q, seq_len_k)


def create_padding_mask(lengths: Int[Array, " B"] | Sequence[int], seq_len_k: int) -> Bool[Array, "B 1 1 S"]:
    """True at the padding: the keys at or after the length of their sequence.

    Args:
        lengths: number of real keys of each sequence, 0..S, (B,); the padding is on the right.
        seq_len_k: number of keys, padding included, S.

    Returns:
        Mask that broadcasts against the scores (B, N, T, S).

    Raises:
        TypeError: if the lengths are not integers.
        ValueError: if a length lies outside 0..S.

    Example: create_padding_mask([1, 3], 3)
        [[[[False, True,  True ]]],
         [[[False, False, False]]]]
    """
    check_count("seq_len_k", seq_len_k)
    check_lengths("lengths", lengths, None, seq_len_k)
    return _hides_padding(jnp.asarray(lengths, jnp.int32), seq_len_k)


def create_attention_mask(
    seq_len_q: int,
    seq_len_k: int | None = None,
    *,
    is_causal: bool = False,
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    window_size: int | None = None,
    chunk_size: int | None = None,
) -> Bool[Array, "#B 1 T S"]:
    """True where a query may not see a key, for causality, for padding, for a window or a chunk.

    Args:
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S; as many as queries when absent.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
        window_size: hide every key this many places away, or more, on either side.
        chunk_size: hide every key of another chunk, the chunks being so many places long.

    Returns:
        Mask of shape (B or 1, 1, T, S).

    Raises:
        TypeError: if the lengths are not integers.
        ValueError: if a length lies outside its range, or there are both a window and chunks.

    Example: create_attention_mask(2, is_causal=True, key_padding_lengths=[1])
        [[[[False, True],
           [False, True]]]]
    """
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    check_count("seq_len_q", seq_len_q)
    check_count("seq_len_k", seq_len_k)
    if key_padding_lengths is not None:
        check_lengths("key_padding_lengths", key_padding_lengths, None, seq_len_k)
    reach = reach_of(window_size, chunk_size)
    return Masking(None, None, is_causal, key_padding_lengths, reach).hidden(seq_len_q, seq_len_k)


def create_causal_mask_with_cache(seq_len_q: int, seq_len_k: int, cache_len: int) -> Bool[Array, "T S"]:
    """True where a new token may not see a key: every key after its own position, counted from the first cached key.

    Aligned to the end of the cache: the queries are the newest tokens, at positions cache_len, cache_len + 1, …,
    and query i sees keys 0..cache_len + i.

    Args:
        seq_len_q: number of new tokens, T.
        seq_len_k: number of keys, S = cache_len + T.
        cache_len: number of tokens already in the cache.

    Returns:
        Mask that broadcasts against the scores (B, N, T, S).

    Raises:
        ValueError: if seq_len_k is not cache_len + seq_len_q.

    Example: create_causal_mask_with_cache(2, 3, 1)
        [[False, False, True ],
         [False, False, False]]
    """
    check_count("seq_len_q", seq_len_q)
    check_count("seq_len_k", seq_len_k)
    check_count("cache_len", cache_len, minimum=0)
    if seq_len_k != cache_len + seq_len_q:
        raise Refusal(
            "seq_len_k", "be cache_len + seq_len_q", seq_len_k=seq_len_k, cache_len=cache_len, seq_len_q=seq_len_q
        )
    return _hides_later(seq_len_q, seq_len_k, first=cache_len)


def create_sliding_window_mask(seq_len_q: int, seq_len_k: int | None = None, *, window_size: int) -> Bool[Array, "T S"]:
    """True where a query may not see a key: every key but the last window_size up to its own position.

    Aligned top-left: query i sees keys i - window_size + 1..i. With window_size >= S it is the causal mask.

    Args:
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S; as many as queries when absent.
        window_size: how many keys a query sees at most, its own position among them.

    Returns:
        Mask that broadcasts against the scores (B, N, T, S).

    Raises:
        ValueError: if a length or the window is below 1.

    Example: create_sliding_window_mask(3, window_size=2)
        [[False, True,  True ],
         [False, False, True ],
         [True,  False, False]]

    Source: Longformer, arXiv:2004.05150, section 3.1; causal as in Mistral 7B, arXiv:2310.06825, section 2.
    """
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    check_count("seq_len_q", seq_len_q)
    check_count("seq_len_k", seq_len_k)
    check_count("window_size", window_size)
    return _hides_later(seq_len_q, seq_len_k, window_size=window_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # arrays have no single truth value to compare by
class Masking:
    """What hides keys from queries and what is added to their scores: one value behind the functions that users call.

    Attributes:
        mask: boolean, True = masked; broadcasts to (B, N, T, S).
        bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key.
        is_causal: hide every key after the query's own position.
        key_padding_lengths: number of real keys of each sequence, (B,).
        reach: how far a query sees, where that is less than everything.
        offsets: place of the first query among the keys, of every sequence or of each, (1,) or (B,); 0 when absent.
        sinks: the logit of each head that takes part in the softmax and has no value, (N,).
        relative_bias: what scores gain for the distance of their keys, of each bucket and head, (num_buckets, N).
    """

    mask: Bool[Array, "..."] | None = None
    bias: Float[Array, "..."] | None = None
    is_causal: bool = field(default=False, metadata={"static": True})
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None
    reach: Reach | None = field(default=None, metadata={"static": True})
    offsets: Int[Array, " B"] | None = None
    sinks: Float[Array, " N"] | None = None
    relative_bias: Float[Array, "buckets N"] | None = None

    def check(self, scores_shape: tuple[int, ...], query: Array) -> None:
        """Refuse what does not fit the scores (B, N, T, S), or their queries."""
        check_mask(self.mask, scores_shape)
        check_bias(self.bias, scores_shape, query)
        if self.key_padding_lengths is not None:
            check_lengths("key_padding_lengths", self.key_padding_lengths, scores_shape[0], scores_shape[3])
        check_sinks(self.sinks, scores_shape[1])

    @property
    def may_hide(self) -> bool:
        """Whether a key may be hidden from a query."""
        return self.is_causal or any(
            x is not None for x in (self.mask, self.bias, self.key_padding_lengths, self.reach)
        )

    def of_layer(self, spec: AttentionSpec | None) -> "Masking":
        """The same with what a layer hides by itself.

        Raises:
            ValueError: if there are sinks or a relative bias and the layer has none, or the other way round.
        """
        if spec is not None:
            check_spec(spec)
            if spec.sinks != (self.sinks is not None):
                raise Refusal("sinks", "be given where the spec has them", {"spec.sinks": spec.sinks})
            check_relative_bias(self.relative_bias, spec.relative_bias, spec.num_heads)
        return self if spec is None or spec.reach is None else replace(self, reach=spec.reach)

    def with_weights(self, weights: Mapping[str, Any]) -> "Masking":
        """The same with what a layer has learned of its scores: sinks, and a relative bias."""
        return replace(self, sinks=weights.get("sinks"), relative_bias=weights.get("relative_bias"))

    def as_arrays(self) -> "Masking":
        """The same with the lengths as an array, which compiled functions take."""
        if self.key_padding_lengths is None:
            return self
        return replace(self, key_padding_lengths=jnp.asarray(self.key_padding_lengths, jnp.int32))

    def with_infinite_bias(self) -> "Masking":
        """The same with the keys that a bias of -inf hides in the mask: a row of -inf is as empty as a masked one."""
        if self.bias is None:
            return self
        is_hidden = jnp.isneginf(self.bias)
        return replace(
            self, mask=is_hidden if self.mask is None else to_scores_rank(self.mask) | to_scores_rank(is_hidden)
        )

    def joined(self, seq_len_q: int, seq_len_k: int) -> Bool[Array, "..."] | None:
        """The mask, joined with what causality, padding and reach hide; None if nothing is hidden."""
        if not self.is_causal and self.key_padding_lengths is None and self.reach is None:
            return self.mask
        hidden = self.hidden(seq_len_q, seq_len_k)
        return hidden if self.mask is None else hidden | to_scores_rank(self.mask)

    def hidden(self, seq_len_q: int, seq_len_k: int) -> Bool[Array, "#B 1 T S"]:
        """What causality, padding and reach hide, of zero tokens too: all but the keys from a first one to a last."""
        lengths: Any = self.as_arrays().key_padding_lengths
        return _hidden(seq_len_q, seq_len_k, lengths, self.offsets, is_causal=self.is_causal, reach=self.reach)

    def seen_keys(self, seq_len_q: int, seq_len_k: int) -> tuple[Int[Array, "#B T"], Int[Array, "#B T"]]:
        """The first key that causality, padding and reach show each query, and the one after the last.

        They may lie before and behind the keys there are; where the first one is not before the other, none is seen.
        """
        lengths: Any = self.as_arrays().key_padding_lengths
        places = _positions(seq_len_q)[None]  # (B or 1, T)
        if self.offsets is not None:
            places = self.offsets[:, None] + places
        first, stop = jnp.zeros_like(places), places + 1 if self.is_causal else jnp.full_like(places, seq_len_k)
        if lengths is not None:
            stop = jnp.minimum(stop, lengths[:, None])
        if self.reach is not None:
            first, stop = self.reach.first(places), jnp.minimum(stop, self.reach.stop(places))
        return first, stop


def to_scores_rank(x: Array) -> Array:
    """x with leading axes of length 1, so that it has the four axes of the scores."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


# Compiled, so that of all that is compared nothing but the mask is stored: it may be large.


@compiled("seq_len_q", "seq_len_k", "first", "window_size")
def _hides_later(seq_len_q: int, seq_len_k: int, *, first: int = 0, window_size: int | None = None) -> Array:
    distance = first + _positions(seq_len_q)[:, None] - _positions(seq_len_k)[None, :]
    return distance < 0 if window_size is None else (distance < 0) | (distance >= window_size)


@compiled("seq_len_k")
def _hides_padding(lengths: Array, seq_len_k: int) -> Array:
    return (_positions(seq_len_k)[None, :] >= lengths[:, None])[:, None, None, :]


@compiled("seq_len_q", "seq_len_k", "is_causal", "reach")
def _hidden(
    seq_len_q: int,
    seq_len_k: int,
    lengths: Array | None,
    offsets: Array | None,
    *,
    is_causal: bool,
    reach: Reach | None,
) -> Array:
    masking = Masking(None, None, is_causal, lengths, reach, offsets=offsets)
    first, stop = masking.seen_keys(seq_len_q, seq_len_k)
    keys = _positions(seq_len_k)[None, None, None]
    hidden = keys >= stop[:, None, :, None]
    return hidden if reach is None else hidden | (keys < first[:, None, :, None])


def _positions(seq_len: int) -> Int[Array, " L"]:
    return jnp.arange(seq_len, dtype=jnp.int32)


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_mask(mask: Array | None, scores_shape: tuple[int, ...]) -> None:
    """Refuse a mask that is not boolean or does not broadcast to the scores (B, N, T, S)."""
    if mask is None:
        return
    check_array("mask", mask)
    if mask.dtype != jnp.bool_:
        raise WrongType(
            "mask", "be boolean (True = masked)", {"mask.dtype": mask.dtype}, hint="an additive term is passed as bias"
        )
    check_broadcasts("mask", mask.shape, scores_shape)


def check_bias(bias: Array | None, scores_shape: tuple[int, ...], query: Array) -> None:
    """Refuse a bias that does not fit the queries, or does not broadcast to the scores (B, N, T, S)."""
    if bias is None:
        return
    check_array("bias", bias)
    if bias.dtype != query.dtype:
        raise WrongType("bias", "have the dtype of query", {"bias.dtype": bias.dtype, "query.dtype": query.dtype})
    check_broadcasts("bias", bias.shape, scores_shape)


def check_sinks(sinks: Array | None, num_heads: int) -> None:
    """Refuse sinks that are not a number for each head."""
    if sinks is None:
        return
    check_array("sinks", sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise WrongType("sinks", "be floating point", {"sinks.dtype": sinks.dtype})
    if sinks.shape != (num_heads,):
        raise Refusal("sinks", f"have shape (N,) = ({num_heads},)", {"sinks.shape": sinks.shape})
