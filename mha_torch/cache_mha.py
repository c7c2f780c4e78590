"""Multi-head attention with a key/value cache: an argument and a result, growing or of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim, E d_model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_torch import fused
from mha_torch.checks import (
    check_appended,
    check_bias,
    check_cache,
    check_cached_input,
    check_count,
    check_floating,
    check_lengths,
    check_mask,
    check_room,
    check_rope_positions,
    check_weights,
    is_autocast_on,
    values_of,
)
from mha_torch.masks import as_lengths
from mha_torch.mha import AttentionLayer, Project, combine_heads, project_qkv, project_with
from mha_torch.not_finite import by_finite_tokens, emptied, spoilt


@dataclass(frozen=True, eq=False)  # arrays have no single truth value to compare by
class KVCache:
    """Keys and values of the tokens seen so far, in slots of which each sequence has filled the first few.

    Attributes:
        keys, values: (B, K, capacity, H); keys after RoPE. A slot at or beyond its sequence's length holds nothing.
        lengths: number of tokens each sequence has cached, (B,), int32.
    """

    keys: Float[Tensor, "B K S H"]
    values: Float[Tensor, "B K S H"]
    lengths: Int[Tensor, " B"]

    @property
    def capacity(self) -> int:
        """Number of slots of each sequence."""
        return self.keys.shape[2]

    def reorder(self, indices: Int[Tensor, " C"] | Sequence[int]) -> "KVCache":
        """A cache of the sequences with these indices, in this order; one may be taken more than once, or not at all.

        Args:
            indices: which sequences, each 0..B - 1, (B',).

        Returns:
            A cache of B' sequences, with storage of its own.

        Raises:
            TypeError: if the indices are not integers.
            ValueError: if an index lies outside 0..B - 1, where it is known.
        """
        check_lengths("indices", indices, None, self.lengths.shape[0] - 1)
        indices = as_lengths(indices, self.lengths.device)
        return KVCache(*(x.index_select(0, indices) for x in (self.keys, self.values, self.lengths)))

    def repeat(self, repeats: int) -> "KVCache":
        """A cache that holds each sequence `repeats` times, side by side, as the beams of a search.

        Args:
            repeats: how many times, at least once.

        Returns:
            A cache of B * repeats sequences, with storage of its own.

        Raises:
            TypeError: if `repeats` is not an integer.
            ValueError: if `repeats` is below 1.
        """
        check_count("repeats", repeats)
        return KVCache(*(x.repeat_interleave(repeats, dim=0) for x in (self.keys, self.values, self.lengths)))

    def grow(self, capacity: int) -> "KVCache":
        """A cache of the same tokens with more slots.

        Args:
            capacity: number of slots of each sequence, at least as many as there are.

        Returns:
            A cache of that capacity, with storage of its own.

        Raises:
            TypeError: if the capacity is not an integer.
            ValueError: if the capacity is below that of this cache.
        """
        check_count("capacity", capacity, minimum=self.capacity)
        num_slots = (*self.keys.shape[:2], capacity - self.capacity, self.keys.shape[3])
        keys, values = (torch.cat([x, x.new_zeros(num_slots)], dim=2) for x in (self.keys, self.values))
        return KVCache(keys, values, self.lengths.clone())

    def crop(self, lengths: Int[Tensor, " B"] | Sequence[int] | int) -> "KVCache":
        """A cache of the first tokens of each sequence only; the slots of the others hold nothing again.

        Args:
            lengths: number of tokens to keep, of every sequence or of each, (B,); as many as there are at most.

        Returns:
            A cache of the same capacity, with storage of its own.

        Raises:
            TypeError: if the lengths are not integers.
            ValueError: if a length is negative or above that of its sequence, where they are known.
        """
        batch_size, held = self.lengths.shape[0], values_of(self.lengths)
        if isinstance(lengths, int):
            lengths = [lengths] * batch_size
        check_lengths("lengths", lengths, batch_size, self.capacity)
        kept = values_of(torch.as_tensor(lengths))
        if held is not None and kept is not None and any(new > old for new, old in zip(kept, held, strict=True)):
            raise ValueError(f"lengths must not exceed those of the cache, got lengths={kept} and {held}")
        new_lengths = torch.minimum(as_lengths(lengths, self.lengths.device).to(self.lengths.dtype), self.lengths)
        is_free = torch.arange(self.capacity, device=self.lengths.device) >= new_lengths[:, None]  # (B, S)
        keys, values = (x.masked_fill(is_free[:, None, :, None], 0.0) for x in (self.keys, self.values))
        return KVCache(keys, values, new_lengths)


torch.export.register_dataclass(KVCache)  # a pytree,
torch.serialization.add_safe_globals([KVCache])  # which torch.load reads with weights_only


def init_cache(
    batch_size: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str | None = None,
) -> KVCache:
    """An empty cache: zeros in every slot, every length 0.

    Args:
        batch_size: number of sequences, B.
        num_kv_heads: number of key/value heads, K.
        capacity: number of slots of each sequence.
        head_dim: features of a head, H.
        dtype: floating-point dtype of keys and values.
        device: where the cache lies.

    Raises:
        TypeError: if a size is not an integer or the dtype not floating point.
        ValueError: if a size is below 1, or the batch size below 0.
    """
    check_count("batch_size", batch_size, minimum=0)
    for name, size in {"num_kv_heads": num_kv_heads, "capacity": capacity, "head_dim": head_dim}.items():
        check_count(name, size)
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be floating point, got dtype={dtype}")
    shape = (batch_size, num_kv_heads, capacity, head_dim)
    return KVCache(
        keys=torch.zeros(shape, dtype=dtype, device=device),
        values=torch.zeros(shape, dtype=dtype, device=device),
        lengths=torch.zeros(batch_size, dtype=torch.int32, device=device),
    )


def append_to_cache(
    cache: KVCache,
    key: Float[Tensor, "B K T H"],
    value: Float[Tensor, "B K T H"],
    *,
    new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
) -> KVCache:
    """Append the keys and values of new tokens to those in the cache.

    Args:
        cache: holds `cache.lengths` tokens. Do not use it afterwards; under `torch.no_grad()` its storage is reused,
            unless sequences share it (`expand`), or it was made in inference mode and this is not: then it is copied.
        key, value: (B, K, T, H), in the cache's dtype.
        new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding and is
            not cached. All of them when absent.

    Returns:
        The cache, holding `cache.lengths + new_lengths` tokens.

    Raises:
        TypeError: if the dtypes differ or the lengths are not integers.
        ValueError: if shapes do not fit, or the tokens do not fit into the capacity: then the cache is as it was.
            (Where lengths are not known a sequence whose tokens do not fit keeps those that it has, or, in a compiled
            graph without `new_lengths`, an index out of range is the error.)
    """
    lengths = check_appended(cache, key, value, new_lengths)
    return _append(cache, key, value, new_lengths, lengths)


def _append(
    cache: KVCache,
    key: Tensor,
    value: Tensor,
    new_lengths: Tensor | Sequence[int] | None,
    lengths: list[int] | None,
) -> KVCache:
    """The same without its checks, of which the lengths are where all are known."""
    seq_len, device = key.shape[2], key.device
    if new_lengths is not None:
        new_lengths = as_lengths(new_lengths, device).to(cache.lengths.dtype)
    added = seq_len if new_lengths is None else new_lengths
    if seq_len == 0:
        return KVCache(cache.keys, cache.values, cache.lengths + added)
    if lengths is None and not (torch.compiler.is_compiling() and new_lengths is None):
        return _append_unknown(cache, key, value, added)
    keys, values = _writable(cache.keys), _writable(cache.values)
    if lengths and new_lengths is None and min(lengths) == max(lengths):
        new_slots = slice(lengths[0], lengths[0] + seq_len)
        keys[:, :, new_slots], values[:, :, new_slots] = key, value
        return KVCache(keys, values, cache.lengths + added)
    token = torch.arange(seq_len, device=device)
    if new_lengths is None:
        rows, slots = torch.arange(key.shape[0], device=device)[:, None], cache.lengths[:, None] + token  # (B, T)
        keys[rows, :, slots], values[rows, :, slots] = key.transpose(1, 2), value.transpose(1, 2)
    else:
        rows, real = torch.nonzero(token < new_lengths[:, None], as_tuple=True)
        slots = cache.lengths[rows] + real
        keys[rows, :, slots], values[rows, :, slots] = key[rows, :, real], value[rows, :, real]
    return KVCache(keys, values, cache.lengths + added)


def _append_unknown(cache: KVCache, key: Tensor, value: Tensor, added: Tensor | int) -> KVCache:
    """The same without looking at a length: every slot is either kept or given its new token."""
    added = torch.where(_fits(cache, key.shape[2], added), added, 0).to(cache.lengths.dtype)
    token = torch.arange(cache.capacity, device=key.device) - cache.lengths[:, None]  # that a slot is given, (B, S)
    is_new = ((token >= 0) & (token < added[:, None]))[:, None, :, None]
    index = token.clamp(0, key.shape[2] - 1)[:, None, :, None].expand(*token.shape[:1], key.shape[1], -1, key.shape[3])
    keys, values = (
        torch.where(is_new, new.gather(2, index), old) for new, old in ((key, cache.keys), (value, cache.values))
    )
    return KVCache(keys, values, cache.lengths + added)


def _fits(cache: KVCache, seq_len: int, added: Tensor | int) -> Tensor:
    """Whether a sequence has as many slots left, (B,)."""
    fits = cache.lengths + added <= cache.capacity
    return fits if isinstance(added, int) else fits & (added >= 0) & (added <= seq_len)


def _writable(x: Tensor) -> Tensor:
    """x, or a copy of it where it must not be written to."""
    if torch.is_grad_enabled():  # the graph of an earlier step may need the old contents
        return x.clone()
    strides = x.stride()
    is_shared = 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, x.shape, strict=True))
    is_frozen = not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled()
    return x.clone() if is_shared or is_frozen else x


def create_cache_mask(
    lengths: Int[Tensor, " B"] | Sequence[int], seq_len_q: int, capacity: int
) -> Bool[Tensor, "B 1 T S"]:
    """True where a new token may not see a cache slot: every slot after its own.

    Args:
        lengths: number of tokens each sequence had cached before the new ones, (B,).
        seq_len_q: number of new tokens, T.
        capacity: number of slots, S.

    Returns:
        Mask that broadcasts against the scores (B, N, T, S).

    Example: create_cache_mask([1, 0], 1, 3)
        [[[[False, False, True ]]],
         [[[False, True,  True ]]]]
    """
    check_count("seq_len_q", seq_len_q)
    check_count("capacity", capacity)
    check_lengths("lengths", lengths, None, capacity)
    return _cache_mask(torch.as_tensor(lengths), seq_len_q, capacity)


def _cache_mask(lengths: Tensor, seq_len_q: int, seq_len_k: int) -> Tensor:
    query_positions = lengths[:, None] + torch.arange(seq_len_q, device=lengths.device)  # (B, T)
    return torch.arange(seq_len_k, device=lengths.device) > query_positions[:, None, :, None]


def multi_head_attention_with_cache(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    cache_k: Float[Tensor, "B K P H"] | None = None,
    cache_v: Float[Tensor, "B K P H"] | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    rope_theta: float | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    positions: Int[Tensor, "#B T"] | None = None,
) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B K S H"], Float[Tensor, "B K S H"]]:
    """Causal self-attention of new tokens over all tokens so far, with keys and values that grow by concatenation.

    The plain definition of a cache; `multi_head_attention_with_static_cache` is the one of fixed capacity.

    Args:
        x: the new tokens, (B, T, d_in).
        weights: as `multi_head_attention` takes them.
        cache_k, cache_v: keys (after RoPE) and values of the P tokens so far, (B, K, P, H); None at first.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; N when absent.
        rope_theta: base of the RoPE frequencies, or None for no RoPE.
        mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, S). A row without a key gives 0.
        bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key.
        positions: place of each new token for RoPE, (B or 1, T); P, P + 1, … when absent.

    Returns:
        The output (B, T, E), and the keys and values of all S = P + T tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ or the mask is not boolean.
        ValueError: if the weights or the shapes do not fit, devices differ, a weight is not finite (where values are
            known), or only one of cache_k and cache_v is given.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_weights(weights, num_heads, num_kv_heads)
    check_floating("x", x, rank=3)
    check_rope_positions(positions, x.shape[0], x.shape[1], rope_theta)
    if (cache_k is None) != (cache_v is None):
        raise ValueError("cache_k and cache_v must be given together, got only one of them")
    if cache_k is not None:
        check_floating("cache_k", cache_k, rank=4)
    cache_len = 0 if cache_k is None else cache_k.shape[2]
    seq_len = x.shape[1]
    project = by_finite_tokens(project_with(weights))
    q, k, v = project_qkv(
        project,
        x,
        x,
        x,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv="qkv_proj.weight" in weights,
        positions=cache_len + torch.arange(seq_len, device=x.device)[None] if positions is None else positions,
        rope_theta=rope_theta,
    )
    if cache_k is not None and cache_v is not None:
        check_cache(cache_k, cache_v, k)
        k, v = torch.cat([cache_k, k], dim=2), torch.cat([cache_v, v], dim=2)
    check_mask(mask, (*q.shape[:3], cache_len + seq_len))
    if cache_len and seq_len > 1:
        causal = _cache_mask(torch.full((1,), cache_len, device=x.device), seq_len, cache_len + seq_len)
        mask = causal if mask is None else causal | mask
    context, _ = fused.scaled_dot_product_attention(q, k, v, mask=mask, bias=bias, is_causal=cache_len == 0)
    output = combine_heads(context)
    return project("out_proj", output) if "out_proj.weight" in weights else output, k, v


