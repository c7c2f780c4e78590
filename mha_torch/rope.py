"""Rotary position embedding (RoPE), half-split pairs: feature i is rotated with feature i + H/2."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_spec import Rope
from mha_spec.rope import check_rope
from mha_torch.arrays import check_array, check_floating


def apply_rope(
    x: Float[Tensor, "B heads T H"], positions: Int[Tensor, "#B T"], rope: Rope
) -> Float[Tensor, "B heads T H"]:
    """Rotate each pair of features (i, i + H/2) by position * theta ** (-2 i / H).

    Args:
        x: queries or keys, split into heads; rotated in at least float32, returned in their own dtype.
        positions: place of each token in its sequence, from 0, (B or 1, T).
        rope: the frequencies.

    Returns:
        The rotated features, in the shape and dtype of x.

    Raises:
        TypeError: if x is not floating point, positions are not integers, or rope is not a `Rope`.
        ValueError: if head_dim is odd or the positions do not fit.

    Source: RoFormer, arXiv:2104.09864; half-split pairs as in GPT-NeoX.
    """
    check_floating("x", x, rank=4)
    check_positions(positions, x.shape[0], x.shape[2])
    check_rope(rope)
    first, second = at_least_float32(x).chunk(2, dim=-1)
    frequencies = torch.as_tensor(rope.frequencies(int(x.shape[-1])), dtype=first.dtype, device=x.device)
    angles = positions[:, None, :, None].to(first.dtype) * frequencies  # (B or 1, 1, T, H/2)
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x in the dtype that sums are made in: float64 stays, anything narrower becomes float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_positions(positions: Tensor, batch_size: int, seq_len: int) -> None:
    """Refuse positions that are not integers of shape (B, T) or (1, T)."""
    check_array("positions", positions)
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise TypeError(f"positions must be integers, got positions.dtype={positions.dtype}")
    if tuple(positions.shape) not in ((batch_size, seq_len), (1, seq_len)):
        raise ValueError(
            f"positions must have shape (B or 1, T) = ({batch_size} or 1, {seq_len}), "
            f"got positions.shape={tuple(positions.shape)}"
        )


def check_rope_positions(positions: Tensor | None, batch_size: int, seq_len: int, rope: Rope | None) -> None:
    """Refuse positions without RoPE, or that do not fit."""
    if positions is None:
        return
    if rope is None:
        raise ValueError("positions must come with RoPE, got positions and rope=None")
    check_positions(positions, batch_size, seq_len)
