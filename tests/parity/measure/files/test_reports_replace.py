"""A report replaces only an earlier report, no file of a model or of its own command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.input_errors import rejects
from helpers.samples import sample

import parity
from mha_spec import AttentionSpec, Rope
from parity import random_weights
from parity.measure.files import write_tensors
from parity.measure.files.target import write_whole
from parity.port.conversion.layouts import LAYOUTS, from_canonical
from parity.use.cli.main import main

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "intermediate_size": 16,
}
PREFIX = "model.layers.0.self_attn"
CONVERT = ("--to", "mha_torch", "--rest", "drop")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, in the current folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    spec = AttentionSpec(32, 4, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope(10000.0))
    laid_out = from_canonical(random_weights(spec), spec, LAYOUTS["transformers.LLaMA"])
    tensors = {f"{PREFIX}.{name}": array for name, array in laid_out.items()}
    infos = {name: (array.shape, array.dtype) for name, array in tensors.items()}
    write_tensors(folder / "model.safetensors", infos, tensors.__getitem__)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_text('{"schema": "of words"}')
    monkeypatch.chdir(tmp_path)
    return folder


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return the content of each file, by its path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def rejects_report(command: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a command ends in one line about a report, and that no file has changed."""
    before = contents_of(Path())
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"mha-parity: error: {flag} ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert contents_of(Path()) == before


@sample(12)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("inspect model", "--json"),
        ("inspect model/model.safetensors", "--json"),
        ("run --model model --backends torch", "--json"),
        ("run --model model --backends torch", "--html"),
        ("run --model model --backends torch", "--junit"),
        ("spec model", "--json"),
        ("compare model model", "--json"),
        ("write model --to torch", "--json"),
        ("convert model q.npz --to mha_torch --rest drop", "--json"),
        ("diagnose model model", "--html"),
        ("inspect --layouts", "--json"),
    ],
)
def test_report_cannot_replace_model_files(model, capsys, command, flag, name):
    """A report onto a file of a model exits with 2 and one line, and changes no file."""
    rejects_report([*command.split(), flag, f"model/{name}"], flag, capsys)


def test_report_cannot_replace_user_module(model, capsys):
    """A report onto the module that is tested exits with 2 and one line, and changes no file."""
    Path("own.py").write_text("def attention(q, k, v): ...\n")
    rejects_report(["conformance", "own:attention", "--json", "own.py"], "--json", capsys)


@pytest.mark.parametrize("report", ["new.safetensors", "model/new.bin"])
def test_report_with_tensor_suffix_raises(model, capsys, report):
    """A report with the suffix of a tensor file exits with 2 and one line."""
    rejects_report(["inspect", "model", "--json", report], "--json", capsys)


def test_report_in_model_folder_is_replaced(model, monkeypatch):
    """A report in the model's folder replaces an earlier one and changes no other file."""
    monkeypatch.chdir(model)
    before = contents_of(Path())
    for _ in range(2):
        assert main(["inspect", ".", "--json", "out.json"]) == 0
    assert json.loads(Path("out.json").read_text())["schema"] == "mha-parity/inspect"
    assert contents_of(Path()).items() >= before.items()


def test_each_report_format_replaces_itself(tmp_path, monkeypatch):
    """JSON, JUnit and HTML reports replace empty files, and then earlier reports."""
    monkeypatch.chdir(tmp_path)
    forms = {"--json": "r.json", "--junit": "r.xml", "--html": "r.html"}
    options = [word for pair in forms.items() for word in pair]
    for name in forms.values():
        Path(name).touch()  # an empty file holds nothing to lose
    for _ in range(2):
        assert main(["run", "--cases", "textbook", "--backends", "torch", *options]) == 0
    assert all(Path(name).stat().st_size for name in forms.values())


@pytest.mark.parametrize(
    "report",
    [
        "q.safetensors.index.json",
        "q-00001-of-00003.safetensors",
        "model/../q-00009-of-00009.safetensors",
    ],
)
def test_report_cannot_replace_shards(model, capsys, report):
    """A report with the name of an index or shard that `convert` may write exits with 2."""
    sharded = ["convert", "model", "q.safetensors", *CONVERT, "--max-shard-gib", "0.000005"]
    rejects_report([*sharded, "--json", report], "--json", capsys)
    assert main(sharded) == 0
    capsys.readouterr()
    assert Path("q-00001-of-00003.safetensors").exists()
    rejects_report([*sharded, "--force", "--json", report], "--json", capsys)


