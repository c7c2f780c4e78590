"""Layers of live models by name, by rules and by observation; and folders of models without
rules.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from helpers.input_errors import rejects
from helpers.samples import sample
from helpers.small_models import WITHOUT_RULES, inputs_of, small_model

import parity
from parity.explain.identification.folders import random_inputs
from parity.measure.core.weights import unheld
from parity.port.models.families import FAMILIES
from parity.use.cli.main import main
from parity.use.running.models import run_model

# ---- By name -------------------------------------------------------------------------------------

PATHS = {
    "vit": "layers.1.attention",
    "deit": "layers.1.attention",
    "dinov2": "encoder.layer.1.attention",
    "nomic_bert": "layers.1.self_attn",
    "distilbert": "transformer.layer.1.attention",
}
"""Paths of live layers in families whose files have different names."""


@pytest.mark.parametrize("family", PATHS)
def test_live_layer_is_found_by_its_path(family):
    """A live layer has the same spec and weights from the model and its path as from its module."""
    model, path = small_model(family), PATHS[family]
    module = model.get_submodule(path)
    spec, weights = parity.from_transformers(model, path=path)
    assert spec == parity.specs_of(model.config)[1].spec
    for options in ({}, {"path": path}):
        loaded, others = parity.from_transformers(module, model.config, 1, **options)
        assert loaded == spec
        assert all((others[name] == weight).all() for name, weight in weights.items())


def test_live_weights_of_packed_projection():
    """Weights of a model whose files pack projections equal its live modules', bit for bit."""
    model = small_model("nomic_bert")
    attention = model.layers[1].self_attn
    _, weights = parity.from_transformers(model, path="layers.1.self_attn")
    for name in ("q_proj", "k_proj", "v_proj"):
        assert (
            weights[f"{name}.weight"] == attention.get_submodule(name).weight.detach().numpy()
        ).all()
    assert (weights["out_proj.weight"] == attention.o_proj.weight.detach().numpy()).all()


@pytest.mark.parametrize(
    "path", ["layers.0.cross_attention", "cross_layers.0.attention", "layers.1.attention"]
)
def test_unknown_layer_path_raises(path):
    """A path that does not belong to layer 0 raises an error that names it."""
    model = small_model("vit")
    with rejects("module", f"no layer 0 at {path}"):
        parity.from_transformers(model.layers[0].attention, model.config, 0, path=path)


def test_module_of_other_model_raises():
    """A module of ViT with the configuration of LLaMA raises an error."""
    model, other = small_model("vit"), small_model("llama")
    with rejects("module", "'vit', which no part of 'llama' is"):
        parity.from_transformers(model.layers[0].attention, other.config, 0)


def test_live_parts_are_found_by_path():
    """Layers of CLIP's text and vision parts are found by path, with 4 and 2 heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    text = {**sizes, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 16}
    vision = {**sizes, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    for part, heads in (("text_model", 4), ("vision_model", 2)):
        path = next(
            name
            for name, _ in model.named_modules()
            if name.startswith(part) and name.endswith("self_attn")
        )
        assert parity.from_transformers(model, path=path)[0].num_heads == heads


def test_shared_t5_table_comes_with_model():
    """Both blocks of T5 have the bias table of the first, and projections of their own."""
    model = small_model("t5", num_layers=2, num_decoder_layers=2)
    for part in ("encoder", "decoder"):
        path = f"{part}.block.{{}}.layer.0.SelfAttention"
        (one, first), (other, second) = (
            parity.from_transformers(model, path=path.format(i)) for i in range(2)
        )
        assert one == other
        assert (first["relative_bias"] == second["relative_bias"]).all()
        assert (first["q_proj.weight"] != second["q_proj.weight"]).any()


# ---- By rules and by observation -----------------------------------------------------------------


@sample(family=["vit", "bert"])
@pytest.mark.parametrize("family", WITHOUT_RULES)
def test_rules_agree_with_observation(family):
    """Rules and observation agree on both layers, with a spec and a share above 0."""
    model = small_model(family)
    layers = parity.layers_of(model, inputs_of(family))
    assert [layer.source for layer in layers] == ["both", "both"], "\n".join(map(str, layers))
    for layer, ruled in zip(layers, parity.specs_of(model.config), strict=True):
        assert layer.spec == ruled.spec
        assert layer.comparisons
        assert layer.share is not None
        assert 0.0 < layer.share <= 1.0


def test_rules_alone_are_checked_by_output():
    """With too few tokens to observe, rules are checked by the
    output; an output 0.1% too large is rejected.
    """
    model = small_model("llama")
    model.layers[1].self_attn.o_proj.register_forward_hook(
        lambda module, args, output: 1.001 * output
    )
    tokens = inputs_of("llama")["input_ids"][:1, :10]  # too few to observe
    right, wrong = parity.layers_of(model, {"input_ids": tokens})
    assert right.source == "rules"
    assert "by rules" in str(right)
    assert wrong.spec is None
    assert "output is" in wrong.reason


def test_observation_without_rules_is_enough(monkeypatch):
    """Layers of a family without rules have the observed spec, and
    name the family without rules.
    """
    model = small_model("llama")
    ruled, _ = parity.from_transformers(model, path="layers.0.self_attn")
    monkeypatch.delitem(FAMILIES, "llama")
    layers = parity.layers_of(model, inputs_of("llama"))
    assert len(layers) == 2
    for layer in layers:
        assert layer.source == "observation"
        assert "'llama'" in layer.no_rules_reason
        assert layer.spec is not None
        assert unheld(layer.spec) == unheld(ruled)
        assert "no rules: " in str(layer)


def test_contradicted_rules_are_rejected():
    """A layer whose observed scale contradicts the rules is rejected, with both values."""
    model = small_model("llama")
    model.layers[1].self_attn.scaling = 0.3
    right, wrong = parity.layers_of(model, inputs_of("llama"))
    assert right.source == "both"
    assert wrong.spec is None
    assert wrong.reason == "rules say scale=None, and observation 0.3"
    assert wrong.identification.spec is not None


def test_unknown_layer_has_both_reasons(monkeypatch):
    """A layer without rules that is not identified is rejected, with both reasons."""
    model = small_model("llama")
    model.layers[0].self_attn.v_proj.register_forward_hook(lambda module, args, v: v + 0.01 * v**2)
    monkeypatch.delitem(FAMILIES, "llama")
    first, second = parity.layers_of(model, inputs_of("llama"))
    assert first.spec is None
    assert first.identification.reason in first.reason
    assert first.no_rules_reason in first.reason
    assert second.source == "observation"


def test_layer_that_did_not_run_is_reported(monkeypatch):
    """A layer that the call did not run is reported as such."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    text = {**sizes, "vocab_size": 64, "max_position_embeddings": 32}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}
    )
    model = transformers.CLIPModel(config).eval()
    inputs = next(random_inputs(config))
    assert all(layer.spec is not None for layer in parity.layers_of(model, inputs))
    monkeypatch.setattr(model, "forward", model.text_model.forward)
    reasons = {
        layer.name.split(".")[0]: layer
        for layer in parity.layers_of(model, {"input_ids": inputs["input_ids"]})
    }
    assert reasons["text_model"].spec is not None
    assert "did not run" in str(reasons["vision_model"])


