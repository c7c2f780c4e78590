"""The tutorial: multi-head attention as in the paper. It imports nothing of this package.

Axes: B batch, T query tokens, S key tokens, P cached tokens, N heads, H features per head,
E = N * H features per token.
A mask is boolean, True = masked (the query may not attend to the key), and broadcasts to
(B, N, T, S).

Source: Attention Is All You Need, arXiv:1706.03762, section 3.2.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

# ---- Masks ---------------------------------------------------------------------------------------


def create_causal_mask(seq_len_q: int, seq_len_k: int | None = None) -> Array:
    """Return the mask (T, S) that hides later keys: query i attends to keys 0..i."""
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    queries = jnp.arange(seq_len_q)[:, None]
    keys = jnp.arange(seq_len_k)[None, :]
    return keys > queries


def create_padding_mask(lengths: Array | Sequence[int], seq_len_k: int) -> Array:
    """Return the mask (B, 1, 1, S) that hides padding: keys at or after a sequence's length."""
    lengths = jnp.asarray(lengths)[:, None, None, None]
    keys = jnp.arange(seq_len_k)[None, None, None, :]
    return keys >= lengths


def create_attention_mask(
    seq_len_q: int,
    seq_len_k: int | None = None,
    *,
    is_causal: bool = False,
    key_padding_lengths: Array | Sequence[int] | None = None,
) -> Array:
    """Return the mask (B or 1, 1, T, S) that hides later keys, padding, or both."""
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    mask = jnp.zeros((1, 1, seq_len_q, seq_len_k), dtype=bool)
    # With equal ranks, since JAX has a setting that forbids other operations.
    if is_causal:
        mask = mask | create_causal_mask(seq_len_q, seq_len_k)[None, None]
    if key_padding_lengths is not None:
        mask = mask | create_padding_mask(key_padding_lengths, seq_len_k)
    return mask


def create_causal_mask_with_cache(seq_len_q: int, seq_len_k: int, cache_len: int) -> Array:
    """Return the mask (T, S) after P = cache_len tokens: query i attends to keys 0..(P + i)."""
    queries = cache_len + jnp.arange(seq_len_q)[:, None]
    keys = jnp.arange(seq_len_k)[None, :]
    return keys > queries


# ---- Attention -----------------------------------------------------------------------------------


def split_heads(x: Array, num_heads: int) -> Array:
    """Split the features of each token into heads: (B, T, E) to (B, N, T, H)."""
    batch_size, seq_len, d_model = x.shape
    return x.reshape(batch_size, seq_len, num_heads, d_model // num_heads).swapaxes(1, 2)


def combine_heads(x: Array) -> Array:
    """Concatenate the heads of each token: (B, N, T, H) to (B, T, E)."""
    batch_size, num_heads, seq_len, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(batch_size, seq_len, num_heads * head_dim)


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """Attend to key and value (B, N, S, H): context (B, N, T, H) and weights (B, N, T, S)."""
    # The softmax would magnify the rounding of scores in half precision.
    if query.dtype == jnp.float64:
        dtype = jnp.float64
    else:
        dtype = jnp.float32
    scores = query.astype(dtype) @ key.astype(dtype).swapaxes(-2, -1) / math.sqrt(query.shape[-1])
    if mask is not None:
        # To equal ranks, as in create_attention_mask.
        mask = jnp.broadcast_to(mask, scores.shape)
        # The lowest number, because the softmax of a row of -inf is NaN.
        scores = jnp.where(mask, jnp.finfo(dtype).min, scores)
    attn_weights = jax.nn.softmax(scores, axis=-1)
    if mask is not None:
        # The softmax of a row without a visible key is uniform: that row becomes 0.
        attn_weights = jnp.where(mask, 0.0, attn_weights)
    attn_weights = attn_weights.astype(query.dtype)
    if dropout is None:
        dropped = attn_weights
    else:
        dropped = dropout(attn_weights)
    return dropped @ value, attn_weights


def multi_head_attention_core(
    query: Array,
    key: Array,
    value: Array,
    num_heads: int,
    mask: Array | None = None,
    dropout: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """Attend to projected key and value (B, S, E): output (B, T, E) and weights (B, N, T, S)."""
    q = split_heads(query, num_heads)
    k = split_heads(key, num_heads)
    v = split_heads(value, num_heads)
    context, attn_weights = scaled_dot_product_attention(q, k, v, mask, dropout)
    return combine_heads(context), attn_weights


# ---- Layers --------------------------------------------------------------------------------------


class AttentionLayer(nnx.Module):
    """The parts of each layer below: four projections (E, E), and dropout of attention weights."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        if d_model % num_heads != 0:
            sizes = f"d_model={d_model} and num_heads={num_heads}"
            raise ValueError(f"d_model must be a multiple of num_heads, got {sizes}")
        self.num_heads = num_heads
        self.q_proj = nnx.Linear(d_model, d_model, use_bias=bias, rngs=rngs)
        self.k_proj = nnx.Linear(d_model, d_model, use_bias=bias, rngs=rngs)
        self.v_proj = nnx.Linear(d_model, d_model, use_bias=bias, rngs=rngs)
        self.out_proj = nnx.Linear(d_model, d_model, use_bias=bias, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)


class MultiHeadSelfAttention(AttentionLayer):
    """Multi-head attention of a sequence over itself."""

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Attend from each token of x (B, T, E) to all tokens of its sequence: output (B, T, E)."""
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        context, _ = multi_head_attention_core(q, k, v, self.num_heads, mask, self.dropout)
        return self.out_proj(context)


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention of queries over keys and values."""

    def __call__(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        mask: Array | None = None,
        need_weights: bool = False,
    ) -> tuple[Array, Array | None]:
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

    def __call__(
        self, x: Array, cache_k: Array | None = None, cache_v: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Attend to cached and new tokens: output (B, T, E), keys and values (B, N, P + T, H)."""
        q = split_heads(self.q_proj(x), self.num_heads)
        k = split_heads(self.k_proj(x), self.num_heads)
        v = split_heads(self.v_proj(x), self.num_heads)
        if cache_k is not None:
            k = jnp.concatenate([cache_k, k], axis=2)
        if cache_v is not None:
            v = jnp.concatenate([cache_v, v], axis=2)
        num_new = x.shape[1]
        num_keys = k.shape[2]
        mask = create_causal_mask_with_cache(num_new, num_keys, num_keys - num_new)
        context, _ = scaled_dot_product_attention(q, k, v, mask, self.dropout)
        return self.out_proj(combine_heads(context)), k, v
