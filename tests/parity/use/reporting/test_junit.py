"""Tests of JUnit XML: it is valid for any report, and has the same results."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import xmlschema
from helpers import DATA
from helpers.input_errors import rejects

import parity.use.running.run
from parity import CASES, run_cases
from parity.measure.core.compare import Label, failure
from parity.use.cli.main import main
from parity.use.reporting.junit import junit_xml, write_junit
from parity.use.running.report import Report, SkippedCase

SCHEMA = xmlschema.XMLSchema(DATA / "junit.xsd")


def cases_in(xml):
    root = ElementTree.fromstring(xml)
    return {(test.get("classname"), test.get("name")): test for test in root.iter("testcase")}


@pytest.fixture(scope="module")
def report():
    return run_cases([CASES["textbook"], CASES["large-logits-float16"]], ["jax", "torch"])


@pytest.fixture
def broken(monkeypatch):
    """Make torch return NaN in the case full, and raise an error in the case causal."""
    original = parity.use.running.run.record

    def record(backend, reference):
        trace = original(backend, reference)
        if reference.problem.case.name == "causal":
            raise RuntimeError("\x1b[31mred\x00\ud800 <&> ]]>")
        if reference.problem.case.name == "full":
            trace.accumulated["scores"].flat[0] = np.nan
        return trace

    monkeypatch.setattr(parity.use.running.run, "record", record)


def test_suites_are_backends_and_dtypes(report):
    """The valid XML has one suite per backend and dtype, with one test per case, and no failure."""
    SCHEMA.validate(junit_xml(report).decode())
    root = ElementTree.fromstring(junit_xml(report))
    suites = {
        suite.get("name"): [test.get("name") for test in suite.iter("testcase")] for suite in root
    }
    assert suites == {
        "jax float32": ["textbook-float32"],
        "torch float32": ["textbook-float32"],
        "jax float16": ["large-logits-float16-float16"],
        "torch float16": ["large-logits-float16-float16"],
    }
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("4", "0", "0")


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        (
            ("tests.test_port.TestLayer", "test_it[a::b] layer 3"),
            ("tests.test_port.TestLayer", "test_it[a::b] layer 3"),
        ),
        (None, ("actual", "a.py::b")),
    ],
)
def test_pytest_tests_keep_class_and_name(test, expected):
    """A comparison in a pytest test has the class and name of this test, otherwise its
    backend and case, and the dtype.
    """
    comparison = failure(np.empty(0), "no", Label("a.py::b", "actual", "float32", "q"))
    xml = junit_xml(Report([replace(comparison, test=test)], {}, {}))
    SCHEMA.validate(xml.decode())
    classname, name = expected
    assert list(cases_in(xml)) == [(classname, f"{name}-float32")]


def test_environment_is_in_suite_properties(report):
    """The properties of a suite have the version of NumPy and the numerics lock of torch."""
    suite = ElementTree.fromstring(junit_xml(report))[0]
    properties = {element.get("name"): element.get("value") for element in suite.iter("property")}
    assert properties["packages.numpy"] == np.__version__
    assert properties["backends.torch.numerics.float32_matmul_precision"] == "highest"


@pytest.mark.usefixtures("broken")
def test_failure_has_first_difference():
    """A failure has the first stage that differs, its report and the command that reproduces
    it; other cases have none.
    """
    report = run_cases([CASES["full"], CASES["no-bias"]], ["torch"])
    xml = junit_xml(report).decode()
    SCHEMA.validate(xml)
    tests = cases_in(xml)
    failed = tests["torch", "full-float32"].find("failure")
    assert failed is not None
    assert (failed.get("type"), failed.get("message")) == (
        "scores",
        "no known bug explains scores",
    )
    assert report.first_differences()[0].as_text(with_budget=False) in failed.text
    assert "mha-parity run --backends torch --cases full --dtypes float32" in failed.text
    assert len(tests["torch", "no-bias-float32"]) == 0
    assert ElementTree.fromstring(xml).get("failures") == "1"


@pytest.mark.usefixtures("broken")
def test_backend_exception_is_escaped_error():
    """An exception of a backend is an error, with characters that XML does not allow escaped."""
    xml = junit_xml(run_cases([CASES["causal"]], ["torch"])).decode()
    SCHEMA.validate(xml)
    error = cases_in(xml)["torch", "causal-float32"].find("error")
    assert error is not None
    assert error.get("message") == r"RuntimeError: \x1b[31mred\x00\ud800 <&> ]]>"
    assert ElementTree.fromstring(xml).get("errors") == "1"


def test_skipped_cases_are_skipped_tests(report):
    """Skipped cases and backends are skipped tests with their reasons."""
    skipped = [SkippedCase("full", "float16", "tt", "no such dtype")]
    xml = junit_xml(
        replace(report, skipped={"ttx": "not installed"}, skipped_cases=skipped)
    ).decode()
    SCHEMA.validate(xml)
    tests = cases_in(xml)
    assert tests["tt", "full-float16"].find("skipped").get("message") == "no such dtype"
    assert tests["ttx", "every case"].find("skipped").get("message") == "not installed"


def test_strange_environment_is_valid():
    """The XML is valid with an empty environment, or one with control characters, surrogates
    and nested values.
    """
    strange = {"a\x00b": {"c": [1, {"d": None}]}, "\ud800": float("nan"), "e": {}}
    lost = failure(
        np.ones(2), "shape (3,), expected (2,)", Label("full", "t<o>rch", "float32", "q")
    )
    for environment in (strange, {}):
        SCHEMA.validate(junit_xml(Report([lost], {}, environment, ["\x07"])).decode())


def test_schema_rejects_invalid_junit(report):
    """The control of these tests: the schema rejects a wrong name of an attribute or an element."""
    xml = junit_xml(report).decode()
    assert not SCHEMA.is_valid(xml.replace("classname=", "class="))
    assert not SCHEMA.is_valid(xml.replace("testcase", "test"))


@pytest.mark.usefixtures("broken")
def test_github_format_has_annotations(capsys):
    """With --output-format github, `run` prints an error for each failed case and the summary, one
    workflow command a line, in which text of exceptions neither ends a command nor a field.
    """
    words = [
        "run",
        "--cases",
        "full,causal,textbook",
        "--backends",
        "torch",
        "--output-format",
        "github",
    ]
    assert main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    titles = [re.fullmatch(r"::error title=([^:,]*)::(.+)", line) for line in lines]
    assert [title[1] for title in titles] == [
        "full%2C float32%3A torch",
        "causal%2C float32%3A torch",
        "mha-parity",
    ]
    assert all(line.isprintable() for line in lines)
    assert "%0ARun it again%3A" not in lines[0]
    assert "%0ARun it again: mha-parity run --backends torch --cases full" in lines[0]
    # The diagnosis states how large the error is.
    assert "%0A  allowed " not in lines[0]
    assert main(["run", "--cases", "textbook", "--backends", "torch", *words[-2:]]) == 0
    assert capsys.readouterr().out.startswith("::notice title=mha-parity::torch agrees ")


def test_written_junit_is_deterministic(report, tmp_path):
    """`write_junit` writes the bytes that `junit_xml` returns for the same report."""
    write_junit(tmp_path / "a.xml", report)
    assert (tmp_path / "a.xml").read_bytes() == junit_xml(report)


@pytest.mark.usefixtures("broken")
def test_run_and_compare_write_junit(tmp_path):
    """`run --junit` and `compare --junit` write valid XML with one failure for a stage with NaN."""
    path, traces = tmp_path / "r.xml", tmp_path / "traces"
    arguments = ["--cases", "full", "--backends", "torch", "--save-traces", str(traces)]
    assert main(["run", *arguments, "--junit", str(path)]) == 1
    assert main(["compare", str(traces), "--junit", str(tmp_path / "c.xml")]) == 1
    for written in (path, tmp_path / "c.xml"):
        SCHEMA.validate(written)
        assert len(list(ElementTree.parse(written).iter("failure"))) == 1


def test_unwritable_junit_path_fails_early(capsys, monkeypatch):
    """A --junit path that cannot be written exits with status 2 and an error with the path,
    before any work.
    """
    monkeypatch.setattr(parity.use.running.run, "record", None)
    assert main(["run", "--cases", "textbook", "--junit", "/no/such/folder/r.xml"]) == 2
    assert rejects("--junit", "/no/such/folder/r.xml: ").is_printed_in(capsys.readouterr().err)
