"""The tutorial: multi-head attention as in the paper. It imports nothing of this package.

Axes: B batch, T query tokens, S key tokens, P cached tokens, N heads, H features per head,
E = N * H features per token.
A mask is boolean, True = masked (the query may not attend to the key), and broadcasts to
(B, N, T, S).

Source: Attention Is All You Need, arXiv:1706.03762, section 3.2.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

# ---- Masks ---------------------------------------------------------------------------------------


def create_causal_mask(
    seq_len_q: int, seq_len_k: int | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """Return the mask (T, S) that hides later keys: query i attends to keys 0..i."""
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    queries = torch.arange(seq_len_q, device=device)[:, None]
    keys = torch.arange(seq_len_k, device=device)[None, :]
    return keys > queries


def create_padding_mask(
    lengths: Tensor | Sequence[int], seq_len_k: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Return the mask (B, 1, 1, S) that hides padding: keys at or after a sequence's length."""
    lengths = torch.as_tensor(lengths, device=device)[:, None, None, None]
    keys = torch.arange(seq_len_k, device=lengths.device)[None, None, None, :]
    return keys >= lengths


def create_attention_mask(
    seq_len_q: int,
    seq_len_k: int | None = None,
    *,
    is_causal: bool = False,
    key_padding_lengths: Tensor | Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the mask (B or 1, 1, T, S) that hides later keys, padding, or both."""
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    if device is None and isinstance(key_padding_lengths, Tensor):
        device = key_padding_lengths.device
    mask = torch.zeros(1, 1, seq_len_q, seq_len_k, dtype=torch.bool, device=device)
    if is_causal:
        mask = mask | create_causal_mask(seq_len_q, seq_len_k, device=device)
    if key_padding_lengths is not None:
        mask = mask | create_padding_mask(key_padding_lengths, seq_len_k, device=device)
    return mask


def create_causal_mask_with_cache(
    seq_len_q: int, seq_len_k: int, cache_len: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Return the mask (T, S) after P = cache_len tokens: query i attends to keys 0..(P + i)."""
    queries = cache_len + torch.arange(seq_len_q, device=device)[:, None]
    keys = torch.arange(seq_len_k, device=device)[None, :]
    return keys > queries


# ---- Attention -----------------------------------------------------------------------------------


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Split the features of each token into heads: (B, T, E) to (B, N, T, H)."""
    batch_size, seq_len, d_model = x.shape
    return x.reshape(batch_size, seq_len, num_heads, d_model // num_heads).transpose(1, 2)


def combine_heads(x: Tensor) -> Tensor:
    """Concatenate the heads of each token: (B, N, T, H) to (B, T, E)."""
    batch_size, num_heads, seq_len, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch_size, seq_len, num_heads * head_dim)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to key and value (B, N, S, H): context (B, N, T, H) and weights (B, N, T, S)."""
    # The softmax would magnify the rounding of scores in half precision.
    if query.dtype == torch.float64:
        dtype = torch.float64
    else:
        dtype = torch.float32
    scores = query.to(dtype) @ key.to(dtype).transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is not None:
        # The lowest number, because the softmax of a row of -inf is NaN.
        scores = scores.masked_fill(mask, torch.finfo(dtype).min)
    attn_weights = torch.softmax(scores, dim=-1)
    if mask is not None:
        # The softmax of a row without a visible key is uniform: that row becomes 0.
        attn_weights = attn_weights.masked_fill(mask, 0.0)
    attn_weights = attn_weights.to(query.dtype)
    if dropout is None:
        dropped = attn_weights
    else:
        dropped = dropout(attn_weights)
    return dropped @ value, attn_weights


def multi_head_attention_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to projected key and value (B, S, E): output (B, T, E) and weights (B, N, T, S)."""
    q = split_heads(query, num_heads)
    k = split_heads(key, num_heads)
    v = split_heads(value, num_heads)
    context, attn_weights = scaled_dot_product_attention(q, k, v, mask, dropout)
    return combine_heads(context), attn_weights


# ---- Layers --------------------------------------------------------------------------------------


class AttentionLayer(nn.Module):
    """The parts of each layer below: four projections (E, E), and dropout of attention weights."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if d_model % num_heads != 0:
            sizes = f"d_model={d_model} and num_heads={num_heads}"
            raise ValueError(f"d_model must be a multiple of num_heads, got {sizes}")
        self.num_heads = num_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.k_proj = nn.Linear(d_model, d_model, bias=bias)
        self.v_proj = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)


class MultiHeadSelfAttention(AttentionLayer):
    """Multi-head attention of a sequence over itself."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attend from each token of x (B, T, E) to all tokens of its sequence: output (B, T, E)."""
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        context, _ = multi_head_attention_core(q, k, v, self.num_heads, mask, self.dropout)
        return self.out_proj(context)


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention of queries over keys and values."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to key and value (B, S, E): output (B, T, E), and weights (B, N, T, S) or None."""
        key = query if key is None else key
        value = key if value is None else value
        q = self.q_proj(query)
        k = self.k_proj(key)
        v = self.v_proj(value)
        context, attn_weights = multi_head_attention_core(
            q, k, v, self.num_heads, mask, self.dropout
        )
        output = self.out_proj(context)
        if need_weights:
            return output, attn_weights
        return output, None


class MultiHeadAttentionWithCache(AttentionLayer):
    """Causal self-attention with cached keys and values, (B, N, P, H) each, at first None."""

    def forward(
        self, x: Tensor, cache_k: Tensor | None = None, cache_v: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to cached and new tokens: output (B, T, E), keys and values (B, N, P + T, H)."""
        q = split_heads(self.q_proj(x), self.num_heads)
        k = split_heads(self.k_proj(x), self.num_heads)
        v = split_heads(self.v_proj(x), self.num_heads)
        if cache_k is not None:
            k = torch.cat([cache_k, k], dim=2)
        if cache_v is not None:
            v = torch.cat([cache_v, v], dim=2)
        num_new = x.shape[1]
        num_keys = k.shape[2]
        mask = create_causal_mask_with_cache(num_new, num_keys, num_keys - num_new, device=x.device)
        context, _ = scaled_dot_product_attention(q, k, v, mask, self.dropout)
        return self.out_proj(combine_heads(context)), k, v
