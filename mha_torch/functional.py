"""Functional multi-head attention, with weights as arguments.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model. A mask is boolean, True = masked (the query may not attend to the key);
an additive term is a bias.
"""

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_spec import AttentionSpec, InputError
from mha_torch.checks import check_weights
from mha_torch.kernels import Kernel, fused
from mha_torch.masks import Mask
from mha_torch.mha import FunctionalLayer, attention_layer


def multi_head_attention(
    query: Float[Tensor, "*B T d_in"],
    weights: Mapping[str, Tensor],
    spec: AttentionSpec,
    key: Float[Tensor, "*B S d_kv"] | Float[Tensor, "*B K S H"] | None = None,
    value: Float[Tensor, "*B S d_kv"] | Float[Tensor, "*B K S Hv"] | None = None,
    *,
    bias: Float[Tensor, "*#scores"] | None = None,
    need_weights: bool = False,
    positions: Int[Tensor, "*axes T"] | None = None,
    training: bool = False,
    dropout_keep: Bool[Tensor, "*#scores"] | None = None,
    kernel: Kernel = fused.attend,
    mask: Bool[Tensor, "*#scores"] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Tensor, "*B"] | Sequence[int] | None = None,
    segment_ids: Int[Tensor, "*B T"]
    | tuple[Int[Tensor, "*B T"], Int[Tensor, "*B S"]]
    | None = None,
) -> tuple[Float[Tensor, "*B T E"], Float[Tensor, "*B N T S"] | None]:
    """Functional multi-head attention: project, split heads, attend, combine heads, project.

    Results, errors and other arguments are as in `MultiHeadAttention`.

    Args:
        weights: the state dict of `MultiHeadAttention`: `<name>.weight` (out, in) and `<name>.bias`
            (out,) of each projection, the weights of norms, and those that change scores, see
            `Scores`.
        spec: the layer.
        training: apply dropout to attention weights and outputs, at the rates of the spec.
        dropout_keep: True for attention weights to keep, instead of a random draw; uses the plain
            path.
        kernel: computes the context, unless need_weights is set.

    Source: Attention Is All You Need, arXiv:1706.03762, section 3.2.2.
    """
    check_weights(weights, spec)
    if dropout_keep is not None and not training:
        raise InputError(
            "dropout_keep", "come with training=True", "dropout_keep and training=False"
        )
    output, attn_weights = attention_layer(
        FunctionalLayer(weights, spec, kernel, training, dropout_keep),
        query,
        key,
        value,
        Mask(mask, is_causal, key_padding_lengths, segment_ids),
        bias=bias,
        need_weights=need_weights,
        positions=positions,
    )
    return F.dropout(output, spec.output_dropout, training), attn_weights
