"""Keys about attention that are not read, and other parts that a comparison of two files leaves
out.
"""

import json
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers.input_errors import rejects
from helpers.tensors import read_metadata
from safetensors import safe_open
from safetensors.numpy import save_file

import parity
from mha_spec import InputError, Rope
from parity.measure.core.weights import load_tensors, load_weights, save_tensors, save_weights
from parity.measure.files import open_tensors
from parity.port.conversion.convert import convert_file
from parity.use.cli.main import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIG |= {
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "vocab_size": 8,
}
CONFIG |= {"rope_theta": 10000.0, "attention_bias": False, "attention_dropout": 0.0}
UNREAD = {
    "sliding_window": 4,
    "attn_logit_softcapping": 30.0,
    "attention_multiplier": 0.1,
    "use_alibi": True,
}
FOO = {"model_type": "foo", **UNREAD}
GEMMA = {"model_type": "gemma2", "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 4}
GEMMA |= {"attn_logit_softcapping": 50.0}
PREFIX = "model.layers.{i}.self_attn"
FLAGS = ["--from", "transformers.LLaMA", "--prefix", PREFIX]


@pytest.fixture
def model(tmp_path):
    """Return a function that writes a model's folder with a configuration, without the layers
    `lost`.
    """

    def write(name, *lost, **config):
        rng, folder = np.random.default_rng(0), tmp_path / name
        folder.mkdir()
        rows = {"q": 16, "k": 8, "v": 8, "o": 16}
        tensors = {
            f"{PREFIX.format(i=i)}.{name}_proj.weight": rng.standard_normal((size, 16)).astype(
                "float32"
            )
            for i in range(3)
            for name, size in rows.items()
        }
        without_lost = {
            name: x
            for name, x in tensors.items()
            if not any(PREFIX.format(i=i) in name for i in lost)
        }
        save_file(without_lost, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(CONFIG | config))
        return str(folder)

    return write


def compared(capsys, *arguments):
    """Return the exit status of `compare`, its last line, and the entries of its JSON that are not
    compared.
    """
    capsys.readouterr()
    report = Path(arguments[0]).parent / "report.json"
    status = main(["compare", *map(str, arguments), "--json", str(report)])
    return (
        status,
        capsys.readouterr().out.strip().splitlines()[-1],
        json.loads(report.read_text())["not_compared"],
    )


def test_unread_keys_are_open_differences(model, capsys):
    """Unread keys of one of two files are listed as open for
    all 3 layers, and `compare` exits with 2.
    """
    status, line, left_out = compared(capsys, model("a"), model("b", **FOO), *FLAGS)
    assert status == 2
    assert "the same attention" not in line
    assert {omission["what"] for omission in left_out} == {
        f"{name}={value}" for name, value in UNREAD.items()
    }
    assert all(omission["is_open"] and len(omission["labels"]) == 3 for omission in left_out)
    assert all(omission["what"] in line for omission in left_out)


def test_equal_unread_keys_are_named(model, capsys):
    """Unread keys that are equal in both files are named, but not
    open, and `compare` exits with 0.
    """
    status, line, left_out = compared(capsys, model("a", **FOO), model("b", **FOO), *FLAGS)
    assert status == 0
    assert "sliding_window=4" in line
    assert not any(omission["is_open"] for omission in left_out)


def test_converted_file_keeps_unread_keys(model, tmp_path, capsys):
    """Conversion names unread keys and records them in the file, whose spec does not deny them;
    later `load` warns, and `compare` still tells the files apart from ones without such keys.
    """
    source, target = model("a", **FOO), tmp_path / "b.safetensors"
    report = tmp_path / "c.json"
    assert (
        main(
            [
                "convert",
                source,
                str(target),
                *FLAGS,
                "--to",
                "transformers.LLaMA",
                "--json",
                str(report),
            ]
        )
        == 0
    )
    named = {f"{name}={value}" for name, value in UNREAD.items()}
    assert "sliding_window=4" in capsys.readouterr().err
    assert set(json.loads(report.read_text())["ignored_settings"]) == named
    with safe_open(target, "np") as file:
        metadata = file.metadata()
    assert json.loads(metadata["unread"]) == UNREAD
    assert not {"window_size", "soft_cap", "scale", "alibi"} & json.loads(metadata["spec"]).keys()
    with pytest.warns(parity.IgnoredSettingsWarning, match="sliding_window=4"):
        parity.load(target, prefix=PREFIX.format(i=0))
    assert compared(capsys, source, target, *FLAGS)[0] == 0
    assert compared(capsys, model("known"), target, *FLAGS)[0] == 2


def test_weights_with_unread_keys_raise(tmp_path):
    """Canonical weights with unread keys in their metadata raise an error."""
    path, spec = tmp_path / "w.safetensors", parity.AttentionSpec(16, 4)
    save_weights(path, parity.random_weights(spec), spec)
    tensors, metadata = load_tensors(path)
    save_tensors(path, tensors, metadata | {"unread": json.dumps(UNREAD)})
    with rejects("…/w.safetensors", unread=json.dumps(UNREAD)):
        load_weights(path)


def test_unread_keys_must_be_dropped(model, tmp_path, capsys):
    """A target without room for unread keys needs `--drop` with their names; `compare` lists
    dropped ones as not compared, also after a second conversion; an unknown name raises an error.
    """
    source, target = model("a", **FOO), tmp_path / "b.npz"
    convert = ["convert", source, str(target), *FLAGS, "--to", "flax.nnx"]
    assert main([*convert, "--drop", "rope"]) == 2
    assert f"--drop {','.join(('rope', *UNREAD))}" in capsys.readouterr().err
    assert not target.exists()
    assert main([*convert, "--drop", ",".join(("rope", *UNREAD))]) == 0
    status, _, left_out = compared(capsys, source, target, *FLAGS)
    assert status == 2
    assert {omission["what"] for omission in left_out} == {"rope", *UNREAD}
    again = tmp_path / "c.npz"
    assert main(["convert", str(target), str(again), "--to", "W_q"]) == 0
    assert compared(capsys, source, again, *FLAGS)[0] == 2
    with pytest.raises(InputError) as caught:
        convert_file(again, tmp_path / "d.npz", target="W_q", drop=["sliding_windows"])
    assert caught.value.argument == "drop"


def test_python_and_inspect_name_unread_keys(model, tmp_path, capsys):
    """`load` warns about unread keys, unless it is given the spec, and `inspect` lists them."""
    source = model("a", **FOO)
    with pytest.warns(parity.IgnoredSettingsWarning, match="attn_logit_softcapping=30"):
        _, spec = parity.load(source, "transformers.LLaMA", prefix=PREFIX.format(i=0))
    with warnings.catch_warnings(action="error"):
        parity.load(source, "transformers.LLaMA", prefix=PREFIX.format(i=0), spec=spec)
    assert main(["inspect", source, "--json", str(tmp_path / "i.json")]) == 0
    (layer,) = json.loads((tmp_path / "i.json").read_text())["layers"]
    assert set(layer["unread"]) == {f"{name}={value}" for name, value in UNREAD.items()}
    assert "sliding_window=4" in capsys.readouterr().err


def test_unread_key_leaves_others_in_effect(model, tmp_path, capsys):
    """One unread key leaves the window in effect; it is named, and
    a model that lacks it differs.
    """
    source = model(
        "m", model_type="mistral", sliding_window=4
    )  # whose modules have no `attention_bias`
    target = str(tmp_path / "m.npz")
    assert main(["convert", source, target, "--to", "canonical"]) == 2
    assert main(["convert", source, target, "--to", "canonical", *FLAGS, "--num-heads", "4"]) == 0
    assert "attention_bias=False" in capsys.readouterr().err
    with pytest.warns(parity.IgnoredSettingsWarning, match="attention_bias=False"):
        assert parity.load(target, prefix=PREFIX.format(i=0))[1].window_size == 4
    assert compared(capsys, source, target, *FLAGS, "--num-heads", "4")[0] == 0
    assert main(["compare", model("a"), source, *FLAGS, "--num-heads", "4"]) == 2


def test_wrong_head_count_leaves_keys_unread(model):
    """A number of heads that differs from the configuration
    leads to a warning about its unread window.
    """
    source = model("g", model_type="mistral", sliding_window=4, attention_bias=None)
    with pytest.warns(parity.IgnoredSettingsWarning, match="sliding_window=4"):
        parity.load(source, "transformers.LLaMA", prefix=PREFIX.format(i=0), num_heads=2)


# ---- Other parts that are not compared -----------------------------------------------------------


def test_dropped_field_is_not_compared(model, tmp_path, capsys):
    """A dropped RoPE is open, and `compare` and `diagnose`
    exit with 2, until `--rope-theta` sets it.
    """
    source, target = model("a"), tmp_path / "b.npz"
    assert main(["convert", source, str(target), "--to", "flax.nnx", "--drop", "rope"]) == 0
    status, line, left_out = compared(capsys, source, target)
    assert status == 2
    assert "rope" in line
    assert "the same attention" not in line
    assert [(omission["what"], omission["is_open"]) for omission in left_out] == [("rope", True)]
    assert compared(capsys, source, target, "--rope-theta", "10000")[::2] == (0, [])
    assert main(["diagnose", source, str(target)]) == 2


@pytest.mark.parametrize("flags", [[], FLAGS])
def test_missing_layers_are_not_compared(flags, model, capsys):
    """A layer that one or both files lack is listed, and `compare` exits
    with 2; a prefix of another layer succeeds.
    """
    whole, cut, other = model("a"), model("b", 1), model("c", 1)
    more = model("d", num_hidden_layers=4)
    for files, layer in (((cut, other), 1), ((whole, more), 3)):
        status, line, left_out = compared(capsys, *files, *flags)
        assert status == 2
        assert f"layers.{layer}.self_attn" in line
        assert {omission["what"] for omission in left_out} == {f"layers.{layer}.self_attn"}
    assert main(["compare", cut, other, "--prefix", PREFIX.format(i=0)]) == 0


def test_layer_only_in_metadata_is_missing(model, tmp_path, capsys):
    """A layer in a file's metadata without tensors is not compared, even with the same file."""
    source, target = model("mixed", **GEMMA), tmp_path / "b.safetensors"
    assert main(["convert", source, str(target), "--to", "canonical"]) == 0
    with safe_open(target, "np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys() if ".1." not in name}  # noqa: SIM118
    save_file(tensors, target, metadata)
    status, _, left_out = compared(capsys, target, target)
    assert (status, {omission["what"] for omission in left_out}) == (2, {PREFIX.format(i=1)})


def test_overriding_flag_is_named(model, capsys):
    """A flag that overrides the base of both files is named as not compared, but not open."""
    folder = model("a", rope_theta=500000.0)
    status, line, left_out = compared(capsys, folder, folder, "--rope-theta", "10000")
    assert status == 0
    assert "rope_theta=500000" in line
    assert [(omission["what"], omission["is_open"]) for omission in left_out] == [
        ("rope_theta=500000", False)
    ]
    assert compared(capsys, folder, folder, "--rope-theta", "500000")[2] == []
    _, spec = parity.load(folder, prefix=PREFIX.format(i=0), rope=Rope(10000.0))
    assert spec.rope == Rope(10000.0)


# ---- Metadata of the source ----------------------------------------------------------------------

THEIRS = {"author": "me", "license": "x", "training_step": "1000"}


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "pt", "msgpack"])
def test_metadata_survive_round_trip(suffix, model, tmp_path):
    """Metadata of a file survive conversion to another format and back."""
    source, there, back = Path(model("a")), tmp_path / f"b.{suffix}", tmp_path / "c.safetensors"
    with open_tensors(source / "model.safetensors") as file:
        save_file(
            {name: file.read(name) for name in file.infos},
            source / "model.safetensors",
            {"format": "pt"} | THEIRS,
        )
    converted = convert_file(source, there, target="canonical")
    assert converted.metadata_left_out == []
    assert THEIRS.items() <= read_metadata(there).items()
    assert convert_file(there, back, target="transformers.LLaMA").metadata_left_out == []
    assert THEIRS.items() <= read_metadata(back).items()


