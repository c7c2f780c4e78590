"""Functional multi-head attention, with weights as arguments.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model. A mask is boolean, True = masked (the query may not attend to the key);
an additive term is a bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError
from mha_tt.checks import check_weights
from mha_tt.features.rope import Rotation
from mha_tt.kernels import Kernel, fused
from mha_tt.masks import DeviceMask, Mask
from mha_tt.mha import FunctionalLayer, attention_layer
from mha_tt.stages import drop


def multi_head_attention(
    query: Float[Tensor, "*B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    key: Float[Tensor, "*B S d_kv"] | Float[Tensor, "*B K S H"] | None = None,
    value: Float[Tensor, "*B S d_kv"] | Float[Tensor, "*B K S Hv"] | None = None,
    *,
    bias: Float[np.ndarray | Tensor, "*#scores"] | None = None,
    need_weights: bool = False,
    positions: Int[np.ndarray, "*axes T"] | Rotation | None = None,
    training: bool = False,
    dropout_keep: Bool[np.ndarray, "*#scores"] | None = None,
    seed: int = 0,
    kernel: Kernel = fused.attend,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
    mask: Bool[np.ndarray, "*#scores"] | DeviceMask | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[np.ndarray, "*B"] | Sequence[int] | None = None,
    segment_ids: Int[np.ndarray, "*B T"]
    | tuple[Int[np.ndarray, "*B T"], Int[np.ndarray, "*B S"]]
    | None = None,
) -> tuple[Float[Tensor, "*B T E"], Float[Tensor, "*B N T S"] | None]:
    """Functional multi-head attention: project, split heads, attend, combine heads, project.

    Results, errors and other arguments are as in `MultiHeadAttention`.

    Args:
        weights: weights from `upload_weights`.
        spec: the layer.
        training: apply dropout to attention weights, which uses the plain path, and outputs, at the
            rates of the spec.
        dropout_keep: True for attention weights to keep, instead of a random draw; uses the plain
            path.
        seed: seed of dropout.
        kernel: computes the context, unless need_weights is set.
        compute_kernel_config: arithmetic of the device, including the default kernel; default:
            `accurate_config`.

    Source: Attention Is All You Need, arXiv:1706.03762, section 3.2.2.
    """
    check_weights(weights, spec)
    if dropout_keep is not None and not training:
        raise InputError(
            "dropout_keep", "come with training=True", "dropout_keep and training=False"
        )
    output, attn_weights = attention_layer(
        FunctionalLayer(weights, spec, kernel, training, dropout_keep, seed, compute_kernel_config),
        query,
        key,
        value,
        Mask(mask, is_causal, key_padding_lengths, segment_ids),
        bias=bias,
        need_weights=need_weights,
        positions=positions,
    )
    rate = spec.output_dropout if training else 0.0
    # A different seed: attention weights and outputs are dropped independently.
    return drop("output", output, rate, seed + 1), attn_weights
