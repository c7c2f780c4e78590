"""Layers of live models by name, by rules and by observation; and folders of models without rules."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from helpers.refusals import refuses
from helpers.samples import sample
from helpers.small_models import WITHOUT_RULES, inputs_of, small_model

import parity
from parity.cli.main import main
from parity.core.weights import unheld
from parity.identification.folders import random_inputs
from parity.models.families import FAMILIES

# ---- By name ---------------------------------------------------------------------------------------------------------

PATHS = {
    "vit": "layers.1.attention",
    "deit": "layers.1.attention",
    "dinov2": "encoder.layer.1.attention",
    "nomic_bert": "layers.1.self_attn",
    "distilbert": "transformer.layer.1.attention",
}
"""Where a live layer lies, in families whose files have other names."""


@pytest.mark.parametrize("family", PATHS)
def test_a_live_layer_is_known_by_its_names_in_files_and_in_memory(family):
    model, path = small_model(family), PATHS[family]
    module = model.get_submodule(path)
    spec, weights = parity.from_transformers(model, path=path)
    assert spec == parity.specs_of(model.config)[1].spec
    for given in ({}, {"path": path}):
        found, others = parity.from_transformers(module, model.config, 1, **given)
        assert found == spec
        assert all((others[name] == weight).all() for name, weight in weights.items())


def test_rows_of_a_packed_projection_in_files_are_those_of_the_live_ones():
    model = small_model("nomic_bert")
    attention = model.layers[1].self_attn
    _, weights = parity.from_transformers(model, path="layers.1.self_attn")
    for name in ("q_proj", "k_proj", "v_proj"):
        assert (weights[f"{name}.weight"] == attention.get_submodule(name).weight.detach().numpy()).all()
    assert (weights["out_proj.weight"] == attention.o_proj.weight.detach().numpy()).all()


@pytest.mark.parametrize("path", ["layers.0.cross_attention", "cross_layers.0.attention", "layers.1.attention"])
def test_a_path_that_no_layer_has_is_refused_by_name(path):
    model = small_model("vit")
    with refuses("module", f"no layer 0 at {path}"):
        parity.from_transformers(model.layers[0].attention, model.config, 0, path=path)


def test_a_module_of_another_model_is_refused():
    model, other = small_model("vit"), small_model("llama")
    with refuses("module", "'vit', which no part of 'llama' is"):
        parity.from_transformers(model.layers[0].attention, other.config, 0)


def test_parts_of_a_live_model_are_told_apart_by_their_paths():
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    text = {**sizes, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 16}
    vision = {**sizes, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    for part, heads in (("text_model", 4), ("vision_model", 2)):
        path = next(name for name, _ in model.named_modules() if name.startswith(part) and name.endswith("self_attn"))
        assert parity.from_transformers(model, path=path)[0].num_heads == heads


def test_a_table_that_another_block_holds_comes_with_the_model():
    model = small_model("t5", num_layers=2, num_decoder_layers=2)
    for part in ("encoder", "decoder"):
        path = f"{part}.block.{{}}.layer.0.SelfAttention"
        (one, first), (other, second) = (parity.from_transformers(model, path=path.format(i)) for i in range(2))
        assert one == other
        assert (first["relative_bias"] == second["relative_bias"]).all()
        assert (first["q_proj.weight"] != second["q_proj.weight"]).any()


# ---- By rules and by observation -------------------------------------------------------------------------------------


@sample(family=["vit", "bert"])
@pytest.mark.parametrize("family", WITHOUT_RULES)
def test_rules_and_observation_agree_on_live_models(family):
    model = small_model(family)
    found = parity.layers_of(model, inputs_of(family))
    assert [layer.source for layer in found] == ["both", "both"], "\n".join(map(str, found))
    for layer, ruled in zip(found, parity.specs_of(model.config), strict=True):
        assert layer.spec == ruled.spec
        assert layer.comparisons
        assert layer.share is not None
        assert 0.0 < layer.share <= 1.0


def test_a_layer_that_only_rules_tell_is_judged_by_what_it_returns():
    model = small_model("llama")
    model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, output: 1.001 * output)
    tokens = inputs_of("llama")["input_ids"][:1, :10]  # too few to observe
    right, wrong = parity.layers_of(model, {"input_ids": tokens})
    assert right.source == "rules"
    assert "by rules" in str(right)
    assert wrong.spec is None
    assert "output is" in wrong.refusal


def test_a_layer_that_only_observation_tells_is_served(monkeypatch):
    model = small_model("llama")
    ruled, _ = parity.from_transformers(model, path="layers.0.self_attn")
    monkeypatch.delitem(FAMILIES, "llama")
    layers = parity.layers_of(model, inputs_of("llama"))
    assert len(layers) == 2
    for layer in layers:
        assert layer.source == "observation"
        assert "'llama'" in layer.not_ruled
        assert layer.spec is not None
        assert unheld(layer.spec) == unheld(ruled)
        assert "no rules: " in str(layer)


def test_rules_that_observation_contradicts_are_refused_with_both():
    model = small_model("llama")
    model.layers[1].self_attn.scaling = 0.3
    right, wrong = parity.layers_of(model, inputs_of("llama"))
    assert right.source == "both"
    assert wrong.spec is None
    assert wrong.refusal == "rules say scale=None, and observation 0.3"
    assert wrong.identification.spec is not None


def test_a_layer_that_nothing_tells_is_refused_with_both_reasons(monkeypatch):
    model = small_model("llama")
    model.layers[0].self_attn.v_proj.register_forward_hook(lambda module, args, v: v + 0.01 * v**2)
    monkeypatch.delitem(FAMILIES, "llama")
    first, second = parity.layers_of(model, inputs_of("llama"))
    assert first.spec is None
    assert first.identification.refusal in first.refusal
    assert first.not_ruled in first.refusal
    assert second.source == "observation"


def test_a_layer_that_did_not_run_is_refused(monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 64, "max_position_embeddings": 32}
    config = transformers.CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4})
    model = transformers.CLIPModel(config).eval()
    inputs = next(random_inputs(config))
    assert all(layer.spec is not None for layer in parity.layers_of(model, inputs))
    monkeypatch.setattr(model, "forward", model.text_model.forward)
    found = {layer.name.split(".")[0]: layer for layer in parity.layers_of(model, {"input_ids": inputs["input_ids"]})}
    assert found["text_model"].spec is not None
    assert "did not run" in str(found["vision_model"])


# ---- Folders of models without rules ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model in bfloat16."""
    path = tmp_path_factory.mktemp("live") / "model"
    small_model("llama").bfloat16().save_pretrained(path)
    return path


