"""Reference attention, one function per stage. All fast paths are tested against it.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model. A mask is boolean, True = masked (the query may not attend to the key);
an additive term is a bias.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from mha_jax.arrays import Array, at_least_float32, zero_where
from mha_jax.checks import check_heads, check_kernel, check_scored
from mha_jax.compiled import compiled
from mha_jax.features.alibi import alibi_bias
from mha_jax.features.relative_bias import relative_position_bias
from mha_jax.features.relative_products import relative_position_products
from mha_jax.heads import repeat_kv_heads
from mha_jax.kernels import Kernel
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.padding import find_padding, zero_heads_in_padding
from mha_jax.scores import Scores
from mha_jax.sharding import head_sharding, reshard_like, with_auto_axes
from mha_spec import AttentionSpec, InputError
from mha_spec.heads import BareHeads


def attention_scores(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    bias: Float[Array, "*#scores"] | None = None,
    spec: AttentionSpec | BareHeads | None = None,
    q_offset: Int[Array, " #B"] | None = None,
    learned: Mapping[str, Float[Array, "..."]] | None = None,
) -> Float[Array, "B N T S"]:
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

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1; the soft cap: Gemma 2,
    arXiv:2408.00118, section 2.
    """
    rules = BareHeads(query.shape[3]) if spec is None else spec
    learned = {} if learned is None else learned
    key = repeat_kv_heads(key, query.shape[1])
    scores = jnp.einsum(
        "bnth,bnsh->bnts", at_least_float32(query) * rules.score_scale, at_least_float32(key)
    )
    if rules.soft_cap is not None:
        scores = rules.soft_cap * jnp.tanh(scores / rules.soft_cap)
    seq_lens = (scores.shape[2], scores.shape[3])
    dtype = scores.dtype
    if rules.alibi_slopes is not None:
        scores = scores + alibi_bias(rules.alibi_slopes, *seq_lens, q_offset, scores_dtype=dtype)
    if rules.relative_bias is not None:
        table = learned["relative_bias"]
        scores = scores + relative_position_bias(
            table, rules.relative_bias, *seq_lens, q_offset, scores_dtype=dtype
        )
    if rules.relative_products is not None:
        products = relative_position_products(
            query, key, rules.relative_products, learned, q_offset
        )
        scores = scores + rules.score_scale * products
    if bias is None:
        return scores
    return scores + to_scores_rank(at_least_float32(bias))


