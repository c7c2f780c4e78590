"""Multi-head attention with a key/value cache of fixed capacity. Caches are arguments and results.

Axes: B batch, T new tokens, S cache slots, N query heads, K key/value heads, H head_dim,
Hv value_head_dim, E d_model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_spec import AttentionSpec
from mha_spec.attention import check_latent, check_spec
from mha_spec.rules import check_broadcasts
from mha_torch.arrays import is_autocast_on, nan_where, zero_where
from mha_torch.cache import (
    Cache,
    CacheT,
    KVCache,
    append_unchecked,
    check_cache,
    check_cached_input,
    check_room,
    has_room,
    init_cache,
    mark_written_over,
    without_new,
)
from mha_torch.checks import (
    check_is_cache,
    check_kernel,
    check_positions,
    check_shared_kv,
    check_weights,
    checked,
)
from mha_torch.features.latent import (
    LatentCache,
    absorb_keys,
    absorb_values,
    check_latent_cache,
    expand_latents,
    project_latents,
)
from mha_torch.kernels import Kernel, fused
from mha_torch.masks import Mask, as_lengths, block_of
from mha_torch.mha import AttentionLayer, FunctionalLayer
from mha_torch.padding import padding_after
from mha_torch.projections import project_output, project_qkv
from mha_torch.weights import Project

torch.export.register_dataclass(KVCache)  # register as pytrees
torch.export.register_dataclass(LatentCache)
# torch.load reads them with weights_only.
torch.serialization.add_safe_globals([KVCache, LatentCache])


def multi_head_attention_with_cache(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    cache: KVCache,
    *,
    new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    mask: Bool[Tensor, "*#scores"] | None = None,
    bias: Float[Tensor, "*#scores"] | None = None,
    positions: Int[Tensor, "*axes #B T"] | None = None,
    kernel: Kernel = fused.attend,
) -> tuple[Float[Tensor, "B T E"], KVCache]:
    """Causal self-attention of new tokens over all tokens so far, with a cache of fixed capacity.

    Results, errors and other arguments are as in `MultiHeadAttentionWithCache`.

    Args:
        weights: see `multi_head_attention`.
        spec: the layer; dropout is not applied.
        kernel: computes the context.
    """
    check_spec(spec, is_self_attention=True)
    check_weights(weights, spec)
    check_is_cache(cache, KVCache)
    return cached_layer(
        FunctionalLayer(weights, spec, kernel),
        x,
        cache,
        mask,
        bias,
        new_lengths=new_lengths,
        positions=positions,
    )


def cached_layer(
    layer: AttentionLayer | FunctionalLayer,
    x: Tensor,
    cache: CacheT,
    mask: Tensor | None,
    bias: Tensor | None,
    *,
    new_lengths: Tensor | Sequence[int] | None,
    positions: Tensor | None,
    kv_b: Tensor | None = None,
) -> tuple[Tensor, CacheT]:
    """Append new tokens to a cache of either type and attend.

    With `kv_b`, the weight of kv_b_proj, in the absorbed form.
    """
    spec = layer.spec
    check_kernel(layer.kernel)
    check_cached_input(x, cache, spec)
    seq_len = x.shape[1]
    scores = layer.scores(bias)
    scores_shape = (x.shape[0], spec.num_heads, seq_len, cache.capacity)
    if mask is not None:
        check_broadcasts("mask", tuple(mask.shape), scores_shape)
    scores.check_arguments(scores_shape, x)
    if positions is not None:
        check_positions(positions, x.shape[0], seq_len, spec.rope)
    # With `shared_kv` the other layer has appended the new tokens.
    if spec.shared_kv:
        before = without_new(cache, seq_len, new_lengths)
    else:
        before = cache
    lengths = check_room(before, seq_len, new_lengths)

    is_padding = None
    if new_lengths is not None:
        is_padding = padding_after(new_lengths, seq_len, x.device)
        # NaN in padding must not spread, not even to gradients.
        x = zero_where(x, is_padding[:, :, None])
    if spec.has_positions:
        if positions is None:
            positions = before.lengths[:, None] + torch.arange(seq_len, device=x.device)
        if is_padding is not None:
            # Frequencies may depend on the last position: padding must not move it.
            positions = torch.where(is_padding, positions[..., :1], positions)
    q, new = _project_new_tokens(layer.project, x, before, spec, positions)
    if not spec.shared_kv:
        cache = append_unchecked(before, new, new_lengths, lengths)
    slots, full_mask = _slots_in_reach(mask, spec, before, lengths, seq_len)
    q, k, v, scores_spec = _keys_and_values(q, cache, slots, spec, layer.project, kv_b)
    if scores_spec is not spec:
        scores = replace(scores, spec=scores_spec)
    scores = scores.block(slice(0, seq_len), slots)
    context = layer.kernel(q, k, v, full_mask, scores)
    # Lengths are unknown in a compiled graph or on an accelerator: sequences without room become
    # NaN instead of an error.
    if lengths is None:
        if new_lengths is None:
            added = seq_len
        else:
            added = as_lengths(new_lengths, q.device)
        context = nan_where(context, ~has_room(before, seq_len, added)[:, None, None, None])
    if kv_b is not None:
        context = absorb_values(context, kv_b, spec)
    output = project_output(layer.project, context, x, spec)
    if is_padding is not None:
        output = zero_where(output, is_padding[:, :, None])
    # At the end: a step that raised an error can be repeated.
    mark_written_over(before, cache)
    return output, cache


def _project_new_tokens(
    project: Project, x: Tensor, cache: Cache, spec: AttentionSpec, positions: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the queries of new tokens and their cache entries."""
    if isinstance(cache, LatentCache):
        q, latents = project_latents(project, x, spec, positions)
        check_latent_cache(cache, latents)
        return q, (latents,)
    keys, values = cache.slots.values()
    if spec.shared_kv:
        check_shared_kv(x, keys, values, spec, ("cache.keys", "cache.values"))
        return project_qkv(project, x, keys, values, spec, positions)[0], ()
    q, k, v = project_qkv(project, x, x, x, spec, positions)
    check_cache(keys, values, k, v)
    return q, (k, v)


