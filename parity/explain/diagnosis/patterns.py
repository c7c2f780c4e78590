"""Patterns in the reference: a pattern that explains a stage is injected, and the search continues.

So an unknown bug hides no other: neither a later one, nor itself in later calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.record import Edit, Edits
from parity.explain.diagnosis.trial import Trial
from parity.measure.core.stages import stage_named


def injected_pattern(trial: Trial, stage: str, edits: Edits, patterns: Sequence[Edit]) -> Edits:
    """Return the pattern of a stage that explains most stages in the reference, and spoils no right
    one; empty if none explains this stage.

    Args:
        trial: the reference, and the observed stages.
        stage: the stage.
        edits: those that are already injected.
        patterns: patterns of the stage, the simplest first.
    """
    known = stage_named(stage)
    of_path = trial.of_path(known.path)
    wrong = trial.wrong(of_path, edits)
    right = [other for other in of_path if other not in wrong]
    best: Edits = ()
    fewest = len(wrong)
    for pattern in patterns:
        for edit in _forms(pattern, known.quantity):
            with_pattern = (*edits, edit)
            if trial.deviation(stage, with_pattern).ratio > 1.0:
                continue
            if trial.wrong(right, with_pattern):
                continue
            still_wrong = trial.wrong(wrong, with_pattern)
            if len(still_wrong) < fewest:
                best, fewest = (edit,), len(still_wrong)
    return best


def _forms(pattern: Edit, quantity: str) -> Iterator[Edit]:
    """Yield a pattern in the whole layer; one of RoPE also in queries or in keys alone."""
    if not pattern.is_injectable:
        return
    yield pattern
    if pattern.name.startswith("rope") and pattern.overrides and quantity in ("q", "k"):
        yield replace(pattern, overrides={"turned": partial(_turned_alone, pattern, quantity)})


def _turned_alone(
    pattern: Edit, quantity: str, layer: Any, original: Any, name: str, *inputs: Any
) -> np.ndarray:
    """Rotate queries or keys with a pattern, and the others as before."""
    if name != quantity:
        return original(name, *inputs)
    methods = {
        method: partial(override, layer, getattr(layer, method))
        for method, override in pattern.overrides.items()
    }
    with layer.overriding(**methods):
        return original(name, *inputs)
