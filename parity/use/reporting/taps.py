"""Verdicts on recordings of running models, on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column

from parity.explain.diagnosis.tap_pairs import STAGES, TapDifference
from parity.explain.diagnosis.taps import TapVerdict
from parity.use.reporting.console import print_line, print_table
from parity.use.reporting.diagnosis import print_diagnosis


def print_verdict(verdict: TapVerdict, name: str, out: Console, *, verbose: bool = False) -> None:
    """Print the first wrong layer of a recording and its diagnosis, below the recording's name if
    there are several.
    """
    if name:
        print_line(out, name, "bold")
    print_diagnosis(verdict, out, is_right=verdict.passed, verbose=verbose)


def print_difference(difference: TapDifference, out: Console, *, with_table: bool) -> None:
    """Print the distance of two recordings, layer by layer, and which layer explains it."""
    if with_table:
        _print_distances(difference, out)
    style = "bold green" if difference.agrees else "red"
    print_line(out, str(difference), style)


def _print_distances(difference: TapDifference, out: Console) -> None:
    """Print a table with a row for each layer, and a column for each stage that a layer has."""
    compared_stages = set()
    for layer in difference.layers:
        compared_stages.update(layer.errors)
    stages = [stage for stage in ("input", *STAGES) if stage in compared_stages]
    columns = [Column("layer", no_wrap=True)]
    for stage in stages:
        columns.append(Column(stage, justify="right", no_wrap=True))
    rows = []
    styles = []
    for layer in difference.layers:
        row = [layer.layer]
        for stage in stages:
            error = layer.errors.get(stage)
            number = "—" if error is None else f"{error:.0e}"
            row.append(number)
        style = "red" if layer.is_culprit else ""
        rows.append(row)
        styles.append(style)
    title = "Distance as a share of the first recording (root mean square)"
    print_table(out, title, columns, rows, styles)
