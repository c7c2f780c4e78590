"""Whole folders, as transformers saves them: layers are found, read, run and converted by their config.json alone.

Nothing is downloaded: models are tiny and have random weights.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from conftest import SIBLINGS
from released import check_near
from released_models import SMALL, Model, draw, run_released
from safetensors.numpy import load_file
from test_models import older
from test_models_whole import MODELS

from parity import convert_file, from_transformers, load_into, run_model, specs_of
from parity.conversion.layers import open_layers
from parity.models.families import FAMILIES

NEAR = 2e-5  # of the largest number, for layers in float32

SIZES = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64, "moe_intermediate_size": 8}
SIZES |= {"head_dim": 8, "sliding_window": 4, "attention_chunk_size": 4, "v_head_dim": 12, "ffn_dim": 24}
SIZES |= {"kv_lora_rank": 8, "q_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
SIZES |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4) | {"num_experts_per_tok": 2}
SIZES |= dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1)
SIZES |= {"shared_expert_intermediate_size": 8, "intermediate_size_mlp": 16, "expert_ffn_hidden_size": 8}
SIZES |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OWN = {  # what configurations of a family need beside them
    "qwen2_vl_text": {"rope_parameters": SECTIONS},
    "qwen3_vl_text": {"rope_parameters": SECTIONS},
    "phi3": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
    "glm4_moe": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
}
APART = {"qwen2_vl"}  # whose pictures have a default of gigabytes: its text is a family of its own


def decoder(family):
    """A small model of a family of decoders, with some layers of each kind."""
    values = transformers.AutoConfig.for_model(family).to_dict()
    options = {name: value for name, value in SIZES.items() if name in values and name not in SMALL}
    if "kv_lora_rank" in values:
        options["num_key_value_heads"] = 4
        options.pop("head_dim", None)  # which is that of RoPE in some of them, and that of keys in others
    if values.get("layer_types"):
        options |= {"num_hidden_layers": 6, "layer_types": values["layer_types"][:6]}
    options |= {name: None for name in ("no_rope_layers", "moe_layers", "mlp_layer_types") if name in values}
    return Model(family, options | OWN.get(family, {}), dtype=torch.float32)


HERE = {**MODELS, **{family: None for family in FAMILIES if family not in APART | {m.family for m in MODELS.values()}}}


def saved(name, folder):
    """A model in a folder, in float32; and what made it."""
    model = MODELS.get(name) or decoder(name)
    config = model.config()
    config._attn_implementation = model.attention
    kind = getattr(transformers, model.class_name)
    released = kind.from_config(config) if model.class_name == "AutoModel" else kind(config)
    draw(released.float().eval())
    released.save_pretrained(folder)
    return model, released


def layers_in(folder):
    """Labels, weights and specifications of the layers in a folder, in the order of the configuration's."""
    with open_layers(folder) as layers:
        return [(layer.label, layer.model, *layer.load()) for layer in layers]


def same_bits(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and one[name].tobytes() == other[name].tobytes() for name in one
    )


@pytest.mark.parametrize("name", HERE)
def test_layers_of_a_folder_are_those_of_the_model(name, tmp_path):
    model, released = saved(name, tmp_path / "model")
    found = {layer.path: (weights, spec) for _, layer, weights, spec in layers_in(tmp_path / "model")}
    layers = [layer for layer in specs_of(tmp_path / "model") if layer.spec is not None]
    assert found.keys() == {layer.path for layer in layers}
    done = set()
    for layer, (x, kv, output) in zip(layers, run_released(released, model, layers), strict=True):
        weights, spec = found[layer.path]
        assert spec == layer.spec
        if (layer.part, layer.spec, layer.is_causal) not in done:  # one of each kind is enough for JAX
            check_siblings(layer, weights, x, kv, output, ["torch", "jax"])
        else:
            check_siblings(layer, weights, x, kv, output, ["torch"])
        done.add((layer.part, layer.spec, layer.is_causal))


def check_siblings(layer, weights, x, kv, output, names):
    """The siblings give what the released layer gives."""
    spec = replace(layer.spec, dropout=0.0, output_dropout=0.0)
    for name in names:
        sibling = SIBLINGS[name]
        module = load_into(sibling.module("MultiHeadAttention", spec), weights)
        given = {"is_causal": layer.is_causal, "need_weights": False}
        if spec.rope is not None and spec.rope.sections:  # of a text: the same on each axis
            given["positions"] = sibling.array(np.tile(np.arange(x.shape[1], dtype=np.int32), (3, 1, 1)))
        keys = [] if kv is None else [sibling.array(kv.float().numpy())]
        result, _ = module(sibling.array(x.float().numpy()), *keys, **given)
        result = sibling.numpy(result)
        check_near(result, output.reshape(result.shape).float().numpy(), f"{layer.path} of {name}", NEAR)


@pytest.mark.parametrize("name", HERE)
def test_a_folder_is_converted_and_back_bit_for_bit(name, tmp_path):
    saved(name, tmp_path / "model")
    layers = layers_in(tmp_path / "model")
    there = convert_file(tmp_path / "model", tmp_path / "c.safetensors", target="canonical")
    assert there.layers == [label for label, *_ in layers]
    assert not there.dropped
    assert not there.unconverted
    with open_layers(tmp_path / "c.safetensors") as canonical:  # which says itself what each layer is
        for layer, (label, _, weights, spec) in zip(canonical, layers, strict=True):
            assert (layer.label, layer.spec) == (label, spec)
            assert same_bits(layer.load()[0], weights)
    (layout,) = {layer.layout for _, layer, *_ in layers}
    convert_file(tmp_path / "c.safetensors", tmp_path / "b.safetensors", target=layout)
    before, after = (load_file(tmp_path / path) for path in ("model/model.safetensors", "b.safetensors"))
    shared = {name for name in after.keys() - before.keys() if name.endswith("relative_attention_bias.weight")}
    ours = {name: after[name] for name in after.keys() - shared}
    assert same_bits(ours, {name: value for name, value in before.items() if name in ours})
    assert all("inv_freq" in name or name.endswith(".bias") for name in before.keys() - ours.keys())


def test_both_dialects_of_a_folder_say_the_same(tmp_path):
    for name in ("llama", "gemma3_text", "deepseek_v3", "gpt_neox"):
        folder = tmp_path / name
        saved(name, folder)
        before = layers_in(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(older(config)))
        assert [spec for *_, spec in layers_in(folder)] == [spec for *_, spec in before]


AGAINST = ("llama", "gemma3_text", "qwen3_next", "deepseek_v3", "llama4_text", "gpt2", "bloom", "bert", "phi3")


@pytest.mark.parametrize("name", AGAINST)
def test_a_model_runs_beside_its_own_modules(name, tmp_path):
    saved(name, tmp_path)
    report = run_model(tmp_path, ["torch"], against="transformers")
    assert not report.failed
    assert not report.skipped_cases
    count = sum(layer.spec is not None for layer in specs_of(tmp_path))
    assert sum(each.backend == "transformers" for each in report.comparisons) == count


@pytest.mark.parametrize("name", AGAINST)
def test_a_live_module_is_its_layer(name, tmp_path):
    _, released = saved(name, tmp_path)
    for label, layer, weights, spec in layers_in(tmp_path):
        module = released.get_submodule(label)
        found, held = from_transformers(module, released.config, layer.index)
        assert found == spec
        assert same_bits(held, weights)
