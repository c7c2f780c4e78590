"""Attention as Flax users write it, with points at which to inject deviations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

HIDDEN = -2.3819763e38


def rotated(x: Any, positions: Any, theta: float, pairs: str = "half", faster: float = 1.0) -> Any:
    """Rotate the pairs of heads (B, T, N, H) by positions (B, T), half of the pairs faster by a
    factor.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-2.0 * jnp.arange(half) / x.shape[-1])
    frequencies = jnp.where(jnp.arange(half) < half // 2, frequencies, frequencies * faster)
    angles = positions[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if pairs == "half":
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    first, second = x[..., ::2], x[..., 1::2]
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(
        x.shape
    )


class Einsum(nnx.Module):
    def __init__(self, text: str, shape: tuple[int, ...], rngs: nnx.Rngs):
        self.text = text
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape) * 0.2)

    def __call__(self, x: Any) -> Any:
        return jnp.einsum(self.text, x, self.w[...])


class Norm(nnx.Module):
    """RMSNorm with a weight around 0, to which 1 is added."""

    def __init__(self, width: int, rngs: nnx.Rngs, eps: float = 1e-6):
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (width,)) * 0.3)
        self.eps = eps

    def __call__(self, x: Any) -> Any:
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean_square + self.eps) * (1.0 + self.scale[...])


