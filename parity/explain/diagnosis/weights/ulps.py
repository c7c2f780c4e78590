"""Distances of arrays in units in the last place, and detection of reduced precision."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.packages import is_installed

MOST_ULPS = 4.0
"""Largest distance of equal weights, in units in the last place. A conversion that computes, such
as one that multiplies a scale in and out again, rounds a few times.
"""


def coarser(one: np.dtype, other: np.dtype) -> np.dtype:
    """Return the one of two dtypes with fewer significant bits."""
    return max(one, other, key=lambda dtype: unit_of_rounding(dtype.name))


def ulps(one: np.ndarray, other: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """Return the distance of each element in units in the last place of the smaller value.

    The units are the units of a dtype; default: the coarser one of the arrays. The distance is
    float64.
    """
    info = ml_dtypes.finfo(dtype or coarser(one.dtype, other.dtype))
    one, other = one.astype(np.float64), other.astype(np.float64)
    smaller = np.maximum(np.minimum(np.abs(one), np.abs(other)), float(info.smallest_normal))
    _, exponents = np.frexp(smaller)
    return np.abs(one - other) / np.ldexp(float(info.eps), exponents - 1)


def agree(one: np.ndarray, other: np.ndarray, dtype: np.dtype | None = None) -> bool:
    """Return whether two arrays agree up to `MOST_ULPS` roundings."""
    if one.shape != other.shape:
        return False
    dtype = dtype or coarser(one.dtype, other.dtype)
    # The first row usually shows a disagreement, and large tensors take long.
    parts = (slice(1), slice(None)) if one.ndim else ((),)
    for part in parts:
        distances = ulps(one[part], other[part], dtype)
        if not (distances <= MOST_ULPS).all():
            return False
    return True


def is_copy(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether the array of the coarser dtype is the other, rounded to it."""
    fine, coarse = one, other
    if coarser(one.dtype, other.dtype) == one.dtype:
        fine, coarse = other, one
    with np.errstate(over="ignore"):
        return np.array_equal(fine.astype(coarse.dtype), coarse)


# ---- Fewer bits in the same dtype ----------------------------------------------------------------


Reduction = Callable[[np.ndarray], np.ndarray]
"""A conversion of float32 to fewer bits, which returns float32."""


def _unchanged(x: np.ndarray) -> np.ndarray:
    """Return float32 as it is: what float64 was rounded to before."""
    return x


def _through(name: str) -> Reduction:
    """Return the conversion that rounds to a dtype."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))  # float16 is NumPy's
    largest = float(ml_dtypes.finfo(dtype).max)

    def round_to_dtype(x: np.ndarray) -> np.ndarray:
        # Converters to float8 usually saturate: without the clip, large values would become
        # infinite, or NaN in e4m3.
        return np.clip(x, -largest, largest).astype(dtype).astype(np.float32)

    return round_to_dtype


def _cut_off(bits: int) -> Reduction:
    """Return the conversion that sets the lowest bits to 0."""
    # Shifted, and cut to 32 bits again.
    mask = np.uint32(0xFFFFFFFF << bits & 0xFFFFFFFF)

    def cut_off_bits(x: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(x).view(np.uint32) & mask).view(np.float32)

    return cut_off_bits


def _to_tf32(x: np.ndarray) -> np.ndarray:
    """Round to the 10 bits of a TF32 significand, ties to even: 13 of float32's 23 are lost."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    is_odd = bits >> np.uint32(13) & np.uint32(1)
    # Half a unit less one carries if the lost bits are more than half; an odd unit carries at half.
    rounded = bits + np.uint32(0xFFF) + is_odd
    return (rounded & np.uint32(0xFFFFE000)).view(np.float32)


FEWER_BITS: dict[str, Reduction] = {
    "rounded to float32": _unchanged,
    "rounded to TF32": _to_tf32,
    "cut off to TF32": _cut_off(13),
    "rounded to float16": _through("float16"),
    "rounded to bfloat16": _through("bfloat16"),
    "cut off to bfloat16": _cut_off(16),
    "rounded to float8 (e4m3)": _through("float8_e4m3fn"),
    "rounded to float8 (e5m2)": _through("float8_e5m2"),
}
"""Lossy conversions of float32, by description; values that are too large become the largest."""


def ways_to_fewer_bits(one: np.ndarray, other: np.ndarray) -> list[str]:
    """Return the descriptions of all conversions that turn `one` into `other` exactly."""
    wide, fewer = one.astype(np.float32), other.astype(np.float32)
    if not np.array_equal(fewer, other):
        return []
    ways = []
    for words, reduce in FEWER_BITS.items():
        # The first row usually shows that it is a different conversion.
        is_equal = np.array_equal(reduce(wide[:1]), fewer[:1])
        if is_equal and np.array_equal(reduce(wide), fewer):
            ways.append(words)
    return ways


QUANTISED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""GGUF types that the gguf package can both write and read, the most exact ones first."""

BLOCK = 32
"""Elements of a block of these types, along a row."""


def quantized_as(one: np.ndarray, other: np.ndarray) -> str | None:
    """Return the GGUF type whose quantization turns `one` into `other` exactly.

    None means that there is none, or that the gguf package is not installed.
    """
    if one.ndim != 2 or one.shape[1] % BLOCK or not is_installed("gguf"):
        return None
    with np.errstate(all="ignore"):  # blocks of zeros
        for name in QUANTISED:
            # The first row usually shows that it is a different type.
            if _is_quantized(one[:1], other[:1], name) and _is_quantized(one, other, name):
                return name
    return None


def _is_quantized(one: np.ndarray, other: np.ndarray, name: str) -> bool:
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    blocks = gguf.quants.quantize(np.ascontiguousarray(one, dtype=np.float32), kind)
    return np.array_equal(gguf.quants.dequantize(blocks, kind), other.astype(np.float32))
