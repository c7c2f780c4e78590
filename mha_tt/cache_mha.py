"""Multi-head attention with a key/value cache: an argument and a result, growing or of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim,
Hv value_head_dim, E d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, Refusal
from mha_spec.attention import check_spec
from mha_tt import stages
from mha_tt.arrays import check_floating, check_input_dtype
from mha_tt.cache import (
    CacheT,
    KVCache,
    LatentCache,
    append_checked,
    check_cache,
    check_cache_holds,
    check_cached_input,
    check_is_cache,
    check_room,
    init_cache,
    num_added,
    write_rows,
)
from mha_tt.decode.pages import paged
from mha_tt.decode.places import Kept
from mha_tt.decode.slots import first_slots, joined
from mha_tt.decode.step import advance, entering
from mha_tt.device import as_dtype, round_up, upload, zeros
from mha_tt.kernels import fused
from mha_tt.masks import DeviceMask, Masking, on_host
from mha_tt.mha import AttentionLayer
from mha_tt.projections import (
    HeadWeights,
    absorb_keys,
    absorb_values,
    expand_latents,
    project_output,
    project_qkv,
)
from mha_tt.rope import check_layer_positions, rotation_of
from mha_tt.stages import Dropout
from mha_tt.weights import Project, check_weights, padded_features, padded_width, project_with


def multi_head_attention_with_cache(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    cache_k: Float[Tensor, "B K P H"] | None = None,
    cache_v: Float[Tensor, "B K P Hv"] | None = None,
    *,
    mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
    bias: Float[np.ndarray, "..."] | Tensor | None = None,
    positions: Int[np.ndarray, "... #B T"] | None = None,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B T E"], Float[Tensor, "B K S H"], Float[Tensor, "B K S Hv"]]:
    """Causal self-attention of new tokens over all tokens so far, with keys and values that grow by concatenation.

    The plain definition of a cache; `multi_head_attention_with_static_cache` is the one of fixed capacity.

    Args:
        x: the new tokens, (B, T, d_in).
        weights: as `multi_head_attention` takes them.
        spec: what the layer computes; nothing is dropped.
        cache_k, cache_v: keys (after RoPE) and values of the P tokens so far, (B, K, P, H) and (B, K, P, Hv); None at
            first.
        mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, S). A row without a key gives 0.
        bias: added to the scores; broadcasts to (B, N, T, S). -inf masks a key.
        positions: place of each new token, (B or 1, T), or with sections (axes, B or 1, T), on the host; P, P
            + 1, … when absent.
        compute_kernel_config: arithmetic of the device; `accurate_config` when absent.

    Returns:
        The output (B, T, E), and the keys and values of all S = P + T tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ or the mask is not boolean.
        ValueError: if the weights or the shapes do not fit, or only one of cache_k and cache_v is given.
    """
    check_spec(spec, is_self_attention=True)
    check_weights(weights, spec)
    check_floating("x", x, rank=3)
    check_layer_positions(positions, x.shape[0], x.shape[1], spec)
    if (cache_k is None) != (cache_v is None):
        raise Refusal("cache_k and cache_v", "be given together", "only one of them")
    if cache_k is not None:
        check_floating("cache_k", cache_k, rank=4)
    cache_len = 0 if cache_k is None else cache_k.shape[2]
    seq_len = x.shape[1]
    Masking(mask, bias).check((x.shape[0], spec.num_heads, seq_len, cache_len + seq_len))
    project = project_with(weights, spec, compute_kernel_config=compute_kernel_config)
    positions = cache_len + np.arange(seq_len)[None] if positions is None else positions
    q, k, v = project_qkv(project, x, x, x, spec, positions)
    if cache_k is not None and cache_v is not None:
        check_cache(cache_k, cache_v, k, v)
        k, v = joined(cache_k, k), joined(cache_v, v)
    masking = Masking(
        mask,
        bias,
        is_causal=True,
        reach=spec.reach,
        offsets=np.array([cache_len]) if cache_len else None,
    ).with_weights(weights)
    context = _attend(q, (k, v), masking, Dropout(), _Attention(project, spec, False, compute_kernel_config))
    return project_output(project, context, x, spec), k, v


def multi_head_attention_with_static_cache(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    cache: KVCache,
    *,
    new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
    mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
    bias: Float[np.ndarray, "..."] | Tensor | None = None,
    positions: Int[np.ndarray, "... #B T"] | None = None,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B T E"], KVCache]:
    """Causal self-attention of new tokens over all tokens so far, with a cache of fixed capacity.

    Args:
        x: the new tokens, (B, T, d_in).
        weights: as `multi_head_attention` takes them.
        spec: what the layer computes; nothing is dropped.
        cache: the tokens so far. Do not use it afterwards; its storage is reused.
        new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding: not
            cached, output 0, and seen by nobody, so that it may hold anything. All of them when absent.
        mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, capacity). A row without a key gives 0.
        bias: added to the scores; broadcasts to (B, N, T, capacity). -inf masks a key.
        positions: place of each new token, (B or 1, T), or with sections (axes, B or 1, T), on the host;
            `cache.lengths` and those after it when absent.
        compute_kernel_config: arithmetic of the device; `accurate_config` when absent.

    Returns:
        The output (B, T, E) and the cache with the new tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ, the mask is not boolean or the lengths are not integers.
        ValueError: if the weights or the shapes do not fit, or the new tokens do not fit into the capacity.
    """
    check_spec(spec, is_self_attention=True)
    check_weights(weights, spec)
    check_is_cache(cache)
    return cached_layer(
        project_with(weights, spec, compute_kernel_config=compute_kernel_config),
        x,
        cache,
        spec,
        Masking(mask, bias, is_causal=True).with_weights(weights),
        new_lengths=new_lengths,
        positions=positions,
        dropout=Dropout(),
        compute_kernel_config=compute_kernel_config,
        own_weights=weights,
    )


def cached_layer(
    project: Project,
    x: Tensor,
    cache: CacheT,
    spec: AttentionSpec,
    masking: Masking,
    *,
    new_lengths: np.ndarray | Sequence[int] | None,
    positions: np.ndarray | None,
    dropout: Dropout,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None,
    kv_b: Callable[[], HeadWeights] | None = None,
    own_weights: Mapping[str, Tensor] | None = None,
    kept: Kept | None = None,
) -> tuple[Tensor, CacheT]:
    """Append new tokens to a cache of either kind, and attend; over the latents themselves where kv_b is given.

    It is called after all checks, and makes the weights that are needed for that, or has kept them. Steps may take the
    weights by themselves, where they are given and `project` applies no others, and what is `kept` for them.
    """
    check_cached_input(x, cache)
    batch_size, seq_len, _ = x.shape
    check_layer_positions(positions, batch_size, seq_len, spec)
    positions = positions if spec.has_positions else None  # ignored ones keep no step from its kernel
    masking.check((batch_size, spec.num_heads, seq_len, cache.capacity))
    _check_is_of(cache, spec)
    check_room(cache, seq_len, new_lengths)
    are_all_real = new_lengths is None or (np.asarray(new_lengths) == seq_len).all()
    is_plain_step = seq_len == 1 and batch_size and are_all_real and positions is None and spec.temperature is None
    if is_plain_step and _kernel_of_step(x, cache, masking, dropout, spec, kv_b is not None):
        return advance(
            project,
            x,
            cache,
            spec,
            masking.sinks,
            own_weights=own_weights,
            kept=kept,
            compute_kernel_config=compute_kernel_config,
            kv_b=None if kv_b is None else kv_b(),
        )
    if 0 in (batch_size, seq_len):
        output = zeros((batch_size, seq_len, padded_width("out_proj", spec)), x.dtype, x.device())
        return project("out_proj", output) if spec.out_proj else output, cache
    positions = cache.lengths[:, None] + np.arange(seq_len) if positions is None else positions
    is_real = None
    if not are_all_real:
        is_real = np.arange(seq_len) < np.asarray(new_lengths)[:, None]
        positions = np.where(is_real, positions, positions[..., :1])  # padding makes no sequence longer
        is_real = upload(is_real[:, :, None], device=x.device(), dtype=x.dtype)
        x = ttnn.where(is_real, x, 0.0)  # a NaN in the padding would reach real tokens as 0 * NaN
    is_step = seq_len == 1
    if is_step:  # one token of each sequence: side by side they fill the tiles that they would each begin
        x = ttnn.reshape(x, (1, batch_size, x.shape[2]))
        positions = np.broadcast_to(positions, (*positions.shape[:-2], batch_size, 1)).swapaxes(-1, -2)
    rotation = rotation_of(positions, spec, device=x.device(), side_by_side=is_step)
    q, new = entering(project, x, cache, spec, positions if rotation is None else rotation)
    heads = None if kv_b is None else kv_b()
    q = q if heads is None else absorb_keys(q, heads, spec, compute_kernel_config=compute_kernel_config)
    attention = _Attention(project, spec, heads is not None, compute_kernel_config)
    attend = _attend_in_step if is_step else _attend_in_prefill
    context, cache = attend(q, new, cache, new_lengths, masking, dropout, attention)
    if heads is not None:
        context = context[:, :, :, : padded_features("kv_a_norm", spec)]
        context = absorb_values(context, heads, spec, compute_kernel_config=compute_kernel_config)
    output = project_output(project, context, x, spec)
    if is_step:
        output = ttnn.reshape(output, (batch_size, 1, output.shape[2]))
    return output if is_real is None else ttnn.where(is_real, output, 0.0), cache


def _check_is_of(cache: KVCache | LatentCache, spec: AttentionSpec) -> None:
    """Refuse a cache that was made for another layer."""
    if isinstance(cache, LatentCache):
        check_cache_holds(cache, 1, padded_features("kv_a_proj", spec))
    else:
        check_cache_holds(cache, spec.num_kv_heads, *(padded_features(f"{part}_proj", spec) for part in "kv"))


class _Attention(NamedTuple):
    """How a layer attends to what a cache keeps: its projections, over latents themselves or not, and the settings."""

    project: Project
    spec: AttentionSpec
    over_latents: bool
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None

    @property
    def arithmetic(self) -> dict[str, Any]:
        """What the layer says of the scores, and the settings of the device."""
        spec = self.spec.absorbed if self.over_latents else self.spec
        return {"spec": spec, "compute_kernel_config": self.compute_kernel_config}

    def seen(self, slots: Sequence[Tensor], dtype: ttnn.DataType) -> tuple[Tensor, Tensor]:
        """What queries attend to: the keys and values of slots, or latents, or those that are made of latents.

        Latents are values as wide as keys, for the kernels take no others: what the context has more is left out later.
        """
        if len(slots) == 2 or self.over_latents:
            return slots[0], slots[-1]
        return expand_latents(self.project, as_dtype(slots[0], dtype), self.spec)


def _attend_in_step(
    q: Tensor,
    new: tuple[Tensor, ...],
    cache: CacheT,
    new_lengths: np.ndarray | Sequence[int] | None,
    masking: Masking,
    dropout: Dropout,
    attention: _Attention,
) -> tuple[Tensor, CacheT]:
    """Append one token of each sequence, q (1, N, B, H), new (1, K, B, H) each, and attend to everything up to it."""
    added = num_added(cache, 1, new_lengths)
    write_rows(cache, [ttnn.transpose(x, 1, 2) for x in new], np.where(added > 0, cache.lengths, -1))
    before, cache = cache.lengths, cache.with_slots(cache.slots.values(), cache.lengths + added)
    over_latents = attention.over_latents
    takes_kernel = len(before) and _kernel_of_step(q, cache, masking, dropout, attention.spec, over_latents)
    if not takes_kernel:
        q = ttnn.permute(q, (2, 1, 0, 3))
        context = _attend_to_slots(q, cache, before, masking, dropout, attention)
        return ttnn.permute(context, (2, 1, 0, 3)), cache
    # A sequence without a new token sees a slot that is there, so that its output, 0 in the end, is finite before.
    last_positions = np.minimum(before, cache.capacity - 1)
    keys, values = attention.seen(tuple(cache.slots.values()), q.dtype)
    queries, sinks = ttnn.transpose(q, 1, 2), masking.sinks
    context = fused.attend_to_cache(
        queries, keys, values, last_positions, page_table=cache.page_table, sinks=sinks, **attention.arithmetic
    )
    return ttnn.transpose(context, 1, 2), cache


def _kernel_of_step(
    x: Tensor,
    cache: KVCache | LatentCache,
    masking: Masking,
    dropout: Dropout,
    spec: AttentionSpec,
    over_latents: bool,
) -> bool:
    """Whether the framework's kernel of a step is right for what there is.

    It multiplies a mask by the scale (tt-metal#55337). Its windows are right, but let through what is not finite in the
    keys that they have left behind (docs/ttnn.md).
    """
    first, *others = cache.slots.values()
    are_alike = others[0].shape[3] == first.shape[3] if others else over_latents
    takes_layer = are_alike and fused.step_takes(first.shape[3]) and fused.kernel_takes(spec)
    has_mask = masking.mask is not None or masking.bias is not None or spec.reach is not None
    return bool(takes_layer and x.dtype != ttnn.float32 and not has_mask and not dropout.rate)


def _attend_in_prefill(
    q: Tensor,
    new: tuple[Tensor, ...],
    cache: CacheT,
    new_lengths: np.ndarray | Sequence[int] | None,
    masking: Masking,
    dropout: Dropout,
    attention: _Attention,
) -> tuple[Tensor, CacheT]:
    """Append tokens, q (B, N, T, H), new (B, K, T, H) each, and attend from each to everything up to it."""
    before, seq_len = cache.lengths, q.shape[2]
    cache = append_checked(cache, new, num_added(cache, seq_len, new_lengths))
    if before.any() or seq_len > cache.capacity:  # padding beyond the capacity, which a mask does not reach
        return _attend_to_slots(q, cache, before, masking, dropout, attention), cache
    # Right padding needs no mask of its own: no real token sees what comes after it.
    masking = _first_slots(masking, seq_len).of_layer(attention.spec)
    return _attend(q, new, masking, dropout, attention), cache


def _attend_to_slots(
    q: Tensor,
    cache: KVCache | LatentCache,
    before: np.ndarray,
    masking: Masking,
    dropout: Dropout,
    attention: _Attention,
) -> Tensor:
    """Attend from new tokens, q (B, N, T, H), that are in the cache already, to everything up to each."""
    seq_len = q.shape[2]
    filled = min(round_up(int(before.max(initial=0)) + seq_len), cache.capacity)
    slots = tuple(first_slots(x, filled, cache.pages) for x in cache.slots.values())
    masking = replace(_first_slots(masking, filled), reach=attention.spec.reach, offsets=before)
    return _attend(q, slots, masking, dropout, attention)


def _attend(q: Tensor, slots: tuple[Tensor, ...], masking: Masking, dropout: Dropout, attention: _Attention) -> Tensor:
    """Attend on the plain path where the fused kernel cannot."""
    keys, values = attention.seen(slots, q.dtype)
    if q.dtype == ttnn.float32 or dropout.rate:
        return stages.attend(q, keys, values, masking, dropout, need_weights=False, **attention.arithmetic)[0]
    return fused.attend(q, keys, values, masking, dropout, **attention.arithmetic)


def _first_slots(masking: Masking, count: int) -> Masking:
    """The mask and the bias of the first slots only, where they have one for each slot."""

    def cut(x: Any) -> Any:
        if x is None or not len(x.shape) or x.shape[-1] in (1, count):
            return x
        return on_host(x)[..., :count] if not isinstance(x, Tensor) else x[..., :count]

    return replace(masking, mask=cut(masking.mask), bias=cut(masking.bias))


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal multi-head self-attention over everything cached; made as `AttentionLayer`."""

    _is_self_attention = True

    def init_cache(
        self, batch_size: int, capacity: int, dtype: ttnn.DataType | None = None, *, page_size: int | None = None
    ) -> KVCache:
        """An empty cache for this module, beside its weights.

        Args:
            batch_size: number of sequences, B.
            capacity: number of slots of each sequence.
            dtype: of keys and values; that of the module's inputs when absent. bfloat8_b halves the memory of a module
                that takes bfloat16.
            page_size: slots of a page, whole tiles: the cache is then a `PagedKVCache`, for bfloat16 and bfloat8_b.

        Raises:
            TypeError: if a size is not an integer or the dtype not floating point.
            ValueError: if the capacity is below 1, the batch size below 0, or a page has parts of tiles.
        """
        dtype = self.dtype if dtype is None else dtype
        spec, device = self.own_spec, self.device
        widths = {"head_dim": padded_features("k_proj", spec), "value_head_dim": padded_features("v_proj", spec)}
        cache = init_cache(batch_size, spec.num_kv_heads, capacity, dtype=dtype, device=device, **widths)
        return cache if page_size is None else paged(cache, page_size)

    def __call__(
        self,
        x: Float[Tensor, "B T d_in"],
        cache: KVCache,
        *,
        new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
        mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
        bias: Float[np.ndarray, "..."] | Tensor | None = None,
        positions: Int[np.ndarray, "... #B T"] | None = None,
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
            positions: place of each new token, (B or 1, T), or with sections (axes, B or 1, T), on the host;
                `cache.lengths` and those after it when absent.

        Returns:
            The output (B, T, E) and the cache with the new tokens.

        Raises:
            TypeError: if x is not on the device, dtypes differ, the mask is not boolean or the lengths are not
                integers.
            ValueError: if the shapes do not fit, or the new tokens do not fit into the capacity.
        """
        check_is_cache(cache)
        check_floating("x", x, rank=3)
        check_input_dtype("x", x, self.dtype)
        self.check_dropout()
        is_own = getattr(self.project, "__func__", None) is AttentionLayer.project  # not replaced
        output, cache = cached_layer(
            self.project,
            x,
            cache,
            self.own_spec,
            self.with_learned(Masking(mask, bias, is_causal=True)),
            new_lengths=new_lengths,
            positions=positions,
            dropout=self.drawn_dropout(),
            compute_kernel_config=self.compute_kernel_config,
            own_weights=self.weights if is_own else None,
            kept=self._kept,
        )
        return self.drop_output(output), cache
