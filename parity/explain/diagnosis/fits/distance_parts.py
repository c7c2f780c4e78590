"""Parts of ALiBi: slopes of other formulas, of other heads, rounded or fitted; other distances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mha_spec import Alibi, AttentionSpec
from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.sites import (
    SIXTEEN_BITS,
    Overrides,
    after,
    always,
    in_sixteen_bits,
)
from parity.explain.diagnosis.fits.changes import MOST_HEADS, part
from parity.explain.diagnosis.fits.numbers import LARGEST, Fitted, Number, StageTrial
from parity.explain.diagnosis.fits.slopes import FittedSlopes
from parity.explain.diagnosis.fits.words import known_as, listed, number_words
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


def half_of_heads_later(slopes: np.ndarray) -> np.ndarray:
    return np.roll(slopes, len(slopes) // 2)


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
    "the slopes of the other half of the heads": half_of_heads_later,
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
    for words, slopes in _other_slopes(problem.spec, alibi).items():
        change = with_slopes(problem.spec, alibi, slopes)
        yield part(problem, "alibi", f"ALiBi's slopes are {words}", change, of.ALIBI)
    for dtype in SIXTEEN_BITS:
        yield from _rounded(problem, dtype)
    for words, form in DISTANCES.items():
        change = Edit(overrides={"distances": after(form)})
        yield part(problem, "alibi", f"ALiBi's slopes multiply {words}", change, of.ALIBI)
    words = "ALiBi subtracts slope * position of the key, whatever the query"
    change = Edit(overrides={"distances": _of_key})
    yield part(problem, "alibi", words, change, of.ALIBI)
    words = "ALiBi depends on the query's position alone"
    change = Edit(overrides={"distances": _of_query})
    yield part(problem, "alibi", words, change, of.ALIBI)


def _factors(count: int, max_bias: float) -> dict[str, np.ndarray]:
    """Return factors of slopes whose exponents begin at the wrong number."""
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


def _other_slopes(spec: AttentionSpec, alibi: Alibi) -> dict[str, np.ndarray]:
    """Return the slopes of other formulas, and of other numbers of heads."""
    count, most = spec.num_heads, alibi.max_bias
    n = np.arange(1, count + 1)
    right = slopes_of_heads(count, most)
    slopes = {
        "1 / n": 1.0 / n,
        "2 ** -n": 2.0**-n,
        "n / N": n / count,
        "1 - n / N": 1.0 - n / count,
        "1 - (n - 1) / N": 1.0 - (n - 1.0) / count,
        f"2 ** (-{most:g} / n)": 2.0 ** (-most / n),
        f"e ** (-{most:g} n / N)": np.exp(-most * n / count),
        "the same powers of e instead of 2": np.exp(np.log2(right)),
    }
    for times in range(2, count + 1):
        if count % times:
            continue
        # A rank that has a part of the heads may compute the slopes of a smaller layer.
        share = count // times
        of_share = slopes_of_heads(share, most)
        slopes[f"the slopes of a layer of {share} heads, {times} times"] = np.tile(of_share, times)
        slopes[f"the slopes of the first {share} heads, {times} times"] = np.tile(
            right[:share], times
        )
        slopes[f"the slopes of a layer of {share} heads, each for {times} heads in a row"] = (
            np.repeat(of_share, times)
        )
        slopes[f"in the order ({share}, {times}) of the heads, transposed"] = right.reshape(
            share, times
        ).T.ravel()
    largest = largest_power(count)
    if largest < count:
        slopes |= _otherwise_extended(count, largest, most)
    return slopes


def _otherwise_extended(count: int, largest: int, most: float) -> dict[str, np.ndarray]:
    """Return slopes of which those after the largest power of two follow a different rule."""
    first = slopes_of_heads(largest, most)
    between = slopes_of_heads(2 * largest, most)
    num_others = count - largest
    n = np.arange(1, count + 1)
    extended = {
        f"2 ** (-{most:g} n / {largest}), also after head {largest - 1}": 2.0
        ** (-most * n / largest)
    }
    others = {
        f"the first ones of {2 * largest} heads": between[:num_others],
        f"the second, fourth … of {2 * largest} heads": between[1::2][:num_others],
        "one exponent too early": between[::2][:num_others] * 2.0 ** (most / (2 * largest)),
        f"the slopes of a layer of {num_others} heads": slopes_of_heads(num_others, most),
        "0": np.zeros(num_others),
        "1": np.ones(num_others),
        "the slopes of the first heads once more": first[:num_others],
    }
    for words, slopes in others.items():
        extended[f"{words}, for the heads after {largest - 1}"] = np.concatenate([first, slopes])
    return extended


def slopes_of_heads(count: int, most: float) -> np.ndarray:
    """Return the slopes of a layer of some heads and a `max_bias`, (count,)."""
    n = np.arange(1, count + 1)
    largest = largest_power(count)
    share = np.where(n <= largest, n / largest, (2 * (n - largest) - 1) / (2 * largest))
    return 2.0 ** (-most * share)


def with_slopes(spec: AttentionSpec, alibi: Alibi, slopes: np.ndarray) -> Edit:
    """Return the edit by which a layer has other slopes before their scale, (N,)."""
    if alibi.scaled:
        slopes = slopes * spec.score_scale
    return Edit(overrides={"slopes": always(slopes)})


def _rounded(problem: Problem, dtype: str) -> Iterator[Edit]:
    """Yield slopes, distances and biases that are rounded to a dtype."""
    cut = partial(in_sixteen_bits, dtype=dtype)
    of_slopes: Overrides = {"slopes": after(cut)}
    of_bias: Overrides = {"lost_by_distance": after(cut)}
    of_distances: Overrides = {"distances": after(_distances_rounded_by(cut))}
    for words, overrides in (
        ("slopes are", of_slopes),
        ("bias is", of_bias),
        ("slopes and bias are", of_slopes | of_bias),
        ("slopes, distances and bias are", of_slopes | of_distances | of_bias),
        ("distances are", of_distances),
    ):
        about = f"ALiBi's {words} rounded to {dtype}"
        yield part(problem, "alibi", about, Edit(overrides=overrides), of.ALIBI)


def _distances_rounded_by(cut: Form) -> Form:
    def distances(right: np.ndarray) -> np.ndarray:
        return cut(right.astype(np.float64))

    return distances


def _multiplied_by(factors: np.ndarray | float) -> Edit:
    def slopes(_: Layer, original: Override) -> np.ndarray:
        return original() * factors

    return Edit(overrides={"slopes": slopes})


def _of_key(_: Layer, __: object, positions: np.ndarray, key_len: int) -> np.ndarray:
    shape = (*positions[:, None].shape, key_len)
    return np.broadcast_to(np.arange(key_len), shape)


def _of_query(_: Layer, __: object, positions: np.ndarray, key_len: int) -> np.ndarray:
    rows = positions[:, None, :, None]
    return np.broadcast_to(rows, (*rows.shape[:3], key_len))


def alibi_numbers(trial: StageTrial, problem: Problem) -> Iterator[Edit]:
    """Yield a factor of all slopes, the largest distance, or the slope of each head."""
    alibi = problem.spec.alibi
    if alibi is None:
        return
    factor = Number("slopes", "slopes", 1.0, FACTORS, _multiplied_by)
    for value in Fitted(trial, factor).numbers():
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
        return
    guesses = (None, *range(1, LARGEST + 1))
    bound = Number(
        "largest distance", "ALiBi's largest distance", None, guesses, _bounded, is_whole=True
    )
    for value in Fitted(trial, bound).numbers():
        yield trial.difference.pattern(
            "largest distance",
            f"ALiBi's distances are at most {value:g}, further ones are cut off",
            {"value": value},
            1,
            families=(of.ALIBI,),
            injected=_bounded(value),
        )
        return
    yield from _slopes_of_heads(trial, problem, alibi)


def _bounded(largest: float | None) -> Edit:
    if largest is None:
        return Edit(overrides={"distances": after(np.asarray)})
    return Edit(overrides={"distances": after(partial(np.minimum, int(largest)))})


def _slopes_of_heads(trial: StageTrial, problem: Problem, alibi: Alibi) -> Iterator[Edit]:
    """Yield a fitted slope of each head."""
    spec = problem.spec
    if spec.num_heads > MOST_HEADS or not trial.difference.is_enough(spec.num_heads):
        return
    if trial.difference.stage.quantity not in ("scores", "attn_weights", "context", "output"):
        return
    right = slopes_of_heads(spec.num_heads, alibi.max_bias)
    slopes = FittedSlopes(trial, partial(with_slopes, spec, alibi), right).best()
    change = with_slopes(spec, alibi, slopes)
    if not trial.explains(change):
        return
    used = slopes.tolist()
    yield trial.difference.pattern(
        "slopes",
        f"ALiBi's slopes are {listed(used)} instead of {listed(right.tolist())}",
        {"used": used, "right": right.tolist()},
        len(used),
        families=(of.ALIBI,),
        injected=change,
    )
