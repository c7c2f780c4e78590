"""Bugs in the temperature of queries."""

from __future__ import annotations

from collections.abc import Iterator

from parity.core.case import Case
from parity.diagnosis.mistakes.families import TEMPERATURE
from parity.diagnosis.mistakes.record import Mistake
from parity.diagnosis.mistakes.sites import before


def temperature(case: Case) -> Iterator[Mistake]:
    right = case.spec.temperature
    if right is None:
        return
    mistake = TEMPERATURE.seen_in("q", "k")
    yield mistake(
        "temperature-ignored",
        "queries are not multiplied by a temperature",
        {"tempered": lambda layer, original, name, x, positions: x},
    )
    counted = 0 if right.first_position else 1
    yield mistake(
        "temperature-off-by-one",
        f"the temperature counts positions from {counted} instead of {right.first_position}",
        {"factors": before(lambda positions: (positions + (counted - right.first_position),))},
    )
    yield mistake(
        "temperature-not-floored",
        "the temperature grows with every token instead of every length",
        {"lengths_passed": lambda _, original, positions, length: positions / length},
    )
    if case.spec.latent is None:
        yield mistake(
            "temperature-of-keys-too",
            "keys are also multiplied by the temperature",
            {"tempered": before(lambda name, *rest: ("q" if name == "k" else name, *rest))},
            fix="multiply queries only, before keys are cached",
            stages=("k",),
        )
    if case.is_cached:
        yield mistake(
            "temperature-restarted",
            "the temperature counts positions from the first token of each call",
            {"factors": before(lambda positions: (positions - positions[:, :1],))},
        )
