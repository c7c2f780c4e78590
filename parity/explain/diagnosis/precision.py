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
        reproduced = [_with_fidelity(replay, stage, dtype, kind) for stage in wrong]
        if not all(
            _leaves_little(replay, stage, *forms)
            for stage, forms in zip(wrong, reproduced, strict=True)
        ):
            continue
        ratios = [replay.judgement(stage, (), kind=kind).ratio for stage in wrong]
        return Explanation(
            stage=first,
            stages=tuple(wrong),
            bugs=(bug.name,),
            about=bug.about,
            fixes=(bug.fix,),
            docs=(bug.page,),
            error_before=before[first].error,
            error=min([_rms_left(replay, first, x) for x in reproduced[0]]),
            ratio=max(ratios),
            ratio_before=before[first].ratio,
        )
    return None


def _with_fidelity(replay: Replay, stage: str, dtype: str, kind: str) -> list[np.ndarray]:
    """Return a stage at a math fidelity.

    A module's kernels may scale queries where its stage functions scale scores.
    """
    return [
        replay.stage(stage, (), dtype, kind),
        replay.stage(stage, (SCALED_QUERIES,), dtype, kind),
    ]


def _of_the_layer(stages: Sequence[str]) -> list[str]:
    """Return the stages that are not of a module's own path; all of them if there are no others."""
    own_stages = [stage for stage in stages if not stage_named(stage).path]
    return own_stages or list(stages)


def _leaves_little(replay: Replay, stage: str, *with_loss: np.ndarray) -> bool:
    """Return True if the reference with a loss of precision, in one of some forms, leaves a small
    share of the error of a stage.
    """
    most = SHARE_LEFT * replay.distance(stage, replay.stage(stage))
    return any(replay.distance(stage, x) <= most for x in with_loss)


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
    for dtype in NARROWER.get(replay.problem.dtype, ()):
        explanation = _lost_in(dtype, replay, before, wrong)
        if explanation is not None:
            return explanation
    return None


def _lost_in(
    dtype: str, replay: Replay, before: Mapping[str, Judgement], wrong: Sequence[str]
) -> Explanation | None:
    """Return the explanation that the whole layer was computed in a narrower dtype, if it is so."""
    results = [stage for stage in replay.stages if stage_named(stage).quantity in RESULTS]
    own = _of_the_layer(wrong)
    if not results:
        return None
    if not all(_is_of(replay.observed[stage], dtype) for stage in (*results, *own)):
        return None
    ratios = []
    for stage in own:
        allowed = replay.allowed(stage, (), dtype=dtype)
        judgement = judged(replay.observed[stage], replay.stage(stage), allowed, stage)
        ratios.append(judgement.ratio)
    if max(ratios) > 1.0:
        return None
    in_dtype = (layer_in(replay.problem.case, dtype),)
    # Sums of float32 depend on their order, so only sums in a wider dtype can be reproduced.
    if dtype != "float32":
        for stage in own:
            if not _leaves_little(replay, stage, replay.stage(stage, in_dtype, dtype)):
                return None
    first = wrong[0]
    fix = (
        f"compute the layer in {replay.problem.dtype}, outside of autocast, or compare in "
        f"that dtype"
    )
    return Explanation(
        stage=first,
        stages=tuple(own),
        bugs=(f"layer-in-{dtype}",),
        about=f"the whole layer is computed in {dtype} and cast back",
        fixes=(fix,),
        docs=("low-precision",),
        error_before=before[first].error,
        error=_rms_left(replay, first, replay.stage(first, in_dtype, dtype)),
        ratio=max(ratios),
        ratio_before=before[first].ratio,
    )


def _is_of(x: np.ndarray, dtype: str) -> bool:
    """Return True if all numbers are numbers of a dtype."""
    if not is_floating(x.dtype):
        return False
    with np.errstate(over="ignore"):
        return bool((x.astype(dtype_named(dtype)).astype(x.dtype) == x).all())
