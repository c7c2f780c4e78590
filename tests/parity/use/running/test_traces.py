"""Traces: results of one machine, compared on another."""

import json
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.input_errors import rejects

import parity.use.running.run
from parity import CASES, AttentionSpec, random_weights, run_cases
from parity.measure.backends import torch as torch_backend
from parity.measure.core.cases import random_case
from parity.measure.core.compare import Label, failure
from parity.measure.core.trace import Reference
from parity.measure.core.weights import load_tensors, save_tensors
from parity.use.cli.main import main
from parity.use.running.report import SkippedCase
from parity.use.running.run import command_for, compare_traces
from parity.use.running.traces import load_trace


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    cases = [CASES[name] for name in ("textbook", "causal", "decode")]
    report = run_cases(
        cases, ["torch"], ["float32", "bfloat16"], with_gradients=True, traces=folder
    )
    assert not report.failed
    return folder, report


@pytest.fixture
def traces(recorded, tmp_path):
    folder = tmp_path / "traces"
    shutil.copytree(recorded[0], folder)
    return folder


def change(path, tensors=None, metadata=None):
    old_tensors, old_metadata = load_tensors(path)
    save_tensors(path, {**old_tensors, **(tensors or {})}, {**old_metadata, **(metadata or {})})


def test_trace_files_are_named_by_content(recorded):
    """Each trace file is named after its case, dtype and backend."""
    assert {path.name for path in recorded[0].iterdir()} == {
        f"{case}-{dtype}-torch.safetensors"
        for case in ("textbook", "causal", "decode")
        for dtype in ("float32", "bfloat16")
    }


def test_saved_traces_compare_as_in_the_run(recorded):
    """Saved traces pass the comparison with the same ratio
    for each case, dtype and stage as the run.
    """
    folder, report = recorded
    again = compare_traces([folder])
    assert not again.failed
    assert again.summary["passed"] == report.summary["passed"]
    ratios = {(c.case, c.dtype, c.stage): c.ratio for c in report.comparisons}
    assert {(c.case, c.dtype, c.stage): c.ratio for c in again.comparisons} == ratios


def test_trace_records_its_environment(recorded):
    """A trace records the numerics lock of its backend and the versions of packages."""
    trace = load_trace(recorded[0] / "causal-float32-torch.safetensors")
    assert (
        trace.environment["backends"]["torch"]["numerics"]["float32_matmul_precision"] == "highest"
    )
    assert "numpy" in trace.environment["packages"]


def test_changed_stage_is_the_only_failure(traces):
    """Scores changed by 0.001 in one trace fail that stage of that case, and nothing else; the
    command to repeat it compares that file.
    """
    path = traces / "causal-float32-torch.safetensors"
    scores = load_tensors(path)[0]["accumulated/scores"]
    change(path, {"accumulated/scores": scores + np.float32(0.001)})
    report = compare_traces([traces])
    assert [(c.case, c.stage) for c in report.failed] == [("causal", "scores")]
    (failed,) = report.failed
    command = report.commands[failed.case, failed.dtype, failed.backend]
    assert command == f"mha-parity compare {path}"
    assert main(["compare", str(path), "-q"]) == 1


def test_different_numerics_locks_warn(traces, tmp_path):
    """Traces from different numerics locks lead to one warning, which names the difference."""
    other = tmp_path / "other"
    shutil.copytree(traces, other)
    environment = json.loads(
        load_tensors(other / "causal-float32-torch.safetensors")[1]["environment"]
    )
    environment["backends"]["torch"]["numerics"]["float32_matmul_precision"] = "medium"
    for path in other.iterdir():
        change(path, metadata={"environment": json.dumps(environment)})
    warnings = compare_traces([traces, other]).warnings
    assert len(warnings) == 1
    assert "different numerics locks" in warnings[0]
    assert "medium" in warnings[0]


def test_equal_numerics_locks_do_not_warn(traces):
    """Traces from one numerics lock lead to no warning."""
    assert compare_traces([traces]).warnings == []


