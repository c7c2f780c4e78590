"""Fit the temperature of queries, a factor per position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mha_spec import Temperature

CLOSE = 1e-5
"""Largest error of a factor, and smallest observable change of it."""


def factors_of(before: np.ndarray, after: np.ndarray) -> np.ndarray | None:
    """Return the factor of heads (B, heads, T, H) at each token (T,); None if it is 1, or differs
    between sequences.

    RoPE preserves lengths, so the lengths of heads show the factor.
    """
    sizes = [np.square(x.astype(np.float64)).sum(axis=(1, 3)) for x in (before, after)]
    factors = np.sqrt(
        np.divide(sizes[1], sizes[0], out=np.ones_like(sizes[0]), where=sizes[0] > 0.0)
    )  # 1 for zeros
    is_one = np.ptp(factors, axis=1).max() <= CLOSE
    return None if is_one or np.ptp(factors, axis=0).max() > CLOSE else factors.mean(axis=0)


def fit_temperature(
    factors: np.ndarray, positions: np.ndarray, config: Mapping[str, Any]
) -> Temperature | None:
    """Return the temperature with these factors (T,) at these positions (T,); None if there is
    none.

    Args:
        factors: factors of the tokens.
        positions: positions of the tokens.
        config: configuration of the model, for a length that the tokens exceed less than twofold.
    """
    steps = 1 + np.flatnonzero(np.abs(np.diff(factors)) > CLOSE)
    if not len(steps) or factors[0] > 1.0 + CLOSE:
        return None
    scale = (factors[steps[0]] - 1.0) / np.log(2.0)
    is_repeated = len(steps) > 1
    lengths = {int(steps[1] - steps[0])} if is_repeated else set(_integers(config))
    fitting = []
    for length in lengths:
        first = int(length - positions[steps[0]])
        if scale <= 0.0 or not 0 <= first < (length if is_repeated else 2):
            continue
        known = (Temperature(length, float(f"{scale:.{digits}g}"), first) for digits in range(1, 7))
        fitting += [each for each in known if _is_close(each, positions, factors)][:1]
    return fitting[0] if len(fitting) == 1 else None


def _is_close(temperature: Temperature, positions: np.ndarray, factors: np.ndarray) -> bool:
    passed = np.floor((positions + temperature.first_position) / temperature.length)
    return bool(np.abs(1.0 + temperature.scale * np.log1p(passed) - factors).max() <= CLOSE)


def _integers(values: Any) -> Iterator[int]:
    """Yield the positive integers in a configuration and its nested parts."""
    if type(values) is int and values > 0:
        yield values
    elif isinstance(values, Mapping):
        yield from _integers(list(values.values()))
    elif isinstance(values, Iterable) and not isinstance(values, str):
        for each in values:
            yield from _integers(each)
