"""Lost precision that explains all stages at once: imprecise products, or a whole layer in a
narrower dtype.

The size of an error proves nothing: the budget of a narrower dtype would explain nearly anything.
The reference with the loss must reproduce the values, and those of a layer in a narrower dtype must
also be numbers of that dtype.
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
from parity.measure.core.compare import SAME_PRECISION, Judgement, judged, norms_of
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
    trial: Trial, before: Mapping[str, Judgement], wrong: Sequence[str]
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
    for kind, bug in FIDELITIES.items():
        # A module's kernels may scale queries where its stage functions scale scores.
        with_loss = {
            stage: [trial.stage(stage, form, dtype, kind) for form in ((), (SCALED_QUERIES,))]
            for stage in wrong
        }
        if all(any(_falls(trial, stage, x) for x in forms) for stage, forms in with_loss.items()):
            ratio = max(trial.judgement(stage, (), kind=kind).ratio for stage in wrong)
            left = min(_rms_left(trial, first, x) for x in with_loss[first])
            return Finding(
                first,
                before[first].error,
                before[first].ratio,
                (plain(bug),),
                left,
                ratio,
                stages=tuple(wrong),
            )
    return None


def _of_the_layer(stages: Sequence[str]) -> list[str]:
    return [stage for stage in stages if not stage_named(stage).path] or list(stages)


def _falls(trial: Trial, stage: str, with_loss: np.ndarray) -> bool:
    """Return True if the reference with a loss of precision leaves a small share of the error of a
    stage.
    """
    return trial.distance(stage, with_loss) <= SHARE_LEFT * trial.distance(
        stage, trial.stage(stage)
    )


def _rms_left(trial: Trial, stage: str, with_loss: np.ndarray) -> float:
    """Return the root mean square of the error that the reference with a loss of precision leaves,
    for the report.
    """
    actual, expected = trial.compared(stage, with_loss)
    left = actual.astype(np.float64) - expected
    return norms_of(left, np.isfinite(left))["rms"]


def lost_in_dtype(
    trial: Trial, before: Mapping[str, Judgement], wrong: Sequence[str]
) -> Finding | None:
    """Find the narrower dtype in which the whole layer was computed and cast back, if there is one.

    Args:
        trial: the reference, and the observed stages.
        before: the error of each stage, computed from the observed stages before it.
        wrong: the stages that differ.
    """
    if not wrong or any(math.isinf(before[stage].ratio) for stage in wrong):
        return None
    own, first = _of_the_layer(wrong), before[wrong[0]]
    for dtype in NARROWER.get(trial.problem.dtype, ()):
        results = [stage for stage in trial.stages if stage_named(stage).quantity in RESULTS]
        if not results or not all(
            _is_of(trial.observed[stage], dtype) for stage in {*results, *own}
        ):
            continue
        allowed = {stage: trial.allowed(stage, (), dtype=dtype) for stage in own}
        shares = [
            judged(trial.observed[each], trial.stage(each), allowed[each], each).ratio
            for each in own
        ]
        if max(shares) > 1.0:
            continue
        narrow = (layer_in(trial.problem.case, dtype),)
        with_loss = {stage: trial.stage(stage, narrow, dtype) for stage in own}
        # Sums of float32 depend on their order, so only sums in a wider dtype can be reproduced.
        is_reproducible = dtype != "float32"
        if is_reproducible and not all(_falls(trial, stage, x) for stage, x in with_loss.items()):
            continue
        about = f"the whole layer is computed in {dtype} and cast back"
        fix = (
            f"compute the layer in {trial.problem.dtype}, outside of autocast, or compare in "
            f"that dtype"
        )
        loss = Edit(
            f"layer-in-{dtype}", about, pages=("low-precision",), fixes=(fix,), is_loss=True
        )
        left = _rms_left(trial, wrong[0], trial.stage(wrong[0], narrow, dtype))
        return Finding(
            wrong[0],
            first.error,
            first.ratio,
            (loss,),
            left,
            max(shares),
            stages=tuple(own),
        )
    return None


def _is_of(x: np.ndarray, dtype: str) -> bool:
    """Return True if all numbers are numbers of a dtype."""
    if not is_floating(x.dtype):
        return False
    with np.errstate(over="ignore"):
        return bool((x.astype(dtype_named(dtype)).astype(x.dtype) == x).all())
