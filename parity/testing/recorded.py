"""Comparisons of stages that are recorded in another way than the reference's: judged as the diagnosis takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from parity.core.compare import Comparison
from parity.core.stages import STAGES, stage_named
from parity.diagnosis.diagnose import Diagnosis

Compare = Callable[[Mapping[str, np.ndarray]], Iterable[Comparison]]
"""Compares some stages by name, in the reference's form, with the reference."""


def as_recorded(comparisons: Iterable[Comparison], diagnosis: Diagnosis, compare: Compare) -> list[Comparison]:
    """Judge stages after undoing what the diagnosis found to be a way to record them.

    What a diagnosis does not judge, as gradients, stays as it is. If nothing is wrong, all other stages pass.
    """
    comparisons = list(comparisons)
    shapes = {each.stage: each.shape for each in comparisons if not each.passed}
    taken = {name: x for name, x in diagnosis.taken.items() if shapes.get(name) == x.shape}
    again = {each.stage: each for each in compare(taken)} if taken else {}
    return [_as_recorded(again.get(each.stage, each), diagnosis, each.stage in again) for each in comparisons]


def _as_recorded(comparison: Comparison, diagnosis: Diagnosis, is_again: bool) -> Comparison:
    stage, words = stage_named(comparison.stage), diagnosis.conventions.get(comparison.stage, "")
    if comparison.passed:
        return replace(comparison, reason=words)
    if stage.is_gradient or stage.kind not in STAGES or (diagnosis.is_wrong and (is_again or not words)):
        return comparison
    passed = replace(comparison, status="passed", reason=words or diagnosis.choice)
    # What cannot be brought into the reference's form agrees with the reference in the form that it has.
    return passed if is_again or (not words and math.isfinite(comparison.ratio)) else _without_distance(passed)


def _without_distance(comparison: Comparison) -> Comparison:
    """A comparison of a stage in another form, of which no distance in the reference's form is known."""
    nothing = {"error": 0.0, "ratio": 0.0, "max_abs": 0.0, "max_ulp": 0.0, "mismatched": 0}
    return replace(comparison, **nothing, pcc=None, worst_index={}, worst_values=None, by_position=())
