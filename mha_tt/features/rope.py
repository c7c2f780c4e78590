"""Rotary position embedding (RoPE)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, Rope
from mha_spec.features.rope import check_rope
from mha_tt.arrays import as_dtype, at_least_float32
from mha_tt.checks import check_head_dim, check_pair_order, check_positions, check_tiles
from mha_tt.device import upload
from mha_tt.layout import padded_head_dim


def apply_rope(
    x: Float[Tensor, "B heads T H"],
    positions: Int[np.ndarray, "*axes #B T"],
    rope: Rope,
    *,
    head_dim: int | None = None,
) -> Float[Tensor, "B heads T H"]:
    """Rotate each pair of features of the `Rope` by position * frequency.

    Length-dependent frequencies follow the largest position of each sequence in this call. Cached
    keys keep the frequencies of their own call.

    Args:
        x: queries or keys, split into heads; rotated in at least float32.
        positions: position of each token in its sequence, from 0, (B or 1, T), or with sections
            also (axes, B or 1, T), on the host.
        rope: pairs and frequencies.
        head_dim: features of a head if x has more, in the layout of `feature_indices(head_dim,
            rope=rope)`. An unpadded head supports only pairs (i, i + H/2).

    Returns:
        Rotated features, in the shape and dtype of x.

    Raises:
        TypeError: if x is not floating point, positions are not integers, or rope is not a `Rope`.
        ValueError: if head_dim or the positions do not fit, or an unpadded head has other pairs.

    Source: RoFormer, arXiv:2104.09864.
    """
    check_tiles("x", x)
    check_rope(rope)
    check_positions(positions, x.shape[0], x.shape[2], rope)
    rope.rotated_features(head_dim or x.shape[3])  # raises if heads cannot be rotated
    if 0 in (x.shape[0], x.shape[2]):
        return x
    return Rotation(
        positions, rope, head_dim=head_dim, padded=x.shape[3], device=x.device()
    ).rotate(x)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotation by positions, uploaded once for queries and keys, and for all calls with these
    positions.

    Angles are computed in float64 on the host: the device's sine does not support angles of
    thousands.
    """

    positions: Int[np.ndarray, "*axes #B T"]
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
        """Upload the rotation by positions (B or 1, T) for heads of `padded` features, `head_dim`
        of them real.

        Each row is a sequence; with `side_by_side` each token is its own sequence, as in a step of
        many sequences.
        """
        check_head_dim(head_dim, padded)
        tables = cos_and_sin(positions, rope, head_dim, padded, side_by_side)
        object.__setattr__(self, "positions", positions)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            object.__setattr__(
                self, name, upload(table[:, None], device=device, dtype=ttnn.float32)
            )

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of sequences and tokens; one sequence stands for all."""
        return self.cos.shape[0], self.cos.shape[2]

    def rotate(self, x: Float[Tensor, "B heads T H"]) -> Float[Tensor, "B heads T H"]:
        """Return x with all pairs rotated; computed in float32, in the dtype of x."""
        half = x.shape[3] // 2
        wide = at_least_float32(x)
        swapped = ttnn.concat([wide[:, :, :, half:], wide[:, :, :, :half]], dim=-1)
        rotated = ttnn.add(ttnn.multiply(wide, self.cos), ttnn.multiply(swapped, self.sin))
        return as_dtype(rotated, x.dtype)


def rotation_of(
    positions: Int[np.ndarray, "*axes #B T"],
    spec: AttentionSpec,
    *,
    device: ttnn.MeshDevice,
    side_by_side: bool = False,
) -> Rotation | None:
    """Return the rotation by positions for the heads of a layer, or for the shared features; None
    without RoPE.
    """
    if spec.rope is None:
        return None
    head_dim, padded = rotated_head(spec)
    return Rotation(
        positions,
        spec.rope,
        head_dim=head_dim,
        padded=padded,
        device=device,
        side_by_side=side_by_side,
    )


def positions_and_rotation(
    x: Tensor, positions: np.ndarray | Rotation | None, spec: AttentionSpec
) -> tuple[np.ndarray | None, Rotation | None]:
    """Return the positions of tokens (B, T, d_in), if the layer depends on them, and with RoPE
    their rotation.
    """
    if not spec.has_positions:
        return None, None
    positions = np.arange(x.shape[1])[None] if positions is None else positions
    check_positions(positions, x.shape[0], x.shape[1], spec.rope)
    if isinstance(positions, Rotation):
        return positions.positions, positions
    if 0 in (x.shape[0], x.shape[1]):
        return positions, None
    return positions, rotation_of(positions, spec, device=x.device())


def rotated_head(spec: AttentionSpec) -> tuple[int, int]:
    """Return the number of rotated features (of a head, or shared), and the padded number."""
    if spec.latent is None:
        head_dim = spec.head_dim
    else:
        head_dim = spec.latent.rope_dim
    return head_dim, padded_head_dim(head_dim, rope=True)


def cos_and_sin(
    positions: np.ndarray, rope: Rope, head_dim: int | None, padded: int, side_by_side: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors of features, and of those half a head away, (B or 1, T, P) each."""
    check_pair_order(rope, head_dim, padded)
    angles = _angles(positions, rope, padded if head_dim is None else head_dim, side_by_side)
    first = np.arange(angles.shape[-1])  # see `feature_indices`
    second = padded // 2 + first
    cos = np.ones((*angles.shape[:2], padded))
    sin = np.zeros((*angles.shape[:2], padded))
    cos[..., first] = cos[..., second] = rope.attention_factor * np.cos(angles)
    sin[..., second] = rope.attention_factor * np.sin(angles)
    sin[..., first] = -sin[..., second]
    return cos, sin


def _angles(positions: np.ndarray, rope: Rope, head_dim: int, side_by_side: bool) -> np.ndarray:
    """Return the angle of each token and pair, (B or 1, T, R/2)."""
    frequencies = rope.frequencies(head_dim)
    if positions.ndim == 3:
        of_axes = positions
        axes = rope.axes(head_dim)
    else:
        of_axes = positions[None]
        axes = np.zeros(len(frequencies), np.int64)
    if rope.depends_on_length:
        lengths = of_axes.max(axis=0) + 1
        if not side_by_side:
            lengths = lengths.max(axis=-1, keepdims=True)
        frequencies = np.array(
            [[rope.frequencies(head_dim, int(length)) for length in row] for row in lengths]
        )
    return np.moveaxis(of_axes[axes], 0, -1) * frequencies
