"""Divisors of the products of queries and keys that ports of attention confuse."""

from __future__ import annotations

import math

WRONG_DIVISORS = ("scale-missing", "scale-squared", "scale-by-d-model")
"""Bugs that any layer may have, by name."""


def wrong_divisors(head_dim: int, width: int, scale: float | None = None) -> dict[str, float]:
    """Return wrong divisors by the names of their bugs.

    Args:
        head_dim: H.
        width: features of the layer, d_model.
        scale: the layer's own scale; None for 1 / sqrt(H).
    """
    squared = float(head_dim)
    if scale is not None:
        squared = (1.0 / scale) ** 2
    return {
        "scale-missing": 1.0,
        "scale-ignored": math.sqrt(head_dim),
        "scale-squared": squared,
        "scale-by-d-model": math.sqrt(width),
    }
