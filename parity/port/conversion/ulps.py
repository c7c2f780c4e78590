"""Distances of arrays in units in the last place, and detection of reduced precision."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.packages import is_installed
from parity.measure.core.weights import dtype_named

MOST_ULPS = 4.0
"""Largest distance of equal weights, in units in the last place. A conversion that computes, such
as one that multiplies a scale in and out again, rounds a few times.
"""


def coarser(one: np.dtype, other: np.dtype) -> np.dtype:
    """Return the one of two dtypes with fewer significant bits."""
    return max(one, other, key=lambda dtype: unit_of_rounding(dtype.name))


def ulps(one: np.ndarray, other: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """Return the distance of each element in units in the last place of the smaller value, as
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
    parts = (
        (slice(1), slice(None)) if one.ndim else ((),)
    )  # the first row usually shows a disagreement
    return all(bool((ulps(one[part], other[part], dtype) <= MOST_ULPS).all()) for part in parts)


def is_copy(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether the array of the coarser dtype is the other, rounded to it."""
    fine, coarse = (other, one) if coarser(one.dtype, other.dtype) == one.dtype else (one, other)
    with np.errstate(over="ignore"):
        return np.array_equal(fine.astype(coarse.dtype), coarse)


# ---- Fewer bits in the same dtype ----------------------------------------------------------------


def _through(name: str) -> Callable[[np.ndarray], np.ndarray]:
    dtype = (
        dtype_named(name) if name in ("bfloat16", "float16") else np.dtype(getattr(ml_dtypes, name))
    )
    most = float(ml_dtypes.finfo(dtype).max)
    return lambda x: np.clip(x, -most, most).astype(dtype).astype(np.float32)


def _cut_off(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    mask = np.uint32(0xFFFFFFFF << bits & 0xFFFFFFFF)
    return lambda x: (np.ascontiguousarray(x).view(np.uint32) & mask).view(np.float32)


def _to_tf32(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x).view(np.uint32)
    to_even = np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    return ((bits + to_even) & np.uint32(0xFFFFE000)).view(np.float32)


FEWER_BITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rounded to float32": lambda x: x,  # for float64
    "rounded to TF32": _to_tf32,
    "cut off to TF32": _cut_off(13),
    "rounded to float16": _through("float16"),
    "rounded to bfloat16": _through("bfloat16"),
    "cut off to bfloat16": _cut_off(16),
    "rounded to float8 (e4m3)": _through("float8_e4m3fn"),
    "rounded to float8 (e5m2)": _through("float8_e5m2"),
}
"""LossyError conversions of float32, by description; values that are too large become the
largest.
"""


def ways_to_fewer_bits(one: np.ndarray, other: np.ndarray) -> list[str]:
    """Return the descriptions of all conversions that turn `one` into `other` exactly."""
    wide, kept = one.astype(np.float32), other.astype(np.float32)
    if not np.array_equal(kept, other):
        return []
    return [
        words
        for words, lessen in FEWER_BITS.items()
        if all(np.array_equal(lessen(wide[part]), kept[part]) for part in (slice(1), slice(None)))
    ]


QUANTISED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""GGUF types that the gguf package can both write and read, followed by their block size."""
BLOCK = 32


def quantized_as(one: np.ndarray, other: np.ndarray) -> str | None:
    """Return the GGUF type whose quantization turns `one` into `other` exactly; None if there is
    none, or no gguf.
    """
    if one.ndim != 2 or one.shape[1] % BLOCK or not is_installed("gguf"):
        return None
    import gguf

    def is_kind(name: str, rows: slice) -> bool:
        kind = gguf.GGMLQuantizationType[name]
        blocks = gguf.quants.quantize(np.ascontiguousarray(one[rows], dtype=np.float32), kind)
        return np.array_equal(gguf.quants.dequantize(blocks, kind), other[rows].astype(np.float32))

    with np.errstate(all="ignore"):  # blocks of zeros
        return next(
            (kind for kind in QUANTISED if is_kind(kind, slice(1)) and is_kind(kind, slice(None))),
            None,
        )
