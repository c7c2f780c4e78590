"""Tests of `assert_parity`, its fixture and `--parity-report`, also from an installed wheel."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from xml.etree import ElementTree

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.shell import NO_HYPOTHESIS

import parity.use.reporting.html

# pytester unloads modules that its runs import, so both are imported before
import parity.use.reporting.junit
import parity.use.testing.assertion
from parity import CASES, assert_parity, make_problem
from parity.measure.backends.record import record
from parity.measure.core.stages import stage_named
from parity.measure.core.trace import Reference
from parity.measure.core.weights import dtype_named
from parity.use.testing.assertion import NEXT

FROM_NUMPY = {
    "numpy": np.asarray,
    "torch": lambda x: torch.tensor(x, requires_grad=True),
    "jax": jnp.asarray,
}


@pytest.fixture
def pytester(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", NO_HYPOTHESIS)
    return pytester


@pytest.fixture
def x(rng):
    return rng.standard_normal((2, 3, 4, 5)).astype(np.float32)


def why(*args, **options):
    """Return the message of a comparison, which must fail."""
    with pytest.raises(AssertionError) as caught:
        assert_parity(*args, **options)
    return str(caught.value)


# ---- The assertion -------------------------------------------------------------------------------


@pytest.mark.parametrize("of", FROM_NUMPY)
@pytest.mark.parametrize("to", FROM_NUMPY)
def test_all_array_types_are_compared(x, of, to):
    """NumPy, torch and JAX arrays are compared with each other; one of 120 wrong elements fails."""
    assert_parity(FROM_NUMPY[of](x), FROM_NUMPY[to](x))
    assert "1 / 120" in why(
        FROM_NUMPY[of](x + (np.arange(120) == 7).reshape(x.shape)), FROM_NUMPY[to](x)
    )


def test_all_bfloat16_types_are_compared(x):
    """A bfloat16 tensor of torch passes against JAX's and NumPy's bfloat16 of the same values."""
    assert_parity(torch.tensor(x, dtype=torch.bfloat16), jnp.asarray(x, jnp.bfloat16))
    assert_parity(torch.tensor(x, dtype=torch.bfloat16), x.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "passes", "fails"),
    [
        ("float64", 3e-15, 4e-15),
        ("float32", 1.5e-6, 2.5e-6),
        ("float16", 0.0035, 0.0045),
        ("bfloat16", 0.025, 0.04),
    ],
)
def test_default_tolerance_in_rounding_units(rng, dtype, passes, fails):
    """Without a same-precision result, an error just within the tolerance of the dtype
    passes, and a larger one fails, in units of rounding.
    """
    x = rng.standard_normal((2, 3, 4, 5))
    assert_parity((x * (1 + passes)).astype(dtype_named(dtype)), x)
    assert "units of rounding" in why((x * (1 + fails)).astype(dtype_named(dtype)), x)


def test_narrowest_dtype_sets_tolerance(x):
    """A bfloat16 array among the actual ones allows an error of 1% in others; without it, the
    error fails.
    """
    rounded = x.astype(ml_dtypes.bfloat16)
    assert_parity({"q": rounded, "scores": x * np.float32(1.01)}, {"q": x, "scores": x})
    assert "/scores" in why({"q": x, "scores": x * np.float32(1.01)}, {"q": x, "scores": x})


def test_dtype_argument_sets_tolerance(x):
    """With dtype="bfloat16", an error of 1% in float32 arrays passes."""
    assert_parity(x * np.float32(1.01), x, dtype="bfloat16")


# JAX compiles a case again for each dtype.
@pytest.mark.costly("JAX compiles every stage of a case")
@sample(
    where=lambda case, dtype: (
        (case, dtype) in [("rope-far", "float32"), ("large-logits", "bfloat16")]
    )
)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("causal", "float32"),
        ("gqa", "bfloat16"),
        ("rope-far", "float32"),
        ("wide", "bfloat16"),
        ("large-logits", "float32"),
        ("large-logits", "bfloat16"),
        ("decode-gqa-rope", "bfloat16"),
    ],
)
def test_correct_backends_agree_by_default(case, dtype):
    """Torch and JAX agree in all shared stages of a case by the default tolerance."""
    reference = Reference(make_problem(CASES[case], dtype))
    stages = {name: record(name, reference).accumulated for name in ("torch", "jax")}
    shared = {
        name: x for name, x in stages["jax"].items() if stage_named(name).path != "blocks"
    }  # torch has no blocks
    assert_parity(stages["torch"], shared)


def test_same_precision_sets_tolerance(x):
    """With `same_precision` off by 0.1%, an error of 0.3% passes and one of 0.6% fails; with
    an exact one, 0.01% fails.
    """
    expected = x.astype(np.float64)
    noisy = x * np.float32(1.001)
    assert_parity(x * np.float32(1.003), expected, same_precision=noisy)
    assert "beyond 4.13 times the error of same_precision" in why(
        x * np.float32(1.006), expected, same_precision=noisy
    )
    assert "/output" in why(x * np.float32(1.0001), expected, same_precision=x)


def test_same_precision_applies_to_float64(x):
    """In float64, with `same_precision` off by 1e-12, an error of 3e-12 passes and one of
    6e-12 fails.
    """
    expected = x.astype(np.float64)
    noisy = expected * (1 + 1e-12)
    assert_parity(expected * (1 + 3e-12), expected, same_precision=noisy)
    assert "/output" in why(expected * (1 + 6e-12), expected, same_precision=noisy)


@pytest.mark.costly("JAX compiles every stage of a case, with gradients")
def test_problem_sets_expected_and_tolerance(sibling):
    """With `problem`, stages and gradients of an implementation pass against its reference;
    scores off by 1% fail beyond its error.
    """
    reference = Reference(make_problem(CASES["causal"], "bfloat16"), with_gradients=True)
    stages = record(sibling.name, reference).accumulated
    assert_parity(
        {name: sibling.array(value) for name, value in stages.items()}, problem=reference.problem
    )
    assert_parity(stages["output"], problem=reference.problem)
    assert_parity(stages["grad.query"], problem=reference.problem, stage="grad.query")
    text = why(stages["scores"] * np.float32(1.01), problem=reference.problem, stage="scores")
    assert "parity/scores: actual differs from the reference (bfloat16)" in text
    assert "beyond 4.08 times the error of the same-precision reference" in text


def test_stage_unknown_to_reference_fails(x):
    """With a problem, a misspelled stage raises an error with the nearest name, and a stage that
    its layer lacks fails.
    """
    problem = make_problem(CASES["causal"], "float32")
    for name, hint in {"queries": "q", "attn_wieghts": "attn_weights", "outptu": "output"}.items():
        with rejects("each stage", repr(name), hint=f"did you mean {hint}"):
            assert_parity({name: x}, problem=problem)
    with rejects("each stage", "'hidden'"):
        assert_parity(x, problem=problem, stage="hidden")
    text = why({"gate": x}, problem=problem)
    assert "parity/gate" in text
    assert "the layer of case causal has no such stage" in text


ONE = np.ones((2, 3), np.float32)
FAILURES = {
    "a different shape": (ONE[:1], ONE, r"shape \(1, 3\), expected \(2, 3\)"),
    "a different rank": (ONE[None], ONE, r"shape \(1, 2, 3\), expected \(2, 3\)"),
    "empty": (ONE[:0], ONE[:0], "there are no elements to compare"),
    "NaN": (ONE * np.float32("nan"), ONE, "6 elements are NaN or infinite"),
    "infinity on both sides": (
        ONE * np.float32("inf"),
        ONE * np.float32("inf"),
        "6 elements of expected are NaN or inf",
    ),
    "NaN on both sides": (
        ONE * np.float32("nan"),
        ONE * np.float32("nan"),
        "6 elements of expected are NaN or infinite",
    ),
    "integers": (ONE.astype(np.int32), ONE, "dtype int32, expected float32"),
    "a mask of floats": (ONE, ONE > 0, "dtype float32, expected bool"),
    "complex": (
        ONE.astype(np.complex64),
        ONE.astype(np.complex64),
        "complex64",
    ),
    "objects": (ONE.astype(object), ONE, "dtype object"),
    "masks": (ONE > 0, ONE < 0, "mismatched +6 / 6"),
    "lengths": (np.array([3, 4]), np.array([3, 5], np.int32), "mismatched +1 / 2"),
    "large integers": (
        np.array([2**53 + 1]),
        np.array([2**53]),
        "integers beyond 9007199254740992 cannot be compared",
    ),
    "no stages": ({}, {}, "there are no stages to compare"),
    "a missing stage": ({"q": ONE}, {"q": ONE, "k": ONE}, r"(?s)/k: .*reason +actual "),
    "an additional stage": ({"q": ONE, "k": ONE}, {"q": ONE}, r"(?s)/k: .*reason +expected "),
}


@pytest.mark.parametrize("what", FAILURES)
def test_invalid_comparisons_fail(what):
    """Wrong shapes, dtypes or values, NaN, infinities, no elements and missing or additional
    stages fail with their reason.
    """
    actual, expected, words = FAILURES[what]
    assert re.search(words, why(actual, expected))


@pytest.mark.parametrize(
    ("same_precision", "words"),
    [
        (ONE[:1], r"same_precision has shape \(1, 3\), expected \(2, 3\)"),
        (ONE.astype(np.float16), "dtype float32, and the dtype of same_precision is float16"),
        (ONE * np.float32("nan"), "6 elements of same_precision are NaN or infinite"),
    ],
)
def test_unusable_same_precision_fails(same_precision, words):
    """A `same_precision` with the wrong shape or dtype, or with NaN, fails with this reason."""
    assert re.search(words, why(ONE.copy(), ONE.astype(np.float64), same_precision=same_precision))


def test_stage_without_same_precision_fails():
    """A stage that `same_precision` does not have fails with this reason."""
    text = why({"q": ONE, "k": ONE}, {"q": ONE, "k": ONE}, same_precision={"q": ONE.copy()})
    assert "/k: " in text
    assert re.search("reason +same_precision ", text)


@pytest.mark.parametrize(
    "equal", [ONE > 0, np.array([1, 2]), np.zeros((2, 2), np.float32), np.float32(3.0)], ids=repr
)
def test_equal_arrays_always_pass(equal):
    """Equal masks, integers, zeros and scalars pass."""
    assert_parity(equal, equal)


@pytest.mark.parametrize(
    ("options", "input_error"),
    [
        ({}, rejects_type("one of expected and problem", "neither")),
        ({"expected": ONE, "problem": 1}, rejects_type("one of expected and problem", "both")),
        ({"problem": "causal"}, rejects_type("problem", "str")),
        (
            {"expected": {"q": ONE}},
            rejects_type("actual, expected", "actual=ndarray, expected=dict"),
        ),
        ({"expected": [1.0]}, rejects_type("expected", "list")),
        (
            {"expected": ONE, "same_precision": ONE},
            rejects_type("same_precision", "the arrays of actual"),
        ),
        ({"expected": ONE, "dtype": "float8"}, rejects("dtype", dtype="float8")),
    ],
)
def test_conflicting_arguments_raise(options, input_error):
    """Arguments that conflict or have a wrong type or value raise an error with their names."""
    with input_error:
        assert_parity(ONE, **options)


def test_absolute_tolerance_is_rejected():
    """`atol` is not an argument: it raises a TypeError."""
    with pytest.raises(TypeError, match="atol"):
        assert_parity(ONE, expected=ONE, atol=1e-3)


@pytest.mark.parametrize(
    "options", [{"expected": ONE}, {"problem": parity.make_problem("full", "float32")}]
)
def test_missing_return_is_suggested(options):
    """If `actual` is None, the error suggests a missing return."""
    with rejects_type("actual", "None: is there a return missing?"):
        assert_parity(None, **options)


def test_message_has_index_and_size(x):
    """The message has the stage, shape with axes, number of mismatches, worst index and
    values, tolerance and reason.
    """
    actual = x.copy()
    actual[1, 2, 3, 4] = 7.0
    lines = why(actual, x, stage="context", name="layer 3").splitlines()
    assert lines[0] == "layer 3/context: actual differs from expected (float32)"
    assert lines[1] == "  shape       (B N T H) = (2, 3, 4, 5)"
    assert lines[2] == "  mismatched  1 / 120 (0.8%)"
    assert lines[3].endswith(f"at (b=1, n=2, t=3, h=4): 7, expected {x[1, 2, 3, 4]:.6g}")
    assert lines[4].startswith("  allowed ")
    assert lines[5].startswith("  reason      beyond 16 units of rounding")


@pytest.mark.parametrize(
    ("stage", "shape", "index"),
    [
        ("hidden", (3,), "(axis0=0)"),
        ("hidden", (2, 3), "(axis0=0, axis1=0)"),
        ("output", (2, 3), "(axis0=0, axis1=0)"),  # not the axes of an output
        ("step3.output", (2, 1, 3), "(b=0, t=0, e=0)"),
        ("layers.0.q_proj.weight", (2, 3), "(out=0, in=0)"),
    ],
)
def test_index_uses_axes_of_stage(stage, shape, index):
    """The index of the worst error has the axis names of the stage, or axis0, axis1, … if its
    axes are unknown.
    """
    assert f"at {index}: 2, expected 1" in why(np.full(shape, 2.0), np.ones(shape), stage=stage)


def test_message_begins_with_first_stage():
    """The message begins with the first wrong stage in data flow order, and lists the others
    and those that agree.
    """
    right = dict.fromkeys(
        ["attn_weights", "k", "output", "q", "scores"], ONE
    )  # sorted by name, as jax.jit gives them
    wrong = {**right, "attn_weights": 2 * ONE, "output": 2 * ONE, "scores": 2 * ONE}
    lines = why(wrong, right).splitlines()
    assert lines[0] == "parity/scores: actual differs from expected (float32)"
    assert lines[-3:-1] == ["  agree       q, k", "  also differ attn_weights, output"]
    assert NEXT in lines[-1]
    (page,) = re.findall(r"docs/\S+\.md", NEXT)
    assert (ROOT / page).exists()


def test_steps_are_ordered_by_number():
    """Stages of step 2 come before stages of step 10, each in data flow order."""
    stages = [f"step{step}.{stage}" for step in (10, 2) for stage in ("output", "q")]
    right = dict.fromkeys(stages, ONE)
    text = why(dict.fromkeys(stages, 2 * ONE), right)
    assert text.startswith("parity/step2.q")
    assert "step2.output, step10.q, step10.output\n" in text


def test_unknown_stages_keep_expected_order():
    """With an unknown stage among them, stages are reported in the order of `expected`."""
    right = dict.fromkeys(["norm", "v", "q"], ONE)
    text = why(dict.fromkeys(["q", "v", "norm"], 2 * ONE), right)
    assert text.startswith("parity/norm")
    assert "also differ v, q\n" in text


# ---- The fixture ---------------------------------------------------------------------------------

PORTS = """
import jax.numpy as jnp
import numpy as np
import pytest
import torch

values = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)


@pytest.mark.parametrize("port", [np.asarray, torch.tensor, jnp.asarray], ids=["numpy", "torch", "jax"])
@pytest.mark.parametrize("scale", [1.0, 1.01], ids=["right", "wrong"])
def test_port(assert_parity, port, scale):
    assert_parity(port(values) * scale, values, stage="context")
"""

# With NumPy only, because processes of pytest-xdist import it again.
TWO_TESTS = """
import numpy as np


def test_right(assert_parity):
    assert_parity(np.ones(3), np.ones(3), stage="hidden")


def test_wrong(assert_parity):
    assert_parity({"q": np.ones(3), "k": np.ones(4)}, {"q": np.ones(3), "k": np.zeros(4)}, name="layer 3")
"""

NO_COMPARISON = "def test_nothing(): pass"


def results(path):
    return [
        (result["case"], result["stage"], result["status"])
        for result in json.loads(path.read_text())["results"]
    ]


RESULTS_OF_TWO_TESTS = [
    ("test_two.py::test_right", "hidden", "passed"),
    ("test_two.py::test_wrong layer 3", "q", "passed"),
    ("test_two.py::test_wrong layer 3", "k", "failed"),
]


@pytest.fixture
def run_two_tests(pytester):
    pytester.makepyfile(test_two=TWO_TESTS)
    return pytester.runpytest_inprocess


def test_fixture_passes_and_fails_tests(pytester):
    """With the fixture, right ports pass and wrong ones fail on each framework, with the
    test's name in the message.
    """
    pytester.makepyfile(test_ports=PORTS)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=3, failed=3)
    for port in ("numpy", "torch", "jax"):
        title = (
            f"E*test_ports.py::test_port[[]wrong-{port}[]]/context: actual differs from expected "
            f"(float32)"
        )
        result.stdout.fnmatch_lines(
            [title, "E*(B N T H) = (2, 3, 4, 5)", "E*mismatched  120 / 120 (100.0%)"]
        )


def test_traceback_ends_in_the_test(run_two_tests):
    """The traceback of a failure ends at the call in the test, without frames of the plugin."""
    result = run_two_tests()
    result.stdout.fnmatch_lines([">*assert_parity({*", "test_two.py:9: AssertionError"])
    result.stdout.no_fnmatch_line("*pytest_plugin.py:*")
    result.stdout.no_fnmatch_line("*assertion.py:*")


def test_report_has_every_comparison(run_two_tests, pytester):
    """--parity-report writes all 3 comparisons with a summary and the environment, and prints
    its path.
    """
    result = run_two_tests("--parity-report", "report.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*parity report: */report.json (3 comparisons, 1 failed)*"])
    report = json.loads((pytester.path / "report.json").read_text())
    assert report["summary"] == {"passed": 2, "failed": 1, "skipped": 0, "missing": 0}
    assert report["environment"]["packages"]["numpy"] == np.__version__
    assert results(pytester.path / "report.json") == RESULTS_OF_TWO_TESTS


@pytest.mark.costly("starts workers of xdist")
def test_report_of_workers_is_complete(run_two_tests, pytester):
    """With two workers of pytest-xdist, the report has the comparisons of both, in the same
    order.
    """
    result = run_two_tests("-n", "2", "--parity-report", "report.json")
    result.assert_outcomes(passed=1, failed=1)
    assert results(pytester.path / "report.json") == RESULTS_OF_TWO_TESTS


@pytest.mark.costly("starts a worker of xdist")
def test_report_names_lost_worker(pytester):
    """If a worker crashes, the report has a warning with its name."""
    pytester.makepyfile("def test_crash(): import os; os._exit(1)")
    result = pytester.runpytest_inprocess(
        "-n", "1", "--max-worker-restart", "0", "--parity-report", "report.json"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    report = json.loads((pytester.path / "report.json").read_text())
    assert report["warnings"] == ["worker gw0 went down: its comparisons are missing"]


@pytest.mark.costly("starts a worker of xdist")
@pytest.mark.parametrize("processes", ["0", "1"])
def test_report_can_have_no_comparisons(pytester, processes):
    """Without comparisons, the report is written without results, with and without workers."""
    pytester.makepyfile(NO_COMPARISON)
    result = pytester.runpytest_inprocess("-n", processes, "--parity-report", "report.json")
    assert result.ret == pytest.ExitCode.OK
    assert results(pytester.path / "report.json") == []


def test_report_can_be_junit_xml(run_two_tests, pytester):
    """A report with suffix .xml is JUnit XML, with one test per test, name and dtype, and its
    failure.
    """
    run_two_tests("--parity-report", "report.xml")
    root = ElementTree.parse(pytester.path / "report.xml").getroot()
    assert root.attrib["failures"] == "1"
    tests = [(test.get("classname"), test.get("name")) for test in root.iter("testcase")]
    assert sorted(tests) == [
        ("test_two", "test_right-float64"),
        ("test_two", "test_wrong layer 3-float64"),
    ]
    assert "test_two.py::test_wrong layer 3/k" in "".join(root.itertext())


TESTS_WITH_STAGES = """
import numpy as np
import parity
from parity.measure.core.stages import run_steps
from parity.explain.diagnosis.bugs import bugs_for, edited_layer

