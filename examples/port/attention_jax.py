"""The port to JAX, first draft: it runs, every shape is right, and it has three bugs."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def from_torch(state: Mapping[str, np.ndarray]) -> dict[str, Array]:
    """Convert the weights of the original, (out, in), to kernels, (in, out)."""
    wqkv = state["wqkv.weight"].T
    wo = state["wo.weight"]
    return {"wqkv": jnp.asarray(wqkv), "wo": jnp.asarray(wo)}


def rotary(x: Array, base: float) -> Array:
    """Rotate the pairs of features of x, (batch, heads, tokens, features), by an angle per
    position.
    """
    seq_len, head_dim = x.shape[-2:]
    inv_freq = base ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(seq_len)[:, None] * inv_freq
    cos, sin = jnp.asarray(np.cos(angles), x.dtype), jnp.asarray(np.sin(angles), x.dtype)
    x1, x2 = x[..., 0::2], x[..., 1::2]
    turned = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return turned.reshape(x.shape)


def for_query_heads(x: Array, n_heads: int) -> Array:
    """Repeat key or value heads, (batch, heads, tokens, features), for each query head."""
    return jnp.tile(x, (1, n_heads // x.shape[1], 1, 1))


def stages(
    params: Mapping[str, Array],
    x: Array,
    n_heads: int = 8,
    n_kv_heads: int = 2,
    rope_base: float = 10000.0,
) -> dict[str, Array]:
    """Compute every stage from x, (batch, tokens, dim), to the output, by name."""
    batch, seq_len, dim = x.shape
    heads = (x @ params["wqkv"]).reshape(batch, seq_len, -1, dim // n_heads).swapaxes(1, 2)
    q, k, v = jnp.split(heads, [n_heads, n_heads + n_kv_heads], axis=1)
    q, k = rotary(q, rope_base), rotary(k, rope_base)
    scores = q @ for_query_heads(k, n_heads).swapaxes(2, 3) / jnp.sqrt(q.shape[-1])
    is_later = ~jnp.tri(seq_len, dtype=bool)
    attn_weights = jax.nn.softmax(jnp.where(is_later, -jnp.inf, scores), axis=-1)
    context = attn_weights @ for_query_heads(v, n_heads)
    output = context.swapaxes(1, 2).reshape(batch, seq_len, dim) @ params["wo"]
    return {
        "q": q,
        "k": k,
        "v": v,
        "scores": scores,
        "attn_weights": attn_weights,
        "context": context,
        "output": output,
    }


def attention(params: Mapping[str, Array], x: Array) -> Array:
    """Apply causal attention to x, (batch, tokens, dim)."""
    return stages(params, x)["output"]
