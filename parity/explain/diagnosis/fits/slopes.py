"""A slope of ALiBi for each head, fitted to a stage after the scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.fits.numbers import StageTrial

GUESSES = (0.0, *(2.0**-power for power in range(11)), -0.5, -0.125)
"""The slopes that are tried for each head first."""

STEPS = 12
"""Steps of Gauss-Newton, all heads at once."""

HALVED = 4
"""The number of lengths of one step that are tried, each half of the one before."""

LITTLE_BETTER = 0.99
"""The share of a residual that a step may leave before the next one is not worth it."""

SMALL_STEP = 1e-5
"""The change of a slope that measures the derivative."""


class FittedSlopes:
    """Slopes that are fitted to a stage: the best guess for each head, then Gauss-Newton.

    Args:
        trial: the stage.
        edit: returns the edit of the reference with other slopes, (N,).
        right: the right slopes, (N,).
    """

    def __init__(
        self, trial: StageTrial, edit: Callable[[np.ndarray], Edit], right: np.ndarray
    ) -> None:
        self.trial = trial
        self.right = right
        self._edit = edit
        difference = trial.difference
        self._actual = difference.actual
        self._compared = difference.compared & np.isfinite(difference.expected)
        # In the output, all heads are added.
        self._has_heads = difference.letters[1:2] == ("N",)

    def best(self) -> np.ndarray:
        """Return the slopes with the smallest error, (N,), whether or not they explain it."""
        slopes = self._best_guesses()
        residual = self._residual(slopes)
        for _ in range(STEPS):
            better = self._step(slopes, residual)
            if better is None:
                break
            size = _size(residual)
            slopes, residual = better
            if _size(residual) > LITTLE_BETTER * size:
                break
        return slopes

    def _step(
        self, slopes: np.ndarray, residual: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return slopes with a smaller residual, and that; None if no length of a step has one."""
        size = _size(residual)
        move = self._move(slopes, residual)
        for halved in range(HALVED):
            moved = slopes + move * 0.5**halved
            residual_there = self._residual(moved)
            if _size(residual_there) < size:
                return moved, residual_there
        return None

    def _residual(self, slopes: np.ndarray) -> np.ndarray:
        """Return what the stage with some slopes leaves of the actual one; NaN if there is none."""
        x = self.trial.stage(self._edit(slopes))
        if x is None:
            return np.full(self._actual.shape, np.nan)
        return np.where(self._compared, self._actual - x, 0.0)

    def _best_guesses(self) -> np.ndarray:
        if self._has_heads:
            return self._best_guess_of_each()
        slopes = self.right.copy()
        error = _size(self._residual(slopes))
        for head in range(len(slopes)):
            for guess in GUESSES:
                tried = slopes.copy()
                tried[head] = guess
                error_there = _size(self._residual(tried))
                if error_there < error:
                    slopes, error = tried, error_there
        return slopes

    def _best_guess_of_each(self) -> np.ndarray:
        """Return the best guess for each head: all heads have the same one at a time."""
        errors = []
        for guess in GUESSES:
            residual = self._residual(np.full_like(self.right, guess))
            errors.append((residual**2).sum(axis=(0, 2, 3)))
        return np.array(GUESSES)[np.array(errors).argmin(axis=0)]

    def _move(self, slopes: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Return a step of Gauss-Newton, (N,)."""
        if self._has_heads:
            slope = (residual - self._residual(slopes + SMALL_STEP)) / SMALL_STEP
            size = (slope**2).sum(axis=(0, 2, 3))
            product = (slope * residual).sum(axis=(0, 2, 3))
            return np.divide(product, size, out=np.zeros_like(product), where=size > 0.0)
        columns = []
        for head in range(len(slopes)):
            moved = slopes.copy()
            moved[head] += SMALL_STEP
            columns.append((residual - self._residual(moved)).ravel() / SMALL_STEP)
        derivative = np.stack(columns, axis=1)
        if not (np.isfinite(derivative).all() and np.isfinite(residual).all()):
            return np.zeros_like(slopes)
        return np.linalg.lstsq(derivative, residual.ravel(), rcond=None)[0]


def _size(residual: np.ndarray) -> float:
    """Return the root mean square of a residual; infinity if it has NaN."""
    with np.errstate(all="ignore"):
        size = float(np.sqrt(np.mean(residual**2)))
    if math.isfinite(size):
        return size
    return math.inf