CASE = parity.CASES["causal"]


def stages(*names):
    problem = parity.make_problem(CASE, "float32")
    known = {each.name: each for each in reversed(bugs_for(CASE))}
    values = run_steps(edited_layer(problem, "float32", [known[name] for name in names]).steps())
    recorded = {name: values[name].swapaxes(1, 2) for name in ("q", "k", "v", "context")}
    scores = np.where(values["mask"], np.float32(-1e9), values["scores"])
    return problem, {**recorded, "scores": scores, "output": values["output"]}


def test_right(assert_parity):
    problem, values = stages()
    assert_parity(values, problem=problem)


def test_wrong(assert_parity):
    problem, values = stages("fused-qkv-read-per-head", "out_proj-bias-missing")
    assert_parity(values, problem=problem)
"""


NAMES = ("fused-qkv-read-per-head", "out_proj-bias-missing")


@pytest.mark.costly("starts a worker of xdist")
@pytest.mark.parametrize(("suffix", "processes"), [("json", "1"), ("xml", "0"), ("html", "0")])
def test_reports_have_the_diagnosis(pytester, suffix, processes):
    """JSON, XML and HTML have the diagnosis of a layer with two bugs, whose stages have
    different axes; for JSON, a worker sends it.
    """
    pytester.makepyfile(test_stages=TESTS_WITH_STAGES)
    result = pytester.runpytest_inprocess(
        "-W", "ignore", "-n", processes, "--parity-report", f"report.{suffix}"
    )
    result.assert_outcomes(passed=1, failed=1)
    text = (pytester.path / f"report.{suffix}").read_text("utf-8")
    assert all(f"{number} of 2: {name}" in text for number, name in enumerate(NAMES, 1))
    if suffix == "json":
        report = json.loads(text)
        right, wrong = report["diagnoses"]
        assert (right["kind"], wrong["kind"], wrong["stage"]) == ("convention", "structure", "q")
        assert wrong["text"].count("Likely bug ") == 2
        assert (wrong["likely_bug"], wrong["first_wrong_stage"]) == (NAMES[0], "q")
        assert all(row["ratio"] is not None for row in report["results"])
        assert all(
            row["ratio"] <= 1.0 for row in report["results"] if row["case"].endswith("test_right")
        )
    if suffix == "xml":
        (failure,) = ElementTree.fromstring(text.encode()).iter("failure")
        assert failure.get("message").startswith("fused-qkv-read-per-head: ")
    if suffix == "html":
        assert "<p><strong>fused-qkv-read-per-head: " in text
        assert "∞" not in text


TESTS_IN_CLASSES = """
import numpy as np
import pytest


