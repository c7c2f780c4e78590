"""Rotary position embedding (RoPE): which pairs of features are rotated, and by what angle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mha_spec.rules import as_count, as_number


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of queries and keys: pairs (i, i + H/2), rotated by position * theta ** (-2 i / H).

    Checkpoints whose pairs are interleaved (2 i, 2 i + 1) are reordered when their weights are loaded.

    Attributes:
        theta: base of the frequencies, 10000 in the paper.

    Raises:
        TypeError: if theta is not a number.
        ValueError: if theta is not positive and finite.

    Source: RoFormer, arXiv:2104.09864, section 3.2.2; half-split pairs as in GPT-NeoX.
    """

    theta: float = 10000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", as_number("theta", self.theta))
        if not 0 < self.theta < math.inf:  # JSON has neither infinity nor NaN
            raise ValueError(f"theta must be positive and finite, got theta={self.theta}")

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angle, in radians per token, by which each pair of features is rotated: float64, (H/2,).

        Args:
            head_dim: features of a head, H, even.

        Raises:
            TypeError: if head_dim is not an integer.
            ValueError: if head_dim is odd or below 1.
        """
        check_rotated(head_dim)
        return self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def check_rotated(head_dim: int) -> None:
    """Refuse heads that cannot be rotated in pairs."""
    if as_count("head_dim", head_dim) % 2:
        raise ValueError(f"head_dim must be even for RoPE, got head_dim={head_dim}")


def check_rope(rope: object) -> None:
    """Refuse what is not a `Rope`, as the base of its frequencies is not.

    Raises:
        TypeError: if it is not one.
    """
    if not isinstance(rope, Rope):
        raise TypeError(f"rope must be a Rope, got rope={rope!r}")
