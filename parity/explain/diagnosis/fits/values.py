"""Patterns of values: constants, factors and offsets, of everything or by head, position or
feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import Families
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.bugs.scores import yarn_factor
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.words import (
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
"""Values that implementations use instead of -infinity."""


LEAST_COSINE = 0.99
"""The least cosine of values and a multiple of them: that of random directions of 4 numbers is
below it in 99.9% of all cases, and rounding to 16 bits changes it by less than 0.0001.
"""


# ---- Constants -----------------------------------------------------------------------------------


def constants(difference: Difference) -> Iterator[Edit]:
    """Yield one value in the whole part."""
    values = difference.actual[difference.part]
    if not values.size:
        return
    if np.isfinite(values).all():
        value = float(np.median(values))
    else:
        value = float(values.flat[0])
    if difference.stage.is_exact:
        if (
            difference.stage.kind == "mask"
            and difference.count > 1
            and difference.is_explained_by(difference.within(value))
        ):
            words = "none of them is hidden"
            if value:
                words = "all of them are hidden"
            yield difference.pattern("constant", words, {"value": value}, 0)
        return
    if difference.is_explained_by(difference.within(0.0)):
        words = "all values there are 0"
        if values.any():
            words += ", up to rounding"
        yield difference.pattern("zeros", words, families=_families_of_zeros(difference))
    elif math.isnan(value) and difference.is_explained_by(difference.within(value)):
        yield difference.pattern("nan", "all values there are NaN")
    elif math.isinf(value) and difference.is_explained_by(difference.within(value)):
        words = "all values there are infinity"
        if value < 0:
            words = "all values there are -infinity"
        yield difference.pattern("infinite", words, {"sign": math.copysign(1, value)})
    elif (
        math.isfinite(value)
        and difference.is_enough(1)
        and difference.is_explained_by(difference.within(value))
    ):
        words = f"all values there are {number_words(value, _names_of(difference, value))}"
        yield difference.pattern("constant", words, {"value": value}, 1)


def is_small_multiple(difference: Difference) -> bool:
    """Return True if values as small as the tolerance are the expected ones times a factor.

    In 16 bits, 0.01 is such a factor. The values are not 0: their direction is the expected one.
    """
    a, e = difference.usable_values
    if difference.stage.is_exact or not difference.is_enough(1) or not a.any() or not e.any():
        return False
    if not difference.is_explained_by(difference.within(0.0)):
        return False
    cosine = (a * e).sum() / np.sqrt((a * a).sum() * (e * e).sum())
    return bool(abs(cosine) >= LEAST_COSINE)


def _families_of_zeros(difference: Difference) -> Families:
    """Return the family of lost values; slots of a cache that are empty in every head were not
    written.
    """
    is_in_cache = "cache" in difference.stage.kind
    is_read_from_cache = (
        difference.stage.quantity == "context" and difference.stage.step is not None
    )
    if difference.stage.quantity in ("mask", "scores"):
        return ()
    if not is_in_cache and not is_read_from_cache:
        return (of.LOST,)
    if len(difference.box[1]) < difference.expected.shape[1]:  # in some heads
        return (of.LOST,)
    if is_in_cache:
        return (of.CACHE_SLOTS,)
    return ()  # a context is also 0 if the values that it reads are empty


def _names_of(difference: Difference, value: float) -> list[str]:
    """Return the names of a constant, if it has any."""
    num_keys = difference.actual.shape[-1]
    if difference.stage.is_attn_weights and abs(value * num_keys - 1.0) < 1e-5:
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


def factors(difference: Difference) -> Iterator[Edit]:
    """Yield a multiple of the expected values: one factor, or one for each head, sequence, position
    or feature.
    """
    if difference.stage.is_exact:
        return
    a, e = difference.usable_values
    choices = _choices(difference)
    if difference.letters[-1] in ("H", "W"):
        every_row = tuple(range(a.ndim - 1))
        choices.append(every_row)
    for axes in choices:
        parameters = _parameters(difference, axes)
        if not difference.is_enough(parameters):
            continue
        factor = _ratio(a, e, _other_axes(a, axes))
        if not np.isfinite(factor).all() or (not axes and not factor.item()):
            continue
        gain = np.where(difference.part, np.abs(factor), 1.0)
        if difference.is_explained_by(difference.within(factor * difference.expected), gain):
            factors_in_box = _in_box(difference, factor, axes)
            yield difference.pattern(
                "factor",
                _factor_words(difference, axes, factors_in_box),
                _fitted(difference, axes, "factors", factors_in_box),
                parameters,
                families=_families_of_factor(difference, axes, factors_in_box),
            )
            return


def offsets(difference: Difference) -> Iterator[Edit]:
    """Yield an offset of the expected values: one number, or one for each feature, head or
    position.
    """
    if difference.stage.kind == "mask":
        return
    a, e = difference.usable_values
    differences, counted = a - e, difference.usable.astype(np.float64)
    choices = [*_choices(difference), *_pairs(difference)]
    for axes in sorted(choices, key=partial(_parameters, difference)):
        parameters = _parameters(difference, axes)
        if not difference.is_enough(parameters):
            continue
        over = _other_axes(a, axes)
        count = np.maximum(counted.sum(axis=over, keepdims=True), 1.0)
        offset = differences.sum(axis=over, keepdims=True) / count
        if difference.is_explained_by(difference.within(difference.expected + offset)):
            offsets_in_box = _in_box(difference, offset, axes)
            yield difference.pattern(
                "offset",
                _offset_words(difference, axes, offsets_in_box),
                _fitted(difference, axes, "offsets", offsets_in_box),
                parameters,
                families=_families_of_offset(difference, axes),
            )
            return


def _families_of_factor(
    difference: Difference, axes: tuple[int, ...], factors: np.ndarray
) -> Families:
    """Return the families of one factor, or of one for each index of some axes."""
    if difference.problem is None:
        return ()
    if not factors.any():
        return _families_of_zeros(difference)
    factor = float(factors[0])
    spec = difference.problem.spec
    if len(axes) > 1:  # every row has its own
        if difference.stage.quantity not in ("q", "k", "v"):
            return _family_of_heads(difference, axes)
        if spec.temperature is not None:
            return of.QK_NORM, of.TEMPERATURE
        return (of.QK_NORM,)
    if axes:
        return _family_of_heads(difference, axes)
    if difference.stage.kind == "scores":
        if _has_all_heads(difference) and spec.soft_cap is None:
            return (of.scale_family(spec),)
        return ()
    # A factor of the weights is also one of the context.
    if difference.stage.is_attn_weights or difference.stage.quantity == "context":
        is_of_dropout = any(abs(factor * (1.0 - rate) - 1.0) <= LOOSEST for rate in RATES)
        if is_of_dropout and _has_all_heads(difference):
            return (of.DROPOUT,)
        return (of.FACTOR,)
    if difference.stage.quantity not in ("q", "k"):
        return (of.FACTOR,)
    family = of.FACTOR
    if _has_all_heads(difference) and _is_of_scale(factor, spec):
        family = of.scale_family(spec)
    if spec.qk_norm is not None:
        return family, of.QK_NORM
    return (family,)


def _family_of_heads(difference: Difference, axes: tuple[int, ...]) -> Families:
    """Return the family of factors if each head has its own."""
    if difference.letters[axes[0]] in ("N", "K"):
        return (of.FACTOR,)
    return ()


def _has_all_heads(difference: Difference) -> bool:
    """Return True if every sequence and head is wrong."""
    shape = difference.expected.shape
    return all(len(difference.box[axis]) == shape[axis] for axis in range(min(2, len(shape))))


def _is_of_scale(factor: float, spec: AttentionSpec) -> bool:
    """Return True if a factor of queries or keys is the scale of the scores, or belongs to it."""
    scale = spec.score_scale
    root = math.sqrt(spec.head_dim)
    numbers = [scale, 1.0 / scale, math.sqrt(scale), 1.0 / root, root]
    mscale_squared = yarn_factor(spec)
    if mscale_squared != 1.0:
        numbers += [mscale_squared, math.sqrt(mscale_squared)]
    return any(number != 1.0 and abs(factor - number) <= LOOSEST * number for number in numbers)


def _families_of_offset(difference: Difference, axes: tuple[int, ...]) -> Families:
    """Return the family of a wrong length of a cache, or of a bias of a projection."""
    if difference.stage.kind == "cache.lengths":
        return (of.CACHE_SLOTS,)
    letters = {difference.letters[axis] for axis in axes}
    is_bias = bool(letters & {"H", "E", "W"}) and not letters & {"B", "T", "S"}
    if is_bias and difference.stage.quantity in ("q", "k", "v"):
        return (of.BIAS,)
    return ()


def rows_and_features(difference: Difference) -> Iterator[Edit]:
    """Yield a multiple of the expected values with one factor per token and one per feature, in
    each head.
    """
    if (
        difference.letters[-1] not in ("H", "W")
        or difference.actual.ndim != 4
        or not difference.usable.all()
    ):
        return
    batch, heads, tokens, features = difference.actual.shape
    a, e = difference.usable_values
    parameters = batch * heads * (tokens + features)
    if not difference.is_enough(parameters):
        return
    of_row = np.ones((batch, heads, tokens, 1))
    of_feature = np.ones((batch, heads, 1, features))
    for _ in range(ALTERNATIONS):
        of_row = _ratio(a, e * of_feature, 3)
        of_feature = _ratio(a, e * of_row, 2)
    factor = of_row * of_feature
    gain = np.where(difference.part, np.abs(factor), 1.0)
    if np.isfinite(factor).all() and difference.is_explained_by(
        difference.within(factor * e), gain
    ):
        words = (
            "each token and each feature of a head is multiplied by a number, as by a norm over "
            "the wrong axis"
        )
        yield difference.pattern(
            "tokens and features", words, {}, parameters, families=(of.QK_NORM,)
        )


def _ratio(a: np.ndarray, x: np.ndarray, over: int | tuple[int, ...]) -> np.ndarray:
    """Return the factors, each for all elements along some axes, that bring x closest to a."""
    size = (x * x).sum(axis=over, keepdims=True)
    products = (a * x).sum(axis=over, keepdims=True)
    return np.divide(products, size, out=np.ones_like(size), where=size > 0)


def _other_axes(x: np.ndarray, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis not in axes)


def _choices(difference: Difference) -> list[tuple[int, ...]]:
    """Return no axis, then each alone."""
    choices: list[tuple[int, ...]] = [()]
    for letter in LATER:
        if letter in difference.letters:
            choices.append((difference.letters.index(letter),))
    if len(choices) == 1:
        choices += [(axis,) for axis in range(difference.actual.ndim)]
    return choices


def _pairs(difference: Difference) -> Iterator[tuple[int, ...]]:
    """Yield features of each head, as for a bias; for scores also rows and columns."""
    if difference.letters[-1] in "HW" and len(difference.letters) == 4:
        yield (1, 3)
    if difference.letters[-2:] == ("T", "S") and not difference.stage.is_exact:
        yield (0, 1, 2)
        yield (0, 1, 3)


def _parameters(difference: Difference, axes: tuple[int, ...]) -> int:
    return math.prod(len(difference.box[axis]) for axis in axes)


def _in_box(difference: Difference, values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return the values of the wrong indices."""
    wrong = [np.arange(1)] * values.ndim
    for axis in axes:
        wrong[axis] = difference.box[axis]
    return values[np.ix_(*wrong)].ravel()


