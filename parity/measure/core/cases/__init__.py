"""Cases: situations in which implementations must agree."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable

from mha_spec import InputError
from mha_spec.record import Record
from parity.measure.core.case import DTYPES, Case
from parity.measure.core.cases.drawn import random_case
from parity.measure.core.cases.tables import (
    CACHED,
    LAYERS,
    MASKS,
    MORE,
    ROPES,
    SIZES,
    TRAINED,
    VALUES,
)

__all__ = [
    "CASES",
    "DTYPES",
    "QUICK",
    "Case",
    "case_named",
    "cases_of_other_records",
    "find_case",
    "random_case",
]

_TABLES = (
    MASKS,
    LAYERS,
    ROPES,
    SIZES,
    VALUES,
    CACHED,
    [random_case(seed) for seed in range(6)],
    TRAINED,
)

CASES: dict[str, Case] = {case.name: case for case in itertools.chain(*_TABLES)}
"""Cases by name, simple ones first, trained layers last.

Example:
    >>> parity.CASES["gqa-causal"].spec.num_kv_heads
    2
"""

QUICK = {name: case for name, case in CASES.items() if name not in MORE}
"""Default cases of `mha-parity run`: all features, though not in all forms."""


def cases_of_other_records(known: Iterable[Case]) -> list[Case]:
    """Return the first case of `CASES` with each kind of record that no known case has.

    A list of cases that needs every kind of record, such as `RelativeBias`, need not be changed for
    a new one.
    """
    known_kinds: set[type[Record]] = set()
    for case in known:
        known_kinds |= _kinds_of_records(case)
    others = []
    for case in CASES.values():
        kinds = _kinds_of_records(case)
        if not kinds <= known_kinds:
            others.append(case)
            known_kinds |= kinds
    return others


def _kinds_of_records(case: Case) -> set[type[Record]]:
    return {type(value) for value in case.spec.values().values() if isinstance(value, Record)}


def find_case(name: str) -> Case | None:
    """Return the case of a name: one of `CASES`, or `random-N` for any N."""
    if name in CASES:
        return CASES[name]
    drawn = re.fullmatch(r"random-(\d{1,6})", name)
    if drawn is None:
        return None
    return random_case(int(drawn[1]))


def case_named(name: str) -> Case:
    """Return the case of a name: one of `CASES`, or `random-N` for any N.

    Raises:
        ValueError: if there is none.
    """
    case = find_case(name)
    if case is None:
        nearest = ", ".join(difflib.get_close_matches(name, CASES, n=3, cutoff=0.0))
        hint = f"the nearest are {nearest}; `mha-parity run --list` lists all"
        raise InputError("case", "be one of parity.CASES or random-N", case=name, hint=hint)
    return case
