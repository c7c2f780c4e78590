"""Multi-head latent attention (MLA) with a cache of latents.

Axes: B batch, T new tokens, S cache slots, N query heads, H head_dim, Hv value_head_dim, E d_model,
W kv_rank + rope_dim.

Without a cache, `mha` has the same layer: it expands the latents to keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec
from mha_spec.attention import check_latent, check_spec, spec_from
from mha_tt.cache_mha import cached_layer
from mha_tt.checks import check_is_cache, check_weights, checked
from mha_tt.features.latent import HeadWeights, LatentCache, init_latent_cache, weights_of_heads
from mha_tt.kernels import Kernel, fused
from mha_tt.masks import DeviceMask
from mha_tt.mha import AttentionLayer, FunctionalLayer


def multi_head_latent_attention(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    cache: LatentCache,
    *,
    new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
    mask: Bool[np.ndarray, "*#scores"] | DeviceMask | None = None,
    bias: Float[np.ndarray | Tensor, "*#scores"] | None = None,
    positions: Int[np.ndarray, "*axes #B T"] | None = None,
    absorb: bool | None = None,
    kernel: Kernel = fused.attend,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B T E"], LatentCache]:
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
    check_weights(weights, spec)
    check_is_cache(cache, LatentCache)
    if absorb is None:
        absorb = spec.absorbs(x.shape[1])
    get_kv_b = None
    if absorb:
        get_kv_b = partial(weights_of_heads, weights["kv_b_proj.weight"], spec)
    return cached_layer(
        FunctionalLayer(weights, spec, kernel, compute_kernel_config=compute_kernel_config),
        x,
        cache,
        mask,
        bias,
        new_lengths=new_lengths,
        positions=positions,
        get_kv_b=get_kv_b,
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

    def init_cache(
        self, batch_size: int, capacity: int, dtype: ttnn.DataType | None = None
    ) -> LatentCache:
        """Return an empty cache for this module, on the device of its weights.

        Args:
            batch_size: number of sequences, B.
            capacity: number of slots per sequence.
            dtype: dtype of the latents; default: the dtype of the module's inputs. bfloat8_b halves
                the memory of a bfloat16 module.

        Raises:
            TypeError: if a size is not an integer or the dtype not floating point.
            ValueError: if the capacity is below 1 or the batch size below 0.
        """
        latent = check_latent(self.spec)
        if dtype is None:
            dtype = self.dtype
        return init_latent_cache(
            batch_size, capacity, latent.kv_rank, latent.rope_dim, dtype=dtype, device=self.device
        )

    @checked
    def __call__(
        self,
        x: Float[Tensor, "B T d_in"],
        cache: LatentCache,
        *,
        new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
        mask: Bool[np.ndarray, "*#scores"] | DeviceMask | None = None,
        bias: Float[np.ndarray | Tensor, "*#scores"] | None = None,
        positions: Int[np.ndarray, "*axes #B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], LatentCache]:
        """Append the latents of new tokens to the cache; each attends to all tokens up to itself.

        Results, errors and other arguments are as in `MultiHeadAttentionWithCache`.
        """
        check_is_cache(cache, LatentCache)
        self.check_input("x", x)
        get_kv_b = None
        if self.spec.absorbs(x.shape[1]):
            get_kv_b = self._kv_b
        output, cache = cached_layer(
            self,
            x,
            cache,
            mask,
            bias,
            new_lengths=new_lengths,
            positions=positions,
            get_kv_b=get_kv_b,
        )
        return self.drop_output(output), cache

    def _kv_b(self) -> HeadWeights:
        """Return the weight of kv_b_proj by head, cached until other weights are loaded."""
        weight = self.weights["kv_b_proj.weight"]
        if self._heads is None or self._heads[0] is not weight:
            self._heads = weight, weights_of_heads(weight, self.spec)
        return self._heads[1]
