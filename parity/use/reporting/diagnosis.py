"""Diagnoses and diverging traces on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.explain.diagnosis.findings import TITLES
from parity.measure.core.compare import Comparison, first_difference
from parity.use.reporting.console import print_line, print_table, short_ratio

if TYPE_CHECKING:
    from parity.explain.diagnosis.diagnose import Diagnosis
    from parity.explain.diagnosis.weights.differences import WeightsComparison

INDENT = 4
"""Spaces before the second and further lines of a diagnosis."""


class HasLines(Protocol):
    """A diagnosis of a layer, of ranks or of a recording."""

    def lines(self, *, verbose: bool = False) -> Iterator[tuple[str, str]]: ...


def print_diagnosis(
    diagnosis: HasLines, out: Console, *, is_right: bool, verbose: bool = False
) -> None:
    """Print a diagnosis: likely bug, first wrong stage, evidence, fix, more.

    On a terminal, labels are bold and long lines continue with an indent.

    Args:
        diagnosis: diagnosis of a layer, of ranks or of a recording.
        out: the console.
        is_right: True if nothing is wrong.
        verbose: also print alternatives, patterns, nearest bugs and conventions.
    """
    for label, text in diagnosis.lines(verbose=verbose):
        style = "not bold"
        if is_right:
            style = "bold green"
        elif label.startswith(TITLES):
            style = "bold red"
        line = Text(style="bold")
        if label:
            line.append(f"{label}: ")
        line.append(text, style)
        if out.is_terminal:
            line = _indented(line, out)
        out.print(line, soft_wrap=True)


def _indented(line: Text, out: Console) -> Text:
    """Return a line folded at the width of the terminal, with an indent after each break."""
    # An empty line folds into no parts.
    parts = line.wrap(out, out.width - INDENT) or [line]
    for part in parts:
        part.rstrip()
    return Text("\n" + " " * INDENT).join(parts)


def print_failure(
    comparison: Comparison, diagnosis: Diagnosis | None, out: Console, *, verbose: bool = False
) -> None:
    """Print the first difference of a case and its diagnosis; the values only if verbose, or if no
    bug is known.
    """
    text = comparison.as_text(with_budget=diagnosis is None)
    title, _, numbers = text.partition("\n")
    print_line(out, title, "red")
    if diagnosis is not None:
        print_diagnosis(diagnosis, out, is_right=False, verbose=verbose)
    if numbers and (verbose or diagnosis is None or not diagnosis.likely_bug):
        print_line(out, numbers)


def print_weights(
    weights: WeightsComparison, diagnosis: Diagnosis, out: Console, *, verbose: bool = False
) -> None:
    """Print the tensors of two files that differ and the pattern of each, then the diagnosis."""
    style = "bold green" if weights.same else ""
    print_line(out, str(weights), style)
    print_explanation(weights, diagnosis, out, verbose=verbose)


def print_explanation(
    weights: WeightsComparison, diagnosis: Diagnosis, out: Console, *, verbose: bool = False
) -> None:
    """Print the diagnosis of weights that differ, unless patterns explain all tensors and no bug
    does, or the diagnosis only repeats them.
    """
    if weights.same:
        return
    if diagnosis.kind == "none":
        print_line(out, "on probe inputs, no stage differs by more than rounding")
    elif adds_to_patterns(diagnosis, weights):
        print_diagnosis(diagnosis, out, is_right=not diagnosis.is_wrong, verbose=verbose)


def adds_to_patterns(diagnosis: Diagnosis, weights: WeightsComparison) -> bool:
    """Return whether a diagnosis is printed below the patterns of two files' tensors."""
    explains_more = diagnosis.kind == "structure" or bool(weights.unexplained)
    return explains_more and not _repeats(diagnosis, weights)


def _repeats(diagnosis: Diagnosis, weights: WeightsComparison) -> bool:
    """Return True if the only bug is described in the words of a relation of the tensors."""
    if len(diagnosis.findings) != 1:
        return False
    about = diagnosis.findings[0].about
    patterns = [difference.pattern for difference in weights.differences]
    return any(pattern is not None and pattern.words == about for pattern in patterns)


def print_divergence(
    sides: list[list[Comparison]],
    distances: dict[str, float],
    out: Console,
    *,
    verbose: bool = False,
) -> None:
    """Print the errors of two traces and their distance, stage by stage, and the first wrong stage
    of each.
    """
    columns = [Column("stage", no_wrap=True)]
    sides_by_stage = []
    for comparisons in sides:
        columns.append(Column(comparisons[0].backend, justify="right"))
        sides_by_stage.append({comparison.stage: comparison for comparison in comparisons})
    columns.append(Column("difference", justify="right"))
    rows = []
    styles = []
    for stage, distance in distances.items():
        row = [stage]
        style = ""
        for by_stage in sides_by_stage:
            comparison = by_stage.get(stage)
            if comparison is None:
                row.append(short_ratio(None))
                continue
            row.append(short_ratio(comparison.worse_ratio))
            if not comparison.passed:
                style = "red"
        rows.append([*row, f"{distance:.1e}"])
        styles.append(style)
    title = "Error / budget of each against the reference, and their difference"
    print_table(out, title, columns, rows, styles)
    for comparisons in sides:
        _print_side(comparisons, out, verbose=verbose)


def _print_side(comparisons: list[Comparison], out: Console, *, verbose: bool) -> None:
    """Print whether a trace is right, or its first wrong stage."""
    backend = comparisons[0].backend
    wrong = first_difference(comparisons)
    if wrong is None:
        print_line(out, f"{backend} is right", "green")
        return
    print_line(out, f"{backend} is wrong from {wrong.stage}", "red")
    if verbose:
        # The table has its share of the budget.
        out.print(Text(wrong.as_text(with_budget=False)))