def _fitted(
    difference: Difference, axes: tuple[int, ...], name: str, values: np.ndarray
) -> dict[str, object]:
    return {"axes": [difference.letters[axis] for axis in axes], name: values.tolist()}


def sizes_of(difference: Difference) -> dict[str, int]:
    """Return the sizes of heads and layers, by their letters in formulas."""
    sizes = {}
    for letter in "HNE":
        if letter in difference.letters:
            sizes[letter] = difference.actual.shape[difference.letters.index(letter)]
    if difference.problem is not None:
        spec = difference.problem.spec
        sizes |= {"H": spec.head_dim, "N": spec.num_heads, "E": spec.d_model}
    return sizes


def _factor_words(difference: Difference, axes: tuple[int, ...], values: np.ndarray) -> str:
    if not axes:
        factor = float(values[0])
        names = known_as(
            factor, 4.0 * difference.precision + 1e-6, sizes_of(difference), difference.problem
        )
        return f"the values there are {number_words(factor, names, 1.0)} times what they should be"
    factors_listed = listed(values.tolist(), 1.0)
    if len(axes) > 1:
        return (
            f"each token of each head there is multiplied by a different number, as by a missing "
            f"or additional norm: {factors_listed}"
        )
    one, _ = noun(difference.letters, min(axes))
    return f"each {one} there is multiplied by a different number: {factors_listed}"


def _offset_words(difference: Difference, axes: tuple[int, ...], values: np.ndarray) -> str:
    if not axes:
        return f"{readable(float(values[0]))} is added to all values there"
    if axes == (0, 1, 2):
        return (
            f"each row there is off by a constant ({listed(values.tolist())}), which a softmax "
            f"ignores"
        )
    if axes == (0, 1, 3):
        return f"a bias that depends only on the key is added there: {listed(values.tolist())}"
    ones = " and ".join(noun(difference.letters, axis)[0] for axis in axes[::-1])
    words = f"a number is added there to each {ones}"
    last, _ = NOUNS.get(difference.letters[axes[-1]], ("", ""))
    if last == "feature":
        words += ", the same for all tokens, like a bias"
    return f"{words}: {listed(values.tolist())}"
