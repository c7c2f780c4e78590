"""The matrix of answers on a terminal, and each broken guarantee below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.explain.conformance.answers import Answer, Conformance, unexamined_dtypes
from parity.measure.text import and_listed, counted
from parity.use.reporting.console import print_table

STYLES = {
    "ok": "green",
    "note": "yellow",
    "absent": "dim",
    "differs": "bold red",
    "broken": "bold red",
}
LABEL, CELL = 16, 18  # columns


def print_conformance(
    found: Sequence[Conformance], out: Console, again: Callable[[str, str], str]
) -> None:
    """Print the matrix, with as many targets side by side as fit, and each broken guarantee below
    it.

    `again` returns the command that repeats a check, from the names of a target and a check.
    """
    examined = [subject for subject in found if not subject.missing]
    between = 3 if out.is_terminal else 2
    side_by_side = max(1, (out.width - LABEL - between) // (CELL + between))
    for start in range(0, len(examined), side_by_side):
        block = examined[start : start + side_by_side]
        versions = dict.fromkeys(subject.version or subject.framework for subject in block)
        width = min(40, (out.width - LABEL - between) // len(block) - between)
        columns = [Column("", no_wrap=True, min_width=LABEL)]
        for subject in block:
            name = subject.name if ":" in subject.name else ".\n".join(subject.name.rsplit(".", 1))
            columns.append(Column(name, overflow="fold", min_width=CELL, max_width=width))
        questions = [answer.question for answer in block[0].answers]
        rows = [
            [question, *(_cell(subject[question]) for subject in block)] for question in questions
        ]
        print_table(out, f"Conformance: {', '.join(versions)}", columns, rows)
    for subject in found:
        if subject.missing:
            out.print(Text(f"{subject.name}: {subject.missing}", style="dim"), soft_wrap=True)
    answers = [(subject, answer) for subject in examined for answer in subject.answers]
    refusals = [
        _refusal(subject.name, group) for subject in examined for group in _refused_alike(subject)
    ]
    if refusals:
        out.print(Text("\n" + "\n".join(refusals), style="dim"), soft_wrap=True)
    for subject in examined:
        for first, *others in _broken_alike(subject):
            out.print()
            out.print(Text(first.example, style="red"), soft_wrap=True)
            if others:
                questions = ", ".join(answer.question for answer in others)
                out.print(
                    Text(f"  also    {questions}, by the same error", style="red"), soft_wrap=True
                )
            out.print(Text(f"  again   {again(subject.name, first.question)}"), soft_wrap=True)
    out.print()
    done, broken = (
        sum(answer.was_asked for _, answer in answers),
        sum(answer.is_broken for _, answer in answers),
    )
    verdict = (
        counted(broken, "broken guarantee")
        if broken
        else "no broken guarantees"
        if done
        else "nothing to check"
    )
    words = (
        f"{counted(len(examined), 'target')} examined, {done} of {len(answers)} checks answered: "
        f"{verdict}"
    )
    gaps = unexamined_dtypes(examined)
    for name, dtypes in gaps.items():
        out.print(
            Text(f"{name}: no check examined {and_listed(dtypes)}", style="bold red"),
            soft_wrap=True,
        )
    if gaps:
        words += "; not every requested dtype was examined"
    out.print(
        Text(words, style="bold red" if broken or gaps or not done else "bold green"),
        soft_wrap=True,
    )


def _refused_alike(subject: Conformance) -> list[list[Answer]]:
    """Return the answers with a rejected call, those with the same path and reason together."""
    groups: dict[str, list[Answer]] = {}
    for answer in subject.answers:
        if answer.refusal:
            groups.setdefault(answer.refusal, []).append(answer)
    return list(groups.values())


def _refusal(name: str, answers: Sequence[Answer]) -> str:
    questions = ", ".join(answer.question for answer in answers)
    return f"{name}, {questions}: refused ({answers[0].refusal})"


def _broken_alike(subject: Conformance) -> list[list[Answer]]:
    """Return the broken guarantees, those by the same error of the subject's code together."""
    groups: dict[str, list[Answer]] = {}
    for answer in subject.broken:
        groups.setdefault(answer.error or answer.question, []).append(answer)
    return list(groups.values())


def _cell(answer: Answer) -> Text:
    return Text("! " * answer.is_broken + answer.words, style=STYLES[answer.status])
