"""Multi-head attention with a key/value cache of fixed capacity. Caches are arguments and results.

Axes: B batch, T new tokens, S cache slots, N query heads, K key/value heads, H head_dim,
Hv value_head_dim, E d_model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from mha_jax.arrays import Array, cast, zero_where
from mha_jax.cache import (
    Cache,
    CacheT,
    KVCache,
    append_unchecked,
    check_cache,
    check_cached_input,
    check_room,
    has_room,
    init_cache,
    num_added,
    token_positions,
    without_new,
)
from mha_jax.checks import (
    check_is_cache,
    check_kernel,
    check_positions,
    check_shared_kv,
    check_weights,
    checked,
)
from mha_jax.compiled import compiled
from mha_jax.features.latent import (
    LatentCache,
    absorb_keys,
    absorb_values,
    check_latent_cache,
    expand_latents,
    project_latents,
)
from mha_jax.kernels import Kernel, fused, step_of
from mha_jax.masks import Mask
from mha_jax.mha import AttentionLayer, FunctionalLayer, Projection
from mha_jax.padding import padding_after
from mha_jax.projections import project_output, project_qkv
from mha_jax.weights import Project
from mha_spec import AttentionSpec
from mha_spec.attention import check_latent, check_spec
from mha_spec.rules import check_broadcasts


def multi_head_attention_with_cache(
    x: Float[Array, "B T d_in"],
    weights: Mapping[str, Any],
    spec: AttentionSpec,
    cache: KVCache,
    *,
    new_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    mask: Bool[Array, "*#scores"] | None = None,
    bias: Float[Array, "*#scores"] | None = None,
    positions: Int[Array, "*axes #B T"] | None = None,
    kernel: Kernel = fused.attend,
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "B T E"], KVCache]:
    """Causal self-attention of new tokens over all tokens so far, with a cache of fixed capacity.

    Results, errors and other arguments are as in `MultiHeadAttentionWithCache`.

    Args:
        weights: see `multi_head_attention`.
        spec: the layer; dropout is not applied.
        kernel: computes the context.
        dtype: floating-point dtype that x, bias and weights are cast to, and of the cache; default:
            their own.
    """
    check_spec(spec, is_self_attention=True)
    x, bias, weights = cast((x, bias, weights), dtype)
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
    x: Array,
    cache: CacheT,
    mask: Array | None,
    bias: Array | None,
    *,
    new_lengths: Array | Sequence[int] | None,
    positions: Array | None,
    kv_b: Array | None = None,
) -> tuple[Array, CacheT]:
    """Append new tokens to a cache of either type and attend.

    With `kv_b`, the kernel of kv_b_proj, in the absorbed form.
    """
    spec = layer.spec
    check_kernel(layer.kernel)
    check_cached_input(x, cache, spec)
    seq_len = x.shape[1]
    scores = layer.scores(bias)
    scores_shape = (x.shape[0], spec.num_heads, seq_len, cache.capacity)
    if mask is not None:
        check_broadcasts("mask", mask.shape, scores_shape)
    scores.check_arguments(scores_shape, x)
    if positions is not None:
        check_positions(positions, x.shape[0], seq_len, spec.rope)
    # With `shared_kv` the other layer has appended the new tokens.
    if spec.shared_kv:
        before = without_new(cache, seq_len, new_lengths)
    else:
        before = cache
    check_room(before, seq_len, new_lengths)

    lengths = jnp.asarray(before.lengths)
    added = num_added(before, seq_len, new_lengths)
    if new_lengths is not None:
        x = _zero_padded_tokens(x, added)
    if spec.has_positions:
        if positions is None:
            positions = token_positions(lengths, seq_len)
        # Frequencies may depend on the last position: padding must not move it.
        if new_lengths is not None:
            positions = _positions_without_padding(positions, added)
    q, new = _project_new_tokens(layer.project, x, before, spec, positions)
    if not spec.shared_kv:
        cache = append_unchecked(before, new, added)
    q, k, v, scores_spec = _keys_and_values(q, cache, spec, layer.project, kv_b)
    if scores_spec is not spec:
        scores = replace(scores, spec=scores_spec)
    # Sequences without room, whose output becomes NaN below, attend up to the last slot: kernels
    # read none beyond it.
    full_mask = Mask(
        mask, is_causal=True, span=spec.span, q_offset=jnp.minimum(lengths, cache.capacity - 1)
    )
    if seq_len == 1:
        attend = step_of(layer.kernel)
    else:
        attend = layer.kernel
    context = attend(q, k, v, full_mask, scores)
    if kv_b is not None:
        context = absorb_values(context, kv_b, spec)
    output = project_output(layer.project, context, x, spec)
    return _mark_padding_and_overflow(output, before, added), cache


def _project_new_tokens(
    project: Project, x: Array, cache: Cache, spec: AttentionSpec, positions: Array | None
) -> tuple[Array, tuple[Array, ...]]:
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
    q: Array, cache: Cache, spec: AttentionSpec, project: Project, kv_b: Array | None
) -> tuple[Array, Array, Array, AttentionSpec]:
    """Return queries, keys and values and their spec; in the absorbed form the latents are both."""
    if isinstance(cache, KVCache):
        return q, cache.keys, cache.values, spec
    (latents,) = cache.slots.values()
    if kv_b is None:
        return q, *expand_latents(project, latents, spec), spec
    values = latents[..., : check_latent(spec).kv_rank]
    return absorb_keys(q, kv_b, spec), latents, values, spec.absorbed


@compiled()
def _positions_without_padding(positions: Array, added: Array) -> Array:
    """Return the positions, (B, T) or (axes, B, T); padding has the position of the first token."""
    is_padding = padding_after(added, positions.shape[-1])
    # Broadcast explicitly, because `jax_numpy_rank_promotion` may be "raise".
    shape = (*positions.shape[:-2], *is_padding.shape)
    is_padding, positions, first = (
        jnp.broadcast_to(x, shape) for x in (is_padding, positions, positions[..., :1])
    )
    return jnp.where(is_padding, first, positions)


@compiled()
def _zero_padded_tokens(x: Array, added: Array) -> Array:
    """Return tokens with 0 in padding, where NaN must not spread, not even to gradients."""
    return zero_where(x, padding_after(added, x.shape[1])[:, :, None])


@compiled()
def _mark_padding_and_overflow(output: Array, cache: Cache, added: Array) -> Array:
    """Set padding to 0, and sequences without room to NaN: outside jit these raise an error, which
    jit does not allow.
    """
    fits = has_room(cache, output.shape[1], added)
    return jnp.where(fits[:, None, None], _zero_padded_tokens(output, added), jnp.nan)


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal multi-head self-attention with a cache of fixed capacity. Constructor arguments: see
    `AttentionLayer`.

    The first call takes an empty cache, `layer.init_cache(batch_size, capacity)`, and each later
    call takes the cache that the previous one returned.
    """

    _is_self_attention = True

    def init_cache(self, batch_size: int, capacity: int, dtype: jnp.dtype | None = None) -> KVCache:
        """Return an empty cache for this module, on the device of its weights.

        Args:
            batch_size: number of sequences, B.
            capacity: number of slots per sequence.
            dtype: floating-point dtype of keys and values; default: the dtype of the layer, or of
                its weights.

        Raises:
            TypeError: if a size is not an integer or the dtype not floating point.
            ValueError: if the capacity is below 1 or the batch size below 0.
        """
        dtype = self.dtype if dtype is None else dtype
        if dtype is None:
            projection: Projection = getattr(self, next(iter(self.spec.projections)))
            dtype = projection.kernel[...].dtype
        spec = self.spec
        return init_cache(
            batch_size,
            spec.num_kv_heads,
            capacity,
            spec.head_dim,
            value_head_dim=spec.value_head_dim,
            dtype=dtype,
        )

    @checked
    def __call__(
        self,
        x: Float[Array, "B T d_in"],
        cache: KVCache,
        *,
        new_lengths: Int[Array, " B"] | Sequence[int] | None = None,
        mask: Bool[Array, "*#scores"] | None = None,
        bias: Float[Array, "*#scores"] | None = None,
        positions: Int[Array, "*axes #B T"] | None = None,
    ) -> tuple[Float[Array, "B T E"], KVCache]:
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
            ValueError: if the shapes do not fit, or the new tokens exceed the capacity. (Under jit
                lengths are unknown; there the output of a sequence that does not fit is NaN, and it
                keeps its old tokens.)
        """
        check_is_cache(cache, KVCache)
        x, bias = cast((x, bias), self.dtype)
        output, cache = cached_layer(
            self, x, cache, mask, bias, new_lengths=new_lengths, positions=positions
        )
        return self.drop_output(output), cache
