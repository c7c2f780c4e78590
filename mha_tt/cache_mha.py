"""Multi-head attention with a key/value cache: an argument and a result, growing or of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim, E d_model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_tt import fused
from mha_tt.cache import (
    KVCache,
    _added,
    _joined,
    _write_rows,
    append_to_cache,
    check_cache,
    check_cache_holds,
    check_cached_input,
    check_room,
    create_cache_mask,
    init_cache,
)
from mha_tt.checks import check_bias, check_floating, check_input_dtype, check_mask, check_rope_positions, check_weights
from mha_tt.device import padded_head_dim, round_up, upload, zeros
from mha_tt.masks import DeviceMask, create_causal_mask_with_cache, on_host
from mha_tt.mha import AttentionLayer, project_with
from mha_tt.stages import Project, combine_heads, project_qkv, scaled_dot_product_attention


def multi_head_attention_with_cache(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    cache_k: Float[Tensor, "B K P H"] | None = None,
    cache_v: Float[Tensor, "B K P H"] | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    rope_theta: float | None = None,
    mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
    bias: Float[np.ndarray, "..."] | Tensor | None = None,
    positions: Int[np.ndarray, "#B T"] | None = None,
    head_dim: int,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
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
        positions: place of each new token for RoPE, (B or 1, T), on the host; P, P + 1, … when absent.
        head_dim: features of a head, H, before padding: the weights do not tell.
        compute_kernel_config: arithmetic of the device; `accurate_config` when absent.

    Returns:
        The output (B, T, E), and the keys and values of all S = P + T tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ or the mask is not boolean.
        ValueError: if the weights or the shapes do not fit, or only one of cache_k and cache_v is given.
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
    scores_shape = (x.shape[0], num_heads, seq_len, cache_len + seq_len)
    check_mask(mask, scores_shape)
    check_bias(bias, scores_shape)
    project = project_with(weights, compute_kernel_config=compute_kernel_config)
    q, k, v = project_qkv(
        project,
        x,
        x,
        x,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fused_qkv="qkv_proj.weight" in weights,
        positions=cache_len + np.arange(seq_len)[None] if positions is None else positions,
        rope_theta=rope_theta,
        head_dim=head_dim,
    )
    if cache_k is not None and cache_v is not None:
        check_cache(cache_k, cache_v, k)
        k, v = _joined(cache_k, k), _joined(cache_v, v)
    if cache_len:
        causal = create_causal_mask_with_cache(seq_len, cache_len + seq_len, cache_len)
        mask = causal if mask is None else causal | on_host(mask)
    attend = scaled_dot_product_attention if q.dtype == ttnn.float32 else fused.scaled_dot_product_attention
    context, _ = attend(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        is_causal=cache_len == 0,
        head_dim=head_dim,
        compute_kernel_config=compute_kernel_config,
    )
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
    new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
    mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
    bias: Float[np.ndarray, "..."] | Tensor | None = None,
    positions: Int[np.ndarray, "#B T"] | None = None,
    head_dim: int,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B T E"], KVCache]:
    """Causal self-attention of new tokens over all tokens so far, with a cache of fixed capacity.

    Args:
        x: the new tokens, (B, T, d_in).
        weights: as `multi_head_attention` takes them.
        cache: the tokens so far. Do not use it afterwards; its storage is reused.
        num_heads: number of query heads, N.
        num_kv_heads: number of key/value heads, K, a divisor of N; N when absent.
        rope_theta: base of the RoPE frequencies, or None for no RoPE.
        new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding: not
            cached, output 0, and seen by nobody, so that it may hold anything. All of them when absent.
        mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, capacity). A row without a key gives 0.
        bias: added to the scores; broadcasts to (B, N, T, capacity). -inf masks a key.
        positions: place of each new token for RoPE, (B or 1, T), on the host; `cache.lengths` and those after it when
            absent.
        head_dim: features of a head, H, before padding: the weights do not tell.
        compute_kernel_config: arithmetic of the device; `accurate_config` when absent.

    Returns:
        The output (B, T, E) and the cache with the new tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ, the mask is not boolean or the lengths are not integers.
        ValueError: if the weights or the shapes do not fit, or the new tokens do not fit into the capacity.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_weights(weights, num_heads, num_kv_heads)
    return _cached_layer(
        project_with(weights, compute_kernel_config=compute_kernel_config),
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
        head_dim=head_dim,
        compute_kernel_config=compute_kernel_config,
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
    new_lengths: np.ndarray | Sequence[int] | None,
    mask: np.ndarray | DeviceMask | None,
    bias: np.ndarray | Tensor | None,
    positions: np.ndarray | None,
    dropout: float = 0.0,
    seed: int = 0,
    head_dim: int,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None,
) -> tuple[Tensor, KVCache]:
    check_cached_input(x, cache)
    batch_size, seq_len, _ = x.shape
    check_rope_positions(positions, batch_size, seq_len, rope_theta)
    scores_shape = (batch_size, num_heads, seq_len, cache.capacity)
    check_mask(mask, scores_shape)
    check_bias(bias, scores_shape)
    check_room(cache, seq_len, new_lengths)
    if 0 in (batch_size, seq_len):
        check_cache_holds(cache, num_kv_heads, padded_head_dim(head_dim, rope=rope_theta is not None))
        output = zeros((batch_size, seq_len, num_heads * cache.keys.shape[3]), x.dtype, x.device())
        return project("out_proj", output) if out_proj else output, cache
    is_real = None
    if new_lengths is not None and (np.asarray(new_lengths) < seq_len).any():
        is_real = np.arange(seq_len) < np.asarray(new_lengths)[:, None]
        is_real = upload(is_real[:, :, None], device=x.device(), dtype=x.dtype)
        x = ttnn.where(is_real, x, 0.0)  # a NaN in the padding would reach real tokens as 0 * NaN
    is_step = seq_len == 1
    positions = cache.lengths[:, None] + np.arange(seq_len) if positions is None else positions
    if is_step:  # one token of each sequence: side by side they fill the tiles that they would each begin
        x, positions = ttnn.reshape(x, (1, batch_size, x.shape[2])), np.broadcast_to(positions, (batch_size, 1)).T
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
        head_dim=head_dim,
    )
    check_cache_holds(cache, num_kv_heads, k.shape[3])
    arithmetic: Any = {"head_dim": head_dim, "compute_kernel_config": compute_kernel_config}
    attend = _attend_in_step if is_step else _attend_in_prefill
    context, cache = attend(q, k, v, cache, new_lengths, mask, bias, dropout, seed, arithmetic)
    output = combine_heads(context)
    output = project("out_proj", output) if out_proj else output
    if is_step:
        output = ttnn.reshape(output, (batch_size, 1, output.shape[2]))
    return output if is_real is None else ttnn.where(is_real, output, 0.0), cache