def multi_head_attention_with_static_cache(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    cache: KVCache,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    rope_theta: float | None = None,
    new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    positions: Int[Tensor, "#B T"] | None = None,
) -> tuple[Float[Tensor, "B T E"], KVCache]:
    """Causal self-attention of new tokens over all tokens so far, with a cache of fixed capacity.

    Args:
        x: the new tokens, (B, T, d_in).
        weights: as `multi_head_attention` takes them.
        cache: the tokens so far. Do not use it afterwards; its storage may be reused.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; N when absent.
        rope_theta: base of the RoPE frequencies, or None for no RoPE.
        new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding: not
            cached, output 0, and seen by nobody, so that it may hold anything. All of them when absent.
        mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, capacity). A row without a key gives 0.
        bias: added to the scores; broadcasts to (B, N, T, capacity). -inf masks a key.
        positions: place of each new token for RoPE, (B or 1, T); `cache.lengths` and those after it when absent.

    Returns:
        The output (B, T, E) and the cache with the new tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ, the mask is not boolean or the lengths are not integers.
        ValueError: if the weights or the shapes do not fit, devices differ, a weight is not finite or the new tokens do
            not fit into the capacity (where values are known).
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_weights(weights, num_heads, num_kv_heads)
    return _cached_layer(
        project_with(weights),
        x,
        cache,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv="qkv_proj.weight" in weights,
        out_proj="out_proj.weight" in weights,
        rope_theta=rope_theta,
        new_lengths=new_lengths,
        mask=mask,
        bias=bias,
        positions=positions,
    )


def _cached_layer(
    project: Project,
    x: Tensor,
    cache: KVCache,
    *,
    num_heads: int,
    num_kv_heads: int,
    fused_qkv: bool,
    out_proj: bool,
    rope_theta: float | None,
    new_lengths: Tensor | Sequence[int] | None,
    mask: Tensor | None,
    bias: Tensor | None,
    positions: Tensor | None,
    dropout: float = 0.0,
) -> tuple[Tensor, KVCache]:
    check_cached_input(x, cache)
    seq_len = x.shape[1]
    check_rope_positions(positions, x.shape[0], seq_len, rope_theta)
    check_mask(mask, (x.shape[0], num_heads, seq_len, cache.capacity))
    lengths = check_room(cache, seq_len, new_lengths)
    is_real = None
    if new_lengths is not None:
        is_real = torch.arange(seq_len, device=x.device) < as_lengths(new_lengths, x.device)[:, None]
        x = emptied(x, ~is_real[:, :, None])  # not even a NaN of the padding may spread, to the gradients either
    if rope_theta is not None and positions is None:
        positions = cache.lengths[:, None] + torch.arange(seq_len, device=x.device)
    project = by_finite_tokens(project)
    q, k, v = project_qkv(
        project,
        x,
        x,
        x,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv=fused_qkv,
        positions=positions,
        rope_theta=rope_theta,
    )
    check_cache(cache.keys, cache.values, k, ("cache.keys", "cache.values"))
    check_bias(bias, (*q.shape[:3], cache.capacity), q.dtype)
    context, cache = _attend_to_cache(q, k, v, cache, new_lengths, lengths, mask, bias, dropout)
    output = combine_heads(context)
    output = project("out_proj", output) if out_proj else output
    if is_real is not None:
        output = emptied(output, ~is_real[:, :, None])
    return output, cache


def _attend_to_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    new_lengths: Tensor | Sequence[int] | None,
    lengths: list[int] | None,
    mask: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> tuple[Tensor, KVCache]:
    """Append tokens, q (B, N, T, H), k and v (B, K, T, H), and attend from each to everything up to it."""
    before, seq_len, capacity = cache, q.shape[2], cache.capacity
    cache = _append(cache, k, v, new_lengths, lengths)
    if lengths is None:  # it reads every slot
        causal = _cache_mask(before.lengths, seq_len, capacity)
        mask = causal if mask is None else causal | mask
        context, _ = fused.scaled_dot_product_attention(
            q, cache.keys, cache.values, mask=mask, bias=bias, dropout=dropout
        )
        added = seq_len if new_lengths is None else as_lengths(new_lengths, q.device)
        return spoilt(context, ~_fits(before, seq_len, added)[:, None, None, None]), cache
    first, last = min(lengths, default=0), max(lengths, default=0)
    filled = min(last + seq_len, capacity)  # may pass the capacity where the last tokens are padding
    mask, bias = (x[..., :filled] if x is not None and x.ndim and x.shape[-1] > 1 else x for x in (mask, bias))
    # One token sees all that is filled; a prompt, what comes before it: right padding is seen by no real token.
    is_step, is_prompt = first == last and seq_len == 1, last == 0
    if not is_step and not is_prompt:
        causal = _cache_mask(before.lengths, seq_len, filled)
        mask = causal if mask is None else causal | mask
    context, _ = fused.scaled_dot_product_attention(
        q,
        cache.keys[:, :, :filled],
        cache.values[:, :, :filled],
        mask=mask,
        bias=bias,
        is_causal=is_prompt,
        dropout=dropout,
    )
    return context, cache


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal multi-head self-attention over everything cached; keywords as in `AttentionLayer`."""

    _is_self_attention = True

    def init_cache(self, batch_size: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for this module, beside its weights.

        Args:
            batch_size: number of sequences, B.
            capacity: number of slots of each sequence.
            dtype: floating-point dtype of keys and values; that of the weights when absent, or autocast's where that
                is on.

        Raises:
            TypeError: if a size is not an integer or the dtype not floating point.
            ValueError: if the capacity is below 1 or the batch size below 0.
        """
        weight = next(self.parameters())
        if dtype is None:
            is_cast = is_autocast_on(weight.device) and weight.dtype != torch.float64
            dtype = torch.get_autocast_dtype(weight.device.type) if is_cast else weight.dtype
        return init_cache(batch_size, self.num_kv_heads, capacity, self.head_dim, dtype, device=weight.device)

    def forward(
        self,
        x: Float[Tensor, "B T d_in"],
        cache: KVCache,
        *,
        new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        positions: Int[Tensor, "#B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], KVCache]:
        """Append the new tokens to the cache and attend from each to everything up to it.

        Args:
            x: the new tokens, (B, T, d_in): a prompt, a part of one, or one token each.
            cache: the tokens so far. Do not use it afterwards; its storage may be reused.
            new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding:
                not cached, output 0, and seen by nobody, so that it may hold anything. All of them when absent.
            mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, capacity). A row without a key
                gives 0.
            bias: added to the scores, in the dtype of x; broadcasts to (B, N, T, capacity). -inf masks a key.
            positions: place of each new token for RoPE, (B or 1, T); `cache.lengths` and those after it when absent.

        Returns:
            The output (B, T, E) and the cache with the new tokens.

        Raises:
            TypeError: if x is not floating point, dtypes differ, the mask is not boolean or the lengths are not
                integers.
            ValueError: if the shapes do not fit, devices differ, or the new tokens do not fit into the capacity (where
                values are known).
        """
        output, cache = _cached_layer(
            self.project,
            x,
            cache,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            fused_qkv=self.fused_qkv,
            out_proj=self.out_proj is not None,
            rope_theta=self.rope_theta,
            new_lengths=new_lengths,
            mask=mask,
            bias=bias,
            positions=positions,
            dropout=self.dropout if self.training else 0.0,
        )
        return F.dropout(output, self.output_dropout, self.training), cache


def kv_cache_nbytes(
    batch_size: int, num_kv_heads: int, capacity: int, head_dim: int, *, num_layers: int = 1, dtype: torch.dtype
) -> int:
    """Bytes that the keys and values of all layers take: 2 * batch * heads * slots * head_dim * bytes per layer.

    Args:
        batch_size: number of sequences, B.
        num_kv_heads: number of key/value heads, K.
        capacity: number of slots, or tokens, of each sequence.
        head_dim: features of a head, H.
        num_layers: number of layers.
        dtype: dtype of the cache.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1.

    Example: kv_cache_nbytes(1, 8, 8192, 128, num_layers=80, dtype=torch.float16) == 2684354560 (2.5 GiB)
    """
    sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "capacity": capacity, "head_dim": head_dim}
    for name, size in {**sizes, "num_layers": num_layers}.items():
        check_count(name, size)
    return 2 * batch_size * num_kv_heads * capacity * head_dim * num_layers * dtype.itemsize