class TestPort:
    class TestLayer:
        @pytest.mark.parametrize("what", ["a::b", "c[d]"])
        def test_it(self, assert_parity, what):
            assert_parity(np.ones(3), np.ones(3), name="e::f")
"""


@pytest.mark.costly("starts a worker of xdist")
@pytest.mark.parametrize("processes", ["0", "1"])
def test_junit_names_match_pytest(pytester, processes):
    """Tests have the class and name of pytest's own JUnit XML, followed by the name and dtype
    of the comparison.
    """
    pytester.mkdir("ports").joinpath("test_port.py").write_text(TESTS_IN_CLASSES)
    reports = ("--parity-report", "ours.xml", "--junit-xml", "pytest.xml")
    pytester.runpytest_inprocess("-n", processes, *reports).assert_outcomes(passed=2)
    ours, theirs = (
        sorted(
            (test.get("classname"), test.get("name"))
            for test in ElementTree.parse(name).getroot().iter("testcase")
        )
        for name in (pytester.path / "ours.xml", pytester.path / "pytest.xml")
    )
    assert ours == [(classname, f"{name} e::f-float64") for classname, name in theirs]
    assert theirs[0] == ("ports.test_port.TestPort.TestLayer", "test_it[a::b]")


@pytest.mark.parametrize("name", ["report.html", "REPORT.HTML"])
def test_report_can_be_html(run_two_tests, pytester, name):
    """A report with suffix .html, in either case, is a page whose title is the failed test, with
    the command that runs it.
    """
    run_two_tests("--parity-report", name)
    page = (pytester.path / name).read_text()
    assert "<title>test_two.py::test_wrong layer 3 does NOT agree with" in page
    assert "<pre>pytest test_two.py::test_wrong</pre>" in page


@pytest.mark.parametrize(
    ("path", "input_error"),
    [
        ("report.txt", rejects("--parity-report", "/report.txt")),
        ("nowhere/report.json", rejects("--parity-report", "/nowhere/report.json")),
        (
            "/proc/report.json",
            rejects("--parity-report", "/proc/report.json: No such file or directory"),
        ),
    ],
)
def test_unwritable_report_is_usage_error(run_two_tests, path, input_error):
    """A report path that cannot be written is a usage error before any test is collected."""
    result = run_two_tests("--parity-report", path)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert input_error.is_printed_in(result.stderr.str())
    result.stderr.fnmatch_lines(["ERROR: --parity-report *"])
    result.stdout.no_fnmatch_line("*collected*")


def test_missing_report_library_fails_early(run_two_tests, monkeypatch):
    """Without jinja2, an HTML report is a usage error before any test is collected."""
    monkeypatch.setattr(
        "parity.measure.core.packages.is_installed", lambda package: package != "jinja2"
    )
    result = run_two_tests("--parity-report", "report.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: an HTML report *jinja2, not installed here*"])
    result.stdout.no_fnmatch_line("*collected*")


def test_html_report_needs_no_pillow(run_two_tests, monkeypatch):
    """An HTML report, which has no pictures, is written without pillow."""
    monkeypatch.setattr(
        "parity.measure.core.packages.is_installed", lambda package: package != "pillow"
    )
    result = run_two_tests("--parity-report", "report.html")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*parity report: *report.html (* comparisons, 1 failed)*"])


def test_lost_report_folder_is_usage_error(pytester):
    """If the folder of the report is deleted during the tests, the session ends with a usage
    error about it.
    """
    pytester.mkdir("reports")
    pytester.makepyfile("def test_it(): import shutil; shutil.rmtree('reports')")
    result = pytester.runpytest_inprocess("--parity-report", "reports/report.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["ERROR: --parity-report cannot be written: *", "*1 passed*"])


def test_plugin_can_be_disabled(run_two_tests):
    """With `-p no:mha_parity`, the fixture does not exist."""
    result = run_two_tests("-p", "no:mha_parity")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*fixture 'assert_parity' not found"])


# ---- Installed -----------------------------------------------------------------------------------


def run(*command, cwd=ROOT, status=0):
    """Return the output of a command, which must end with the given status."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.costly("modules that a new process imports")
