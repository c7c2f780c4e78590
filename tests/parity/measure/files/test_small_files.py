"""Paths in every spelling, and small files that are special, endless or malformed."""

import os
import shutil
import socket
import sys

import pytest
from helpers.input_errors import rejects
from helpers.limits import within
from helpers.llama_folder import make_model

from parity.measure.files import open_tensors
from parity.measure.files.small import LARGEST, check_small_files, read_json, read_small, read_text
from parity.measure.files.tensor_file import parse_json
from parity.use.cli.main import main

# ---- Spellings of a folder -----------------------------------------------------------------------

COMMANDS = (
    "inspect FOLDER",
    "compare FOLDER FOLDER",
    "diagnose FOLDER FOLDER",
    "convert FOLDER {out}/weights.npz --to mha_torch",
    "convert FOLDER {out} --to mha_torch",
    "write FOLDER --to torch --layer 0",
    "write FOLDER --to torch --layer 0 --output {out}/attention.py",
    "spec FOLDER",
    "run --model FOLDER --backends torch --quiet",
)
FROM_OUTSIDE = (
    "model",
    "model/",
    "./model",
    "model/.",
    "model/sub/..",
    "link",
    "link/",
    "../here/model",
)
FROM_INSIDE = (".", "./", "./.", "sub/..", "../model")
SPELLINGS = [("here", spelling) for spelling in FROM_OUTSIDE] + [
    ("here/model", spelling) for spelling in FROM_INSIDE
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spellings") / "here"
    folder.mkdir()
    make_model(folder / "model")
    (folder / "model" / "sub").mkdir()
    (folder / "link").symlink_to("model")
    return folder.parent


@pytest.mark.parametrize("command", COMMANDS)
def test_folder_works_in_each_spelling(model, command, tmp_path, monkeypatch, capsys):
    """Commands accept each spelling of a folder's path, and write an output if requested."""
    # All commands use the reader of `inspect`; `convert` and `write` also compare paths with the
    # paths that they write.
    spellings = (
        SPELLINGS if command.startswith("inspect") else [("here/model", "."), ("here", "link/")]
    )
    if "{out}" in command:
        spellings = [*spellings, ("here", "model/sub/.."), ("here/model", "../model")]
    for number, (current, spelling) in enumerate(spellings):
        monkeypatch.chdir(model / current)
        out = tmp_path / str(number)
        out.mkdir()
        words = command.format(out=out).replace("FOLDER", spelling).split()
        assert main(words) == 0, (current, words, capsys.readouterr().err)
        assert len(list(out.iterdir())) == command.count("{out}")


def test_output_into_the_current_folder(model, tmp_path, monkeypatch):
    """`convert` writes model.safetensors into the current folder under three of its spellings."""
    for number, target in enumerate((".", "./", "sub/..")):
        folder = tmp_path / str(number)
        (folder / "sub").mkdir(parents=True)
        monkeypatch.chdir(folder)
        assert main(["convert", str(model / "here" / "model"), target, "--to", "mha_torch"]) == 0
        assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("words", ["write . --to torch --layer 0 --output .", "inspect . --json ."])
def test_folder_as_output_file_raises(model, monkeypatch, capsys, words):
    """A folder as the output file of `write` or of a report exits with 2."""
    monkeypatch.chdir(model / "here" / "model")
    assert main(words.split()) == 2
    assert "Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_empty_folder_name_raises(model, monkeypatch, capsys, command, tmp_path):
    """An empty path to a folder exits with 2 in each command, which calls it an empty name."""
    monkeypatch.chdir(model / "here" / "model")
    words = ["" if word == "FOLDER" else word.format(out=tmp_path) for word in command.split()]
    assert main(words) == 2
    assert "an empty name" in capsys.readouterr().err


def test_opening_the_root_folder_raises():
    """Opening the folder / as a checkpoint raises an error."""
    with rejects("/"):
        open_tensors("/")


# ---- Special and malformed files -----------------------------------------------------------------


def make_socket(path):
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(
            f"/proc/self/fd/{folder}/{path.name}"
        )  # names of sockets have at most 108 characters
    os.close(folder)


def make_large(path):
    path.touch()
    os.truncate(path, 1 << 40)


SPECIAL = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "empty device": lambda path: path.symlink_to("/dev/null"),
    "folder": lambda path: path.mkdir(),
    "broken link": lambda path: path.symlink_to("nowhere"),
    "circle": lambda path: path.symlink_to(path.name),
    "large": make_large,
}
MALFORMED = {
    "empty": b"",
    "not UTF-8": b'{"model_type": "llama\xff"}',
    "deep lists": b"[" * 300_000,
    "deep objects": b'{"a":' * 300_000,
    "twice": b'{"model_type": "llama", "model_type": "gpt2"}',
    "long integer": b'{"model_type": "llama", "hidden_size": ' + b"1" * 5000 + b"}",
    "list": b"[1, 2]",
    "number": b"1",
    "NUL": b"\0" * 100,
}


def make(kind, path):
    if kind in SPECIAL:
        SPECIAL[kind](path)
    else:
        path.write_bytes(MALFORMED[kind])


def one_line(capsys, *words):
    """Return the only line of a command's error, which must appear within 20 seconds."""
    with within(20):
        status = main([str(word) for word in words])
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2, line
    assert line.isprintable()
    assert "Error" not in line
    return line


