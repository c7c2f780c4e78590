"""JUnit XML: valid, whatever the report holds, and saying what the report says."""

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import xmlschema
from helpers import DATA
from helpers.refusals import refuses

import parity.running.run
from parity import CASES, run_cases
from parity.cli.main import main
from parity.core.compare import Label, failure
from parity.reporting.junit import junit_xml, write_junit
from parity.running.report import Report, SkippedCase

SCHEMA = xmlschema.XMLSchema(DATA / "junit.xsd")


def cases_in(xml):
    root = ElementTree.fromstring(xml)
    return {(test.get("classname"), test.get("name")): test for test in root.iter("testcase")}


@pytest.fixture(scope="module")
def report():
    return run_cases([CASES["textbook"], CASES["large-logits-float16"]], ["jax", "torch"])


@pytest.fixture
def broken(monkeypatch):
    """Makes torch give NaN in the case full, and raise an error in the case causal."""
    original = parity.running.run.record

    def record(backend, reference):
        trace = original(backend, reference)
        if reference.problem.case.name == "causal":
            raise RuntimeError("\x1b[31mred\x00\ud800 <&> ]]>")
        if reference.problem.case.name == "full":
            trace.accumulated["scores"].flat[0] = np.nan
        return trace

    monkeypatch.setattr(parity.running.run, "record", record)


def test_every_case_of_a_backend_and_dtype_is_a_test_of_their_suite(report):
    SCHEMA.validate(junit_xml(report).decode())
    root = ElementTree.fromstring(junit_xml(report))
    suites = {suite.get("name"): [test.get("name") for test in suite.iter("testcase")] for suite in root}
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
def test_a_test_of_pytest_has_its_class_and_name(test, expected):
    found = failure(np.empty(0), "no", Label("a.py::b", "actual", "float32", "q"))
    xml = junit_xml(Report([replace(found, test=test)], {}, {}))
    SCHEMA.validate(xml.decode())
    classname, name = expected
    assert list(cases_in(xml)) == [(classname, f"{name}-float32")]


def test_the_environment_is_told_as_properties(report):
    suite = ElementTree.fromstring(junit_xml(report))[0]
    properties = {found.get("name"): found.get("value") for found in suite.iter("property")}
    assert properties["packages.numpy"] == np.__version__
    assert properties["backends.torch.numerics.float32_matmul_precision"] == "highest"


@pytest.mark.usefixtures("broken")
def test_a_failure_tells_the_first_difference_and_the_command_to_run_it_again():
    report = run_cases([CASES["full"], CASES["no-bias"]], ["torch"])
    xml = junit_xml(report).decode()
    SCHEMA.validate(xml)
    tests = cases_in(xml)
    failed = tests["torch", "full-float32"].find("failure")
    assert failed is not None
    assert (failed.get("type"), failed.get("message")) == ("scores", "scores: inf times the error budget")
    assert str(report.first_differences()[0]) in failed.text
    assert "mha-parity run --backends torch --cases full --dtypes float32" in failed.text
    assert len(tests["torch", "no-bias-float32"]) == 0
    assert ElementTree.fromstring(xml).get("failures") == "1"


@pytest.mark.usefixtures("broken")
def test_what_a_backend_raised_is_an_error_without_the_characters_that_xml_has_not():
    xml = junit_xml(run_cases([CASES["causal"]], ["torch"])).decode()
    SCHEMA.validate(xml)
    error = cases_in(xml)["torch", "causal-float32"].find("error")
    assert error is not None
    assert error.get("message") == r"RuntimeError: \x1b[31mred\x00\ud800 <&> ]]>"
    assert ElementTree.fromstring(xml).get("errors") == "1"


def test_skipped_cases_and_backends_are_skipped_tests_with_their_reason(report):
    skipped = [SkippedCase("full", "float16", "tt", "no such dtype")]
    xml = junit_xml(replace(report, skipped={"ttx": "not installed"}, skipped_cases=skipped)).decode()
    SCHEMA.validate(xml)
    tests = cases_in(xml)
    assert tests["tt", "full-float16"].find("skipped").get("message") == "no such dtype"
    assert tests["ttx", "every case"].find("skipped").get("message") == "not installed"


def test_an_environment_that_is_strange_or_empty_is_still_valid():
    strange = {"a\x00b": {"c": [1, {"d": None}]}, "\ud800": float("nan"), "e": {}}
    lost = failure(np.ones(2), "shape (3,), expected (2,)", Label("full", "t<o>rch", "float32", "q"))
    for environment in (strange, {}):
        SCHEMA.validate(junit_xml(Report([lost], {}, environment, ["\x07"])).decode())


def test_the_schema_refuses_what_is_no_junit(report):
    xml = junit_xml(report).decode()
    assert not SCHEMA.is_valid(xml.replace("classname=", "class="))
    assert not SCHEMA.is_valid(xml.replace("testcase", "test"))


def test_the_same_results_give_the_same_bytes(report, tmp_path):
    write_junit(tmp_path / "a.xml", report)
    assert (tmp_path / "a.xml").read_bytes() == junit_xml(report)


@pytest.mark.usefixtures("broken")
def test_run_and_compare_write_it(tmp_path):
    path, traces = tmp_path / "r.xml", tmp_path / "traces"
    arguments = ["--cases", "full", "--backends", "torch", "--save-traces", str(traces)]
    assert main(["run", *arguments, "--junit", str(path)]) == 1
    assert main(["compare", str(traces), "--junit", str(tmp_path / "c.xml")]) == 1
    for written in (path, tmp_path / "c.xml"):
        SCHEMA.validate(written)
        assert len(list(ElementTree.parse(written).iter("failure"))) == 1


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(capsys, monkeypatch):
    monkeypatch.setattr(parity.running.run, "record", None)
    assert main(["run", "--cases", "textbook", "--junit", "/no/such/folder/r.xml"]) == 2
    assert refuses("--junit", "/no/such/folder/r.xml: ").is_printed_in(capsys.readouterr().err)
