"""Traces: what one machine computed, judged on another."""

import json
import shutil

import numpy as np
import pytest

from parity import CASES, load_tensors, random_case, run_cases, save_tensors
from parity.run import compare_traces, load_trace


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    cases = [CASES[name] for name in ("textbook", "causal", "decode")]
    report = run_cases(cases, ["torch"], ["float32", "bfloat16"], with_gradients=True, traces=folder)
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


def test_a_trace_file_is_named_after_what_it_holds(recorded):
    assert {path.name for path in recorded[0].iterdir()} == {
        f"{case}-{dtype}-torch.safetensors"
        for case in ("textbook", "causal", "decode")
        for dtype in ("float32", "bfloat16")
    }


def test_saved_traces_are_judged_as_the_run_was(recorded):
    folder, report = recorded
    again = compare_traces([folder])
    assert not again.failed
    assert again.summary["passed"] == report.summary["passed"]
    ratios = {(c.case, c.dtype, c.stage): c.ratio for c in report.comparisons}
    assert {(c.case, c.dtype, c.stage): c.ratio for c in again.comparisons} == ratios


def test_a_trace_tells_where_it_was_made(recorded):
    trace = load_trace(recorded[0] / "causal-float32-torch.safetensors")
    assert trace.environment["backends"]["torch"]["numerics"]["float32_matmul_precision"] == "highest"
    assert "numpy" in trace.environment["packages"]


def test_a_changed_stage_is_found_and_named(traces):
    path = traces / "causal-float32-torch.safetensors"
    scores = load_tensors(path)[0]["accumulated/scores"]
    change(path, {"accumulated/scores": scores + np.float32(0.001)})
    report = compare_traces([traces])
    assert [(c.case, c.stage) for c in report.failed] == [("causal", "scores")]


def test_traces_made_under_different_locks_are_said_to_be(traces, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(traces, other)
    environment = json.loads(load_tensors(other / "causal-float32-torch.safetensors")[1]["environment"])
    environment["backends"]["torch"]["numerics"]["float32_matmul_precision"] = "medium"
    for path in other.iterdir():
        change(path, metadata={"environment": json.dumps(environment)})
    warnings = compare_traces([traces, other]).warnings
    assert len(warnings) == 1
    assert "different numerics locks" in warnings[0]
    assert "medium" in warnings[0]


def test_traces_made_under_one_lock_are_not_warned_of(traces):
    assert compare_traces([traces]).warnings == []


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"digest": "0" * 64}, "its digest differs"),
        ({"case": "nowhere"}, "must be of a known case"),
        ({"backend": "\x1b[31mred"}, "must be of a known case, dtype and backend"),
        ({"environment": "[]"}, "must tell its environment"),
        ({"environment": '{"backends": {"torch": null}}'}, "must tell its environment"),
        ({"environment": "[" * 100_000}, "must tell its environment"),
        ({"kind": "weights"}, "must be a trace"),
        ({"format": "9"}, "must be a trace in format 1"),
        ({"environment": "{"}, "must tell its environment in JSON"),
    ],
)
def test_a_trace_that_cannot_be_judged_is_refused(traces, metadata, message):
    path = traces / "causal-float32-torch.safetensors"
    change(path, metadata=metadata)
    with pytest.raises(ValueError, match=message):
        compare_traces([path])


def test_a_trace_with_a_part_of_another_name_is_refused(traces):
    path = traces / "causal-float32-torch.safetensors"
    change(path, {"scores": np.zeros(1)})
    with pytest.raises(ValueError, match="must hold accumulated and local stages"):
        compare_traces([path])


def test_a_trace_cut_off_is_refused(traces):
    path = traces / "causal-float32-torch.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        compare_traces([traces])


def test_the_same_backend_from_two_places_is_judged_twice(traces, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(traces, other)
    path = other / "causal-float32-torch.safetensors"
    change(path, {"accumulated/scores": load_tensors(path)[0]["accumulated/scores"] * np.float32(1.01)})
    failed = compare_traces([traces, other]).failed
    assert [(c.case, c.stage, c.backend) for c in failed] == [("causal", "scores", f"torch ({other})")]


def test_a_trace_that_others_have_is_missed(traces, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(traces, other)
    (other / "decode-bfloat16-torch.safetensors").unlink()
    assert f"torch ({other}) has no trace of decode in bfloat16" in compare_traces([traces, other]).warnings


def test_traces_of_random_cases_are_judged(tmp_path):
    run_cases([random_case(31)], ["torch"], traces=tmp_path)
    assert compare_traces([tmp_path]).summary["passed"] == 11


def test_a_folder_without_traces_is_an_error_and_no_success(tmp_path):
    with pytest.raises(ValueError, match="must be a trace or a folder of traces"):
        compare_traces([tmp_path])
