"""Bugs in the temperature of queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.families import TEMPERATURE
from parity.explain.diagnosis.bugs.record import Edit, instead
from parity.explain.diagnosis.bugs.sites import before
from parity.explain.diagnosis.bugs.specs import of_spec
from parity.measure.core.case import Case


def temperature(case: Case) -> Iterator[Edit]:
    spec, right = case.spec, case.spec.temperature
    if right is None:
        return
    bug = TEMPERATURE.shown_in("q", "k")
    yield bug(
        "temperature-ignored",
        "queries are not multiplied by a temperature",
        of_spec(spec, temperature=None),
    )
    wrong_first = 1
    if right.first_position:
        wrong_first = 0
    yield bug(
        "temperature-off-by-one",
        f"the temperature counts positions from {wrong_first} instead of {right.first_position}",
        of_spec(spec, temperature=replace(right, first_position=wrong_first)),
    )
    yield bug(
        "temperature-not-floored",
        "the temperature grows with every token instead of every length",
        {"lengths_passed": instead(np.divide)},
    )
    if spec.latent is None:
        yield bug(
            "temperature-of-keys-too",
            "keys are also multiplied by the temperature",
            {"tempered": before(_keys_as_queries)},
            fix="multiply queries only, before keys are cached",
            stages=("k",),
        )
    if case.is_cached:
        yield bug(
            "temperature-restarted",
            "the temperature counts positions from the first token of each call",
            {"factors": before(_from_first_token)},
        )


def _keys_as_queries(name: str, *rest: Any) -> tuple[Any, ...]:
    # `tempered` multiplies what has the name of queries.
    if name == "k":
        name = "q"
    return name, *rest


def _from_first_token(positions: np.ndarray) -> tuple[np.ndarray]:
    return (positions - positions[:, :1],)
