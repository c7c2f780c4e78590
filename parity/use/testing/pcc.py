"""The assertion of tt-metal's tests, a correlation, in addition to the error budget."""

from __future__ import annotations

from typing import Any

from parity.measure.core.compare import Comparison, first_difference
from parity.use.testing.assertion import compare_arrays, message

PCC = 0.9999
"""The default of tt-metal."""


def assert_with_pcc(
    expected: Any, actual: Any, pcc: float = PCC, **options: Any
) -> tuple[bool, str]:
    """Raise an AssertionError unless two arrays correlate, as in tt-metal's function of this name,
    and also agree.

    Correlation detects neither a wrong scale nor a wrong offset, and hardly any small bug or a bug
    in few elements. So both are reported, and either may fail: "PCC 0.99984 and wrong".

    Args:
        expected: the expected values; None with a `problem` among the options, which determines
            them.
        actual: an array of NumPy, torch, JAX or TTNN, on a device or not, or a mapping of such
            arrays by stage.
        pcc: the lowest accepted correlation of each array.
        options: options of `assert_parity`: `same_precision`, `problem`, `dtype`, `name`, `stage`,
            `arithmetic`.

    Returns:
        True and a summary, which is also printed: PCC, and the error relative to its budget.

    Raises:
        AssertionError: if they differ by more than the budget, or correlate less.
        TypeError, ValueError: as in `assert_parity`.

    Example:
        >>> expected = np.linspace(-1.0, 1.0, 64)
        >>> parity.assert_with_pcc(expected, 1.1 * expected)
        Traceback (most recent call last):
        ...
        AssertionError: PCC ... and wrong: output: PCC ..., ... of its budget
        ...
    """
    __tracebackhide__ = True
    comparisons = compare_arrays(actual, expected, **options)
    summary = "; ".join(map(_summary, comparisons))
    uncorrelated = [
        comparison
        for comparison in comparisons
        if comparison.pcc is not None and comparison.pcc < pcc
    ]
    difference = first_difference(comparisons)
    if difference is not None and difference not in uncorrelated:
        raise AssertionError(
            f"PCC {_correlation(difference)} and wrong: {summary}\n{message(comparisons)}"
        )
    if uncorrelated:
        budget = message(comparisons) or "the error is within its budget"
        raise AssertionError(
            f"PCC {_correlation(uncorrelated[0])} is less than {pcc}: {summary}\n{budget}"
        )
    print(summary)
    return True, summary


def _summary(comparison: Comparison) -> str:
    correlation = _correlation(comparison)
    return f"{comparison.stage}: PCC {correlation}, {comparison.ratio:.2g} of its budget"


def _correlation(comparison: Comparison) -> str:
    """Return the correlation; constants and non-finite values have none.

    It is rounded down, because 1 means equal.
    """
    if comparison.pcc is None:
        return "none"
    return f"{int(comparison.pcc * 1e6) / 1e6:.6f}"
