"""Patterns as assumptions: a pattern that explains a stage is injected into the reference, and the
search continues.

So an unknown bug hides no other: neither a later one, nor itself in later calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from parity.explain.diagnosis.bugs import Bug
from parity.explain.diagnosis.bugs.record import Change, Override
from parity.explain.diagnosis.laws.record import Law
from parity.explain.diagnosis.replay import Bugs, Replay
from parity.explain.diagnosis.verdicts import Unknown
from parity.measure.core.stages import stage_named


def assumption(replay: Replay, unknown: Unknown, found: Bugs) -> Bugs:
    """Turn the pattern of a stage into a bug of the layer.

    Args:
        replay: the reference, and the observed stages.
        unknown: the stage, with its patterns.
        found: the bugs that are already injected.

    Returns:
        One bug that explains the stage and spoils no correct stage; empty if no pattern does.
    """
    quantity = stage_named(unknown.stage).quantity
    path = stage_named(unknown.stage).path
    of_path = [
        stage for stage in replay.stages if stage_named(stage).path == path
    ]  # including earlier ones
    wrong = replay.wrong(of_path, found)
    right = [stage for stage in of_path if stage not in wrong]
    for law in () if unknown.findings is None else unknown.findings.found:
        for change in _changes(law, quantity):
            made = (*found, _bug(law, change))
            if replay.judgement(unknown.stage, made).ratio <= 1.0 and not replay.wrong(right, made):
                return made[len(found) :]
    return ()


def _changes(law: Law, quantity: str) -> Iterator[Change]:
    """Yield the pattern in the whole layer, and a pattern of RoPE also in queries or in keys
    alone.
    """
    if law.change is None:
        return
    yield law.change
    if law.name.startswith("rope") and quantity in ("q", "k"):
        yield _Alone(quantity, law.change)


class _Alone:
    """A change in the rotation of queries or keys."""

    def __init__(self, quantity: str, change: Change) -> None:
        def turned(layer: Any, original: Any, name: str, *inputs: Any) -> Any:
            if name != quantity:
                return original(name, *inputs)
            changed = change.in_reference.items()
            methods = {
                method: partial(override, layer, getattr(layer, method))
                for method, override in changed
            }
            with layer.overriding(**methods):
                return original(name, *inputs)

        self.in_reference: dict[str, Override] = {"turned": turned}


def _bug(law: Law, change: Change) -> Bug:
    """Return the pattern as a bug without a name, which no report mentions."""
    return Bug(law.name, law.words, change.in_reference, fix="", page="", stages=())
