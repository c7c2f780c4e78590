"""Multi-head attention with a key/value cache: an argument and a result, growing or of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim, E d_model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_tt import fused
from mha_tt.checks import (
    check_appended,
    check_bias,
    check_cache,
    check_cache_holds,
    check_cached_input,
    check_count,
    check_dtype,
    check_floating,
    check_input_dtype,
    check_lengths,
    check_mask,
    check_room,
    check_rope_positions,
    check_weights,
)
from mha_tt.device import TILE, TILE_NBYTES, as_dtype, padded_head_dim, round_up, upload, upload_integers, zeros
from mha_tt.masks import DeviceMask, create_causal_mask_with_cache, on_host
from mha_tt.mha import AttentionLayer, Project, combine_heads, project_qkv, project_with, scaled_dot_product_attention

MOST_KV_HEADS = TILE
"""What `paged_update_cache` writes right: it reads one row of tiles for each sequence, and takes more heads unasked."""


@dataclass(frozen=True, eq=False)  # arrays have no single truth value to compare by
class KVCache:
    """Keys and values of the tokens seen so far, in slots of which each sequence has filled the first few.

    Attributes:
        keys, values: (B, K, S, H), S being the capacity and H the head_dim, both in whole tiles; keys after RoPE. A
            slot at or beyond its sequence's length holds nothing.
        lengths: number of tokens each sequence has cached, (B,), int32, on the host.
        capacity: number of slots of each sequence.
    """

    keys: Float[Tensor, "B K S H"]
    values: Float[Tensor, "B K S H"]
    lengths: Int[np.ndarray, " B"]
    capacity: int

    def reorder(self, indices: Int[np.ndarray, " C"] | Sequence[int]) -> KVCache:
        """A cache of the sequences with these indices, in this order; one may be taken more than once, or not at all.

        Args:
            indices: which sequences, each 0..B - 1, (B',).

        Returns:
            A cache of B' sequences, with storage of its own.

        Raises:
            TypeError: if the indices are not integers.
            ValueError: if an index lies outside 0..B - 1.
        """
        check_lengths("indices", indices, None, len(self.lengths) - 1)
        indices = np.asarray(indices, int)
        keys, values = (_sequences(slots, indices.tolist()) for slots in (self.keys, self.values))
        return KVCache(keys, values, self.lengths[indices], self.capacity)

    def repeat(self, repeats: int) -> KVCache:
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
        return self.reorder(np.repeat(np.arange(len(self.lengths)), repeats))

    def grow(self, capacity: int) -> KVCache:
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
        keys, values = (_with_slots(slots, round_up(capacity)) for slots in (self.keys, self.values))
        return KVCache(keys, values, self.lengths.copy(), capacity)

    def crop(self, lengths: Int[np.ndarray, " B"] | Sequence[int] | int) -> KVCache:
        """A cache of the first tokens of each sequence only; the slots of the others hold nothing again.

        Args:
            lengths: number of tokens to keep, of every sequence or of each, (B,); as many as there are at most.

        Returns:
            A cache of the same capacity, with storage of its own.

        Raises:
            TypeError: if the lengths are not integers.
            ValueError: if a length is negative or above that of its sequence.
        """
        if isinstance(lengths, (int, np.integer)):
            lengths = np.full(len(self.lengths), lengths)
        check_lengths("lengths", lengths, len(self.lengths), self.capacity)
        lengths = np.asarray(lengths, np.int32)
        if (lengths > self.lengths).any():
            raise ValueError(
                f"lengths must not exceed those of the cache, "
                f"got lengths={lengths.tolist()} and {self.lengths.tolist()}"
            )
        is_kept = np.arange(self.keys.shape[2]) < lengths[:, None]  # (B, S)
        is_kept = upload(is_kept[:, None, :, None], device=self.keys.device(), dtype=self.keys.dtype)
        keys, values = (ttnn.where(is_kept, slots, 0.0) for slots in (self.keys, self.values))
        return KVCache(keys, values, lengths.copy(), self.capacity)


def init_cache(
    batch_size: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: ttnn.DataType = ttnn.bfloat16,
    *,
    device: ttnn.MeshDevice,
) -> KVCache:
    """An empty cache: zeros in every slot, every length 0.

    Args:
        batch_size: number of sequences, B.
        num_kv_heads: number of key/value heads, K, at most 32.
        capacity: number of slots of each sequence.
        head_dim: features of a head, H, as many as keys and values will have.
        dtype: of keys and values: `ttnn.bfloat16`, `ttnn.bfloat8_b` or `ttnn.float32`.
        device: where the cache lies.

    Raises:
        TypeError: if a size is not an integer or the dtype not floating point.
        ValueError: if a size is below 1, or the batch size below 0, or there are more than 32 heads.
    """
    check_count("batch_size", batch_size, minimum=0)
    for name, size in {"num_kv_heads": num_kv_heads, "capacity": capacity, "head_dim": head_dim}.items():
        check_count(name, size)
    if num_kv_heads > MOST_KV_HEADS:
        raise ValueError(f"num_kv_heads must be at most {MOST_KV_HEADS} for a cache, got num_kv_heads={num_kv_heads}")
    check_dtype("dtype", dtype)
    shape = (batch_size, num_kv_heads, round_up(capacity), round_up(head_dim))
    return KVCache(
        keys=zeros(shape, dtype, device),
        values=zeros(shape, dtype, device),
        lengths=np.zeros(batch_size, np.int32),
        capacity=capacity,
    )


def append_to_cache(
    cache: KVCache,
    key: Float[Tensor, "B K T H"],
    value: Float[Tensor, "B K T H"],
    *,
    new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
) -> KVCache:
    """Append the keys and values of new tokens to those in the cache.

    Args:
        cache: holds `cache.lengths` tokens. Do not use it afterwards; its storage is reused.
        key, value: (B, K, T, H), in the cache's dtype or, for a bfloat8_b cache, bfloat16.
        new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding and is
            not cached. All of them when absent.

    Returns:
        The cache, holding `cache.lengths + new_lengths` tokens.

    Raises:
        TypeError: if the dtypes differ or the lengths are not integers.
        ValueError: if shapes do not fit, or the tokens do not fit into the capacity: then the cache is as it was.
    """
    check_appended(cache, key, value, new_lengths)
    added = _added(cache, key.shape[2], new_lengths)
    # The device writes whole tiles, or single rows. So single rows up to the next tile, for all sequences at once, …
    single = np.minimum(added, -cache.lengths % TILE) if key.shape[2] > 1 else added
    for token in range(single.max(initial=0)):
        slots = np.where(token < single, cache.lengths + token, -1)
        keys, values = (ttnn.permute(x[:, :, token : token + 1], (2, 0, 1, 3)) for x in (key, value))
        _write_rows(cache, keys, values, slots)
    # … and then tiles, one sequence at a time.
    for sequence in np.flatnonzero(added > single).tolist():
        first, last = int(single[sequence]), int(added[sequence])
        for slots, x in ((cache.keys, key), (cache.values, value)):
            tokens = _as_cached(x[sequence : sequence + 1, :, first:last], slots)
            ttnn.fill_cache(slots, tokens, sequence, update_idx=int(cache.lengths[sequence]) + first)
    return KVCache(cache.keys, cache.values, cache.lengths + added, cache.capacity)


def create_cache_mask(
    lengths: Int[np.ndarray, " B"] | Sequence[int], seq_len_q: int, capacity: int
) -> Bool[np.ndarray, "B 1 T S"]:
    """True where a new token may not see a cache slot: every slot after its own.

    Args:
        lengths: number of tokens each sequence had cached before the new ones, (B,).
        seq_len_q: number of new tokens, T.
        capacity: number of slots, S.

    Returns:
        Mask that broadcasts against the scores (B, N, T, S), on the host.

    Example: create_cache_mask([1, 0], 1, 3)
        [[[[False, False, True ]]],
         [[[False, True,  True ]]]]
    """
    check_count("seq_len_q", seq_len_q, minimum=0)
    check_count("capacity", capacity)
    check_lengths("lengths", lengths, None, capacity)
    query_positions = np.asarray(lengths)[:, None] + np.arange(seq_len_q)  # (B, T)
    return np.arange(capacity) > query_positions[:, None, :, None]


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


def _sequences(slots: Tensor, indices: list[int]) -> Tensor:
    """A copy of the slots (B, K, S, H) of the sequences with these indices."""
    if not indices:
        return zeros((0, *tuple(slots.shape)[1:]), slots.dtype, slots.device())
    if len(indices) == 1:  # a slice of everything, as a concatenation of one, may be the tensor itself
        return ttnn.clone(slots[indices[0] : indices[0] + 1])
    # Slice by slice: no operation of ttnn picks along an axis by index and takes bfloat8_b.
    return as_dtype(ttnn.concat([slots[index : index + 1] for index in indices], dim=0), slots.dtype)


def _with_slots(slots: Tensor, count: int) -> Tensor:
    """A copy of slots (B, K, S, H) with zeros after them."""
    batch_size, num_kv_heads, held, head_dim = slots.shape
    if count == held:
        return ttnn.clone(slots)
    return _joined(slots, zeros((batch_size, num_kv_heads, count - held, head_dim), slots.dtype, slots.device()))


def _joined(cached: Tensor, new: Tensor) -> Tensor:
    """Cached tokens and new ones, in the dtype of the cache, which concatenation may widen."""
    shape = (*tuple(cached.shape)[:2], cached.shape[2] + new.shape[2], cached.shape[3])
    if not shape[0] or not shape[2]:
        return zeros(shape, cached.dtype, cached.device())
    if not cached.shape[2] or not new.shape[2]:  # concatenation does not take nothing
        return cached if cached.shape[2] else as_dtype(new, cached.dtype)
    return as_dtype(ttnn.concat([cached, new], dim=2), cached.dtype)


def _added(cache: KVCache, seq_len: int, new_lengths: np.ndarray | Sequence[int] | None) -> np.ndarray:
    added = np.full(len(cache.lengths), seq_len) if new_lengths is None else np.asarray(new_lengths)
    return added.astype(np.int32)


def _as_cached(x: Tensor, slots: Tensor) -> Tensor:
    """Tokens as `fill_cache` copies them: in the dtype of the cache, zeros after the last token of the last tile."""
    x = as_dtype(x, slots.dtype)
    return ttnn.fill_implicit_tile_padding(x, 0.0) if x.shape[2] % TILE else x


def _write_rows(cache: KVCache, keys: Tensor, values: Tensor, slots: np.ndarray) -> None:
    """Write one token of each sequence, (1, B, K, H), into a slot of its own; -1 writes nothing."""
    device, batch_size = keys.device(), keys.shape[1]
    grid = device.compute_with_storage_grid_size()
    if batch_size > grid.x * grid.y:
        raise ValueError(
            f"the batch must not exceed the {grid.x * grid.y} cores of the device, got {batch_size} sequences"
        )
    one_core_each = ttnn.create_sharded_memory_config(
        (round_up(keys.shape[2]), keys.shape[3]),
        core_grid=ttnn.num_cores_to_corerangeset(batch_size, grid, row_wise=True),
        strategy=ttnn.ShardStrategy.HEIGHT,
        use_height_and_width_as_shard_shape=True,
    )
    where = upload_integers(slots, device=device)
    for held, rows in ((cache.keys, keys), (cache.values, values)):
        rows = as_dtype(rows, ttnn.bfloat16) if rows.dtype == ttnn.bfloat8_b else rows
        rows = ttnn.to_memory_config(rows, one_core_each)
        ttnn.experimental.paged_update_cache(held, rows, update_idxs_tensor=where)


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


def kv_cache_nbytes(
    batch_size: int, num_kv_heads: int, capacity: int, head_dim: int, *, num_layers: int = 1, dtype: ttnn.DataType
) -> int:
    """Bytes that the keys and values of all layers take: 2 * batch * heads * slots * head_dim * bytes per layer.

    On the device slots and features take whole tiles of 32; with RoPE count the features of a head as
    `padded_head_dim(head_dim, rope=True)`.

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

    Example: kv_cache_nbytes(1, 8, 8192, 128, num_layers=80, dtype=ttnn.bfloat16) == 2684354560 (2.5 GiB)
    """
    sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads, "capacity": capacity, "head_dim": head_dim}
    for name, size in {**sizes, "num_layers": num_layers}.items():
        check_count(name, size)
    check_dtype("dtype", dtype)
    tiles = round_up(capacity) // TILE * round_up(head_dim) // TILE
    return 2 * batch_size * num_kv_heads * tiles * num_layers * TILE_NBYTES[dtype]