def _attend_in_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    new_lengths: np.ndarray | Sequence[int] | None,
    mask: np.ndarray | DeviceMask | None,
    bias: np.ndarray | Tensor | None,
    dropout: float,
    seed: int,
    arithmetic: dict[str, Any],
) -> tuple[Tensor, KVCache]:
    """Append one token of each sequence, q (1, N, B, H), k and v (1, K, B, H), and attend to everything up to it."""
    added = _added(cache, 1, new_lengths)
    _write_rows(cache, ttnn.transpose(k, 1, 2), ttnn.transpose(v, 1, 2), np.where(added > 0, cache.lengths, -1))
    before, cache = cache.lengths, KVCache(cache.keys, cache.values, cache.lengths + added, cache.capacity)
    is_plain = q.dtype == ttnn.float32 or dropout or not len(before)
    if is_plain or mask is not None or bias is not None:  # the kernel multiplies a mask by the scale (tt-metal#55337)
        q = ttnn.permute(q, (2, 1, 0, 3))
        context = _attend_to_slots(q, cache, before, mask, bias, dropout, seed, arithmetic)
        return ttnn.permute(context, (2, 1, 0, 3)), cache
    # A sequence without a new token sees a slot that is there, so that its output, 0 in the end, is finite before.
    last_positions = np.minimum(before, cache.capacity - 1)
    context = fused.attend_to_cache(ttnn.transpose(q, 1, 2), cache.keys, cache.values, last_positions, **arithmetic)
    return ttnn.transpose(context, 1, 2), cache


def _attend_in_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    new_lengths: np.ndarray | Sequence[int] | None,
    mask: np.ndarray | DeviceMask | None,
    bias: np.ndarray | Tensor | None,
    dropout: float,
    seed: int,
    arithmetic: dict[str, Any],
) -> tuple[Tensor, KVCache]:
    """Append tokens, q (B, N, T, H), k and v (B, K, T, H), and attend from each to everything up to it."""
    before, seq_len = cache.lengths, q.shape[2]
    cache = append_to_cache(cache, k, v, new_lengths=new_lengths)
    if before.any():
        return _attend_to_slots(q, cache, before, mask, bias, dropout, seed, arithmetic), cache
    # Right padding needs no mask of its own: no real token sees what comes after it.
    mask, bias = _first_slots(mask, seq_len), _first_slots(bias, seq_len)
    return _attend(q, k, v, dropout, seed, mask=mask, bias=bias, is_causal=True, **arithmetic), cache


