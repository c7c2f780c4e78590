"""PyTorch's attention function with a boolean mask: a kernel to read, and to start another from."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mha_torch import stages
from mha_torch.masks import Mask
from mha_torch.scores import Scores


def plain_sdpa(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S Hv"],
    mask: Mask,
    scores: Scores,
) -> Float[Tensor, "B N T Hv"]:
    """Return the context from one call of PyTorch's function; the formula for other calls.

    For a layer: `layer.kernel = plain_sdpa`.

    Source: torch.nn.functional.scaled_dot_product_attention.
    """
    spec = scores.spec
    changes_scores = spec.has_distance_bias or spec.soft_cap is not None or scores.bias is not None
    has_dropout = scores.dropout > 0 or scores.dropout_keep is not None
    if changes_scores or has_dropout or "sinks" in scores.learned:
        context, _ = stages.attend(query, key, value, mask, scores)
        return context
    hidden = mask.to_bool(query.shape[2], key.shape[2], query.device)
    if hidden is None:
        return F.scaled_dot_product_attention(
            query, key, value, scale=spec.score_scale, enable_gqa=True
        )
    # PyTorch has the opposite polarity, and some of its kernels return NaN for a fully masked row.
    context = F.scaled_dot_product_attention(
        query, key, value, attn_mask=~hidden, scale=spec.score_scale, enable_gqa=True
    )
    return context.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0)
