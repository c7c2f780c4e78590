"""Report of a run, or of a comparison of traces, on a terminal: cases, stages, and differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.measure.core.cases import find_case
from parity.measure.core.compare import Comparison
from parity.measure.core.stages import stage_named
from parity.use.reporting.console import NARROWEST, print_table, short_ratio
from parity.use.reporting.diagnosis import print_failure
from parity.use.reporting.summary import (
    not_exercised_line,
    reproduction,
    skipped_reasons,
    summary_line,
    worst_of,
)

if TYPE_CHECKING:
    from parity.use.running.report import Report

DETAILED_FAILURES = 5  # in full on the terminal; all are in the JSON


def print_report(
    report: Report, out: Console, *, verbose: bool = False, quiet: bool = False
) -> None:
    """Print a report: cases, stages, differences, what was not compared with reasons, and a last
    line.

    `verbose` adds every comparison and all of each diagnosis. `quiet` leaves only what is wrong,
    what the lengths did not exercise, and the last line, which says what was not compared.
    """
    if verbose:
        print_comparison_table(report, out)
    if not quiet:
        print_case_table(report, out)
        print_stage_table(report, out)
    differences = report.first_differences()
    for comparison in differences[:DETAILED_FAILURES]:
        diagnosis = report.diagnoses.get((comparison.case, comparison.dtype, comparison.backend))
        out.print()
        print_failure(comparison, diagnosis, out, verbose=verbose)
        if command := reproduction(comparison, report):
            out.print(f"  again       {command}", soft_wrap=True)
    if len(differences) > DETAILED_FAILURES:
        out.print(f"\n… and {len(differences) - DETAILED_FAILURES} more; --json has all")
    if differences or not quiet:
        out.print()
    if not quiet:
        for warning in report.warnings:
            out.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
        for reason in skipped_reasons(report):
            out.print(Text(f"skipped: {reason}", style="yellow"), soft_wrap=True)
    if words := not_exercised_line(report):
        out.print(Text(words, style="yellow"), soft_wrap=True)
    out.print(summary_line(report), soft_wrap=True)


def print_case_table(report: Report, out: Console) -> None:
    """Print the worst stage and its share of the budget, one row per case and dtype, one column per
    backend.
    """
    groups = report.groups()
    for key in sorted(
        (skipped.case, skipped.dtype, skipped.backend) for skipped in report.skipped_cases
    ):
        groups.setdefault(key, [])
    backends = list(dict.fromkeys(backend for _, _, backend in groups))
    # A case that has one dtype of its own has it in its name.
    dtypes = {
        dtype
        for case, dtype, _ in groups
        if (known := find_case(case)) is None or known.dtype is None
    }
    pairs = list(dict.fromkeys((case, dtype) for case, dtype, _ in groups))
    columns = [Column("case", no_wrap=True)]
    columns += [Column("dtype", no_wrap=True)] if len(dtypes) > 1 else []
    columns.append(Column("stages", justify="right", no_wrap=True))
    columns += [
        Column(Text(name, no_wrap=True, overflow="ellipsis"), min_width=NARROWEST)
        for name in backends
    ]
    rows = []
    for case, dtype in pairs:
        of_backends = [groups.get((case, dtype, backend)) for backend in backends]
        row = [
            case,
            *([dtype] if len(dtypes) > 1 else []),
            str(max(len(group or []) for group in of_backends)),
        ]
        rows.append([*row, *map(_verdict, of_backends)])
    print_table(out, "Worst error / budget of each case (1.00 is the limit)", columns, rows)


def _verdict(comparisons: list[Comparison] | None) -> Text:
    """Return the text of a cell; the stage may be cut off if it passed, and is folded if it
    failed.
    """
    if not comparisons:
        return Text("—" if comparisons is None else "skipped", style="dim")
    worst = worst_of(comparisons)
    if not worst.passed:
        words = f"FAIL {short_ratio(worst.worse_ratio)} {worst.stage}"
        return Text(words, style="bold red", overflow="fold")
    return Text(
        f"ok {short_ratio(worst.ratio)} {worst.stage}",
        style="green",
        no_wrap=True,
        overflow="ellipsis",
    )


def print_stage_table(report: Report, out: Console) -> None:
    """Print the worst error / budget and largest absolute error of each backend over all cases, one
    row per stage.
    """
    backends = list(dict.fromkeys(comparison.backend for comparison in report.comparisons))
    kinds: dict[str, list[Comparison]] = {}
    for comparison in report.comparisons:
        kinds.setdefault(stage_named(comparison.stage).kind, []).append(comparison)
    rows = []
    for kind, comparisons in kinds.items():
        row: list[str | Text] = [kind]
        for backend in backends:
            found = [comparison for comparison in comparisons if comparison.backend == backend]
            style = "" if all(comparison.passed for comparison in found) else "bold red"
            ratio = short_ratio(max((comparison.worse_ratio for comparison in found), default=None))
            size = f" ({max(comparison.max_abs for comparison in found):.1e})" if found else ""
            row.append(Text.assemble((ratio, style), size))
        worst = max(comparisons, key=lambda comparison: comparison.worse_ratio)
        place = f"{worst.case} ({worst.backend})" if worst.worse_ratio else ""
        rows.append([*row, Text(place, style="dim", no_wrap=True, overflow="ellipsis")])
    columns = [
        Column("stage", no_wrap=True),
        *(Column(name, justify="right") for name in backends),
        "worst in",
    ]
    print_table(out, "Stage by stage: worst error / budget (largest absolute error)", columns, rows)


def print_comparison_table(report: Report, out: Console) -> None:
    """Print every comparison in a row."""
    styles = ["" if each.passed else "red" for each in report.comparisons]
    columns = ["case", "stage", Column("dtype"), Column("backend")]
    columns += [
        Column(name, justify="right")
        for name in ("error", "budget", "ratio", "local", "max abs", "max ulp")
    ]
    rows = []
    for each in report.comparisons:
        errors = (
            f"{each.error:.0e}",
            f"{each.budget:.0e}",
            short_ratio(each.ratio),
            short_ratio(each.local_ratio),
        )
        sizes = (f"{each.max_abs:.0e}", f"{each.max_ulp:.4g}")
        rows.append((each.case, each.stage, each.dtype, each.backend, *errors, *sizes))
    print_table(out, "Every comparison", columns, rows, styles)
