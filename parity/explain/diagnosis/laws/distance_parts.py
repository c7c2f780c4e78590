"""Parts of ALiBi: the slopes of other heads, another factor, and other distances."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Changed
from parity.explain.diagnosis.bugs.sites import after
from parity.explain.diagnosis.laws.changes import Part
from parity.explain.diagnosis.laws.fits import Fitted, Number, Tried
from parity.explain.diagnosis.laws.pages import with_families
from parity.explain.diagnosis.laws.record import Law
from parity.explain.diagnosis.laws.words import known_as, number_words
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Layer

FACTORS = (0.25, 0.5, 2.0, 4.0)


def alibi_parts(problem: Problem) -> Iterator[Part]:
    """Yield other slopes, and functions of the distance."""
    alibi = problem.spec.alibi
    if alibi is None:
        return
    count = problem.spec.num_heads
    largest = 1 << (count.bit_length() - 1)
    step = 2.0 ** (alibi.max_bias / largest)
    n = np.arange(count)
    factors = {
        "begin one exponent too early": np.full(count, step),
        "begin one exponent too late": np.full(count, 1.0 / step),
    }
    if largest < count:
        # The slopes of the first heads are a series of their own, the others lie between them.
        factors["of the first heads begin one exponent too early"] = np.where(n < largest, step, 1)
        factors["of the first heads begin one exponent too late"] = np.where(
            n < largest, 1 / step, 1
        )
    for words, factor in factors.items():
        yield f"ALiBi's slopes {words}", _with_slopes(lambda x, factor=factor: x * factor), of.ALIBI
    for words, form in _orders(count, largest):
        yield f"ALiBi's slopes are {words}", _with_slopes(form), of.ALIBI
    distances: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "the square of the distance": np.square,
        "the root of the distance": np.sqrt,
        "the logarithm of 1 + the distance": np.log1p,
        "the distance less one": lambda distance: np.maximum(distance - 1, 0),
        "the distance plus one": lambda distance: distance + 1,
    }
    for words, form in distances.items():
        changed = Changed({"distances": after(form)})
        yield f"ALiBi's slopes multiply {words}", changed, of.ALIBI
    yield "ALiBi depends on the query's position alone", Changed({"distances": _of_query}), of.ALIBI


def _orders(count: int, largest: int) -> Iterator[tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    yield "in reverse order", lambda slopes: slopes[::-1]
    yield "in rising order", np.sort
    yield "in falling order", lambda slopes: np.sort(slopes)[::-1]
    yield "the same for all heads, the first", lambda slopes: np.full_like(slopes, slopes[0])
    if largest < count:
        yield "in the order last heads, first heads", lambda slopes: np.roll(slopes, -largest)
    yield "rolled by one head", lambda slopes: np.roll(slopes, 1)


def _with_slopes(form: Callable[[np.ndarray], np.ndarray]) -> Changed:
    return Changed({"slopes": after(form)})


def _of_query(_: Layer, __: object, places: np.ndarray, key_len: int) -> np.ndarray:
    rows = places[:, None, :, None]
    return np.broadcast_to(rows, (*rows.shape[:3], key_len))


def alibi_numbers(tried: Tried, problem: Problem) -> Iterator[Law]:
    """Yield a factor of all slopes."""
    if problem.spec.alibi is None:
        return
    number = Number("slopes", "slopes", 1.0, FACTORS, _times)
    fitted = Fitted(tried, number)
    for value in fitted.values() if fitted.has_effect() else ():
        if value is None:
            continue
        names = known_as(value, 1e-4, {"H": problem.spec.head_dim}, problem)
        words = f"ALiBi's slopes are multiplied by {number_words(value, names, 1.0)}"
        law = Law("slopes", words, {"value": value}, 1, change=_times(value))
        yield with_families(law, problem.spec, of.ALIBI)


def _times(factor: float) -> Changed:
    return _with_slopes(lambda slopes: factor * slopes)
