"""Patterns of values: constants, factors and offsets, of everything or by head, position or
feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from parity.explain.diagnosis.bugs.record import Edit, pattern
from parity.explain.diagnosis.laws.record import Seen
from parity.explain.diagnosis.laws.words import (
    NOUNS,
    known_as,
    listed,
    noun,
    number_words,
    readable,
)

CONSTANTS = {
    "the smallest float32": float(np.finfo(np.float32).min),
    "half of the smallest float32": float(np.finfo(np.float32).min) / 2,
    "about the smallest bfloat16": -3.3895313892515355e38,
    "the smallest float16": -65504.0,
}
"""Numbers that implementations use instead of -infinity."""


# ---- Constants -----------------------------------------------------------------------------------


def constants(seen: Seen) -> Iterator[Edit]:
    """Yield one value in the whole part."""
    values = seen.actual[seen.part]
    if not values.size:
        return
    value = float(values.flat[0]) if not np.isfinite(values).all() else float(np.median(values))
    if seen.stage.is_exact:
        if seen.stage.kind == "mask" and seen.count > 1 and seen.holds(seen.within(value)):
            yield pattern(
                "constant",
                "all of them are hidden" if value else "none of them is hidden",
                {"value": value},
                0,
            )
        return
    if seen.holds(seen.within(0.0)):
        yield pattern("zeros", "all values there are 0")
    elif math.isnan(value) and seen.holds(seen.within(value)):
        yield pattern("nan", "all values there are NaN")
    elif math.isinf(value) and seen.holds(seen.within(value)):
        yield pattern(
            "infinite",
            f"all values there are {'-' if value < 0 else ''}infinity",
            {"sign": math.copysign(1, value)},
        )
    elif math.isfinite(value) and seen.is_enough(1) and seen.holds(seen.within(value)):
        names = [
            name for name, known in CONSTANTS.items() if abs(value - known) <= 1e-6 * abs(known)
        ]
        if seen.stage.is_attn_weights and abs(value * seen.actual.shape[-1] - 1.0) < 1e-5:
            names = ["1/S: uniform rows"]
        yield pattern(
            "constant", f"all values there are {number_words(value, names)}", {"value": value}, 1
        )


# ---- Factors and offsets -------------------------------------------------------------------------

ALTERNATIONS = 200
"""Rounds in which the factors of tokens and of features are fitted in turn."""

LATER = ("N", "K", "B", "T", "S", "H", "E", "W", "G", "d_in", "d_kv", "out", "in")
"""The axes whose factors and offsets are tried, in this order."""


def factors(seen: Seen) -> Iterator[Edit]:
    """Yield a multiple of the expected values: one factor, or one for each head, sequence, position
    or feature.
    """
    if seen.stage.is_exact:
        return
    a, e = seen.known
    products, squares = a * e, e * e
    rows = [tuple(range(a.ndim - 1))] if seen.letters[-1] in ("H", "W") else []
    for axes in [*_choices(seen), *rows]:
        parameters = _parameters(seen, axes)
        if not seen.is_enough(parameters):
            continue
        over = tuple(axis for axis in range(a.ndim) if axis not in axes)
        size = squares.sum(axis=over, keepdims=True)
        factor = np.divide(
            products.sum(axis=over, keepdims=True), size, out=np.ones_like(size), where=size > 0
        )
        if not np.isfinite(factor).all() or (not axes and not factor.item()):
            continue
        if seen.holds(
            seen.within(factor * seen.expected), np.where(seen.part, np.abs(factor), 1.0)
        ):
            numbers = _in_box(seen, factor, axes)
            yield pattern(
                "factor",
                _factor_words(seen, axes, numbers),
                _numbers(seen, axes, "factors", numbers),
                parameters,
            )
            return


def offsets(seen: Seen) -> Iterator[Edit]:
    """Yield an offset of the expected values: one number, or one for each feature, head or
    position.
    """
    if seen.stage.kind == "mask":
        return
    a, e = seen.known
    differences, counted = a - e, seen.usable.astype(np.float64)
    choices = [*_choices(seen), *_pairs(seen)]
    for axes in sorted(choices, key=lambda axes: _parameters(seen, axes)):
        parameters = _parameters(seen, axes)
        if not seen.is_enough(parameters):
            continue
        over = tuple(axis for axis in range(a.ndim) if axis not in axes)
        offset = differences.sum(axis=over, keepdims=True) / np.maximum(
            counted.sum(axis=over, keepdims=True), 1.0
        )
        if seen.holds(seen.within(seen.expected + offset)):
            numbers = _in_box(seen, offset, axes)
            yield pattern(
                "offset",
                _offset_words(seen, axes, numbers),
                _numbers(seen, axes, "offsets", numbers),
                parameters,
            )
            return


def rows_and_features(seen: Seen) -> Iterator[Edit]:
    """Yield a multiple of the expected values with one factor per token and one per feature, in
    each head.
    """
    if seen.letters[-1] not in ("H", "W") or seen.actual.ndim != 4 or not seen.usable.all():
        return
    (batch, heads, tokens, features), (a, e) = seen.actual.shape, seen.known
    parameters = batch * heads * (tokens + features)
    if not seen.is_enough(parameters):
        return
    of_row = np.ones((batch, heads, tokens, 1))
    of_feature = np.ones((batch, heads, 1, features))
    for _ in range(ALTERNATIONS):
        x = e * of_feature
        of_row = _ratio(a, x, 3)
        x = e * of_row
        of_feature = _ratio(a, x, 2)
    factor = of_row * of_feature
    if np.isfinite(factor).all() and seen.holds(
        seen.within(factor * e), np.where(seen.part, np.abs(factor), 1.0)
    ):
        words = (
            "each token and each feature of a head is multiplied by a number, as by a norm over "
            "another axis"
        )
        yield pattern("tokens and features", words, {}, parameters)


def _ratio(a: np.ndarray, x: np.ndarray, axis: int) -> np.ndarray:
    """Return the factors along an axis that bring x closest to a."""
    size = (x * x).sum(axis=axis, keepdims=True)
    return np.divide(
        (a * x).sum(axis=axis, keepdims=True), size, out=np.ones_like(size), where=size > 0
    )


def _choices(seen: Seen) -> list[tuple[int, ...]]:
    """Return no axis, then each alone."""
    axes = [seen.letters.index(letter) for letter in LATER if letter in seen.letters]
    return [(), *((axis,) for axis in axes or range(seen.actual.ndim))]


def _pairs(seen: Seen) -> Iterator[tuple[int, ...]]:
    """Yield features of each head, as for a bias; for scores also rows and columns."""
    if seen.letters[-1] in "HW" and len(seen.letters) == 4:
        yield (1, 3)
    if seen.letters[-2:] == ("T", "S") and not seen.stage.is_exact:
        yield (0, 1, 2)
        yield (0, 1, 3)


def _parameters(seen: Seen, axes: tuple[int, ...]) -> int:
    return math.prod(len(seen.box[axis]) for axis in axes)


def _in_box(seen: Seen, numbers: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of the wrong indices."""
    kept = [seen.box[axis] if axis in axes else np.arange(1) for axis in range(numbers.ndim)]
    return numbers[np.ix_(*kept)].ravel()


