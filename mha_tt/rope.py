"""Rotary position embedding (RoPE), half-split pairs: feature i turns with feature i + H/2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_tt.checks import check_floating, check_head_dim, check_positions, check_rope
from mha_tt.device import as_dtype, head_slots, padded_head_dim, upload


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
    x: Float[Tensor, "B heads T H"],
    positions: Int[np.ndarray, "#B T"],
    theta: float = 10000.0,
    *,
    head_dim: int | None = None,
) -> Float[Tensor, "B heads T H"]:
    """Turn each pair of features (i, i + H/2) by position * theta ** (-2 i / H).

    Checkpoints whose pairs are interleaved (2 i, 2 i + 1) are reordered when their weights are loaded, not here.

    Args:
        x: queries or keys, split into heads; turned in at least float32, returned in their own dtype.
        positions: place of each token in its sequence, from 0, (B or 1, T), on the host.
        theta: base of the frequencies.
        head_dim: features of a head where x has more, its halves padded as `head_slots(head_dim, rope=True)` says.

    Returns:
        The turned features, in the shape and dtype of x.

    Raises:
        TypeError: if x is not floating point or positions are not integers.
        ValueError: if head_dim is odd or the positions do not fit.

    Source: RoFormer, arXiv:2104.09864; half-split pairs as in GPT-NeoX.
    """
    check_floating("x", x, rank=4)
    check_positions(positions, x.shape[0], x.shape[2])
    if 0 in (x.shape[0], x.shape[2]):
        check_rope(head_dim or x.shape[3], theta)
        return x
    return Rotation(positions, theta, head_dim=head_dim, padded=x.shape[3], device=x.device()).turn(x)


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x in the dtype that sums are made in: float64 stays, anything narrower becomes float32."""
    return as_dtype(x, ttnn.float32)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The turns of some positions, uploaded once: of queries and keys, and of every call that has these positions.

    The angles are taken in float64 on the host: the device's sine is not made for angles of thousands.
    """

    cos: Float[Tensor, "B 1 T H"]
    sin: Float[Tensor, "B 1 T H"]

    def __init__(
        self, positions: np.ndarray, theta: float, *, head_dim: int | None, padded: int, device: ttnn.MeshDevice
    ) -> None:
        """Upload the turns of positions (B or 1, T) for heads of `padded` features, `head_dim` of them real."""
        check_head_dim(head_dim, padded)
        if head_dim is not None and padded != padded_head_dim(head_dim, rope=True):
            raise ValueError(
                f"heads of head_dim={head_dim} must be padded to {padded_head_dim(head_dim, rope=True)} features for "
                f"RoPE (upload_weights(rope=True)), got {padded}"
            )
        slots = np.arange(padded) if head_dim is None else head_slots(head_dim, rope=True)
        angles = positions[:, None, :, None] * rope_frequencies(len(slots), theta)
        cos, sin = np.ones((*angles.shape[:3], padded)), np.zeros((*angles.shape[:3], padded))
        cos[..., slots] = np.concatenate([np.cos(angles)] * 2, axis=-1)
        sin[..., slots] = np.concatenate([-np.sin(angles), np.sin(angles)], axis=-1)
        for name, table in (("cos", cos), ("sin", sin)):
            object.__setattr__(self, name, upload(table, device=device, dtype=ttnn.float32))

    def turn(self, x: Float[Tensor, "B heads T H"]) -> Float[Tensor, "B heads T H"]:
        """x with each of its pairs turned; computed in float32, in the dtype of x."""
        half = x.shape[3] // 2
        wide = at_least_float32(x)
        swapped = ttnn.concat([wide[:, :, :, half:], wide[:, :, :, :half]], dim=-1)
        turned = ttnn.add(ttnn.multiply(wide, self.cos), ttnn.multiply(swapped, self.sin))
        return as_dtype(turned, x.dtype)
