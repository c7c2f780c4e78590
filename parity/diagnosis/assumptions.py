"""Laws as assumptions: a law that explains a stage is made in the reference, and what follows is searched with it.

So a bug of no known name hides no other: neither one after it, nor the same one in later calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from parity.core.stages import stage_named
from parity.diagnosis.laws.record import Law
from parity.diagnosis.mistakes import Mistake
from parity.diagnosis.mistakes.record import Change, Override
from parity.diagnosis.replay import Mistakes, Replay
from parity.diagnosis.verdicts import Unknown


def assumption(replay: Replay, unknown: Unknown, found: Mistakes) -> Mistakes:
    """Make the law of a stage a mistake in the layer.

    Args:
        replay: the reference, and what was observed.
        unknown: the stage, with its laws.
        found: the mistakes that are there already.

    Returns:
        One mistake that explains the stage and spoils no stage that is right; nothing if no law makes one.
    """
    quantity = stage_named(unknown.stage).quantity
    path = stage_named(unknown.stage).path
    of_path = [stage for stage in replay.stages if stage_named(stage).path == path]  # earlier ones, too
    wrong = replay.wrong(of_path, found)
    right = [stage for stage in of_path if stage not in wrong]
    for law in () if unknown.findings is None else unknown.findings.found:
        for change in _changes(law, quantity):
            made = (*found, _mistake(law, change))
            if replay.judgement(unknown.stage, made).ratio <= 1.0 and not replay.wrong(right, made):
                return made[len(found) :]
    return ()


def _changes(law: Law, quantity: str) -> Iterator[Change]:
    """The law in the whole layer; if it is one of RoPE, then in queries or in keys alone."""
    if law.change is None:
        return
    yield law.change
    if law.name.startswith("rope") and quantity in ("q", "k"):
        yield _Alone(quantity, law.change)


class _Alone:
    """A change that is made where queries, or keys, are turned."""

    def __init__(self, quantity: str, change: Change) -> None:
        def turned(layer: Any, original: Any, name: str, *inputs: Any) -> Any:
            if name != quantity:
                return original(name, *inputs)
            changed = change.in_reference.items()
            methods = {method: partial(override, layer, getattr(layer, method)) for method, override in changed}
            with layer.overriding(**methods):
                return original(name, *inputs)

        self.in_reference: dict[str, Override] = {"turned": turned}


def _mistake(law: Law, change: Change) -> Mistake:
    """The law as a mistake of no name, which no report mentions."""
    return Mistake(law.name, law.words, change.in_reference, fix="", page="", stages=())
