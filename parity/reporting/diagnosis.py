"""What a diagnosis found, and where two traces part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.core.compare import Comparison, first_difference
from parity.reporting.console import print_table, short_ratio

if TYPE_CHECKING:
    from parity.conversion.differences import WeightsComparison
    from parity.diagnosis.diagnose import Diagnosis


def print_diagnosis(diagnosis: Diagnosis, out: Console) -> None:
    """Print what is wrong, as far as it was found."""
    style = {"none": "bold green", "structure": "bold", "precision": "bold"}.get(diagnosis.kind, "")
    out.print(Text(str(diagnosis), style=style), soft_wrap=True)


def print_weights(weights: WeightsComparison, diagnosis: Diagnosis, out: Console) -> None:
    """Print which tensors of two files differ and by what law, then the mistake that explains it or says more."""
    out.print(Text(str(weights), style="bold green" if weights.same else ""), soft_wrap=True)
    print_explanation(weights, diagnosis, out)


def print_explanation(weights: WeightsComparison, diagnosis: Diagnosis, out: Console) -> None:
    """Print the mistake that explains why weights differ; that there is none, where no law explains a tensor either."""
    if weights.same:
        return
    if diagnosis.kind == "none":
        out.print("on probe inputs no stage differs by more than rounding in its dtype loses", soft_wrap=True)
    elif diagnosis.kind == "structure" or weights.unexplained:
        print_diagnosis(diagnosis, out)


def print_divergence(sides: list[list[Comparison]], distances: dict[str, float], out: Console) -> None:
    """Print, stage by stage, how far two traces are from the reference and from each other, and where they part."""
    names = [side[0].backend for side in sides]
    title = "Error / budget of each against the reference, and their difference"
    by_stage = [{comparison.stage: comparison for comparison in side} for side in sides]
    rows, styles = [], []
    for stage, distance in distances.items():
        found = [side.get(stage) for side in by_stage]
        ratios = ("—" if each is None else short_ratio(each.worse_ratio) for each in found)
        styles.append("" if all(each is None or each.passed for each in found) else "red")
        rows.append([stage, *ratios, f"{distance:.1e}"])
    columns = [Column("stage", no_wrap=True), *(Column(name, justify="right") for name in (*names, "difference"))]
    print_table(out, title, columns, rows, styles)
    for side in sides:
        wrong = first_difference(side)
        words = "is right" if wrong is None else f"goes wrong at {wrong.stage}"
        out.print(Text(f"{side[0].backend} {words}", style="green" if wrong is None else "red"), soft_wrap=True)
        if wrong is not None:
            out.print(Text(str(wrong), style="red"))