@pytest.mark.parametrize(
    ("metadata", "input_error"),
    [
        ({"digest": "0" * 64}, rejects("…/causal-float32-torch.safetensors")),
        (
            {"case": "nowhere"},
            rejects(
                "…/causal-float32-torch.safetensors",
                "{'case': 'nowhere', 'dtype': 'float32', 'backend': 'torch'}",
            ),
        ),
        ({"backend": "\x1b[31mred"}, rejects("…/causal-float32-torch.safetensors")),
        ({"environment": "[]"}, rejects("…/traces/causal-float32-torch.safetensors", "'[]'")),
        (
            {"environment": '{"backends": {"torch": null}}'},
            rejects(
                "…/traces/causal-float32-torch.safetensors", '\'{"backends": {"torch": null}}\''
            ),
        ),
        ({"environment": "[" * 100_000}, rejects("…/traces/causal-float32-torch.safetensors")),
        ({"kind": "weights"}, rejects("…/causal-float32-torch.safetensors")),
        ({"format": "9"}, rejects("…/causal-float32-torch.safetensors")),
        ({"environment": "{"}, rejects("…/causal-float32-torch.safetensors", "'{'")),
        (
            {"environment": '{"backends": {"torch": {"numerics": {"arithmetic": "abacus"}}}}'},
            rejects("…/causal-float32-torch.safetensors", arithmetic="abacus"),
        ),
        (
            {"environment": '{"backends": {"torch": {"numerics": []}}}'},
            rejects(
                "…/traces/causal-float32-torch.safetensors",
                '\'{"backends": {"torch": {"numerics": []}}}\'',
            ),
        ),
    ],
)
def test_invalid_trace_metadata_raises(traces, metadata, input_error):
    """Wrong or malformed metadata of a trace raise an error that names the file."""
    path = traces / "causal-float32-torch.safetensors"
    change(path, metadata=metadata)
    with input_error:
        compare_traces([path])


def test_unknown_tensor_in_trace_raises(traces):
    """A tensor with an unknown name in a trace raises an error
    that names the file and the tensor.
    """
    path = traces / "causal-float32-torch.safetensors"
    change(path, {"scores": np.zeros(1)})
    with rejects("…/causal-float32-torch.safetensors", "scores"):
        compare_traces([path])


def test_truncated_trace_raises(traces):
    """A trace without its last byte raises an error that names the file."""
    path = traces / "causal-float32-torch.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with rejects("…/causal-float32-torch.safetensors"):
        compare_traces([traces])


def test_same_backend_from_two_folders(traces, tmp_path):
    """Traces of one backend from two folders are compared separately; a failure names its folder
    and the command that compares its file, or the command of a run with its device.
    """
    other = tmp_path / "other"
    shutil.copytree(traces, other)
    path = other / "causal-float32-torch.safetensors"
    change(
        path, {"accumulated/scores": load_tensors(path)[0]["accumulated/scores"] * np.float32(1.01)}
    )
    report = compare_traces([traces, other])
    failed = report.failed
    assert [(c.case, c.stage, c.backend) for c in failed] == [
        ("causal", "scores", f"torch ({other})")
    ]
    assert {c.library for c in failed} == {"torch"}
    key = (failed[0].case, failed[0].dtype, failed[0].backend)
    assert report.commands[key] == f"mha-parity compare {path}"


def test_trace_counts_once(traces, tmp_path):
    """A trace that is passed twice, also by another path or with its folder, is an error."""
    path = traces / "causal-float32-torch.safetensors"
    (tmp_path / "link.safetensors").symlink_to(path)
    for other in (path, tmp_path / "link.safetensors", traces):
        with rejects("traces", "twice"):
            compare_traces([path, other])


