"""Results of a diagnosis, and the stage at which two traces diverge."""

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
    """Print the diagnosis."""
    style = {"none": "bold green", "structure": "bold", "precision": "bold"}.get(diagnosis.kind, "")
    out.print(Text(str(diagnosis), style=style), soft_wrap=True)


def print_weights(weights: WeightsComparison, diagnosis: Diagnosis, out: Console) -> None:
    """Print which tensors of two files differ, the pattern of the difference, and the bug that explains it."""
    out.print(Text(str(weights), style="bold green" if weights.same else ""), soft_wrap=True)
    print_explanation(weights, diagnosis, out)


def print_explanation(weights: WeightsComparison, diagnosis: Diagnosis, out: Console) -> None:
    """Print the bug that explains why weights differ, or that none does if no pattern explains a tensor."""
    if weights.same:
        return
    if diagnosis.kind == "none":
        out.print("on probe inputs no stage differs by more than the rounding error of its dtype", soft_wrap=True)
    elif diagnosis.kind == "structure" or weights.unexplained:
        print_diagnosis(diagnosis, out)


def print_divergence(sides: list[list[Comparison]], distances: dict[str, float], out: Console) -> None:
    """Print the distances of two traces from the reference and from each other, stage by stage."""
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
