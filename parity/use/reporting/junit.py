"""Results for continuous integration: JUnit XML, a test case for each case, dtype and backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from xml.etree import ElementTree

from parity.measure.core.compare import Comparison, first_difference
from parity.measure.files.target import write_whole
from parity.measure.text import printable
from parity.use.reporting.summary import not_exercised_line, summary_line
from parity.use.running.report import Report, SkippedCase


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
    suites = _suites(report)
    totals = _counts(list(chain.from_iterable(suites.values())))
    # Some schemas of JUnit XML allow this attribute for suites only.
    del totals["skipped"]
    root = _element("testsuites", name="mha-parity", **totals)
    output = "\n".join(_last_lines(report))
    settings = report.settings()
    for name, tests in suites.items():
        suite = _element("testsuite", name=name, **_counts(tests))
        if settings:
            suite.append(_properties(settings))
        suite.extend(tests)
        if output:
            suite.append(_element("system-out", output))
        root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _suites(report: Report) -> dict[str, list[ElementTree.Element]]:
    """Return the test cases of each suite, by its name."""
    suites: dict[str, list[ElementTree.Element]] = {}
    for (case, dtype, backend), comparisons in report.groups().items():
        test = _test(case, dtype, backend, comparisons[0].test)
        difference = first_difference(comparisons)
        if difference is not None:
            test.append(_failure(difference, report))
        suites.setdefault(f"{backend} {dtype}", []).append(test)
    for skipped in report.skipped_cases:
        test = _test_without_result(skipped, _element("skipped", message=skipped.reason))
        suites.setdefault(f"{skipped.backend} {skipped.dtype}", []).append(test)
    for missing in report.missing:
        error = _element("error", message=missing.reason, type="missing")
        test = _test_without_result(missing, error)
        suites.setdefault(f"{missing.backend} {missing.dtype}", []).append(test)
    for backend, reason in report.skipped.items():
        suites.setdefault(backend, []).append(_skipped_test(backend, "every case", reason))
    for part in report.left_out:
        test = _skipped_test("not compared", part.what, part.reason)
        suites.setdefault("not compared", []).append(test)
    return suites


def _last_lines(report: Report) -> list[str]:
    """Return the last lines of the printed report: warnings, and what was not compared."""
    lines = [f"warning: {warning}" for warning in report.warnings]
    if report.not_compared:
        lines.append(summary_line(report).plain)
    if report.not_exercised:
        lines.append(not_exercised_line(report))
    return lines


def _properties(settings: Mapping[str, str]) -> ElementTree.Element:
    """Return the environment of a suite."""
    properties = _element("properties")
    for name, value in settings.items():
        properties.append(_element("property", name=name, value=value))
    return properties


def _test(
    case: str, dtype: str, backend: str, test: tuple[str, str] | None = None
) -> ElementTree.Element:
    """Return a test case with the class of its backend, or the class and name of a pytest test."""
    classname, name = test or (backend, case)
    return _element("testcase", classname=classname, name=f"{name}-{dtype}")


def _test_without_result(skipped: SkippedCase, reason: ElementTree.Element) -> ElementTree.Element:
    """Return a test case that has only the reason why there is no comparison."""
    name = skipped.case
    if skipped.stage is not None:
        name += f"-{skipped.stage}"
    test = _test(name, skipped.dtype, skipped.backend)
    test.append(reason)
    return test


def _skipped_test(classname: str, name: str, reason: str) -> ElementTree.Element:
    """Return a skipped test case that belongs to no case of the report."""
    test = _element("testcase", classname=classname, name=name)
    test.append(_element("skipped", message=reason))
    return test


def _failure(difference: Comparison, report: Report) -> ElementTree.Element:
    """Return the failure of a case: its cause as the message if it is known; then the diagnosis and
    the difference.
    """
    key = difference.key
    diagnosis = report.diagnoses.get(key)
    message = f"{difference.stage}: {difference.worse_ratio:.3g} times the error budget"
    tag = "failure"
    if difference.stage == "run":
        # The backend raised an error before it reached any stage.
        tag = "error"
        message = difference.reason
    elif diagnosis is not None:
        message = diagnosis.headline
    paragraphs = []
    if diagnosis is not None:
        paragraphs.append(f"{diagnosis.text}\n")
    paragraphs.append(difference.as_text(with_budget=diagnosis is None))
    if key in report.commands:
        paragraphs.append(f"  rerun       {report.commands[key]}")
    return _element(tag, "\n".join(paragraphs), message=message, type=difference.stage)


def _counts(tests: list[ElementTree.Element]) -> dict[str, str]:
    """Return the numbers of test cases, as attributes of a suite."""
    counts = {"tests": str(len(tests))}
    for name, tag in {"failures": "failure", "errors": "error", "skipped": "skipped"}.items():
        count = sum(test.find(tag) is not None for test in tests)
        counts[name] = str(count)
    return counts


def _element(tag: str, text: str = "", **attributes: str) -> ElementTree.Element:
    """Return an element whose text and attributes have no characters that XML does not allow."""
    printable_attributes = {name: printable(value) for name, value in attributes.items()}
    element = ElementTree.Element(tag, printable_attributes)
    # An empty text would be an opening and a closing tag.
    element.text = printable(text) or None
    return element
