"""Traces of one problem: their errors, their distance from each other, and the diagnosis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parity.explain.diagnosis.diagnose import SECONDS, Diagnosis, Finding, diagnose_trace
from parity.measure.core.compare import Comparison, first_difference
from parity.measure.core.trace import Reference, Trace, compare_trace


def compare_together(traces: Sequence[Trace]) -> list[list[Comparison]]:
    """Compare each trace with the reference, which is computed once for all."""
    expected = Reference(traces[0].problem, any(trace.with_gradients for trace in traces))
    return [compare_trace(trace, expected) for trace in traces]


def distances(one: Trace, other: Trace, sides: Sequence[Sequence[Comparison]]) -> dict[str, float]:
    """Return the largest difference between two traces, stage by stage; infinite if a stage cannot
    be compared.
    """
    distances: dict[str, float] = {}
    for comparisons in sides:
        for comparison in comparisons:
            stage = comparison.stage
            distances[stage] = _distance(one.accumulated.get(stage), other.accumulated.get(stage))
    return distances


def _distance(one: np.ndarray | None, other: np.ndarray | None) -> float:
    """Return the largest difference between two arrays; infinite if they cannot be compared."""
    if one is None or other is None or one.shape != other.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        difference = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return float(difference.max(initial=0.0))


def diagnose_worst(
    traces: Sequence[Trace], sides: Sequence[Sequence[Comparison]], seconds: float = SECONDS
) -> Diagnosis:
    """Diagnose the trace whose first wrong stage comes first.

    Args:
        traces: traces of one problem.
        sides: the comparisons of each with the reference.
        seconds: work of the search for bugs, see `diagnose`.
    """
    order: dict[str, int] = {}
    for comparisons in sides:
        for index, comparison in enumerate(comparisons):
            order[comparison.stage] = index
    worst, difference = 0, None
    for number, comparisons in enumerate(sides):
        first = first_difference(comparisons)
        if first is None:
            continue
        if difference is None or order[first.stage] < order[difference.stage]:
            worst, difference = number, first
    diagnosis = diagnose_trace(traces[worst], seconds)
    if diagnosis.is_wrong or difference is None or difference.stage in diagnosis.conventions:
        return diagnosis
    # A gradient, a dtype or a missing stage: no bug in the formulas would explain it.
    about = (difference.stage, difference.error, difference.worse_ratio)
    agrees = diagnosis.output_agrees
    return Diagnosis(*about, findings=[Finding(*about)], output_agrees=agrees)
