"""Parts of a report that the terminal, the page and JUnit share: last line, skipped cases, commands to repeat."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from parity.core.cases import find_case
from parity.core.compare import first_difference
from parity.core.stages import stage_named
from parity.sharding.mesh import words_of
from parity.text import and_listed, counted

if TYPE_CHECKING:
    from parity.core.compare import Comparison
    from parity.running.report import Report


def summary_line(report: Report) -> Text:
    """Return one line: how many stages agree, how many do not, and how much was skipped."""
    summary, groups = report.summary, report.groups()
    if not groups:
        return Text("nothing was compared", style="bold yellow")
    backends = sorted({backend for _, _, backend in groups})
    count = len({case for case, _, _ in groups})
    one = len(backends) == 1
    verdict = ("agrees" if one else "agree") if not summary["failed"] else ("does" if one else "do") + " NOT agree"
    counts = f"{summary['passed']} stages passed, {summary['failed']} failed"
    numbers = {"backend": len(report.skipped), "case": len(report.skipped_cases)}
    skipped = " and ".join(counted(number, what) for what, number in numbers.items() if number)
    counts += f", {skipped} skipped" if skipped else ""
    counts += f", {counted(len(report.needless), 'program')} sent more than needed" if report.needless else ""
    counts += f", {counted(len(report.missing), 'trace')} missing" if report.missing else ""
    by_reference = all(comparison.by_reference for comparison in report.comparisons)
    expected = "the float64 reference" if by_reference else "the expected values"
    return Text(
        f"{and_listed(backends)} {verdict} with {expected}: {counted(count, 'case')}, {counts}",
        style="bold red" if report.status else "bold green",
    )


def worst_of(comparisons: list[Comparison]) -> Comparison:
    """Return the stage that represents a case: its first difference, or the largest share of a budget."""
    return first_difference(comparisons) or max(comparisons, key=lambda comparison: comparison.worse_ratio)


def skipped_reasons(report: Report) -> list[str]:
    """Return each reason for which something was skipped, once."""
    reasons = Counter((skipped.backend, skipped.dtype, skipped.reason) for skipped in report.skipped_cases)
    return [
        *report.skipped.values(),
        *(f"{backend}, {dtype}: {why} ({counted(n, 'case')})" for (backend, dtype, why), n in reasons.items()),
    ]


class Sent(NamedTuple):
    """Operations in which devices of a mesh send each other data, in one kind of program, and its cases.

    `counted` and `needed` are words, and `excuse` the reason for sending more than needed. `passed` is True if nothing
    is sent needlessly, or the excuse holds.
    """

    backend: str
    program: str
    counted: str
    needed: str
    excuse: str
    passed: bool
    cases: list[str]


def sent_by_program(report: Report) -> list[Sent]:
    """Return the traffic of each kind of program, with equal cases in one entry; more than needed comes last."""
    alike: dict[tuple[bool, str, str, str, str, str], dict[str, None]] = {}
    for each in report.collectives:
        words = (words_of(each.counted), words_of(each.ideal), "" if each.is_ideal else each.excuse)
        alike.setdefault((not each.passed, each.backend, each.program, *words), {})[each.case] = None
    return [
        Sent(backend, program, counted, needed, excuse, not has_failed, list(cases))
        for (has_failed, backend, program, counted, needed, excuse), cases in sorted(alike.items())
    ]


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
