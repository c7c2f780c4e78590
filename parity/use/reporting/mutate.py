"""Outcomes of bugs that were injected into your attention: a table, and advice below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.explain.mutating.run import Outcome, Status
from parity.measure.text import counted
from parity.use.reporting.console import print_table

STYLES = {
    Status.NOTICED: "green",
    Status.REFUSED: "green",
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
    columns = [Column(name, no_wrap=True) for name in ("bug", "page (mha-parity bugs …)")]
    rows = [
        (each.bug, each.page, Text(_words(each), style=STYLES[each.status])) for each in outcomes
    ]
    print_table(out, f"Bugs injected into {target}", [*columns, "noticed by"], rows)
    if note:
        out.print(
            Text(
                f"\nnot examined, so that only declared properties are known: {note}", style="dim"
            ),
            soft_wrap=True,
        )
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    if lines := [
        f"not injected, {reason}: {', '.join(names)}" for reason, names in by_reason.items()
    ]:
        out.print(Text("\n" + "\n".join(lines), style="dim"), soft_wrap=True)
    out.print()
    for outcome in outcomes:
        if outcome.status is Status.SURVIVED:
            line = (
                f"{outcome.bug}: {outcome.about}, and every test passes; mha-parity bugs "
                f"{outcome.page}"
            )
            out.print(Text(line, style="red"), soft_wrap=True)
    counts = {status: sum(outcome.status is status for outcome in outcomes) for status in Status}
    verdict = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    is_well = all(outcome.is_caught for outcome in outcomes)
    words = f"{counted(len(outcomes), 'bug')} injected: {verdict}"
    out.print(Text(words, style="bold green" if is_well else "bold red"), soft_wrap=True)


def _words(outcome: Outcome) -> str:
    if outcome.status is Status.NOTICED:
        return outcome.by
    if outcome.status is Status.REFUSED:
        return f"the callable itself: {outcome.by}"
    word = (
        outcome.status.value.upper() if outcome.status is Status.SURVIVED else outcome.status.value
    )
    return f"{word}: {outcome.by}" if outcome.by else word
