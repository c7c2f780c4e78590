"""The fast path: the same function without attention weights.

On a CPU it goes block by block, as FlashAttention does, and skips blocks in which every key is masked; elsewhere it is
JAX's own dot_product_attention behind the masks and the empty rows of this package, or the plain path where that cannot
do with scores what a layer does.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from mha_jax import stages
from mha_jax.kernels import blockwise
from mha_jax.kernels.blocks import BLOCK_SIZES, BlockSizes, Scoring
from mha_jax.kernels.library import attend_by_library
from mha_jax.kernels.windows import attend_in_reach, num_together
from mha_jax.masks import Masking
from mha_jax.parallel.sharding import automatically, of_heads
from mha_jax.parallel.tokens import attend_to_tokens, passes_keys, token_axis
from mha_jax.stages import Dropout, check_attention, score_scale
from mha_spec import AttentionSpec, Refusal
from mha_spec.rules import as_rate


def scaled_dot_product_attention(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    spec: AttentionSpec | None = None,
    *,
    mask: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[Array, "B N T S"] | None = None,
    dropout_rng: jax.Array | None = None,
    sinks: Float[Array, "..."] | None = None,
    relative_bias: Float[Array, "..."] | None = None,
    block_sizes: BlockSizes = BLOCK_SIZES,
) -> tuple[Float[Array, "B N T Hv"], None]:
    """Attention of split heads without the attention weights: the function of `stages`, in the fastest form there is.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        spec: the layer that these are the heads of, of which the scale of the scores is taken; 1 / sqrt(H) when absent.
        mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0.
        bias: added to the scores, in the dtype of query; broadcasts to (B, N, T, S). -inf masks a key.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
        need_weights: must be False, the weights are never stored here.
        dropout: rate at which attention weights are dropped; 0 outside training.
        dropout_keep: must be absent, a fused kernel draws its own.
        dropout_rng: random key to draw what is dropped from.
        sinks: the logit of each head that takes part in the softmax and has no value, (N,), where the layer has them.
        relative_bias: what scores gain for the distance of their keys, (num_buckets, N), where the layer has that.
        block_sizes: how the work is divided on a CPU.

    Returns:
        The context (B, N, T, Hv), in the dtype of query, and None.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit, or the weights or a given dropout are asked for.
    """
    if need_weights or dropout_keep is not None:
        raise Refusal("need_weights and dropout_keep", "be left out on the fused path, which stores no weights")
    masking = Masking(mask, bias, is_causal, key_padding_lengths, sinks=sinks, relative_bias=relative_bias)
    masking = masking.of_layer(spec)
    return attend(
        query, key, value, masking, Dropout(dropout, rng=dropout_rng), spec=spec, block_sizes=block_sizes
    ), None


def attend(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    masking: Masking,
    dropout: Dropout,
    *,
    spec: AttentionSpec | None,
    block_sizes: BlockSizes = BLOCK_SIZES,
) -> Float[Array, "B N T Hv"]:
    """`scaled_dot_product_attention` as the layers call it: the context."""
    check_attention(query, key, value, masking, spec)
    as_rate("dropout", dropout.rate)
    if (axis := token_axis(query, key, masking, block_sizes)) != block_sizes.token_axis:
        block_sizes = replace(block_sizes, token_axis=axis, passes_keys=passes_keys(key, axis, block_sizes))
    return _attend(query, key, value, masking.as_arrays(), dropout, spec=spec, block_sizes=block_sizes)


@automatically(of_heads)
def _attend(
    query: Array,
    key: Array,
    value: Array,
    masking: Masking,
    dropout: Dropout,
    *,
    spec: AttentionSpec | None,
    block_sizes: BlockSizes,
) -> Array:
    if block_sizes.token_axis is not None and query.size and not dropout.rate:
        masking = blockwise.with_relative_bias(masking, query, key, spec)
        spec = None if spec is None else replace(spec, relative_bias=None)  # the bias contains it now
        told = {"spec": spec, "scoring": Scoring.of_layer(query, spec), "block_sizes": block_sizes}
        return attend_to_tokens(query, key, value, masking, **told, attend_whole=_attend_whole)
    num_scores = math.prod(query.shape[:3]) * key.shape[2]
    if dropout.rate or not num_scores or (num_scores <= block_sizes.few_scores and _is_on_cpu()):
        return stages.attend(query, key, value, masking, dropout, spec=spec, need_weights=False)[0]
    if _is_on_cpu():
        reach = masking.reach
        is_in_parts = reach is not None and masking.offsets is None and query.shape[2] > num_together(reach)
        kernel = attend_in_reach if is_in_parts else blockwise.attend_in_layer
        return kernel(query, key, value, masking, spec=spec, block_sizes=block_sizes)
    is_wide_bias = masking.bias is not None and masking.bias.dtype != query.dtype  # which had a relative bias added
    if not kernel_takes(spec) or masking.sinks is not None or is_wide_bias:
        return stages.attend(query, key, value, masking, dropout, spec=spec, need_weights=False)[0]
    scale = score_scale(query, spec)
    return attend_by_library(query, key, value, masking, scale=scale, platform=jax.default_backend())


def _attend_whole(
    query: Array, key: Array, value: Array, masking: Masking, spec: AttentionSpec | None, block_sizes: BlockSizes
) -> Array:
    return _attend(query, key, value, masking, Dropout(), spec=spec, block_sizes=block_sizes)


def kernel_takes(spec: AttentionSpec | None) -> bool:
    """Whether the framework's kernel can do with scores what a layer does."""
    return spec is None or (spec.soft_cap is None and not spec.has_distance_bias)


