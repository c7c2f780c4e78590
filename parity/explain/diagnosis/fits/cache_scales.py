"""Scales of a quantized cache that the layer does not have, such as another layer's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.quantized_caches import (
    with_scales,
    with_scales_when_read,
)
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.fits.numbers import Recompute, StageTrial
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.words import listed, readable
from parity.measure.core.case import Case
from parity.measure.core.quantization import FIXED, LARGEST
from parity.measure.core.reference.quantized import to_nearest

NAMES = {"cache.keys": ("keys", "k"), "cache.values": ("values", "v")}
"""Cached arrays, and the stage of their new tokens."""

MATCHING = 0.99
"""Share of values that a scale must reproduce; others may be rounded either way."""

LEAST = 4
"""Least number of tokens and features that tells a scale."""


def cache_scales(difference: Difference, recompute: Recompute) -> Iterator[Edit]:
    """Yield other scales: only when the cache is read, and also when it is written."""
    stage, problem = difference.stage, difference.problem
    if problem is None or stage.quantity not in NAMES or stage.step is None:
        return
    quantization = problem.case.cache_quantization
    name, own_stage = NAMES[stage.quantity]
    if quantization is None or quantization.has_zero_point:
        return
    if stage.step in quantization.exact_calls(problem.case.chunks, stage.step):
        return
    scale_per = quantization.scale_per_of(name)
    if scale_per not in FIXED:
        return
    slots = _new_slots(problem.case, stage.step, difference.expected.shape)
    trial = StageTrial(difference, recompute)
    factors = _factors(difference, slots, scale_per)
    if factors is not None:
        edit = with_scales_when_read(name, factors)
        if trial.explains(edit):
            words = f"the scales of cached {name} are {_values(factors)} times theirs when read"
            yield _pattern(difference, words, factors, edit)
            return
    new = difference.other_stages.get(f"step{stage.step}.{own_stage}")
    if new is None or quantization.before_rope:
        return
    tokens = _in_slots(problem.case, stage.step, new, difference.expected.shape)
    scales = _scales(difference, slots, tokens, scale_per, quantization.dtype)
    if scales is None:
        return
    edit = with_scales(name, scales)
    if trial.explains(edit):
        words = f"cached {name} have other scales, such as another layer's: {_values(scales)}"
        yield _pattern(difference, words, scales, edit)


def _pattern(difference: Difference, about: str, scales: np.ndarray, edit: Edit) -> Edit:
    fitted = {"scales": scales.ravel().tolist()}
    return difference.pattern(
        "cache scales",
        about,
        fitted,
        len(np.unique(scales)),
        families=(of.CACHE_QUANTIZATION,),
        injected=edit,
    )


def _values(scales: np.ndarray) -> str:
    if scales.size == 1:
        return readable(float(scales.flat[0]))
    return listed(scales.ravel().tolist())


def _new_slots(case: Case, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the slots that a call fills, (B, 1, S, 1)."""
    slots = np.arange(shape[2])
    before = np.array(case.lengths_before(step))[:, None]
    is_new = (slots >= before) & (slots < before + np.array(case.added(step))[:, None])
    return is_new[:, None, :, None]


def _groups(shape: tuple[int, ...], scale_per: str) -> Iterator[tuple[slice | int, ...]]:
    """Yield the indices of each group of keys or values (B, K, S, H) that shares a scale."""
    every = slice(None)
    if scale_per == "tensor":
        yield every, every, every, every
        return
    for head in range(shape[1]):
        if scale_per == "head":
            yield every, head, every, every
            continue
        for feature in range(shape[3]):
            yield every, head, every, feature


def _empty_scales(shape: tuple[int, ...], scale_per: str) -> np.ndarray:
    if scale_per == "tensor":
        return np.ones((1, 1, 1, 1))
    if scale_per == "head":
        return np.ones((1, shape[1], 1, 1))
    return np.ones((1, shape[1], 1, shape[3]))