def masked_softmax(
    scores: Float[Array, "B N T S"],
    mask: Bool[Array, "*#scores"] | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N T S"]:
    """Softmax over keys, in at least float32, with weights of exactly 0 for masked keys.

    Fully masked rows are all 0. A sink is the logit of one extra key that is never masked; its
    weight is dropped from the result.

    Source: the sinks: gpt-oss model card, arXiv:2508.10925, section 2.
    """
    scores = at_least_float32(scores)
    if not scores.size:  # JAX has no maximum over zero keys
        return scores
    if sinks is not None:
        column = jnp.broadcast_to(
            at_least_float32(sinks)[None, :, None, None], (*scores.shape[:3], 1)
        )
        column = reshard_like(column.astype(scores.dtype), scores)
        if mask is not None:
            scores = jnp.where(to_scores_rank(mask), -jnp.inf, scores)
        return jax.nn.softmax(jnp.concatenate([scores, column], axis=3), axis=-1)[..., :-1]
    return _softmax(scores, mask)


def _softmax(scores: Array, mask: Array | None) -> Array:
    """Return the softmax over visible keys; fully masked rows are 0, and so are their gradients."""
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    # -inf, because a score may be as low as any finite value (a bias of finfo.min). The softmax of
    # a row of -inf would be NaN, and so would its gradient: scores of fully masked rows are 0, and
    # their weights become 0 afterwards.
    mask = to_scores_rank(mask)
    empty_rows = mask.all(axis=-1, keepdims=True)
    scores = zero_where(jnp.where(mask, -jnp.inf, scores), empty_rows)
    return zero_where(jax.nn.softmax(scores, axis=-1), empty_rows)


def attention_context(
    attn_weights: Float[Array, "B N T S"], value: Float[Array, "B K S Hv"]
) -> Float[Array, "B N T Hv"]:
    """Return the weighted sum of values, accumulated in at least float32.

    The result has the dtype of value.
    """
    value_per_head = repeat_kv_heads(value, attn_weights.shape[1])
    context = jnp.einsum(
        "bnts,bnsh->bnth", at_least_float32(attn_weights), at_least_float32(value_per_head)
    )
    return context.astype(value.dtype)


def apply_dropout(
    attn_weights: Float[Array, "B N T S"],
    rate: float,
    keep: Bool[Array, "*#scores"] | None = None,
    *,
    rng: jax.Array | None = None,
) -> Float[Array, "B N T S"]:
    """Drop each attention weight with probability `rate`, and divide the others by 1 - rate.

    0 <= rate < 1. `keep` is True for weights to keep; default: a random draw with the key `rng`.

    Raises:
        ValueError: if the rate lies outside [0, 1), or is above 0 without `keep` and `rng`.
    """
    if keep is None:
        if not rate:
            return attn_weights
        if rng is None:
            # The names of both arguments in the functions that call this one.
            raise InputError("dropout", "come with a random key", dropout=rate, dropout_rng=None)
        keep = jax.random.bernoulli(rng, 1.0 - rate, attn_weights.shape)
    # Not `to_scores_rank`: layers also drop their outputs, (B, T, E).
    keep = keep.reshape((1,) * (attn_weights.ndim - keep.ndim) + keep.shape)
    return jnp.where(keep, attn_weights / (1.0 - rate), 0.0)


# ---- Attention -----------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    spec: AttentionSpec | BareHeads | None = None,
    *,
    bias: Float[Array, "*#scores"] | None = None,
    learned: Mapping[str, Float[Array, "..."]] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[Array, "*#scores"] | None = None,
    dropout_rng: jax.Array | None = None,
    kernel: Kernel | None = None,
    mask: Bool[Array, "*#scores"] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
) -> tuple[Float[Array, "B N T Hv"], Float[Array, "B N T S"] | None]:
    """Attention of split heads, by the formula; with a kernel, as layers compute it.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        spec: layer of these heads: scale, soft cap, biases and products by distance; default: the
            scale 1 / sqrt(H).
        bias, learned, dropout, dropout_keep, dropout_rng: see `Scores`.
        need_weights: also return the attention weights; without a kernel.
        kernel: computes the context, such as `fused.attend`, the default kernel of layers; default:
            the formula, which stores the attention weights.
        mask, is_causal, key_padding_lengths, segment_ids: hide keys, see `Mask`.

    Returns:
        Context (B, N, T, Hv), and the attention weights before dropout (B, N, T, S) or None; in the
        dtype of query.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit, or attention weights are requested from a kernel.

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1.
    """
    if kernel is not None:
        check_kernel(kernel)
        if need_weights:
            rule = "be False with a kernel, which stores no weights"
            raise InputError("need_weights", rule, need_weights=True)
    check_heads(query, key, value)
    rules = BareHeads(query.shape[3]) if spec is None else spec
    check_scored(query, key, rules)
    full_mask = Mask(mask, is_causal, key_padding_lengths, segment_ids).within(rules)
    learned = {} if learned is None else learned
    scores = Scores(rules, bias, learned, dropout, dropout_keep, dropout_rng)
    scores_shape = (*query.shape[:3], key.shape[2])
    full_mask.check(scores_shape)
    scores.check(scores_shape, query)
    if key_padding_lengths is not None:
        # Where tokens are divided, the kernel finds the padding of the local ones.
        find = getattr(kernel, "find_padding", find_padding)
        full_mask, key, value = zero_heads_in_padding(full_mask, key, value, find)
    full_mask = full_mask.as_arrays()
    if kernel is not None:
        return kernel(query, key, value, full_mask, scores), None
    if not need_weights:
        return attend_without_weights(query, key, value, full_mask, scores), None
    return attend(query, key, value, full_mask, scores)


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
    logits = attention_scores(query, key, scores.bias, scores.spec, mask.q_offset, scores.learned)
    hidden = mask.with_bias(scores.bias).to_bool(query.shape[2], key.shape[2])
    attn_weights = masked_softmax(logits, hidden, scores.learned.get("sinks")).astype(query.dtype)
    dropped = apply_dropout(
        attn_weights, scores.dropout, scores.dropout_keep, rng=scores.dropout_rng
    )
    return attention_context(dropped, value), attn_weights


@compiled()
def attend_without_weights(
    query: Array, key: Array, value: Array, mask: Mask, scores: Scores
) -> Array:
    """Return only the context, like a kernel, so that XLA does not keep the attention weights."""
    return attend(query, key, value, mask, scores)[0]
