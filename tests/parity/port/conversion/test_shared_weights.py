"""Weights shared by layers become copies; converted back, files equal transformers' own."""

import json

import numpy as np
import pytest
import transformers
from helpers.checkpoints import open_layers
from helpers.input_errors import rejects
from helpers.saved_models import saved
from helpers.tensors import same_tensors
from safetensors.numpy import load_file, save_file

from parity import convert_file
from parity.measure.core.weights import load_tensors
from parity.use.cli.main import main

SHARING = ("t5", "mt5", "switch_transformers", "mpnet", "beit, one grid")
OWN = ("umt5", "beit, a grid for each")
LAYOUTS = {"mpnet": "transformers.MPNet", "beit": "transformers.ViT"}
TABLE = "relative_attention_bias.weight"


def layout_of(name):
    return LAYOUTS.get(name.partition(",")[0], "transformers.T5")


@pytest.mark.parametrize("name", [*SHARING, *OWN])
@pytest.mark.parametrize("between", ["canonical", "mha_jax"])
def test_round_trip_restores_shared_tensors(name, between, tmp_path):
    """Two round trips restore the file bit for bit; in between, layers have copies of biases."""
    saved(name, tmp_path / "model")
    original = load_file(tmp_path / "model" / "model.safetensors")
    paths = [tmp_path / f"{number}.safetensors" for number in range(4)]
    convert_file(tmp_path / "model", paths[0], target=between)
    convert_file(paths[0], paths[1], target=layout_of(name))
    convert_file(paths[1], paths[2], target=between)
    convert_file(paths[2], paths[3], target=layout_of(name))
    assert same_tensors(load_file(paths[1]), original)
    assert same_tensors(load_file(paths[2]), load_file(paths[0]))
    assert same_tensors(load_file(paths[3]), original)
    count = sum("relative" in name and "table" not in name for name in original)
    if name in SHARING and count:
        assert sum("relative_bias" in name for name in load_file(paths[0])) > count


def test_same_layout_keeps_all_tensors(tmp_path):
    """Converting T5 to its own layout writes every tensor unchanged, bit for bit."""
    saved("t5", tmp_path / "model")
    convert_file(tmp_path / "model", tmp_path / "same.safetensors", target="transformers.T5")
    original = load_file(tmp_path / "model" / "model.safetensors")
    assert same_tensors(load_file(tmp_path / "same.safetensors"), original)


def test_transformers_loads_the_round_trip(tmp_path):
    """transformers finds no missing or unexpected keys in T5 after a round trip through mha_jax."""
    saved("t5", tmp_path / "model")
    convert_file(tmp_path / "model", tmp_path / "jax.safetensors", target="mha_jax")
    convert_file(
        tmp_path / "jax.safetensors", tmp_path / "model", target="transformers.T5", force=True
    )
    _, info = transformers.AutoModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]


def test_mpnet_table_is_written_once(tmp_path):
    """If other tensors are dropped, MPNet's table is rebuilt from its copies in layers, once."""
    saved("mpnet", tmp_path / "model")
    convert_file(
        tmp_path / "model", tmp_path / "layers.safetensors", target="mha_jax", keep_rest=False
    )
    convert_file(
        tmp_path / "layers.safetensors", tmp_path / "back.safetensors", target="transformers.MPNet"
    )
    back = load_file(tmp_path / "back.safetensors")
    original = load_file(tmp_path / "model" / "model.safetensors")
    assert [name for name in back if "relative" in name] == [f"encoder.{TABLE}"]
    assert same_tensors(back, {name: original[name] for name in back})


def test_shared_tensors_follow_prefixes(tmp_path):
    """T5's table is written once, in the first layer, also after a change of prefix or a stack."""
    saved("t5", tmp_path / "model")
    usual, other = "decoder.block.{i}.layer.0.SelfAttention", "layers.{i}.attn"
    stack, back = tmp_path / "stack.safetensors", tmp_path / "back.safetensors"
    for to, prefix in ((other, "layers.0.attn"), ("attn", None)):
        options = {"prefix": usual, "to_prefix": to, "keep_rest": False}
        convert_file(tmp_path / "model", stack, target="mha_jax", force=True, **options)
        if prefix is not None:
            convert_file(stack, back, target="transformers.T5")
            assert [name for name in load_file(back) if name.endswith(TABLE)] == [
                f"{prefix}.{TABLE}"
            ]
            with open_layers(back) as layers:
                assert len([layer.load() for layer in layers]) == 3
            back.unlink()
        convert_file(stack, back, target="transformers.T5", to_prefix=usual)
        names = [name for name in load_file(back) if name.endswith(TABLE)]
        assert names == [f"decoder.block.0.layer.0.SelfAttention.{TABLE}"]
        back.unlink()


