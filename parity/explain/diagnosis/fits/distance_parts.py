"""Parts of ALiBi: the slopes of other heads, another factor, and other distances."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.sites import after
from parity.explain.diagnosis.fits.changes import part
from parity.explain.diagnosis.fits.numbers import Fitted, Number, StageTrial
from parity.explain.diagnosis.fits.words import known_as, number_words
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Layer

Form = Callable[[np.ndarray], np.ndarray]

FACTORS = (0.25, 0.5, 2.0, 4.0)


def reversed_order(slopes: np.ndarray) -> np.ndarray:
    return slopes[::-1]


def falling(slopes: np.ndarray) -> np.ndarray:
    return np.sort(slopes)[::-1]


def first_for_all(slopes: np.ndarray) -> np.ndarray:
    return np.full_like(slopes, slopes[0])


def rolled(slopes: np.ndarray) -> np.ndarray:
    return np.roll(slopes, 1)


def last_heads_first(slopes: np.ndarray) -> np.ndarray:
    """Put the slopes between a series of powers of two before it."""
    return np.roll(slopes, -largest_power(len(slopes)))


def largest_power(count: int) -> int:
    """Return the largest power of two that is not greater than a number."""
    return 1 << (count.bit_length() - 1)


def one_less(distance: np.ndarray) -> np.ndarray:
    return np.maximum(distance - 1, 0)


def one_more(distance: np.ndarray) -> np.ndarray:
    return distance + 1


ORDERS: dict[str, Form] = {
    "in reverse order": reversed_order,
    "in rising order": np.sort,
    "in falling order": falling,
    "the same for all heads, the first": first_for_all,
    "in the order last heads, first heads": last_heads_first,
    "rolled by one head": rolled,
}

DISTANCES: dict[str, Form] = {
    "the square of the distance": np.square,
    "the root of the distance": np.sqrt,
    "the logarithm of 1 + the distance": np.log1p,
    "the distance less one": one_less,
    "the distance plus one": one_more,
}


def alibi_parts(problem: Problem) -> Iterator[Edit]:
    """Yield other slopes, and functions of the distance."""
    alibi = problem.spec.alibi
    if alibi is None:
        return
    for words, factors in _factors(problem.spec.num_heads, alibi.max_bias).items():
        change = _multiplied_by(factors)
        yield part(problem, "alibi", f"ALiBi's slopes {words}", change, of.ALIBI)
    for words, form in ORDERS.items():
        change = Edit(overrides={"slopes": after(form)})
        yield part(problem, "alibi", f"ALiBi's slopes are {words}", change, of.ALIBI)
    for words, form in DISTANCES.items():
        change = Edit(overrides={"distances": after(form)})
        yield part(problem, "alibi", f"ALiBi's slopes multiply {words}", change, of.ALIBI)
    words = "ALiBi depends on the query's position alone"
    change = Edit(overrides={"distances": _of_query})
    yield part(problem, "alibi", words, change, of.ALIBI)


def _factors(count: int, max_bias: float) -> dict[str, np.ndarray]:
    """Return factors of slopes whose exponents begin at another number."""
    largest = largest_power(count)
    step = 2.0 ** (max_bias / largest)
    # The slopes of the first heads are a series of their own, the others lie between them.
    is_first = np.arange(count) < largest
    factors = {
        "begin one exponent too early": np.full(count, step),
        "begin one exponent too late": np.full(count, 1.0 / step),
    }
    if largest < count:
        factors["of the first heads begin one exponent too early"] = np.where(is_first, step, 1.0)
        factors["of the first heads begin one exponent too late"] = np.where(
            is_first, 1.0 / step, 1.0
        )
    return factors


def _multiplied_by(factors: np.ndarray | float) -> Edit:
    def slopes(_: Layer, original: Override) -> np.ndarray:
        return original() * factors

    return Edit(overrides={"slopes": slopes})


def _of_query(_: Layer, __: object, places: np.ndarray, key_len: int) -> np.ndarray:
    rows = places[:, None, :, None]
    return np.broadcast_to(rows, (*rows.shape[:3], key_len))


def alibi_numbers(trial: StageTrial, problem: Problem) -> Iterator[Edit]:
    """Yield a factor of all slopes."""
    if problem.spec.alibi is None:
        return
    number = Number("slopes", "slopes", 1.0, FACTORS, _multiplied_by)
    for value in Fitted(trial, number).numbers():
        names = known_as(value, 1e-4, {"H": problem.spec.head_dim}, problem)
        words = f"ALiBi's slopes are multiplied by {number_words(value, names, 1.0)}"
        yield trial.difference.pattern(
            "slopes",
            words,
            {"value": value},
            1,
            families=(of.ALIBI,),
            injected=_multiplied_by(value),
        )