def _keys_and_values(
    q: Tensor,
    cache: Cache,
    slots: slice,
    spec: AttentionSpec,
    project: Project,
    kv_b: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """Return queries, keys and values of some slots and their spec; in the absorbed form the
    latents are both.
    """
    if isinstance(cache, KVCache):
        return q, cache.keys[:, :, slots], cache.values[:, :, slots], spec
    latents = cache.slots["latents"][:, :, slots]
    if kv_b is None:
        return q, *expand_latents(project, latents, spec), spec
    values = latents[..., : check_latent(spec).kv_rank]
    return absorb_keys(q, kv_b, spec), latents, values, spec.absorbed


def _slots_in_reach(
    mask: Tensor | None,
    spec: AttentionSpec,
    before: Cache,
    lengths: list[int] | None,
    seq_len: int,
) -> tuple[slice, Mask]:
    """Return the slots that any new token attends to, all if lengths are unknown, and their
    mask.
    """
    if lengths is None:
        full_mask = Mask(mask, is_causal=True, span=spec.span, q_offset=before.lengths)
        return slice(0, before.capacity), full_mask
    shortest = min(lengths, default=0)
    longest = max(lengths, default=0)
    first = 0
    if spec.span is not None:
        first = max(spec.span.first(shortest), 0)
    # May exceed the capacity if the last tokens are padding.
    stop = min(longest + seq_len, before.capacity)
    slots = slice(first, stop)
    # A single token of equally long sequences attends to all slots of its span; biases by distance
    # need its position.
    if seq_len == 1 and shortest == longest and not spec.has_distance_bias:
        return slots, Mask(block_of(mask, slice(0, 1), slots))
    full_mask = Mask(mask, is_causal=True, span=spec.span, q_offset=before.lengths)
    full_mask = full_mask.block(slice(0, seq_len), slots)
    # A prompt: causality hides right padding.
    if longest == 0:
        full_mask = replace(full_mask, q_offset=None)
    return slots, full_mask


def cache_dtype(weight: Tensor) -> torch.dtype:
    """Return the cache dtype of a module with this weight: autocast's if it is on, else the
    weight's.
    """
    if is_autocast_on(weight.device) and weight.dtype != torch.float64:  # autocast skips float64
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal multi-head self-attention with a cache of fixed capacity. Constructor arguments: see
    `AttentionLayer`.

    The first call takes an empty cache, `layer.init_cache(batch_size, capacity)`, and each later
    call takes the cache that the previous one returned.
    """

    _is_self_attention = True

    def init_cache(
        self, batch_size: int, capacity: int, dtype: torch.dtype | None = None
    ) -> KVCache:
        """Return an empty cache for this module, on the device of its weights.

        Args:
            batch_size: number of sequences, B.
            capacity: number of slots per sequence.
            dtype: floating-point dtype of keys and values; default: autocast's if it is on, else
                the weights'.

        Raises:
            TypeError: if a size is not an integer or the dtype not floating point.
            ValueError: if the capacity is below 1 or the batch size below 0.
        """
        weight = next(self.parameters())
        dtype = cache_dtype(weight) if dtype is None else dtype
        spec = self.spec
        return init_cache(
            batch_size,
            spec.num_kv_heads,
            capacity,
            spec.head_dim,
            dtype,
            value_head_dim=spec.value_head_dim,
            device=weight.device,
        )

    @checked
    def forward(
        self,
        x: Float[Tensor, "B T d_in"],
        cache: KVCache,
        *,
        new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
        mask: Bool[Tensor, "*#scores"] | None = None,
        bias: Float[Tensor, "*#scores"] | None = None,
        positions: Int[Tensor, "*axes #B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], KVCache]:
        """Append new tokens to the cache; each attends to all tokens up to itself.

        Args:
            x: new tokens, (B, T, d_in): a prompt, a part of one, or one token per sequence.
            cache: tokens so far. Do not use it afterwards: its storage may be reused. To keep it,
                pass `cache.copy()`. With `shared_kv` the cache of another layer, which has
                already appended the new tokens; it is returned unchanged.
            new_lengths: number of real tokens of each sequence, 0..T, (B,). The rest is right
                padding with arbitrary contents: it is not cached, not attended to, and its output
                is 0. Default: all.
            mask: boolean, True = masked, in addition to causality; broadcasts to (B, N, T,
                capacity). The output of a fully masked row is 0.
            bias: added to the scores, in the dtype of x; broadcasts to (B, N, T, capacity). -inf
                masks a key.
            positions: position of each new token, (B or 1, T), or with sections (axes, B or 1, T);
                default: `cache.lengths` and up.

        Returns:
            Output (B, T, E), and the cache with the new tokens.

        Raises:
            TypeError: if x is not floating point, dtypes differ, the mask is not boolean or the
                lengths are not integers.
            ValueError: if the shapes do not fit, devices differ, or the new tokens are known to
                exceed the capacity. (If lengths are unknown, as in a compiled graph, the output of
                a sequence that does not fit is NaN, and it keeps its old tokens.)
        """
        check_is_cache(cache, KVCache)
        output, cache = cached_layer(
            self, x, cache, mask, bias, new_lengths=new_lengths, positions=positions
        )
        return self.drop_output(output), cache
