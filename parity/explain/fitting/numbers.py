"""Round numbers near a fitted one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

FLOAT32_DIGITS = range(1, 8)
"""Significant digits of a number in float32, the roundest number first."""


def round_numbers(x: float, digits: Iterable[int] = FLOAT32_DIGITS) -> Iterator[float]:
    """Yield a number rounded to each count of significant digits."""
    for count in digits:
        yield float(f"{x:.{count}g}")
