"""Multi-head attention with a key/value cache: an argument and a result, growing or of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim,
Hv value_head_dim, E d_model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_spec import AttentionSpec
from mha_spec.attention import check_spec
from mha_torch import fused
from mha_torch.arrays import check_floating, is_autocast_on
from mha_torch.cache import (
    KVCache,
    append_checked,
    check_cache,
    check_cached_input,
    check_room,
    has_room,
    init_cache,
)
from mha_torch.masks import Masking, as_lengths, check_bias, check_mask
from mha_torch.mha import AttentionLayer
from mha_torch.not_finite import by_finite_tokens, emptied, spoilt
from mha_torch.projections import project_output, project_qkv
from mha_torch.rope import check_layer_positions
from mha_torch.stages import Dropout
from mha_torch.weights import Project, check_weights, project_with

torch.export.register_dataclass(KVCache)  # a pytree,
torch.serialization.add_safe_globals([KVCache])  # which torch.load reads with weights_only


def multi_head_attention_with_cache(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    cache_k: Float[Tensor, "B K P H"] | None = None,
    cache_v: Float[Tensor, "B K P Hv"] | None = None,
    *,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    positions: Int[Tensor, "... #B T"] | None = None,
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
        positions: place of each new token, (B or 1, T), or with sections (axes, B or 1, T); P, P + 1, … when
            absent.

    Returns:
        The output (B, T, E), and the keys and values of all S = P + T tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ or the mask is not boolean.
        ValueError: if the weights or the shapes do not fit, devices differ, a weight is not finite (where values are
            known), or only one of cache_k and cache_v is given.
    """
    check_spec(spec, is_self_attention=True)
    check_weights(weights, spec)
    check_floating("x", x, rank=3)
    check_layer_positions(positions, x.shape[0], x.shape[1], spec)
    if (cache_k is None) != (cache_v is None):
        raise ValueError("cache_k and cache_v must be given together, got only one of them")
    if cache_k is not None:
        check_floating("cache_k", cache_k, rank=4)
    cache_len = 0 if cache_k is None else cache_k.shape[2]
    seq_len = x.shape[1]
    project = by_finite_tokens(project_with(weights, spec))
    positions = cache_len + torch.arange(seq_len, device=x.device)[None] if positions is None else positions
    q, k, v = project_qkv(project, x, x, x, spec, positions)
    if cache_k is not None and cache_v is not None:
        check_cache(cache_k, cache_v, k, v)
        k, v = torch.cat([cache_k, k], dim=2), torch.cat([cache_v, v], dim=2)
    check_mask(mask, (*q.shape[:3], cache_len + seq_len))
    masking = Masking(mask, bias, is_causal=True, reach=spec.reach, offsets=torch.full((1,), cache_len))
    if seq_len == 1 and spec.reach is None and not spec.has_distance_bias:  # it sees everything, from wherever it is
        masking = Masking(mask, bias)
    elif not cache_len:
        masking = replace(masking, offsets=None)
    context = fused.attend(q, k, v, masking.with_weights(weights), Dropout(), spec=spec)
    return project_output(project, context, x, spec), k, v


def multi_head_attention_with_static_cache(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    cache: KVCache,
    *,
    new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    positions: Int[Tensor, "... #B T"] | None = None,
) -> tuple[Float[Tensor, "B T E"], KVCache]:
    """Causal self-attention of new tokens over all tokens so far, with a cache of fixed capacity.

    Args:
        x: the new tokens, (B, T, d_in).
        weights: as `multi_head_attention` takes them.
        spec: what the layer computes; nothing is dropped.
        cache: the tokens so far. Do not use it afterwards; its storage may be reused.
        new_lengths: how many of the T tokens of each sequence are real, 0..T, (B,); the rest is right padding: not
            cached, output 0, and seen by nobody, so that it may hold anything. All of them when absent.
        mask: boolean, True = masked, beside causality; broadcasts to (B, N, T, capacity). A row without a key gives 0.
        bias: added to the scores; broadcasts to (B, N, T, capacity). -inf masks a key.
        positions: place of each new token, (B or 1, T), or with sections (axes, B or 1, T); `cache.lengths`
            and those after it when absent.

    Returns:
        The output (B, T, E) and the cache with the new tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ, the mask is not boolean or the lengths are not integers.
        ValueError: if the weights or the shapes do not fit, devices differ, a weight is not finite or the new tokens do
            not fit into the capacity (where values are known).
    """
    check_spec(spec, is_self_attention=True)
    check_weights(weights, spec)
    masking = Masking(mask, bias, is_causal=True).with_weights(weights)
    return _cached_layer(
        project_with(weights, spec),
        x,
        cache,
        spec,
        masking,
        new_lengths=new_lengths,
        positions=positions,
        dropout=Dropout(),
    )


