"""Parts of a layer that another stands in for: the stage is computed again with each, and with numbers fitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from parity.core.problem import Problem
from parity.diagnosis.laws import changes
from parity.diagnosis.laws.pages import with_families
from parity.diagnosis.laws.record import Law, Seen
from parity.diagnosis.laws.words import listed, said
from parity.diagnosis.mistakes import families as of
from parity.diagnosis.mistakes.record import Change

Recomputed = Callable[[Change], np.ndarray]
"""Computes the stage with a part changed, from the same stages before it; TimeoutError if no time is left."""

MOST_TOLD = 3
"""Parts that are told where several explain a stage."""

TIMES = (-1.0, 0.0, 2.0, 0.5)
"""What a weight may be multiplied by, before any number is fitted."""

STEPS = 6
"""Of Gauss and Newton."""


def parts(seen: Seen, recomputed: Recomputed) -> Iterator[Law]:
    """The parts that would explain the stage, each of them alone."""
    problem = seen.problem
    if problem is None or not np.isfinite(seen.expected).all():
        return
    again = _Again(seen, recomputed)
    try:
        yield from _told(again, problem)
    except TimeoutError:
        return


def _told(again: _Again, problem: Problem) -> Iterator[Law]:
    named = [name for name in problem.weights if again.moves(name)]
    groups = {
        "weight": changes.weights(problem, named),
        "input": changes.inputs(problem),
        "mask": changes.masks_and_biases(problem),
        "product": changes.products(problem),
    }
    tried = ((name, *part) for name, group in groups.items() for part in group)
    spec = problem.spec
    found = (
        with_families(Law(name, words, change=change), spec, *([] if family is None else [family]))
        for name, words, change, family in tried
        if again.explains(change)
    )
    told = list(islice(found, MOST_TOLD))
    yield from told
    if not told:
        yield from again.multiplied(named)
        yield from again.met()


class _Again:
    """What a stage is with parts of the layer changed."""

    def __init__(self, seen: Seen, recomputed: Recomputed) -> None:
        self.seen, self._recomputed = seen, recomputed
        self._size = float(np.sqrt(np.mean(seen.expected**2)))

    def stage(self, change: Change) -> np.ndarray | None:
        """The stage; None where there is no such layer, or nothing comes of the change."""
        try:
            with np.errstate(all="ignore"):
                x = np.asarray(self._recomputed(change), np.float64)
        except (ValueError, IndexError):  # what does not fit
            return None
        return x if x.shape == self.seen.expected.shape and not np.array_equal(x, self.seen.expected) else None

    def moves(self, name: str) -> bool:
        """Whether the stage depends on a weight."""
        x = self.stage(changes.multiple(name, 2.0))
        return x is not None and not bool((np.abs(x - self.seen.expected) <= self.seen.allowed["max"]).all())

    def explains(self, change: Change) -> bool:
        """Whether a change leaves nothing but rounding."""
        x = self.stage(change)
        if x is None:
            return False
        gain = float(np.sqrt(np.mean(x**2))) / self._size if self._size else 1.0
        return self.seen.holds(x, max(1.0, gain))

    def multiplied(self, names: list[str]) -> Iterator[Law]:
        """The weights that another multiple of them would explain."""
        for name in names:
            times = next((x for x in TIMES if self.explains(changes.multiple(name, x))), None)
            times = self._fitted(name) if times is None and self.seen.is_enough(1) else times
            if times is not None:
                words = f"{name} is {said(times)} times what it is"
                numbers = {"weight": name, "factor": times}
                law = Law("multiple", words, numbers, int(times not in TIMES), change=changes.multiple(name, times))
                family = changes.family_of(name)
                problem = self.seen.problem
                is_of_one = family is not of.SWAPPED  # a gain of a projection has no page
                yield with_families(law, problem.spec, family) if is_of_one and problem is not None else law

    def _fitted(self, name: str) -> float | None:
        """By Gauss and Newton, as long as each step takes most of the error away."""
        times, step, seen, here = 1.0, 1e-5, self.seen, self.seen.expected
        left = float(np.sum((seen.actual - here) ** 2)) if np.isfinite(seen.actual).all() else np.nan
        for _ in range(STEPS):
            there = self.stage(changes.multiple(name, times + step))
            if there is None or not np.isfinite(left):
                return None
            slope = (there - here) / step
            size = float((slope**2).sum())
            times += float((slope * (seen.actual - here)).sum()) / size if size else 0.0
            for value in (float(f"{times:.{digits}g}") for digits in (2, 3, 6, 17)):
                if self.explains(changes.multiple(name, value)):
                    return value
            x = self.stage(changes.multiple(name, times))
            if x is None or not (after := float(np.sum((seen.actual - x) ** 2))) < 0.25 * left:
                return None
            here, left = x, after
        return None

    def met(self) -> Iterator[Law]:
        """Query heads that meet other key/value heads than theirs: each the one that is nearest."""
        seen, problem = self.seen, self.seen.problem
        if problem is None or seen.letters[1:2] != ("N",) or seen.stage.quantity not in ("scores", "context"):
            return
        count, size = problem.spec.num_kv_heads, problem.spec.num_heads
        if count < 2 or not np.isfinite(seen.actual).all():
            return
        tried = (self.stage(changes.meeting(np.full(size, one))) for one in range(count))
        every = [seen.expected if x is None else x for x in tried]
        nearest = np.array([((x - seen.actual) ** 2).sum(axis=(0, 2, 3)) for x in every]).argmin(axis=0)
        if self.explains(changes.meeting(nearest)):
            whose = {"scores": "keys", "context": "values"}[seen.stage.quantity]
            words = f"query heads 0 … {size - 1} use the {whose} of key/value heads {listed(nearest.tolist())}"
            law = Law("heads", words, {"heads": nearest.tolist()}, size, change=changes.meeting(nearest))
            yield with_families(law, problem.spec, of.GROUPED)
