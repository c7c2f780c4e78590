"""The gradients of a tapped training step: of a layer whose forward pass is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parity.explain.diagnosis.diagnose import Diagnosis, diagnose
from parity.explain.diagnosis.tapped import Sequences
from parity.measure.core.compare import Comparison, Label, first_difference
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference


def problem_with_cotangent(sequences: Sequences, problem: Problem) -> Problem | None:
    """Return the problem whose gradients a recording has; None if it has none to compare.

    Keys in a cache belong to several calls.
    """
    if len(sequences.chunks) > 1 or sequences.is_cross or not sequences.gradients:
        return None
    if problem.spec.latent is not None or sequences.must_be_stepped(problem.spec):
        return None
    cotangent = sequences.values["grad.output"]
    return replace(problem, inputs={**problem.inputs, "cotangent": cotangent})


def compared_gradients(
    problems: Sequence[tuple[Sequences, Problem]],
    module: str,
    arithmetic: str,
    *,
    scales_queries: bool,
    diagnoses: bool,
) -> tuple[list[Comparison], Diagnosis | None]:
    """Return the comparisons of the gradients of a layer, and the diagnosis of the first wrong one.

    Args:
        problems: recorded sequences, and their problems.
        module: name of the layer's class.
        arithmetic: rounding of a right layer.
        scales_queries: whether the layer scales its queries before they are recorded.
        diagnoses: whether to search for bugs.
    """
    comparisons: list[Comparison] = []
    diagnosis: Diagnosis | None = None
    for sequences, forward in problems:
        problem = problem_with_cotangent(sequences, forward)
        if problem is None:
            continue
        gradients = sequences.gradients
        if scales_queries:
            gradients.pop("grad.q", None)
        reference = Reference(problem, True, frozenset(gradients))
        of_sequences: list[Comparison] = []
        for name in reference.accumulated:
            if name in gradients:
                label = Label(problem.case.name, module, problem.dtype, name)
                of_sequences.append(reference.compare(gradients[name], label, arithmetic))
        comparisons += of_sequences
        if not diagnoses or diagnosis is not None or first_difference(of_sequences) is None:
            continue
        end = "output" if "output" in sequences.values else "context"
        observed = {end: sequences.values[end], **gradients}
        diagnosis = diagnose(observed, problem, arithmetic=arithmetic)
    return comparisons, diagnosis
