"""Traces of one problem: their errors, their distance from each other, and the diagnosis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parity.explain.diagnosis.diagnose import Diagnosis, Finding, diagnose_trace
from parity.measure.core.compare import Comparison, first_difference
from parity.measure.core.trace import Reference, Trace, judge


def judge_together(traces: Sequence[Trace]) -> list[list[Comparison]]:
    """Compare each trace with the reference, which is computed once for all."""
    expected = Reference(traces[0].problem, any(trace.with_gradients for trace in traces))
    return [judge(trace, expected) for trace in traces]


def distances(one: Trace, other: Trace, sides: Sequence[Sequence[Comparison]]) -> dict[str, float]:
    """Return the largest difference between two traces, stage by stage; infinite if a stage cannot
    be compared.
    """
    a, b = one.accumulated, other.accumulated

    def distance(stage: str) -> float:
        if stage not in a or stage not in b or a[stage].shape != b[stage].shape:
            return float("inf")
        return float(
            np.abs(a[stage].astype(np.float64) - b[stage].astype(np.float64)).max(initial=0.0)
        )

    with np.errstate(invalid="ignore"):
        return {
            comparison.stage: distance(comparison.stage) for side in sides for comparison in side
        }


def diagnose_worst(traces: Sequence[Trace], sides: Sequence[Sequence[Comparison]]) -> Diagnosis:
    """Diagnose the trace whose first wrong stage comes first.

    Args:
        traces: of one problem.
        sides: the comparisons of each with the reference.
    """
    wrong = [first_difference(side) for side in sides]
    order = {comparison.stage: place for side in sides for place, comparison in enumerate(side)}
    places = [len(order) if each is None else order[each.stage] for each in wrong]
    worst = places.index(min(places))
    diagnosis, difference = diagnose_trace(traces[worst]), wrong[worst]
    if diagnosis.is_wrong or difference is None or difference.stage in diagnosis.conventions:
        return diagnosis
    # A gradient, a dtype or a missing stage: no bug in the formulas would explain it.
    about = (difference.stage, difference.error, difference.worse_ratio)
    return Diagnosis(*about, findings=[Finding(*about)])
