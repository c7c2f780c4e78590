"""Image encoders convert; biases on a grid are specified, rejected or dropped by name.

Nothing is downloaded: models are tiny and have random weights.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from helpers.checkpoints import open_layers
from helpers.input_errors import rejects
from helpers.released_models import draw
from safetensors.numpy import load_file

import mha_torch
from mha_spec import GridBias
from parity import convert, convert_file, load_into
from parity.use.cli.main import main

OF_SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 1],
    "num_heads": [2, 4],
    "window_size": 4,
}
SWIN = {"swin": transformers.SwinModel, "donut-swin": transformers.DonutSwinModel}
BLOCKS = "encoder.layers.{i}.blocks.{i}.attention"
TOLD = {"source": "transformers.BERT", "prefix": BLOCKS, "head_dim": 8}


def saved(kind, folder):
    model = kind(kind.config_class(**OF_SWIN)).eval()
    draw(model)
    model.save_pretrained(folder)
    return model


# Swin's window_size is not read; the tests of unread keys check that it is reported.
unread_window = pytest.mark.filterwarnings("ignore:.*sets window_size")


@unread_window
@pytest.mark.parametrize("family", SWIN)
def test_swin_round_trip_is_exact(family, tmp_path):
    """Without its position bias, Swin converts and returns bit for bit; the drop is recorded."""
    saved(SWIN[family], tmp_path / "model")
    there = convert_file(
        tmp_path / "model",
        tmp_path / "c.safetensors",
        target="canonical",
        drop=["relative_position_bias"],
        **TOLD,
    )
    assert there.layers == [
        f"encoder.layers.{i}.blocks.{j}.attention" for i, j in ((0, 0), (0, 1), (1, 0))
    ]
    with open_layers(tmp_path / "c.safetensors") as layers:
        assert [layer.spec.num_heads for layer in layers] == [2, 2, 4]
        assert {layer.dropped for layer in layers} == {("relative_position_bias",)}
    there_and_back = {"target": "transformers.BERT", "drop": ["window_size"]}
    convert_file(tmp_path / "c.safetensors", tmp_path / "b.safetensors", **there_and_back)
    before, after = (
        load_file(tmp_path / path) for path in ("model/model.safetensors", "b.safetensors")
    )
    assert {name: x.tobytes() for name, x in after.items()} == {
        name: x.tobytes() for name, x in before.items()
    }
    with open_layers(tmp_path / "b.safetensors") as layers:
        assert {layer.dropped for layer in layers} == {("relative_position_bias", "window_size")}


@unread_window
def test_swin_layer_matches_with_its_bias(tmp_path):
    """A Swin layer matches ours with its bias as an argument or in the spec, but not without it."""
    model = saved(transformers.SwinModel, tmp_path / "model")
    drop = ["relative_position_bias"]
    convert_file(
        tmp_path / "model", tmp_path / "c.safetensors", target="canonical", drop=drop, **TOLD
    )
    x = torch.randn(3, 16, 32)  # windows of 4 x 4
    with open_layers(tmp_path / "c.safetensors") as layers:
        weights, spec = layers[-1].load()
    module = model.get_submodule("encoder.layers.1.blocks.0.attention")
    ours = load_into(mha_torch.MultiHeadAttention(spec), weights, spec)
    with torch.no_grad():
        expected = module(x)[0].numpy()
        actual, _ = ours(x, bias=module.relative_position_bias())
        without, _ = ours(x)
    assert np.abs(actual.numpy() - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(without.numpy() - expected).max() > 1e-2 * np.abs(expected).max()
    spec_with_grid = replace(spec, relative_bias=GridBias(4, 4))
    weights = convert(
        module.state_dict(), source="transformers.ViT-5", target="canonical", spec=spec_with_grid
    )
    with torch.no_grad():
        actual, _ = load_into(
            mha_torch.MultiHeadAttention(spec_with_grid), weights, spec_with_grid
        )(x)
    assert np.abs(actual.numpy() - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("family", SWIN)
def test_swin_bias_is_not_lost_silently(family, tmp_path, capsys):
    """`convert` exits with 2 for Swin's position bias, unless `--drop` names it."""
    saved(SWIN[family], tmp_path / "model")
    command = ["convert", str(tmp_path / "model"), str(tmp_path / "c.npz"), "--to", "canonical"]
    command += ["--from", "transformers.BERT", "--prefix", BLOCKS, "--head-dim", "8"]
    assert main(command) == 2
    name, remedy = "'self.relative_position_bias_table'", {"--drop": "relative_position_bias"}
    input_error = rejects(f"the purpose of [{name}] in transformers.BERT", remedy=remedy)
    assert input_error.is_printed_in(capsys.readouterr().err)
    assert not (tmp_path / "c.npz").exists()
    assert main([*command, "--drop", "relative_position_bias"]) == 0
    assert main(["inspect", str(tmp_path / "model")]) == 0
    assert f" {BLOCKS} " in capsys.readouterr().out


def test_unused_drop_is_not_recorded(tmp_path):
    """Dropping a position bias that BERT does not have records nothing as dropped."""
    config = transformers.BertConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    drop = ["relative_position_bias"]
    convert_file(tmp_path / "model", tmp_path / "c.safetensors", target="canonical", drop=drop)
    with open_layers(tmp_path / "c.safetensors") as layers:
        assert {layer.dropped for layer in layers} == {()}


def test_swin_v2_attention_raises(tmp_path):
    """Converting Swin v2, whose attention uses cosines, raises an error about its tensors."""
    saved(transformers.Swinv2Model, tmp_path / "model")
    with rejects("tensors"):
        convert_file(
            tmp_path / "model",
            tmp_path / "c.npz",
            target="canonical",
            drop=["relative_position_bias"],
            **TOLD,
        )


def of_beit(folder):
    options = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
    }
    config = transformers.BeitConfig(
        **options, image_size=8, patch_size=2, use_relative_position_bias=True
    )
    transformers.BeitModel(config).save_pretrained(folder)
    return under("encoder.layer.0.attention.", load_file(folder / "model.safetensors"))


def of_module(folder):
    model = saved(transformers.SwinModel, folder)
    return under("encoder.layers.0.blocks.0.attention.", model.state_dict())


def under(prefix, tensors):
    return {
        name.removeprefix(prefix): np.asarray(x)
        for name, x in tensors.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("layout", "made"), [("transformers.ViT", of_beit), ("transformers.ViT-5", of_module)]
)
def test_position_bias_raises_in_memory(layout, made, tmp_path):
    """`convert` of arrays raises and names a position bias table; without it, ViT-5 converts."""
    layer = made(tmp_path / "model")
    with rejects("the purpose of […relative_position_bias_table'] in transformers.ViT…"):
        convert(layer, source=layout, target="canonical", num_heads=2)
    layer = {name: x for name, x in layer.items() if "relative_position" not in name}
    if layout == "transformers.ViT-5":
        assert convert(layer, source=layout, target="canonical", num_heads=2).keys() >= {
            "q_proj.bias",
            "k_proj.bias",
        }
