"""The matrix of answers on a terminal, and below it each broken promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.conformance.answers import Answer, Conformance
from parity.reporting.console import print_table
from parity.text import counted

STYLES = {"ok": "green", "note": "yellow", "absent": "dim", "differs": "bold red", "broken": "bold red"}
LABEL, CELL = 16, 18  # columns


def print_conformance(found: Sequence[Conformance], out: Console, again: Callable[[str, str], str]) -> None:
    """Print the matrix, as many subjects side by side as there is room for, and below it each broken promise.

    `again` makes the command that asks a subject a question once more, from their names.
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
        rows = [[question, *(_cell(subject[question]) for subject in block)] for question in questions]
        print_table(out, f"Conformance: {', '.join(versions)}", columns, rows)
    for subject in found:
        if subject.missing:
            out.print(Text(f"{subject.name}: {subject.missing}", style="dim"), soft_wrap=True)
    answers = [(subject, answer) for subject in examined for answer in subject.answers]
    if refused := [
        f"{subject.name}, {each.question}: refused ({each.refusal})" for subject, each in answers if each.refusal
    ]:
        out.print(Text("\n" + "\n".join(refused), style="dim"), soft_wrap=True)
    for subject in examined:
        for answer in subject.broken:
            out.print()
            out.print(Text(answer.example, style="red"), soft_wrap=True)
            out.print(Text(f"  again   {again(subject.name, answer.question)}"), soft_wrap=True)
    out.print()
    asked, promises = sum(answer.was_asked for _, answer in answers), sum(answer.is_broken for _, answer in answers)
    verdict = counted(promises, "broken promise") if promises else "no broken promises" if asked else "nothing to ask"
    words = f"{counted(len(examined), 'subject')} examined, {asked} of {len(answers)} questions answered: {verdict}"
    out.print(Text(words, style="bold red" if promises or not asked else "bold green"), soft_wrap=True)


def _cell(answer: Answer) -> Text:
    return Text("! " * answer.is_broken + answer.words, style=STYLES[answer.status])
