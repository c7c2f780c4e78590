"""`mha-parity cases`."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
from typing import TYPE_CHECKING

from parity.cli.help import Page, Result
from parity.cli.messages import refusal

if TYPE_CHECKING:
    from parity.core.case import Case

PAGE = Page(
    "the cases, and what each one covers",
    "List the cases that `run` knows, one a line: heads and tokens, what is masked, and what goes wrong when the "
    "case fails.",
    "mha-parity cases 'trained-*'",
    "listed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="?", default="*", metavar="GLOB", help="such as 'rope*'; all by default")


def run(options: argparse.Namespace) -> Result:
    """List the cases."""
    from dataclasses import asdict

    from parity.reporting.cases import covers, print_cases
    from parity.reporting.console import console

    cases = cases_named("GLOB", options.names)
    print_cases(cases, console())
    listed = [{"covers": covers(case), **asdict(case)} for case in cases]
    return 0, {"cases": listed}


def cases_named(flag: str, pattern: str, may_be_none: bool = False) -> list[Case]:
    """Return the cases whose names fit a pattern, `random-N` too where it is the name itself."""
    from parity.core.cases import CASES, find_case

    cases = [case for name, case in CASES.items() if fnmatch.fnmatchcase(name, pattern)]
    if not cases and (case := find_case(pattern)):
        cases = [case]
    if not (cases or may_be_none):
        nearest = difflib.get_close_matches(pattern, CASES, n=5, cutoff=0.5)
        hint = f"near it: {', '.join(nearest)}; " if nearest else ""
        raise refusal(flag, "match a case", {flag: pattern}, hint=f"{hint}see `mha-parity cases`")
    return cases
