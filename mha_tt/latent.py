"""Multi-head latent attention (MLA): a cache of latents, and attention over them.

Axes: B batch, T new tokens, S cache slots, N query heads, H head_dim, Hv value_head_dim, E d_model,
W kv_rank + rope_dim.

Without a cache the layer is that of `mha`: keys and values of all heads, made of the latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec
from mha_spec.attention import check_latent, check_spec, spec_from
from mha_tt.arrays import check_floating
from mha_tt.cache import LatentCache, check_is_cache, init_latent_cache
from mha_tt.cache_mha import cached_layer
from mha_tt.kernels import Kernel, fused
from mha_tt.masks import DeviceMask
from mha_tt.mha import AttentionLayer, FunctionalLayer
from mha_tt.projections import HeadWeights, weights_of_heads
from mha_tt.weights import check_weights


def multi_head_latent_attention(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    cache: LatentCache,
    *,
    new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
    mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
    bias: Float[np.ndarray, "..."] | Tensor | None = None,
    positions: Int[np.ndarray, "... #B T"] | None = None,
    absorb: bool | None = None,
    kernel: Kernel = fused.attend,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B T E"], LatentCache]:
    """Causal self-attention of new tokens over all tokens so far, of which a cache holds the latents.

    Arguments are those of `multi_head_attention_with_static_cache`, but for these.

    Args:
        spec: what the layer computes, with latents; nothing is dropped.
        absorb: attend over the latents themselves, kv_b_proj taken into queries and context; or, if False, over the
            keys and values made of them. Whichever costs less when absent: see `AttentionSpec.absorbs`.

    Returns:
        The output (B, T, E) and the cache with the new tokens.

    Raises:
        TypeError: if x is not floating point, dtypes differ, the mask is not boolean or the lengths are not integers.
        ValueError: if the layer has no latents, the weights or the shapes do not fit, or the new tokens do not fit into
            the capacity.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    check_spec(spec, is_self_attention=True)
    check_latent(spec)
    check_weights(weights, spec)
    check_is_cache(cache, LatentCache)
    check_floating("x", x, rank=3)
    absorb = spec.absorbs(x.shape[1]) if absorb is None else absorb
    return cached_layer(
        FunctionalLayer(weights, spec, kernel, compute_kernel_config=compute_kernel_config),
        x,
        cache,
        mask,
        bias,
        new_lengths=new_lengths,
        positions=positions,
        kv_b=(lambda: weights_of_heads(weights["kv_b_proj.weight"], spec)) if absorb else None,
    )


class MultiHeadLatentAttention(AttentionLayer):
    """Causal multi-head latent self-attention over everything cached; made as `AttentionLayer`, of a spec with latents.

    Without a cache `MultiHeadSelfAttention` is the same layer, with the same weights.
    """

    _is_self_attention = True

    def __init__(
        self,
        spec: AttentionSpec | int | None = None,
        num_heads: int | None = None,
        *,
        device: ttnn.MeshDevice,
        dtype: ttnn.DataType = ttnn.bfloat16,
        weight_dtype: ttnn.DataType | None = None,
        compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
        rng: np.random.Generator | None = None,
        **fields: Any,
    ) -> None:
        spec = spec_from(spec, num_heads, fields)
        check_latent(spec)
        self._heads: tuple[Tensor, HeadWeights] | None = None
        super().__init__(
            spec,
            device=device,
            dtype=dtype,
            weight_dtype=weight_dtype,
            compute_kernel_config=compute_kernel_config,
            rng=rng,
        )

    def init_cache(self, batch_size: int, capacity: int, dtype: ttnn.DataType | None = None) -> LatentCache:
        """An empty cache for this module, beside its weights.

        Arguments are those of `MultiHeadAttentionWithCache.init_cache`, which raises the same; there are no pages.
        """
        latent = check_latent(self.spec)
        dtype = self.dtype if dtype is None else dtype
        return init_latent_cache(batch_size, capacity, latent.kv_rank, latent.rope_dim, dtype=dtype, device=self.device)

    def __call__(
        self,
        x: Float[Tensor, "B T d_in"],
        cache: LatentCache,
        *,
        new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
        mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
        bias: Float[np.ndarray, "..."] | Tensor | None = None,
        positions: Int[np.ndarray, "... #B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], LatentCache]:
        """Append the latents of the new tokens to the cache and attend from each to everything up to it.

        Arguments and results are those of `multi_head_attention_with_static_cache`; x lies on the device, in the dtype
        of the module.

        Raises:
            TypeError: if x is not on the device, dtypes differ, the mask is not boolean or the lengths are not
                integers.
            ValueError: if the shapes do not fit, or the new tokens do not fit into the capacity.
        """
        check_is_cache(cache, LatentCache)
        self.check_input("x", x)
        kv_b = self._kv_b if self.spec.absorbs(x.shape[1]) else None
        output, cache = cached_layer(
            self, x, cache, mask, bias, new_lengths=new_lengths, positions=positions, kv_b=kv_b
        )
        return self.drop_output(output), cache

    def _kv_b(self) -> HeadWeights:
        """The weight of kv_b_proj head by head, kept until other weights are loaded."""
        weight = self.weights["kv_b_proj.weight"]
        if self._heads is None or self._heads[0] is not weight:
            self._heads = weight, weights_of_heads(weight, self.spec)
        return self._heads[1]
