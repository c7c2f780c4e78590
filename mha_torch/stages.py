"""Reference attention, one function per stage. All fast paths are tested against it.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim, Hv
value_head_dim, E d_model. A mask is boolean, True = masked (the query may not attend to the key);
an additive term is a bias.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_spec import AttentionSpec, InputError
from mha_spec.heads import BareHeads
from mha_torch.arrays import at_least_float32, without_autocast
from mha_torch.checks import check_heads, check_kernel, check_scored
from mha_torch.features.alibi import alibi_bias
from mha_torch.features.relative_bias import relative_position_bias
from mha_torch.features.relative_products import relative_position_products
from mha_torch.heads import repeat_kv_heads
from mha_torch.kernels import Kernel
from mha_torch.masks import Mask
from mha_torch.padding import find_padding, zero_heads_in_padding
from mha_torch.scores import Scores


def attention_scores(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    bias: Float[Tensor, "*#scores"] | None = None,
    spec: AttentionSpec | BareHeads | None = None,
    q_offset: Int[Tensor, " #B"] | None = None,
    learned: Mapping[str, Float[Tensor, "..."]] | None = None,
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

    Source: Attention Is All You Need, arXiv:1706.03762, equation 1; the soft cap: Gemma 2,
    arXiv:2408.00118, section 2.
    """
    rules = BareHeads(query.shape[3]) if spec is None else spec
    learned = {} if learned is None else learned
    key = repeat_kv_heads(key, query.shape[1])
    with without_autocast(query.device.type):  # autocast would sum in half precision
        scores = torch.einsum(
            "bnth,bnsh->bnts", at_least_float32(query) * rules.score_scale, at_least_float32(key)
        )
    if rules.soft_cap is not None:
        scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
    seq_lens = (scores.shape[2], scores.shape[3])
    dtype = scores.dtype
    if rules.alibi_slopes is not None:
        scores = scores + alibi_bias(
            rules.alibi_slopes, *seq_lens, q_offset, scores_dtype=dtype, device=scores.device
        )
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
    return scores + at_least_float32(bias)


def masked_softmax(
    scores: Float[Tensor, "B N T S"],
    mask: Bool[Tensor, "*#scores"] | None = None,
    sinks: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, "B N T S"]:
    """Softmax over keys, in at least float32, with weights of exactly 0 for masked keys.

    Fully masked rows are all 0. A sink is the logit of one extra key that is never masked; its
    weight is dropped from the result.

    Source: the sinks: gpt-oss model card, arXiv:2508.10925, section 2.
    """
    scores = at_least_float32(scores)
    if sinks is not None:
        column = at_least_float32(sinks)[:, None, None].expand(*scores.shape[:3], 1)
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return _softmax(scores, mask)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax over visible keys; fully masked rows are 0, and so are their gradients."""
    if mask is None:
        return torch.softmax(scores, dim=-1)
    # -inf, because a score may be as low as any finite value (a bias of finfo.min). The softmax of
    # a row of -inf would be NaN, and so would its gradient: scores of fully masked rows are 0, and
    # their weights become 0 afterwards.
    empty_rows = mask.all(dim=-1, keepdim=True)
    fill = torch.where(empty_rows, 0.0, -torch.inf).to(scores.dtype)
    scores = torch.where(mask, fill, scores)
    return torch.softmax(scores, dim=-1).masked_fill(empty_rows, 0.0)


def attention_context(
    attn_weights: Float[Tensor, "B N T S"], value: Float[Tensor, "B K S Hv"]
) -> Float[Tensor, "B N T Hv"]:
    """Return the weighted sum of values, accumulated in at least float32.

    The result has the dtype of value.
    """
    value_per_head = repeat_kv_heads(value, attn_weights.shape[1])
    with without_autocast(value.device.type):
        context = torch.einsum(
            "bnts,bnsh->bnth", at_least_float32(attn_weights), at_least_float32(value_per_head)
        )
    return context.to(value.dtype)


def apply_dropout(
    attn_weights: Float[Tensor, "B N T S"],
    rate: float,
    keep: Bool[Tensor, "*#scores"] | None = None,
) -> Float[Tensor, "B N T S"]:
    """Drop each attention weight with probability `rate`, and divide the others by 1 - rate.

    0 <= rate < 1. `keep` is True for weights to keep; default: a random draw.

    Raises:
        ValueError: if the rate lies outside [0, 1).
    """
    if keep is None:
        if rate:
            return F.dropout(attn_weights, rate)
        return attn_weights
    return torch.where(keep, attn_weights / (1.0 - rate), 0.0)


# ---- Attention -----------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    spec: AttentionSpec | BareHeads | None = None,
    *,
    bias: Float[Tensor, "*#scores"] | None = None,
    learned: Mapping[str, Float[Tensor, "..."]] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[Tensor, "*#scores"] | None = None,
    kernel: Kernel | None = None,
    mask: Bool[Tensor, "*#scores"] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    segment_ids: Int[Tensor, "B T"] | tuple[Int[Tensor, "B T"], Int[Tensor, "B S"]] | None = None,
) -> tuple[Float[Tensor, "B N T Hv"], Float[Tensor, "B N T S"] | None]:
    """Attention of split heads, by the formula; with a kernel, as layers compute it.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H) and (B, K, S, Hv); query head n uses key/value head n // (N // K).
        spec: layer of these heads: scale, soft cap, biases and products by distance; default: the
            scale 1 / sqrt(H).
        bias, learned, dropout, dropout_keep: see `Scores`.
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
    scores = Scores(rules, bias, learned, dropout, dropout_keep)
    scores_shape = (*query.shape[:3], key.shape[2])
    full_mask.check(scores_shape, query)
    scores.check(scores_shape, query)
    if key_padding_lengths is not None:
        # Where tokens are divided, the kernel finds the padding of the local ones.
        find = getattr(kernel, "find_padding", find_padding)
        full_mask, key, value = zero_heads_in_padding(full_mask, key, value, find)
    if kernel is not None:
        check = getattr(kernel, "check", None)  # a kernel for divided tokens has one
        if check is not None:
            check(query, key, value, full_mask, scores)
        return kernel(query, key, value, full_mask, scores), None
    context, attn_weights = attend(query, key, value, full_mask, scores)
    if need_weights:
        return context, attn_weights
    return context, None


def attend(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    mask: Mask,
    scores: Scores,
) -> tuple[Float[Tensor, "B N T Hv"], Float[Tensor, "B N T S"]]:
    """Return the context and the attention weights before dropout. Shapes are checked."""
    logits = attention_scores(query, key, scores.bias, scores.spec, mask.q_offset, scores.learned)
    hidden = mask.with_bias(scores.bias).to_bool(query.shape[2], key.shape[2], query.device)
    attn_weights = masked_softmax(logits, hidden, scores.learned.get("sinks")).to(query.dtype)
    dropped = apply_dropout(attn_weights, scores.dropout, scores.dropout_keep)
    return attention_context(dropped, value), attn_weights


def check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scores: Scores) -> None:
    """Reject split heads, q (B, N, T, H), k and v (B, K, S, ·), a mask or scores that do not fit
    each other.
    """
    check_heads(query, key, value)
    check_scored(query, key, scores.spec)
    scores_shape = (*query.shape[:3], key.shape[2])
    mask.check(scores_shape, query)
    scores.check(scores_shape, query)