def _factors(difference: Difference, slots: np.ndarray, scale_per: str) -> np.ndarray | None:
    """Return the factor of each group from the expected to the actual values; None if unknown."""
    shape = difference.expected.shape
    is_new = np.broadcast_to(slots, shape) & difference.compared
    factors = []
    for group in _groups(shape, scale_per):
        chosen = is_new[group]
        actual, expected = difference.actual[group][chosen], difference.expected[group][chosen]
        size = float((expected**2).sum())
        if not size:
            return None
        factors.append(float((actual * expected).sum()) / size)
    if min(factors) <= 0.0:
        return None
    mean = float(np.mean(factors))
    if np.allclose(factors, mean, rtol=SAME, atol=0.0):
        return np.full((1, 1, 1, 1), mean)
    return np.array(factors).reshape(_empty_scales(shape, scale_per).shape)


def _in_slots(case: Case, step: int, new: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return new tokens (B, K, T, H) in the slots of a call, and 0 in others, (B, K, S, H)."""
    tokens = np.zeros(shape)
    before, added = case.lengths_before(step), case.added(step)
    for b in range(case.batch):
        tokens[b, :, before[b] : before[b] + added[b]] = new[b, :, : added[b]]
    return tokens


def _scales(
    difference: Difference, slots: np.ndarray, tokens: np.ndarray, scale_per: str, dtype: str
) -> np.ndarray | None:
    """Return the scales with which new tokens become the actual values.

    None if a group has no such scale.
    """
    shape = difference.expected.shape
    is_new = np.broadcast_to(slots, shape) & difference.compared
    numbers = _positive_numbers(dtype)
    scales = []
    for group in _groups(shape, scale_per):
        chosen = is_new[group]
        scale = _scale_of(difference.actual[group][chosen], tokens[group][chosen], numbers, dtype)
        if scale is None:
            return None
        scales.append(scale)
    return np.array(scales).reshape(_empty_scales(shape, scale_per).shape)


def _positive_numbers(dtype: str) -> np.ndarray:
    """Return the positive values of a stored dtype."""
    if dtype.startswith("int"):
        return np.arange(1.0, LARGEST[dtype] + 1.0)
    # Eight mantissas cover both dtypes; rounding removes what a dtype lacks.
    exponents = np.exp2(np.arange(-16.0, 16.0))[:, None]
    candidates = to_nearest((exponents * (1.0 + np.arange(8) / 8)).ravel(), dtype)
    return np.unique(candidates[candidates > 0.0])


def _scale_of(
    actual: np.ndarray, tokens: np.ndarray, numbers: np.ndarray, dtype: str
) -> float | None:
    """Return the scale of some actual values: the largest is a stored value times the scale.

    Powers of two of a scale store the same floats. The second smallest of all that fit is returned:
    later tokens may be larger, and still do not saturate.
    """
    if actual.size < LEAST or not np.abs(actual).max() > 0.0:
        return None
    largest = np.abs(actual).max()
    scales, residuals = [], []
    for number in numbers:
        scale = largest / number
        stored = to_nearest(tokens / scale, dtype)
        is_close = np.abs(stored * scale - actual) <= CLOSE * largest
        if np.mean(is_close) >= MATCHING:
            # All values determine the scale better than the largest alone.
            size = float((stored[is_close] ** 2).sum())
            scale = float((stored[is_close] * actual[is_close]).sum()) / size
            scales.append(scale)
            residuals.append(float(np.abs(stored * scale - actual)[is_close].sum()))
    if not scales:
        return None
    nearly_least = min(residuals) + SAME * CLOSE * largest
    fitting = [scale for scale, left in zip(scales, residuals, strict=True) if left <= nearly_least]
    return fitting[-2:][0]


SAME = 1e-3
"""Relative difference at which factors, or the errors that scales leave, are equal."""

CLOSE = 2.0**-8
"""Distance of an actual value from a stored number, relative to the largest, at most: the rounding
of bfloat16. It only chooses a scale, which is then verified.
"""
