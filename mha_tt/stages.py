"""Reference attention, one function per stage. All fast paths are tested against it.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv value_head_dim, E d_model.
A mask is boolean, True = masked (the query may not attend to the key); an additive term is a bias.

On the device H is the padded head_dim: see `mha_tt.upload_weights`. The spec has the true one.
"""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, Refusal, WrongType
from mha_spec.attention import check_spec
from mha_spec.rules import as_rate
from mha_tt.arrays import as_dtype, at_least_float32, nan_where
from mha_tt.checks import (
    check_bias,
    check_floating,
    check_keep,
    check_mask,
    check_relative_bias,
    check_relative_products,
    check_scored,
    check_sinks,
    check_weighed,
)
from mha_tt.device import accurate_config, upload, zeros
from mha_tt.features.alibi import alibi_bias
from mha_tt.features.relative_bias import relative_position_bias
from mha_tt.features.relative_products import relative_position_products
from mha_tt.heads import repeat_kv_heads
from mha_tt.masks import MASKED, DeviceMask, Mask, MaskKeywords, on_device, zero_masked_rows
from mha_tt.padding import zero_heads_in_padding
from mha_tt.scores import Scores, bias_on_device


def attention_scores(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    bias: Float[np.ndarray, "..."] | Tensor | None = None,
    spec: AttentionSpec | None = None,
    q_offset: Int[np.ndarray, " B"] | None = None,
    relative_bias: Float[Tensor, "..."] | None = None,
    relative_keys: Float[Tensor, "..."] | None = None,
    relative_queries: Float[Tensor, "..."] | None = None,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T S"]:
    """Return scaled dot products of queries and keys, with soft cap and biases, in at least float32.

    The scale is 1 / sqrt(H) unless the spec has one. ALiBi subtracts slope * distance; a relative bias adds numbers
    from a table (1, N, 1, num_buckets). Relative products add scaled products of queries and `relative_keys`, and of
    keys and `relative_queries`. `q_offset` is the position of the first query among the keys, for all sequences or
    each, (1,) or (B,); default: 0.

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1; the soft cap: Gemma 2, arXiv:2408.00118, section 2.
    """
    check_floating("query", query, rank=4)
    check_floating("key", key, rank=4)
    check_scored(query, key, spec)
    check_bias(bias, (*tuple(query.shape)[:3], key.shape[2]), query)
    scale, relative = score_scale(query, spec), None if spec is None else spec.relative_bias
    check_relative_bias(relative_bias, relative, (*tuple(query.shape)[:3], key.shape[2]))
    products = None if spec is None else spec.relative_products
    check_relative_products(relative_keys, relative_queries, products, query)
    key = repeat_kv_heads(key, query.shape[1])  # a product of matrices broadcasts no batch axis
    config = compute_kernel_config or accurate_config(query.device())
    scores = ttnn.matmul(
        query,
        key,
        transpose_b=True,
        dtype=ttnn.float32,
        compute_kernel_config=config,
    )
    scores = soft_capped(ttnn.multiply(scores, scale), spec)
    if spec is not None and spec.alibi_slopes is not None:
        lost = alibi_bias(spec.alibi_slopes, scores.shape[2], scores.shape[3], q_offset, scores_dtype=np.float32)
        scores = ttnn.add(scores, upload(lost, device=query.device(), dtype=ttnn.float32))
    if relative_bias is not None and relative is not None:
        lengths = (scores.shape[2], scores.shape[3])
        gained = relative_position_bias(relative_bias, relative, *lengths, q_offset, scores_dtype=ttnn.float32)
        scores = ttnn.add(scores, gained)
    if products is not None:
        tables: Any = {"relative_keys": relative_keys, "relative_queries": relative_queries, "q_offset": q_offset}
        gained = relative_position_products(query, key, products, **tables, compute_kernel_config=config)
        scores = ttnn.add(scores, ttnn.multiply(gained, scale))
    return scores if bias is None else ttnn.add(scores, bias_on_device(bias, query.device(), ttnn.float32))


def masked_softmax(
    scores: Float[Tensor, "B N T S"],
    mask: Bool[np.ndarray, "..."] | DeviceMask | None = None,
    sinks: Float[Tensor, "..."] | None = None,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T S"]:
    """Softmax over keys, in at least float32. Masked keys get weight exactly 0; fully masked rows are all 0.

    A sink is the logit of one extra key that is never masked; its weight is dropped from the result.

    Source: the sinks: gpt-oss model card, arXiv:2508.10925, section 2.
    """
    check_floating("scores", scores, rank=4)
    check_mask(mask, tuple(scores.shape))
    check_sinks(sinks, scores.shape[1])
    scores, mask = at_least_float32(scores), on_device(mask, scores.device())
    if mask is not None:
        scores = ttnn.where(mask.hidden, MASKED, scores)
    config = compute_kernel_config or accurate_config(scores.device())
    if sinks is not None:
        batch_size, _, seq_len_q, seq_len_k = scores.shape
        column = ttnn.repeat(at_least_float32(sinks), (batch_size, 1, seq_len_q, 1))
        scores = ttnn.concat([scores, column], dim=3)
        attn_weights = ttnn.softmax(scores, dim=-1, numeric_stable=True, compute_kernel_config=config)
        return zero_masked_rows(attn_weights[:, :, :, :seq_len_k], mask)
    attn_weights = ttnn.softmax(scores, dim=-1, numeric_stable=True, compute_kernel_config=config)
    if mask is None:
        return attn_weights
    # If all visible scores are -inf, or as low as `MASKED`, masked keys would get weights.
    lowest = ttnn.le(ttnn.max(scores, dim=-1, keepdim=True), MASKED)
    return zero_masked_rows(nan_where(attn_weights, lowest), mask)


def attention_context(
    attn_weights: Float[Tensor, "B N T S"],
    value: Float[Tensor, "B K S Hv"],
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T Hv"]:
    """Return the weighted sum of values, accumulated in at least float32, in the dtype of value."""
    check_weighed(attn_weights, value)
    return ttnn.matmul(
        attn_weights,
        repeat_kv_heads(value, attn_weights.shape[1]),
        dtype=attn_weights.dtype if value.dtype == ttnn.bfloat8_b else value.dtype,  # a cache may have a narrower dtype
        compute_kernel_config=compute_kernel_config or accurate_config(value.device()),
    )


def apply_dropout(
    attn_weights: Float[Tensor, "B N T S"],
    rate: float,
    keep: Bool[np.ndarray, "B N T S"] | None = None,
    *,
    seed: int = 0,
) -> Float[Tensor, "B N T S"]:
    """Drop each attention weight with probability `rate`, 0 <= rate < 1, and divide the others by 1 - rate.

    `keep` is True for weights to keep; default: a random draw by the seed, which the device supports only in bfloat16.

    Raises:
        TypeError: if a draw is needed and the weights are not bfloat16.
    """
    rate = as_rate("dropout", rate)
    check_keep(keep, tuple(attn_weights.shape))
    if keep is not None:
        kept = keep.reshape((1,) * (4 - keep.ndim) + keep.shape) / (1.0 - rate)
        return ttnn.multiply(attn_weights, upload(kept, device=attn_weights.device(), dtype=ttnn.float32))
    return drop("attn_weights", attn_weights, rate, seed)


def drop(name: str, x: Tensor, rate: float, seed: int) -> Tensor:
    """Drop elements of x at random, at a rate, and divide the others by 1 - rate."""
    if not rate:
        return x
    if x.dtype != ttnn.bfloat16:
        raise WrongType(name, "be bfloat16 to be dropped at random (ttnn has no other)", dtype=x.dtype)
    return ttnn.experimental.dropout(x, probability=rate, scale=1.0 / (1.0 - rate), seed=seed)


def score_scale(query: Tensor, spec: AttentionSpec | None) -> float:
    """Return the factor of the dot products of queries (B, N, T, H)."""
    if spec is None:
        return query.shape[-1] ** -0.5
    check_spec(spec)
    return spec.score_scale


def soft_capped(scores: Tensor, spec: AttentionSpec | None) -> Tensor:
    """Apply the soft cap, if any, before bias and mask."""
    if spec is None or spec.soft_cap is None:
        return scores
    return ttnn.multiply(ttnn.tanh(ttnn.multiply(scores, 1.0 / spec.soft_cap)), spec.soft_cap)


# ---- Attention -------------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    spec: AttentionSpec | None = None,
    *,
    bias: Float[np.ndarray, "..."] | Tensor | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[np.ndarray, "B N T S"] | None = None,
    seed: int = 0,
    sinks: Float[Tensor, "..."] | None = None,
    relative_bias: Float[Tensor, "..."] | None = None,
    relative_keys: Float[Tensor, "..."] | None = None,
    relative_queries: Float[Tensor, "..."] | None = None,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
    **masks: Unpack[MaskKeywords],
) -> tuple[Float[Tensor, "B N T Hv"], Float[Tensor, "B N T S"] | None]:
    """Reference attention of split heads; `fused` has the fast form of this function.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        spec: layer of these heads: scale, soft cap, biases and products by distance; default: the scale 1 / sqrt(H).
        masks: keywords that hide keys, see `MaskKeywords`.
        bias, dropout, dropout_keep, sinks, relative_bias, relative_keys, relative_queries: see `Scores`.
        need_weights: also return the attention weights.
        seed: seed of the draw.
        compute_kernel_config: arithmetic of the device; default: `accurate_config`.

    Returns:
        Context (B, N, T, Hv), and the attention weights before dropout (B, N, T, S) or None; in the dtype of query.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit.

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1.
    """
    visible = Mask.of(masks).within(spec)
    products: Any = {"relative_keys": relative_keys, "relative_queries": relative_queries}
    scores = Scores(spec, bias, sinks, relative_bias, dropout, dropout_keep, seed, **products)
    check_attention(query, key, value, visible, scores)
    key, value = zero_heads_in_padding(visible, key, value)
    context, attn_weights = attend(query, key, value, visible, scores, compute_kernel_config)
    return context, attn_weights if need_weights else None


def attend(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    mask: Mask,
    scores: Scores,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B N T Hv"], Float[Tensor, "B N T S"]]:
    """Return the context and the attention weights before dropout. Shapes are checked."""
    (batch_size, num_heads, seq_len_q, _), seq_len_k, device = query.shape, key.shape[2], query.device()
    if 0 in (batch_size, seq_len_q, seq_len_k):  # most operations reject empty tensors
        shape = (batch_size, num_heads, seq_len_q)
        attn_weights = zeros((*shape, seq_len_k), query.dtype, device)
        return zeros((*shape, value.shape[3]), query.dtype, device), attn_weights
    config: Any = {"compute_kernel_config": compute_kernel_config}
    tables = (scores.relative_bias, scores.relative_keys, scores.relative_queries)
    logits = attention_scores(query, key, scores.bias, scores.spec, mask.q_offset, *tables, **config)
    hidden = mask.with_bias(scores.bias).to_bool(seq_len_q, seq_len_k, device)
    attn_weights = as_dtype(masked_softmax(logits, hidden, scores.sinks, **config), query.dtype)
    dropped = apply_dropout(attn_weights, scores.dropout, scores.dropout_keep, seed=scores.seed)
    return as_dtype(attention_context(dropped, value, **config), query.dtype), attn_weights


def check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> None:
    """Refuse split heads, q (B, N, T, H), k and v (B, K, S, ·), a mask or scores that do not fit each other."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x, rank=4)
        if (x.dtype == ttnn.float32) != (query.dtype == ttnn.float32):  # a cache may be narrower
            raise WrongType(name, "be float32 if query is", {f"{name}.dtype": x.dtype, "query.dtype": query.dtype})
    if tuple(key.shape)[:3] != tuple(value.shape)[:3]:
        raise Refusal(
            "value",
            "have the shape of key but for its features",
            {"value.shape": tuple(value.shape), "key.shape": tuple(key.shape)},
        )
    check_scored(query, key, scores.spec)
    scores_shape = (*tuple(query.shape)[:3], key.shape[2])
    mask.check(scores_shape)
    scores.check(scores_shape, query)
