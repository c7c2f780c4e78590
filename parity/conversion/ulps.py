"""The distance of two arrays in units in the last place, and arrays that are others in fewer bits."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from parity.core.compare import unit_of_rounding
from parity.core.packages import is_installed
from parity.core.weights import dtype_named

MOST_ULPS = 4.0
"""The distance that equal weights may have, in units in the last place: a conversion that computes, such as one that
multiplies a scale in and out again, rounds a few times."""


def coarser(one: np.dtype, other: np.dtype) -> np.dtype:
    """Return the one of two dtypes with fewer significant bits."""
    return max(one, other, key=lambda dtype: unit_of_rounding(dtype.name))


def ulps(one: np.ndarray, other: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """Return the distance of each element in units in the last place, at the smaller of both values; float64."""
    info = ml_dtypes.finfo(dtype or coarser(one.dtype, other.dtype))
    one, other = one.astype(np.float64), other.astype(np.float64)
    smaller = np.maximum(np.minimum(np.abs(one), np.abs(other)), float(info.smallest_normal))
    _, exponents = np.frexp(smaller)
    return np.abs(one - other) / np.ldexp(float(info.eps), exponents - 1)


def agree(one: np.ndarray, other: np.ndarray, dtype: np.dtype | None = None) -> bool:
    """Return whether two arrays are the same but for a few roundings: see `MOST_ULPS`."""
    if one.shape != other.shape:
        return False
    dtype = dtype or coarser(one.dtype, other.dtype)
    parts = (slice(1), slice(None)) if one.ndim else ((),)  # most that do not agree show it in their first row
    return all(bool((ulps(one[part], other[part], dtype) <= MOST_ULPS).all()) for part in parts)


def is_copy(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether the array of the coarser dtype is the other one, rounded to it."""
    fine, coarse = (other, one) if coarser(one.dtype, other.dtype) == one.dtype else (one, other)
    with np.errstate(over="ignore"):
        return np.array_equal(fine.astype(coarse.dtype), coarse)


# ---- Fewer bits in the same dtype ------------------------------------------------------------------------------------


def _through(name: str) -> Callable[[np.ndarray], np.ndarray]:
    dtype = dtype_named(name) if name in ("bfloat16", "float16") else np.dtype(getattr(ml_dtypes, name))
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
    "rounded to float32": lambda x: x,  # of float64
    "rounded to TF32": _to_tf32,
    "cut off to TF32": _cut_off(13),
    "rounded to float16": _through("float16"),
    "rounded to bfloat16": _through("bfloat16"),
    "cut off to bfloat16": _cut_off(16),
    "rounded to float8 (e4m3)": _through("float8_e4m3fn"),
    "rounded to float8 (e5m2)": _through("float8_e5m2"),
}
"""Ways to lose bits, from float32 to float32, by words for them; values too large become the largest."""


def ways_to_fewer_bits(one: np.ndarray, other: np.ndarray) -> list[str]:
    """Return all words by which `other` is `one` in fewer bits, exactly."""
    wide, kept = one.astype(np.float32), other.astype(np.float32)
    if not np.array_equal(kept, other):
        return []
    return [
        words
        for words, lessen in FEWER_BITS.items()
        if all(np.array_equal(lessen(wide[part]), kept[part]) for part in (slice(1), slice(None)))
    ]


QUANTISED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""The types of GGUF that the gguf package makes as well as reads; their blocks are this long:"""
BLOCK = 32


def quantised_as(one: np.ndarray, other: np.ndarray) -> str | None:
    """The type of GGUF that `other` is `one` quantised as, exactly; None if it is none, or the package is not there."""
    if one.ndim != 2 or one.shape[1] % BLOCK or not is_installed("gguf"):
        return None
    import gguf

    def is_kind(name: str, rows: slice) -> bool:
        kind = gguf.GGMLQuantizationType[name]
        blocks = gguf.quants.quantize(np.ascontiguousarray(one[rows], dtype=np.float32), kind)
        return np.array_equal(gguf.quants.dequantize(blocks, kind), other[rows].astype(np.float32))

    with np.errstate(all="ignore"):  # blocks of zeros
        return next((kind for kind in QUANTISED if is_kind(kind, slice(1)) and is_kind(kind, slice(None))), None)
