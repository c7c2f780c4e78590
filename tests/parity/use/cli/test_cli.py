"""Tests of the command line, mainly `run`: exit status, files and printed text."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.command_line import run_in_pipe
from helpers.input_errors import rejects

import mha_torch
import parity.measure.backends.torch
from mha_spec import Rope
from parity import AttentionSpec, random_weights
from parity.measure.core.weights import save_weights
from parity.use.cli.main import main

RESULT_KEYS = {
    "case",
    "backend",
    "dtype",
    "stage",
    "status",
    "error",
    "budget",
    "ratio",
    "max_abs",
    "max_ulp",
    "pcc",
}
RESULT_KEYS |= {"worst_index", "reason"}


def break_the_softmax(monkeypatch):
    """Shift every mask by one key, in the stage function and wherever the module uses it."""
    original = mha_torch.masked_softmax

    def broken(scores, mask=None, sinks=None):
        return original(scores, None if mask is None else mask.roll(1, dims=-1), sinks)

    monkeypatch.setattr(mha_torch, "masked_softmax", broken)
    monkeypatch.setattr(mha_torch.stages, "masked_softmax", broken)


def test_run_agrees_and_exits_0(capsys):
    """A run of the case textbook on JAX and PyTorch reports agreement in all 23 stages and
    exits with status 0.
    """
    assert main(["run", "--cases", "textbook", "--backends", "jax,torch"]) == 0
    assert (
        "jax and torch agree with the float64 reference: 1 case, 23 stages passed, 0 failed"
        in capsys.readouterr().out
    )


@pytest.mark.costly("whether output is a terminal")
@pytest.mark.thorough
def test_piped_run_prints_plain_lines():
    """In a pipe, `run --verbose` prints plain lines of at most 100 columns, without escapes
    or table borders.
    """
    result = run_in_pipe(
        "run", "--cases", "trained-smollm2-causal", "--backends", "torch", "--verbose"
    )
    assert result.returncode == 0
    assert result.stderr == ""
    assert all(line.isprintable() for line in result.stdout.splitlines())
    assert "\x1b" not in result.stdout
    assert "│" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.costly("the exit status of a process whose pipe is closed")
@pytest.mark.thorough
def test_closed_pipe_keeps_exit_status_0():
    """If the reader of a run's output closes the pipe, the exit status is 0 and standard
    error is empty.
    """
    command = [
        sys.executable,
        "-m",
        "parity",
        "run",
        "--cases",
        "textbook",
        "--backends",
        "torch",
        "--verbose",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("option", ["--backends", "--dtypes"])
def test_empty_list_option_is_rejected(capsys, option):
    """An empty list for --backends or --dtypes exits with status 2 and an error with the
    option's name.
    """
    assert main(["run", option, ","]) == 2
    assert option in capsys.readouterr().err


def test_wrong_backend_fails_at_its_stage(monkeypatch, capsys):
    """A wrong softmax on torch exits with status 1; the output has the failed stage, the
    index of the worst error, and the command that reproduces it.
    """
    break_the_softmax(monkeypatch)
    assert main(["run", "--cases", "causal", "--backends", "torch"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "causal/attn_weights: torch differs from the reference (float32)" in out
    assert "worst       1.00e+00 at (b=" in out
    assert "torch does NOT agree" in out
    assert "mha-parity run --backends torch --cases causal --dtypes float32" in out


def test_wrong_backend_is_in_json(monkeypatch, tmp_path):
    """The JSON of a run with a wrong softmax counts the failures; the first is attn_weights,
    with its worst index by axis (B, N, T, S).
    """
    break_the_softmax(monkeypatch)
    assert (
        main(
            ["run", "--cases", "causal", "--backends", "torch", "--json", str(tmp_path / "r.json")]
        )
        == 1
    )
    content = json.loads((tmp_path / "r.json").read_text())
    failed = [result for result in content["results"] if result["status"] == "failed"]
    assert content["summary"]["failed"] == len(failed) > 0
    assert failed[0]["stage"] == "attn_weights"
    assert failed[0]["worst_index"].keys() == {"B", "N", "T", "S"}


def test_run_json_has_documented_keys(tmp_path):
    """The JSON of `run --grad` has the documented keys, and each result has the keys of
    RESULT_KEYS; all of them passed.
    """
    path = tmp_path / "r.json"
    assert (
        main(["run", "--cases", "textbook", "--backends", "torch", "--grad", "--json", str(path)])
        == 0
    )
    content = json.loads(path.read_text())
    assert content.keys() >= {"schema", "version", "environment", "summary", "results"}
    assert content["schema"] == "mha-parity/run"
    assert content["summary"] == {
        "passed": len(content["results"]),
        "failed": 0,
        "skipped": 0,
        "missing": 0,
    }
    assert all(result.keys() >= RESULT_KEYS for result in content["results"])


def test_json_lists_skipped_backends(tmp_path, let_need):
    """The JSON lists backends whose package is not installed as skipped, each with that
    package as the reason.
    """
    let_need("tt", "ttnn_is_not_here")
    let_need("jax", "jax_is_not_here")
    assert main(["run", "--cases", "textbook", "--json", str(tmp_path / "r.json")]) == 0
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    skipped = [
        (result["backend"], result["reason"]) for result in results if result["status"] == "skipped"
    ]
    assert skipped == [
        ("jax", "jax needs jax_is_not_here, not installed here"),
        ("tt", "tt needs ttnn_is_not_here, not installed here"),
    ]


@pytest.mark.parametrize(
    ("arguments", "input_error"),
    [
        (["run", "--backends", "numpy"], rejects("--backends", {"--backends": "numpy"})),
        (["run", "--cases", "no-such-*"], rejects("--cases", {"--cases": "no-such-*"})),
        (
            ["run", "--dtypes", "int8", "--cases", "textbook"],
            rejects("--dtypes", {"--dtypes": "int8"}),
        ),
        (
            ["run", "--json", "/no/such/folder/r.json"],
            rejects("--json", "/no/such/folder/r.json: "),
        ),
        (["run", "--json", "/"], rejects("--json", "/: Is a directory")),
        (["run", "--random", "-1"], rejects("--random", {"--random": -1})),
        (
            ["cache-size", "--num-kv-heads", "0", "--head-dim", "1", "--capacity", "1"],
            rejects("--num-kv-heads", {"--num-kv-heads": 0}),
        ),
        (
            [
                "cache-size",
                "--num-kv-heads",
                "1",
                "--head-dim",
                "1",
                "--capacity",
                "1",
                "--dtype",
                "x",
            ],
            rejects("--dtype", {"--dtype": "x"}),
        ),
    ],
)
def test_bad_usage_exits_2_with_one_line(capsys, arguments, input_error):
    """An invalid value of an option exits with status 2 and one error line with the option
    and its value; standard output is empty.
    """
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mha-parity: ")
    assert input_error.is_printed_in(captured.err)
    assert captured.err.count("\n") == 1


def test_missing_file_is_named_in_error(tmp_path, monkeypatch, capsys):
    """If a file does not exist, the command exits with status 2 and prints one error line
    with its path, also next to a file that exists; so does `compare` of one folder of weights.
    """
    monkeypatch.chdir(tmp_path)
    np.savez("weights.npz", weight=np.zeros(1))
    missing = "/no/such/file"
    for words in (
        ["run", "--weights", missing],
        ["diagnose", missing],
        ["diagnose", "weights.npz", missing],
        ["bench", "--model", missing],
        ["compare", missing],
        ["compare", "weights.npz", missing],
    ):
        assert main(words) == 2, words
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.fullmatch(f"mha-parity: .*{missing}.*\n", captured.err), words
    assert main(["compare", "."]) == 2
    assert rejects("INPUT", ".").is_printed_in(capsys.readouterr().err)


def test_missing_backend_exits_2(capsys, let_need):
    """A requested backend that is not installed exits with status 2 and an error with the
    missing package.
    """
    let_need("tt", "ttnn_is_not_here")
    assert main(["run", "--backends", "tt"]) == 2
    assert (
        capsys.readouterr().err
        == "mha-parity: error: tt needs ttnn_is_not_here, not installed here\n"
    )


@pytest.mark.parametrize(
    "spec", [AttentionSpec(12, 3, rope=Rope(1e4), head_dim=8), AttentionSpec(12, 3, d_kv=7)]
)
def test_run_accepts_weight_file(tmp_path, capsys, spec):
    """`run --weights` runs the layer of a file, with RoPE and its own head_dim or with d_kv
    7, in cases named after the file.
    """
    save_weights(tmp_path / "mine.safetensors", random_weights(spec, seed=4), spec)
    assert (
        main(["run", "--weights", str(tmp_path / "mine.safetensors"), "--backends", "torch"]) == 0
    )
    assert "mine-" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["truncated", "other", "nan", "transposed"])
def test_damaged_weight_file_exits_2(tmp_path, capsys, damage):
    """A weight file that is truncated, of the wrong format, or has NaN or a transposed weight
    exits with status 2 and one error line.
    """
    spec = AttentionSpec(12, 3, d_in=7)
    path = tmp_path / "w.safetensors"
    weights = random_weights(spec)
    save_weights(path, weights, spec)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "other":
        path.write_bytes(b"PK\x03\x04 not a safetensors file")
    else:
        from parity.measure.core.weights import load_tensors, save_tensors

        tensors, metadata = load_tensors(path)
        weight = tensors["q_proj.weight"]
        tensors["q_proj.weight"] = (
            weight.T if damage == "transposed" else weight * np.float32(np.nan)
        )
        save_tensors(path, tensors, metadata)
    assert main(["run", "--weights", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("mha-parity: ")


@pytest.mark.parametrize(
    "others",
    [["--cases", "rope*"], ["--random", "3"], ["--save-traces", "traces"], ["--join", "."]],
)
def test_weights_exclude_other_cases(tmp_path, capsys, others):
    """--weights with --cases, --random, --save-traces or --join exits with status 2 and an
    error about --weights.
    """
    spec = AttentionSpec(12, 3)
    save_weights(tmp_path / "w.safetensors", random_weights(spec), spec)
    assert main(["run", "--weights", str(tmp_path / "w.safetensors"), *others]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mha-parity: error: --weights cannot be combined with {others[0]}; ")


def test_random_case_reruns_by_name(capsys):
    """`run --cases random-17` runs the random case with this number again."""
    assert main(["run", "--cases", "random-17", "--backends", "torch"]) == 0
    assert "random-17" in capsys.readouterr().out


def test_uncompared_gradients_are_reported(capsys):
    """With --grad, the last line says that gradients of a case with a cache are not compared."""
    assert main(["run", "--cases", "decode", "--backends", "torch", "--grad"]) == 0
    assert (
        "nothing to compare in gradients of 1 case (with a cache)"
        in capsys.readouterr().out.splitlines()[-1]
    )


def test_json_follows_symbolic_link(tmp_path):
    """--json to a symbolic link writes the target of the link, and the link remains."""
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    arguments = ["cache-size", "--num-kv-heads", "1", "--head-dim", "1", "--capacity", "1"]
    assert main([*arguments, "--json", str(tmp_path / "link.json")]) == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["nbytes"] == 4


def test_json_does_not_replace_device(tmp_path):
    """--json to the null device does not replace the device by a file."""
    arguments = ["cache-size", "--num-kv-heads", "1", "--head-dim", "1", "--capacity", "1"]
    assert main([*arguments, "--json", os.devnull]) == 0
    assert pathlib.Path(os.devnull).is_char_device()


def test_traces_are_saved_and_compared(tmp_path, capsys):
    """`compare` of traces from `run --save-traces` reports agreement, and no failure in its
    JSON.
    """
    folder = tmp_path / "traces"
    assert (
        main(["run", "--cases", "textbook", "--backends", "torch", "--save-traces", str(folder)])
        == 0
    )
    assert main(["compare", str(folder), "--json", str(tmp_path / "r.json")]) == 0
    assert "torch agrees with the float64 reference" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["summary"]["failed"] == 0


def test_joined_traces_are_in_report(tmp_path, capsys):
    """`run` with two --join folders compares their backends also; a second torch is
    distinguished by its folder.
    """
    folders = [str(tmp_path / "one"), str(tmp_path / "other")]
    for folder in folders:
        assert (
            main(["run", "--cases", "textbook", "--backends", "torch", "--save-traces", folder])
            == 0
        )
    capsys.readouterr()
    joined = [argument for folder in folders for argument in ("--join", folder)]
    assert main(["run", "--cases", "textbook", "--backends", "jax", *joined]) == 0
    assert (
        f"jax, torch and torch ({folders[1]}) agree with the float64 reference"
        in capsys.readouterr().out
    )


@pytest.mark.costly("compares every case that a backend skips")
def test_skipped_cases_are_reported(monkeypatch, capsys):
    """Skipped cases are shown, with each reason once, and the run exits with status 2, also
    with --quiet; with --allow-skipped the status is 0.
    """
    monkeypatch.setattr(
        parity.measure.backends.torch,
        "why_skipped",
        lambda case, dtype: "torch is tired" if dtype == "float16" else None,
    )
    command = [
        "run",
        "--cases",
        "large-logits*",
        "--backends",
        "jax,torch",
        "--dtypes",
        "float32,float16",
    ]
    assert main(command) == 2
    lines = capsys.readouterr().out.splitlines()
    assert (
        sum(
            line.rstrip().endswith("skipped") and line.startswith(" large-logits") for line in lines
        )
        == 2
    )
    assert lines[-2] == "skipped: torch, float16: torch is tired (2 cases)"
    end = "NOT compared: torch, 2 cases in float16 (torch is tired)"
    assert lines[-1].endswith(f"2 cases, 51 stages passed, 0 failed; {end}")
    assert main([*command, "--quiet"]) == 2
    assert capsys.readouterr().out.splitlines() == lines[-1:]
    assert main([*command, "--quiet", "--allow-skipped"]) == 0
    assert "NOT compared, as --allow-skipped permits: torch, 2 cases" in capsys.readouterr().out


def test_unsupported_dtype_exits_2(monkeypatch, capsys):
    """A requested dtype that the requested backend does not support exits with status 2 and
    the reason of the backend.
    """
    monkeypatch.setattr(
        parity.measure.backends.torch, "why_skipped", lambda case, dtype: f"torch has no {dtype}"
    )
    assert main(["run", "--backends", "torch", "--dtypes", "float16"]) == 2
    assert rejects("torch", "torch has no float16").is_printed_in(capsys.readouterr().err)


def test_quiet_prints_only_last_line(capsys):
    """`run --quiet` prints only the summary line if all stages agree."""
    assert main(["run", "--cases", "textbook", "--backends", "torch", "--quiet"]) == 0
    assert capsys.readouterr().out == (
        "torch agrees with the float64 reference: 1 case, 11 stages passed, 0 failed\n"
    )


def test_quiet_still_shows_failures(monkeypatch, capsys):
    """With --quiet, a run with a wrong softmax exits with status 1 and prints its first
    difference, but no table.
    """
    break_the_softmax(monkeypatch)
    assert main(["run", "--cases", "causal", "--backends", "torch", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("\ncausal/attn_weights: torch differs from the reference (float32)")
    assert "Worst error" not in out


def test_piped_table_fits_three_backends(tmp_path, monkeypatch, capsys):
    """In a pipe, the row of a case has the ratios of three backends, and the name of the
    worst stage is not cut off.
    """
    monkeypatch.delenv("COLUMNS", raising=False)
    for folder in ("one", "other"):
        main(
            [
                "run",
                "--cases",
                "trained-r*",
                "--backends",
                "torch",
                "--save-traces",
                str(tmp_path / folder),
            ]
        )
    joined = ("--join", str(tmp_path / "one"), "--join", str(tmp_path / "other"))
    capsys.readouterr()
    main(["run", "--cases", "trained-r*", "--backends", "torch", *joined])
    row = capsys.readouterr().out.splitlines()[2]
    assert row.count("ok 0.") == 3
    assert re.search(r" ok 0\.\d\d (context|output) ", row)  # not cut off


def test_doctor_lists_backends_and_missing(capsys, tmp_path, let_need):
    """`doctor` prints the numerics lock of JAX and the package that TTNN misses; its JSON has
    the installed and the missing backends.
    """
    let_need("tt", "ttnn_is_not_here")
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "matmul_precision=highest" in out
    assert "skipped: tt needs ttnn_is_not_here" in out
    content = json.loads((tmp_path / "d.json").read_text())
    assert content["missing"].keys() == {"tt"}
    assert content["environment"]["backends"].keys() == {"jax", "torch"}


def test_cache_size_of_published_example(capsys):
    """A float16 cache of 80 layers with 8192 slots and heads of 128 takes 20 GiB with 64
    key/value heads, and 2.5 GiB with 8.
    """
    arguments = [
        "--head-dim",
        "128",
        "--capacity",
        "8192",
        "--num-layers",
        "80",
        "--dtype",
        "float16",
    ]
    assert main(["cache-size", "--num-kv-heads", "64", *arguments]) == 0
    assert "21474836480 bytes = 20 GiB" in capsys.readouterr().out
    assert main(["cache-size", "--num-kv-heads", "8", *arguments]) == 0
    assert "= 2.5 GiB" in capsys.readouterr().out


@pytest.mark.costly("modules that a new process imports")
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_no_framework(arguments):
    """`--help`, `run --help` and `--version` import neither JAX nor PyTorch."""
    code = (
        "import sys, contextlib, io\n"
        "from parity.use.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main({arguments})\n"
        "print(sorted({'jax', 'torch', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"jax", "torch"} & set(json.loads(result.stdout.replace("'", '"')))


def test_failed_json_write_keeps_old_file(tmp_path, monkeypatch):
    """If writing the JSON fails, the run exits with status 2, the old file is unchanged, and
    no other file remains.
    """
    path = tmp_path / "r.json"
    old = '{"schema": "mha-parity/run"}'
    path.write_text(old)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert main(["run", "--cases", "textbook", "--backends", "torch", "--json", str(path)]) == 2
    assert path.read_text() == old
    assert [entry.name for entry in pathlib.Path(tmp_path).iterdir()] == ["r.json"]
