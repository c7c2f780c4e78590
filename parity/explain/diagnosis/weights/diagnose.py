"""The diagnosis of two sets of weights: a known bug in one of them, found on probe inputs.

`differences` compares the tensors first; bugs explain what no relation of two tensors does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.bugs.families import FUSED_QKV, ROUNDED_WEIGHTS
from parity.explain.diagnosis.bugs.record import Edit, Edits
from parity.explain.diagnosis.bugs.weights import misread
from parity.explain.diagnosis.diagnose import Diagnosis, Finding, diagnose_stages
from parity.explain.diagnosis.remembered import RememberingReference
from parity.explain.diagnosis.weights.packings import find_packing_error
from parity.explain.diagnosis.weights.ulps import ways_to_fewer_bits
from parity.explain.diagnosis.weights.verify import probe
from parity.measure.core import reference
from parity.measure.core.problem import Problem
from parity.measure.core.stages import run_steps
from parity.measure.core.weights import Weights


@np.errstate(over="ignore", invalid="ignore")
def diagnose_weights(
    weights: Weights, spec: AttentionSpec, other: Weights, other_spec: AttentionSpec
) -> Diagnosis:
    """Find the bugs in the second of two sets of weights that should hold the same attention.

    The kind is `precision` only if every differing tensor is exactly the first one in fewer bits.

    Raises:
        ValueError: if the layers differ in more than their weights.

    Example:
        >>> spec = parity.AttentionSpec(64, 8)
        >>> weights = parity.random_weights(spec)
        >>> wrong = weights | {"out_proj.weight": weights["out_proj.weight"].T}
        >>> parity.diagnose_weights(weights, spec, wrong, spec).likely_bug
        'out_proj-transposed'
    """
    problem, other_problem = probe(weights, spec, other, other_spec)
    observed = run_steps(reference.steps(other_problem, problem.dtype))
    diagnosis = diagnose_stages(
        observed,
        RememberingReference(problem, stages=frozenset(observed)),
        "ieee",
        candidates=_misread(problem, other_problem),
    )
    if not diagnosis.is_wrong:
        return diagnosis
    if any(finding.is_fitted for finding in diagnosis.findings) or diagnosis.kind != "structure":
        ways = _common_ways(weights, other)
        if ways:
            return _rounded(diagnosis, ways)
    # The weights are not the others in fewer bits, whatever the stages look like.
    findings = [_without_loss(finding) for finding in diagnosis.findings]
    return replace(diagnosis, findings=findings)


def _misread(problem: Problem, other_problem: Problem) -> Edits:
    """Return the order of rows across q, k and v in the second weights, as an edit; empty if rows
    stay in their tensors.
    """
    packing = find_packing_error(problem.weights, other_problem.weights, problem.spec)
    if packing is None or not packing.is_mixed:
        return ()
    fix = packing.fix or FUSED_QKV.fix
    return (misread(packing.bug, packing.order, packing.names, packing.words, fix),)


def _without_loss(finding: Finding) -> Finding:
    """Return a finding, unexplained if it is a loss of precision."""
    if not finding.is_loss:
        return finding
    return Finding(finding.stage, finding.error_before, finding.ratio_before)


def _common_ways(weights: Weights, other: Weights) -> list[str]:
    """Return the descriptions in which every differing tensor is exactly the one of the first
    weights in fewer bits.
    """
    common: list[str] | None = None
    for name, x in weights.items():
        if np.array_equal(x, other[name], equal_nan=True):
            continue
        ways = ways_to_fewer_bits(x, other[name])
        if common is not None:
            ways = [way for way in common if way in ways]
        common = ways
    return sorted(common or [], key=lambda way: "TF32" in way)  # usual dtypes of weights first


def _rounded(diagnosis: Diagnosis, ways: list[str]) -> Diagnosis:
    """Return the diagnosis of weights in fewer bits, by the ways in which they may have been
    rounded.
    """
    way, *others = ways
    loss = Edit(
        f"weights-{_dtype(way)}",
        f"the weights are {way}",
        pages=(ROUNDED_WEIGHTS.page,),
        fixes=(ROUNDED_WEIGHTS.fix,),
        is_loss=True,
    )
    finding = Finding(
        diagnosis.stage,
        diagnosis.error,
        diagnosis.ratio,
        (loss,),
        error=0.0,
        ratio=0.0,
        stages=(diagnosis.stage,),
        others=tuple(f"the weights are {other}" for other in others),
    )
    return replace(diagnosis, findings=[finding])


def _dtype(words: str) -> str:
    """Return the dtype of `rounded to bfloat16`, as in the names of bugs."""
    return words.split(" to ")[1].split()[0].lower()