def test_plugin_imports_only_pytest():
    """After pytest, importing the plugin loads two modules of parity and no library."""
    program = """
import sys, pytest
before = set(sys.modules)
import parity.use.testing.pytest_plugin
print(*sorted(set(sys.modules) - before))
"""
    loaded = run(sys.executable, "-c", program).split()
    packages = [
        "parity",
        "parity.measure",
        "parity.measure.core",
        "parity.use",
        "parity.use.testing",
    ]
    modules = ["parity.measure.core.libraries", "parity.use.testing.pytest_plugin"]
    assert sorted(loaded) == sorted(packages + modules)


@pytest.mark.thorough
@pytest.mark.costly("modules that a new process imports")
def test_public_names_need_no_framework():
    """All public names of parity exist and are in `dir`, and accessing them imports no
    framework.
    """
    program = """
import sys
import parity
names = {name: getattr(parity, name) for name in parity.__all__}
assert set(parity.__all__) <= set(dir(parity))
assert not {"jax", "torch", "ttnn"} & set(sys.modules)
"""
    run(sys.executable, "-c", program)


def test_public_names_are_not_modules():
    """No public name of parity is the name of a module or package in it, which would replace
    it once imported.
    """
    assert not [name for name in parity.__all__ if importlib.util.find_spec(f"parity.{name}")]


