"""Sets of files: all are written or none is, and an error names the file."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.input_errors import rejects

import parity
from mha_spec import AttentionSpec
from parity.measure.files.target import write_files
from parity.use.cli.main import main

NAMES = ("attention.py", "test_attention.py", "attention_trace.npz")
"""Files of `write --test trace`, in the order in which they are written."""


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    path = tmp_path / "layer.safetensors"
    spec = AttentionSpec(32, 4)
    parity.save(path, parity.random_weights(spec), spec, "mha_torch")
    return path


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return the content of each file; hidden scratch folders would show as well."""
    return {
        path.name: path.read_bytes() if path.is_file() else b"a folder" for path in folder.iterdir()
    }


def write_command(layer: Path, output: Path, *options: str) -> int:
    return main(
        ["write", str(layer), "--to", "torch", "-o", str(output), "--test", "trace", *options]
    )


@pytest.mark.parametrize("are_there", [False, True])
@pytest.mark.parametrize("culprit", NAMES)
def test_full_disk_leaves_no_partial_set(layer, tmp_path, monkeypatch, capsys, culprit, are_there):
    """If writing one of three files fails, the error names it and the folder is unchanged."""
    folder = tmp_path / "written"
    folder.mkdir()
    if are_there:
        for name in NAMES:
            (folder / name).write_bytes(b"before")
    before, write_bytes = contents_of(folder), Path.write_bytes

    def fail(path: Path, data: bytes) -> int:
        if path.name == culprit:
            raise OSError(28, "No space left on device")
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    assert write_command(layer, folder / "attention.py", "--force") == 2
    assert (
        capsys.readouterr().err
        == f"mha-parity: error: {folder / culprit}: No space left on device\n"
    )
    assert contents_of(folder) == before


@pytest.mark.parametrize("count", range(9))
def test_partly_moved_set_is_undone(tmp_path, monkeypatch, count):
    """If one of seven moves fails, both folders of a set, one behind a link, are restored."""
    folder, other = tmp_path / "written", tmp_path / "other"
    for directory in (folder, other):
        directory.mkdir()
    (folder / "a").write_bytes(b"old a")
    (other / "c").write_bytes(b"old c")
    (folder / "c").symlink_to(other / "c")
    before = contents_of(folder) | contents_of(other)
    moves, replace = itertools.count(), Path.replace

    def fail(path: Path, target: Path) -> Path:
        if next(moves) == count:
            raise OSError(5, "Input/output error")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    new = {folder / name: name.encode() for name in "abc"}
    if count < 7:
        with pytest.raises(OSError, match="Input/output error"):
            write_files(new)
        assert contents_of(folder) | contents_of(other) == before
    else:
        write_files(new)
        assert contents_of(folder) == {"a": b"a", "b": b"b", "c": b"c"}
        assert (folder / "c").is_symlink()
        assert contents_of(other) == {"c": b"c"}


@pytest.mark.parametrize("name", NAMES)
def test_existing_file_blocks_the_whole_set(layer, tmp_path, capsys, name):
    """If one of three files exists, `write` without `--force` exits with 2 and writes none."""
    folder = tmp_path / "written"
    folder.mkdir()
    (folder / name).write_bytes(b"precious")
    assert write_command(layer, folder / "attention.py") == 2
    error = capsys.readouterr().err
    assert error == f"mha-parity: error: {folder / name} exists; pass --force to replace it\n"
    assert contents_of(folder) == {name: b"precious"}


def test_set_requires_separate_files(tmp_path):
    """A set with a folder, a pipe or two paths to the same file raises and writes nothing."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with rejects(f"…/{name}", ""):
            write_files({tmp_path / "a": b"", tmp_path / name: b""})
    with rejects("…/link", ""):
        write_files({tmp_path / "a": b"", tmp_path / "link": b""})
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]


LIMITED = """
import resource
import sys

sys.dont_write_bytecode = True  # Python leaves half a file if it cannot write it
from parity.use.cli.main import main

resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
layer, folder = sys.argv[1:]
written = ["write", layer, "--to", "torch", "-o", f"{folder}/attention.py", "--test", "trace"]
converted = ["convert", layer, f"{folder}/converted.safetensors", "--to", "flax.nnx"]
shards = ["convert", layer, f"{folder}/shards.safetensors", "--to", "flax.nnx", "--max-shard-gib", "4e-6"]
traces = ["run", "--cases", "textbook", "--backends", "torch", "--save-traces", f"{folder}/traces"]
report = ["run", "--cases", "causal*", "--backends", "torch", "--json", f"{folder}/report.json"]
for command in (written, converted, shards, traces, report):
    assert main(command) == 2, command
"""


@pytest.mark.thorough
@pytest.mark.costly("a process whose files have a limit")
def test_too_large_output_is_named(layer, tmp_path):
    """Beyond a file size limit, five commands exit with 2, name the file and leave none."""
    folder = tmp_path / "written"
    folder.mkdir()
    command = [sys.executable, "-c", LIMITED, str(layer), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in result.stderr.splitlines() if line.startswith("mha-parity: error:")]
    traces = folder / "traces"
    names = ("attention_trace.npz", "converted.safetensors", "shards.safetensors")
    expected = [f"mha-parity: error: {folder / name}: File too large" for name in names]
    assert errors[:3] == expected, result.stderr
    assert errors[3].startswith(f"mha-parity: error: {traces}/"), result.stderr
    assert errors[3].endswith(".safetensors: File too large")
    assert errors[4:] == [f"mha-parity: error: {folder / 'report.json'}: File too large"]
    assert [path for path in folder.rglob("*") if path != traces] == []


@pytest.mark.costly("a process whose disk is full")
def test_full_standard_output_is_reported(layer):
    """`write` to a full standard output exits with 2 and one line."""
    command = [sys.executable, "-m", "parity", "write", str(layer), "--to", "torch"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.stderr == "mha-parity: error: standard output: No space left on device\n"
    assert result.returncode == 2


def test_error_of_a_reader_keeps_its_path(tmp_path):
    """An OSError of the source keeps its path when tensors are written."""

    def read(name: str) -> np.ndarray:
        raise OSError(5, "Input/output error", "the source")

    with pytest.raises(OSError, match="the source"):
        parity.measure.files.write_tensors(tmp_path / "w.npz", {"a": ((1,), np.float32)}, read)
