"""Parts of a report that the terminal, the page and JUnit share: the last line, skipped cases, the
rows of the table of cases, and commands that repeat a case.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from parity.measure.core.cases import find_case
from parity.measure.core.compare import first_difference
from parity.measure.core.stages import stage_named
from parity.measure.text import and_listed, counted, some_of

if TYPE_CHECKING:
    from parity.measure.core.compare import Comparison
    from parity.use.running.report import Report


MOST_IN_LINE = 3
"""Largest number of gaps in the last line, an arbitrary number; the lines above it have all."""

STYLES = {0: "bold green", 1: "bold red", 2: "bold yellow"}
"""Style of the last line for each exit status."""


# ---- The last lines ------------------------------------------------------------------------------


def summary_line(report: Report) -> Text:
    """Return one line: how many stages agree, how many do not, and what was not compared."""
    groups = report.groups()
    gaps = _gaps_in_words(report)
    if not groups:
        return Text(f"nothing was compared{gaps}", style="bold yellow")
    backends = sorted({backend for _, _, backend in groups})
    num_cases = len({case for case, _, _ in groups})
    summary = report.summary
    verdict = _verdict(len(backends), has_failed=summary["failed"] > 0)
    counts = f"{counted(summary['passed'], 'stage')} passed, {summary['failed']} failed"
    if report.skipped:
        counts += f", {counted(len(report.skipped), 'backend')} skipped"
    expected = "the float64 reference"
    if not all(comparison.by_reference for comparison in report.comparisons):
        expected = "the expected values"
    return Text(
        f"{and_listed(backends)} {verdict} with {expected}: {counted(num_cases, 'case')}, "
        f"{counts}{gaps}",
        style=STYLES[report.status],
    )


def _verdict(num_backends: int, *, has_failed: bool) -> str:
    """Return the verb of the last line, which has the backends as its subject."""
    if num_backends == 1:
        return "does NOT agree" if has_failed else "agrees"
    return "do NOT agree" if has_failed else "agree"


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
        permitted = ", as --allow-skipped permits" if report.allow_skipped else ""
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


# ---- Commands ------------------------------------------------------------------------------------


def reproduction(comparison: Comparison, report: Report) -> str:
    """Return the command that runs a comparison's case again, or compares its trace; empty if the
    name of the case is not enough.
    """
    path = report.files.get((comparison.case, comparison.dtype, comparison.backend))
    if path is not None:
        return shlex.join(["mha-parity", "compare", path])
    if not comparison.library or find_case(comparison.case) is None:
        return ""
    words = ["mha-parity", "run", "--backends", comparison.library]
    words += ["--cases", comparison.case, "--dtypes", comparison.dtype]
    device = report.environment.get("backends", {}).get(comparison.library, {}).get("device", "cpu")
    if comparison.library == "torch" and device != "cpu":
        words += ["--device", str(device)]
    if stage_named(comparison.stage).is_gradient:
        words.append("--grad")
    return shlex.join(words)
