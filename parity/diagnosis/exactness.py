"""A whole layer in a narrower dtype, cast back: told by its numbers, which are all numbers of that dtype.

Which bits such a layer loses depends on every operation, so that no value can be told, only how large the error may be:
as large as what is allowed in that dtype. That alone would explain nearly anything. So what was recorded must consist
of numbers of the dtype, and the error must be no smaller than rounding to it alone makes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from parity.core.compare import SAME_PRECISION, Judgement, budget, judged, unit_of_rounding
from parity.core.stages import stage_named
from parity.core.weights import dtype_named, is_floating
from parity.diagnosis.replay import Replay
from parity.diagnosis.verdicts import Explanation

NARROWER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}
"""The dtypes that a layer of a dtype may be computed in, and lose by it."""

LEAST = 0.05
"""The part of a unit of rounding of the narrower dtype that the error is, at least, of the size of a stage: rounding
its result alone makes it about 0.2 of one."""

RESULTS = ("q", "k", "v", "context", "output")
"""The stages that are numbers of the dtype of the layer; scores and attention weights may be kept in a wider one."""

FIX = "compute the layer in {dtype}, outside of autocast, or compare in the dtype that it is computed in"


def told_by_dtype(replay: Replay, before: Mapping[str, Judgement], wrong: Sequence[str]) -> Explanation | None:
    """The narrower dtype that the whole layer was computed in, if there is one.

    Args:
        replay: the reference, and what was observed.
        before: how far each stage is from the reference's, computed from the observed stages before it.
        wrong: the stages that differ.
    """
    if not wrong or any(math.isinf(before[stage].ratio) for stage in wrong):
        return None
    own = [stage for stage in wrong if not stage_named(stage).path] or list(wrong)
    for dtype in NARROWER.get(replay.problem.dtype, ()):
        results = [stage for stage in replay.stages if stage_named(stage).quantity in RESULTS]
        if not results or not all(_is_of(replay.observed[stage], dtype) for stage in {*results, *own}):
            continue
        shares = [_share(replay, stage, dtype) for stage in own]
        if max(shares) > 1.0 or not _loses_enough(replay, own[0], before[own[0]], dtype):
            continue
        error = before[wrong[0]].error
        about, fix = f"the whole layer is computed in {dtype}, and cast back", FIX.format(dtype=replay.problem.dtype)
        names = (f"layer-in-{dtype}",)
        return Explanation(wrong[0], tuple(own), names, about, (fix,), ("low-precision",), error, error, max(shares))
    return None


def _is_of(x: np.ndarray, dtype: str) -> bool:
    """Whether all numbers are numbers of a dtype."""
    if not is_floating(x.dtype):
        return False
    with np.errstate(over="ignore"):
        return bool((x.astype(dtype_named(dtype)).astype(x.dtype) == x).all())


def _share(replay: Replay, stage: str, dtype: str) -> float:
    """The error of a stage, as a share of what is allowed in another dtype."""
    index = replay.step_of[stage]
    expected = replay.computed(index, ())[stage].astype(np.float64)
    same = replay.computed(index, (), SAME_PRECISION[dtype])[stage]
    with np.errstate(all="ignore"):
        allowed = budget(expected, same, dtype)
    return judged(replay.observed[stage], expected, allowed, stage).ratio


def _loses_enough(replay: Replay, stage: str, verdict: Judgement, dtype: str) -> bool:
    size = float(np.sqrt(np.mean(replay.observed[stage].astype(np.float64) ** 2)))
    return verdict.error >= LEAST * unit_of_rounding(dtype) * size
