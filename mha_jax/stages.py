"""Reference attention, one function per stage. All fast paths are tested against it.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv value_head_dim, E d_model.
A mask is boolean, True = masked (the query may not attend to the key); an additive term is a bias.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mha_jax.alibi import alibi_bias
from mha_jax.arrays import at_least_float32, zero_where
from mha_jax.checks import (
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
from mha_jax.compiled import compiled
from mha_jax.heads import repeat_kv_heads
from mha_jax.masks import Mask, MaskKeywords, to_scores_rank
from mha_jax.padding import zero_heads_in_padding
from mha_jax.parallel.sharding import head_sharding, reshard_like, with_auto_axes
from mha_jax.relative_bias import relative_position_bias
from mha_jax.relative_products import relative_position_products
from mha_jax.scores import Scores
from mha_spec import AttentionSpec, Refusal, WrongType
from mha_spec.attention import check_spec
from mha_spec.rules import as_rate


def attention_scores(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    bias: Float[Array, "..."] | None = None,
    spec: AttentionSpec | None = None,
    q_offset: Int[Array, " B"] | None = None,
    relative_bias: Float[Array, "..."] | None = None,
    relative_keys: Float[Array, "..."] | None = None,
    relative_queries: Float[Array, "..."] | None = None,
) -> Float[Array, "B N T S"]:
    """Return scaled dot products of queries and keys, with soft cap and biases, in at least float32.

    The scale is 1 / sqrt(H) unless the spec has one. ALiBi subtracts slope * distance; a relative bias adds numbers
    from a table (num_buckets, N). Relative products add scaled products of queries and `relative_keys`, and of keys
    and `relative_queries`. `q_offset` is the position of the first query among the keys, for all sequences or each,
    (1,) or (B,); default: 0.

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1; the soft cap: Gemma 2, arXiv:2408.00118, section 2.
    """
    check_floating("query", query, rank=4)
    check_floating("key", key, rank=4)
    check_scored(query, key, spec)
    check_bias(bias, (*query.shape[:3], key.shape[2]), query)
    scale, relative = score_scale(query, spec), None if spec is None else spec.relative_bias
    check_relative_bias(relative_bias, relative, (*query.shape[:3], key.shape[2]))
    products = None if spec is None else spec.relative_products
    check_relative_products(relative_keys, relative_queries, products, query)
    key = repeat_kv_heads(key, query.shape[1])
    scores = jnp.einsum("bnth,bnsh->bnts", at_least_float32(query) * scale, at_least_float32(key))
    scores = soft_capped(scores, spec)
    if spec is not None and spec.alibi_slopes is not None:
        scores = scores + alibi_bias(spec.alibi_slopes, *scores.shape[2:], q_offset, scores_dtype=scores.dtype)
    if relative_bias is not None and relative is not None:
        lengths, dtype = (scores.shape[2], scores.shape[3]), scores.dtype
        scores = scores + relative_position_bias(relative_bias, relative, *lengths, q_offset, scores_dtype=dtype)
    if products is not None:
        tables = (relative_keys, relative_queries)
        scores = scores + scale * relative_position_products(query, key, products, *tables, q_offset)
    return scores if bias is None else scores + to_scores_rank(at_least_float32(bias))


def masked_softmax(
    scores: Float[Array, "B N T S"],
    mask: Bool[Array, "..."] | None = None,
    sinks: Float[Array, "..."] | None = None,
) -> Float[Array, "B N T S"]:
    """Softmax over keys, in at least float32. Masked keys get weight exactly 0; fully masked rows are all 0.

    A sink is the logit of one extra key that is never masked; its weight is dropped from the result.

    Source: the sinks: gpt-oss model card, arXiv:2508.10925, section 2.
    """
    check_floating("scores", scores, rank=4)
    check_mask(mask, scores.shape)
    check_sinks(sinks, scores.shape[1])
    scores = at_least_float32(scores)
    if not scores.size:  # JAX has no maximum over zero keys
        return scores
    if sinks is not None:
        column = jnp.broadcast_to(at_least_float32(sinks)[None, :, None, None], (*scores.shape[:3], 1))
        if mask is not None:
            mask = to_scores_rank(mask)
            mask = jnp.broadcast_to(mask, (*mask.shape[:3], scores.shape[3]))
            mask = jnp.pad(mask, [(0, 0), (0, 0), (0, 0), (0, 1)])
        column = reshard_like(column.astype(scores.dtype), scores)
        return _softmax(jnp.concatenate([scores, column], axis=3), mask)[..., :-1]
    return _softmax(scores, mask)


def _softmax(scores: Array, mask: Array | None) -> Array:
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    # -inf, because a score may be as low as any finite value (a bias of finfo.min). The softmax of a
    # row of -inf would be NaN, and so would its gradient: scores of a fully masked row are 0 instead,
    # and its weights become 0 afterwards.
    mask = to_scores_rank(mask)
    empty_rows = mask.all(axis=-1, keepdims=True)
    scores = zero_where(jnp.where(mask, -jnp.inf, scores), empty_rows)
    return zero_where(jax.nn.softmax(scores, axis=-1), empty_rows)


def attention_context(
    attn_weights: Float[Array, "B N T S"], value: Float[Array, "B K S Hv"]
) -> Float[Array, "B N T Hv"]:
    """Return the weighted sum of values, accumulated in at least float32, in the dtype of value."""
    check_weighed(attn_weights, value)
    value_per_head = repeat_kv_heads(value, attn_weights.shape[1])
    context = jnp.einsum("bnts,bnsh->bnth", at_least_float32(attn_weights), at_least_float32(value_per_head))
    return context.astype(value.dtype)


def apply_dropout(
    attn_weights: Float[Array, "B N T S"],
    rate: float,
    keep: Bool[Array, "B N T S"] | None = None,
    *,
    rng: jax.Array | None = None,
) -> Float[Array, "B N T S"]:
    """Drop each attention weight with probability `rate`, 0 <= rate < 1, and divide the others by 1 - rate.

    `keep` is True for weights to keep; default: a random draw with the key `rng`.

    Raises:
        ValueError: if the rate is out of range, or both `keep` and `rng` are None.
    """
    rate = as_rate("dropout", rate)
    check_keep(keep, attn_weights.shape)
    if keep is None:
        if not rate:
            return attn_weights
        if rng is None:
            raise Refusal("dropout", "come with a random key", dropout=rate, dropout_rng=None)
        keep = jax.random.bernoulli(rng, 1.0 - rate, attn_weights.shape)
    keep = keep.reshape((1,) * (attn_weights.ndim - keep.ndim) + keep.shape)
    return jnp.where(keep, attn_weights / (1.0 - rate), 0.0)


def score_scale(query: Array, spec: AttentionSpec | None) -> float:
    """Return the factor of the dot products of queries (B, N, T, H)."""
    if spec is None:
        return query.shape[-1] ** -0.5
    check_spec(spec)
    return spec.score_scale


def soft_capped(scores: Array, spec: AttentionSpec | None) -> Array:
    """Apply the soft cap, if any, before bias and mask."""
    if spec is None or spec.soft_cap is None:
        return scores
    return spec.soft_cap * jnp.tanh(scores / spec.soft_cap)


# ---- Attention -------------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    spec: AttentionSpec | None = None,
    *,
    bias: Float[Array, "..."] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[Array, "B N T S"] | None = None,
    dropout_rng: jax.Array | None = None,
    sinks: Float[Array, "..."] | None = None,
    relative_bias: Float[Array, "..."] | None = None,
    relative_keys: Float[Array, "..."] | None = None,
    relative_queries: Float[Array, "..."] | None = None,
    **masks: Unpack[MaskKeywords],
) -> tuple[Float[Array, "B N T Hv"], Float[Array, "B N T S"] | None]:
    """Reference attention of split heads; `fused` has the fast form of this function.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        spec: layer of these heads: scale, soft cap, biases and products by distance; default: the scale 1 / sqrt(H).
        masks: keywords that hide keys, see `MaskKeywords`.
        bias, dropout, dropout_keep, sinks, relative_bias, relative_keys, relative_queries: see `Scores`.
        need_weights: also return the attention weights.
        dropout_rng: random key for dropout.

    Returns:
        Context (B, N, T, Hv), and the attention weights before dropout (B, N, T, S) or None; in the dtype of query.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit.

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1.
    """
    visible = Mask.of(masks).within(spec)
    products: Any = {"relative_keys": relative_keys, "relative_queries": relative_queries}
    scores = Scores(spec, bias, sinks, relative_bias, dropout, dropout_keep, dropout_rng, **products)
    check_attention(query, key, value, visible, scores)
    visible, key, value = zero_heads_in_padding(visible, key, value)
    inputs = (query, key, value, visible.as_arrays(), scores)
    return attend(*inputs) if need_weights else (attend_without_weights(*inputs), None)


@compiled()
@with_auto_axes(head_sharding)
def attend(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    mask: Mask,
    scores: Scores,
) -> tuple[Float[Array, "B N T Hv"], Float[Array, "B N T S"]]:
    """Return the context and the attention weights before dropout. Shapes are checked."""
    tables = (scores.relative_bias, scores.relative_keys, scores.relative_queries)
    logits = attention_scores(query, key, scores.bias, scores.spec, mask.q_offset, *tables)
    hidden = mask.with_bias(scores.bias).to_bool(query.shape[2], key.shape[2])
    attn_weights = masked_softmax(logits, hidden, scores.sinks).astype(query.dtype)
    dropped = apply_dropout(attn_weights, scores.dropout, scores.dropout_keep, rng=scores.dropout_rng)
    return attention_context(dropped, value), attn_weights


@compiled()
def attend_without_weights(query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
    """Return only the context, like a kernel, so that XLA does not keep the attention weights."""
    return attend(query, key, value, mask, scores)[0]


def check_attention(query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> None:
    """Refuse split heads, q (B, N, T, H), k and v (B, K, S, ·), a mask or scores that do not fit each other."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x, rank=4)
        if x.dtype != query.dtype:
            raise WrongType(name, "have the dtype of query", {f"{name}.dtype": x.dtype, "query.dtype": query.dtype})
    if key.shape[:3] != value.shape[:3]:
        raise Refusal(
            "value", "have the shape of key but for its features", {"value.shape": value.shape, "key.shape": key.shape}
        )
    check_scored(query, key, scores.spec)
    scores_shape = (*query.shape[:3], key.shape[2])
    mask.check(scores_shape)
    scores.check(scores_shape, query)