def test_unknown_name_raises_error():
    """An unknown attribute of parity raises an AttributeError with its name."""
    with pytest.raises(AttributeError, match="module 'parity' has no attribute 'nothing'"):
        parity.nothing  # noqa: B018


@pytest.fixture
def python_with_the_wheel(tmp_path):
    """Return the Python of a fresh environment with the wheel, which borrows dependencies."""
    for package in ("parity", "mha_spec", "mha_jax", "mha_torch", "mha_tt", "ttnn_mock"):
        shutil.copytree(
            ROOT / package,
            tmp_path / "source" / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path / "source")
    pip = (sys.executable, "-m", "pip")
    build = (
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        tmp_path,
    )
    run(*pip, *build, tmp_path / "source")
    (wheel,) = tmp_path.glob("mha_parity-*.whl")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    run(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.costly("pip builds and installs a wheel")
@pytest.mark.thorough
def test_installed_wheel_provides_plugin(python_with_the_wheel, tmp_path):
    """In a fresh environment with the wheel, the plugin is loaded, one test passes, one
    fails, and the report has both.
    """
    port = """
import numpy as np
import parity


def test_right(assert_parity):
    assert "venv" in parity.__file__ and "site-packages" in parity.__file__
    assert_parity(np.ones((2, 5, 8)), np.ones((2, 5, 8)))


def test_wrong(assert_parity):
    assert_parity(np.ones((2, 5, 8)), np.zeros((2, 5, 8)))
"""
    folder = tmp_path / "port"
    folder.mkdir()
    (folder / "test_port.py").write_text(port)
    report = ("--parity-report", "report.json")
    out = run(
        python_with_the_wheel, "-m", "pytest", *NO_HYPOTHESIS.split(), *report, cwd=folder, status=1
    )
    assert re.search("^plugins: .*mha-parity", out, re.MULTILINE)
    assert "1 failed, 1 passed" in out
    assert (
        "AssertionError: test_port.py::test_wrong/output: actual differs from expected (float64)"
        in out
    )
    assert "(B T E) = (2, 5, 8)" in out
    assert [status for _, _, status in results(folder / "report.json")] == ["passed", "failed"]
