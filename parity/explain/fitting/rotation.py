"""Fit rotations of pairs of features: RoPE rotates each pair by position * frequency."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mha_spec import Rope

REFINEMENTS = 3
"""Steps that refine the first guess of the frequencies."""


@dataclass(frozen=True)
class Rotation:
    """An observed rotation of pairs, by begin + position * frequency.

    Attributes:
        frequencies: radians of each pair per position, (pairs,).
        begin: angle of each pair at position 0, in radians, (pairs,).
        amplitude: factor of the length of pairs.
    """

    frequencies: np.ndarray
    begin: np.ndarray
    amplitude: float


def complex_pairs(heads: np.ndarray, rope: Rope) -> np.ndarray:
    """Return the rotated pairs of heads (…, H) as complex numbers, (…, R/2), in complex128."""
    first, second = rope.pair_features(heads.shape[-1])
    wide = heads.astype(np.float64)
    return wide[..., first] + 1j * wide[..., second]


def with_pairs(heads: np.ndarray, pairs: np.ndarray, rope: Rope) -> np.ndarray:
    """Return heads (…, H) with other rotated pairs, complex numbers (…, R/2)."""
    first, second = rope.pair_features(heads.shape[-1])
    changed = heads.copy()
    changed[..., first] = np.real(pairs)
    changed[..., second] = np.imag(pairs)
    return changed


def fit_rotation(before: np.ndarray, after: np.ndarray, positions: np.ndarray) -> Rotation | None:
    """Return the rotation that turns one array of pairs into another, by least squares.

    Nothing is verified: the result is the nearest rotation, whether or not there was one.

    Args:
        before, after: complex pairs before and after it, (B, N, T, pairs).
        positions: positions of the tokens, (B or 1, T).

    Returns:
        None if no two consecutive tokens have consecutive positions.
    """
    # The angle of each number is the angle of a pair's rotation, its size the weight of the
    # observation.
    cross = after * before.conj()
    # Sequences at the same positions are one sample.
    if len(positions) > 1:
        cross = cross.sum(axis=1)
    else:
        cross = cross.sum(axis=(0, 1))[None]
    is_next = np.diff(positions, axis=1) == 1.0
    if not is_next.any():
        return None
    positions_by_pair = positions[..., None]
    # From one token to the next, a pair turns by its frequency.
    steps = cross[:, 1:] * cross[:, :-1].conj() * is_next[..., None]
    frequencies = np.angle(steps.sum(axis=(0, 1)))
    for _ in range(REFINEMENTS):
        frequencies = frequencies + _remaining_slope(cross, positions_by_pair, frequencies)
    begin = np.angle((cross * np.exp(-1j * positions_by_pair * frequencies)).sum(axis=(0, 1)))
    size = float((np.abs(before) ** 2).sum())
    amplitude = 1.0
    if size:
        amplitude = float(np.abs(cross).sum()) / size
    return Rotation(frequencies, begin, amplitude)


def _remaining_slope(
    cross: np.ndarray, positions: np.ndarray, frequencies: np.ndarray
) -> np.ndarray:
    """Return how much the angles that frequencies leave grow with each position, a number for each
    pair.

    It is a straight line by least squares. Large pairs, whose angles are accurate, weigh most.
    """
    turned_back = cross * np.exp(-1j * positions * frequencies)
    mean = turned_back.sum(axis=(0, 1))
    # Relative to their mean, angles do not wrap around.
    angles = np.angle(turned_back * mean.conj())
    weight = np.abs(cross)
    total = np.maximum(weight.sum(axis=(0, 1)), 1e-300)
    middle = (weight * positions).sum(axis=(0, 1)) / total
    away = positions - middle
    spread = np.maximum((weight * away * away).sum(axis=(0, 1)), 1e-300)
    return (weight * away * angles).sum(axis=(0, 1)) / spread


def nearest_positions(turns: np.ndarray, frequencies: np.ndarray, most: int) -> np.ndarray:
    """Return the integers 0 … most - 1 at which frequencies rotate nearest to observed turns.

    Args:
        turns: observed complex factor of each pair, (…, pairs).
        frequencies: frequencies of the pairs, (pairs,).
        most: number of positions that are tried.

    Returns:
        The position for each row of turns, (…).
    """
    angles = np.arange(most)[:, None] * frequencies
    # |turn - e^(i a)|^2 is smallest where the real part of turn * e^(-i a) is largest.
    agreement = np.real(turns) @ np.cos(angles).T + np.imag(turns) @ np.sin(angles).T
    return agreement.argmax(axis=-1)