@pytest.mark.parametrize("report", ["ranks/r.json", "ranks/consolidated.00.pth"])
def test_report_in_folder_of_ranks_raises(model, capsys, report):
    """A report in the folder into which `convert` writes ranks exits with 2."""
    Path("ranks").mkdir()
    command = ["convert", "model", "ranks", "--to", "meta.LLaMA", "--rest", "drop", "--ranks", "2"]
    rejects_report([*command, "--json", report], "--json", capsys)


@pytest.mark.parametrize("report", ["test_b.py", "b_trace.npz"])
def test_report_cannot_replace_written_code(model, capsys, report):
    """A report with the name of a test or trace that `write` writes exits with 2."""
    command = ["write", "model", "--to", "torch", "-o", "b.py", "--test", "trace", "--force"]
    rejects_report([*command, "--json", report], "--json", capsys)


def test_write_cannot_replace_its_source(model, capsys):
    """`write --force` exits with 2 if its trace has the name of the model that it reads."""
    assert main(["convert", "model", "b_trace.npz", *CONVERT]) == 0
    capsys.readouterr()
    command = ["write", "b_trace.npz", "--to", "torch", "-o", "b.py", "--test", "trace", "--force"]
    rejects_report(command, "MODEL", capsys)


@pytest.mark.parametrize("output", ["c.py/", "c.py/.", "missing/../c.py", "missing/c.py"])
def test_code_needs_the_name_of_a_file(model, capsys, output):
    """`write` exits with 2 if the output ends like a folder or is in a missing folder."""
    rejects_report(["write", "model", "--to", "torch", "-o", output], "--output", capsys)


@pytest.mark.parametrize("others", [[], ["--dry-run"]])
@pytest.mark.parametrize("output", ["o.safetensors/", "o.npz/.", "missing/../o.safetensors"])
def test_weights_need_the_name_of_a_file(model, capsys, output, others):
    """`convert` exits with 2 if the output ends like a folder or passes through a missing one."""
    before = contents_of(Path())
    assert main(["convert", "model", output, *CONVERT, *others]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"mha-parity: error: {output}: ")
    assert line.count("\n") == 1
    assert contents_of(Path()) == before


def test_write_whole_needs_a_file_name(tmp_path):
    """write_whole raises OSError for a path like a folder's or through a missing one."""
    for name in ("a/", "missing/../a"):
        with pytest.raises(OSError, match=name):
            write_whole(f"{tmp_path}/{name}", b"")
    assert os.listdir(tmp_path) == []


@pytest.mark.thorough
@pytest.mark.costly("a process that would wait for its own lock")
def test_ranks_fill_the_current_folder(model):
    """`convert --ranks 2` to `.` fills the current folder, which remains the same folder.

    It runs in a process of its own, which could wait for its own lock forever.
    """
    empty = Path("empty")
    empty.mkdir()
    place = empty.stat().st_ino
    command = [
        sys.executable,
        "-m",
        "parity",
        "convert",
        "../model",
        ".",
        "--to",
        "meta.LLaMA",
        "--ranks",
        "2",
    ]
    command += ["--rest", "drop"]
    path = f"{Path(parity.__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    subprocess.run(
        command, cwd=empty, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=60
    )
    assert sorted(os.listdir(empty)) == ["consolidated.00.pth", "consolidated.01.pth"]
    assert empty.stat().st_ino == place  # a shell that is in the folder sees the files
    assert sorted(os.listdir()) == ["empty", "model"]


def test_ranks_in_missing_folder_raise(model, capsys):
    """`convert --ranks` through a missing folder exits with 2 and changes no file."""
    before = contents_of(Path())
    assert (
        main(
            [
                "convert",
                "model",
                "missing/../new",
                "--to",
                "meta.LLaMA",
                "--rest",
                "drop",
                "--ranks",
                "2",
            ]
        )
        == 2
    )
    assert capsys.readouterr().err.startswith("mha-parity: error: missing/../new: ")
    assert contents_of(Path()) == before


def test_plugin_report_keeps_other_files(tmp_path):
    """`--parity-report` onto a JSON file that is not a report raises an error."""
    from parity.use.reporting.earlier import check_report

    (tmp_path / "package.json").write_text("{}")
    with rejects("--parity-report", {"--parity-report": ...}):
        check_report(tmp_path / "package.json", "--parity-report")
