"""Rotary position embedding (RoPE), half-split pairs: feature i turns with feature i + H/2."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_torch.checks import check_floating, check_positions, check_rope


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
    x: Float[Tensor, "B heads T H"], positions: Int[Tensor, "#B T"], theta: float = 10000.0
) -> Float[Tensor, "B heads T H"]:
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
    first, second = at_least_float32(x).chunk(2, dim=-1)
    frequencies = torch.as_tensor(rope_frequencies(int(x.shape[-1]), theta), dtype=first.dtype, device=x.device)
    angles = positions[:, None, :, None].to(first.dtype) * frequencies  # (B or 1, 1, T, H/2)
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x in the dtype that sums are made in: float64 stays, anything narrower becomes float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