def test_command_repeats_the_run(traces):
    """The command for a case of this run names its backend, dtype and device, the Python that ran
    it, and gradients if one differs; no command repeats a case of another layer.
    """
    trace = load_trace(traces / "causal-float32-torch.safetensors")
    command = ["mha-parity run --backends torch", "--cases causal --dtypes float32"]
    here = replace(trace, path="", folder="")
    assert command_for(here, [], {}) == " ".join(command)
    python = ["--python torch=/env/bin/python"]
    elsewhere = {trace.folder: "/env/bin/python"}
    assert command_for(trace, [], elsewhere) == " ".join([command[0], *python, command[1]])
    on_gpu = replace(here, environment={"backends": {"torch": {"device": "cuda:1"}}})
    assert command_for(on_gpu, [], {}) == " ".join([*command, "--device cuda:1"])
    wrong = failure(np.ones(1), "", Label("causal", "torch", "float32", "grad.query"))
    assert command_for(here, [wrong], {}) == " ".join([*command, "--grad"])
    case = replace(trace.problem.case, batch=3)
    other = replace(here, problem=replace(trace.problem, case=case))
    assert command_for(other, [], {}) == ""


def test_missing_trace_leads_to_warning(traces, tmp_path):
    """A trace that one folder has and another lacks leads to a warning that names it."""
    other = tmp_path / "other"
    shutil.copytree(traces, other)
    (other / "decode-bfloat16-torch.safetensors").unlink()
    assert (
        f"torch ({other}) has no trace of decode in bfloat16"
        in compare_traces([traces, other]).warnings
    )


def test_missing_trace_is_in_every_report(traces, tmp_path, capsys):
    """A missing trace exits with 2 and appears in the output, the
    JSON report and the JUnit file.
    """
    other = tmp_path / "other"
    shutil.copytree(traces, other)
    (other / "decode-bfloat16-torch.safetensors").unlink()
    files = {name: tmp_path / f"r.{name}" for name in ("json", "xml")}
    assert (
        main(
            [
                "compare",
                str(traces),
                str(other),
                "--json",
                str(files["json"]),
                "--junit",
                str(files["xml"]),
            ]
        )
        == 2
    )
    out = capsys.readouterr().out
    assert f"0 failed; NOT compared: torch ({other}), 1 case in bfloat16 (no trace of it" in out
    assert f"warning: torch ({other}) has no trace of decode in bfloat16" in out
    content = json.loads(files["json"].read_text())
    assert content["summary"]["missing"] == 1
    assert [result["case"] for result in content["results"] if result["status"] == "missing"] == [
        "decode"
    ]
    (error,) = ElementTree.fromstring(files["xml"].read_text()).iter("error")
    assert error.get("message") == f"torch ({other}) has no trace of decode in bfloat16"


def test_mismatch_outranks_missing_trace(traces, tmp_path):
    """A mismatch exits with 1, even if another trace is missing."""
    other = tmp_path / "other"
    shutil.copytree(traces, other)
    (other / "decode-bfloat16-torch.safetensors").unlink()
    path = other / "causal-float32-torch.safetensors"
    change(
        path, {"accumulated/scores": load_tensors(path)[0]["accumulated/scores"] * np.float32(1.01)}
    )
    assert main(["compare", str(traces), str(other)]) == 1


def test_traces_in_subfolders_are_found(traces, tmp_path):
    """Traces two folders deep are compared, and the report names their folder."""
    (tmp_path / "all" / "deep").mkdir(parents=True)
    traces.rename(tmp_path / "all" / "deep" / "torch")
    report = compare_traces([tmp_path / "all"])
    assert len(report.groups()) == 6
    assert list(report.environment) == [str(tmp_path / "all" / "deep" / "torch")]


def test_empty_folder_name_raises():
    """An empty path as a folder of traces raises an error."""
    with rejects("a folder of traces", "''"):
        compare_traces([""])


def test_traces_of_random_cases_pass(tmp_path):
    """The trace of a random case passes in all 11 stages."""
    run_cases([random_case(31)], ["torch"], traces=tmp_path)
    assert compare_traces([tmp_path]).summary["passed"] == 11


def test_a_folder_without_traces_is_an_error(tmp_path):
    """A folder without traces raises an error that names it."""
    with rejects("…/test_a_folder_without_traces_i0", "no *.safetensors in it or its subfolders"):
        compare_traces([tmp_path])


