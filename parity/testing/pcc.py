"""The assertion of tt-metal's tests, which asks for a correlation, with the budget beside it."""

from __future__ import annotations

from typing import Any

from parity.core.compare import Comparison, first_difference
from parity.testing.assertion import compare_arrays, message

PCC = 0.9999
"""What tt-metal asks for where a test does not say."""


def assert_with_pcc(expected: Any, actual: Any, pcc: float = PCC, **options: Any) -> tuple[bool, str]:
    """Raise an AssertionError unless two arrays correlate, as tt-metal's function of this name does, and agree, too.

    Correlation sees neither a wrong scale nor a wrong offset, and hardly a mistake that is small or in few elements. So
    both are told, and either may fail: "PCC 0.99984 and wrong".

    Args:
        expected: what it should be; with a `problem` among the options None, for then the reference knows.
        actual: an array of NumPy, torch, JAX or TTNN, on a device or not, or a mapping of such arrays by stage.
        pcc: the least correlation of each.
        options: those of `assert_parity`: `same_precision`, `problem`, `dtype`, `name`, `stage`, `arithmetic`.

    Returns:
        True and what was found, which is also printed: PCC, and the share of the budget that the error takes.

    Raises:
        AssertionError: if they differ by more than the budget, or correlate less.
        TypeError, ValueError: as `assert_parity`.
    """
    __tracebackhide__ = True
    comparisons = compare_arrays(actual, expected, **options)
    told = "; ".join(map(_told, comparisons))
    less = [each for each in comparisons if each.pcc is not None and each.pcc < pcc]
    difference = first_difference(comparisons)
    if difference is not None and difference not in less:
        raise AssertionError(f"PCC {_correlation(difference)} and wrong: {told}\n{message(comparisons)}")
    if less:
        within = "\nthe error is within its budget" if difference is None else f"\n{message(comparisons)}"
        raise AssertionError(f"PCC {_correlation(less[0])} is less than {pcc}: {told}{within}")
    print(told)
    return True, told


def _told(comparison: Comparison) -> str:
    return f"{comparison.stage}: PCC {_correlation(comparison)}, {comparison.ratio:.2g} of its budget"


def _correlation(comparison: Comparison) -> str:
    """That of constants, or of what is not finite, there is none. Rounded down, for 1 is what is equal."""
    return "none" if comparison.pcc is None else f"{int(comparison.pcc * 1e6) / 1e6:.6f}"
