"""The matrix of answers on a terminal, and each broken guarantee below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.explain.conformance.answers import Answer, Conformance, unexamined_dtypes
from parity.measure.text import and_listed, counted
from parity.use.reporting.console import Row, print_line, print_table, width_between_columns
from parity.use.reporting.grouping import grouped

STYLES = {
    "ok": "green",
    "note": "yellow",
    "absent": "dim",
    "differs": "bold red",
    "broken": "bold red",
}

LABEL = 18
"""Width of the column of checks, in characters: the length of the longest name."""

CELL = 18
"""Least width of the column of a target, in characters: its words are folded between words."""

MOST_OF_A_CELL = 40
"""Largest width of the column of a target, in characters: an arbitrary number, so that two targets
do not spread over a wide terminal.
"""


def print_conformance(
    subjects: Sequence[Conformance], out: Console, rerun: Callable[[str, str], str]
) -> None:
    """Print the matrix, with as many targets side by side as fit, and each broken guarantee below
    it.

    `rerun` returns the command that repeats a check, from the names of a target and a check.
    """
    examined = [subject for subject in subjects if not subject.missing]
    between = width_between_columns(out)
    num_columns = max(1, (out.width - LABEL - between) // (CELL + between))
    for start in range(0, len(examined), num_columns):
        _print_matrix(examined[start : start + num_columns], out)
    for subject in subjects:
        if subject.missing:
            print_line(out, f"{subject.name}: {subject.missing}", "dim")
    _print_rejections(examined, out)
    for subject in examined:
        _print_broken(subject, out, rerun)
    out.print()
    _print_verdict(examined, out, num_missing=len(subjects) - len(examined))


def _print_matrix(subjects: Sequence[Conformance], out: Console) -> None:
    """Print the answers of some targets side by side, a row for each check."""
    versions = dict.fromkeys(subject.version or subject.framework for subject in subjects)
    between = width_between_columns(out)
    room = (out.width - LABEL - between) // len(subjects) - between
    columns = [Column("", no_wrap=True, min_width=LABEL)]
    for subject in subjects:
        name = subject.name
        # The name of a library's function is broken before its last part; `module:name` is not.
        if ":" not in name:
            name = ".\n".join(name.rsplit(".", 1))
        width = min(MOST_OF_A_CELL, room)
        columns.append(Column(name, overflow="fold", min_width=CELL, max_width=width))
    rows: list[Row] = []
    for first_answer in subjects[0].answers:
        cells = [_cell(subject[first_answer.question]) for subject in subjects]
        rows.append([first_answer.question, *cells])
    print_table(out, f"Conformance: {', '.join(versions)}", columns, rows)


def _cell(answer: Answer) -> Text:
    words = answer.words
    if answer.is_broken:
        words = f"! {words}"
    return Text(words, style=STYLES[answer.status])


def _print_rejections(subjects: Sequence[Conformance], out: Console) -> None:
    """Print the rejected calls of each target, checks with the same path and reason in one line."""
    lines = []
    for subject in subjects:
        rejected = [answer for answer in subject.answers if answer.rejection]
        by_rejection = grouped(rejected, lambda answer: answer.rejection)
        for rejection, answers in by_rejection.items():
            lines.append(f"{subject.name}, {_questions(answers)}: rejected ({rejection})")
    if lines:
        print_line(out, "\n" + "\n".join(lines), "dim")


def _print_broken(subject: Conformance, out: Console, rerun: Callable[[str, str], str]) -> None:
    """Print the broken guarantees of a target, those by the same error of its code together."""
    by_error = grouped(subject.broken, lambda answer: answer.error or answer.question)
    for answers in by_error.values():
        first = answers[0]
        out.print()
        print_line(out, first.example, "red")
        if len(answers) > 1:
            print_line(out, f"  also    {_questions(answers[1:])}, by the same error", "red")
        print_line(out, f"  rerun   {rerun(subject.name, first.question)}")


def _questions(answers: Sequence[Answer]) -> str:
    return ", ".join(answer.question for answer in answers)


def _print_verdict(subjects: Sequence[Conformance], out: Console, *, num_missing: int) -> None:
    """Print the dtypes that no check examined, and a last line with the numbers of answers, and of
    targets that are not installed.
    """
    num_answers = 0
    num_answered = 0
    num_broken = 0
    for subject in subjects:
        for answer in subject.answers:
            num_answers += 1
            num_answered += answer.applies
            num_broken += answer.is_broken
    if num_broken:
        verdict = counted(num_broken, "broken guarantee")
    elif num_answered:
        verdict = "no broken guarantees"
    else:
        verdict = "nothing to check"
    gaps = unexamined_dtypes(subjects)
    for name, dtypes in gaps.items():
        print_line(out, f"{name}: no check examined {and_listed(dtypes)}", "bold red")
    if gaps:
        verdict += "; not every requested dtype was examined"
    if num_missing:
        verdict += f"; NOT examined: {counted(num_missing, 'target')}"
    is_well = num_answered and not num_broken and not gaps
    style = "bold green" if is_well else "bold red"
    print_line(
        out,
        f"{counted(len(subjects), 'target')} examined, {num_answered} of {num_answers} checks "
        f"answered: {verdict}",
        style,
    )
