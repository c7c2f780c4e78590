"""Rotary position embedding (RoPE), half-split pairs: feature i is rotated with feature i + H/2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import Rope
from mha_spec.rope import check_rope
from mha_tt.arrays import check_floating, check_head_dim
from mha_tt.device import as_dtype, head_slots, padded_head_dim, upload


def apply_rope(
    x: Float[Tensor, "B heads T H"],
    positions: Int[np.ndarray, "#B T"],
    rope: Rope,
    *,
    head_dim: int | None = None,
) -> Float[Tensor, "B heads T H"]:
    """Rotate each pair of features (i, i + H/2) by position * theta ** (-2 i / H).

    Args:
        x: queries or keys, split into heads; rotated in at least float32, returned in their own dtype.
        positions: place of each token in its sequence, from 0, (B or 1, T), on the host.
        rope: the frequencies.
        head_dim: features of a head where x has more, its halves padded as `head_slots(head_dim, rope=True)` says.

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
    if 0 in (x.shape[0], x.shape[2]):
        rope.frequencies(head_dim or x.shape[3])  # which refuses what cannot be rotated
        return x
    return Rotation(positions, rope, head_dim=head_dim, padded=x.shape[3], device=x.device()).rotate(x)


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x in the dtype that sums are made in: float64 stays, anything narrower becomes float32."""
    return as_dtype(x, ttnn.float32)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotations of some positions, uploaded once: of queries and keys, and of every call that has these positions.

    The angles are taken in float64 on the host: the device's sine is not made for angles of thousands.
    """

    cos: Float[Tensor, "B 1 T H"]
    sin: Float[Tensor, "B 1 T H"]

    def __init__(
        self, positions: np.ndarray, rope: Rope, *, head_dim: int | None, padded: int, device: ttnn.MeshDevice
    ) -> None:
        """Upload the rotations of positions (B or 1, T) for heads of `padded` features, `head_dim` of them real."""
        check_head_dim(head_dim, padded)
        if head_dim is not None and padded != padded_head_dim(head_dim, rope=True):
            raise ValueError(
                f"heads of head_dim={head_dim} must be padded to {padded_head_dim(head_dim, rope=True)} features for "
                f"RoPE (upload_weights with a spec that has rope), got {padded}"
            )
        slots = np.arange(padded) if head_dim is None else head_slots(head_dim, rope=True)
        angles = positions[:, None, :, None] * rope.frequencies(len(slots))
        cos, sin = np.ones((*angles.shape[:3], padded)), np.zeros((*angles.shape[:3], padded))
        cos[..., slots] = np.concatenate([np.cos(angles)] * 2, axis=-1)
        sin[..., slots] = np.concatenate([-np.sin(angles), np.sin(angles)], axis=-1)
        for name, table in (("cos", cos), ("sin", sin)):
            object.__setattr__(self, name, upload(table, device=device, dtype=ttnn.float32))

    def rotate(self, x: Float[Tensor, "B heads T H"]) -> Float[Tensor, "B heads T H"]:
        """x with each of its pairs rotated; computed in float32, in the dtype of x."""
        half = x.shape[3] // 2
        wide = at_least_float32(x)
        swapped = ttnn.concat([wide[:, :, :, half:], wide[:, :, :, :half]], dim=-1)
        rotated = ttnn.add(ttnn.multiply(wide, self.cos), ttnn.multiply(swapped, self.sin))
        return as_dtype(rotated, x.dtype)


# ---- What is refused -------------------------------------------------------------------------------------------------


def check_positions(positions: object, batch_size: int, seq_len: int) -> None:
    """Refuse positions that are not integers of shape (B, T) or (1, T)."""
    if isinstance(positions, Rotation):
        found = (positions.cos.shape[0], positions.cos.shape[2])
        if found not in ((batch_size, seq_len), (1, seq_len)):
            raise ValueError(f"positions must be (B or 1, T) = ({batch_size} or 1, {seq_len}), got those of {found}")
        return
    if not isinstance(positions, np.ndarray):
        raise TypeError(f"positions must be a NumPy array, got {type(positions).__name__}")
    if positions.dtype.kind not in "iu":
        raise TypeError(f"positions must be integers, got positions.dtype={positions.dtype}")
    if positions.shape not in ((batch_size, seq_len), (1, seq_len)):
        raise ValueError(
            f"positions must have shape (B or 1, T) = ({batch_size} or 1, {seq_len}), "
            f"got positions.shape={positions.shape}"
        )


def check_rope_positions(
    positions: np.ndarray | Rotation | None, batch_size: int, seq_len: int, rope: Rope | None
) -> None:
    """Refuse positions without RoPE, or that do not fit."""
    if positions is None:
        return
    if rope is None:
        raise ValueError("positions must come with RoPE, got positions and rope=None")
    check_positions(positions, batch_size, seq_len)