# ---- Joined into a run ---------------------------------------------------------------------------


@pytest.fixture
def tt_traces(traces):
    """Return the traces as if tt had made them, in an environment without torch."""
    for path in list(traces.iterdir()):
        environment = load_tensors(path)[1]["environment"].replace('"torch": {', '"tt": {')
        change(path, metadata={"backend": "tt", "environment": environment})
        path.rename(traces / path.name.replace("torch", "tt"))
    return traces


def joined(folder, names=("textbook",), dtypes=("float32",), **options):
    return run_cases([CASES[name] for name in names], ["torch"], dtypes, join=[folder], **options)


def test_joined_traces_add_a_backend(tt_traces):
    """Joined traces of tt are a third backend of the run, and
    their environment is in the report.
    """
    report = run_cases([CASES["textbook"]], join=[tt_traces])
    assert list(report.groups()) == [
        ("textbook", "float32", backend) for backend in ("jax", "torch", "tt")
    ]
    assert (report.summary, report.warnings) == (
        {"passed": 34, "failed": 0, "skipped": 0, "missing": 0},
        [],
    )
    assert "tt" in report.environment["joined"][str(tt_traces)]["backends"]


def test_joined_traces_are_compared(tt_traces):
    """Scores changed by 0.001 in a joined trace are the only failure."""
    path = tt_traces / "textbook-float32-tt.safetensors"
    scores = load_tensors(path)[0]["accumulated/scores"]
    change(path, {"accumulated/scores": scores + np.float32(0.001)})
    assert [(c.case, c.stage, c.backend) for c in joined(tt_traces).failed] == [
        ("textbook", "scores", "tt")
    ]


def test_joined_traces_share_the_reference(tt_traces, monkeypatch):
    """A run with joined traces computes its reference once per
    dtype and kind, four times in all.
    """
    computed = []

    def noting(name):
        compute = getattr(Reference, name)

        def note(self, dtype, arithmetic):
            computed.append((name, dtype))
            return compute(self, dtype, arithmetic)

        return note

    for name in ("_compute", "_compute_local"):
        monkeypatch.setattr(Reference, name, noting(name))
    joined(tt_traces)
    assert sorted(computed) == [
        ("_compute", "float32"),
        ("_compute", "float64"),
        ("_compute_local", "float32"),
        ("_compute_local", "float64"),
    ]


def test_traces_outside_the_run_are_ignored(tt_traces):
    """Joined traces of cases or dtypes outside the run are ignored without a warning."""
    report = joined(tt_traces, ["textbook", "causal"], ["bfloat16"])
    assert {(case, dtype) for case, dtype, _ in report.groups()} == {
        ("textbook", "bfloat16"),
        ("causal", "bfloat16"),
    }
    assert report.warnings == []


def test_case_without_joined_trace_warns(tt_traces):
    """A case of the run that the joined traces lack leads to a warning."""
    report = joined(tt_traces, ["textbook", "full"])
    assert report.warnings == ["tt has no trace of full in float32"]


def test_unrelated_joined_traces_warn(tt_traces):
    """Joined traces without any case of the run lead to the same warning."""
    report = joined(tt_traces, ["full"])
    assert report.warnings == ["tt has no trace of full in float32"]


def test_joined_backend_is_named_by_folder(traces):
    """A joined backend that also runs here is named with its folder."""
    assert [backend for _, _, backend in joined(traces).groups()] == ["torch", f"torch ({traces})"]


def test_requested_backend_may_be_joined(tt_traces):
    """A backend requested by name may come from joined traces alone."""
    report = run_cases([CASES["textbook"]], ["tt"], join=[tt_traces])
    assert [backend for _, _, backend in report.groups()] == ["tt"]


def test_joined_traces_without_gradients(tt_traces, tmp_path):
    """In a run with gradients, joined traces without them are listed as not compared, with status
    2; traces that have them succeed.
    """
    assert joined(tt_traces, with_gradients=True).status == 0
    run_cases([CASES["textbook"]], ["torch"], traces=tmp_path / "other")
    folder = tmp_path / "other"
    report = joined(folder, with_gradients=True)
    (entry,) = report.not_compared
    assert entry.what.startswith(f"torch ({folder}), gradients of ")
    assert entry.reason == "these traces have no gradients"
    assert report.status == 2


