"""Bugs that a comparison in 16 bits cannot show, because they change less than its rounding
does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parity.explain.diagnosis.bugs import Edit, bugs_for
from parity.explain.diagnosis.choices import HALF
from parity.explain.diagnosis.trial import Trial
from parity.explain.diagnosis.work import Work
from parity.measure.core.blas import single_threaded
from parity.measure.core.compare import deviation_of

SECONDS = 1.0
"""Work of the search."""

SUBTLE = ("window", "chunk", "off-by", "eps", "frequencies", "scaling", "rope")
"""Parts of the names of bugs that often change little: they are tried first."""

HIDDEN = 0.9
"""The largest share of its budget that a bug may use and be called hidden: rounding takes the
rest.
"""


def hidden_bugs(right: Trial, stages: Sequence[str]) -> tuple[str, ...]:
    """Return the names of known bugs that would show in these stages in float32, and do not in the
    problem's dtype.

    Args:
        right: the reference of the problem, or of a sample of it, without observed stages.
        stages: names of the stages that were compared.
    """
    known_stages = [name for name in stages if name in right.values]
    if right.problem.dtype not in HALF or not known_stages:
        return ()
    bugs = [bug for bug in bugs_for(right.problem.case) if not bug.is_loss]
    work = Work(SECONDS)
    names: dict[str, None] = {}
    try:
        with work.counted(), single_threaded():
            for bug in sorted(bugs, key=_rank):
                with work.inside("hidden bugs"):
                    if _is_hidden(right, bug, known_stages):
                        names[bug.name] = None
    except TimeoutError:
        pass  # the subtle bugs were tried first
    return tuple(names)


def _rank(bug: Edit) -> int:
    """Return the rank of a bug in the order of `SUBTLE`."""
    for number, part in enumerate(SUBTLE):
        if part in bug.name:
            return number
    return len(SUBTLE)


def _is_hidden(right: Trial, bug: Edit, stages: Sequence[str]) -> bool:
    """Return True if a bug changes some stage, visibly in float32, and none beyond its budget."""
    would_show = False
    for name in stages:
        expected, wrong = right.stage(name), right.stage(name, (bug,))
        if wrong.shape != expected.shape:
            return False
        if np.array_equal(wrong, expected, equal_nan=True):
            continue
        allowed = right.allowed(name, ())
        if deviation_of(wrong, expected, allowed, name).ratio > HIDDEN:
            return False
        if not would_show:
            in_float32 = right.allowed(name, (), dtype="float32")
            would_show = deviation_of(wrong, expected, in_float32, name).ratio > 1.0
    return would_show
