"""Rounding of a quantized cache: numbers of a narrow dtype, and their scales.

float64 rounds to the nearest number. A correct implementation in another precision may be a unit of
rounding off before it rounds, and then returns the next number. The same-precision reference
returns the middle of two numbers if either is possible. So its error, from which budgets follow, is
half a step exactly there.
"""

from __future__ import annotations

import math

import numpy as np

from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.quantization import LARGEST, SCALE_AXES, CacheQuantization
from parity.measure.core.weights import dtype_named

MANTISSA_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2}
SMALLEST_EXPONENT = {"float8_e4m3fn": -6, "float8_e5m2": -14}
"""Explicit mantissa bits, and exponent of the smallest normal number."""

ROUNDINGS = 2.0
"""Rounding errors of a projected feature in float32, as a multiple of the square root of the number
of its terms: a random walk of half units, four standard deviations.
"""


def to_nearest(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return wide numbers rounded to a stored dtype, half to even; beyond its largest, that one.

    ml_dtypes rounds float64 to float32 first, so it is wrong next to the middle of two numbers.
    """
    clipped = np.clip(x, -LARGEST[dtype], LARGEST[dtype])
    if dtype not in MANTISSA_BITS:
        return np.rint(clipped)
    _, exponent = np.frexp(clipped)
    # frexp's mantissa is below 1, so its exponent is one more than usual.
    exponent = np.maximum(exponent - 1, SMALLEST_EXPONENT[dtype])
    step = np.ldexp(np.ones_like(clipped), exponent - MANTISSA_BITS[dtype])
    return np.rint(clipped / step) * step


def to_middle(x: np.ndarray, dtype: str, uncertainty: float) -> np.ndarray:
    """Return wide numbers rounded to a stored dtype, those that may be rounded either way to the
    middle.

    Args:
        x: the numbers.
        dtype: of the stored numbers.
        uncertainty: error of a number before it is rounded, relative to it or to the root mean
            square of all, whichever is larger.
    """
    if not x.size:
        return x
    size = np.maximum(np.abs(x), np.sqrt(np.mean(np.square(x))))
    error = x.dtype.type(uncertainty) * size
    below, above = to_nearest(x - error, dtype), to_nearest(x + error, dtype)
    return (below + above) / 2


def uncertainty_before_rounding(num_terms: int) -> float:
    """Return the relative error of a correct key or value in float32, before it is rounded.

    In 16 bits it is the same: sums, and divisions by scales, are in float32. There the reference's
    own keys and values are rounded, so its error already contains what that changes.
    """
    return ROUNDINGS * math.sqrt(num_terms) * unit_of_rounding("float32")


def computed_scales(x: np.ndarray, largest: float, axes: str) -> np.ndarray:
    """Return the scales of keys or values (B, K, S, H), with 1 on axes that share a scale.

    Args:
        x: keys or values; padding is 0.
        largest: largest stored number.
        axes: letters of the axes along which scales differ.
    """
    shared = tuple(axis for axis, letter in enumerate("BKSH") if letter not in axes)
    size = np.abs(x).max(axis=shared, keepdims=True, initial=0.0)
    return np.where(size > 0.0, size / x.dtype.type(largest), x.dtype.type(1.0))


def calibrated_scales(
    quantization: CacheQuantization, name: str, num_heads: int, wide: np.dtype
) -> np.ndarray | None:
    """Return the calibrated scales of `keys` or `values`, with 1 on axes that share a scale."""
    scales = quantization.scales_of(name)
    if scales is None:
        return None
    array = np.array(scales, wide)
    if quantization.scale_per == "tensor":
        return array.reshape(1, 1, 1, 1)
    return array.reshape(1, num_heads, 1, -1)


def in_scale_dtype(scales: np.ndarray, quantization: CacheQuantization) -> np.ndarray:
    """Return scales rounded to their dtype; float32 is left to the arithmetic."""
    if quantization.scale_dtype == "float32":
        return scales
    return scales.astype(dtype_named(quantization.scale_dtype)).astype(scales.dtype)


def scale_axes(quantization: CacheQuantization) -> str:
    """Return the letters of the axes along which scales differ."""
    return SCALE_AXES[quantization.scale_per]
