"""Functional multi-head attention, with weights as arguments.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model. A mask is boolean, True = masked (the query may not attend to the key);
an additive term is a bias.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from mha_jax.arrays import Array, cast
from mha_jax.checks import check_weights
from mha_jax.kernels import Kernel, fused
from mha_jax.masks import Mask
from mha_jax.mha import FunctionalLayer, attention_layer
from mha_jax.stages import apply_dropout
from mha_spec import AttentionSpec, InputError


def multi_head_attention(
    query: Float[Array, "*B T d_in"],
    weights: Mapping[str, Any],
    spec: AttentionSpec,
    key: Float[Array, "*B S d_kv"] | Float[Array, "*B K S H"] | None = None,
    value: Float[Array, "*B S d_kv"] | Float[Array, "*B K S Hv"] | None = None,
    *,
    bias: Float[Array, "*#scores"] | None = None,
    need_weights: bool = False,
    positions: Int[Array, "*axes T"] | None = None,
    training: bool = False,
    dropout_keep: Bool[Array, "*#scores"] | None = None,
    dropout_rng: jax.Array | None = None,
    kernel: Kernel = fused.attend,
    dtype: jnp.dtype | None = None,
    mask: Bool[Array, "*#scores"] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Array, "*B"] | Sequence[int] | None = None,
    segment_ids: Int[Array, "*B T"] | tuple[Int[Array, "*B T"], Int[Array, "*B S"]] | None = None,
) -> tuple[Float[Array, "*B T E"], Float[Array, "*B N T S"] | None]:
    """Functional multi-head attention: project, split heads, attend, combine heads, project.

    Results, errors and other arguments are as in `MultiHeadAttention`.

    Args:
        weights: Flax params: {`<name>`: {`kernel` (in, out), `bias` (out,)}} of projections,
            {`<name>`: {`weight`, `bias`}} of norms, and those that change scores, see `Scores`.
        spec: the layer.
        training: apply dropout to attention weights and outputs, at the rates of the spec.
        dropout_keep: True for attention weights to keep, instead of a random draw; uses the plain
            path.
        dropout_rng: random key for dropout.
        kernel: computes the context, unless need_weights is set.
        dtype: floating-point dtype that inputs and weights are cast to; default: their own, which
            must agree.

    Source: Attention Is All You Need, arXiv:1706.03762, section 3.2.2.
    """
    query, key, value, bias, weights = cast((query, key, value, bias, weights), dtype)
    check_weights(weights, spec)
    if dropout_keep is not None and not training:
        raise InputError(
            "dropout_keep", "come with training=True", "dropout_keep and training=False"
        )
    weights_rng = None
    output_rng = None
    if dropout_rng is not None:
        weights_rng, output_rng = jax.random.split(dropout_rng)
    output, attn_weights = attention_layer(
        FunctionalLayer(weights, spec, kernel, training, dropout_keep, weights_rng),
        query,
        key,
        value,
        Mask(mask, is_causal, key_padding_lengths, segment_ids),
        bias=bias,
        need_weights=need_weights,
        positions=positions,
    )
    rate = spec.output_dropout if training else 0.0
    return apply_dropout(output, rate, rng=output_rng), attn_weights
