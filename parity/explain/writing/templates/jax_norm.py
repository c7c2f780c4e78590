"""The function that normalizes queries and keys, values, the context or latents: one for each."""

import jax
import jax.numpy as jnp
from jax import Array

from parity.explain.writing.subject import EPS, norm
from parity.explain.writing.templates.jax import Params


def normalize(weights: Params, features: Array) -> Array:
    """Normalize the last axis."""
    wide = features.astype(jnp.float32)
    if norm.kind == "layer":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + EPS)
    if norm.weight is not None:
        weight = weights["weight"]
        if norm.per_head:
            weight = weight[:, None]  # (heads, 1, H)
        if norm.weight == "1+w":
            weight = 1.0 + weight
        wide = wide * weight
    if norm.bias:
        bias = weights["bias"]
        if norm.per_head:
            bias = bias[:, None]
        wide = wide + bias
    return wide.astype(features.dtype)
