"""Fit the temperature of queries, a factor per position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mha_spec import Temperature
from parity.explain.fitting.numbers import round_numbers

CLOSE = 1e-5
"""Largest error of a factor, and smallest observable change of it."""

DIGITS = range(1, 7)
"""Significant digits of a scale that are tried, the roundest number first."""


def factors_of_tokens(before: np.ndarray, after: np.ndarray) -> np.ndarray | None:
    """Return the factor of heads (B, heads, T, H) at each token (T,); None if it is 1, or differs
    between sequences.

    RoPE preserves lengths, so the lengths of heads show the factor.
    """
    size_before = np.square(before.astype(np.float64)).sum(axis=(1, 3))
    size_after = np.square(after.astype(np.float64)).sum(axis=(1, 3))
    squares = np.ones_like(size_before)  # 1 for zeros
    np.divide(size_after, size_before, out=squares, where=size_before > 0.0)
    factors = np.sqrt(squares)
    is_constant = np.ptp(factors, axis=1).max() <= CLOSE
    differs_between_sequences = np.ptp(factors, axis=0).max() > CLOSE
    if is_constant or differs_between_sequences:
        return None
    return factors.mean(axis=0)


def fit_temperature(
    factors: np.ndarray, positions: np.ndarray, config: Mapping[str, Any]
) -> Temperature | None:
    """Return the temperature with these factors (T,) at these positions (T,); None if there is
    none, or several.

    Args:
        factors: factors of the tokens.
        positions: positions of the tokens.
        config: configuration of the model, for a length that the tokens exceed less than twofold.
    """
    steps = 1 + np.flatnonzero(np.abs(np.diff(factors)) > CLOSE)
    if not len(steps) or factors[0] > 1.0 + CLOSE:
        return None
    scale = (factors[steps[0]] - 1.0) / np.log(2.0)
    if scale <= 0.0:
        return None
    fitting = []
    for length, most_first in _lengths(steps, config).items():
        first_position = int(length - positions[steps[0]])
        if not 0 <= first_position <= most_first:
            continue
        for rounded in round_numbers(scale, DIGITS):
            temperature = Temperature(length, rounded, first_position)
            if _is_close(temperature, positions, factors):
                fitting.append(temperature)
                break
    if len(fitting) == 1:
        return fitting[0]
    return None


def _lengths(steps: np.ndarray, config: Mapping[str, Any]) -> dict[int, int]:
    """Return candidates for the length, each with the largest first position.

    Two steps of the factor show the length, and any first position. After a single step the length
    is one of the configuration, and positions start at 0 or 1.
    """
    if len(steps) > 1:
        length = int(steps[1] - steps[0])
        return {length: length - 1}
    return dict.fromkeys(_integers(config), 1)


def _is_close(temperature: Temperature, positions: np.ndarray, factors: np.ndarray) -> bool:
    passed = np.floor((positions + temperature.first_position) / temperature.length)
    expected = 1.0 + temperature.scale * np.log1p(passed)
    return bool(np.abs(expected - factors).max() <= CLOSE)


def _integers(values: Any) -> Iterator[int]:
    """Yield the positive integers in a configuration and its nested parts."""
    if type(values) is int and values > 0:
        yield values
    elif isinstance(values, Mapping):
        yield from _integers(list(values.values()))
    elif isinstance(values, Iterable) and not isinstance(values, str):
        for value in values:
            yield from _integers(value)
