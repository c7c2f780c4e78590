"""Masks: boolean, True = masked (cannot attend), and they broadcast against the scores (B, N, T, S)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_spec import AttentionSpec, Refusal, WrongType
from mha_spec.attention import check_spec
from mha_spec.reach import Reach, reach_of
from mha_torch.arrays import (
    check_array,
    check_broadcasts,
    check_count,
    check_device,
    check_lengths,
    is_autocast_on,
)
from mha_torch.relative_bias import check_relative_bias


def create_causal_mask(
    seq_len_q: int, seq_len_k: int | None = None, *, device: torch.device | str | None = None
) -> Bool[Tensor, "T S"]:
    """True where a query may not see a key: every key after its own position, counted from the first key.

    Aligned top-left: query i sees keys 0..i, however many keys there are.

    Args:
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S; as many as queries when absent.
        device: where the mask lies.

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
    return _positions(seq_len_k, device)[None, :] > _positions(seq_len_q, device)[:, None]


def create_padding_mask(
    lengths: Int[Tensor, " B"] | Sequence[int], seq_len_k: int, *, device: torch.device | str | None = None
) -> Bool[Tensor, "B 1 1 S"]:
    """True at the padding: the keys at or after the length of their sequence.

    Args:
        lengths: number of real keys of each sequence, 0..S, (B,); the padding is on the right.
        seq_len_k: number of keys, padding included, S.
        device: where the mask lies; by default where `lengths` lies.

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
    lengths = as_lengths(lengths, device)
    return _positions(seq_len_k, lengths.device) >= lengths[:, None, None, None]


def create_attention_mask(
    seq_len_q: int,
    seq_len_k: int | None = None,
    *,
    is_causal: bool = False,
    key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    window_size: int | None = None,
    chunk_size: int | None = None,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "#B 1 T S"]:
    """True where a query may not see a key, for causality, for padding, for a window or a chunk.

    Args:
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S; as many as queries when absent.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
        window_size: hide every key this many places away, or more, on either side.
        chunk_size: hide every key of another chunk, the chunks being so many places long.
        device: where the mask lies.

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
    return Masking(None, None, is_causal, key_padding_lengths, reach).hidden(seq_len_q, seq_len_k, device)


