"""Scores that were recorded after the mask: the cells that hold its number, which say nothing of the scores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MASKED = -9e3
"""The largest score that is taken for a mask's, which fills with -1e4, -1e9 or -inf, or adds one of them."""

FAR_BELOW = 20.0
"""How far below every expected score such a cell lies at least."""


def masked_cells(
    x: np.ndarray, expected: np.ndarray, hidden: np.ndarray, agrees: Callable[[np.ndarray], bool]
) -> np.ndarray | None:
    """Find the cells of recorded scores that hold a mask's number.

    Args:
        x: what was recorded, (B, N, T, S), floating-point.
        expected: the scores before the mask, float64.
        hidden: the cells that the mask should hide.
        agrees: whether scores are what is expected, up to rounding.

    Returns:
        The cells, boolean; None if there are none.
    """
    x = x.astype(np.float64)
    cells = _far_below(x, expected, hidden)
    cells = cells if cells.any() else _alike(x, expected, hidden, agrees)
    return cells if cells.any() else None


def _far_below(x: np.ndarray, expected: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Cells at a large negative number. Their values alone decide, because the mask itself may be wrong."""
    lowest = expected.min(initial=0.0, where=np.isfinite(expected))
    cells = x <= min(MASKED, lowest - FAR_BELOW)
    others = x[~cells & ~np.isnan(x)]
    # Scores that are too large everywhere leave no such gap.
    is_apart = others.size > 0 and others.min() > 0.5 * x[cells].max(initial=-np.inf)
    return cells & (is_apart or bool(hidden.all()))


def _alike(x: np.ndarray, expected: np.ndarray, hidden: np.ndarray, agrees: Callable[[np.ndarray], bool]) -> np.ndarray:
    """All hidden cells, if one number fills them, or is added to them while all other scores are right."""
    none = np.zeros(x.shape, bool)
    if np.count_nonzero(hidden) < 2 or not np.isfinite(x[hidden]).all() or not np.isfinite(expected).all():
        return none
    if np.ptp(x[hidden]) == 0.0 and np.ptp(expected[hidden]) > 0.0:
        return hidden
    added = x[hidden] - expected[hidden]
    is_added = np.ptp(added) <= 1e-3 * abs(added.mean())
    return hidden if is_added and agrees(np.where(hidden, expected, x)) else none
