"""Tables of layouts on the command line: passed by file, proposed, listed, and rejected early."""

import json
import shlex

import numpy as np
import pytest

from parity.measure.core.weights import load_tensors, save_tensors
from parity.port.conversion.layouts import LAYOUTS
from parity.use.cli.main import main

pytestmark = pytest.mark.usefixtures("own_registrations")

TABLE = """
name = "nebula"
about = "v, k and q of each group"
prefix = "blk.{i}"
grouped = true

[tensors]
mix = { holds = "vkq", axes = "d (n h)" }
back = { holds = "out", axes = "(n h) e" }
"""

HEADS = "--num-heads 4 --num-kv-heads 2"


@pytest.fixture
def folder(tmp_path, monkeypatch, rng):
    """A folder with a file of two layers and the table of its layout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nebula.toml").write_text(TABLE)
    shapes = {"mix": (12, 24), "back": (12, 12)}
    tensors = {
        f"blk.{i}.{name}": rng.standard_normal(shape, "float32")
        for i in range(2)
        for name, shape in shapes.items()
    }
    save_tensors("nebula.safetensors", tensors, {})
    return tmp_path


def run(command):
    """Run a command; return its status."""
    return main(shlex.split(command))


@pytest.mark.parametrize(
    ("there", "back"),
    [
        ("--from nebula.toml", "--to nebula.toml"),
        ("--layout nebula.toml --from nebula", "--layout nebula.toml --to nebula"),
    ],
    ids=["by file", "by name"],
)
def test_convert_takes_tables(folder, there, back, capsys):
    """A table is passed for the source and for the target, and the round trip is exact."""
    assert run(f"convert nebula.safetensors jax.npz --to mha_jax {there} {HEADS}") == 0
    assert run(f"convert jax.npz back.safetensors {back}") == 0
    tensors, _ = load_tensors("nebula.safetensors")
    again, metadata = load_tensors("back.safetensors")
    assert {name: x.tobytes() for name, x in again.items()} == {
        name: x.tobytes() for name, x in tensors.items()
    }
    assert metadata["layout"] == "nebula"


def test_verify_takes_a_table(folder, capsys):
    """`compare` checks a conversion by the table; a different order of the heads is not the
    same.
    """
    assert run(f"convert nebula.safetensors jax.npz --to mha_jax --from nebula.toml {HEADS}") == 0
    verify = f"compare nebula.safetensors jax.npz {HEADS}"
    assert run(f"{verify} --from nebula.toml") == 0
    assert "hold the same attention in all 2 layers" in capsys.readouterr().out
    (folder / "other.toml").write_text(TABLE.replace("vkq", "kvq").replace("nebula", "other"))
    assert run(f"{verify} --from other.toml") == 1


def test_inspect_tries_tables(folder, capsys):
    """`inspect` lists a layout of a table that fits, and then proposes none."""
    assert run("inspect nebula.safetensors --layout nebula.toml --json out.json") == 0
    assert "blk.{i}" in capsys.readouterr().out
    report = json.loads((folder / "out.json").read_text())
    assert [layer["layout"] for layer in report["layers"]] == ["nebula"]
    assert report["proposed_layout"] == ""


def test_inspect_proposes_a_table(folder, capsys):
    """The table that `inspect` prints for an unknown file can be passed as it is."""
    assert run("inspect nebula.safetensors --json out.json") == 0
    printed = capsys.readouterr().out
    report = json.loads((folder / "out.json").read_text())
    assert report["proposed_layout"].rstrip() in printed
    (folder / "proposed.toml").write_text(report["proposed_layout"])
    command = f"convert nebula.safetensors jax.npz --to mha_jax --from proposed.toml {HEADS}"
    assert run(command) == 0


def test_layouts_shows_a_table(folder, capsys):
    """`inspect --layouts` lists a registered table, and `inspect` describes one by its file."""
    assert run("inspect --layouts --layout nebula.toml") == 0
    assert "v, k and q of each group" in capsys.readouterr().out
    assert run("inspect nebula.toml") == 0
    out = capsys.readouterr().out
    assert "each group's value, then its key, then its queries" in out
    assert "prefix: blk.{i}" in out


@pytest.mark.parametrize(
    "command",
    [
        "convert nebula.safetensors out.npz --to mha_jax --from bad.toml",
        "convert nebula.safetensors out.npz --to bad.toml --from nebula.toml",
        "convert missing.npz out.npz --to mha_jax --layout bad.toml",
        "inspect missing.npz --layout bad.toml",
        "compare missing.npz missing.npz --from bad.toml",
        "inspect bad.toml",
    ],
)
def test_bad_table_stops_before_work(folder, command, capsys):
    """A bad table is one line with its file, key and what is allowed, before any file is read."""
    (folder / "bad.toml").write_text(TABLE.replace("true", '"\x1b[2J"'.replace("\x1b", "\\u001b")))
    assert run(command) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("mha-parity: error: bad.toml: the key grouped ")
    assert "true or false" in error
    assert error.count("\n") == 1
    assert "\x1b" not in error
    assert not (folder / "out.npz").exists()


@pytest.mark.parametrize(
    "command",
    [
        "convert nebula.safetensors out.npz --from nebula.toml --to second.toml",
        "inspect nebula.safetensors --layout nebula.toml --layout second.toml",
        "compare nebula.safetensors nebula.safetensors --from nebula.toml --from second.toml",
    ],
)
def test_two_tables_of_one_name(folder, command, capsys):
    """Two tables of one name on a command line are an error, unless they are equal."""
    (folder / "second.toml").write_text(TABLE.replace("vkq", "qkv"))
    assert run(f"{command} {HEADS}" if "inspect" not in command else command) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("mha-parity: error: second.toml: the key name ")
    assert "nebula.toml" in error
    assert error.count("\n") == 1
    assert not (folder / "out.npz").exists()
    (folder / "second.toml").write_text(TABLE.replace("of each group", "in groups"))
    assert run(f"{command} {HEADS}" if "inspect" not in command else command) == 0


def test_edited_table_is_rejected(folder, capsys):
    """A file of a table is not read by a different table of that name; `inspect` says so too."""
    assert run(f"convert nebula.safetensors a.npz --from nebula.toml --to nebula.toml {HEADS}") == 0
    (folder / "edited.toml").write_text(TABLE.replace("vkq", "qkv"))
    capsys.readouterr()
    assert run("convert a.npz b.npz --layout edited.toml --to mha_jax") == 2
    error = capsys.readouterr().err
    assert error.startswith("mha-parity: error: the table of nebula ")
    assert error.count("\n") == 1
    assert run("inspect a.npz --layout edited.toml --json out.json") == 0
    (layer,) = json.loads((folder / "out.json").read_text())["layers"]
    assert layer["heads"].startswith("the table of nebula ")


def test_ignored_tensor_needs_rest_drop(folder, capsys):
    """An ignored tensor with a name of the target's layout raises an error with the option for
    it.
    """
    tensors, _ = load_tensors("nebula.safetensors")
    tensors["blk.1.sinks"] = np.ones(4, np.float32)
    save_tensors("more.safetensors", tensors, {})
    (folder / "nebula.toml").write_text(
        TABLE.replace("[tensors]", 'ignored = ["sinks"]\n[tensors]')
    )
    command = f"convert more.safetensors a.npz --from nebula.toml --to mha_torch {HEADS}"
    assert run(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("mha-parity: error: blk.1.sinks ")
    assert "--rest drop" in error
    assert run(f"{command} --rest drop") == 0
    assert run("convert a.npz b.npz --to mha_jax") == 0


def test_missing_table_is_named(folder, capsys):
    """The path of a missing table is in the error."""
    assert run("inspect missing.toml") == 2
    assert "missing.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "inspect --layouts --layout missing",
        "inspect nebula.safetensors --layout missing.txt",
        "run --layout missing --cases textbook",
        "run --layout neb.txt --cases textbook",
    ],
)
def test_useless_layout_option_raises(folder, command, capsys):
    """`--layout` with a missing file, or without weights to read, is one line that names it."""
    (folder / "neb.txt").write_text(TABLE)
    assert run(command) == 2
    out, error = capsys.readouterr()
    assert out == ""
    if "missing" in command:
        assert "missing" in error
    else:
        assert error.startswith("mha-parity: error: --layout requires --weights or --model; ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "option", ["--layout neb.txt", "--layout N.TOML", "--from N.TOML"], ids=str.split
)
def test_table_of_any_suffix_is_read(folder, option, capsys):
    """`--layout` takes a file of any suffix, and other options one with `.toml` in any case."""
    for name in ("neb.txt", "N.TOML"):
        (folder / name).write_text(TABLE)
    command = f"convert nebula.safetensors jax.npz --to mha_jax {HEADS} {option}"
    if "--from" not in option:
        command += " --from nebula"
    assert run(command) == 0


def test_warning_names_the_tables_prefix(folder, rng, capsys):
    """Other attentions in a file are kept because of the layout's prefix if none was passed."""
    tensors, _ = load_tensors("nebula.safetensors")
    others = {f"ema.{name}": value for name, value in tensors.items()}
    save_tensors("two.safetensors", {**tensors, **others}, {})
    command = f"convert two.safetensors jax.npz --to mha_jax --from nebula.toml --force {HEADS}"
    assert run(command) == 0
    assert "because the layout's prefix does not match them: ema.blk.{i}" in (
        capsys.readouterr().err
    )
    assert run(f"{command} --prefix blk.{{i}}") == 0
    assert "because --prefix does not match them" in capsys.readouterr().err


def test_report_may_not_replace_a_table(folder, capsys):
    """`--json` with the path of the table is rejected, and the table stays."""
    assert run("inspect --layouts --layout nebula.toml --json nebula.toml") == 2
    assert "--layout" in capsys.readouterr().err
    assert (folder / "nebula.toml").read_text() == TABLE


def test_unregistered_name_leads_to_table(folder, capsys):
    """A file that a table's layout was written in needs the table again, and the error says so."""
    assert run(f"convert nebula.safetensors jax.npz --to mha_jax --from nebula.toml {HEADS}") == 0
    assert run("convert jax.npz back.npz --to nebula.toml") == 0
    del LAYOUTS["nebula"]
    capsys.readouterr()
    assert run("convert back.npz again.npz --to mha_jax") == 2
    assert "--layout FILE.toml" in capsys.readouterr().err
    assert run("convert back.npz again.npz --to mha_jax --layout nebula.toml") == 0
    assert np.load("again.npz")["blk.0.q_proj.kernel"].shape == (12, 12)
