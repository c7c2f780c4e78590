"""The diagnosis of two sets of weights: a known bug in one of them, found on probe inputs.

`parity.port.conversion.differences` compares the tensors first; bugs explain what no pattern does,
and have pages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.diagnose import Diagnosis, Explanation, Unknown, diagnose
from parity.measure.core import reference
from parity.measure.core.stages import run_steps
from parity.measure.core.weights import Weights
from parity.port.conversion.ulps import ways_to_fewer_bits
from parity.port.conversion.verify import probe


@np.errstate(over="ignore", invalid="ignore")
def diagnose_weights(
    weights: Weights, spec: AttentionSpec, other: Weights, other_spec: AttentionSpec
) -> Diagnosis:
    """Find the bugs in the second of two sets of weights that should hold the same attention.

    The kind is `precision` only if every differing tensor is exactly that of the first in fewer
    bits.

    Raises:
        ValueError: if the layers differ in more than their weights.
    """
    problem, other_problem = probe(weights, spec, other, other_spec)
    observed = run_steps(reference.steps(other_problem, problem.dtype))
    diagnosis = diagnose(observed, problem)
    laws = [each for each in diagnosis.explanations if each.findings is not None]
    if (
        diagnosis.is_wrong
        and (laws or diagnosis.kind != "structure")
        and (ways := _common_ways(weights, other))
    ):
        return _rounded(diagnosis, ways)
    if diagnosis.kind != "precision":
        return diagnosis
    if laws:
        return replace(diagnosis, kind="structure")
    unknowns = diagnosis.unknowns or [Unknown(diagnosis.stage, diagnosis.error, diagnosis.ratio)]
    return replace(diagnosis, kind="unknown", explanations=[], unknowns=unknowns)


def _common_ways(weights: Weights, other: Weights) -> list[str]:
    """Return the descriptions in which every differing tensor is exactly that of the first weights
    in fewer bits.
    """
    differing = [
        name for name, x in weights.items() if not np.array_equal(x, other[name], equal_nan=True)
    ]
    ways = [ways_to_fewer_bits(weights[name], other[name]) for name in differing]
    common = [way for way in ways[0] if all(way in each for each in ways)] if ways else []
    return sorted(common, key=lambda way: "TF32" in way)  # usual dtypes of weights first


def _rounded(diagnosis: Diagnosis, ways: list[str]) -> Diagnosis:
    """Return the diagnosis of weights in fewer bits, by the ways in which they may have been
    rounded.
    """
    way, *others = [(f"the weights are {words}", f"weights-{_dtype(words)}") for words in ways]
    found = Explanation(
        diagnosis.stage,
        (diagnosis.stage,),
        (way[1],),
        way[0],
        ("keep the weights in the dtype of training, or compare with the rounded weights",),
        ("low-precision",),
        diagnosis.error,
        0.0,
        0.0,
        diagnosis.ratio,
        tuple(about for about, _ in others),
    )
    return replace(diagnosis, kind="precision", explanations=[found], unknowns=[])


def _dtype(words: str) -> str:
    """Return the dtype of `rounded to bfloat16`, as in the names of bugs."""
    return words.split(" to ")[1].split()[0].lower()
