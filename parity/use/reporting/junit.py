"""Results for continuous integration: JUnit XML, a test case for each case, dtype and backend."""

from __future__ import annotations

import os
from xml.etree import ElementTree

from parity.measure.core.compare import Comparison, first_difference
from parity.measure.files.target import write_whole
from parity.measure.text import printable
from parity.use.reporting.summary import not_exercised_line, reproduction, summary_line
from parity.use.running.report import Report


def write_junit(path: str | os.PathLike[str], report: Report) -> None:
    """Write a report as JUnit XML, whole or not at all.

    Each backend and dtype is a test suite, and each case a test case. It fails with the text of its
    first difference. It is an error if the backend raised one or its trace is missing, or skipped
    with the reason. A program whose devices send too much is a test case that fails. A backend that
    did not run is a suite of one skipped test, and parts of a model that were not compared are
    skipped tests of a suite of their own. The output of each suite has the last lines of the
    printed report. Tests of the pytest plugin keep their class and name. There are no times, so
    that the bytes depend on the results only.

    Raises:
        OSError: if the file cannot be written.
    """
    write_whole(path, junit_xml(report))


def junit_xml(report: Report) -> bytes:
    """Return the XML that `write_junit` writes."""
    suites: dict[str, list[ElementTree.Element]] = {}
    for (case, dtype, backend), comparisons in report.groups().items():
        test = _test(case, dtype, backend, comparisons[0].test)
        if difference := first_difference(comparisons):
            test.append(_failure(difference, report))
        suites.setdefault(f"{backend} {dtype}", []).append(test)
    for tag, more, unjudged in (
        ("skipped", {}, report.skipped_cases),
        ("error", {"type": "missing"}, report.missing),
    ):
        for each in unjudged:
            name = each.case if each.stage is None else f"{each.case}-{each.stage}"
            test = _test(name, each.dtype, each.backend)
            test.append(_element(tag, message=each.reason, **more))
            suites.setdefault(f"{each.backend} {each.dtype}", []).append(test)
    for backend, reason in report.skipped.items():
        test = _element("testcase", classname=backend, name="every case")
        test.append(_element("skipped", message=reason))
        suites.setdefault(backend, []).append(test)
    for part in report.left_out:
        test = _element("testcase", classname="not compared", name=part.what)
        test.append(_element("skipped", message=part.reason))
        suites.setdefault("not compared", []).append(test)

    everything = [test for tests in suites.values() for test in tests]
    totals = _counts(everything)
    del totals["skipped"]  # some schemas allow it for suites only
    root = _element("testsuites", name="mha-parity", **totals)
    output = [f"warning: {warning}" for warning in report.warnings]
    if report.not_compared:
        output.append(summary_line(report).plain)
    if report.not_exercised:
        output.append(not_exercised_line(report))
    for name, tests in suites.items():
        suite = _element("testsuite", name=name, **_counts(tests))
        properties = _element("properties")
        properties.extend(
            _element("property", name=name, value=value)
            for name, value in report.settings().items()
        )
        if len(properties):
            suite.append(properties)
        suite.extend(tests)
        if output:
            suite.append(_element("system-out", "\n".join(output)))
        root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _test(
    case: str, dtype: str, backend: str, test: tuple[str, str] | None = None
) -> ElementTree.Element:
    """Return a test case with the class of its backend, or the class and name of a pytest test."""
    classname, name = test or (backend, case)
    return _element("testcase", classname=classname, name=f"{name}-{dtype}")


def _failure(difference: Comparison, report: Report) -> ElementTree.Element:
    """Return the failure of a case: its cause as the message if it is known; then the diagnosis and
    the difference.
    """
    diagnosis = report.diagnoses.get((difference.case, difference.dtype, difference.backend))
    raised = difference.stage == "run"  # the backend did not reach any stage
    cause = diagnosis.cause if diagnosis is not None else ""
    message = cause or f"{difference.stage}: {difference.worse_ratio:.3g} times the error budget"
    message = difference.reason if raised else message
    again = reproduction(difference, report)
    found = "" if diagnosis is None else f"{diagnosis.text}\n"
    text = "\n".join(
        filter(None, (found, str(difference), f"  again       {again}" if again else ""))
    )
    return _element("error" if raised else "failure", text, message=message, type=difference.stage)


def _counts(tests: list[ElementTree.Element]) -> dict[str, str]:
    tags = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counts = {name: sum(test.find(tag) is not None for test in tests) for name, tag in tags.items()}
    return {name: str(count) for name, count in ({"tests": len(tests)} | counts).items()}


def _element(tag: str, text: str = "", **attributes: str) -> ElementTree.Element:
    element = ElementTree.Element(
        tag, {name: printable(value) for name, value in attributes.items()}
    )
    element.text = printable(text) or None
    return element
