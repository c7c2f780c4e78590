"""The command line: exit status, files, and what a person reads."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.command_line import run_in_pipe
from helpers.refusals import refuses

import mha_torch
import parity.backends.torch
from mha_spec import Rope
from parity import AttentionSpec, random_weights, save_weights
from parity.cli.main import main

RESULT_KEYS = {"case", "backend", "dtype", "stage", "status", "error", "budget", "ratio", "max_abs", "max_ulp", "pcc"}
RESULT_KEYS |= {"worst_index", "reason"}


def break_the_softmax(monkeypatch):
    """Hides every token from itself, in the stage function and wherever the module uses it."""
    original = mha_torch.masked_softmax

    def broken(scores, mask=None, sinks=None):
        return original(scores, None if mask is None else mask.roll(1, dims=-1), sinks)

    monkeypatch.setattr(mha_torch, "masked_softmax", broken)
    monkeypatch.setattr(mha_torch.stages, "masked_softmax", broken)


def test_run_agrees_and_exits_0(capsys):
    assert main(["run", "--cases", "textbook", "--backends", "jax,torch"]) == 0
    assert (
        "jax and torch agree with the float64 reference: 1 case, 23 stages passed, 0 failed" in capsys.readouterr().out
    )


@pytest.mark.costly("whether output is a terminal")
@pytest.mark.thorough
def test_run_in_a_pipe_gives_plain_lines_of_at_most_100_columns():
    result = run_in_pipe("run", "--cases", "trained-smollm2-causal", "--backends", "torch", "--verbose")
    assert result.returncode == 0
    assert result.stderr == ""
    assert all(line.isprintable() for line in result.stdout.splitlines())
    assert "\x1b" not in result.stdout
    assert "│" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.costly("the exit status of a process whose pipe is closed")
@pytest.mark.thorough
def test_a_reader_that_stops_reading_does_not_change_the_exit_status():
    command = [sys.executable, "-m", "parity", "run", "--cases", "textbook", "--backends", "torch", "--verbose"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("option", ["--backends", "--dtypes"])
def test_an_empty_list_is_refused_and_not_taken_for_all(capsys, option):
    assert main(["run", option, ","]) == 2
    assert option in capsys.readouterr().err


def test_a_wrong_backend_exits_1_and_names_stage_and_place(monkeypatch, capsys):
    break_the_softmax(monkeypatch)
    assert main(["run", "--cases", "causal", "--backends", "torch"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "causal/attn_weights: torch differs from the reference (float32)" in out
    assert "worst       1.00e+00 at (b=" in out
    assert "torch does NOT agree" in out
    assert "mha-parity run --backends torch --cases causal --dtypes float32" in out


def test_a_wrong_backend_is_told_in_the_json_too(monkeypatch, tmp_path):
    break_the_softmax(monkeypatch)
    assert main(["run", "--cases", "causal", "--backends", "torch", "--json", str(tmp_path / "r.json")]) == 1
    content = json.loads((tmp_path / "r.json").read_text())
    failed = [result for result in content["results"] if result["status"] == "failed"]
    assert content["summary"]["failed"] == len(failed) > 0
    assert failed[0]["stage"] == "attn_weights"
    assert failed[0]["worst_index"].keys() == {"B", "N", "T", "S"}


def test_json_has_the_form_that_is_promised(tmp_path):
    path = tmp_path / "r.json"
    assert main(["run", "--cases", "textbook", "--backends", "torch", "--grad", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content.keys() >= {"schema", "version", "environment", "summary", "results"}
    assert content["schema"] == "mha-parity/run"
    assert content["summary"] == {"passed": len(content["results"]), "failed": 0, "skipped": 0, "missing": 0}
    assert all(result.keys() >= RESULT_KEYS for result in content["results"])


def test_skipped_backends_are_in_the_json_with_their_reason(tmp_path, let_need):
    let_need("tt", "ttnn_is_not_here")
    let_need("jax", "jax_is_not_here")
    assert main(["run", "--cases", "textbook", "--json", str(tmp_path / "r.json")]) == 0
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    skipped = [(result["backend"], result["reason"]) for result in results if result["status"] == "skipped"]
    assert skipped == [
        ("jax", "jax needs jax_is_not_here, not installed here"),
        ("tt", "tt needs ttnn_is_not_here, not installed here"),
    ]


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["run", "--backends", "numpy"], refuses("--backends", {"--backends": "numpy"})),
        (["run", "--cases", "no-such-*"], refuses("--cases", {"--cases": "no-such-*"})),
        (["run", "--dtypes", "int8", "--cases", "textbook"], refuses("--dtypes", {"--dtypes": "int8"})),
        (["run", "--json", "/no/such/folder/r.json"], refuses("--json", "/no/such/folder/r.json: ")),
        (["run", "--json", "/"], refuses("--json", "/: Is a directory")),
        (["run", "--random", "-1"], refuses("--random", {"--random": -1})),
        (
            ["cache-size", "--num-kv-heads", "0", "--head-dim", "1", "--capacity", "1"],
            refuses("--num-kv-heads", {"--num-kv-heads": 0}),
        ),
        (
            ["cache-size", "--num-kv-heads", "1", "--head-dim", "1", "--capacity", "1", "--dtype", "x"],
            refuses("--dtype", {"--dtype": "x"}),
        ),
    ],
)
def test_bad_usage_is_one_line_and_exits_2(capsys, arguments, refusal):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mha-parity: ")
    assert refusal.is_printed_in(captured.err)
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["run", "--weights"], ["diagnose"], ["bench", "--model"], ["compare"]])
def test_a_file_that_is_not_there_is_named_in_one_line(capsys, arguments):
    assert main([*arguments, "/no/such/file"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch("mha-parity: .*/no/such/file.*\n", captured.err)


def test_a_backend_that_is_not_there_exits_2_with_the_reason(capsys, let_need):
    let_need("tt", "ttnn_is_not_here")
    assert main(["run", "--backends", "tt"]) == 2
    assert capsys.readouterr().err == "mha-parity: error: tt needs ttnn_is_not_here, not installed here\n"


@pytest.mark.parametrize("spec", [AttentionSpec(12, 3, rope=Rope(1e4), head_dim=8), AttentionSpec(12, 3, d_kv=7)])
def test_run_takes_a_file_of_weights(tmp_path, capsys, spec):
    save_weights(tmp_path / "mine.safetensors", random_weights(spec, seed=4), spec)
    assert main(["run", "--weights", str(tmp_path / "mine.safetensors"), "--backends", "torch"]) == 0
    assert "mine-" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["truncated", "other", "nan", "transposed"])
def test_a_bad_weight_file_is_one_line_and_no_traceback(tmp_path, capsys, damage):
    spec = AttentionSpec(12, 3, d_in=7)
    path = tmp_path / "w.safetensors"
    weights = random_weights(spec)
    save_weights(path, weights, spec)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "other":
        path.write_bytes(b"PK\x03\x04 not a safetensors file")
    else:
        from parity import load_tensors, save_tensors

        tensors, metadata = load_tensors(path)
        weight = tensors["q_proj.weight"]
        tensors["q_proj.weight"] = weight.T if damage == "transposed" else weight * np.float32(np.nan)
        save_tensors(path, tensors, metadata)
    assert main(["run", "--weights", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("mha-parity: ")


@pytest.mark.parametrize(
    "others", [["--cases", "rope*"], ["--random", "3"], ["--save-traces", "traces"], ["--join", "."]]
)
def test_weights_stand_alone(tmp_path, capsys, others):
    spec = AttentionSpec(12, 3)
    save_weights(tmp_path / "w.safetensors", random_weights(spec), spec)
    assert main(["run", "--weights", str(tmp_path / "w.safetensors"), *others]) == 2
    assert refuses("--weights").is_printed_in(capsys.readouterr().err)


def test_the_command_that_runs_a_random_case_again_does_so(capsys):
    assert main(["run", "--cases", "random-17", "--backends", "torch"]) == 0
    assert "random-17" in capsys.readouterr().out


def test_gradients_that_are_not_compared_are_told(capsys):
    assert main(["run", "--cases", "decode", "--backends", "torch", "--grad"]) == 0
    assert "nothing to compare in gradients of 1 case (with a cache)" in capsys.readouterr().out.splitlines()[-1]


def test_json_to_a_link_writes_the_file_it_leads_to(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    arguments = ["cache-size", "--num-kv-heads", "1", "--head-dim", "1", "--capacity", "1"]
    assert main([*arguments, "--json", str(tmp_path / "link.json")]) == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["nbytes"] == 4


def test_json_to_a_device_leaves_the_device(tmp_path):
    arguments = ["cache-size", "--num-kv-heads", "1", "--head-dim", "1", "--capacity", "1"]
    assert main([*arguments, "--json", os.devnull]) == 0
    assert pathlib.Path(os.devnull).is_char_device()


def test_traces_are_saved_and_compared(tmp_path, capsys):
    folder = tmp_path / "traces"
    assert main(["run", "--cases", "textbook", "--backends", "torch", "--save-traces", str(folder)]) == 0
    assert main(["compare", str(folder), "--json", str(tmp_path / "r.json")]) == 0
    assert "torch agrees with the float64 reference" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["summary"]["failed"] == 0


def test_saved_traces_are_joined_into_the_report(tmp_path, capsys):
    folders = [str(tmp_path / "one"), str(tmp_path / "other")]
    for folder in folders:
        assert main(["run", "--cases", "textbook", "--backends", "torch", "--save-traces", folder]) == 0
    capsys.readouterr()
    joined = [argument for folder in folders for argument in ("--join", folder)]
    assert main(["run", "--cases", "textbook", "--backends", "jax", *joined]) == 0
    assert f"jax, torch and torch ({folders[1]}) agree with the float64 reference" in capsys.readouterr().out


@pytest.mark.costly("judges every case that a backend skips")
def test_skipped_cases_are_shown_and_each_reason_once(monkeypatch, capsys):
    monkeypatch.setattr(
        parity.backends.torch, "why_skipped", lambda case, dtype: "torch is tired" if dtype == "float16" else None
    )
    command = ["run", "--cases", "large-logits*", "--backends", "jax,torch", "--dtypes", "float32,float16"]
    assert main(command) == 2
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.rstrip().endswith("skipped") and line.startswith(" large-logits") for line in lines) == 2
    assert lines[-2] == "skipped: torch, float16: torch is tired (2 cases)"
    end = "NOT compared: torch, 2 cases in float16 (torch is tired)"
    assert lines[-1].endswith(f"2 cases, 47 stages passed, 0 failed; {end}")
    assert main([*command, "--quiet"]) == 2
    assert capsys.readouterr().out.splitlines() == lines[-1:]
    assert main([*command, "--quiet", "--allow-skipped"]) == 0
    assert "NOT compared, as --allow-skipped permits: torch, 2 cases" in capsys.readouterr().out


def test_a_dtype_that_a_backend_lacks_exits_2_when_asked_for_by_name(monkeypatch, capsys):
    monkeypatch.setattr(parity.backends.torch, "why_skipped", lambda case, dtype: f"torch has no {dtype}")
    assert main(["run", "--backends", "torch", "--dtypes", "float16"]) == 2
    assert refuses("torch", "torch has no float16").is_printed_in(capsys.readouterr().err)


def test_quiet_prints_the_last_line_only(capsys):
    assert main(["run", "--cases", "textbook", "--backends", "torch", "--quiet"]) == 0
    assert capsys.readouterr().out == ("torch agrees with the float64 reference: 1 case, 11 stages passed, 0 failed\n")


def test_quiet_does_not_hide_a_failure(monkeypatch, capsys):
    break_the_softmax(monkeypatch)
    assert main(["run", "--cases", "causal", "--backends", "torch", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("\ncausal/attn_weights: torch differs from the reference (float32)")
    assert "Worst error" not in out


def test_three_backends_fit_into_a_pipe(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    for folder in ("one", "other"):
        main(["run", "--cases", "trained-r*", "--backends", "torch", "--save-traces", str(tmp_path / folder)])
    joined = ("--join", str(tmp_path / "one"), "--join", str(tmp_path / "other"))
    capsys.readouterr()
    main(["run", "--cases", "trained-r*", "--backends", "torch", *joined])
    row = capsys.readouterr().out.splitlines()[2]
    assert row.count("ok 0.") == 3
    assert re.search(r" ok 0\.\d\d (context|output) ", row)  # not cut off


def test_doctor_says_what_is_there_and_what_is_not(capsys, tmp_path, let_need):
    let_need("tt", "ttnn_is_not_here")
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "matmul_precision=highest" in out
    assert "skipped: tt needs ttnn_is_not_here" in out
    content = json.loads((tmp_path / "d.json").read_text())
    assert content["missing"].keys() == {"tt"}
    assert content["environment"]["backends"].keys() == {"jax", "torch"}


def test_cache_size_of_the_published_example(capsys):
    arguments = ["--head-dim", "128", "--capacity", "8192", "--num-layers", "80", "--dtype", "float16"]
    assert main(["cache-size", "--num-kv-heads", "64", *arguments]) == 0
    assert "21474836480 bytes = 20 GiB" in capsys.readouterr().out
    assert main(["cache-size", "--num-kv-heads", "8", *arguments]) == 0
    assert "= 2.5 GiB" in capsys.readouterr().out


@pytest.mark.costly("modules that a new process imports")
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_no_framework(arguments):
    code = (
        "import sys, contextlib, io\n"
        "from parity.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main({arguments})\n"
        "print(sorted({'jax', 'torch', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jax", "torch"} & set(json.loads(result.stdout.replace("'", '"')))


def test_a_failed_json_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    old = '{"schema": "mha-parity/run"}'
    path.write_text(old)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert main(["run", "--cases", "textbook", "--backends", "torch", "--json", str(path)]) == 2
    assert path.read_text() == old
    assert [entry.name for entry in pathlib.Path(tmp_path).iterdir()] == ["r.json"]
