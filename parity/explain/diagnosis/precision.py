"""Lost precision that explains all stages at once: imprecise products, or a whole layer in a
narrower dtype.

The size of an error proves nothing: the budget of a narrower dtype would explain nearly anything.
The reference with the loss must reproduce the values, and the values of a layer in a narrower dtype
must also be representable in that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from parity.explain.diagnosis.bugs import FIDELITIES
from parity.explain.diagnosis.bugs.precision import SCALED_QUERIES, layer_in
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.findings import Finding, plain
from parity.explain.diagnosis.trial import Trial
from parity.measure.core.compare import SAME_PRECISION, Deviation, deviation_of, size_of
from parity.measure.core.stages import stage_named
from parity.measure.core.weights import dtype_named, is_floating

SHARE_LEFT = 0.5
"""The share of the mean error of a stage that may remain if the reference is computed with the loss
of the observed stages. For whole layers at LoFi, on the real kernels in a simulator (ttsim,
Blackhole; 4 cases, plain and fused, float32 and bfloat16 sums), 0.13 to 0.31 remained; at HiFi2,
with a fused kernel that keeps its attention weights whole, 0.43. For other causes, nearly
everything does, and for the wrong fidelity more than before.
"""

NARROWER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}
"""The narrower dtypes that a layer of a dtype may be computed in."""

RESULTS = ("q", "k", "v", "context", "output")
"""The stages whose values have the dtype of the layer; scores and attention weights may have a
wider one.
"""


def lost_in_products(
    trial: Trial, before: Mapping[str, Deviation], wrong: Sequence[str]
) -> Finding | None:
    """Find the math fidelity of Tenstorrent's matrix products that explains all stages, if there is
    one.

    Losses of other hardware are known bugs like all others.

    Args:
        trial: the reference, and the observed stages.
        before: the error of each stage, computed from the observed stages before it.
        wrong: the stages that differ.
    """
    if not trial.arithmetic.startswith("tensix"):
        return None
    dtype = SAME_PRECISION[trial.problem.dtype]
    first = wrong[0]
    for fidelity, bug in FIDELITIES.items():
        reproduced = [_with_fidelity(trial, stage, dtype, fidelity) for stage in wrong]
        if not all(
            _leaves_little(trial, stage, *forms)
            for stage, forms in zip(wrong, reproduced, strict=True)
        ):
            continue
        ratios = [trial.deviation(stage, (), arithmetic=fidelity).ratio for stage in wrong]
        return Finding(
            stage=first,
            stages=tuple(wrong),
            edits=(plain(bug),),
            error_before=before[first].error,
            error=min([_rms_left(trial, first, x) for x in reproduced[0]]),
            ratio=max(ratios),
            ratio_before=before[first].ratio,
        )
    return None


def _with_fidelity(trial: Trial, stage: str, dtype: str, fidelity: str) -> list[np.ndarray]:
    """Return a stage at a math fidelity.

    A module's kernels may scale queries where its stage functions scale scores.
    """
    return [
        trial.stage(stage, (), dtype, fidelity),
        trial.stage(stage, (SCALED_QUERIES,), dtype, fidelity),
    ]


def _of_the_layer(stages: Sequence[str]) -> list[str]:
    """Return the stages that are not of a module's own path; all of them if there are no others."""
    own_stages = [stage for stage in stages if not stage_named(stage).path]
    return own_stages or list(stages)


def _leaves_little(trial: Trial, stage: str, *with_loss: np.ndarray) -> bool:
    """Return True if the reference with a loss of precision, in one of some forms, leaves a small
    share of the error of a stage.
    """
    most = SHARE_LEFT * trial.distance(stage, trial.stage(stage))
    return any(trial.distance(stage, x) <= most for x in with_loss)


def _rms_left(trial: Trial, stage: str, with_loss: np.ndarray) -> float:
    """Return the root mean square of the error that the reference with a loss of precision leaves,
    for the report.
    """
    actual, expected = trial.compared(stage, with_loss)
    left = actual.astype(np.float64) - expected
    return size_of(left)


def lost_in_dtype(
    trial: Trial, before: Mapping[str, Deviation], wrong: Sequence[str]
) -> Finding | None:
    """Find the narrower dtype in which the whole layer was computed and cast back, if there is one.

    Args:
        trial: the reference, and the observed stages.
        before: the error of each stage, computed from the observed stages before it.
        wrong: the stages that differ.
    """
    if not wrong or any(math.isinf(before[stage].ratio) for stage in wrong):
        return None
    for dtype in NARROWER.get(trial.problem.dtype, ()):
        finding = _lost_in(dtype, trial, before, wrong)
        if finding is not None:
            return finding
    return None


def _lost_in(
    dtype: str, trial: Trial, before: Mapping[str, Deviation], wrong: Sequence[str]
) -> Finding | None:
    """Return the finding that the whole layer was computed in a narrower dtype, if it was."""
    results = [stage for stage in trial.stages if stage_named(stage).quantity in RESULTS]
    own = _of_the_layer(wrong)
    if not results:
        return None
    if not all(_is_of(trial.observed[stage], dtype) for stage in (*results, *own)):
        return None
    ratios = []
    for stage in own:
        allowed = trial.allowed(stage, (), dtype=dtype)
        deviation = deviation_of(trial.observed[stage], trial.stage(stage), allowed, stage)
        ratios.append(deviation.ratio)
    if max(ratios) > 1.0:
        return None
    in_dtype = (layer_in(trial.problem.case, dtype),)
    # Sums of float32 depend on their order, so only sums in a wider dtype can be reproduced.
    if dtype != "float32":
        for stage in own:
            if not _leaves_little(trial, stage, trial.stage(stage, in_dtype, dtype)):
                return None
    first = wrong[0]
    fix = (
        f"compute the layer in {trial.problem.dtype}, outside of autocast, or compare in that dtype"
    )
    loss = Edit(
        f"layer-in-{dtype}",
        f"the whole layer is computed in {dtype} and cast back",
        pages=("low-precision",),
        fixes=(fix,),
        is_loss=True,
    )
    return Finding(
        stage=first,
        stages=tuple(own),
        edits=(loss,),
        error_before=before[first].error,
        error=_rms_left(trial, first, trial.stage(first, in_dtype, dtype)),
        ratio=max(ratios),
        ratio_before=before[first].ratio,
    )


def _is_of(x: np.ndarray, dtype: str) -> bool:
    """Return True if all values are representable in a dtype."""
    if not is_floating(x.dtype):
        return False
    with np.errstate(over="ignore"):
        return bool((x.astype(dtype_named(dtype)).astype(x.dtype) == x).all())
