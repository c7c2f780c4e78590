"""Report of a run, or of a comparison of traces, on a terminal: cases, stages, and differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column
from rich.text import Text

from parity.measure.core.compare import Comparison
from parity.measure.core.stages import stage_named
from parity.use.reporting.console import NARROWEST, print_line, print_table, short_ratio
from parity.use.reporting.diagnosis import print_failure
from parity.use.reporting.grouping import grouped
from parity.use.reporting.summary import (
    case_grid,
    not_exercised_line,
    skipped_reasons,
    summary_line,
    worst_of,
)

if TYPE_CHECKING:
    from parity.use.running.report import Report

DETAILED_FAILURES = 5
"""Failed cases that a terminal shows in full, an arbitrary number; the JSON has all."""


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
    _print_failures(report, differences, out, verbose=verbose)
    if differences or not quiet:
        out.print()
    if not quiet:
        for warning in report.warnings:
            print_line(out, f"warning: {warning}", "yellow")
        for reason in skipped_reasons(report):
            print_line(out, f"skipped: {reason}", "yellow")
        for line in report.exercised:
            print_line(out, line, "")
    not_exercised = not_exercised_line(report)
    if not_exercised:
        print_line(out, not_exercised, "yellow")
    out.print(summary_line(report), soft_wrap=True)


def _print_failures(
    report: Report, differences: list[Comparison], out: Console, *, verbose: bool
) -> None:
    """Print the first differences with their diagnoses, and how many more there are."""
    for comparison in differences[:DETAILED_FAILURES]:
        key = comparison.key
        diagnosis = report.diagnoses.get(key)
        out.print()
        print_failure(comparison, diagnosis, out, verbose=verbose)
        if key in report.commands:
            print_line(out, f"  rerun       {report.commands[key]}")
    num_hidden = len(differences) - DETAILED_FAILURES
    if num_hidden > 0:
        out.print(f"\n… and {num_hidden} more; --json has all")


def print_case_table(report: Report, out: Console) -> None:
    """Print the worst stage and its share of the budget: one row per case and dtype, one column per
    backend.
    """
    groups = report.groups()
    skipped_keys = sorted((case.case, case.dtype, case.backend) for case in report.skipped_cases)
    for key in skipped_keys:
        groups.setdefault(key, [])
    grid = case_grid(groups)
    columns = [Column("case", no_wrap=True)]
    if grid.shows_dtypes:
        columns.append(Column("dtype", no_wrap=True))
    columns.append(Column("stages", justify="right", no_wrap=True))
    for backend in grid.backends:
        header = Text(backend, no_wrap=True, overflow="ellipsis")
        columns.append(Column(header, min_width=NARROWEST))
    rows = []
    for case, dtype in grid.rows:
        num_stages = 0
        verdicts = []
        for backend in grid.backends:
            comparisons = groups.get((case, dtype, backend))
            verdicts.append(_verdict(comparisons))
            num_stages = max(num_stages, len(comparisons or []))
        row: list[str | Text] = [case]
        if grid.shows_dtypes:
            row.append(dtype)
        rows.append([*row, str(num_stages), *verdicts])
    print_table(out, "Worst error / budget of each case (1.00 is the limit)", columns, rows)


def _verdict(comparisons: list[Comparison] | None) -> Text:
    """Return the text of a cell: the stage may be cut off if it passed, and is folded if it failed.

    `comparisons` is empty if the backend skipped the case, and None if it does not belong to it.
    """
    if comparisons is None:
        return Text("—", style="dim")
    if not comparisons:
        return Text("skipped", style="dim")
    worst = worst_of(comparisons)
    if not worst.passed:
        words = f"FAIL {short_ratio(worst.worse_ratio)} {worst.stage}"
        return Text(words, style="bold red", overflow="fold")
    words = f"ok {short_ratio(worst.ratio)} {worst.stage}"
    return Text(words, style="green", no_wrap=True, overflow="ellipsis")


def print_stage_table(report: Report, out: Console) -> None:
    """Print the worst error / budget and largest absolute error of each backend over all cases, one
    row per stage.
    """
    backends = list(dict.fromkeys(comparison.backend for comparison in report.comparisons))
    of_kinds = grouped(report.comparisons, lambda comparison: stage_named(comparison.stage).kind)
    rows = []
    for kind, comparisons in of_kinds.items():
        of_backends = grouped(comparisons, lambda comparison: comparison.backend)
        row: list[str | Text] = [kind]
        for backend in backends:
            row.append(_largest_errors(of_backends.get(backend, [])))
        worst = max(comparisons, key=lambda comparison: comparison.worse_ratio)
        where = f"{worst.case} ({worst.backend})" if worst.worse_ratio else ""
        rows.append([*row, Text(where, style="dim", no_wrap=True, overflow="ellipsis")])
    columns: list[str | Column] = [Column("stage", no_wrap=True)]
    for backend in backends:
        columns.append(Column(backend, justify="right"))
    columns.append("worst in")
    print_table(out, "Stage by stage: worst error / budget (largest absolute error)", columns, rows)


def _largest_errors(comparisons: list[Comparison]) -> Text:
    """Return the text of a cell: the worst error / budget, and the largest absolute error."""
    if not comparisons:
        return Text(short_ratio(None))
    ratio = max(comparison.worse_ratio for comparison in comparisons)
    max_abs = max(comparison.max_abs for comparison in comparisons)
    has_failed = any(not comparison.passed for comparison in comparisons)
    style = "bold red" if has_failed else ""
    return Text.assemble((short_ratio(ratio), style), f" ({max_abs:.1e})")


def print_comparison_table(report: Report, out: Console) -> None:
    """Print every comparison in a row."""
    columns: list[str | Column] = ["case", "stage", Column("dtype"), Column("backend")]
    for name in ("error", "budget", "ratio", "local", "max abs", "max ulp"):
        columns.append(Column(name, justify="right"))
    rows = []
    styles = []
    for comparison in report.comparisons:
        names = (comparison.case, comparison.stage, comparison.dtype, comparison.backend)
        errors = (
            f"{comparison.error:.0e}",
            f"{comparison.budget:.0e}",
            short_ratio(comparison.ratio),
            short_ratio(comparison.local_ratio),
        )
        sizes = (f"{comparison.max_abs:.0e}", f"{comparison.max_ulp:.4g}")
        style = "" if comparison.passed else "red"
        rows.append((*names, *errors, *sizes))
        styles.append(style)
    print_table(out, "Every comparison", columns, rows, styles)
