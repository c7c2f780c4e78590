"""Patterns of values: constants, factors and offsets, of everything or by head, position or
feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import Families
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.laws.record import Seen
from parity.explain.diagnosis.laws.words import (
    LOOSEST,
    NOUNS,
    RATES,
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
    if np.isfinite(values).all():
        value = float(np.median(values))
    else:
        value = float(values.flat[0])
    if seen.stage.is_exact:
        if seen.stage.kind == "mask" and seen.count > 1 and seen.holds(seen.within(value)):
            words = "none of them is hidden"
            if value:
                words = "all of them are hidden"
            yield seen.pattern("constant", words, {"value": value}, 0)
        return
    if seen.holds(seen.within(0.0)):
        families = _families_of_zeros(seen)
        yield seen.pattern("zeros", "all values there are 0", families=families)
    elif math.isnan(value) and seen.holds(seen.within(value)):
        yield seen.pattern("nan", "all values there are NaN")
    elif math.isinf(value) and seen.holds(seen.within(value)):
        words = "all values there are infinity"
        if value < 0:
            words = "all values there are -infinity"
        yield seen.pattern("infinite", words, {"sign": math.copysign(1, value)})
    elif math.isfinite(value) and seen.is_enough(1) and seen.holds(seen.within(value)):
        words = f"all values there are {number_words(value, _names_of(seen, value))}"
        yield seen.pattern("constant", words, {"value": value}, 1)


def _families_of_zeros(seen: Seen) -> Families:
    """Return the family of lost values; slots of a cache that are empty in every head were not
    written.
    """
    is_in_cache = "cache" in seen.stage.kind
    is_read_from_cache = seen.stage.quantity == "context" and seen.stage.step is not None
    if seen.stage.quantity in ("mask", "scores"):
        return ()
    if not is_in_cache and not is_read_from_cache:
        return (of.LOST,)
    if len(seen.box[1]) < seen.expected.shape[1]:  # in some heads
        return (of.LOST,)
    if is_in_cache:
        return (of.CACHE_SLOTS,)
    return ()  # a context is also 0 if the values that it reads are empty


def _names_of(seen: Seen, value: float) -> list[str]:
    """Return the names of a constant, if it has any."""
    num_keys = seen.actual.shape[-1]
    if seen.stage.is_attn_weights and abs(value * num_keys - 1.0) < 1e-5:
        return ["1/S: uniform rows"]
    names = []
    for name, constant in CONSTANTS.items():
        if abs(value - constant) <= 1e-6 * abs(constant):
            names.append(name)
    return names


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
    choices = _choices(seen)
    if seen.letters[-1] in ("H", "W"):
        every_row = tuple(range(a.ndim - 1))
        choices.append(every_row)
    for axes in choices:
        parameters = _parameters(seen, axes)
        if not seen.is_enough(parameters):
            continue
        factor = _ratio(a, e, _other_axes(a, axes))
        if not np.isfinite(factor).all() or (not axes and not factor.item()):
            continue
        gain = np.where(seen.part, np.abs(factor), 1.0)
        if seen.holds(seen.within(factor * seen.expected), gain):
            numbers = _in_box(seen, factor, axes)
            yield seen.pattern(
                "factor",
                _factor_words(seen, axes, numbers),
                _numbers(seen, axes, "factors", numbers),
                parameters,
                families=_families_of_factor(seen, axes, float(numbers[0])),
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
    for axes in sorted(choices, key=partial(_parameters, seen)):
        parameters = _parameters(seen, axes)
        if not seen.is_enough(parameters):
            continue
        over = _other_axes(a, axes)
        count = np.maximum(counted.sum(axis=over, keepdims=True), 1.0)
        offset = differences.sum(axis=over, keepdims=True) / count
        if seen.holds(seen.within(seen.expected + offset)):
            numbers = _in_box(seen, offset, axes)
            yield seen.pattern(
                "offset",
                _offset_words(seen, axes, numbers),
                _numbers(seen, axes, "offsets", numbers),
                parameters,
                families=_families_of_offset(seen, axes),
            )
            return


def _families_of_factor(seen: Seen, axes: tuple[int, ...], factor: float) -> Families:
    """Return the families of one factor, or of one for each index of some axes."""
    if seen.problem is None:
        return ()
    spec = seen.problem.spec
    if len(axes) > 1:  # every row has its own
        if seen.stage.quantity not in ("q", "k", "v"):
            return _family_of_heads(seen, axes)
        if spec.temperature is not None:
            return of.QK_NORM, of.TEMPERATURE
        return (of.QK_NORM,)
    if axes:
        return _family_of_heads(seen, axes)
    if seen.stage.kind == "scores":
        if _has_all_heads(seen) and spec.soft_cap is None:
            return (of.scale_family(spec),)
        return ()
    if seen.stage.is_attn_weights:
        is_of_dropout = any(abs(factor * (1.0 - rate) - 1.0) <= LOOSEST for rate in RATES)
        if is_of_dropout and _has_all_heads(seen):
            return (of.DROPOUT,)
        return (of.FACTOR,)
    if seen.stage.quantity not in ("q", "k"):
        return (of.FACTOR,)
    family = of.FACTOR
    if _has_all_heads(seen) and _is_power_of_scale(factor, spec.score_scale):
        family = of.scale_family(spec)
    if spec.qk_norm is not None:
        return family, of.QK_NORM
    return (family,)


def _family_of_heads(seen: Seen, axes: tuple[int, ...]) -> Families:
    """Return the family of factors if each head has its own."""
    if seen.letters[axes[0]] in ("N", "K"):
        return (of.FACTOR,)
    return ()


def _has_all_heads(seen: Seen) -> bool:
    """Return True if every sequence and head is wrong."""
    shape = seen.expected.shape
    return all(len(seen.box[axis]) == shape[axis] for axis in range(min(2, len(shape))))


def _is_power_of_scale(factor: float, scale: float) -> bool:
    for power in (scale, 1.0 / scale, math.sqrt(scale)):
        if power != 1.0 and abs(factor - power) <= LOOSEST * power:
            return True
    return False


def _families_of_offset(seen: Seen, axes: tuple[int, ...]) -> Families:
    """Return the family of a wrong length of a cache, or of a bias of a projection."""
    if seen.stage.kind == "cache.lengths":
        return (of.CACHE_SLOTS,)
    letters = {seen.letters[axis] for axis in axes}
    is_bias = bool(letters & {"H", "E", "W"}) and not letters & {"B", "T", "S"}
    if is_bias and seen.stage.quantity in ("q", "k", "v"):
        return (of.BIAS,)
    return ()


def rows_and_features(seen: Seen) -> Iterator[Edit]:
    """Yield a multiple of the expected values with one factor per token and one per feature, in
    each head.
    """
    if seen.letters[-1] not in ("H", "W") or seen.actual.ndim != 4 or not seen.usable.all():
        return
    batch, heads, tokens, features = seen.actual.shape
    a, e = seen.known
    parameters = batch * heads * (tokens + features)
    if not seen.is_enough(parameters):
        return
    of_row = np.ones((batch, heads, tokens, 1))
    of_feature = np.ones((batch, heads, 1, features))
    for _ in range(ALTERNATIONS):
        of_row = _ratio(a, e * of_feature, 3)
        of_feature = _ratio(a, e * of_row, 2)
    factor = of_row * of_feature
    gain = np.where(seen.part, np.abs(factor), 1.0)
    if np.isfinite(factor).all() and seen.holds(seen.within(factor * e), gain):
        words = (
            "each token and each feature of a head is multiplied by a number, as by a norm over "
            "another axis"
        )
        yield seen.pattern("tokens and features", words, {}, parameters, families=(of.QK_NORM,))


def _ratio(a: np.ndarray, x: np.ndarray, over: int | tuple[int, ...]) -> np.ndarray:
    """Return the factors, each for all elements along some axes, that bring x closest to a."""
    size = (x * x).sum(axis=over, keepdims=True)
    products = (a * x).sum(axis=over, keepdims=True)
    return np.divide(products, size, out=np.ones_like(size), where=size > 0)


def _other_axes(x: np.ndarray, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis not in axes)


def _choices(seen: Seen) -> list[tuple[int, ...]]:
    """Return no axis, then each alone."""
    choices: list[tuple[int, ...]] = [()]
    for letter in LATER:
        if letter in seen.letters:
            choices.append((seen.letters.index(letter),))
    if len(choices) == 1:
        choices += [(axis,) for axis in range(seen.actual.ndim)]
    return choices


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
    wrong = [np.arange(1)] * numbers.ndim
    for axis in axes:
        wrong[axis] = seen.box[axis]
    return numbers[np.ix_(*wrong)].ravel()


def _numbers(
    seen: Seen, axes: tuple[int, ...], name: str, numbers: np.ndarray
) -> dict[str, object]:
    return {"axes": [seen.letters[axis] for axis in axes], name: numbers.tolist()}


def sizes_of(seen: Seen) -> dict[str, int]:
    """Return the sizes of heads and layers, by their letters in formulas."""
    sizes = {}
    for letter in "HNE":
        if letter in seen.letters:
            sizes[letter] = seen.actual.shape[seen.letters.index(letter)]
    if seen.problem is not None:
        spec = seen.problem.spec
        sizes |= {"H": spec.head_dim, "N": spec.num_heads, "E": spec.d_model}
    return sizes


def _factor_words(seen: Seen, axes: tuple[int, ...], numbers: np.ndarray) -> str:
    if not axes:
        factor = float(numbers[0])
        names = known_as(factor, 4.0 * seen.precision + 1e-6, sizes_of(seen), seen.problem)
        return f"the values there are {number_words(factor, names, 1.0)} times what they should be"
    factors_listed = listed(numbers.tolist(), 1.0)
    if len(axes) > 1:
        return (
            f"each token of each head there is multiplied by a different number, as by a missing "
            f"or additional norm: {factors_listed}"
        )
    one, _ = noun(seen.letters, min(axes))
    return f"each {one} there is multiplied by a different number: {factors_listed}"


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
    words = f"a number is added there to each {ones}"
    last, _ = NOUNS.get(seen.letters[axes[-1]], ("", ""))
    if last == "feature":
        words += ", the same for all tokens, like a bias"
    return f"{words}: {listed(numbers.tolist())}"
