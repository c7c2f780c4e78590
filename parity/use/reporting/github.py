"""A report as annotations of a GitHub workflow, which shows them above its log."""

from __future__ import annotations

from collections.abc import Iterator

from parity.measure.core.compare import Comparison
from parity.measure.text import printable
from parity.use.reporting.summary import summary_line
from parity.use.running.report import Report

MOST = 10
"""Annotations of a kind that GitHub shows for a step."""


def annotation_lines(report: Report) -> Iterator[str]:
    """Yield the lines of a report: an error for each first difference, up to `MOST`, a warning for
    each requested part that was not compared, and the summary as a notice or an error.
    """
    differences = report.first_differences()
    # The last error is the summary.
    for difference in differences[: MOST - 1]:
        title = f"{difference.case}, {difference.dtype}: {difference.backend}"
        yield _annotation("error", title, _message(difference, report))
    gaps = [part for part in report.not_compared if part.is_open]
    for part in gaps[:MOST]:
        yield _annotation("warning", "not compared", f"{part.what}: {part.reason}")
    kind = "notice" if report.status == 0 else "error"
    yield _annotation(kind, "mha-parity", summary_line(report).plain)


def _message(difference: Comparison, report: Report) -> str:
    """Return why a case failed, and how to run it again."""
    lines = []
    diagnosis = report.diagnoses.get(difference.key)
    if diagnosis is not None:
        lines.append(diagnosis.text)
    # A diagnosis states how large the error is.
    lines.append(difference.as_text(with_budget=diagnosis is None))
    command = report.commands.get(difference.key)
    if command is not None:
        lines.append(f"Run it again: {command}")
    return "\n".join(lines)


def _annotation(kind: str, title: str, message: str) -> str:
    """Return a workflow command. Text of files is data: it ends neither the command nor a field."""
    # Control characters other than line ends are made visible first.
    escaped_title = _escaped(printable(title, keep=""))
    for character, code in ((":", "%3A"), (",", "%2C")):
        escaped_title = escaped_title.replace(character, code)
    return f"::{kind} title={escaped_title}::{_escaped(printable(message))}"


def _escaped(text: str) -> str:
    for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(character, code)
    return text