def create_causal_mask_with_cache(
    seq_len_q: int, seq_len_k: int, cache_len: int, *, device: torch.device | str | None = None
) -> Bool[Tensor, "T S"]:
    """True where a new token may not see a key: every key after its own position, counted from the first cached key.

    Aligned to the end of the cache: the queries are the newest tokens, at positions cache_len, cache_len + 1, …,
    and query i sees keys 0..cache_len + i.

    Args:
        seq_len_q: number of new tokens, T.
        seq_len_k: number of keys, S = cache_len + T.
        cache_len: number of tokens already in the cache.
        device: where the mask lies.

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
    return _positions(seq_len_k, device)[None, :] > cache_len + _positions(seq_len_q, device)[:, None]


def create_sliding_window_mask(
    seq_len_q: int, seq_len_k: int | None = None, *, window_size: int, device: torch.device | str | None = None
) -> Bool[Tensor, "T S"]:
    """True where a query may not see a key: every key but the last window_size up to its own position.

    Aligned top-left: query i sees keys i - window_size + 1..i. With window_size >= S it is the causal mask.

    Args:
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S; as many as queries when absent.
        window_size: how many keys a query sees at most, its own position among them.
        device: where the mask lies.

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
    visible = torch.ones(seq_len_q, seq_len_k, dtype=torch.bool, device=device)
    return visible.tril_().triu_(1 - window_size).logical_not_()  # in place: it may be large


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

    mask: Bool[Tensor, "..."] | None = None
    bias: Float[Tensor, "..."] | None = None
    is_causal: bool = False
    key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None
    reach: Reach | None = None
    offsets: Int[Tensor, " B"] | None = None
    sinks: Float[Tensor, " N"] | None = None
    relative_bias: Float[Tensor, "buckets N"] | None = None

    def check(self, scores_shape: tuple[int, ...], query: Tensor) -> None:
        """Refuse what does not fit the scores (B, N, T, S), or their queries."""
        check_mask(self.mask, scores_shape)
        if self.mask is not None:
            check_device("mask", self.mask, query.device, "query")
        check_bias(self.bias, scores_shape, query)
        if self.key_padding_lengths is not None:
            check_lengths("key_padding_lengths", self.key_padding_lengths, scores_shape[0], scores_shape[3])
        check_sinks(self.sinks, scores_shape[1])
        if self.sinks is not None:
            check_device("sinks", self.sinks, query.device, "query")
        if self.relative_bias is not None:
            check_device("relative_bias", self.relative_bias, query.device, "query")

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

    def with_infinite_bias(self) -> "Masking":
        """The same with the keys that a bias of -inf hides in the mask: a row of -inf is as empty as a masked one."""
        if self.bias is None:
            return self
        is_hidden = torch.isneginf(self.bias)
        return replace(self, mask=is_hidden if self.mask is None else self.mask | is_hidden)

    def joined(
        self, seq_len_q: int, seq_len_k: int, device: torch.device | str | None = None
    ) -> Bool[Tensor, "..."] | None:
        """The mask, joined with what causality, padding and reach hide; None if nothing is hidden."""
        if not self.is_causal and self.key_padding_lengths is None and self.reach is None:
            return self.mask
        hidden = self.hidden(seq_len_q, seq_len_k, device)
        return hidden if self.mask is None else hidden | self.mask

    def part(self, rows: slice, keys: slice) -> "Masking":
        """What it is to some of the queries and some of the keys."""

        def cut(x: Tensor | None) -> Tensor | None:
            if x is None or x.ndim == 0:
                return x
            x = x[..., keys] if x.shape[-1] > 1 else x
            return x[..., rows, :] if x.ndim > 1 and x.shape[-2] > 1 else x

        lengths, offsets = self.key_padding_lengths, as_lengths([0] if self.offsets is None else self.offsets)
        if lengths is not None:
            lengths = (as_lengths(lengths) - keys.start).clamp(min=0)
        return replace(
            self,
            mask=cut(self.mask),
            bias=cut(self.bias),
            key_padding_lengths=lengths,
            offsets=offsets + (rows.start - keys.start),
        )

    def hidden(
        self, seq_len_q: int, seq_len_k: int, device: torch.device | str | None = None
    ) -> Bool[Tensor, "#B 1 T S"]:
        """What causality, padding and reach hide, of zero tokens too: all but the keys from a first one to a last."""
        first, stop = self.seen_keys(seq_len_q, seq_len_k, device)
        keys = _positions(seq_len_k, stop.device)
        hidden = keys >= stop[:, None, :, None]
        # Without a reach there is one comparison, and one mask in memory.
        return hidden if self.reach is None else hidden.logical_or_(keys < first[:, None, :, None])

    def seen_keys(
        self, seq_len_q: int, seq_len_k: int, device: torch.device | str | None = None
    ) -> tuple[Int[Tensor, "#B T"], Int[Tensor, "#B T"]]:
        """The first key that causality, padding and reach show each query, and the one after the last.

        They may lie before and behind the keys there are; where the first one is not before the other, none is seen.
        """
        lengths = None if self.key_padding_lengths is None else as_lengths(self.key_padding_lengths, device)
        places = _positions(seq_len_q, device if lengths is None else lengths.device)[None]  # (B or 1, T)
        if self.offsets is not None:
            places = self.offsets.to(places)[:, None] + places
        first, stop = torch.zeros_like(places), places + 1 if self.is_causal else torch.full_like(places, seq_len_k)
        if lengths is not None:
            stop = torch.minimum(stop, lengths[:, None])
        if self.reach is not None:
            first, stop = self.reach.first(places), torch.minimum(stop, self.reach.stop(places))
        return first, stop


def as_lengths(lengths: Tensor | Sequence[int], device: torch.device | str | None = None) -> Int[Tensor, " B"]:
    """Lengths as an array, those of no sequence too."""
    return torch.as_tensor(lengths, dtype=torch.int64, device=device)


def _positions(seq_len: int, device: torch.device | str | None) -> Int[Tensor, " L"]:
    return torch.arange(seq_len, device=device)


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_mask(mask: Tensor | None, scores_shape: tuple[int, ...]) -> None:
    """Refuse a mask that is not boolean or does not broadcast to the scores (B, N, T, S)."""
    if mask is None:
        return
    check_array("mask", mask)
    if mask.dtype != torch.bool:
        raise WrongType(
            "mask", "be boolean (True = masked)", {"mask.dtype": mask.dtype}, hint="an additive term is passed as bias"
        )
    check_broadcasts("mask", tuple(mask.shape), scores_shape)


def check_bias(bias: Tensor | None, scores_shape: tuple[int, ...], query: Tensor) -> None:
    """Refuse a bias that does not fit the queries, or does not broadcast to the scores (B, N, T, S)."""
    if bias is None:
        return
    check_array("bias", bias)
    if bias.dtype != query.dtype and not (bias.is_floating_point() and is_autocast_on(bias.device)):
        raise WrongType("bias", "have the dtype of query", {"bias.dtype": bias.dtype, "query.dtype": query.dtype})
    check_broadcasts("bias", tuple(bias.shape), scores_shape)
    check_device("bias", bias, query.device, "query")


def check_sinks(sinks: Tensor | None, num_heads: int) -> None:
    """Refuse sinks that are not a number for each head."""
    if sinks is None:
        return
    check_array("sinks", sinks)
    if not sinks.is_floating_point():
        raise WrongType("sinks", "be floating point", {"sinks.dtype": sinks.dtype})
    if tuple(sinks.shape) != (num_heads,):
        raise Refusal("sinks", f"have shape (N,) = ({num_heads},)", {"sinks.shape": tuple(sinks.shape)})
