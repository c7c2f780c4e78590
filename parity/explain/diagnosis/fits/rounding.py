"""Patterns of rounding: values with fewer bits than their dtype, and the size of the error."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.words import readable

FLOAT16_BITS = 10

SMALLEST_FLOAT16 = 2.0**-24

LARGEST_FLOAT16 = 65504.0

FORMATS = {"bfloat16": 7, "float16 or TF32": FLOAT16_BITS}
"""Explicit mantissa bits of narrow formats, the coarsest first."""

LEAST = 8
"""The least number of nonzero values that is enough to detect fewer bits."""


def rounded(difference: Difference) -> Iterator[Edit]:
    """Yield rounding: every value is the expected one, rounded to a narrower format."""
    name = _format_of(difference)
    if name is None:
        return
    for share, how in ((0.5, "rounded"), (1.0, "cut off")):
        if _is_within(difference, FORMATS[name], share):
            yield difference.pattern(
                "rounded",
                f"the values are {how} to {name}",
                {"format": name, "bits": FORMATS[name]},
                families=(of.PRECISION,),
            )
            return


def _is_within(difference: Difference, bits: int, share: float) -> bool:
    """Return True if every error is at most a share of the last bit of its value, in addition to
    the tolerance.
    """
    size = np.abs(difference.expected)
    unit = np.exp2(np.floor(np.log2(np.maximum(size, 2.0**-126))) - bits)
    rounding = share * unit
    if bits == FLOAT16_BITS:
        rounding = np.maximum(rounding, SMALLEST_FLOAT16)
    is_within = difference.errors <= rounding * 1.001 + difference.allowed["max"]
    return bool(is_within[difference.part].all())


def rounding_signs(difference: Difference) -> Iterator[str]:
    """Yield bits that are all 0, and the size of the error."""
    name = _format_of(difference)
    if name is not None:
        yield f"all values there are exactly representable in {name}"
    finest = _finest_format_within(difference)
    if finest is not None and difference.count >= LEAST:
        yield f"every error is within one unit of {finest} of its value"
    values, errors = difference.expected[difference.part], difference.errors[difference.part]
    finite = np.isfinite(errors) & np.isfinite(values)
    if not finite.any():
        return
    largest = float(errors[finite].max())
    if not largest:
        return
    words = f"the error is at most {_two_digits(largest)}"
    size = float(np.sqrt(np.mean(values[finite] ** 2)))
    if size:
        rms = float(np.sqrt(np.mean(errors[finite] ** 2)))
        words += f", {_two_digits(100.0 * rms / size)}% of the size of the values (rms)"
    yield words


def _finest_format_within(difference: Difference) -> str | None:
    """Return the finest narrow format whose last bit bounds every error, if it is narrower than the
    dtype.
    """
    for name, bits in reversed(FORMATS.items()):
        if bits < difference.mantissa_bits and _is_within(difference, bits, 1.0):
            return name
    return None


def _format_of(difference: Difference) -> str | None:
    """Return the narrowest format that holds the actual values, if their dtype is wider and the
    expected ones do not fit.
    """
    if difference.stage.is_exact:
        return None
    for name, bits in FORMATS.items():
        if bits >= difference.mantissa_bits:
            return None
        values = difference.actual[difference.usable]
        if bits == FLOAT16_BITS and np.abs(values).max(initial=0.0) > LARGEST_FLOAT16:
            continue
        # Round numbers fit every format, and say nothing about it.
        if np.count_nonzero(_has_more_bits(values, 2)) < LEAST:
            continue
        fits = not _has_more_bits(values, bits).any()
        if fits and _has_more_bits(difference.expected[difference.usable], bits).any():
            return name
    return None


def _two_digits(x: float) -> str:
    return readable(float(f"{x:.2g}"))


def _has_more_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Return whether values in float32 have more mantissa bits than a number of explicit ones."""
    with np.errstate(over="ignore"):
        stored_bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)
    return (stored_bits & np.uint32((1 << (23 - bits)) - 1)) != 0
