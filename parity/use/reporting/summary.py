"""Parts of a report that the terminal, the page and JUnit share: the last line, skipped cases, and
the rows of the table of cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from parity.measure.core.cases import find_case
from parity.measure.core.compare import first_difference
from parity.measure.text import and_listed, counted, some_of

if TYPE_CHECKING:
    from parity.measure.core.compare import Comparison
    from parity.use.running.report import Report


MOST_IN_LINE = 3
"""Largest number of gaps in the last line, an arbitrary number; the lines above it have all."""

MOST_SUBJECTS = 5
"""Largest number of implementations or tests in the last line, an arbitrary number."""

STYLES = {0: "bold green", 1: "bold red", 2: "bold yellow"}
"""Style of the last line for each exit status."""


# ---- The last lines ------------------------------------------------------------------------------


def summary_line(report: Report) -> Text:
    """Return one line: how many stages agree, how many do not, and what was not compared."""
    groups = report.groups()
    gaps = _gaps_in_words(report)
    if not groups:
        return Text(f"nothing was compared{gaps}", style="bold yellow")
    num_cases = len({case for case, _, _ in groups})
    summary = report.summary
    counts = f"{counted(summary['passed'], 'stage')} passed, {summary['failed']} failed"
    if report.skipped:
        counts += f", {counted(len(report.skipped), 'backend')} skipped"
    return Text(
        f"{verdict_of(report)}: {counted(num_cases, 'case')}, {counts}{gaps}",
        style=STYLES[report.status],
    )


def verdict_of(report: Report) -> str:
    """Return the verdict in words: `torch agrees with the float64 reference`."""
    subjects = _subjects(report)
    has_failed = bool(report.failed)
    if len(subjects) == 1:
        verb = "does NOT agree" if has_failed else "agrees"
    else:
        verb = "do NOT agree" if has_failed else "agree"
    expected = "the float64 reference"
    if not all(comparison.by_reference for comparison in report.comparisons):
        expected = "the expected values"
    return f"{and_listed(subjects, MOST_SUBJECTS)} {verb} with {expected}"


def _subjects(report: Report) -> list[str]:
    """Return the implementations of a report. A user's own code has no other name than its test or
    function: then these are the cases, only the wrong ones if any is wrong.
    """
    if any(comparison.library for comparison in report.comparisons):
        return sorted({comparison.backend for comparison in report.comparisons})
    cases = report.failed or report.comparisons
    return list(dict.fromkeys(comparison.case for comparison in cases))


def _gaps_in_words(report: Report) -> str:
    """Return the end of the last line: the gaps of the comparison with their reasons, requested
    ones first; empty if there are none.
    """
    requested = []
    not_applicable = []
    for gap in report.not_compared:
        entry = f"{gap.what} ({gap.reason})"
        if gap.is_open:
            requested.append(entry)
        else:
            not_applicable.append(entry)
    words = ""
    if requested:
        permitted = ""
        if report.allow_skipped:
            permitted = ", as --allow-skipped permits"
        words += f"; NOT compared{permitted}: {some_of(requested, MOST_IN_LINE)}"
    if not_applicable:
        words += f"; nothing to compare in {some_of(not_applicable, MOST_IN_LINE)}"
    return words


def not_exercised_line(report: Report) -> str:
    """Return a line with the features that sequences of this length leave untested, and the length
    that tests them; empty if there are none.
    """
    if not report.not_exercised:
        return ""
    entries = []
    for feature in report.not_exercised:
        layers = some_of(feature.layers, MOST_IN_LINE)
        needed = f"--seq-len {feature.needed} would"
        # A run of less than a gibibyte fits any machine.
        if feature.gib >= 1.0:
            needed += f", with about {feature.gib:.0f} GiB of memory"
        entries.append(f"{feature.what} in {layers} ({needed})")
    num_tokens = report.not_exercised[0].num_tokens
    return f"NOT exercised by {counted(num_tokens, 'token')}: {'; '.join(entries)}"


def skipped_reasons(report: Report) -> list[str]:
    """Return each reason for which something was not compared, once."""
    reasons = list(report.skipped.values())
    num_cases = Counter(
        (case.backend, case.dtype, case.stage, case.reason) for case in report.skipped_cases
    )
    for (backend, dtype, stage, reason), number in num_cases.items():
        skipped = ", ".join(filter(None, (backend, dtype, stage)))
        reasons.append(f"{skipped}: {reason} ({counted(number, 'case')})")
    for gap in report.left_out:
        skipped = gap.what
        if gap.labels:
            skipped += f" of {some_of(gap.labels)}"
        reasons.append(f"{skipped}: {gap.reason}")
    return reasons


# ---- Cases ---------------------------------------------------------------------------------------


def worst_of(comparisons: list[Comparison]) -> Comparison:
    """Return the stage that represents a case: its first difference, or the largest share of a
    budget.
    """
    return first_difference(comparisons) or max(
        comparisons, key=lambda comparison: comparison.worse_ratio
    )


class CaseGrid(NamedTuple):
    """The table of cases: a row for each case and dtype, a column for each backend.

    Attributes:
        rows: case and dtype of each row.
        backends: backend of each column.
        shows_dtypes: the name of a case does not determine its dtype.
    """

    rows: list[tuple[str, str]]
    backends: list[str]
    shows_dtypes: bool


def case_grid(keys: Iterable[tuple[str, str, str]]) -> CaseGrid:
    """Return rows and columns for cases, dtypes and backends, in the order of their first key."""
    rows: dict[tuple[str, str], None] = {}
    backends: dict[str, None] = {}
    dtypes = set()
    for name, dtype, backend in keys:
        rows[name, dtype] = None
        backends[backend] = None
        case = find_case(name)
        # A case with a dtype of its own has it in its name.
        if case is None or case.dtype is None:
            dtypes.add(dtype)
    return CaseGrid(list(rows), list(backends), len(dtypes) > 1)
