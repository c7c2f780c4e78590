"""Why two sets of weights differ: a known mistake in one of them, found on probe inputs.

What `parity.conversion.differences` says of the tensors comes first; mistakes explain what no law does, and have pages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mha_spec import AttentionSpec
from parity.conversion.verify import probe
from parity.core import reference
from parity.core.stages import run_steps
from parity.core.weights import Weights
from parity.diagnosis.diagnose import Diagnosis, Unknown, diagnose


def diagnose_weights(weights: Weights, spec: AttentionSpec, other: Weights, other_spec: AttentionSpec) -> Diagnosis:
    """Find the mistakes in the second of two sets of weights that should hold the same attention.

    Its kind is never `rounding` nor `precision`: both are computed alike, so that nothing but the weights differs.

    Raises:
        ValueError: if the layers differ in more than their weights.
    """
    problem, other_problem = probe(weights, spec, other, other_spec)
    with np.errstate(over="ignore", invalid="ignore"):
        observed = run_steps(reference.steps(other_problem, problem.dtype))
    diagnosis = diagnose(observed, problem)
    if diagnosis.kind not in ("rounding", "precision"):
        return diagnosis
    unknowns = diagnosis.unknowns or [Unknown(diagnosis.stage, diagnosis.error, diagnosis.ratio)]
    return replace(diagnosis, kind="unknown", explanations=[], unknowns=unknowns)