@pytest.mark.parametrize("kind", [*SPECIAL, *MALFORMED])
def test_unusable_config_raises_one_line(tmp_path, capsys, kind):
    """A special or malformed config.json exits with 2 and one line in each command."""
    folder = tmp_path / "model"
    make_model(folder)
    (folder / "config.json").unlink()
    make(kind, folder / "config.json")
    for words in (
        ("spec", folder),
        ("inspect", folder),
        ("compare", folder, folder),
        ("convert", folder, tmp_path / "out.npz", "--to", "mha_torch"),
        ("write", folder, "--to", "torch"),
        ("run", "--model", folder, "--backends", "torch"),
        ("run", "--model", folder, "--against", "transformers"),
    ):
        assert "config.json" in one_line(capsys, *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("kind", [*SPECIAL, *MALFORMED])
def test_unusable_index_raises_one_line(tmp_path, capsys, kind):
    """A special or malformed index of shards exits with 2 and one line that names it."""
    index = tmp_path / "model.safetensors.index.json"
    make(kind, index)
    for path in (tmp_path, index):
        assert "model.safetensors.index.json" in one_line(capsys, "inspect", path)


@pytest.mark.parametrize("kind", [kind for kind in SPECIAL if kind != "large"])
def test_special_argument_raises_one_line(tmp_path, capsys, kind):
    """A pipe, device, folder or broken link as an argument exits with 2 and one line."""
    make_model(tmp_path / "model")
    make(kind, tmp_path / "special")
    of_layer = ("--prefix", "model.layers.0.self_attn")
    plot = ("plot", tmp_path / "model", tmp_path / "out.png", *of_layer)
    for words in (
        (*plot, "--case", "causal", "--labels-file", tmp_path / "special"),
        (*plot, "--input", tmp_path / "special"),
        ("run", "--weights", tmp_path / "special", "--backends", "torch"),
        ("run", "--join", tmp_path / "special", "--backends", "torch"),
        ("inspect", tmp_path / "special"),
        ("compare", tmp_path / "special"),
    ):
        assert str(tmp_path / "special") in one_line(capsys, *words)


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "socket"])
def test_special_file_raises_in_transformers(tmp_path, capsys, kind):
    """A special generation_config.json exits with 2 and one line with `--against transformers`."""
    folder = tmp_path / "model"
    make_model(folder)
    make(kind, folder / "generation_config.json")
    assert "generation_config.json" in one_line(
        capsys, "run", "--model", folder, "--against", "transformers"
    )


def test_unreadable_config_is_reported(tmp_path, capsys, monkeypatch):
    """A config.json without permission to read is reported as such, not as missing."""

    def forbidden(path, *rest):
        if str(path).endswith("config.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest)

    opened = os.open
    make_model(tmp_path / "model")
    monkeypatch.setattr("parity.measure.files.small.os.open", forbidden)
    line = one_line(
        capsys, "convert", tmp_path / "model", tmp_path / "out.npz", "--to", "mha_torch"
    )
    assert line.endswith("config.json: Permission denied")


def test_small_files_have_a_limit(tmp_path):
    """A file of exactly the size limit is read; one byte more raises an error."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert read_small(path, 10) == b"x" * 10
    with rejects(str(path)):
        read_small(path, 9)
    os.truncate(path, LARGEST + 1)
    with rejects(str(path)):
        read_text(path)


def test_file_replaced_by_a_pipe_raises(tmp_path, monkeypatch):
    """A path that becomes a pipe after its check raises an error instead of waiting."""
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    is_file = os.stat(tmp_path / "file")
    stat = os.stat

    def stat_before(path, **options):
        # Other code of the process calls it as well, with options.
        if str(path) == str(tmp_path / "pipe"):
            return is_file
        return stat(path, **options)

    monkeypatch.setattr("parity.measure.files.small.os.stat", stat_before)
    with within(10), rejects(str(tmp_path / "pipe"), "a pipe"):
        read_small(tmp_path / "pipe")


def test_text_may_have_a_byte_order_mark(tmp_path):
    """A byte order mark is removed from text; a byte that is not UTF-8 raises with its position."""
    (tmp_path / "labels").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert read_text(tmp_path / "labels").splitlines() == ["one", "two"]
    (tmp_path / "labels").write_bytes(b"one\n\xff")
    with rejects(str(tmp_path / "labels"), "byte 4"):
        read_text(tmp_path / "labels")


def test_broken_links_are_tolerated(tmp_path):
    """A broken link among the small files of a model raises no error."""
    (tmp_path / "tokenizer.json").symlink_to("nowhere")
    check_small_files(tmp_path)


def test_json_beyond_limits_raises():
    """Deep nesting, long integers and repeated names in JSON raise; NaN and Infinity are read."""
    assert parse_json(b'{"a": [1, NaN, Infinity]}')["a"][0] == 1
    with rejects("JSON"):
        parse_json(b"[" * 100_000)
    with rejects("integers"):
        parse_json(b"1" * (sys.get_int_max_str_digits() + 1))
    with rejects("names", "a twice"):
        parse_json(b'{"a": 1, "b": {"a": 1, "a": 1}}')


def test_json_errors_name_the_file(tmp_path):
    """Errors of nested or truncated JSON contain the path of the file."""
    (tmp_path / "x.json").write_bytes(b"[" * 100_000)
    with rejects("JSON", where=str(tmp_path / "x.json")):
        read_json(tmp_path / "x.json")
    shutil.copy(tmp_path / "x.json", tmp_path / "y.json")
    (tmp_path / "y.json").write_bytes(b"{")
    with rejects(str(tmp_path / "y.json")):
        read_json(tmp_path / "y.json")
