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
    check_cache,
    check_cached_input,
    check_count,
    check_floating,
    check_lengths,
    check_room,
    check_weights,
)
from mha_torch.masks import create_causal_mask_with_cache
from mha_torch.mha import AttentionLayer, Project, combine_heads, project_qkv, project_with


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
        ValueError: if a size is below 1.
    """
    sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "capacity": capacity, "head_dim": head_dim}
    for name, size in sizes.items():
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
        cache: holds `cache.lengths` tokens. Do not use it afterwards; under `torch.no_grad()` its storage is reused.
        key, value: (B, K, T, H), in the cache's dtype.
        new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding and is
            not cached. All of them when absent.

    Returns:
        The cache, holding `cache.lengths + new_lengths` tokens.

    Raises:
        TypeError: if the dtypes differ or the lengths are not integers.
        ValueError: if shapes do not fit, or the tokens do not fit into the capacity: then the cache is as it was.
            (In a compiled graph lengths are not known; there an index out of range is the error.)
    """
    check_appended(cache, key, value, new_lengths)
    return _append(cache, key, value, new_lengths)


def _append(
    cache: KVCache, key: Tensor, value: Tensor, new_lengths: Tensor | Sequence[int] | None, begin: int | None = None
) -> KVCache:
    """The same without its checks; `begin` is the length of all sequences, where they are known to have but one."""
    batch_size, _, seq_len, _ = key.shape
    keys, values = cache.keys, cache.values
    if torch.is_grad_enabled():
        keys, values = keys.clone(), values.clone()  # the graph of an earlier step may need the old contents
    if new_lengths is None and begin is not None:
        keys[:, :, begin : begin + seq_len] = key
        values[:, :, begin : begin + seq_len] = value
        return KVCache(keys, values, cache.lengths + seq_len)
    token = torch.arange(seq_len, device=key.device)
    slots = cache.lengths[:, None] + token  # (B, T)
    if new_lengths is None:
        rows = torch.arange(batch_size, device=key.device)[:, None]
        keys[rows, :, slots] = key.transpose(1, 2)
        values[rows, :, slots] = value.transpose(1, 2)
        return KVCache(keys, values, cache.lengths + seq_len)
    new_lengths = torch.as_tensor(new_lengths, dtype=torch.int32, device=key.device)
    rows, real = torch.nonzero(token < new_lengths[:, None], as_tuple=True)
    keys[rows, :, slots[rows, real]] = key[rows, :, real]
    values[rows, :, slots[rows, real]] = value[rows, :, real]
    return KVCache(keys, values, cache.lengths + new_lengths)


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

    Returns:
        The output (B, T, E), and the keys and values of all S = P + T tokens.

    Raises:
        TypeError: if x is not floating point or dtypes differ.
        ValueError: if the weights or the shapes do not fit, or only one of cache_k and cache_v is given.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_weights(weights, num_heads, num_kv_heads)
    check_floating("x", x, rank=3)
    if (cache_k is None) != (cache_v is None):
        raise ValueError("cache_k and cache_v must be given together, got only one of them")
    if cache_k is not None:
        check_floating("cache_k", cache_k, rank=4)
    cache_len = 0 if cache_k is None else cache_k.shape[2]
    seq_len = x.shape[1]
    project = project_with(weights)
    q, k, v = project_qkv(
        project,
        x,
        x,
        x,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv="qkv_proj.weight" in weights,
        positions=cache_len + torch.arange(seq_len, device=x.device)[None],
        rope_theta=rope_theta,
    )
    if cache_k is not None and cache_v is not None:
        check_cache(cache_k, cache_v, k)
        k, v = torch.cat([cache_k, k], dim=2), torch.cat([cache_v, v], dim=2)
    mask = create_causal_mask_with_cache(seq_len, cache_len + seq_len, cache_len, device=x.device)
    context, _ = fused.scaled_dot_product_attention(q, k, v, mask=mask)
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
            cached, output 0. All of them when absent.

    Returns:
        The output (B, T, E) and the cache with the new tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ or the lengths are not integers.
        ValueError: if the weights or the shapes do not fit, or the new tokens do not fit into the capacity.
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
    dropout: float = 0.0,
) -> tuple[Tensor, KVCache]:
    check_cached_input(x, cache)
    seq_len = x.shape[1]
    check_room(cache, seq_len, new_lengths)
    q, k, v = project_qkv(
        project,
        x,
        x,
        x,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv=fused_qkv,
        positions=None if rope_theta is None else cache.lengths[:, None] + torch.arange(seq_len, device=x.device),
        rope_theta=rope_theta,
    )
    check_cache(cache.keys, cache.values, k)
    context, cache = _attend_to_cache(q, k, v, cache, new_lengths, dropout)
    output = combine_heads(context)
    output = project("out_proj", output) if out_proj else output
    if new_lengths is not None:
        is_real = torch.arange(seq_len, device=x.device) < torch.as_tensor(new_lengths, device=x.device)[:, None]
        output = torch.where(is_real[:, :, None], output, 0.0)
    return output, cache


