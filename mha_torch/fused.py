"""The fast path: the same function without attention weights.

It is PyTorch's own scaled_dot_product_attention behind the masks and the empty rows of this package.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_torch.checks import check_attention, check_rate
from mha_torch.masks import hide_infinite_bias, join_masks


def scaled_dot_product_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K S H"],
    value: Float[Tensor, "B K S H"],
    *,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
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
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
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
    check_attention(query, key, value, mask, bias, key_padding_lengths)
    check_rate("dropout", dropout)
    if need_weights or dropout_keep is not None:
        raise ValueError("need_weights and dropout_keep must be left out on the fused path, which stores no weights")
    if mask is None and bias is None and key_padding_lengths is None:  # nothing is hidden, or what a kernel knows
        return _attend(query, key, value, is_causal=is_causal, dropout=dropout), None
    if mask is None and bias is None and query.device.type == "cpu" and not torch.compiler.is_compiling():
        lengths = torch.as_tensor(key_padding_lengths).tolist()
        if lengths and all(lengths):  # no row is empty
            return _attend_by_sequence(query, key, value, lengths, is_causal=is_causal, dropout=dropout), None
    seq_len_q, seq_len_k = query.shape[2], key.shape[2]
    mask = join_masks(
        mask, seq_len_q, seq_len_k, is_causal=is_causal, key_padding_lengths=key_padding_lengths, device=query.device
    )
    mask = hide_infinite_bias(mask, bias)
    empty_rows = None
    attn_mask = bias
    if mask is not None:
        # Some kernels give NaN for a row without a key, in the result or in the gradient. Such a row is shown every
        # key instead, and emptied afterwards.
        mask = mask.broadcast_to((*mask.shape[:-1], seq_len_k))
        empty_rows = mask.all(dim=-1, keepdim=True)
        mask = mask & ~empty_rows
        # SDPA's polarity is the other one: True = attend.
        attn_mask = ~mask if bias is None else torch.where(mask, -torch.inf, bias.where(~empty_rows, 0.0))
    if attn_mask is not None:
        attn_mask = attn_mask.broadcast_to((*query.shape[:3], seq_len_k))
    context = _attend(query, key, value, attn_mask=attn_mask, dropout=dropout)
    return context if empty_rows is None else context.masked_fill(empty_rows, 0.0), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float,
) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal,  # top-left, as ours
        dropout_p=dropout,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], *, is_causal: bool, dropout: float
) -> Tensor:
    """Each sequence over its real keys alone: without a mask, and without the work that padding would be."""
    contexts = [
        _attend(q[None], k[None, :, :length], v[None, :, :length], is_causal=is_causal, dropout=dropout)
        for q, k, v, length in zip(query.unbind(), key.unbind(), value.unbind(), lengths, strict=True)
    ]
    return torch.cat(contexts)
