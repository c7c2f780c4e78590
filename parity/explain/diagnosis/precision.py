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
from parity.explain.diagnosis.replay import Replay
from parity.explain.diagnosis.verdicts import Explanation
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
    replay: Replay, before: Mapping[str, Judgement], wrong: Sequence[str]
) -> Explanation | None:
    """Find the math fidelity of Tenstorrent's matrix products that explains all stages, if there is
    one.

    Losses of other hardware are known bugs like all others.

    Args:
        replay: the reference, and the observed stages.
        before: the error of each stage, computed from the observed stages before it.
        wrong: the stages that differ.
    """
    if not replay.arithmetic.startswith("tensix"):
        return None
    dtype = SAME_PRECISION[replay.problem.dtype]
    first = wrong[0]
    for kind, bug in FIDELITIES.items():
        # A module's kernels may scale queries where its stage functions scale scores.
        with_loss = {
            stage: [replay.stage(stage, form, dtype, kind) for form in ((), (SCALED_QUERIES,))]
            for stage in wrong
        }
        if all(any(_falls(replay, stage, x) for x in forms) for stage, forms in with_loss.items()):
            ratio = max(replay.judgement(stage, (), kind=kind).ratio for stage in wrong)
            record = ((bug.name,), bug.about, (bug.fix,), (bug.page,))
            left = min(_rms_left(replay, first, x) for x in with_loss[first])
            return Explanation(
                first, tuple(wrong), *record, before[first].error, left, ratio, before[first].ratio
            )
    return None


def _of_the_layer(stages: Sequence[str]) -> list[str]:
    return [stage for stage in stages if not stage_named(stage).path] or list(stages)


def _falls(replay: Replay, stage: str, with_loss: np.ndarray) -> bool:
    """Return True if the reference with a loss of precision leaves a small share of the error of a
    stage.
    """
    return replay.distance(stage, with_loss) <= SHARE_LEFT * replay.distance(
        stage, replay.stage(stage)
    )


def _rms_left(replay: Replay, stage: str, with_loss: np.ndarray) -> float:
    """Return the root mean square of the error that the reference with a loss of precision leaves,
    for the report.
    """
    actual, expected = replay.compared(stage, with_loss)
    left = actual.astype(np.float64) - expected
    return norms_of(left, np.isfinite(left))["rms"]


def lost_in_dtype(
    replay: Replay, before: Mapping[str, Judgement], wrong: Sequence[str]
) -> Explanation | None:
    """Find the narrower dtype in which the whole layer was computed and cast back, if there is one.

    Args:
        replay: the reference, and the observed stages.
        before: the error of each stage, computed from the observed stages before it.
        wrong: the stages that differ.
    """
    if not wrong or any(math.isinf(before[stage].ratio) for stage in wrong):
        return None
    own, first = _of_the_layer(wrong), before[wrong[0]]
    for dtype in NARROWER.get(replay.problem.dtype, ()):
        results = [stage for stage in replay.stages if stage_named(stage).quantity in RESULTS]
        if not results or not all(
            _is_of(replay.observed[stage], dtype) for stage in {*results, *own}
        ):
            continue
        allowed = {stage: replay.allowed(stage, (), dtype=dtype) for stage in own}
        shares = [
            judged(replay.observed[each], replay.stage(each), allowed[each], each).ratio
            for each in own
        ]
        if max(shares) > 1.0:
            continue
        narrow = (layer_in(replay.problem.case, dtype),)
        with_loss = {stage: replay.stage(stage, narrow, dtype) for stage in own}
        # Sums of float32 depend on their order, so only sums in a wider dtype can be reproduced.
        is_reproducible = dtype != "float32"
        if is_reproducible and not all(_falls(replay, stage, x) for stage, x in with_loss.items()):
            continue
        about = f"the whole layer is computed in {dtype} and cast back"
        fix = (
            f"compute the layer in {replay.problem.dtype}, outside of autocast, or compare in "
            f"that dtype"
        )
        record = ((f"layer-in-{dtype}",), about, (fix,), ("low-precision",))
        left = _rms_left(replay, wrong[0], replay.stage(wrong[0], narrow, dtype))
        return Explanation(
            wrong[0], tuple(own), *record, first.error, left, max(shares), first.ratio
        )
    return None


def _is_of(x: np.ndarray, dtype: str) -> bool:
    """Return True if all numbers are numbers of a dtype."""
    if not is_floating(x.dtype):
        return False
    with np.errstate(over="ignore"):
        return bool((x.astype(dtype_named(dtype)).astype(x.dtype) == x).all())
