"""Rounding of a quantized cache: values of a narrow dtype, and their scales.

float64 rounds to the nearest number. A correct implementation in a different precision may be a
unit of rounding off before it rounds, and then returns the next number. The same-precision
reference returns the middle of two values if either is possible. So its error, from which budgets
follow, is half a step exactly there.
"""

from __future__ import annotations

import math

import numpy as np

from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.quantization import LARGEST, CacheQuantization
from parity.measure.core.weights import dtype_named

MANTISSA_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2}
SMALLEST_EXPONENT = {"float8_e4m3fn": -6, "float8_e5m2": -14}
"""Explicit mantissa bits, and exponent of the smallest normal number."""

ROUNDINGS = 2.0
"""Rounding errors of a projected feature in float32, as a multiple of the square root of the number
of its terms: a random walk of half units, four standard deviations.
"""


def to_nearest(x: np.ndarray, dtype: str, limits: tuple[float, float] | None = None) -> np.ndarray:
    """Return wide values rounded to a stored dtype, half to even; beyond its limits, those.

    ml_dtypes rounds float64 to float32 first, so it is wrong next to the middle of two values.

    Args:
        x: the values.
        dtype: dtype of the stored values.
        limits: smallest and largest stored number; by default the limits of the dtype.
    """
    if limits is None:
        limits = -LARGEST[dtype], LARGEST[dtype]
    clipped = np.clip(x, *limits)
    if dtype not in MANTISSA_BITS:
        return np.rint(clipped)
    _, exponent = np.frexp(clipped)
    # frexp's mantissa is below 1, so its exponent is one more than usual.
    exponent = np.maximum(exponent - 1, SMALLEST_EXPONENT[dtype])
    step = np.ldexp(np.ones_like(clipped), exponent - MANTISSA_BITS[dtype])
    return np.rint(clipped / step) * step


def to_middle(
    x: np.ndarray, dtype: str, uncertainty: float, limits: tuple[float, float] | None = None
) -> np.ndarray:
    """Return wide values rounded to a stored dtype, those that may be rounded either way to the
    middle.

    Args:
        x: the values.
        dtype: dtype of the stored values.
        uncertainty: error of a number before it is rounded, relative to it or to the root mean
            square of all, whichever is larger.
        limits: smallest and largest stored number, as in `to_nearest`.
    """
    if not x.size:
        return x
    size = np.maximum(np.abs(x), np.sqrt(np.mean(np.square(x))))
    error = x.dtype.type(uncertainty) * size
    below, above = to_nearest(x - error, dtype, limits), to_nearest(x + error, dtype, limits)
    return (below + above) / 2


def uncertainty_before_rounding(num_terms: int) -> float:
    """Return the relative error of a correct key or value in float32, before it is rounded.

    In 16 bits it is the same: sums, and divisions by scales, are in float32. There the reference's
    own keys and values are rounded, so its error already contains what that changes.
    """
    return ROUNDINGS * math.sqrt(num_terms) * unit_of_rounding("float32")


def range_of(
    x: np.ndarray, axes: str, quantization: CacheQuantization
) -> tuple[np.ndarray, np.ndarray]:
    """Return the range of each group of keys or values (B, K, S, H) that stored values cover.

    Both ends have 1 on axes that share a scale.

    Args:
        x: keys or values, without padding of their own.
        axes: letters of the axes along which scales differ.
        quantization: quantization of the cache.
    """
    shared = tuple(axis for axis, letter in enumerate("BKSH") if letter not in axes)
    if not quantization.has_zero_point:
        size = np.abs(x).max(axis=shared, keepdims=True, initial=0.0)
        return -size, size
    if not x.size:
        shape = [1 if axis in shared else length for axis, length in enumerate(x.shape)]
        return np.zeros(shape, x.dtype), np.zeros(shape, x.dtype)
    lowest, highest = x.min(axis=shared, keepdims=True), x.max(axis=shared, keepdims=True)
    if quantization.zero_point == "integer":
        zero = x.dtype.type(0.0)
        return np.minimum(lowest, zero), np.maximum(highest, zero)
    return lowest, highest


def scales_of_range(
    lowest: np.ndarray, highest: np.ndarray, quantization: CacheQuantization
) -> np.ndarray:
    """Return the scales with which the stored values cover ranges; 1 for empty ranges."""
    smallest, largest = quantization.limits
    size = highest - lowest
    # Scales of the largest absolute value are half of a difference, which is exact.
    scales = size / size.dtype.type(largest - smallest)
    return np.where(size > 0.0, scales, size.dtype.type(1.0))


def calibrated_scales(
    quantization: CacheQuantization, name: str, num_heads: int, wide: np.dtype
) -> np.ndarray | None:
    """Return the calibrated scales of `keys` or `values`, with 1 on axes that share a scale."""
    scales = quantization.scales_of(name)
    if scales is None:
        return None
    array = np.array(scales, wide)
    if quantization.scale_per_of(name) == "tensor":
        return array.reshape(1, 1, 1, 1)
    return array.reshape(1, num_heads, 1, -1)


def in_scale_dtype(scales: np.ndarray, quantization: CacheQuantization) -> np.ndarray:
    """Return scales or minima rounded to their dtype; float32 is left to the arithmetic."""
    if quantization.scale_dtype == "float32":
        return scales
    return scales.astype(dtype_named(quantization.scale_dtype)).astype(scales.dtype)