@pytest.fixture
def unruled(folder, monkeypatch):
    """The same, of a family without rules."""
    monkeypatch.delitem(FAMILIES, "llama")
    return folder


def test_a_folder_without_rules_runs_against_its_own_modules(unruled):
    report = parity.run_model(unruled, ["torch"], layers=[1], against="transformers")
    assert not report.failed
    assert {each.backend for each in report.comparisons} == {"torch", "transformers"}
    assert {each.case for each in report.comparisons} == {"layer-1-causal", "layer-1-decode"}
    assert any("observed" in each and "rope=Rope(theta=10000.0): angles" in each for each in report.warnings)


def test_a_folder_without_rules_is_converted_as_rules_would(unruled, tmp_path, monkeypatch, capsys):
    observed, ruled = tmp_path / "observed.safetensors", tmp_path / "ruled.safetensors"
    assert main(["convert", str(unruled), str(observed), "--to", "mha_torch"]) == 2
    assert refuses("--rest", {"--rest": "keep"}).is_printed_in(capsys.readouterr().err)
    assert main(["convert", str(unruled), str(observed), "--to", "mha_torch", "--rest", "drop"]) == 0
    said = capsys.readouterr().err
    assert "observed with random inputs" in said
    assert "left out" in said
    monkeypatch.undo()
    assert main(["convert", str(unruled), str(ruled), "--to", "mha_torch"]) == 0
    assert main(["verify", str(observed), str(ruled)]) == 0
    weights, _ = parity.load(observed, prefix="layers.0.self_attn")
    assert weights["q_proj.weight"].dtype.name == "bfloat16"


def test_a_recording_is_judged_by_a_folder_without_rules(unruled, tmp_path):
    model = transformers.AutoModel.from_pretrained(unruled, dtype=torch.float32, attn_implementation="eager")
    model.layers[1].self_attn.scaling = 0.3
    with torch.no_grad(), parity.tap(model) as tapped:
        model(**inputs_of("llama"))
    tapped.save(tmp_path / "tap.safetensors")
    report = tmp_path / "report.json"
    told = ["diagnose", str(tmp_path / "tap.safetensors"), "--model", str(unruled), "--json", str(report)]
    assert main(told) == 1
    (recording,) = json.loads(report.read_text())["recordings"]
    assert [layer["passed"] for layer in recording["layers"]] == [True, False]


def test_a_folder_that_lacks_weights_is_refused(unruled, tmp_path):
    model = transformers.AutoModel.from_pretrained(unruled)
    held = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.self_attn.k_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=held)
    with refuses(str(tmp_path), "layers.1.self_attn.k_proj.weight"):
        parity.run_model(tmp_path, ["torch"], against="transformers")


def test_a_folder_whose_inputs_are_unknown_is_refused(unruled, monkeypatch):
    def fail(self, **inputs):
        raise RuntimeError("it wants sound")

    monkeypatch.setattr(transformers.LlamaModel, "forward", fail)
    with refuses("a folder to observe", "it wants sound", hint="parity.layers_of"):
        parity.run_model(unruled, ["torch"], against="transformers")


def test_code_in_a_folder_does_not_run(folder, tmp_path):
    values = json.loads((folder / "config.json").read_text())
    values |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with refuses(str(tmp_path), "custom code"):
        parity.run_model(tmp_path, ["torch"], against="transformers")
