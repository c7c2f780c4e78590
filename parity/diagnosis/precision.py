"""Lost precision that explains all stages at once: imprecise products, or a whole layer in a narrower dtype.

The lost bits of a layer in a narrower dtype depend on every operation, so no value can be predicted, only the size of
the error: the budget of that dtype. That alone would explain nearly anything. So the recorded values must also be
numbers of the dtype, and the error must be at least that of one rounding to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from parity.core.compare import FACTOR, SAME_PRECISION, Judgement, judged, norms_of, unit_of_rounding
from parity.core.stages import stage_named
from parity.core.weights import dtype_named, is_floating
from parity.diagnosis.bugs import FIDELITIES, PRECISIONS, Bug
from parity.diagnosis.replay import Replay
from parity.diagnosis.verdicts import Explanation

MULTIPLIED = {"q", "k", "v", "scores", "context", "output"}
"""The stages that are matrix products: all of them differ if products lose precision."""

LEAST_OF_PRODUCTS = 0.02
"""The least share of its budget that the loss of an arithmetic uses: a much smaller error has another cause."""

SHARE_LEFT = 0.4
"""The share of an error that may remain if the reference is computed at the math fidelity of the observed stages. For
whole layers at LoFi, on the real kernels in a simulator (ttsim, Blackhole; 4 cases, plain and fused, float32 and
bfloat16 sums), 0.13 to 0.31 remained; for other causes, nearly everything does."""

NARROWER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}
"""The narrower dtypes that a layer of a dtype may be computed in."""

LEAST_OF_DTYPE = 0.05
"""The least error in units of rounding of the narrower dtype, relative to the size of a stage. Rounding the result
alone causes about 0.2."""

RESULTS = ("q", "k", "v", "context", "output")
"""The stages whose values have the dtype of the layer; scores and attention weights may have a wider one."""


def lost_in_products(replay: Replay, before: Mapping[str, Judgement], wrong: Sequence[str]) -> Explanation | None:
    """Find the arithmetic of matrix products that explains all stages, if there is one.

    Args:
        replay: the reference, and the observed stages.
        before: the error of each stage, computed from the observed stages before it.
        wrong: the stages that differ.
    """

    def loss(bug: Bug, stages: Sequence[str], ratio: float) -> Explanation:
        record = ((bug.name,), bug.about, (bug.fix,), (bug.page,))
        first = before[wrong[0]]
        return Explanation(stages[0], tuple(stages), *record, first.error, first.error, ratio, first.ratio)

    is_tensix = replay.arithmetic.startswith("tensix")
    if is_tensix and (kind := _fidelity(replay, wrong)):
        return loss(FIDELITIES[kind], wrong, max(replay.judgement(stage, (), kind=kind).ratio for stage in wrong))
    products = {stage_named(stage).kind for stage in replay.stages} & MULTIPLIED
    missed = products - {stage_named(stage).kind for stage in wrong}
    # The loss of HiFi2 exceeds the budget in some products only, because TF32 does not keep them whole either.
    if len(products) < 2 or (len(products) - len(missed) < 2 if is_tensix else missed):
        return None  # one stage is not enough to decide
    if (replay.problem.dtype != "float32" and not is_tensix) or any(math.isinf(before[s].ratio) for s in wrong):
        return None
    known = FIDELITIES if is_tensix else PRECISIONS
    own = _of_the_layer(wrong)  # a module accumulates the losses of its stages
    ratios = {kind: [replay.judgement(stage, (), kind=kind).ratio for stage in own] for kind in known}
    explaining = [kind for kind in known if max(ratios[kind]) <= 1.0 and ratios[kind][0] >= LEAST_OF_PRODUCTS]
    if not explaining:
        return None
    kind = min(explaining, key=lambda kind: abs(math.log(FACTOR * ratios[kind][0])))  # of the nearest noise
    return loss(known[kind], own, max(ratios[kind]))


def _of_the_layer(stages: Sequence[str]) -> list[str]:
    return [stage for stage in stages if not stage_named(stage).path] or list(stages)


def _fidelity(replay: Replay, stages: Sequence[str]) -> str:
    """Return the math fidelity at which all stages nearly match: the bits that a product loses there are known."""
    dtype = SAME_PRECISION[replay.problem.dtype]

    def error(stage: str, expected: np.ndarray) -> float:
        away = replay.observed[stage].astype(np.float64) - expected.astype(np.float64)
        return norms_of(away, np.isfinite(away))["rms"]

    def is_near(stage: str, kind: str) -> bool:
        left = error(stage, replay.stage(stage, (), dtype, kind))
        return left <= SHARE_LEFT * error(stage, replay.stage(stage))

    return next((kind for kind in FIDELITIES if all(is_near(stage, kind) for stage in stages)), "")


def lost_in_dtype(replay: Replay, before: Mapping[str, Judgement], wrong: Sequence[str]) -> Explanation | None:
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
        if not results or not all(_is_of(replay.observed[stage], dtype) for stage in {*results, *own}):
            continue
        allowed = {stage: replay.allowed(stage, (), dtype=dtype) for stage in own}
        shares = [judged(replay.observed[each], replay.stage(each), allowed[each], each).ratio for each in own]
        size = float(np.sqrt(np.mean(replay.observed[own[0]].astype(np.float64) ** 2)))
        is_enough = before[own[0]].error >= LEAST_OF_DTYPE * unit_of_rounding(dtype) * size
        if max(shares) <= 1.0 and is_enough:
            about = f"the whole layer is computed in {dtype} and cast back"
            fix = f"compute the layer in {replay.problem.dtype}, outside of autocast, or compare in that dtype"
            record = ((f"layer-in-{dtype}",), about, (fix,), ("low-precision",))
            return Explanation(wrong[0], tuple(own), *record, first.error, first.error, max(shares), first.ratio)
    return None


def _is_of(x: np.ndarray, dtype: str) -> bool:
    """Return True if all numbers are numbers of a dtype."""
    if not is_floating(x.dtype):
        return False
    with np.errstate(over="ignore"):
        return bool((x.astype(dtype_named(dtype)).astype(x.dtype) == x).all())
