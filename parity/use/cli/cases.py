"""`mha-parity cases`."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parity.use.cli.help import Page, Result
from parity.use.cli.messages import names_like, refusal

if TYPE_CHECKING:
    from parity.measure.core.case import Case

PAGE = Page(
    "list the test cases of `run`",
    "List the test cases of `run`, one per line: heads and tokens, masks, and the feature that "
    "fails with the case.",
    "mha-parity cases 'trained-*'",
    "listed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="?", default="*", metavar="GLOB", help="names such as 'rope*'; default: all"
    )


def run(options: argparse.Namespace) -> Result:
    """List the cases."""
    from dataclasses import asdict

    from parity.use.reporting.cases import covers, print_cases
    from parity.use.reporting.console import console

    cases = cases_named("GLOB", options.names)
    print_cases(cases, console())
    listed = [{"covers": covers(case), **asdict(case)} for case in cases]
    return 0, {"cases": listed}


def chosen_cases(pattern: str | None, *, may_be_none: bool = False) -> list[Case]:
    """Return the cases of `--cases`: by default every feature once; all, or those that match."""
    from parity.measure.core.cases import QUICK

    if pattern is None:
        return list(QUICK.values())
    return cases_named("--cases", "*" if pattern == "all" else pattern, may_be_none=may_be_none)


def num_runs(cases: Sequence[Case], dtypes: Sequence[str], backends: Sequence[str]) -> int:
    """Return the number of runs: of each case in each dtype, or in its only one, and backend."""
    num_with_dtype = 0
    for case in cases:
        num_with_dtype += 1 if case.dtype else len(dtypes)
    return num_with_dtype * len(backends)


def cases_named(flag: str, pattern: str, may_be_none: bool = False) -> list[Case]:
    """Return the cases whose names match a pattern; `random-N` only by its own name."""
    from parity.measure.core.cases import CASES, find_case

    cases = [case for name, case in CASES.items() if fnmatch.fnmatchcase(name, pattern)]
    if not cases:
        # Random cases, of which there is one for each number, are not listed.
        case = find_case(pattern)
        cases = [] if case is None else [case]
    if not cases and not may_be_none:
        hint = names_like(pattern, CASES, "`mha-parity cases` lists them")
        raise refusal(flag, "match a case", {flag: pattern}, hint=hint)
    return cases
