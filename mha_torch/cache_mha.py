"""Multi-head attention with a key/value cache: an argument and a result, growing or of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim, E d_model.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_torch import fused
from mha_torch.cache import (
    KVCache,
    _append,
    _cache_mask,
    _fits,
    check_cache,
    check_cached_input,
    check_room,
    init_cache,
)
from mha_torch.checks import check_bias, check_floating, check_mask, check_rope_positions, check_weights, is_autocast_on
from mha_torch.masks import as_lengths
from mha_torch.mha import AttentionLayer, project_with
from mha_torch.not_finite import by_finite_tokens, emptied, spoilt
from mha_torch.stages import Project, combine_heads, project_qkv

torch.export.register_dataclass(KVCache)  # a pytree,
torch.serialization.add_safe_globals([KVCache])  # which torch.load reads with weights_only


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