# ---- Folders of models without rules -------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a model in bfloat16, and return its folder."""
    path = tmp_path_factory.mktemp("live") / "model"
    small_model("llama").bfloat16().save_pretrained(path)
    return path


@pytest.fixture
def unruled(folder, monkeypatch):
    """Return the same folder, while its family has no rules."""
    monkeypatch.delitem(FAMILIES, "llama")
    return folder


def test_folder_without_rules_is_run(unruled):
    """A folder without rules runs against transformers without a failure,
    and a warning says that it was observed.
    """
    report = run_model(unruled, ["torch"], layers=[1], against="transformers")
    assert not report.failed
    assert {comparison.backend for comparison in report.comparisons} == {"torch", "transformers"}
    assert {comparison.case for comparison in report.comparisons} == {
        "layer-1-causal",
        "layer-1-decode",
    }
    assert any(
        "observed" in warning and "rope=Rope(theta=10000.0): angles" in warning
        for warning in report.warnings
    )


@pytest.mark.thorough
def test_folder_without_rules_is_converted(unruled, tmp_path, monkeypatch, capsys):
    """Conversion of an observed folder requires `--rest
    drop`, and its weights equal those by rules.
    """
    observed, ruled = tmp_path / "observed.safetensors", tmp_path / "ruled.safetensors"
    assert main(["convert", str(unruled), str(observed), "--to", "mha_torch"]) == 2
    assert rejects("--rest", {"--rest": "keep"}).is_printed_in(capsys.readouterr().err)
    assert (
        main(["convert", str(unruled), str(observed), "--to", "mha_torch", "--rest", "drop"]) == 0
    )
    printed = capsys.readouterr().err
    assert "observed with random inputs" in printed
    assert "left out" in printed
    monkeypatch.undo()
    assert main(["convert", str(unruled), str(ruled), "--to", "mha_torch"]) == 0
    assert main(["compare", str(observed), str(ruled)]) == 0
    weights, _ = parity.load(observed, prefix="layers.0.self_attn")
    assert weights["q_proj.weight"].dtype.name == "bfloat16"


@pytest.mark.thorough
def test_tap_against_folder_without_rules(unruled, tmp_path):
    """`diagnose` finds a wrong scale in a recording, by a folder without rules."""
    model = transformers.AutoModel.from_pretrained(
        unruled, dtype=torch.float32, attn_implementation="eager"
    )
    model.layers[1].self_attn.scaling = 0.3
    with torch.no_grad(), parity.tap(model) as tapped:
        model(**inputs_of("llama"))
    tapped.save(tmp_path / "tap.safetensors")
    report = tmp_path / "report.json"
    arguments = [
        "diagnose",
        str(tmp_path / "tap.safetensors"),
        "--model",
        str(unruled),
        "--json",
        str(report),
    ]
    assert main(arguments) == 1
    (recording,) = json.loads(report.read_text())["recordings"]
    assert [layer["passed"] for layer in recording["layers"]] == [True, False]


def test_folder_with_missing_weights_raises(unruled, tmp_path):
    """A folder that lacks a weight raises an error that names it."""
    model = transformers.AutoModel.from_pretrained(unruled)
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if "layers.1.self_attn.k_proj" not in name
    }
    model.save_pretrained(tmp_path, state_dict=tensors)
    with rejects(str(tmp_path), "layers.1.self_attn.k_proj.weight"):
        run_model(tmp_path, ["torch"], against="transformers")


def test_folder_with_unknown_inputs_raises(unruled, monkeypatch):
    """A model that fails on random inputs raises an error
    with its message and a hint at `layers_of`.
    """

    def fail(self, **inputs):
        raise RuntimeError("it wants sound")

    monkeypatch.setattr(transformers.LlamaModel, "forward", fail)
    with rejects("a folder to observe", "it wants sound", hint="parity.layers_of"):
        run_model(unruled, ["torch"], against="transformers")


def test_code_in_a_folder_does_not_run(folder, tmp_path):
    """A folder with custom code raises an error, and the code does not run."""
    values = json.loads((folder / "config.json").read_text())
    values |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with rejects(str(tmp_path), "custom code"):
        run_model(tmp_path, ["torch"], against="transformers")
