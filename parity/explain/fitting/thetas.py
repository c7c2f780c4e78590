"""Bases of RoPE: those in use, and the base of observed frequencies."""

from __future__ import annotations

import math

import numpy as np

THETAS_IN_USE = (1e2, 1e3, 1e4, 1e5, 5e5, 1e6, 1e7)
"""Bases of released models."""

THETAS = tuple(sorted({*THETAS_IN_USE, 2e3, 5e3, 2e4, 5e4, 2e5, 2e6, 5e6, 1e8}))
"""Bases to try first: round numbers."""

LEAST, MOST = 1.2, 1e12
"""Bounds of a fitted base."""

LOGARITHMS = np.linspace(math.log(LEAST), math.log(1e9), 4001)
"""Logarithms of the bases from which a fit starts."""

STEPS = 20
"""Steps of Gauss-Newton."""


def plain_exponents(num_pairs: int) -> np.ndarray:
    """Return 2 i / R for each of R / 2 pairs, (R/2,), in float64."""
    return 2.0 * np.arange(num_pairs) / (2 * num_pairs)


def fit_theta(frequencies: np.ndarray) -> float | None:
    """Return the base theta whose frequencies theta ** -(2 i / R) are nearest to given ones.

    The best logarithm of a grid is refined by Gauss-Newton.

    Args:
        frequencies: (R/2,), for i from 0 on.

    Returns:
        The base, between LEAST and MOST; None for a single pair, whose frequency is always 1.
    """
    exponents = plain_exponents(len(frequencies))
    if len(exponents) < 2:
        return None
    misfit = ((np.exp(-LOGARITHMS[:, None] * exponents) - frequencies) ** 2).sum(axis=1)
    logarithm = float(LOGARITHMS[misfit.argmin()])
    for _ in range(STEPS):
        fitted = np.exp(-logarithm * exponents)
        slope = -exponents * fitted
        logarithm += float((slope * (frequencies - fitted)).sum() / (slope**2).sum())
        logarithm = min(max(logarithm, math.log(LEAST)), math.log(MOST))
    return math.exp(logarithm)
