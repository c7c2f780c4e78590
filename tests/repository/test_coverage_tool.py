"""Tests of the sweep over model types: known verdicts, and wrong layers as a control."""

import json
import runpy
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

import parity

TOOL = ROOT / "tools" / "coverage"


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(TOOL))


@pytest.mark.costly("the tool starts processes")
@pytest.mark.nightly
def test_sweep_records_layers_and_resumes(tool, tmp_path, capsys):
    """The sweep writes a verdict for each layer of three model types; a second run prints the
    same and adds no row.
    """
    file = tmp_path / "coverage.jsonl"
    command = [sys.executable, TOOL, "--jobs", "1", "--types", "llama,t5,resnet", "--json", file]
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = {row["type"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert {name: len(row["layers"]) for name, row in rows.items()} == {
        "llama": 2,
        "t5": 6,
        "resnet": 0,
    }
    for layer in rows["llama"]["layers"]:
        assert layer["rules"]["verdict"] == layer["identified"]["verdict"] == "right"
    names = {layer["name"]: layer for layer in rows["t5"]["layers"]}
    assert names["encoder.block.0.layer.0.SelfAttention"]["rules"]["verdict"] == "right"
    assert names["encoder.block.1.layer.0.SelfAttention"]["rules"]["verdict"] == "rejected"
    assert "3 model types, 2 with attention, 1 without" in first
    tool["main"](["--types", "llama,t5,resnet", "--json", str(file)])
    assert capsys.readouterr().out == first
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.costly("makes a model of transformers")
def test_different_layer_is_wrong(tool):
    """A Llama layer is right with its own spec, but wrong with a changed scale or theta, or
    swapped keys and values.
    """
    model, call, _ = tool["tiny_model"]("llama")
    observed, name = tool["Observed"](model, call), "layers.1.self_attn"
    spec, weights = parity.from_transformers(model.get_submodule(name), model.config)
    assert tool["verdict"](observed, name, spec, weights, (True,))["verdict"] == "right"
    assert spec.rope is not None
    for other in (spec.replace(scale=0.3), spec.replace(rope=spec.rope.replace(theta=20000.0))):
        assert tool["verdict"](observed, name, other, weights, (True,))["verdict"] == "wrong"
    assert (
        tool["verdict"](observed, name, spec, weights, (False,))["verdict"] == "right"
    )  # with the mask that it received
    swapped = {
        **weights,
        "k_proj.weight": weights["v_proj.weight"],
        "v_proj.weight": weights["k_proj.weight"],
    }
    assert tool["verdict"](observed, name, spec, swapped, (True,))["verdict"] == "wrong"


def test_tiny_model_has_visible_biases(tool):
    """The tiny qwen2 model has biases with a standard deviation above 0.1, and two different
    inputs.
    """
    model, call, _ = tool["tiny_model"]("qwen2")
    assert call.inputs["input_ids"].shape == (3, 24)
    assert not torch.equal(call.inputs["input_ids"], call.fresh["input_ids"])
    assert model.layers[0].self_attn.q_proj.bias.std() > 0.1


def test_tiny_image_model_gets_images(tool):
    """The whole tiny vit model runs on images of three channels, and has two different inputs."""
    _, call, _ = tool["tiny_model"]("vit")
    assert call.inputs["pixel_values"].shape[:2] == (3, 3)
    assert not torch.equal(call.inputs["pixel_values"], call.fresh["pixel_values"])
    assert "embeddings.patch_embeddings" in call.ran
