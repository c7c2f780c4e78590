"""Attention stage by stage, and as one function: the definition that all else is tested against.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv value_head_dim, E d_model.
A mask is boolean, True = masked (the query may not attend to the key); an additive term is a bias.
"""

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_spec import AttentionSpec, Refusal, WrongType
from mha_spec.attention import check_spec
from mha_spec.rules import as_rate
from mha_torch.alibi import alibi_bias
from mha_torch.arrays import at_least_float32, without_autocast
from mha_torch.checks import (
    check_bias,
    check_device,
    check_floating,
    check_keep,
    check_mask,
    check_relative_bias,
    check_relative_products,
    check_scored,
    check_sinks,
    check_weighed,
)
from mha_torch.heads import repeat_kv_heads
from mha_torch.kernels.nonfinite import contained_with_weights, maybe_any
from mha_torch.masks import Mask, MaskKeywords
from mha_torch.relative_bias import relative_position_bias
from mha_torch.relative_products import relative_position_products
from mha_torch.scores import Scores


def attention_scores(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    bias: Float[Tensor, "..."] | None = None,
    spec: AttentionSpec | None = None,
    q_offset: Int[Tensor, " B"] | None = None,
    relative_bias: Float[Tensor, "..."] | None = None,
    relative_keys: Float[Tensor, "..."] | None = None,
    relative_queries: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "B N T S"]:
    """Dot products of queries and keys, scaled, capped softly if the spec says so, plus the bias; at least float32.

    The scale is 1 / sqrt(H) where there is no spec, or none in it. With ALiBi scores lose by the distance of query and
    key, with a relative bias they gain by it, from a table (num_buckets, N): `q_offset` is the place of the first
    query among the keys, of every sequence or of each, (1,) or (B,); default 0. With relative products they gain
    scaled products of queries and `relative_keys`, of keys and `relative_queries`.

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
    with without_autocast(query.device.type):  # it would take these sums in half precision
        scores = torch.einsum("bnth,bnsh->bnts", at_least_float32(query) * scale, at_least_float32(key))
    scores = soft_capped(scores, spec)
    lengths, dtype = (scores.shape[2], scores.shape[3]), scores.dtype
    if spec is not None and spec.alibi_slopes is not None:
        scores = scores + alibi_bias(spec.alibi_slopes, *lengths, q_offset, scores_dtype=dtype, device=scores.device)
    if relative_bias is not None and relative is not None:
        scores = scores + relative_position_bias(relative_bias, relative, *lengths, q_offset, scores_dtype=dtype)
    if products is not None:
        tables = (relative_keys, relative_queries)
        scores = scores + scale * relative_position_products(query, key, products, *tables, q_offset)
    return scores if bias is None else scores + at_least_float32(bias)


def masked_softmax(
    scores: Float[Tensor, "B N T S"],
    mask: Bool[Tensor, "..."] | None = None,
    sinks: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "B N T S"]:
    """Softmax over the keys, in at least float32; a masked key weighs exactly 0, so a row without a key is all 0.

    A sink takes part like the score of one more key, which nothing hides, and whose weight is left out.

    Source: the sinks: gpt-oss model card, arXiv:2508.10925, section 2.
    """
    check_floating("scores", scores, rank=4)
    check_mask(mask, tuple(scores.shape))
    check_sinks(sinks, scores.shape[1])
    scores = at_least_float32(scores)
    if sinks is not None:
        column = at_least_float32(sinks)[:, None, None].expand(*scores.shape[:3], 1)
        mask = None if mask is None else F.pad(mask.expand(*mask.shape[:-1], scores.shape[3]), (0, 1))
        return _softmax(torch.cat([scores, column], dim=-1), mask)[..., :-1]
    return _softmax(scores, mask)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.softmax(scores, dim=-1)
    # -inf, since a score may be as low as any finite fill (a bias of finfo.min). A fully masked row is all 0 instead,
    # which keeps it and its gradient free of NaN, and is set to 0 after the softmax.
    scores = scores.masked_fill(mask, -torch.inf)
    empty_rows = mask.all(dim=-1, keepdim=True)
    if not maybe_any(empty_rows):  # two passes over the scores less
        return torch.softmax(scores, dim=-1)
    return torch.softmax(scores.masked_fill(empty_rows, 0.0), dim=-1).masked_fill(empty_rows, 0.0)


def attention_context(
    attn_weights: Float[Tensor, "B N T S"], value: Float[Tensor, "B K S Hv"]
) -> Float[Tensor, "B N T Hv"]:
    """Sum of the values, each weighed by its attention weight; summed in at least float32, in the dtype of value."""
    check_weighed(attn_weights, value)
    value_per_head = repeat_kv_heads(value, attn_weights.shape[1])
    with without_autocast(value.device.type):
        context = torch.einsum("bnts,bnsh->bnth", at_least_float32(attn_weights), at_least_float32(value_per_head))
    return context.to(value.dtype)


def apply_dropout(
    attn_weights: Float[Tensor, "B N T S"], rate: float, keep: Bool[Tensor, "B N T S"] | None = None
) -> Float[Tensor, "B N T S"]:
    """Drop each attention weight with probability `rate` and divide the others by 1 - rate, 0 <= rate < 1.

    `keep` is True where a weight is kept; default: a random draw.
    """
    rate = as_rate("dropout", rate)
    check_keep(keep, tuple(attn_weights.shape))
    if keep is None:
        return F.dropout(attn_weights, rate) if rate else attn_weights
    return torch.where(keep, attn_weights / (1.0 - rate), 0.0)


def score_scale(query: Tensor, spec: AttentionSpec | None) -> float:
    """What the dot products of queries (B, N, T, H) are multiplied by."""
    if spec is None:
        return query.shape[-1] ** -0.5
    check_spec(spec)
    return spec.score_scale


def soft_capped(scores: Tensor, spec: AttentionSpec | None) -> Tensor:
    """Scores before anything is added or hidden, capped if the spec says so."""
    if spec is None or spec.soft_cap is None:
        return scores
    return spec.soft_cap * torch.tanh(scores / spec.soft_cap)


# ---- Together --------------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    spec: AttentionSpec | None = None,
    *,
    bias: Float[Tensor, "..."] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[Tensor, "B N T S"] | None = None,
    sinks: Float[Tensor, "..."] | None = None,
    relative_bias: Float[Tensor, "..."] | None = None,
    relative_keys: Float[Tensor, "..."] | None = None,
    relative_queries: Float[Tensor, "..."] | None = None,
    **masks: Unpack[MaskKeywords],
) -> tuple[Float[Tensor, "B N T Hv"], Float[Tensor, "B N T S"] | None]:
    """Attention of split heads, written as its definition; `fused` holds the fast form of the same function.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        spec: layer of these heads, whose scale and other changes of scores apply; default: the scale 1 / sqrt(H).
        masks: which keys are hidden, as `MaskKeywords` says.
        bias, dropout, dropout_keep, sinks, relative_bias, relative_keys, relative_queries: as `Scores` has
            them.
        need_weights: also return the attention weights.

    Returns:
        The context (B, N, T, Hv), and the attention weights before dropout (B, N, T, S) or None; in the dtype of query.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit.

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1.
    """
    visible = Mask.of(masks).within(spec)
    products: Any = {"relative_keys": relative_keys, "relative_queries": relative_queries}
    scores = Scores(spec, bias, sinks, relative_bias, dropout, dropout_keep, **products)
    check_attention(query, key, value, visible, scores)
    context, attn_weights = attend(query, key, value, visible, scores)
    return context, attn_weights if need_weights else None


@contained_with_weights
def attend(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    mask: Mask,
    scores: Scores,
) -> tuple[Float[Tensor, "B N T Hv"], Float[Tensor, "B N T S"]]:
    """Return the context and the attention weights before dropout: the definition, of shapes that are checked."""
    tables = (scores.relative_bias, scores.relative_keys, scores.relative_queries)
    logits = attention_scores(query, key, scores.bias, scores.spec, mask.q_offset, *tables)
    hidden = mask.with_bias(scores.bias).to_bool(query.shape[2], key.shape[2], query.device)
    attn_weights = masked_softmax(logits, hidden, scores.sinks).to(query.dtype)
    return attention_context(apply_dropout(attn_weights, scores.dropout, scores.dropout_keep), value), attn_weights


def check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores, num_parts: int = 1) -> None:
    """Refuse split heads, q (B, N, T, H), k and v (B, K, S, ·), a mask or scores that do not fit each other.

    Lengths in the mask are those of a sequence in so many parts, of which the keys are one.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_floating(name, x, rank=4)
        if x.dtype != query.dtype:
            raise WrongType(name, "have the dtype of query", {f"{name}.dtype": x.dtype, "query.dtype": query.dtype})
        check_device(name, x, query.device, "query")
    if key.shape[:3] != value.shape[:3]:
        raise Refusal(
            "value",
            "have the shape of key but for its features",
            {"value.shape": tuple(value.shape), "key.shape": tuple(key.shape)},
        )
    check_scored(query, key, scores.spec)
    scores_shape = (*query.shape[:3], key.shape[2])
    mask.check(scores_shape, query)
    scores.check(scores_shape, query)
