"""Multi-head latent attention (MLA) with a cache of latents.

Axes: B batch, T new tokens, S cache slots, N query heads, H head_dim, Hv value_head_dim, E d_model,
W kv_rank + rope_dim.

Without a cache, `mha` has the same layer: it expands the latents to keys and values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from mha_jax.arrays import Array, cast
from mha_jax.cache_mha import cached_layer
from mha_jax.checks import check_is_cache, check_weights, checked
from mha_jax.features.latent import LatentCache, init_latent_cache
from mha_jax.kernels import Kernel, fused
from mha_jax.mha import AttentionLayer, FunctionalLayer, Projection
from mha_spec import AttentionSpec
from mha_spec.attention import check_latent, check_spec, spec_from


def multi_head_latent_attention(
    x: Float[Array, "B T d_in"],
    weights: Mapping[str, Any],
    spec: AttentionSpec,
    cache: LatentCache,
    *,
    new_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    mask: Bool[Array, "*#scores"] | None = None,
    bias: Float[Array, "*#scores"] | None = None,
    positions: Int[Array, "*axes #B T"] | None = None,
    absorb: bool | None = None,
    kernel: Kernel = fused.attend,
    dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "B T E"], LatentCache]:
    """Causal self-attention of new tokens over all tokens so far, with a cache of latents.

    Results, errors and other arguments are as in `multi_head_attention_with_cache`.

    Args:
        absorb: attend over the latents, with kv_b_proj absorbed into queries and context; if False,
            over the expanded keys and values. Default: whichever costs less, see
            `AttentionSpec.absorbs`.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    check_spec(spec, is_self_attention=True)
    check_latent(spec)
    x, bias, weights = cast((x, bias, weights), dtype)
    check_weights(weights, spec)
    check_is_cache(cache, LatentCache)
    if absorb is None:
        # All slots would be expanded: under jit it is unknown which are filled.
        absorb = spec.absorbs(x.shape[1], cache.capacity)
    kv_b = None
    if absorb:
        kv_b = weights["kv_b_proj"]["kernel"]
    return cached_layer(
        FunctionalLayer(weights, spec, kernel),
        x,
        cache,
        mask,
        bias,
        new_lengths=new_lengths,
        positions=positions,
        kv_b=kv_b,
    )


class MultiHeadLatentAttention(AttentionLayer):
    """Causal multi-head latent self-attention with a cache. Constructor arguments: see
    `AttentionLayer`.

    The spec has latents. Without a cache, `MultiHeadSelfAttention` is the same layer with the same
    weights.
    """

    _is_self_attention = True

    def __init__(
        self,
        spec: AttentionSpec | int | None = None,
        num_heads: int | None = None,
        *,
        dtype: jnp.dtype | None = None,
        param_dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
        **fields: Any,
    ) -> None:
        spec = spec_from(spec, num_heads, fields)
        check_latent(spec)
        super().__init__(spec, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def init_cache(
        self, batch_size: int, capacity: int, dtype: jnp.dtype | None = None
    ) -> LatentCache:
        """Return an empty cache for this module, on the device of its weights.

        Args:
            batch_size: number of sequences, B.
            capacity: number of slots per sequence.
            dtype: floating-point dtype of the latents; default: the dtype of the layer, or of its
                weights.

        Raises:
            TypeError: if a size is not an integer or the dtype not floating point.
            ValueError: if the capacity is below 1 or the batch size below 0.
        """
        latent = check_latent(self.spec)
        if dtype is None:
            dtype = self.dtype
        if dtype is None:
            projection: Projection = getattr(self, next(iter(self.spec.projections)))
            dtype = projection.kernel[...].dtype
        return init_latent_cache(batch_size, capacity, latent.kv_rank, latent.rope_dim, dtype=dtype)

    @checked
    def __call__(
        self,
        x: Float[Array, "B T d_in"],
        cache: LatentCache,
        *,
        new_lengths: Int[Array, " B"] | Sequence[int] | None = None,
        mask: Bool[Array, "*#scores"] | None = None,
        bias: Float[Array, "*#scores"] | None = None,
        positions: Int[Array, "*axes #B T"] | None = None,
    ) -> tuple[Float[Array, "B T E"], LatentCache]:
        """Append the latents of new tokens to the cache; each attends to all tokens up to itself.

        Results, errors and other arguments are as in `MultiHeadAttentionWithCache`.
        """
        check_is_cache(cache, LatentCache)
        x, bias = cast((x, bias), self.dtype)
        kv_b = None
        # All slots would be expanded: under jit it is unknown which are filled.
        if self.spec.absorbs(x.shape[1], cache.capacity):
            kv_b = self._kv_b()
        output, cache = cached_layer(
            self, x, cache, mask, bias, new_lengths=new_lengths, positions=positions, kv_b=kv_b
        )
        return self.drop_output(output), cache

    def _kv_b(self) -> Array | None:
        """Return the kernel of kv_b_proj; None if kv_b_proj was replaced and must be called."""
        projection = self.kv_b_proj
        if type(projection) is not Projection:
            return None
        return cast(projection.kernel[...], self.dtype)
