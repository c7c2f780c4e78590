"""The cases of a command line."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parity.use.cli.messages import input_error, names_like

if TYPE_CHECKING:
    from parity.measure.core.case import Case


def chosen_cases(patterns: Sequence[str] | None, *, may_be_none: bool = False) -> list[Case]:
    """Return the cases of `--cases`: by default every feature once; all, or those that match."""
    from parity.measure.core.cases import QUICK

    if patterns is None:
        return list(QUICK.values())
    chosen: dict[str, Case] = {}
    for pattern in patterns:
        for case in _cases_named(pattern, may_be_none=may_be_none):
            chosen[case.name] = case
    return list(chosen.values())


def num_runs(cases: Sequence[Case], dtypes: Sequence[str], backends: Sequence[str]) -> int:
    """Return the number of runs: of each case in each dtype, or in its only one, and backend."""
    num_with_dtype = 0
    for case in cases:
        num_with_dtype += 1 if case.dtype else len(dtypes)
    return num_with_dtype * len(backends)


def _cases_named(pattern: str, *, may_be_none: bool) -> list[Case]:
    """Return the cases whose names match a pattern, or all; `random-N` only by its own name."""
    from parity.measure.core.cases import CASES, find_case

    if pattern == "all":
        return list(CASES.values())
    cases = [case for name, case in CASES.items() if fnmatch.fnmatchcase(name, pattern)]
    if not cases:
        # Random cases, of which there is one for each number, are not listed.
        case = find_case(pattern)
        cases = [] if case is None else [case]
    if not cases and not may_be_none:
        hint = names_like(pattern, CASES, "`mha-parity run --list` lists them")
        raise input_error("--cases", "match a case", {"--cases": pattern}, hint=hint)
    return cases
