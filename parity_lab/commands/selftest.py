"""`mha-parity selftest`."""

from __future__ import annotations

import argparse
import fnmatch

from parity.measure.text import did_you_mean
from parity.use.cli.help import Page, Result
from parity.use.cli.messages import no_framework, refusal
from parity.use.cli.options import check_names, name_list

PAGE = Page(
    "inject known bugs into the layers, and check that they are found",
    "Inject a known bug of each page into the layers. Check that its stage differs and that the "
    "diagnosis names it.",
    "mha-parity selftest --backends torch",
    "every bug was found",
    "a bug was missed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends",
        type=name_list,
        metavar="A,B",
        help="jax, torch; default: all that are installed",
    )
    parser.add_argument(
        "--cases", default="*", metavar="GLOB", help="names such as 'rope*'; default: all"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")


def run(options: argparse.Namespace) -> Result:
    """Inject the bugs, and print the outcomes."""
    from parity.measure.backends import why_missing
    from parity.use.reporting.console import console, progress_bar
    from parity_lab.selftest import SELFTEST_CASES, SELFTESTED, bugs_in, print_selftest, selftest

    backends = options.backends or [name for name in SELFTESTED if not why_missing(name)]
    check_names("--backends", backends, SELFTESTED)
    for name in backends:
        if reason := why_missing(name):
            raise ModuleNotFoundError(reason)
    if not backends:
        raise ModuleNotFoundError(no_framework())
    cases = [case for case in SELFTEST_CASES if fnmatch.fnmatch(case.name, options.cases)]
    if not cases:
        hint = did_you_mean(options.cases, [case.name for case in SELFTEST_CASES])
        raise refusal(
            "--cases", "match a case of the self-test", {"--cases": options.cases}, hint=hint
        )
    total = len(backends) * sum(1 + len(bugs_in(case)) for case in cases)
    with progress_bar(total) as on_bug:
        outcomes = list(selftest(backends, cases, seeds=[options.seed], on_bug=on_bug))
    print_selftest(outcomes, console())
    return 0 if all(outcome.is_caught for outcome in outcomes) else 1, {"outcomes": outcomes}
