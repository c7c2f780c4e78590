"""Rotary position embedding (RoPE), half-split pairs: feature i turns with feature i + H/2."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mha_jax.checks import check_floating, check_positions, check_rope
from mha_jax.compiled import compiled


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Angle, in radians per token, by which each pair of features turns: theta ** (-2 i / H), float64, (H/2,).

    Args:
        head_dim: features of a head, H, even.
        theta: base of the frequencies, 10000 in the paper.

    Raises:
        ValueError: if head_dim is odd or theta not positive.

    Source: RoFormer, arXiv:2104.09864, section 3.2.2.
    """
    check_rope(head_dim, theta)
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def apply_rope(
    x: Float[Array, "B heads T H"], positions: Int[Array, "#B T"], theta: float = 10000.0
) -> Float[Array, "B heads T H"]:
    """Turn each pair of features (i, i + H/2) by position * theta ** (-2 i / H).

    Checkpoints whose pairs are interleaved (2 i, 2 i + 1) are reordered when their weights are loaded, not here.

    Args:
        x: queries or keys, split into heads; turned in at least float32, returned in their own dtype.
        positions: place of each token in its sequence, from 0, (B or 1, T).
        theta: base of the frequencies.

    Returns:
        The turned features, in the shape and dtype of x.

    Raises:
        TypeError: if x is not floating point or positions are not integers.
        ValueError: if head_dim is odd or the positions do not fit.

    Source: RoFormer, arXiv:2104.09864; half-split pairs as in GPT-NeoX.
    """
    check_floating("x", x, rank=4)
    check_positions(positions, x.shape[0], x.shape[2])
    return _apply_rope(x, positions, rope_frequencies(x.shape[-1], theta))


@compiled()
def _apply_rope(x: Array, positions: Array, exact_frequencies: np.ndarray) -> Array:
    first, second = jnp.split(at_least_float32(x), 2, axis=-1)
    frequencies = jnp.asarray(exact_frequencies, dtype=first.dtype)
    angles = positions[:, None, :, None].astype(first.dtype) * frequencies[None, None, None]  # (B or 1, 1, T, H/2)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def at_least_float32(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x in the dtype that sums are made in: float64 stays, anything narrower becomes float32."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)