def _attend_to_slots(
    q: Tensor,
    cache: KVCache,
    before: np.ndarray,
    mask: np.ndarray | DeviceMask | None,
    bias: np.ndarray | Tensor | None,
    dropout: float,
    seed: int,
    arithmetic: dict[str, Any],
) -> Tensor:
    """Attend from new tokens, q (B, N, T, H), that are in the cache already, to everything up to each."""
    seq_len = q.shape[2]
    filled = min(round_up(int(before.max(initial=0)) + seq_len), cache.capacity)
    keys, values = (x if x.shape[2] == filled else x[:, :, :filled] for x in (cache.keys, cache.values))
    mask, bias = _first_slots(mask, filled), _first_slots(bias, filled)
    causal = create_cache_mask(before, seq_len, filled)
    mask = causal if mask is None else causal | on_host(mask)
    return _attend(q, keys, values, dropout, seed, mask=mask, bias=bias, **arithmetic)


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, seed: int, **options: Any) -> Tensor:
    """Attend on the plain path where the fused kernel cannot."""
    if q.dtype == ttnn.float32 or dropout:
        return scaled_dot_product_attention(q, k, v, dropout=dropout, seed=seed, **options)[0]
    return fused.scaled_dot_product_attention(q, k, v, **options)[0]


def _first_slots(x: Any, count: int) -> Any:
    """A mask or bias of the first slots only, where it has one for each slot."""
    if x is None or not len(x.shape) or x.shape[-1] in (1, count):
        return x
    return on_host(x)[..., :count] if not isinstance(x, Tensor) else x[..., :count]


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal multi-head self-attention over everything cached; keywords as in `AttentionLayer`."""

    _is_self_attention = True

    def init_cache(self, batch_size: int, capacity: int, dtype: ttnn.DataType | None = None) -> KVCache:
        """An empty cache for this module, beside its weights.

        Args:
            batch_size: number of sequences, B.
            capacity: number of slots of each sequence.
            dtype: of keys and values; that of the module's inputs when absent. bfloat8_b halves the memory of a module
                that takes bfloat16.

        Raises:
            TypeError: if a size is not an integer or the dtype not floating point.
            ValueError: if the capacity is below 1 or the batch size below 0.
        """
        dtype = self.dtype if dtype is None else dtype
        padded = padded_head_dim(self.head_dim, rope=self.rope_theta is not None)
        return init_cache(batch_size, self.num_kv_heads, capacity, padded, dtype, device=self.device)

    def __call__(
        self,
        x: Float[Tensor, "B T d_in"],
        cache: KVCache,
        *,
        new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
        mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
        bias: Float[np.ndarray, "..."] | Tensor | None = None,
        positions: Int[np.ndarray, "#B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], KVCache]:
        """Append the new tokens to the cache and attend from each to everything up to it.

        Args:
            x: the new tokens, (B, T, d_in): a prompt, a part of one, or one token each. On the device, in the dtype of
                the module.
            cache: the tokens so far. Do not use it afterwards; its storage is reused.
            new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding:
                not cached, output 0, and seen by nobody, so that it may hold anything. All of them when absent.
            mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, capacity). A row without a key
                gives 0. With a mask or a bias a step takes the kernel that reads all heads of the filled slots.
            bias: added to the scores; broadcasts to (B, N, T, capacity). -inf masks a key; on the device it is not
                read.
            positions: place of each new token for RoPE, (B or 1, T), on the host; `cache.lengths` and those after it
                when absent.

        Returns:
            The output (B, T, E) and the cache with the new tokens.

        Raises:
            TypeError: if x is not on the device, dtypes differ, the mask is not boolean or the lengths are not
                integers.
            ValueError: if the shapes do not fit, or the new tokens do not fit into the capacity.
        """
        check_floating("x", x, rank=3)
        check_input_dtype("x", x, self.dtype)
        self._check_dropout()
        output, cache = _cached_layer(
            self.project,
            x,
            cache,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            fused_qkv=self.fused_qkv,
            out_proj=self.out_proj,
            rope_theta=self.rope_theta,
            new_lengths=new_lengths,
            mask=mask,
            bias=bias,
            positions=positions,
            dropout=self.dropout if self.training else 0.0,
            seed=self._draw_seed(),
            head_dim=self.head_dim,
            compute_kernel_config=self.compute_kernel_config,
        )
        return self._drop_output(output), cache
