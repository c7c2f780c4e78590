"""The zeros of attention weights: a hidden key weighs exactly 0 in every dtype, and a key that is seen does not.

One wrong cell of a mask changes a weight by about 1 / S, which is less than what bfloat16 rounds off a weight of 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

LEAST_WEIGHT = {"float32": 2.0**-106, "bfloat16": 2.0**-106, "float16": 2.0**-12, "float64": 2.0**-106}
"""The weight of a key, by dtype, that cannot become 0 by rounding: well above the smallest normal number, which for
float64 is that of its float32 noise. What an exponential loses at the end of its range lies below it."""

FLIPPED = 8.0
"""How many times smaller than in float64 the same-precision reference may make a weight that is clearly not 0."""

WRONG_ZEROS = "a key that a query should see weighs exactly 0, or a hidden one does not"


def largest_zero(expected: np.ndarray, same_precision: np.ndarray, dtype: str) -> float:
    """Return the largest weight that may be 0 on one side alone, because the noise makes weights of its size 0."""
    is_lost = ~np.isnan(expected) & (FLIPPED * np.abs(same_precision) < expected)
    return max(LEAST_WEIGHT[dtype], FLIPPED * float(expected.max(initial=0.0, where=is_lost)))


def zero_on_one_side(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the size of what is exactly 0 on one side alone; 0 elsewhere, and where a side is NaN."""
    is_known = ~(np.isnan(actual) | np.isnan(expected))
    return np.where(is_known & ((actual == 0) != (expected == 0)), np.maximum(np.abs(actual), np.abs(expected)), 0.0)


def with_wrong_zeros(
    errors: np.ndarray, actual: np.ndarray, expected: np.ndarray, allowed: Mapping[str, float]
) -> np.ndarray:
    """Return errors that are beyond the maximum where one side alone is 0, by more than is allowed."""
    if "zeros" not in allowed:
        return errors
    return np.where(zero_on_one_side(actual, expected) > allowed["zeros"], 2.0 * allowed["max"] + errors, errors)
