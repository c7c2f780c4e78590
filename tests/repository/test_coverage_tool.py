"""The sweep over model types: outcomes of layers that are known, and the control that its judge can object."""

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
@pytest.mark.thorough
def test_the_sweep_tells_what_became_of_each_layer_and_goes_on_where_it_was(tool, tmp_path, capsys):
    file = tmp_path / "coverage.jsonl"
    command = [sys.executable, TOOL, "--jobs", "1", "--types", "llama,t5,resnet", "--json", file]
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = {row["type"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert {name: len(row["layers"]) for name, row in rows.items()} == {"llama": 2, "t5": 6, "resnet": 0}
    for layer in rows["llama"]["layers"]:
        assert layer["rules"]["verdict"] == layer["identified"]["verdict"] == "right"
    names = {layer["name"]: layer for layer in rows["t5"]["layers"]}
    assert names["encoder.block.0.layer.0.SelfAttention"]["rules"]["verdict"] == "right"
    assert names["encoder.block.1.layer.0.SelfAttention"]["rules"]["verdict"] == "refused"
    assert "3 model types, 2 with attention, 1 without" in first
    tool["main"](["--types", "llama,t5,resnet", "--json", str(file)])
    assert capsys.readouterr().out == first
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.costly("makes a model of transformers")
def test_a_layer_that_computes_otherwise_is_judged_wrong(tool):
    model, call, _ = tool["tiny_model"]("llama")
    seen, name = tool["Seen"](model, call), "layers.1.self_attn"
    spec, weights = parity.from_transformers(model.get_submodule(name), model.config)
    assert tool["verdict"](seen, name, spec, weights, (True,))["verdict"] == "right"
    assert spec.rope is not None
    for other in (spec.replace(scale=0.3), spec.replace(rope=spec.rope.replace(theta=20000.0))):
        assert tool["verdict"](seen, name, other, weights, (True,))["verdict"] == "wrong"
    assert tool["verdict"](seen, name, spec, weights, (False,))["verdict"] == "right"  # by the mask that it received
    swapped = {**weights, "k_proj.weight": weights["v_proj.weight"], "v_proj.weight": weights["k_proj.weight"]}
    assert tool["verdict"](seen, name, spec, swapped, (True,))["verdict"] == "wrong"


def test_tiny_models_are_drawn_so_that_norms_and_biases_show(tool):
    model, call, _ = tool["tiny_model"]("qwen2")
    assert call.inputs["input_ids"].shape == (3, 24)
    assert not torch.equal(call.inputs["input_ids"], call.fresh["input_ids"])
    assert model.layers[0].self_attn.q_proj.bias.std() > 0.1
