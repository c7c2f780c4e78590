"""Lost precision that explains all stages at once: imprecise products, or a whole layer in a narrower dtype.

The size of an error proves nothing: the budget of a narrower dtype would explain nearly anything. The reference with
the loss must reproduce the values, and those of a layer in a narrower dtype must also be numbers of that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from parity.core.compare import SAME_PRECISION, Judgement, judged, norms_of
from parity.core.stages import stage_named
from parity.core.weights import dtype_named, is_floating
from parity.diagnosis.bugs import FIDELITIES
from parity.diagnosis.bugs.precision import layer_in
from parity.diagnosis.replay import Replay
from parity.diagnosis.verdicts import Explanation

SHARE_LEFT = 0.4
"""The share of an error that may remain if the reference is computed with the loss of the observed stages. For whole
layers at LoFi, on the real kernels in a simulator (ttsim, Blackhole; 4 cases, plain and fused, float32 and
bfloat16 sums), 0.13 to 0.31 remained; for other causes, nearly everything does."""

NARROWER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}
"""The narrower dtypes that a layer of a dtype may be computed in."""

RESULTS = ("q", "k", "v", "context", "output")
"""The stages whose values have the dtype of the layer; scores and attention weights may have a wider one."""


def lost_in_products(replay: Replay, before: Mapping[str, Judgement], wrong: Sequence[str]) -> Explanation | None:
    """Find the math fidelity of Tenstorrent's matrix products that explains all stages, if there is one.

    Losses of other hardware are known bugs like all others.

    Args:
        replay: the reference, and the observed stages.
        before: the error of each stage, computed from the observed stages before it.
        wrong: the stages that differ.
    """
    if not replay.arithmetic.startswith("tensix"):
        return None
    dtype = SAME_PRECISION[replay.problem.dtype]
    for kind, bug in FIDELITIES.items():
        if all(_falls(replay, stage, replay.stage(stage, (), dtype, kind), SHARE_LEFT) for stage in wrong):
            ratio = max(replay.judgement(stage, (), kind=kind).ratio for stage in wrong)
            record = ((bug.name,), bug.about, (bug.fix,), (bug.page,))
            first = before[wrong[0]]
            left = _distance(replay.observed[wrong[0]], replay.stage(wrong[0], (), dtype, kind))
            return Explanation(wrong[0], tuple(wrong), *record, first.error, left, ratio, first.ratio)
    return None


def _of_the_layer(stages: Sequence[str]) -> list[str]:
    return [stage for stage in stages if not stage_named(stage).path] or list(stages)


def _distance(x: np.ndarray, other: np.ndarray) -> float:
    """Return the root mean square of the difference of arrays."""
    away = x.astype(np.float64) - other.astype(np.float64)
    return norms_of(away, np.isfinite(away))["rms"]


def _falls(replay: Replay, stage: str, with_loss: np.ndarray, most: float) -> bool:
    """Return True if the reference with a loss of precision leaves at most a share of the error of a stage."""
    observed = replay.observed[stage]
    return _distance(observed, with_loss) <= most * _distance(observed, replay.stage(stage))


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
        if max(shares) > 1.0:
            continue
        narrow = (layer_in(replay.problem.case, dtype),)
        with_loss = {stage: replay.stage(stage, narrow, dtype) for stage in own}
        # Sums of float32 depend on their order, so only sums in a wider dtype can be reproduced.
        is_reproducible = dtype != "float32"
        if is_reproducible and not all(_falls(replay, stage, x, SHARE_LEFT) for stage, x in with_loss.items()):
            continue
        about = f"the whole layer is computed in {dtype} and cast back"
        fix = f"compute the layer in {replay.problem.dtype}, outside of autocast, or compare in that dtype"
        record = ((f"layer-in-{dtype}",), about, (fix,), ("low-precision",))
        left = _distance(replay.observed[wrong[0]], replay.stage(wrong[0], narrow, dtype))
        return Explanation(wrong[0], tuple(own), *record, first.error, left, max(shares), first.ratio)
    return None


def _is_of(x: np.ndarray, dtype: str) -> bool:
    """Return True if all numbers are numbers of a dtype."""
    if not is_floating(x.dtype):
        return False
    with np.errstate(over="ignore"):
        return bool((x.astype(dtype_named(dtype)).astype(x.dtype) == x).all())
