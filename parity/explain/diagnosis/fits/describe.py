"""The description of a wrong stage: where it exceeds its budget, and by which pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from mha_spec import InputError
from parity.explain.diagnosis.bugs.record import Edit, pattern
from parity.explain.diagnosis.fits.before_rope import before_rope
from parity.explain.diagnosis.fits.cache_scales import cache_scales
from parity.explain.diagnosis.fits.cache_signs import cache_signs
from parity.explain.diagnosis.fits.locations import find_location, wrong_elements
from parity.explain.diagnosis.fits.mixed import dropouts, lost_rows, mixtures
from parity.explain.diagnosis.fits.numbers import Recompute, spec_numbers
from parity.explain.diagnosis.fits.orders import orders, other_stages, shifts, transposes
from parity.explain.diagnosis.fits.parts import parts, parts_of_sample
from parity.explain.diagnosis.fits.record import Description, Difference, Location
from parity.explain.diagnosis.fits.rotation import rotations
from parity.explain.diagnosis.fits.rounding import rounded, rounding_signs
from parity.explain.diagnosis.fits.rows import attn_weights, contexts, masks, scores, weights_signs
from parity.explain.diagnosis.fits.values import (
    constants,
    factors,
    is_small_multiple,
    offsets,
)
from parity.explain.diagnosis.fits.words import is_round
from parity.explain.diagnosis.sample import sample_of
from parity.measure.core.compare import (
    NOTHING,
    axis_names,
    budget,
    dtype_of_stage,
    errors_of,
    slope,
    whole_rows,
)
from parity.measure.core.problem import Problem
from parity.measure.core.stages import stage_named
from parity.measure.core.zeros import with_wrong_zeros

GROUPS: tuple[Callable[[Difference], Iterator[Edit]], ...] = (
    constants,
    masks,
    factors,
    orders,
    transposes,
    other_stages,
    attn_weights,
    contexts,
    rounded,
    offsets,
    shifts,
    scores,
    rotations,
    dropouts,
    lost_rows,
    mixtures,
)
"""The patterns; among those with equally many fitted parameters, usual ones first."""

OF_GRADIENTS = (constants, factors, orders, transposes, other_stages, rounded, offsets, shifts)
"""The patterns of gradients: they say nothing about the formula that a stage has."""

OF_SAMPLES = (constants, factors, rounded, offsets)
"""The patterns that a sample of rows and features can show: the others need the whole stage."""

IMPLIED_BY = {
    "factor": {"zeros", "cache scales"},
    "power": {"uniform"},
    "rows": {"factor"},
    "tokens and features": {"factor", "norm"},
    "heads in output": {"factor", "offset", "multiple", "weight"},
    "by distance": {"offset", "slope", "max_distance"},
    "slope": {"offset"},
    "shift": {"order", "zeros"},
    "order": {"zeros", "rotation"},
    "zeros": {"cache"},
    "reshaped": {"zeros"},
    "transposed": {"zeros"},
    "other stage": {"zeros"},
    "theta": {"rope theta", "rope exponent"},
    "rope factor": {"rope scaling"},
    "rope frequencies": {"factor"},
    "chunk instead": {"window"},
    "window instead": {"chunk"},
    "rope beta_fast": {"rope original_length", "rope factor"},
    "rope beta_slow": {"rope original_length", "rope factor"},
    "rope low_freq_factor": {"rope original_length"},
    "rope high_freq_factor": {"rope original_length"},
}
"""Patterns that are omitted if a simpler one explains the same."""

OF_SCALING = {
    "rope factor",
    "rope low_freq_factor",
    "rope high_freq_factor",
    "rope beta_fast",
    "rope beta_slow",
}
"""Patterns of fitted parameters of RoPE's scaling."""

EVERYWHERE = "everywhere"
"""The location that is a whole stage."""

PLAIN = 4
"""The largest number of fitted parameters of a pattern with a page that makes the search for parts
of the layer unnecessary.
"""

