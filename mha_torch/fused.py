"""The fast path: the same function without attention weights.

It is PyTorch's own scaled_dot_product_attention behind the masks and the empty rows of this package.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from mha_torch.checks import check_attention, check_rate
from mha_torch.masks import hide_infinite_bias


def scaled_dot_product_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S H"],
    *,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[Tensor, "B N T S"] | None = None,
) -> tuple[Float[Tensor, "B N T H"], None]:
    """Attention of split heads without the attention weights: the function of `mha`, in the fastest form there is.

    The scores of masked keys must be finite too: to the kernel a mask is -inf added to a score, and inf - inf is NaN.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H); query head n uses key/value head n // (N // K).
        mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0.
        bias: added to the scores, in the dtype of query; broadcasts to (B, N, T, S). -inf masks a key.
        need_weights: must be False, the weights are never stored here.
        dropout: rate at which attention weights are dropped; 0 outside training.
        dropout_keep: must be absent, a fused kernel draws its own.

    Returns:
        The context (B, N, T, H), in the dtype of query, and None.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit, or the weights or a given dropout are asked for.

    Source: torch.nn.functional.scaled_dot_product_attention.
    """
    check_attention(query, key, value, mask, bias)
    check_rate("dropout", dropout)
    if need_weights or dropout_keep is not None:
        raise ValueError("need_weights and dropout_keep must be left out on the fused path, which stores no weights")
    scores_shape = (*query.shape[:3], key.shape[2])
    mask = hide_infinite_bias(mask, bias)
    empty_rows = None
    attn_mask = bias
    if mask is not None:
        # Some kernels give NaN for a row without a key, in the result or in the gradient. Such a row is shown every
        # key instead, and emptied afterwards.
        mask = mask.broadcast_to((*mask.shape[:-1], scores_shape[-1]))
        empty_rows = mask.all(dim=-1, keepdim=True)
        mask = mask & ~empty_rows
        # SDPA's polarity is the other one: True = attend.
        attn_mask = ~mask if bias is None else torch.where(mask, -torch.inf, bias.where(~empty_rows, 0.0))
    if attn_mask is not None:
        attn_mask = attn_mask.broadcast_to(scores_shape)
    context = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1]
    )
    return context if empty_rows is None else context.masked_fill(empty_rows, 0.0), None