def test_different_copies_raise(tmp_path):
    """If one copy of a shared bias was changed, converting back raises and writes nothing."""
    saved("t5", tmp_path / "model")
    path = tmp_path / "jax.safetensors"
    convert_file(tmp_path / "model", path, target="mha_jax")
    tensors, metadata = load_tensors(path)
    trained = "decoder.block.2.layer.0.SelfAttention"
    tensors[f"{trained}.relative_bias"] = tensors[f"{trained}.relative_bias"] + np.float32(1)
    save_file(tensors, path, metadata)
    with rejects(f"relative_bias of {trained}"):
        convert_file(path, tmp_path / "back.safetensors", target="transformers.T5")
    assert not (tmp_path / "back.safetensors").exists()


@pytest.mark.parametrize("shared", ['{"a": 1}', '{"a": {"relative_bias": 2}}', "[]", "5"])
def test_invalid_sharing_metadata_raises(shared, tmp_path):
    """Metadata that do not map shared tensors to their layers raise an error with the path."""
    saved("t5", tmp_path / "model")
    path = tmp_path / "jax.safetensors"
    convert_file(tmp_path / "model", path, target="mha_jax")
    tensors, metadata = load_tensors(path)
    save_file(tensors, path, {**metadata, "shared": shared})
    with rejects(str(path)):
        convert_file(path, tmp_path / "back.safetensors", target="transformers.T5")


def verified(one, other, tmp_path, capsys):
    """Run `compare`; return its status, its warnings and the tensors that only one file has."""
    status = main(["compare", str(one), str(other), "--json", str(tmp_path / "result.json")])
    lines = capsys.readouterr().err.splitlines()
    warnings = "\n".join(line for line in lines if line.startswith("mha-parity"))
    return status, warnings, json.loads((tmp_path / "result.json").read_text())["only_in_one"]


def test_verify_names_missing_tensors(tmp_path, capsys):
    """`compare` exits with 0 and names a tensor that only one file has, and the one it copies."""
    saved("t5", tmp_path / "model")
    original = load_file(tmp_path / "model" / "model.safetensors")
    convert_file(tmp_path / "model", tmp_path / "jax.safetensors", target="mha_jax")
    convert_file(
        tmp_path / "jax.safetensors", tmp_path / "back.safetensors", target="transformers.T5"
    )
    assert verified(tmp_path / "model", tmp_path / "back.safetensors", tmp_path, capsys) == (
        0,
        "",
        [],
    )
    assert verified(tmp_path / "model", tmp_path / "jax.safetensors", tmp_path, capsys) == (
        0,
        "",
        [],
    )

    # A checkpoint in which a block has a copy of the table of its stack: transformers does not
    # expect it.
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "config.json").write_bytes(
        (tmp_path / "model" / "config.json").read_bytes()
    )
    blocks = [f"encoder.block.{i}.layer.0.SelfAttention.{TABLE}" for i in (0, 1)]
    save_file(original | {blocks[1]: original[blocks[0]]}, tmp_path / "more" / "model.safetensors")
    for order in (1, -1):
        status, text, (row,) = verified(
            *[tmp_path / "model", tmp_path / "more"][::order], tmp_path=tmp_path, capsys=capsys
        )
        assert status == 0
        assert blocks[1] in text
        expected = {"file": str(tmp_path / "more"), "other": str(tmp_path / "model")}
        assert row == {**expected, "names": [blocks[1]], "copy_of": blocks[0]}

    less = {name: x for name, x in original.items() if name != "shared.weight"}
    save_file(less, tmp_path / "more" / "model.safetensors")
    status, text, (row,) = verified(tmp_path / "model", tmp_path / "more", tmp_path, capsys)
    assert status == 0
    assert "shared.weight" in text
    assert (row["file"], row["names"]) == (str(tmp_path / "model"), ["shared.weight"])


def test_ambiguous_layer_suggests_prefixes(tmp_path, capsys):
    """T5 has three layers numbered 0: the error suggests a prefix, which is then accepted."""
    saved("t5", tmp_path / "model")
    command = ["write", str(tmp_path / "model"), "--to", "torch"]
    assert main([*command, "--layer", "0"]) == 2
    prefix = "decoder.block.0.layer.1.EncDecAttention"
    assert rejects("--layer", remedy={"--prefix": prefix}).is_printed_in(capsys.readouterr().err)
    assert main([*command, "--prefix", prefix]) == 0
