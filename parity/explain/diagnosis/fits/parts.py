"""Parts of a layer that another one replaces: the stage is computed again with each, and with
fitted parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.families import Families
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.fits import changes
from parity.explain.diagnosis.fits.blocks import blocks
from parity.explain.diagnosis.fits.cache_parts import cache_parts
from parity.explain.diagnosis.fits.distance_parts import alibi_numbers, alibi_parts
from parity.explain.diagnosis.fits.norm_parts import norm_numbers, norm_parts
from parity.explain.diagnosis.fits.numbers import Fitted, Number, Recompute, StageTrial
from parity.explain.diagnosis.fits.out_heads import out_heads
from parity.explain.diagnosis.fits.packings import packings
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.rope_parts import rope_parts
from parity.explain.diagnosis.fits.softmax import softmax_numbers
from parity.explain.diagnosis.fits.words import listed, readable_apart
from parity.measure.core.problem import Problem

MOST_PARTS = 3
"""The number of parts that are reported if several explain a stage."""

LEAST_VALUES = 8
"""The number of wrong values in some slices that tells a part of the layer."""

TIMES = (-1.0, 0.0, 2.0, 0.5)
"""Multiples of a weight that are tried before a number is fitted."""


def parts(difference: Difference, recompute: Recompute) -> Iterator[Edit]:
    """Yield the parts that would each explain the stage."""
    problem = difference.problem
    if problem is None or not np.isfinite(difference.expected).all():
        return
    if not np.isfinite(difference.actual[difference.part]).any():
        return  # many parts cause NaN: they cannot be distinguished
    try:
        yield from _weights_and_parts(StageTrial(difference, recompute), problem)
    except TimeoutError:
        return


def parts_of_sample(difference: Difference, recompute: Recompute) -> Iterator[Edit]:
    """Yield the parts that a sample of tokens can show: rotations and packed weights in queries,
    keys and values, where no token depends on another one; and ALiBi after them.
    """
    problem = difference.problem
    if problem is None or not np.isfinite(difference.expected).all():
        return
    trial = StageTrial(difference, recompute)
    if difference.stage.quantity in ("q", "k", "v"):
        candidates = chain(rope_parts(problem), packings(problem))
    else:
        candidates = alibi_parts(problem)
    try:
        explaining = [edit for edit in candidates if trial.explains(edit)]
        if not explaining and difference.stage.quantity not in ("q", "k", "v"):
            explaining = list(alibi_numbers(trial, problem))
    except TimeoutError:
        return
    yield from explaining


def _weights_and_parts(trial: StageTrial, problem: Problem) -> Iterator[Edit]:
    names = [name for name in problem.weights if _depends_on(trial, name)]
    quantity = trial.difference.stage.quantity
    candidates = chain(
        changes.weights(problem, names),
        changes.inputs(problem),
        changes.masks_and_biases(problem),
        changes.products(problem),
        rope_parts(problem),
        norm_parts(problem),
        alibi_parts(problem),
        cache_parts(problem, quantity),
        blocks(problem, quantity),
        changes.single_heads(problem),
    )
    explaining_parts = list(islice(_explaining(trial, candidates), MOST_PARTS))
    if not explaining_parts:
        # One stage may fit several orders: the others decide.
        explaining_parts = [edit for edit in packings(problem) if trial.explains(edit)]
    yield from explaining_parts
    if not explaining_parts:
        for name in names:
            yield from _multiplied(trial, name)
        yield from _other_kv_heads(trial, problem)
        yield from out_heads(trial, problem)
        yield from softmax_numbers(trial, problem)
        yield from norm_numbers(trial, problem)
        yield from alibi_numbers(trial, problem)


def _explaining(trial: StageTrial, candidates: Iterator[Edit]) -> Iterator[Edit]:
    """Yield the parts that explain the stage, in the whole layer or in the wrong slices alone."""
    is_in_part = _is_in_some_slices(trial.difference)
    explains_all = False
    in_part: list[Edit] = []
    for edit in candidates:
        x = trial.stage(edit)
        if trial.is_enough(x):
            explains_all = True
            yield edit
        elif is_in_part and trial.is_enough_in_part(x):
            # The reference has no such layer: the edit describes this stage alone.
            in_part.append(replace(edit, about=f"there alone, {edit.about}", overrides={}))
    # A change of the whole layer says more.
    if not explains_all:
        yield from in_part


def _is_in_some_slices(difference: Difference) -> bool:
    """Return True if only some heads or sequences are wrong, and enough of their values to tell."""
    if (
        difference.stage.is_exact
        or difference.expected.ndim != 4
        or not difference.is_enough(LEAST_VALUES)
    ):
        return False
    return any(len(difference.box[axis]) < difference.expected.shape[axis] for axis in (0, 1))


def _depends_on(trial: StageTrial, name: str) -> bool:
    """Return True if the stage depends on a weight."""
    x, difference = trial.stage(changes.multiple(name, 2.0)), trial.difference
    if x is None:
        return False
    is_same = np.abs(x - difference.expected) <= difference.allowed["max"]
    return not bool(is_same.all())


def _multiplied(trial: StageTrial, name: str) -> Iterator[Edit]:
    """Yield a multiple of a weight that would explain the stage."""
    is_whole = not (trial.difference.is_enough(1) and np.isfinite(trial.difference.actual).all())
    edit = partial(changes.multiple, name)
    number = Number("multiple", name, 1.0, TIMES, edit, is_whole=is_whole)
    for times in Fitted(trial, number).numbers():
        yield trial.difference.pattern(
            "multiple",
            f"{name} is multiplied by {readable_apart(times, 1.0)[0]}",
            {"weight": name, "factor": times},
            int(times not in TIMES),
            families=_families_of_multiple(name, times),
            injected=number.edit(times),
        )


def _families_of_multiple(name: str, times: float) -> Families:
    family = changes.family_of(name)
    if family is not of.SWAPPED:
        return (family,)
    if times:
        return (of.FACTOR,)
    return ()  # without its weights, any stage may be lost


def _other_kv_heads(trial: StageTrial, problem: Problem) -> Iterator[Edit]:
    """Yield query heads that use other key/value heads: the nearest one for each."""
    difference, count, size = trial.difference, problem.spec.num_kv_heads, problem.spec.num_heads
    if difference.letters[1:2] != ("N",) or difference.stage.quantity not in ("scores", "context"):
        return
    if count < 2 or not np.isfinite(difference.actual).all():
        return
    distances = []
    for kv_head in range(count):
        x = trial.stage(changes.using_kv_heads(np.full(size, kv_head)))
        if x is None:
            x = difference.expected
        distances.append(((x - difference.actual) ** 2).sum(axis=(0, 2, 3)))
    nearest = np.array(distances).argmin(axis=0)
    change = changes.using_kv_heads(nearest)
    if not trial.explains(change):
        return
    whose = "keys"
    if difference.stage.quantity == "context":
        whose = "values"
    words = (
        f"query heads 0 … {size - 1} use the {whose} of key/value heads {listed(nearest.tolist())}"
    )
    yield difference.pattern(
        "heads",
        words,
        {"heads": nearest.tolist()},
        size,
        families=(of.GROUPED,),
        injected=change,
    )
