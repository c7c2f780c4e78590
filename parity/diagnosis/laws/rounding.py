"""Values that are rounded to fewer bits than their dtype has, and how large the error is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.diagnosis.laws.record import Law, Seen
from parity.diagnosis.laws.words import said

FORMATS = {"bfloat16": 7, "float16 or TF32": 10}
"""How many explicit bits the mantissas of narrow formats have, the coarsest first."""

UNITS = 4.0
"""How many units of a narrow format, of the largest value, a stage that is computed in it is off by at most."""

LEAST = 8
"""So many values that are not 0 tell something about bits."""


def rounded(seen: Seen) -> Iterator[Law]:
    """Every value has the bits of a narrower format, and is the expected one rounded to it."""
    name = _format_of(seen)
    if name is None:
        return
    for share, how in ((0.5, "rounded"), (1.0, "cut off")):
        if _is_within(seen, FORMATS[name], share):
            yield Law("rounded", f"the values are {how} to {name}", {"format": name, "bits": FORMATS[name]})
            return


def narrow(seen: Seen) -> Iterator[Law]:
    """Every value has the bits of a narrower format, and is off by as little as computing in it costs."""
    name = _format_of(seen)
    if name is None:
        return
    unit = 2.0 ** (np.floor(np.log2(seen.scale)) - FORMATS[name])
    units = float(seen.errors.max()) / unit
    if units <= UNITS:
        words = f"the values have the bits of {name}, and their error is within its rounding noise"
        yield Law("narrow", f"{words}: {_two_digits(units)} units of the largest", {"format": name, "units": units})


def _is_within(seen: Seen, bits: int, share: float) -> bool:
    """Whether every error is at most a share of the last of so many bits of its value, beside what is allowed."""
    size = np.abs(seen.expected)
    unit = np.exp2(np.floor(np.log2(np.maximum(size, 2.0**-126))) - bits)
    least = 2.0**-24 if bits == 10 else 0.0  # the smallest number of float16
    return bool((seen.errors <= np.maximum(share * unit, least) * 1.001 + seen.allowed["max"])[seen.part].all())


def rounding_signs(seen: Seen) -> Iterator[str]:
    """Bits that are all 0, and how large the error is."""
    name = _format_of(seen)
    if name is not None:
        yield f"all values there are exactly representable in {name}"
    lost = next(
        (each for each, bits in reversed(FORMATS.items()) if bits < seen.kept and _is_within(seen, bits, 1.0)), ""
    )
    if lost and seen.count >= LEAST:
        yield f"every error is within one unit of {lost} of its value"
    values, errors = seen.expected[seen.part], seen.errors[seen.part]
    finite = np.isfinite(errors) & np.isfinite(values)
    if not finite.any():
        return
    largest, size = float(errors[finite].max()), float(np.sqrt(np.mean(values[finite] ** 2)))
    rms = float(np.sqrt(np.mean(errors[finite] ** 2)))
    share = f", {_two_digits(100.0 * rms / size)}% of the size of the values (rms)" if size else ""
    if largest:
        yield f"the error is at most {_two_digits(largest)}{share}"


def _format_of(seen: Seen) -> str | None:
    """The narrowest format that holds the actual values, where theirs is wider and the expected ones do not fit."""
    if seen.stage.is_exact:
        return None
    for name, bits in FORMATS.items():
        if bits >= seen.kept:
            return None
        values = seen.actual[seen.usable]
        if bits == 10 and np.abs(values).max(initial=0.0) > 65504.0:
            continue
        telling = np.count_nonzero(_lost(values, 2))
        if telling >= LEAST and not _lost(values, bits).any() and _lost(seen.expected[seen.usable], bits).any():
            return name
    return None


def _two_digits(x: float) -> str:
    return said(float(f"{x:.2g}"))


def _lost(values: np.ndarray, bits: int) -> np.ndarray:
    """Which values have more bits in their mantissa than so many explicit ones, in float32."""
    with np.errstate(over="ignore"):
        pattern = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)
    return (pattern & np.uint32((1 << (23 - bits)) - 1)) != 0