def _numbers(
    seen: Seen, axes: tuple[int, ...], name: str, numbers: np.ndarray
) -> dict[str, object]:
    return {"axes": [seen.letters[axis] for axis in axes], name: numbers.tolist()}


def sizes_of(seen: Seen) -> dict[str, int]:
    """Return the sizes of heads and layers, by their letters in formulas."""
    sizes = {
        letter: seen.actual.shape[seen.letters.index(letter)]
        for letter in "HNE"
        if letter in seen.letters
    }
    if seen.problem is not None:
        spec = seen.problem.spec
        sizes |= {"H": spec.head_dim, "N": spec.num_heads, "E": spec.d_model}
    return sizes


def _factor_words(seen: Seen, axes: tuple[int, ...], numbers: np.ndarray) -> str:
    if not axes:
        factor = float(numbers[0])
        names = known_as(factor, 4.0 * seen.precision + 1e-6, sizes_of(seen), seen.problem)
        return f"the values there are {number_words(factor, names, 1.0)} times what they should be"
    is_row = len(axes) > 1
    each = "token of each head" if is_row else noun(seen.letters, next(iter(axes)))[0]
    as_a_norm = ", as by a missing or additional norm" if is_row else ""
    return (
        f"each {each} there is multiplied by a different number{as_a_norm}: "
        f"{listed(numbers.tolist(), 1.0)}"
    )


def _offset_words(seen: Seen, axes: tuple[int, ...], numbers: np.ndarray) -> str:
    if not axes:
        return f"{readable(float(numbers[0]))} is added to all values there"
    if axes == (0, 1, 2):
        return (
            f"each row there is off by a constant ({listed(numbers.tolist())}), which a softmax "
            f"ignores"
        )
    if axes == (0, 1, 3):
        return f"a bias that depends only on the key is added there: {listed(numbers.tolist())}"
    ones = " and ".join(noun(seen.letters, axis)[0] for axis in axes[::-1])
    as_a_bias = (
        ", the same for all tokens, like a bias" if seen.letters[axes[-1]] in _FEATURES else ""
    )
    return f"a number is added there to each {ones}{as_a_bias}: {listed(numbers.tolist())}"


_FEATURES = tuple(letter for letter, (one, _) in NOUNS.items() if one == "feature")
