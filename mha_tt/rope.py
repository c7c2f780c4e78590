"""Rotary position embedding (RoPE): pairs of features, rotated by their positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, Rope
from mha_spec.rope import check_rope
from mha_tt.arrays import as_dtype, at_least_float32
from mha_tt.checks import check_floating, check_head_dim, check_pair_order, check_positions
from mha_tt.device import upload
from mha_tt.layout import padded_head_dim


def apply_rope(
    x: Float[Tensor, "B heads T H"],
    positions: Int[np.ndarray, "... #B T"],
    rope: Rope,
    *,
    head_dim: int | None = None,
) -> Float[Tensor, "B heads T H"]:
    """Rotate each pair of features of the `Rope` by position * frequency.

    Frequencies that depend on the length are those of the largest position of each sequence in this call, for all its
    positions; keys that were cached before keep those of their own call.

    Args:
        x: queries or keys, split into heads; rotated in at least float32, returned in their own dtype.
        positions: place of each token in its sequence, from 0, (B or 1, T), or with sections also (axes, B or 1, T), on
            the host.
        rope: the pairs and their frequencies.
        head_dim: features of a head where x has more, ordered and padded as `head_slots(head_dim, rope=rope)` says. A
            bare head has only the pairs (i, i + H/2).

    Returns:
        The rotated features, in the shape and dtype of x.

    Raises:
        TypeError: if x is not floating point, positions are not integers, or rope is not a `Rope`.
        ValueError: if head_dim or the positions do not fit, or a bare head has other pairs.

    Source: RoFormer, arXiv:2104.09864.
    """
    check_floating("x", x, rank=4)
    check_rope(rope)
    check_positions(positions, x.shape[0], x.shape[2], rope)
    rope.rotated_features(head_dim or x.shape[3])  # which refuses what cannot be rotated
    if 0 in (x.shape[0], x.shape[2]):
        return x
    return Rotation(positions, rope, head_dim=head_dim, padded=x.shape[3], device=x.device()).rotate(x)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotations of some positions, uploaded once: of queries and keys, and of every call that has these positions.

    The angles are taken in float64 on the host: the device's sine is not made for angles of thousands.
    """

    positions: Int[np.ndarray, "... #B T"]
    cos: Float[Tensor, "B 1 T H"]
    sin: Float[Tensor, "B 1 T H"]

    def __init__(
        self,
        positions: np.ndarray,
        rope: Rope,
        *,
        head_dim: int | None,
        padded: int,
        device: ttnn.MeshDevice,
        side_by_side: bool = False,
    ) -> None:
        """Upload the rotations of positions (B or 1, T) for heads of `padded` features, `head_dim` of them real.

        Each row is a sequence; `side_by_side` each token is one by itself, as in a step of many sequences.
        """
        check_head_dim(head_dim, padded)
        tables = cos_and_sin(positions, rope, head_dim, padded, side_by_side)
        object.__setattr__(self, "positions", positions)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            object.__setattr__(self, name, upload(table[:, None], device=device, dtype=ttnn.float32))

    @property
    def counts(self) -> tuple[int, int]:
        """Of how many sequences and tokens they are; one sequence stands for all."""
        return self.cos.shape[0], self.cos.shape[2]

    def rotate(self, x: Float[Tensor, "B heads T H"]) -> Float[Tensor, "B heads T H"]:
        """x with each of its pairs rotated; computed in float32, in the dtype of x."""
        half = x.shape[3] // 2
        wide = at_least_float32(x)
        swapped = ttnn.concat([wide[:, :, :, half:], wide[:, :, :, :half]], dim=-1)
        rotated = ttnn.add(ttnn.multiply(wide, self.cos), ttnn.multiply(swapped, self.sin))
        return as_dtype(rotated, x.dtype)


def rotation_of(
    positions: Int[np.ndarray, "... #B T"], spec: AttentionSpec, *, device: ttnn.MeshDevice, side_by_side: bool = False
) -> Rotation | None:
    """The rotations of positions for the heads of a layer, with latents for what heads share; None without RoPE."""
    if spec.rope is None:
        return None
    head_dim, padded = rotated_head(spec)
    return Rotation(positions, spec.rope, head_dim=head_dim, padded=padded, device=device, side_by_side=side_by_side)


def positions_and_rotation(
    x: Tensor, positions: np.ndarray | Rotation | None, spec: AttentionSpec
) -> tuple[np.ndarray | None, Rotation | None]:
    """The positions of tokens (B, T, d_in), where anything depends on them, and with RoPE their rotations."""
    if not spec.has_positions:
        return None, None
    positions = np.arange(x.shape[1])[None] if positions is None else positions
    check_positions(positions, x.shape[0], x.shape[1], spec.rope)
    if isinstance(positions, Rotation):
        return positions.positions, positions
    return positions, None if 0 in (x.shape[0], x.shape[1]) else rotation_of(positions, spec, device=x.device())


def rotated_head(spec: AttentionSpec) -> tuple[int, int]:
    """Features of what a layer with RoPE rotates: those of a head, or that heads share, and as many as are padded."""
    head_dim = spec.head_dim if spec.latent is None else spec.latent.rope_dim
    return head_dim, padded_head_dim(head_dim, rope=True)


def cos_and_sin(
    positions: np.ndarray, rope: Rope, head_dim: int | None, padded: int, side_by_side: bool
) -> tuple[np.ndarray, np.ndarray]:
    """What the features of heads are multiplied by, and what those half a head away are, (B or 1, T, P) each."""
    check_pair_order(rope, head_dim, padded)
    angles = _angles(positions, rope, padded if head_dim is None else head_dim, side_by_side)
    first = np.arange(angles.shape[-1])  # as `head_slots` has them
    second = padded // 2 + first
    cos, sin = np.ones((*angles.shape[:2], padded)), np.zeros((*angles.shape[:2], padded))
    cos[..., first] = cos[..., second] = rope.attention_factor * np.cos(angles)
    sin[..., second] = rope.attention_factor * np.sin(angles)
    sin[..., first] = -sin[..., second]
    return cos, sin


def _angles(positions: np.ndarray, rope: Rope, head_dim: int, side_by_side: bool) -> np.ndarray:
    """Of each token and pair, (B or 1, T, R/2)."""
    of_axes = positions if positions.ndim == 3 else positions[None]
    frequencies = rope.frequencies(head_dim)
    axes = rope.axes(head_dim) if positions.ndim == 3 else np.zeros(len(frequencies), np.int64)
    if rope.depends_on_length:
        lengths = of_axes.max(axis=0) + 1
        lengths = lengths if side_by_side else lengths.max(axis=-1, keepdims=True)
        frequencies = np.array([[rope.frequencies(head_dim, int(length)) for length in row] for row in lengths])
    return np.moveaxis(of_axes[axes], 0, -1) * frequencies
