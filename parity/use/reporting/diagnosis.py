"""Diagnoses and diverging traces on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.measure.core.compare import Comparison, first_difference
from parity.use.reporting.console import print_table, short_ratio

if TYPE_CHECKING:
    from parity.explain.diagnosis.diagnose import Diagnosis
    from parity.port.conversion.differences import WeightsComparison


class HasLines(Protocol):
    """A diagnosis of a layer, of ranks or of a recording."""

    def lines(self, *, verbose: bool = False) -> Iterator[tuple[str, str]]: ...


def print_diagnosis(
    diagnosis: HasLines, out: Console, *, is_right: bool, verbose: bool = False
) -> None:
    """Print a diagnosis: likely bug, first wrong stage, evidence, fix, more.

    On a terminal, labels are bold and long lines continue with an indent.

    Args:
        diagnosis: of a layer, of ranks or of a recording.
        out: the console.
        is_right: True if nothing is wrong.
        verbose: also print alternatives, patterns, nearest bugs and conventions.
    """
    for label, text in diagnosis.lines(verbose=verbose):
        line = Text(f"{label}: " if label else "", style="bold")
        line.append(
            text,
            "bold green"
            if is_right
            else "bold red"
            if label.startswith("Likely bug")
            else "not bold",
        )
        if out.is_terminal:
            parts = line.wrap(out, out.width - 4) or [line]
            for part in parts:
                part.rstrip()
            line = Text("\n    ").join(parts)
        out.print(line, soft_wrap=True)


def print_failure(
    comparison: Comparison, diagnosis: Diagnosis | None, out: Console, *, verbose: bool = False
) -> None:
    """Print the first difference of a case and its diagnosis; the numbers only if verbose, or if no
    bug is known.
    """
    title, _, numbers = str(comparison).partition("\n")
    out.print(Text(title, style="red"), soft_wrap=True)
    if diagnosis is not None:
        print_diagnosis(diagnosis, out, is_right=False, verbose=verbose)
    if numbers and (verbose or diagnosis is None or not diagnosis.likely_bug):
        out.print(Text(numbers), soft_wrap=True)


def print_weights(
    weights: WeightsComparison, diagnosis: Diagnosis, out: Console, *, verbose: bool = False
) -> None:
    """Print the tensors of two files that differ and the pattern of each, then the diagnosis."""
    out.print(Text(str(weights), style="bold green" if weights.same else ""), soft_wrap=True)
    print_explanation(weights, diagnosis, out, verbose=verbose)


def print_explanation(
    weights: WeightsComparison, diagnosis: Diagnosis, out: Console, *, verbose: bool = False
) -> None:
    """Print the diagnosis of weights that differ, unless patterns explain all tensors and no bug
    does.
    """
    if weights.same:
        return
    if diagnosis.kind == "none":
        out.print("on probe inputs, no stage differs by more than rounding", soft_wrap=True)
    elif diagnosis.kind == "structure" or weights.unexplained:
        print_diagnosis(diagnosis, out, is_right=not diagnosis.is_wrong, verbose=verbose)


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
    names = [side[0].backend for side in sides]
    title = "Error / budget of each against the reference, and their difference"
    by_stage = [{comparison.stage: comparison for comparison in side} for side in sides]
    rows, styles = [], []
    for stage, distance in distances.items():
        found = [side.get(stage) for side in by_stage]
        ratios = ("—" if each is None else short_ratio(each.worse_ratio) for each in found)
        styles.append("" if all(each is None or each.passed for each in found) else "red")
        rows.append([stage, *ratios, f"{distance:.1e}"])
    columns = [
        Column("stage", no_wrap=True),
        *(Column(name, justify="right") for name in (*names, "difference")),
    ]
    print_table(out, title, columns, rows, styles)
    for side in sides:
        wrong = first_difference(side)
        words = "is right" if wrong is None else f"is wrong from {wrong.stage}"
        out.print(
            Text(f"{side[0].backend} {words}", style="green" if wrong is None else "red"),
            soft_wrap=True,
        )
        if wrong is not None and verbose:
            out.print(Text(str(wrong)))