def _attend_to_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    new_lengths: Tensor | Sequence[int] | None,
    dropout: float,
) -> tuple[Tensor, KVCache]:
    """Append tokens, q (B, N, T, H), k and v (B, K, T, H), and attend from each to everything up to it."""
    before, seq_len, capacity = cache.lengths, q.shape[2], cache.capacity
    if torch.compiler.is_compiling():  # lengths are not known while a graph is traced: it reads every slot
        cache = _append(cache, k, v, new_lengths)
        mask = _cache_mask(before, seq_len, capacity)
        return fused.scaled_dot_product_attention(q, cache.keys, cache.values, mask=mask, dropout=dropout)[0], cache
    lengths = before.tolist() or [0]
    first, last = min(lengths), max(lengths)
    cache = _append(cache, k, v, new_lengths, begin=first if first == last else None)
    filled = min(last + seq_len, capacity)  # may pass the capacity where the last tokens are padding
    # One token sees all that is filled; a prompt, what comes before it: right padding is seen by no real token.
    is_step, is_prompt = first == last and seq_len == 1, last == 0
    context, _ = fused.scaled_dot_product_attention(
        q,
        cache.keys[:, :, :filled],
        cache.values[:, :, :filled],
        mask=None if is_step or is_prompt else _cache_mask(before, seq_len, filled),
        is_causal=is_prompt,
        dropout=dropout,
    )
    return context, cache


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal multi-head self-attention over everything cached; keywords as in `AttentionLayer`."""

    def init_cache(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache for this module, in the dtype of its weights and beside them."""
        weight = next(self.parameters())
        return init_cache(batch_size, self.num_kv_heads, capacity, self.head_dim, weight.dtype, device=weight.device)

    def forward(
        self,
        x: Float[Tensor, "B T d_in"],
        cache: KVCache,
        *,
        new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], KVCache]:
        """Append the new tokens to the cache and attend from each to everything up to it.

        Args:
            x: the new tokens, (B, T, d_in): a prompt, a part of one, or one token each.
            cache: the tokens so far. Do not use it afterwards; its storage may be reused.
            new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding:
                not cached, output 0. All of them when absent.

        Returns:
            The output (B, T, E) and the cache with the new tokens.

        Raises:
            TypeError: if x is not floating point, dtypes differ or the lengths are not integers.
            ValueError: if the shapes do not fit, or the new tokens do not fit into the capacity.
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
            dropout=self.dropout if self.training else 0.0,
        )
        return F.dropout(output, self.output_dropout, self.training), cache


def kv_cache_nbytes(
    batch: int, num_kv_heads: int, seq_len: int, head_dim: int, *, num_layers: int = 1, dtype: torch.dtype
) -> int:
    """Bytes that the keys and values of all layers take: 2 * batch * heads * tokens * head_dim * bytes per layer.

    Args:
        batch: number of sequences, B.
        num_kv_heads: number of key/value heads, K.
        seq_len: number of tokens, or slots, of each sequence.
        head_dim: features of a head, H.
        num_layers: number of layers.
        dtype: dtype of the cache.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1.

    Example: kv_cache_nbytes(1, 8, 8192, 128, num_layers=80, dtype=torch.float16) == 2684354560 (2.5 GiB)
    """
    sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "seq_len": seq_len, "head_dim": head_dim}
    for name, size in {**sizes, "num_layers": num_layers}.items():
        check_count(name, size)
    return 2 * batch * num_kv_heads * seq_len * head_dim * num_layers * dtype.itemsize
