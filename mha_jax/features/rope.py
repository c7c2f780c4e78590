"""Rotary position embedding (RoPE).

Axes: B batch, T tokens, H head_dim, of which R features are rotated in R/2 pairs.
"""

import jax.numpy as jnp
from jaxtyping import Float, Int

from mha_jax.arrays import Array, at_least_float32
from mha_jax.checks import check_positions
from mha_jax.compiled import compiled
from mha_spec import DynamicScaling, LongRopeScaling, Rope
from mha_spec.features.rope import check_rope
from mha_spec.features.scaling import exponents


def apply_rope(
    x: Float[Array, "B heads T H"], positions: Int[Array, "*axes #B T"], rope: Rope
) -> Float[Array, "B heads T H"]:
    """Rotate each pair of features of the `Rope` by position * frequency.

    Length-dependent frequencies follow the largest position of each sequence in this call. Cached
    keys keep the frequencies of their own call.

    Args:
        x: queries or keys, split into heads; rotated in at least float32.
        positions: position of each token in its sequence, from 0, (B or 1, T), or with sections
            also (axes, B or 1, T).
        rope: pairs and frequencies.

    Returns:
        Rotated features, in the shape and dtype of x.

    Raises:
        TypeError: if x is not floating point, positions are not integers, or rope is not a `Rope`.
        ValueError: if head_dim or the positions do not fit.

    Source: RoFormer, arXiv:2104.09864.
    """
    check_rope(rope)
    check_positions(positions, x.shape[0], x.shape[2], rope)
    rope.rotated_features(x.shape[3])  # raises if heads cannot be rotated
    return _apply_rope(x, positions, rope)


@compiled("rope")
def _apply_rope(x: Array, positions: Array, rope: Rope) -> Array:
    wide = at_least_float32(x)
    rotated = rope.rotated_features(x.shape[3])
    angles = _angles(positions, rope, x.shape[3], wide.dtype)
    cos = jnp.cos(angles) * rope.attention_factor
    sin = jnp.sin(angles) * rope.attention_factor
    first, second = _split_pairs(wide[..., rotated], rope)
    pairs = _join_pairs(first * cos - second * sin, second * cos + first * sin, rope)
    if rope.rotary_dim is not None:
        pairs = jnp.concatenate(
            [wide[..., : rotated.start], pairs, wide[..., rotated.stop :]], axis=-1
        )
    return pairs.astype(x.dtype)


def _angles(positions: Array, rope: Rope, head_dim: int, dtype: jnp.dtype) -> Array:
    """Return the angle of each token and pair, (B or 1, 1, T, R/2)."""
    frequencies = _frequencies(positions, rope, head_dim, dtype)[:, None, None]
    if positions.ndim == 2:
        return positions[:, None, :, None].astype(dtype) * frequencies
    of_pairs = jnp.moveaxis(positions[rope.axes(head_dim)], 0, -1)  # (B or 1, T, R/2)
    return of_pairs[:, None].astype(dtype) * frequencies


def _frequencies(positions: Array, rope: Rope, head_dim: int, dtype: jnp.dtype) -> Array:
    """Return the frequency of each sequence and pair, (B or 1, R/2); the largest position may
    change it.
    """
    scaling = rope.scaling
    frequencies = jnp.asarray(rope.frequencies(head_dim), dtype)[None]
    if not isinstance(scaling, (DynamicScaling, LongRopeScaling)):
        return frequencies
    # The largest position of each sequence, also with sections.
    last = positions.max(axis=-1, initial=0)  # 0 without tokens
    if last.ndim == 2:
        last = last.max(axis=0)
    length = last[:, None] + 1
    if isinstance(scaling, LongRopeScaling):
        longer = jnp.asarray(rope.frequencies(head_dim, scaling.original_length + 1), dtype)[None]
    else:
        count = frequencies.shape[1]
        base = scaling.base(rope.theta, 2 * count, length.astype(dtype))
        longer = 1.0 / base ** jnp.asarray(exponents(count, 2 * count), dtype)[None]
    return jnp.where(length > scaling.original_length, longer, frequencies)


def _split_pairs(x: Array, rope: Rope) -> tuple[Array, Array]:
    """Return the first and the second feature of each pair, (…, R/2) each."""
    if rope.pairs == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = jnp.split(x, 2, axis=-1)
    return first, second


def _join_pairs(first: Array, second: Array, rope: Rope) -> Array:
    """Return the features (…, R) of these pairs."""
    if rope.pairs == "interleaved":
        return jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], 2 * first.shape[-1])
    return jnp.concatenate([first, second], axis=-1)