def _is_on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def attend_to_cache(
    query: Float[Array, "B N 1 H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S Hv"],
    last_positions: Int[Array, " B"],
    spec: AttentionSpec | None = None,
    *,
    sinks: Float[Array, "..."] | None = None,
    relative_bias: Float[Array, "..."] | None = None,
    block_sizes: BlockSizes = BLOCK_SIZES,
) -> Float[Array, "B N 1 Hv"]:
    """Attention of one new token of each sequence over its cached tokens; reads the filled part of the cache only.

    Args:
        query: (B, N, 1, H).
        keys, values: the cache, (B, K, S, H) and (B, K, S, Hv), in the dtype of query.
        last_positions: the last slot that each sequence sees, (B,).
        spec: the layer that these are the heads of, of which the scale of the scores is taken; 1 / sqrt(H) when absent.
        sinks: the logit of each head that takes part in the softmax and has no value, (N,), where the layer has them.
        relative_bias: what scores gain for the distance of their keys, (num_buckets, N), where the layer has that.
        block_sizes: how the work is divided on a CPU.

    Raises:
        TypeError: if an input is not floating point, or the dtypes differ.
        ValueError: if the shapes do not fit.
    """
    masking = Masking(is_causal=True, offsets=last_positions, sinks=sinks, relative_bias=relative_bias).of_layer(spec)
    check_attention(query, keys, values, masking, spec)
    if token_axis(query, keys, masking, block_sizes) is not None:  # slots are divided
        return attend(query, keys, values, masking, Dropout(), spec=spec, block_sizes=block_sizes)
    return _attend_to_cache(query, keys, values, masking, spec=spec, block_sizes=block_sizes)


@automatically(of_heads)
def _attend_to_cache(
    query: Array,
    keys: Array,
    values: Array,
    masking: Masking,
    *,
    spec: AttentionSpec | None,
    block_sizes: BlockSizes,
) -> Array:
    last_positions: Any = masking.offsets
    if keys.shape[2] > block_sizes.keys and query.size and _is_on_cpu():
        return blockwise.attend_to_cache(
            query,
            keys,
            values,
            last_positions,
            masking.sinks,
            blockwise.with_relative_bias(masking, query, keys, spec).bias,
            scoring=Scoring.of_layer(query, spec),
            reach=None if spec is None else spec.reach,
            block_sizes=block_sizes,
        )
    if _is_on_cpu():
        return stages.attend(query, keys, values, masking, Dropout(), spec=spec, need_weights=False)[0]
    return attend(query, keys, values, masking, Dropout(), spec=spec)