MANTISSA = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Explicit mantissa bits of the dtypes of stages."""


def describe(
    stage: str,
    actual: np.ndarray,
    expected: np.ndarray,
    allowed: Mapping[str, float],
    *,
    hidden: np.ndarray | None = None,
    problem: Problem | None = None,
    recompute: Recompute | None = None,
    others: Mapping[str, np.ndarray] | None = None,
    unused: np.ndarray | None = None,
) -> Description:
    """Describe where a stage is wrong, and by which pattern.

    Args:
        stage: its name; `STAGES` has its axes.
        actual: observed values. Rounding to bfloat16 is reported only if the dtype of the problem,
            or of these values if that is unknown, is wider.
        expected: float64, computed from the stages before it.
        allowed: errors by norm, `rms` and `max`, from `parity.measure.core.compare.budget`; 0 for
            masks and lengths.
        hidden: cells that the mask hides, (B, N, T, S), boolean, if known.
        problem: the case, weights and inputs, if known.
        recompute: computes the expected values with a change of the reference, from the same stages
            before it. With it and the problem, parameters of the specification are fitted. If no
            simple pattern fits, replacements of parts are tried.
        others: other stages by name, expected or observed, whose values this one may have.
        unused: cells that are not compared.

    Raises:
        ValueError: if the shapes of the two arrays differ.
    """
    difference = _difference(stage, actual, expected, allowed, hidden, problem, others, unused)
    if isinstance(difference, Description):
        return difference
    with np.errstate(all="ignore"):
        patterns = _patterns(difference, recompute)
        signs = tuple(_signs(difference))
    patterns = _distinct(_plausible(patterns))
    return Description(difference.location, tuple(sorted(patterns, key=_num_parameters)), signs)


def _patterns(difference: Difference, recompute: Recompute | None) -> list[Edit]:
    """Return the patterns of a stage, usual ones first."""
    is_sample = difference.problem is not None and sample_of(difference.problem) is not None
    groups = GROUPS
    if is_sample:
        groups = OF_SAMPLES
    if difference.stage.is_gradient:
        groups = OF_GRADIENTS
    if is_small_multiple(difference):
        # They fit any other small values, and 0.
        groups = (factors,)
    patterns = []
    for group in groups:
        patterns += group(difference)
    if difference.stage.is_gradient:
        # The pages of patterns are about stages of the same name.
        return [replace(edit, pages=(), fixes=()) for edit in patterns]
    if recompute is not None:
        patterns += spec_numbers(difference, recompute)
        patterns += cache_scales(difference, recompute)
    if is_sample:
        if recompute is not None and not patterns:
            patterns += parts_of_sample(difference, recompute)
        return patterns
    if not patterns:
        patterns += before_rope(difference)
    if recompute is not None and not _have_plain_page(patterns):
        patterns += parts(difference, recompute)
    return patterns


def _num_parameters(edit: Edit) -> int:
    return edit.parameters


def _have_plain_page(patterns: list[Edit]) -> bool:
    """Return True if a pattern with few parameters has a page: parts of the layer say no more.

    Slopes that are added to scores are no such pattern: ALiBi's own may follow a formula.
    """
    return any(
        edit.parameters <= PLAIN and edit.pages and edit.name != "slope"
        for edit in _distinct(patterns)
    )


def location_of(
    stage: str,
    actual: np.ndarray,
    expected: np.ndarray,
    same_precision: np.ndarray,
    *,
    problem: Problem,
    arithmetic: str = "ieee",
    unused: np.ndarray | None = None,
) -> Description:
    """Describe where a stage is wrong and how much, in time that allows a whole large layer.

    Args:
        stage, actual, expected, unused: as in `describe`.
        same_precision: the stage of the reference in the dtype of the problem, which determines the
            budget.
        problem: the case, weights and inputs.
        arithmetic: arithmetic of the hardware.
    """
    if stage_named(stage).is_exact:
        allowed = NOTHING
    else:
        allowed = budget(
            expected, same_precision, problem.dtype, arithmetic=arithmetic, stage=stage
        )
    difference = _difference(stage, actual, expected, allowed, None, problem, None, unused)
    if isinstance(difference, Description):
        return difference
    with np.errstate(all="ignore"):
        return Description(difference.location, (), tuple(_signs(difference)))


def _difference(
    stage: str,
    actual: np.ndarray,
    expected: np.ndarray,
    allowed: Mapping[str, float],
    hidden: np.ndarray | None,
    problem: Problem | None,
    others: Mapping[str, np.ndarray] | None,
    unused: np.ndarray | None,
) -> Difference | Description:
    """Return the values of a stage and its location; the whole description if no element is wrong
    by itself.
    """
    if actual.shape != expected.shape:
        raise InputError(
            "actual", f"have the shape of expected, {expected.shape}", actual=actual.shape
        )
    dtype, spec = actual.dtype, None
    if problem is not None:
        dtype, spec = dtype_of_stage(stage, problem.dtype), problem.spec
    known_stage = stage_named(stage)
    actual, expected = whole_rows(actual, stage).astype(np.float64), expected.astype(np.float64)
    if unused is not None:
        actual = np.where(unused, expected, actual)
    errors = errors_of(actual, expected)
    bad, box = wrong_elements(errors, allowed)
    if not bad.any():
        errors = with_wrong_zeros(errors, actual, expected, allowed)
        bad, box = wrong_elements(errors, allowed)
    if not bad.any():
        return _without_wrong_elements(actual, expected, allowed)
    letters = axis_names(stage, expected.ndim)
    location, part = find_location(known_stage, letters, bad, box, hidden, spec)
    if unused is not None:
        part = part & ~unused
    return Difference(
        known_stage,
        letters,
        actual,
        expected,
        allowed,
        errors,
        bad,
        box,
        part,
        location,
        hidden,
        problem,
        others or {},
        MANTISSA.get(dtype.name, 52),
        unused,
    )


def _without_wrong_elements(
    actual: np.ndarray, expected: np.ndarray, allowed: Mapping[str, float]
) -> Description:
    """Describe a stage of which no element is wrong by itself."""
    gain = _gain(actual, expected, allowed)
    if gain is None:
        return Description(Location("no single element is over its budget", size=expected.size))
    return Description(Location(EVERYWHERE, wrong=expected.size, size=expected.size), (gain,))


def _signs(difference: Difference) -> Iterator[str]:
    """Yield unexpected properties of the actual values, which explain nothing by themselves."""
    yield from _nan(difference)
    yield from weights_signs(difference)
    yield from cache_signs(difference)
    if not difference.stage.is_exact:
        yield from rounding_signs(difference)


def _gain(actual: np.ndarray, expected: np.ndarray, allowed: Mapping[str, float]) -> Edit | None:
    """Return the common factor of all values if the rounding of single ones hides it; None if the
    slope is allowed.
    """
    known = np.isfinite(actual) & np.isfinite(expected)
    if "slope" not in allowed or slope(actual, expected, known) <= allowed["slope"]:
        return None
    x = expected[known]
    factor = float((actual[known] * x).sum() / (x * x).sum())
    return pattern(
        "gain",
        f"all values together are {factor:.8g} times what they should be",
        {"factor": factor},
        1,
    )


def _plausible(patterns: list[Edit]) -> list[Edit]:
    """Return the patterns without implausible parameters of RoPE's scaling, if its frequencies are
    known exactly.

    If a scaling changes one frequency, any of its parameters can be fitted to it.
    """
    names = [edit.name for edit in patterns]
    if "rope frequencies" not in names:
        return patterns
    most_digits = 3
    if len(OF_SCALING.intersection(names)) > 1:
        most_digits = 2
    plausible = []
    for edit in patterns:
        if edit.name not in OF_SCALING or is_round(edit.fitted["value"], most_digits):
            plausible.append(edit)
    return plausible


def _distinct(patterns: list[Edit]) -> list[Edit]:
    """Return the patterns without those that explain the same as a simpler one, with more
    parameters.
    """
    names = {edit.name for edit in patterns}
    return [edit for edit in patterns if not names & IMPLIED_BY.get(edit.name, set())]


def _nan(difference: Difference) -> Iterator[str]:
    """Yield the location of unexpected NaN."""
    lost = np.isnan(difference.actual) & ~np.isnan(difference.expected)
    if not lost.any():
        return
    _, box = wrong_elements(np.where(lost, np.inf, 0.0), difference.allowed)
    location, _ = find_location(difference.stage, difference.letters, lost, box, difference.hidden)
    yield f"{location.wrong} of {location.size} elements are NaN: {location.words}"
