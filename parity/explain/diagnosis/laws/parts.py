"""Parts of a layer that another one replaces: the stage is computed again with each, and with
fitted numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Edit, pattern
from parity.explain.diagnosis.laws import changes
from parity.explain.diagnosis.laws.blocks import blocks
from parity.explain.diagnosis.laws.cache_parts import cache_parts
from parity.explain.diagnosis.laws.changes import Part
from parity.explain.diagnosis.laws.distance_parts import alibi_numbers, alibi_parts
from parity.explain.diagnosis.laws.fits import Fitted, Number, Recompute, Tried
from parity.explain.diagnosis.laws.norm_parts import norm_numbers, norm_parts
from parity.explain.diagnosis.laws.pages import with_families
from parity.explain.diagnosis.laws.record import Seen
from parity.explain.diagnosis.laws.rope_parts import rope_parts
from parity.explain.diagnosis.laws.softmax import softmax_numbers
from parity.explain.diagnosis.laws.words import listed, readable_apart
from parity.measure.core.problem import Problem

MOST_PARTS = 3
"""The number of parts that are reported if several explain a stage."""

LEAST_VALUES = 8
"""The number of wrong values in some slices that tells a part of the layer."""

TIMES = (-1.0, 0.0, 2.0, 0.5)
"""Multiples of a weight that are tried before a number is fitted."""


def parts(seen: Seen, recompute: Recompute) -> Iterator[Edit]:
    """Yield the parts that would each explain the stage."""
    problem = seen.problem
    if problem is None or not np.isfinite(seen.expected).all():
        return
    if not np.isfinite(seen.actual[seen.part]).any():
        return  # Many parts cause NaN: they cannot be distinguished.
    try:
        yield from _weights_and_parts(Tried(seen, recompute), problem)
    except TimeoutError:
        return


def _weights_and_parts(tried: Tried, problem: Problem) -> Iterator[Edit]:
    named = [name for name in problem.weights if _moves(tried, name)]
    groups = {
        "weight": changes.weights(problem, named),
        "input": changes.inputs(problem),
        "mask": changes.masks_and_biases(problem),
        "product": changes.products(problem),
        "rotation": rope_parts(problem),
        "norm": norm_parts(problem),
        "alibi": alibi_parts(problem),
        "cache": cache_parts(problem, tried.seen.stage.quantity),
        "blocks": blocks(problem, tried.seen.stage.quantity),
        "head": changes.single_heads(problem),
    }
    found_parts = list(islice(_explaining(tried, groups, problem), MOST_PARTS))
    yield from found_parts
    if not found_parts:
        for name in named:
            yield from _multiplied(tried, problem, name)
        yield from _met(tried, problem)
        yield from softmax_numbers(tried, problem)
        yield from norm_numbers(tried, problem)
        yield from alibi_numbers(tried, problem)


def _explaining(
    tried: Tried, groups: Mapping[str, Iterator[Part]], problem: Problem
) -> Iterator[Edit]:
    """Yield the parts that explain the stage, in the whole layer or in the wrong slices alone."""
    is_in_part = _is_in_some_slices(tried.seen)
    for name, group in groups.items():
        for words, change, family in group:
            families = [] if family is None else [family]
            if tried.explains(change):
                law = pattern(name, words, injected=change)
                yield with_families(law, problem.spec, *families)
            elif is_in_part and tried.explains_in_part(change):
                law = pattern(name, f"there alone, {words}")
                yield with_families(law, problem.spec, *families)


def _is_in_some_slices(seen: Seen) -> bool:
    """Return True if only some heads or sequences are wrong, and enough of their values to tell."""
    if seen.stage.is_exact or seen.expected.ndim != 4 or not seen.is_enough(LEAST_VALUES):
        return False
    return any(len(seen.box[axis]) < seen.expected.shape[axis] for axis in (0, 1))


def _moves(tried: Tried, name: str) -> bool:
    """Return True if the stage depends on a weight."""
    x, seen = tried.stage(changes.multiple(name, 2.0)), tried.seen
    return x is not None and not bool((np.abs(x - seen.expected) <= seen.allowed["max"]).all())


def _multiplied(tried: Tried, problem: Problem, name: str) -> Iterator[Edit]:
    """Return a multiple of a weight that would explain the stage."""
    is_whole = not (tried.seen.is_enough(1) and np.isfinite(tried.seen.actual).all())
    number = Number("multiple", name, 1.0, TIMES, lambda x: changes.multiple(name, x), is_whole)
    for times in Fitted(tried, number).values():
        words = f"{name} is multiplied by {readable_apart(times or 0.0, 1.0)[0]}"
        numbers = {"weight": name, "factor": times}
        law = pattern(
            "multiple", words, numbers, int(times not in TIMES), injected=number.made(times)
        )
        family = changes.family_of(name)
        if family is of.SWAPPED:
            # Without its weights, any stage may be lost.
            families = [of.FACTOR] if times else []
        else:
            families = [family]
        yield with_families(law, problem.spec, *families)


def _met(tried: Tried, problem: Problem) -> Iterator[Edit]:
    """Yield query heads that use other key/value heads: the nearest one for each."""
    seen, count, size = tried.seen, problem.spec.num_kv_heads, problem.spec.num_heads
    if seen.letters[1:2] != ("N",) or seen.stage.quantity not in ("scores", "context"):
        return
    if count < 2 or not np.isfinite(seen.actual).all():
        return
    stages = (tried.stage(changes.meeting(np.full(size, one))) for one in range(count))
    every = [seen.expected if x is None else x for x in stages]
    nearest = np.array([((x - seen.actual) ** 2).sum(axis=(0, 2, 3)) for x in every]).argmin(axis=0)
    if tried.explains(changes.meeting(nearest)):
        whose = {"scores": "keys", "context": "values"}[seen.stage.quantity]
        words = (
            f"query heads 0 … {size - 1} use the {whose} of key/value heads "
            f"{listed(nearest.tolist())}"
        )
        law = pattern(
            "heads", words, {"heads": nearest.tolist()}, size, injected=changes.meeting(nearest)
        )
        yield with_families(law, problem.spec, of.GROUPED)
