"""Verdicts on recordings of running models, on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.explain.diagnosis.tap_pairs import STAGES, TapDifference
from parity.explain.diagnosis.taps import TapVerdict
from parity.use.reporting.console import print_table
from parity.use.reporting.diagnosis import print_diagnosis


def print_verdict(verdict: TapVerdict, name: str, out: Console, *, verbose: bool = False) -> None:
    """Print the first wrong layer of a recording and its diagnosis, below the recording's name if
    there are several.
    """
    if name:
        out.print(Text(name, style="bold"), soft_wrap=True)
    print_diagnosis(verdict, out, is_right=verdict.passed, verbose=verbose)


def print_difference(difference: TapDifference, out: Console, *, with_table: bool) -> None:
    """Print the distance of two recordings, layer by layer, and which layer explains it."""
    if with_table:
        stages = [
            each
            for each in ("input", *STAGES)
            if any(each in layer.errors for layer in difference.layers)
        ]
        columns = [
            Column("layer", no_wrap=True),
            *(Column(name, justify="right", no_wrap=True) for name in stages),
        ]
        rows = []
        for layer in difference.layers:
            numbers = (
                f"{layer.errors[stage]:.0e}" if stage in layer.errors else "—" for stage in stages
            )
            rows.append([layer.layer, *numbers])
        styles = ["red" if layer.is_culprit else "" for layer in difference.layers]
        print_table(
            out,
            "Distance as a share of the first recording (root mean square)",
            columns,
            rows,
            styles,
        )
    out.print(
        Text(str(difference), style="bold green" if difference.agrees else "red"), soft_wrap=True
    )
