"""Reference attention, one function per stage. All fast paths are tested against it.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model. A mask is boolean, True = masked (the query may not attend to the key);
an additive term is a bias.

On the device H is the padded head_dim: see `mha_tt.upload_weights`. The spec has the true one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.heads import BareHeads
from mha_tt.arrays import as_dtype, at_least_float32, nan_where
from mha_tt.checks import check_heads, check_kernel, check_scored, check_tiles
from mha_tt.device import accurate_config, upload, zeros
from mha_tt.features.alibi import alibi_bias
from mha_tt.features.relative_bias import relative_position_bias
from mha_tt.features.relative_products import relative_position_products
from mha_tt.heads import repeat_kv_heads
from mha_tt.kernels import Kernel
from mha_tt.masks import MASKED, DeviceMask, Mask, on_device, zero_masked_rows
from mha_tt.padding import zero_heads_in_padding
from mha_tt.scores import Scores, bias_on_device


def attention_scores(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    bias: Float[np.ndarray | Tensor, "*#scores"] | None = None,
    spec: AttentionSpec | BareHeads | None = None,
    q_offset: Int[np.ndarray, " #B"] | None = None,
    learned: Mapping[str, Float[Tensor, "..."]] | None = None,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T S"]:
    """Return scaled dot products of queries and keys, capped and biased, in at least float32.

    The scale is 1 / sqrt(H) unless the spec has one. ALiBi subtracts slope * distance; a relative
    bias adds values from a table. Relative products add scaled products of queries and vectors of
    distances, and of keys and such vectors.

    Args:
        query, key: (B, N, T, H) and (B, K, S, H); query head n uses key head n // (N // K).
        bias: added to the scores; broadcasts to (B, N, T, S).
        spec: layer of these heads; default: only the scale 1 / sqrt(H).
        q_offset: position of the first query among the keys, for all sequences or each, (1,) or
            (B,); default: 0.
        learned: weights of the layer that change scores, see `Scores`.
        compute_kernel_config: arithmetic of the device; default: `accurate_config`.

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1; the soft cap: Gemma 2,
    arXiv:2408.00118, section 2.
    """
    rules = BareHeads(query.shape[3]) if spec is None else spec
    learned = {} if learned is None else learned
    key = repeat_kv_heads(key, query.shape[1])  # ttnn.matmul broadcasts no batch axis
    config = compute_kernel_config or accurate_config(query.device())
    scores = ttnn.matmul(
        query,
        key,
        transpose_b=True,
        dtype=ttnn.float32,
        compute_kernel_config=config,
    )
    # Scaled after the product, in float32: a scaled query in bfloat16 would be rounded.
    scores = ttnn.multiply(scores, rules.score_scale)
    if rules.soft_cap is not None:
        scores = ttnn.tanh(ttnn.multiply(scores, 1.0 / rules.soft_cap))
        scores = ttnn.multiply(scores, rules.soft_cap)
    seq_lens = (scores.shape[2], scores.shape[3])
    device = query.device()
    if rules.alibi_slopes is not None:
        by_distance = alibi_bias(rules.alibi_slopes, *seq_lens, q_offset, scores_dtype=np.float32)
        scores = ttnn.add(scores, upload(by_distance, device=device, dtype=ttnn.float32))
    if rules.relative_bias is not None:
        table = learned["relative_bias"]
        by_bucket = relative_position_bias(
            table, rules.relative_bias, *seq_lens, q_offset, scores_dtype=ttnn.float32
        )
        scores = ttnn.add(scores, by_bucket)
    if rules.relative_products is not None:
        products = relative_position_products(
            query, key, rules.relative_products, learned, q_offset, compute_kernel_config=config
        )
        scores = ttnn.add(scores, ttnn.multiply(products, rules.score_scale))
    if bias is None:
        return scores
    return ttnn.add(scores, bias_on_device(bias, device, ttnn.float32))


def masked_softmax(
    scores: Float[Tensor, "B N T S"],
    mask: Bool[np.ndarray, "*#scores"] | DeviceMask | None = None,
    sinks: Float[Tensor, "1 N 1 1"] | None = None,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T S"]:
    """Softmax over keys, in at least float32, with weights of exactly 0 for masked keys.

    Fully masked rows are all 0. A sink is the logit of one extra key that is never masked; its
    weight is dropped from the result.

    Source: the sinks: gpt-oss model card, arXiv:2508.10925, section 2.
    """
    scores = at_least_float32(scores)
    mask = on_device(mask, scores.device())
    if mask is not None:
        scores = ttnn.where(mask.hidden, MASKED, scores)
    config = compute_kernel_config or accurate_config(scores.device())
    if sinks is not None:
        batch_size, _, seq_len_q, seq_len_k = scores.shape
        column = ttnn.repeat(at_least_float32(sinks), (batch_size, 1, seq_len_q, 1))
        scores = ttnn.concat([scores, column], dim=3)
        attn_weights = ttnn.softmax(
            scores, dim=-1, numeric_stable=True, compute_kernel_config=config
        )
        return zero_masked_rows(attn_weights[:, :, :, :seq_len_k], mask)
    attn_weights = ttnn.softmax(scores, dim=-1, numeric_stable=True, compute_kernel_config=config)
    if mask is None:
        return attn_weights
    # A row whose visible scores are all -inf, or as low as `MASKED`, would give weights to masked
    # keys: it becomes NaN.
    has_no_score = ttnn.le(ttnn.max(scores, dim=-1, keepdim=True), MASKED)
    return zero_masked_rows(nan_where(attn_weights, has_no_score), mask)


def attention_context(
    attn_weights: Float[Tensor, "B N T S"],
    value: Float[Tensor, "B K S Hv"],
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "B N T Hv"]:
    """Return the weighted sum of values, accumulated in at least float32.

    A `compute_kernel_config` may specify a coarser sum. The result has the dtype of value, or the
    dtype of the weights if value is bfloat8_b.
    """
    check_tiles("attn_weights", attn_weights)
    check_tiles("value", value)
    # A bfloat8_b cache is narrower than the inputs: the context keeps the dtype of the weights.
    if value.dtype == ttnn.bfloat8_b:
        dtype = attn_weights.dtype
    else:
        dtype = value.dtype
    return ttnn.matmul(
        attn_weights,
        repeat_kv_heads(value, attn_weights.shape[1]),
        dtype=dtype,
        compute_kernel_config=compute_kernel_config or accurate_config(value.device()),
    )


def apply_dropout(
    attn_weights: Float[Tensor, "B N T S"],
    rate: float,
    keep: Bool[np.ndarray, "*#scores"] | None = None,
    *,
    seed: int = 0,
) -> Float[Tensor, "B N T S"]:
    """Drop each attention weight with probability `rate`, and divide the others by 1 - rate.

    0 <= rate < 1. `keep` is True for weights to keep; default: a random draw by the seed, which the
    device supports only in bfloat16.

    Raises:
        TypeError: if a draw is needed and the weights are not bfloat16.
        ValueError: if the rate lies outside [0, 1).
    """
    if keep is None:
        return drop("attn_weights", attn_weights, rate, seed)
    factors = keep.reshape((1,) * (4 - keep.ndim) + keep.shape) / (1.0 - rate)
    return ttnn.multiply(
        attn_weights, upload(factors, device=attn_weights.device(), dtype=ttnn.float32)
    )


def drop(name: str, x: Tensor, rate: float, seed: int) -> Tensor:
    """Drop elements of x at random, at a rate, and divide the others by 1 - rate."""
    if not rate:
        return x
    if x.dtype != ttnn.bfloat16:
        raise InputTypeError(
            name, "be bfloat16 to be dropped at random (ttnn has no other)", dtype=x.dtype
        )
    return ttnn.experimental.dropout(x, probability=rate, scale=1.0 / (1.0 - rate), seed=seed)


# ---- Attention -----------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    spec: AttentionSpec | BareHeads | None = None,
    *,
    bias: Float[np.ndarray | Tensor, "*#scores"] | None = None,
    learned: Mapping[str, Float[Tensor, "..."]] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[np.ndarray, "*#scores"] | None = None,
    seed: int = 0,
    kernel: Kernel | None = None,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
    mask: Bool[np.ndarray, "*#scores"] | DeviceMask | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
    segment_ids: Int[np.ndarray, "B T"]
    | tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B S"]]
    | None = None,
) -> tuple[Float[Tensor, "B N T Hv"], Float[Tensor, "B N T S"] | None]:
    """Attention of split heads, by the formula; with a kernel, as layers compute it.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        spec: layer of these heads: scale, soft cap, biases and products by distance; default: the
            scale 1 / sqrt(H).
        bias, learned, dropout, dropout_keep, seed: see `Scores`.
        need_weights: also return the attention weights; without a kernel.
        kernel: computes the context, such as `fused.attend`, the default kernel of layers; default:
            the formula, which stores the attention weights.
        compute_kernel_config: arithmetic of the device, without a kernel, which has its own, such
            as `fused.FusedAttention(compute_kernel_config)`; default: `accurate_config`.
        mask, is_causal, key_padding_lengths, segment_ids: hide keys, see `Mask`.

    Returns:
        Context (B, N, T, Hv), and the attention weights before dropout (B, N, T, S) or None; in the
        dtype of query.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit, or a kernel comes with need_weights or a
            compute_kernel_config.

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1.
    """
    if kernel is not None:
        check_kernel(kernel)
        if need_weights:
            rule = "be False with a kernel, which stores no weights"
            raise InputError("need_weights", rule, need_weights=True)
        if compute_kernel_config is not None:
            raise InputError(
                "compute_kernel_config",
                "be None with a kernel, which has its own arithmetic",
                "a configuration",
            )
    check_heads(query, key, value)
    rules = BareHeads(query.shape[3]) if spec is None else spec
    check_scored(query, key, rules)
    full_mask = Mask(mask, is_causal, key_padding_lengths, segment_ids).within(rules)
    learned = {} if learned is None else learned
    scores = Scores(rules, bias, learned, dropout, dropout_keep, seed)
    scores_shape = (*tuple(query.shape)[:3], key.shape[2])
    full_mask.check(scores_shape)
    scores.check(scores_shape, query)
    if key_padding_lengths is not None:
        key, value = zero_heads_in_padding(full_mask, key, value)
    if kernel is not None:
        return kernel(query, key, value, full_mask, scores), None
    context, attn_weights = attend(query, key, value, full_mask, scores, compute_kernel_config)
    if need_weights:
        return context, attn_weights
    return context, None


def attend(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    mask: Mask,
    scores: Scores,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> tuple[Float[Tensor, "B N T Hv"], Float[Tensor, "B N T S"]]:
    """Return the context and the attention weights before dropout. Shapes are checked."""
    batch_size, num_heads, seq_len_q, _ = query.shape
    seq_len_k = key.shape[2]
    device = query.device()
    if 0 in (batch_size, seq_len_q, seq_len_k):  # most operations reject empty tensors
        shape = (batch_size, num_heads, seq_len_q)
        attn_weights = zeros((*shape, seq_len_k), query.dtype, device)
        return zeros((*shape, value.shape[3]), query.dtype, device), attn_weights
    config: Any = {"compute_kernel_config": compute_kernel_config}
    logits = attention_scores(
        query, key, scores.bias, scores.spec, mask.q_offset, scores.learned, **config
    )
    hidden = mask.with_bias(scores.bias).to_bool(seq_len_q, seq_len_k, device)
    attn_weights = as_dtype(
        masked_softmax(logits, hidden, scores.learned.get("sinks"), **config), query.dtype
    )
    dropped = apply_dropout(attn_weights, scores.dropout, scores.dropout_keep, seed=scores.seed)
    return as_dtype(attention_context(dropped, value, **config), query.dtype), attn_weights
