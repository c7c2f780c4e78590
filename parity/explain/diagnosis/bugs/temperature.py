"""Bugs in the temperature of queries."""

from __future__ import annotations

from collections.abc import Iterator

from parity.explain.diagnosis.bugs.families import TEMPERATURE
from parity.explain.diagnosis.bugs.record import Edit
from parity.explain.diagnosis.bugs.sites import before
from parity.measure.core.case import Case


def temperature(case: Case) -> Iterator[Edit]:
    right = case.spec.temperature
    if right is None:
        return
    bug = TEMPERATURE.seen_in("q", "k")
    yield bug(
        "temperature-ignored",
        "queries are not multiplied by a temperature",
        {"tempered": lambda layer, original, name, x, positions: x},
    )
    counted = 0 if right.first_position else 1
    yield bug(
        "temperature-off-by-one",
        f"the temperature counts positions from {counted} instead of {right.first_position}",
        {"factors": before(lambda positions: (positions + (counted - right.first_position),))},
    )
    yield bug(
        "temperature-not-floored",
        "the temperature grows with every token instead of every length",
        {"lengths_passed": lambda _, original, positions, length: positions / length},
    )
    if case.spec.latent is None:
        yield bug(
            "temperature-of-keys-too",
            "keys are also multiplied by the temperature",
            {"tempered": before(lambda name, *rest: ("q" if name == "k" else name, *rest))},
            fix="multiply queries only, before keys are cached",
            stages=("k",),
        )
    if case.is_cached:
        yield bug(
            "temperature-restarted",
            "the temperature counts positions from the first token of each call",
            {"factors": before(lambda positions: (positions - positions[:, :1],))},
        )
