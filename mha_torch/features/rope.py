"""Rotary position embedding (RoPE).

Axes: B batch, T tokens, H head_dim, of which R features are rotated in R/2 pairs.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_spec import DynamicScaling, LongRopeScaling, Rope
from mha_spec.features.rope import check_rope
from mha_spec.features.scaling import exponents
from mha_torch.arrays import at_least_float32, constant
from mha_torch.checks import check_positions


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotation by positions, computed once for queries and keys."""

    positions: Int[Tensor, "*axes #B T"]
    cos: Float[Tensor, "#B 1 T pairs"]
    sin: Float[Tensor, "#B 1 T pairs"]


def apply_rope(
    x: Float[Tensor, "B heads T H"], positions: Int[Tensor, "*axes #B T"] | Rotation, rope: Rope
) -> Float[Tensor, "B heads T H"]:
    """Rotate each pair of features of the `Rope` by position * frequency.

    Length-dependent frequencies follow the largest position of each sequence in this call. Cached
    keys keep the frequencies of their own call.

    Args:
        x: queries or keys, split into heads; rotated in at least float32.
        positions: position of each token in its sequence, from 0, (B or 1, T), or with sections
            also (axes, B or 1, T); or their `Rotation`, computed once for several arrays.
        rope: pairs and frequencies.

    Returns:
        Rotated features, in the shape and dtype of x.

    Raises:
        TypeError: if x is not floating point, positions are not integers, or rope is not a `Rope`.
        ValueError: if head_dim or the positions do not fit.

    Source: RoFormer, arXiv:2104.09864.
    """
    wide = at_least_float32(x)
    head_dim = int(x.shape[3])
    if isinstance(positions, Rotation):
        rotation = positions
    else:
        check_rope(rope)
        check_positions(positions, x.shape[0], x.shape[2], rope)
        rotation = rotation_of(positions, rope, head_dim, x.dtype)
    rotated = rope.rotated_features(head_dim)
    cos = rotation.cos
    sin = rotation.sin
    first, second = _split_pairs(wide[..., rotated], rope)
    pairs = _join_pairs(first * cos - second * sin, second * cos + first * sin, rope)
    if rope.rotary_dim is not None:
        pairs = torch.cat([wide[..., : rotated.start], pairs, wide[..., rotated.stop :]], dim=-1)
    return pairs.to(x.dtype)


def rotation_of(
    positions: Int[Tensor, "*axes #B T"], rope: Rope, head_dim: int, dtype: torch.dtype
) -> Rotation:
    """Return the rotation by positions (B or 1, T) of heads of a dtype, in at least float32."""
    angles = _angles(positions, rope, head_dim, torch.promote_types(dtype, torch.float32))
    factor = rope.attention_factor
    return Rotation(positions, torch.cos(angles) * factor, torch.sin(angles) * factor)


def _angles(positions: Tensor, rope: Rope, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return the angle of each token and pair, (B or 1, 1, T, R/2)."""
    frequencies = _frequencies(positions, rope, head_dim, dtype)[:, None, None]
    if positions.ndim == 2:
        return positions[:, None, :, None].to(dtype) * frequencies
    axes = constant(rope.axes(head_dim), positions)
    of_pairs = torch.movedim(positions[axes], 0, -1)  # (B or 1, T, R/2)
    return of_pairs[:, None].to(dtype) * frequencies


def _frequencies(positions: Tensor, rope: Rope, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return the frequency of each sequence and pair, (B or 1, R/2); the largest position may
    change it.
    """
    scaling = rope.scaling
    frequencies = constant(rope.frequencies(head_dim), positions, dtype)[None]
    # Without tokens there is no largest position.
    if not isinstance(scaling, (DynamicScaling, LongRopeScaling)) or not positions.shape[-1]:
        return frequencies
    # The largest position of each sequence, also with sections.
    last = positions.amax(dim=-1)
    if last.ndim == 2:
        last = last.amax(dim=0)
    length = last[:, None] + 1
    if isinstance(scaling, LongRopeScaling):
        longer = constant(rope.frequencies(head_dim, scaling.original_length + 1), positions, dtype)
    else:
        count = frequencies.shape[1]
        base = scaling.base(rope.theta, 2 * count, length.to(dtype))
        longer = 1.0 / base ** constant(exponents(count, 2 * count), positions, dtype)
    return torch.where(length > scaling.original_length, longer, frequencies)


def _split_pairs(x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Return the first and the second feature of each pair, (…, R/2) each."""
    if rope.pairs == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def _join_pairs(first: Tensor, second: Tensor, rope: Rope) -> Tensor:
    """Return the features (…, R) of these pairs."""
    if rope.pairs == "interleaved":
        return torch.stack([first, second], dim=-1).flatten(-2)
    return torch.cat([first, second], dim=-1)