def test_our_metadata_take_precedence(model, tmp_path, capsys):
    """Our metadata replace entries of the same name; replaced and too long entries are reported."""
    source = Path(model("a"))
    theirs = {
        "format": "np",
        "layout": "mine",
        "ranks.norms": "1",
        "author": "me",
        "log": "x" * 100_000,
    }
    with open_tensors(source / "model.safetensors") as file:
        save_file(
            {name: file.read(name) for name in file.infos}, source / "model.safetensors", theirs
        )
    report = tmp_path / "r.json"
    convert = [
        "convert",
        str(source),
        str(tmp_path / "b.npz"),
        "--to",
        "canonical",
        "--json",
        str(report),
    ]
    assert main(convert) == 0
    lost = json.loads(report.read_text())["metadata_left_out"]
    assert lost == ["format", "layout", "log", "ranks.norms"]
    assert ", ".join(lost) in capsys.readouterr().err
    metadata = read_metadata(tmp_path / "b.npz")
    assert (metadata["layout"], metadata["author"]) == ("canonical", "me")
    assert not {"log", "ranks.norms"} & metadata.keys()


def test_archive_and_shard_metadata(model, tmp_path):
    """The comment of an archive and equal metadata of shards are
    kept; different ones are reported.
    """
    with open_tensors(Path(model("a")) / "model.safetensors") as file:
        tensors = {name: file.read(name) for name in file.infos}
    np.savez(tmp_path / "a.npz", **tensors)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.comment = b"by me"
    heads = {"source": "transformers.LLaMA", "prefix": PREFIX, "num_heads": 4}
    convert_file(tmp_path / "a.npz", tmp_path / "b.npz", target="canonical", **heads)
    assert read_metadata(tmp_path / "b.npz")["comment"] == "by me"
    shards = tmp_path / "shards"
    shards.mkdir()
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        part = shards / f"model-{number:05}-of-{len(tensors):05}.safetensors"
        save_file({name: tensor}, part, {"author": "me", "shard": str(number)})
    converted = convert_file(shards, tmp_path / "c.npz", target="canonical", **heads)
    assert read_metadata(tmp_path / "c.npz")["author"] == "me"
    assert any(name.startswith("shard ") for name in converted.left_out)
