"""Multi-head latent attention (MLA) with a cache of latents.

Axes: B batch, T new tokens, S cache slots, N query heads, H head_dim, Hv value_head_dim, E d_model,
W kv_rank + rope_dim.

Without a cache, `mha` has the same layer: it expands the latents to keys and values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mha_spec import AttentionSpec
from mha_spec.attention import check_latent, check_spec, spec_from
from mha_torch.arrays import is_distributed
from mha_torch.cache_mha import cache_dtype, cached_layer
from mha_torch.checks import check_is_cache, check_weights, checked
from mha_torch.features.latent import LatentCache, init_latent_cache
from mha_torch.kernels import Kernel, fused
from mha_torch.mha import AttentionLayer, FunctionalLayer


def multi_head_latent_attention(
    x: Float[Tensor, "B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    cache: LatentCache,
    *,
    new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    mask: Bool[Tensor, "*#scores"] | None = None,
    bias: Float[Tensor, "*#scores"] | None = None,
    positions: Int[Tensor, "*axes #B T"] | None = None,
    absorb: bool | None = None,
    kernel: Kernel = fused.attend,
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
    kv_b = None
    if absorb:
        kv_b = weights["kv_b_proj.weight"]
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        spec = spec_from(spec, num_heads, fields)
        check_latent(spec)
        super().__init__(spec, device=device, dtype=dtype)

    def init_cache(
        self, batch_size: int, capacity: int, dtype: torch.dtype | None = None
    ) -> LatentCache:
        """Return an empty cache for this module, on the device of its weights.

        Args:
            batch_size: number of sequences, B.
            capacity: number of slots per sequence.
            dtype: floating-point dtype of the latents; default: autocast's if it is on, else the
                weights'.

        Raises:
            TypeError: if a size is not an integer or the dtype not floating point.
            ValueError: if the capacity is below 1 or the batch size below 0.
        """
        latent = check_latent(self.spec)
        weight = next(self.parameters())
        if dtype is None:
            dtype = cache_dtype(weight)
        return init_latent_cache(
            batch_size, capacity, latent.kv_rank, latent.rope_dim, dtype=dtype, device=weight.device
        )

    @checked
    def forward(
        self,
        x: Float[Tensor, "B T d_in"],
        cache: LatentCache,
        *,
        new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
        mask: Bool[Tensor, "*#scores"] | None = None,
        bias: Float[Tensor, "*#scores"] | None = None,
        positions: Int[Tensor, "*axes #B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T E"], LatentCache]:
        """Append the latents of new tokens to the cache; each attends to all tokens up to itself.

        Results, errors and other arguments are as in `MultiHeadAttentionWithCache`.
        """
        check_is_cache(cache, LatentCache)
        kv_b = None
        if self.spec.absorbs(x.shape[1]):
            kv_b = self._kv_b()
        output, cache = cached_layer(
            self, x, cache, mask, bias, new_lengths=new_lengths, positions=positions, kv_b=kv_b
        )
        return self.drop_output(output), cache

    def _kv_b(self) -> Tensor | None:
        """Return the weight of kv_b_proj; None if kv_b_proj was replaced, hooked or biased and must
        be called.
        """
        projection = self.kv_b_proj
        if type(projection) is not nn.Linear or projection.bias is not None:
            return None
        if "forward" in vars(projection) or hooks_of(projection):
            return None
        if is_distributed(projection.weight):
            return None
        return projection.weight


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks that run when a module is called."""
    return [
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
        *module._backward_pre_hooks.values(),
    ]
