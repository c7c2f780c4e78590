"""`mha-parity mutate`."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from parity.measure.text import some_of
from parity.use.cli.command import OneOf, Options, Result, argument, command, option
from parity.use.cli.messages import input_error
from parity.use.cli.options import check_range, declarations, matching, name_list

if TYPE_CHECKING:
    from mha_spec import InputError

CLAIMS = ("framework", "axes", "mask_name", "mask_true", "padding_true", "causal_name")
"""Options that declare properties of the callable, under the names of `view_of`."""


@command(
    "report which known bugs your tests miss",
    about=(
        "Inject known bugs into your own attention, one at a time, run your tests for each, and "
        "report the bugs that no test notices."
    ),
    example=(
        "mha-parity mutate my_package.attention:attention --jobs 2 -- pytest -q "
        "tests/test_attention.py"
    ),
    well="every bug was noticed",
    wrong="a bug was missed",
)
@argument("subject", metavar="PKG.MODULE:CALLABLE", help="a function, or a class of modules")
@argument(
    "tests",
    nargs=-1,
    required=True,
    metavar="COMMAND",
    help="after --, the command that runs your tests: pytest …",
)
@option(
    "--only", type=name_list, metavar="GLOBS", help="inject only these bugs, such as 'mask*,scale*'"
)
@option("--skip", type=name_list, metavar="GLOBS", help="leave out these bugs")
@option(
    "-j", "--jobs", type=int, default=1, metavar="N", help="number of runs at a time; default: 1"
)
@option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="limit for one run; default: ten times the first run, at least 60",
)
@declarations(("torch", "jax"))
@option("--padding-true", type=OneOf(("hides", "shows")), help="effect of True in a padding mask")
def run(options: Options) -> Result:
    """Inject the bugs, run the tests, and print the outcomes."""
    from parity.explain.conformance.discover import load_params
    from parity.explain.mutating.bugs import injections_for
    from parity.explain.mutating.run import Status, Suite, mutate
    from parity.explain.mutating.view import view_of
    from parity.use.reporting.console import console, progress_bar
    from parity.use.reporting.mutate import print_mutations

    check_range(options, "jobs", 1)
    if options.timeout is not None and not options.timeout > 0:
        raise input_error("--timeout", "be above 0", {"--timeout": options.timeout})
    requested = _requested(options.only, options.skip)
    params = None if options.params is None else load_params(options.params)
    claims = {name: getattr(options, name) for name in CLAIMS}
    view = view_of(options.subject, params=params, causal=options.causal_alignment, **claims)
    injections, reasons = injections_for(view)
    names = [name for name in injections if name in requested]
    not_injected = {name: reason for name, reason in reasons.items() if name in requested}
    if not names:
        raise _nothing_to_inject(options, not_injected)
    tests = Suite(options.subject, view, options.tests, options.timeout)
    outcomes = []
    # The first run is without a bug.
    with progress_bar(1 + len(names)) as on_bug:
        for outcome in mutate(tests, names, jobs=options.jobs, on_bug=on_bug):
            if outcome.status is Status.NOT_INJECTED:
                not_injected[outcome.bug] = outcome.by
            else:
                outcomes.append(outcome)
    if not outcomes:
        raise _nothing_to_inject(options, not_injected)
    print_mutations(options.subject, outcomes, not_injected, console(), view.note)
    content = {
        "subject": options.subject,
        "not_examined": view.note,
        "outcomes": outcomes,
        "not_injected": not_injected,
    }
    return 0 if all(outcome.is_caught for outcome in outcomes) else 1, content


def _nothing_to_inject(options: Options, not_injected: Mapping[str, str]) -> InputError:
    """Return the error if none of the requested bugs can be injected."""
    flags = [f"--{name}" for name in ("only", "skip") if getattr(options, name)]
    examples = list(not_injected.items())[:3]  # as many as fit into a line
    reasons = "; ".join(f"{name}: {reason}" for name, reason in examples)
    if flags:
        rule = f"leave a bug that can be injected into {options.subject}"
        return input_error(" and ".join(flags), rule, reasons)
    return input_error(options.subject, "be a target for a known bug", reasons)


def _requested(only: list[str] | None, skip: list[str] | None) -> set[str]:
    """Return the names of the requested bugs."""
    from parity.explain.mutating.bugs import names

    known_bugs = names()
    _check_injectable("--only", only or (), known_bugs)
    _check_injectable("--skip", skip or (), known_bugs)
    lister = "mha-parity bugs --all"
    included = matching("--only", only or ["*"], known_bugs, lister)
    excluded = matching("--skip", skip or [], known_bugs, lister)
    return set(included) - set(excluded)


def _check_injectable(flag: str, globs: Sequence[str], known_bugs: Sequence[str]) -> None:
    """Reject a pattern that matches only bugs that have a page, but no injection."""
    for glob in globs:
        if fnmatch.filter(known_bugs, glob):
            continue
        # It is slow to import.
        from parity.explain.diagnosis.bugs import bug_by_name

        others = fnmatch.filter(bug_by_name(), glob)
        if others:
            hint = f"mutate cannot inject {some_of(others, 3)}"
            raise input_error(flag, "match a bug that can be injected", {flag: glob}, hint=hint)
