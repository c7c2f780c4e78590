"""Outcomes of bugs that were injected into your attention: a table, and advice below it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.explain.mutating.run import Outcome, Status
from parity.measure.text import counted
from parity.use.reporting.console import print_line, print_table
from parity.use.reporting.grouping import grouped

STYLES = {
    Status.NOTICED: "green",
    Status.REJECTED: "green",
    Status.SURVIVED: "bold red",
    Status.UNCHANGED: "yellow",
    Status.NOT_REACHED: "yellow",
    Status.TIMED_OUT: "bold red",
}


def print_mutations(
    target: str,
    outcomes: Sequence[Outcome],
    left_out: Mapping[str, str],
    out: Console,
    note: str = "",
) -> None:
    """Print the outcome of each bug, which were left out and why, and how many were noticed.

    `note` is the reason why the callable could not be examined beforehand, or empty.
    """
    _print_outcomes(target, outcomes, out)
    if note:
        reason = f"\nnot examined, so that only declared properties are known: {note}"
        print_line(out, reason, "dim")
    if left_out:
        by_reason = grouped(left_out, left_out.__getitem__)
        lines = [f"not injected, {why}: {', '.join(names)}" for why, names in by_reason.items()]
        print_line(out, "\n" + "\n".join(lines), "dim")
    out.print()
    for outcome in outcomes:
        if outcome.status is Status.SURVIVED:
            passes = f"{outcome.bug}: {outcome.about}, and every test passes"
            print_line(out, f"{passes}; mha-parity bugs {outcome.page}", "red")
    numbers = Counter(outcome.status for outcome in outcomes)
    verdict = ", ".join(f"{numbers[status]} {status.value}" for status in Status if numbers[status])
    if left_out:
        verdict += f"; {len(left_out)} not injected"
    is_well = all(outcome.is_caught for outcome in outcomes)
    style = "bold green" if is_well else "bold red"
    print_line(out, f"{counted(len(outcomes), 'bug')} injected: {verdict}", style)


def _print_outcomes(target: str, outcomes: Sequence[Outcome], out: Console) -> None:
    """Print a table with a row for each bug."""
    bug, page = (Column(name, no_wrap=True) for name in ("bug", "page (mha-parity bugs …)"))
    rows = []
    for outcome in outcomes:
        noticed_by = Text(_noticed_by(outcome), style=STYLES[outcome.status])
        rows.append((outcome.bug, outcome.page, noticed_by))
    print_table(out, f"Bugs injected into {target}", [bug, page, "noticed by"], rows)


def _noticed_by(outcome: Outcome) -> str:
    """Return the last cell of a row: the test that noticed a bug, or why none did."""
    if outcome.status is Status.NOTICED:
        return outcome.by
    if outcome.status is Status.REJECTED:
        return f"the callable itself: {outcome.by}"
    status = outcome.status.value
    if outcome.status is Status.SURVIVED:
        status = status.upper()
    if outcome.by:
        return f"{status}: {outcome.by}"
    return status