def _cached_layer(
    project: Project,
    x: Tensor,
    cache: KVCache,
    spec: AttentionSpec,
    masking: Masking,
    *,
    new_lengths: Tensor | Sequence[int] | None,
    positions: Tensor | None,
    dropout: Dropout,
) -> tuple[Tensor, KVCache]:
    check_cached_input(x, cache)
    seq_len = x.shape[1]
    check_layer_positions(positions, x.shape[0], seq_len, spec)
    check_mask(masking.mask, (x.shape[0], spec.num_heads, seq_len, cache.capacity))
    lengths = check_room(cache, seq_len, new_lengths)
    is_real = None
    if new_lengths is not None:
        is_real = torch.arange(seq_len, device=x.device) < as_lengths(new_lengths, x.device)[:, None]
        x = emptied(x, ~is_real[:, :, None])  # not even a NaN of the padding may spread, to the gradients either
    if spec.has_positions:
        if positions is None:
            positions = cache.lengths[:, None] + torch.arange(seq_len, device=x.device)
        if is_real is not None:  # padding makes no sequence longer
            positions = torch.where(is_real, positions, positions[..., :1])
    project = by_finite_tokens(project)
    q, k, v = project_qkv(project, x, x, x, spec, positions)
    check_cache(cache.keys, cache.values, k, v, ("cache.keys", "cache.values"))
    check_bias(masking.bias, (*q.shape[:3], cache.capacity), q)
    before, cache = cache, append_checked(cache, k, v, new_lengths, lengths)
    if lengths is None:
        context = _attend_to_every_slot(q, before, cache, spec, masking, dropout, new_lengths)
    else:
        context = _attend_to_filled_slots(q, before, cache, spec, masking, dropout, lengths)
    output = project_output(project, context, x, spec)
    if is_real is not None:
        output = emptied(output, ~is_real[:, :, None])
    return output, cache


def _attend_to_every_slot(
    q: Tensor,
    before: KVCache,
    cache: KVCache,
    spec: AttentionSpec,
    masking: Masking,
    dropout: Dropout,
    new_lengths: Tensor | Sequence[int] | None,
) -> Tensor:
    """Attend from new tokens, q (B, N, T, H), that are in the cache, without looking at a length."""
    seq_len = q.shape[2]
    masking = replace(masking, reach=spec.reach, offsets=before.lengths)
    context = fused.attend(q, cache.keys, cache.values, masking, dropout, spec=spec)
    added = seq_len if new_lengths is None else as_lengths(new_lengths, q.device)
    return spoilt(context, ~has_room(before, seq_len, added)[:, None, None, None])


def _attend_to_filled_slots(
    q: Tensor,
    before: KVCache,
    cache: KVCache,
    spec: AttentionSpec,
    masking: Masking,
    dropout: Dropout,
    lengths: list[int],
) -> Tensor:
    """Attend from new tokens, q (B, N, T, H), that are in the cache, reading no slot that none of them sees."""
    seq_len, first, last = q.shape[2], min(lengths, default=0), max(lengths, default=0)
    filled = min(last + seq_len, cache.capacity)  # may pass the capacity where the last tokens are padding
    slots = slice(0 if spec.reach is None else max(spec.reach.first(first), 0), filled)
    masking = replace(masking, reach=spec.reach, offsets=before.lengths).part(slice(0, seq_len), slots)
    # One token sees all that is filled and in its reach.
    if first == last and seq_len == 1 and not spec.has_distance_bias:
        masking = Masking(masking.mask, masking.bias, sinks=masking.sinks)
    elif last == 0:  # a prompt; right padding is seen by no real token
        masking = replace(masking, offsets=None)
    return fused.attend(q, cache.keys[:, :, slots], cache.values[:, :, slots], masking, dropout, spec=spec)


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal multi-head self-attention over everything cached; made as `AttentionLayer`."""

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
        spec, device = self.spec, weight.device
        widths = {"head_dim": spec.head_dim, "value_head_dim": spec.value_head_dim}
        return init_cache(batch_size, spec.num_kv_heads, capacity, dtype=dtype, device=device, **widths)

    def forward(
        self,
        x: Float[Tensor, "B T d_in"],
        cache: KVCache,
        *,
        new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        positions: Int[Tensor, "... #B T"] | None = None,
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
            positions: place of each new token, (B or 1, T), or with sections (axes, B or 1, T);
                `cache.lengths` and those after it when absent.

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
            self.spec,
            Masking(mask, bias, is_causal=True, sinks=self.sinks, relative_bias=self.relative_bias),
            new_lengths=new_lengths,
            positions=positions,
            dropout=self.drawn_dropout(),
        )
        return self.drop_output(output), cache
