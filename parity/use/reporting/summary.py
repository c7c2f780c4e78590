"""Parts of a report that the terminal, the page and JUnit share: last lines, skipped cases,
commands to repeat.
"""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING

from rich.text import Text

from parity.measure.core.cases import find_case
from parity.measure.core.compare import first_difference
from parity.measure.core.stages import stage_named
from parity.measure.text import and_listed, counted, some_of

if TYPE_CHECKING:
    from parity.measure.core.compare import Comparison
    from parity.use.running.report import Report


MOST_IN_LINE = 3
"""Largest number of gaps in the last line; lines above it have all."""

STYLES = {0: "bold green", 1: "bold red", 2: "bold yellow"}
"""Style of the last line for each exit status."""


def summary_line(report: Report) -> Text:
    """Return one line: how many stages agree, how many do not, and what was not compared."""
    summary, groups = report.summary, report.groups()
    less = _not_compared_words(report)
    if not groups:
        return Text(f"nothing was compared{less}", style="bold yellow")
    backends = sorted({backend for _, _, backend in groups})
    count = len({case for case, _, _ in groups})
    one = len(backends) == 1
    verdict = (
        ("agrees" if one else "agree")
        if not summary["failed"]
        else ("does" if one else "do") + " NOT agree"
    )
    counts = f"{summary['passed']} stages passed, {summary['failed']} failed"
    if report.skipped:
        counts += f", {counted(len(report.skipped), 'backend')} skipped"
    by_reference = all(comparison.by_reference for comparison in report.comparisons)
    expected = "the float64 reference" if by_reference else "the expected values"
    return Text(
        f"{and_listed(backends)} {verdict} with {expected}: {counted(count, 'case')}, "
        f"{counts}{less}",
        style=STYLES[report.status],
    )


def _not_compared_words(report: Report) -> str:
    """Return the end of the last line: what was not compared, with the reasons; empty if everything
    was.
    """
    wanted = [f"{each.what} ({each.reason})" for each in report.not_compared if each.is_open]
    others = [f"{each.what} ({each.reason})" for each in report.not_compared if not each.is_open]
    words = ""
    if wanted:
        permitted = ", as --allow-skipped permits" if report.allow_skipped else ""
        words += f"; NOT compared{permitted}: {some_of(wanted, MOST_IN_LINE)}"
    if others:
        words += f"; nothing to compare in {some_of(others, MOST_IN_LINE)}"
    return words


def not_exercised_line(report: Report) -> str:
    """Return in a line what the length of the sequences left untested, and the length that tests
    it; or nothing.
    """
    if not report.not_exercised:
        return ""
    entries = []
    for each in report.not_exercised:
        where = some_of(each.layers, MOST_IN_LINE)
        memory = f", with about {each.gib:.0f} GiB of memory" if each.gib >= 1.0 else ""
        entries.append(f"{each.what} in {where} (--seq-len {each.needed} would{memory})")
    number = report.not_exercised[0].num_tokens
    return f"NOT exercised by {counted(number, 'token')}: {'; '.join(entries)}"


def worst_of(comparisons: list[Comparison]) -> Comparison:
    """Return the stage that represents a case: its first difference, or the largest share of a
    budget.
    """
    return first_difference(comparisons) or max(
        comparisons, key=lambda comparison: comparison.worse_ratio
    )


def skipped_reasons(report: Report) -> list[str]:
    """Return each reason for which something was not compared, once."""
    cases = Counter(
        (each.backend, each.dtype, each.stage, each.reason) for each in report.skipped_cases
    )
    reasons = [*report.skipped.values()]
    for (backend, dtype, stage, reason), number in cases.items():
        whose = ", ".join(filter(None, (backend, dtype, stage)))
        reasons.append(f"{whose}: {reason} ({counted(number, 'case')})")
    for each in report.left_out:
        whose = f"{each.what} of {some_of(each.labels)}" if each.labels else each.what
        reasons.append(f"{whose}: {each.reason}")
    return reasons


def reproduction(comparison: Comparison, report: Report) -> str:
    """Return the command that runs a comparison's case again; empty if its name is not enough."""
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