def test_skipped_case_of_trace_is_skipped(tmp_path, monkeypatch):
    """A case that was skipped when traces were made is skipped
    with its reason, without a warning.
    """
    monkeypatch.setattr(
        torch_backend,
        "why_skipped",
        lambda case, dtype: "too full" if case.name == "full" else None,
    )
    cases = [CASES["textbook"], CASES["full"]]
    run_cases(cases, ["torch"], traces=tmp_path)
    report = run_cases(cases, ["jax"], join=[tmp_path])
    assert report.skipped_cases == [SkippedCase("full", "float32", "torch", "too full")]
    assert report.warnings == []
    assert compare_traces([tmp_path]).skipped_cases == report.skipped_cases


def test_recorded_error_is_a_failure(tmp_path, monkeypatch):
    """An error raised when traces were made is a failure of stage
    `run`, with its message escaped.
    """

    def fail(problem):
        raise RuntimeError("out of \x1b[31msomething")

    monkeypatch.setattr(torch_backend, "filled", fail)
    run_cases([CASES["textbook"]], ["torch"], traces=tmp_path)
    report = run_cases([CASES["textbook"]], ["jax"], join=[tmp_path], with_gradients=True)
    failed = [(c.case, c.stage, c.backend, c.reason) for c in report.failed]
    assert failed == [("textbook", "run", "torch", "RuntimeError: out of \\x1b[31msomething")]
    assert report.warnings == []


def test_only_skipped_traces_raise(tmp_path, monkeypatch):
    """A folder whose only trace is a skipped case raises an error."""
    monkeypatch.setattr(torch_backend, "why_skipped", lambda case, dtype: "not today")
    run_cases([CASES["textbook"]], traces=tmp_path)
    (tmp_path / "textbook-float32-jax.safetensors").unlink()
    with rejects("there", "1 skipped cases and no other"):
        compare_traces([tmp_path])


def test_joined_digest_is_checked_first(tt_traces, monkeypatch):
    """A joined trace with a wrong digest raises an error before any backend runs."""
    monkeypatch.setattr(parity.use.running.run, "record", None)
    change(tt_traces / "textbook-float32-tt.safetensors", metadata={"digest": "0" * 64})
    with rejects("\u2026/textbook-float32-tt.safetensors"):
        joined(tt_traces)


def test_joining_traces_with_weights_raises(tt_traces):
    """Traces cannot be joined to a run with weights of the caller."""
    with rejects("traces to join", "weights"):
        joined(tt_traces, weights=random_weights(AttentionSpec(4, 2, d_in=3)))


def test_values_without_hardware_warn(tt_traces):
    """Values that did not come from the hardware of tt lead to a
    warning that names their origin.
    """
    path = tt_traces / "textbook-float32-tt.safetensors"
    environment = json.loads(load_tensors(path)[1]["environment"])
    environment["backends"]["tt"]["numerics"]["values"] = "golden functions"
    change(path, metadata={"environment": json.dumps(environment)})
    assert joined(tt_traces).warnings == [
        "tt ran without its hardware: in 1 case its values come from golden functions"
    ]


def test_arithmetic_sets_the_tolerance(tt_traces):
    """A relative error of 0.0003 fails in float32 and passes if
    the trace's arithmetic is `tensix`.
    """
    path = tt_traces / "textbook-float32-tt.safetensors"
    tensors, metadata = load_tensors(path)
    change(
        path, {name: x * np.float32(1.0003) for name, x in tensors.items() if x.dtype == np.float32}
    )
    assert joined(tt_traces).failed
    environment = json.loads(metadata["environment"])
    environment["backends"]["tt"]["numerics"]["arithmetic"] = "tensix"
    change(path, metadata={"environment": json.dumps(environment)})
    assert not joined(tt_traces).failed
