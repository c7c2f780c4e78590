"""What a config.json, a file's own metadata and the caller say of layers, where it could be of others."""

import pytest
import torch
import transformers
from released_models import SMALL
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from parity.cli.main import main
from parity.conversion.layers import open_layers
from parity.conversion.prefixes import names_under

TEXT = {**SMALL, "max_position_embeddings": 16, "projection_dim": 8}
VISION = TEXT | {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}


def specs_in(folder, *args, **told):
    with open_layers(folder, *args, **told) as layers:
        return {layer.label: layer.spec for layer in layers}


def saved(model, folder):
    model.save_pretrained(folder)
    return model


def llama(folder):
    return saved(transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)), folder)


def gemma2(folder):
    return saved(transformers.Gemma2Model(transformers.Gemma2Config(**GROUPED, sliding_window=4)), folder)


def converted(path, target):
    assert main(["convert", str(path), str(target), "--to", "canonical"]) == 0
    return target


def rewritten(path, change=lambda metadata: {}, names=lambda tensors: tensors):
    """A file with other metadata, or other tensors."""
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    save_file(names(load_file(path)), path, metadata=metadata | change(metadata))


# ---- Several parts, several models -----------------------------------------------------------------------------------


def test_layers_are_paired_whatever_the_order_of_the_parts_in_a_file(tmp_path, capsys):
    options = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 8))}
    options |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "vocab_size": 40}
    model = saved(transformers.BartModel(transformers.BartConfig(**options)), tmp_path / "a")
    (tmp_path / "b").mkdir()
    torch.save(model.state_dict(), tmp_path / "b" / "pytorch_model.bin")  # the encoder first
    (tmp_path / "b" / "config.json").write_bytes((tmp_path / "a" / "config.json").read_bytes())
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "in all 6 layers: 6 the same, bit for bit" in " ".join(capsys.readouterr().out.split())


def test_names_are_found_under_each_of_their_prefixes():
    found = names_under(["a.b.c", "a.b", "c", "a.bb.c", "a.b.d"], ["", "a", "a.b", "b"])
    assert found == {
        "": ["a.b.c", "a.b", "c", "a.bb.c", "a.b.d"],
        "a": ["a.b.c", "a.b", "a.bb.c", "a.b.d"],
        "a.b": ["a.b.c", "a.b.d"],
        "b": [],
    }


# ---- What the caller says besides ------------------------------------------------------------------------------------


# ---- Metadata and configurations that nobody wrote -------------------------------------------------------------------


@pytest.fixture
def canonical(tmp_path):
    llama(tmp_path / "model")
    return converted(tmp_path / "model", tmp_path / "c.safetensors")