class EinsumAttention(nnx.Module):
    """Attention in einsum: kernels (N, E, H), packed keys and values, norms of heads, RoPE, a soft
    cap and a window.
    """

    def __init__(self, rngs: nnx.Rngs, **odd: Any):
        self.q_einsum = Einsum("BTD,NDH->BTNH", (4, 32, 8), rngs)
        self.kv_einsum = Einsum("BSD,CKDH->CBSKH", (2, 2, 32, 8), rngs)
        self.attn_vec_einsum = Einsum("BTNH,NHD->BTD", (4, 8, 32), rngs)
        self.query_norm, self.key_norm = Norm(8, rngs), Norm(8, rngs, odd.get("key_eps", 1e-6))
        self.odd = odd

    def __call__(self, x: Any, segment_pos: Any) -> Any:
        odd, window = self.odd, self.odd.get("window", 5)
        q, (k, v) = self.q_einsum(x), self.kv_einsum(x)
        q, k = self.query_norm(q), self.key_norm(k)
        turned = odd.get("turned_positions", lambda positions: positions)(segment_pos)
        q = rotated(q, turned, 1e4, faster=odd.get("faster", 1.0))
        k = rotated(k, segment_pos, 1e4, faster=odd.get("faster", 1.0))
        q = odd.get("queries", lambda q: q)(q * 0.25)
        k, v = odd.get("keys", lambda k: k)(k), odd.get("values", lambda v: v)(v)
        batch_size, num_tokens, num_heads, head_dim = q.shape
        q = q.reshape(batch_size, num_tokens, 2, num_heads // 2, head_dim)
        scores = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(
            batch_size, num_tokens, num_heads, num_tokens
        )
        scores = odd.get("scores", lambda scores: scores)(scores)
        distances = (
            segment_pos[:, :, None]
            - odd.get("key_positions", lambda positions: positions)(segment_pos)[:, None, :]
        )
        mask = (distances >= odd.get("first", 0)) & (distances < window)
        mask = mask[:, :, None, :]
        if not odd.get("capped", True):
            scores = jnp.where(mask, scores, HIDDEN)
        elif odd.get("cap_last"):
            scores = jnp.tanh(jnp.where(mask, scores, HIDDEN) / 20.0) * 20.0
        else:
            scores = jnp.where(mask, jnp.tanh(scores / 20.0) * 20.0, HIDDEN)
        scores = odd.get("logits", lambda scores: scores)(scores)
        weights = odd.get("weights", lambda w: w)(jax.nn.softmax(scores, axis=-1))
        weights = weights.reshape(batch_size, num_tokens, 2, num_heads // 2, num_tokens)
        context = jnp.einsum("BTKGS,BSKH->BTKGH", weights, v).reshape(
            batch_size, num_tokens, num_heads, head_dim
        )
        output = self.attn_vec_einsum(odd.get("context", lambda context: context)(context))
        return odd.get("output", lambda output, x: output)(output, x)


class LibraryAttention(nnx.Module):
    """Projections of nnx with separate heads, interleaved RoPE, and JAX's attention function."""

    def __init__(self, rngs: nnx.Rngs):
        def made(shape: Any) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(32, shape, use_bias=False, rngs=rngs)

        self.query, self.key, self.value = made((4, 8)), made((2, 8)), made((2, 8))
        self.out = nnx.LinearGeneral((4, 8), 32, axis=(-2, -1), use_bias=False, rngs=rngs)

    def attended(self, x: Any) -> Any:
        """Return the context."""
        q, k = self.query(x), self.key(x)
        q = rotated(q, jnp.arange(q.shape[1])[None], 500000.0, "interleaved")
        k = rotated(k, jnp.arange(k.shape[1])[None], 500000.0, "interleaved")
        return jax.nn.dot_product_attention(q, k, self.value(x), is_causal=True)

    def __call__(self, x: Any, segment_pos: Any = None) -> Any:
        return self.out(self.attended(x))


class PackedAttention(nnx.Module):
    """One packed kernel, a bias, nnx's norm over the width, repeated heads and a handwritten
    softmax.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(32, 64, bias_init=nnx.initializers.normal(0.3), rngs=rngs)
        self.q_norm = nnx.RMSNorm(
            32, epsilon=1e-5, scale_init=nnx.initializers.uniform(2.0), rngs=rngs
        )
        self.k_norm = nnx.RMSNorm(
            16, epsilon=1e-5, scale_init=nnx.initializers.uniform(2.0), rngs=rngs
        )
        self.proj = nnx.Linear(32, 32, bias_init=nnx.initializers.normal(0.3), rngs=rngs)

    def __call__(self, x: Any, segment_pos: Any = None) -> Any:
        batch_size, num_tokens, _ = x.shape
        q, k, v = jnp.split(self.qkv(x), (32, 48), axis=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (
            y.reshape(batch_size, num_tokens, -1, 8).transpose(0, 2, 1, 3) for y in (q, k, v)
        )
        k, v = (jnp.repeat(y, 2, axis=1) for y in (k, v))
        scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(8.0)
        scores = scores + jnp.triu(jnp.full((num_tokens, num_tokens), -1e9), 1)
        exponentials = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        context = exponentials / exponentials.sum(axis=-1, keepdims=True) @ v
        return self.proj(context.transpose(0, 2, 1, 3).reshape(batch_size, num_tokens, -1))


class Block(nnx.Module):
    def __init__(self, attention: type, rngs: nnx.Rngs, **odd: Any):
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.attn = attention(rngs, **odd)
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: Any, segment_pos: Any) -> Any:
        x = x + self.attn(self.norm(x), segment_pos)
        return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
    """A small decoder of blocks."""

    def __init__(self, *attention: type, **odd: Any):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(50, 32, rngs=rngs)
        self.layers = nnx.List([Block(kind, rngs, **odd) for kind in attention])
        self.head = nnx.Linear(32, 50, rngs=rngs)

    def __call__(self, tokens: Any, segment_pos: Any) -> Any:
        x = self.embed(tokens) * 3.0
        for layer in self.layers:
            x = layer(x, segment_pos)
        return self.head(x)


class LinenBlock(linen.Module):
    """Attention of linen inside a block."""

    @linen.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        normed = linen.LayerNorm()(x)
        bias = linen.initializers.normal(0.3)
        return x + linen.MultiHeadDotProductAttention(4, bias_init=bias)(normed, mask=mask)


def tokens_of(num_tokens: int = 16) -> dict[str, Any]:
    """Return tokens and positions."""
    tokens = jax.random.randint(jax.random.key(1), (2, num_tokens), 0, 50)
    return {
        "tokens": tokens,
        "segment_pos": jnp.broadcast_to(jnp.arange(num_tokens), (2, num_tokens)),
    }
