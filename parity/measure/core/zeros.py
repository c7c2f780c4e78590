"""Zeros of attention weights.

The weight of a hidden key is exactly 0 in every dtype, the weight of a visible key is not.

One wrong cell of a mask changes a weight by about 1 / S, which is less than the rounding of a
bfloat16 weight of 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

LEAST_WEIGHT = {
    "float32": 2.0**-106,
    "bfloat16": 2.0**-106,
    "float16": 2.0**-12,
    "float64": 2.0**-106,
}
"""Smallest weight, by dtype, that rounding cannot turn into 0: well above the smallest normal
number (for float64 for its float32 noise) and the underflow of exponentials.
"""

FLIPPED = 8.0
"""Factor by which the same-precision reference may shrink a weight that is clearly not 0.

It is a choice and not measured: rounding changes a normal number by far less.
"""

WRONG_ZEROS = "a visible key has weight exactly 0, or a hidden key has not"


def largest_zero(expected: np.ndarray, same_precision: np.ndarray, dtype: str) -> float:
    """Return the largest weight that may be 0 on only one side.

    Noise turns weights of its size into 0.
    """
    is_lost = ~np.isnan(expected) & (FLIPPED * np.abs(same_precision) < expected)
    largest_lost = float(expected.max(initial=0.0, where=is_lost))
    return max(LEAST_WEIGHT[dtype], FLIPPED * largest_lost)


def zero_on_one_side(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the size of values that are exactly 0 on only one side.

    It is 0 elsewhere, and where a side is NaN.
    """
    has_nan = np.isnan(actual) | np.isnan(expected)
    is_one_sided = ~has_nan & ((actual == 0) != (expected == 0))
    return np.where(is_one_sided, np.maximum(np.abs(actual), np.abs(expected)), 0.0)


def with_wrong_zeros(
    errors: np.ndarray, actual: np.ndarray, expected: np.ndarray, allowed: Mapping[str, float]
) -> np.ndarray:
    """Return errors beyond the maximum for values that are wrongly 0 on only one side."""
    if "zeros" not in allowed:
        return errors
    is_wrong = zero_on_one_side(actual, expected) > allowed["zeros"]
    return np.where(is_wrong, 2.0 * allowed["max"] + errors, errors)
