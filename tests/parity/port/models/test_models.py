"""Configurations of released models: the specification of each layer, from the configuration alone.

Nothing is downloaded: configurations and layers come from transformers, tiny.
"""

import functools
import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.configurations import older
from helpers.families import ALL
from helpers.input_errors import rejects, rejects_type
from helpers.released import SIZES, Released, check_near
from helpers.released_layers import latents, norms, projections, rope, scores
from helpers.released_models import check_model
from helpers.samples import sample
from helpers.selection import first_families
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import mha_spec
import mha_torch
from mha_spec import (
    Alibi,
    Gate,
    InputError,
    Llama3Scaling,
    Norm,
    ProportionalScaling,
    RelativeBias,
    Rope,
    YarnScaling,
)
from parity import AttentionSpec, load_into, specs_of
from parity.port.models.families import FAMILIES
from parity.port.models.families.not_covered import NOT_COVERED, SENSES, WITHOUT_ATTENTION
from parity.use.cli.main import main

RELEASED = {
    f"{module.__name__.rpartition('.')[2]}-{name}": made
    for module in (rope, norms, scores, projections, latents)
    for name, made in module.LAYERS.items()
}
# Windows and chunks that tests of released layers leave out, because their sequences are shorter.
SHORTER = {
    "Gemma 3": {"window_size": 4096},
    "Llama 4": {"chunk_size": 8192},
    "AFMoE, sliding": {"window_size": 64},
}
# Released layers whose specification in their tests is not the one of their configuration, with the
# reason.
NOT_OF_THE_CONFIGURATION = {
    "GPT-NeoX",  # is given a number of key heads, as others are, which it does not support
    "Persimmon",
    "Llama 4, chunked",  # chunks where the model has none
    "Whisper",  # is also given its width and heads
    "Kimi Linear",  # is a layer of the other kind in the configuration
    "Gemma 3n",  # has a window where the model has it
    "MiMo-V2",  # multiplies values by a number, by which the test multiplies their weights
    "MiMo-V2, wide values",
    "LongCat",  # computes its number of layers from another number
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


ONE_DIALECT = {"gemma4_text", "mellum", "mimo_v2_flash", "ministral3", "mistral4"}
"""Families that are newer than `rope_parameters`."""


def config_of(name):
    """Return the configuration of a released layer, and its spec in the tests of that layer."""
    released = RELEASED[name]()
    name = name.partition("-")[2]
    values = getattr(released.module, "config", None)
    if values is None or values.model_type not in FAMILIES or name in NOT_OF_THE_CONFIGURATION:
        return None, None
    return values.to_dict(), replace(released.spec, **SHORTER.get(name, {}))


@sample(24)
@pytest.mark.parametrize("name", RELEASED)
def test_configuration_gives_released_spec(name):
    """The configuration of a released layer, in newer and older
    keys, has the spec of that layer's tests.
    """
    values, expected = config_of(name)
    if values is None:
        assert name.partition("-")[2] in NOT_OF_THE_CONFIGURATION
        return
    assert specs_of(values)[0].spec == expected
    if values["model_type"] not in ONE_DIALECT:
        assert specs_of(older(values))[0].spec == expected


@sample(12)
@pytest.mark.parametrize("name", RELEASED)
def test_repr_of_spec_evaluates_to_spec(name):
    """The repr of the spec of a released layer evaluates to an equal spec."""
    spec = RELEASED[name]().spec
    assert eval(repr(spec), {**vars(mha_spec)}) == spec


# ---- The other families --------------------------------------------------------------------------

ROTATED = {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0}
WINDOW = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0}
TYPES = {"layer_types": ["sliding_attention"], "sliding_window": 3}
WIDE = {"head_dim": 16}
# Longer than any call here: beyond it the module of transformers also uses the short factors.
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
LONG |= {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONG |= {"short_mscale": 1.25, "long_mscale": 1.25}
OTHERS = {
    "llama, biases": ("llama", "Llama", {"attention_bias": True, "head_dim": 12}),
    "mistral": ("mistral", "Mistral", {"sliding_window": 3}),
    "mixtral": ("mixtral", "Mixtral", {"sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2", WINDOW),
    "qwen2_moe": ("qwen2_moe", "Qwen2Moe", {"qkv_bias": True}),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe", {**WINDOW, "head_dim": 16, "rms_norm_eps": 0.01}),
    "gemma": ("gemma", "Gemma", WIDE),
    "glm4": ("glm4", "Glm4", {**WIDE, "attention_bias": True, "pad_token_id": 0}),
    "cohere2, sliding": ("cohere2", "Cohere2", TYPES),
    "cohere2, full": ("cohere2", "Cohere2", {**TYPES, "layer_types": ["full_attention"]}),
    "granite": ("granite", "Granite", {"attention_multiplier": 0.2}),
    "starcoder2": ("starcoder2", "Starcoder2", {"use_bias": True, "sliding_window": 3}),
    "olmo3": ("olmo3", "Olmo3", {**TYPES, "rms_norm_eps": 0.01}),
    "smollm3, rotated": ("smollm3", "SmolLM3", {"no_rope_layers": [1], "pad_token_id": 0}),
    "smollm3": ("smollm3", "SmolLM3", {"no_rope_layers": [0], "pad_token_id": 0}),
    "stablelm, biases": ("stablelm", "StableLm", {"use_qkv_bias": True}),
    "phi3, window": ("phi3", "Phi3", {"sliding_window": 3, "pad_token_id": 0}),
    "gpt_oss": ("gpt_oss", "GptOss", {**TYPES, "head_dim": 8}),
    "arcee": ("arcee", "Arcee", {"attention_bias": True}),
    "apertus": ("apertus", "Apertus", {"attention_bias": True, "rms_norm_eps": 0.01}),
    "seed_oss": (
        "seed_oss",
        "SeedOss",
        {"attention_bias": True, "attention_out_bias": False, "head_dim": 16},
    ),
    "helium": ("helium", "Helium", {"attention_bias": True, "head_dim": 8}),
    "nemotron": ("nemotron", "Nemotron", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "ernie4_5": ("ernie4_5", "Ernie4_5", {"use_bias": True, "head_dim": 16}),
    "exaone4, sliding": ("exaone4", "Exaone4", {**TYPES, "head_dim": 8, "rms_norm_eps": 0.01}),
    "exaone4, full": (
        "exaone4",
        "Exaone4",
        {**TYPES, "head_dim": 8, "layer_types": ["full_attention"]},
    ),
    "exaone4, no windows": (
        "exaone4",
        "Exaone4",
        {"sliding_window": None, "head_dim": 8, "layer_types": ["full_attention"]},
    ),
    "glm4_moe": (
        "glm4_moe",
        "Glm4Moe",
        {"attention_bias": True, "use_qk_norm": True, "head_dim": 16},
    ),
    "dots1": (
        "dots1",
        "Dots1",
        {**TYPES, "attention_bias": True, "head_dim": 16, "rms_norm_eps": 0.01},
    ),
    "olmoe": ("olmoe", "Olmoe", {"attention_bias": True, "rms_norm_eps": 0.01}),
    "ministral": ("ministral", "Ministral", {**TYPES, "head_dim": 16}),
    "granitemoe": ("granitemoe", "GraniteMoe", {"attention_multiplier": 0.2}),
    "phimoe, longrope": (
        "phimoe",
        "Phimoe",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16},
    ),
    "hunyuan, alpha": (
        "hunyuan_v1_dense",
        "HunYuanDenseV1",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 50.0,
                "factor": 1.0,
            },
        },
    ),
    "gemma3, full": (
        "gemma3",
        "Gemma3",
        {**WIDE, "layer_types": ["full_attention"], "query_pre_attn_scalar": 5},
    ),
}


def other(family, prefix, options):
    """Return a released layer with the spec of its configuration."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    attention, configuration, rotary = (
        getattr(modeling, f"{prefix}Text{suffix}", None) or getattr(modeling, f"{prefix}{suffix}")
        for suffix in ("Attention", "Config", "RotaryEmbedding")
    )
    kinds = ("full_attention", "sliding_attention")
    rope = dict.fromkeys(kinds, ROTATED) if family in ("gemma3", "olmo3") else ROTATED
    config = configuration(
        **SIZES | {"rope_parameters": rope} | options, attn_implementation="eager"
    )
    layer = specs_of(config.to_dict())[0]
    embedding = rotary(config)
    of_type = {"layer_type": layer.kind} if rope is not ROTATED else {}
    reach = layer.spec.span

    def sees(batch, head, query, key):
        near = (
            True
            if reach is None
            else (key >= torch.as_tensor(reach.first(query))) & (key < reach.stop(query))
        )
        return (key <= query) & near

    keywords = {"rotary": lambda x, positions: embedding(x, positions, **of_type), "sees": sees}
    return Released(attention(config, layer_idx=0), layer.spec, **keywords)


@pytest.mark.parametrize("name", OTHERS)
def test_layer_of_spec_matches_released_one(name):
    """A layer of the configuration's spec, with the released
    weights, has the output of the released one.
    """
    released = other(*OTHERS[name])
    x = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(1)).double()
    layer = mha_torch.MultiHeadAttention(released.spec, dtype=torch.float64)
    weights = {name: weight.detach().numpy() for name, weight in released.weights().items()}
    load_into(layer, weights, released.spec)
    with torch.no_grad():
        expected, (actual, _) = released(x), layer.eval()(x, is_causal=True)
    check_near(actual.numpy(), expected.numpy(), f"the output of {name}")


def test_every_family_has_a_small_model():
    """Every family has a small model in `helpers.families`,
    except two Qwen-VL models with text parts.
    """
    tested = {model.family for model in ALL.values()}
    assert tested | {"qwen2_vl", "qwen2_5_vl"} == set(FAMILIES)


def test_family_specific_keys_are_read():
    """Specific keys of GPT-NeoX, Persimmon, BLOOM and GPT-2 are
    read, also in their former names.
    """
    neox = transformers.GPTNeoXConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    expected = AttentionSpec(32, 4, rope=Rope(rotary_dim=2))
    assert specs_of(neox.to_dict())[0].spec == expected
    former = {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
    }
    former |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "attention_bias": True}
    assert specs_of(former)[0].spec == expected
    persimmon = transformers.PersimmonConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1
    )
    norm = Norm("layer", bias=True, eps=1e-5)
    expected = AttentionSpec(32, 4, rope=Rope(25000.0, rotary_dim=4), qk_norm=norm)
    assert (
        specs_of(
            {
                **persimmon.to_dict(),
                "rope_parameters": None,
                "rope_theta": 25000.0,
                "partial_rotary_factor": 0.5,
            }
        )[0].spec
        == expected
    )
    bloom = transformers.BloomConfig(hidden_size=48, n_head=6, n_layer=1, attention_dropout=0.0)
    assert specs_of(bloom.to_dict())[0].spec == AttentionSpec(48, 6, alibi=Alibi())
    gpt2 = transformers.GPT2Config(
        n_embd=32, n_head=4, n_layer=2, scale_attn_by_inverse_layer_idx=True
    )
    scales = [layer.spec.scale for layer in specs_of(gpt2.to_dict())]
    np.testing.assert_allclose(scales, [8**-0.5, 8**-0.5 / 2], rtol=1e-12)
    plain = specs_of({**gpt2.to_dict(), "scale_attn_by_inverse_layer_idx": False})[0].spec
    assert plain == AttentionSpec(32, 4, dropout=0.1, output_dropout=0.1)


TURNED_IN_PART = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}
OF_EACH_KIND = {  # values for six layers of each kind, added to the defaults of a family
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "intermediate_size": 16384,
        "activation_sparsity_pattern": None,
    },
    "mimo_v2_flash": {"attention_value_scale": 1.0},
    "qwen3_omni_moe_text": {"hidden_size": 4096, "num_attention_heads": 32},
    "glm4_moe": {"head_dim": 128},  # otherwise 42, half of which cannot be rotated
    "glm4v_text": TURNED_IN_PART,
    "glm4v_moe_text": {**TURNED_IN_PART, "head_dim": 128},
    "glm_image_text": TURNED_IN_PART,
    "glm_ocr_text": {**TURNED_IN_PART, "head_dim": 128},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 3]],
        "attention_layers": ["global", "local"] * 3,
    },
    "gemma4_text": {"per_layer_config": {"5": {"head_dim": 512}}},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 3,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
}


REQUIRED_THERE = {"rope_parameters.factor", "rope_scaling.factor"}
"""Keys that transformers requires, and for which we use YaRN's two lengths instead."""


@sample(32, family=first_families(FAMILIES))
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen2_vl", "qwen2_5_vl"}))
def test_missing_key_has_default_meaning(family):
    """Without a key, layers are those that transformers makes without it, or an error requires the
    key, also in older keys for RoPE, of which the base is required.
    """
    values = of_each_kind(family)
    layers = specs_in(values)
    assert specs_in(completed(values)) == layers
    required = check_keys(values, layers)
    if family not in ONE_DIALECT:
        required += check_keys(older(values), layers)
    assert len(required) >= 3 or FAMILIES[family].defaults


def of_each_kind(family):
    """Return the default configuration of a family, with six layers that include each kind."""
    values = type(transformers.AutoConfig.for_model(family))().to_dict()
    counts = {name for stack in FAMILIES[family].stacks for name in stack.count}
    values |= {name: 6 for name in counts if isinstance(values.get(name), int)}
    values = {
        name: value for name, value in values.items() if name not in ("out_features", "out_indices")
    }
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:6]
        values |= {
            name: None
            for name in ("no_rope_layers", "moe_layers", "mlp_layer_types")
            if name in values
        }
    return values | OF_EACH_KIND.get(family, {})


def specs_in(values):
    return [layer.spec for layer in specs_of(values)]


def completed(values):
    """Return the configuration with transformers' values for missing keys."""
    configuration = type(transformers.AutoConfig.for_model(values["model_type"]))
    return configuration(
        **{name: value for name, value in values.items() if name != "model_type"}
    ).to_dict()


def check_keys(values, layers):
    """Compare the layers without each of the keys with the layers of transformers, and return the
    keys that we require.
    """
    assert specs_in(values) == layers
    required, silent = [], []
    for key in set(names_in(values)) - {"model_type", "transformers_version"}:
        try:
            without_key = specs_in(changed(values, key))
        except InputError as error:
            # A default of the key itself is not a requirement, and must be valid.
            if f"family default: {key.rpartition('.')[2]} is not set" in str(error):
                raise
            required.append(key)
            continue
        if without_key == layers:
            silent.append(key)
        else:
            check_key(values, key, without_key)
    # Most keys have no effect: they are removed together, and one by one only if that has an
    # effect.
    if not mean_nothing(values, silent, layers):
        for key in silent:
            check_key(values, key, layers)
    return required


def check_key(values, key, expected):
    try:
        theirs = completed(changed(values, key))
    except KeyError:
        assert key in REQUIRED_THERE
        return
    assert specs_in(theirs) == expected, key


def mean_nothing(values, keys, layers):
    """Return whether the layers are the same without all of the keys, and neither transformers nor
    parity fails.
    """
    try:
        theirs = completed(functools.reduce(changed, keys, values))
    except (KeyError, ValueError, StrictDataclassError):
        return False
    try:
        return specs_in(theirs) == layers
    except InputError:
        return False


# ---- Layers of a model ---------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 5e5, **LLAMA3},
}


def test_origins_name_configuration_keys():
    """Origins name the keys or the default behind each field,
    and none for fields left at their default.
    """
    layer = specs_of(LLAMA)[2]
    assert (layer.index, layer.kind) == (2, "full_attention")
    assert layer.spec.rope == Rope(5e5, scaling=Llama3Scaling(8.0, 64))
    assert layer.origins["rope"] == "rope_parameters.rope_theta, rope_parameters.rope_type llama3"
    assert layer.origins["d_model"] == "hidden_size"
    assert layer.origins["qkv_bias"] == "family default: attention_bias is not set"
    assert "scale" not in layer.origins


def test_layer_kinds_of_hybrid_model():
    """Three linear layers and one of full attention alternate
    in Qwen3-Next, even without `layer_types`.
    """
    values = transformers.Qwen3NextConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=8,
    ).to_dict()
    layers = specs_of(values)
    assert [layer.kind for layer in layers] == [*["linear_attention"] * 3, "full_attention"] * 2
    assert [layer.spec is None for layer in layers] == [True, True, True, False] * 2
    del values["layer_types"]
    assert [layer.kind for layer in specs_of(values)] == [layer.kind for layer in layers]


def test_gemma3_has_two_rope_bases():
    """Sliding layers of Gemma 3 have base 1e4 and full ones 1e6, in newer and older keys; a
    released configuration with few keys has transformers' defaults.
    """
    values = transformers.Gemma3TextConfig(num_hidden_layers=6).to_dict()
    for config in (values, older(values)):
        layers = specs_of(config)
        assert [layer.spec.rope.theta for layer in layers] == [1e4] * 5 + [1e6]
        assert [layer.spec.window_size for layer in layers] == [4096] * 5 + [None]
    # As in a model of 4B parameters, whose configuration has few keys.
    little = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    little["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    expected = specs_of(transformers.Gemma3TextConfig(**little).to_dict())
    assert [layer.spec for layer in specs_of(little)] == [layer.spec for layer in expected]
    assert (
        specs_of(little)[0].origins["num_heads"] == "family default: num_attention_heads is not set"
    )
    without = {name: value for name, value in older(values).items() if name != "layer_types"}
    assert [layer.kind for layer in specs_of(without)] == [
        *["sliding_attention"] * 5,
        "full_attention",
    ]


def test_t5_encoder_and_decoder_layers():
    """T5 has layers of encoder, decoder and cross-
    attention, with their causality, biases and paths.
    """
    values = transformers.T5Config(
        num_layers=3, num_decoder_layers=2, d_model=32, d_kv=12, num_heads=4
    ).to_dict()
    layers = specs_of(values)
    assert [(layer.part, layer.index, layer.kind, layer.is_causal) for layer in layers] == [
        *(("encoder", index, "full_attention", False) for index in range(3)),
        *(("decoder", index, "full_attention", True) for index in range(2)),
        *(("decoder", index, "cross_attention", False) for index in range(2)),
    ]
    assert [layer.spec.relative_bias for layer in layers] == [
        *[RelativeBias(32, 128)] * 3,
        *[RelativeBias(32, 128, bidirectional=False)] * 2,
        *[None] * 2,
    ]
    assert {layer.layout for layer in layers} == {"transformers.T5"}
    assert [layer.path for layer in layers][2:6:3] == [
        "encoder.block.2.layer.0.SelfAttention",
        "decoder.block.0.layer.1.EncDecAttention",
    ]
    del values["num_decoder_layers"]
    assert [layer.part for layer in specs_of(values)] == ["encoder"] * 3 + ["decoder"] * 6


def test_is_decoder_makes_bert_causal():
    """BERT is causal only with `is_decoder`."""
    values = transformers.BertConfig(num_hidden_layers=1).to_dict()
    assert [layer.is_causal for layer in specs_of(values)] == [False]
    assert [layer.is_causal for layer in specs_of({**values, "is_decoder": True})] == [True]


def test_layer_patterns_of_hybrid_models():
    """Patterns of Nemotron-H, also in former letters, and
    lists of Kimi Linear yield kinds of layers.
    """
    values = transformers.NemotronHConfig(
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe"]
    ).to_dict()
    kinds = ["linear_attention", "mlp", "full_attention", "moe"]
    assert [layer.kind for layer in specs_of(values)] == kinds
    former = {
        **values,
        "layers_block_type": None,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-*E",
    }
    assert [layer.kind for layer in specs_of(former)] == ["mamba", "mlp", "full_attention", "moe"]
    assert specs_of(former)[2].spec == specs_of(values)[2].spec
    kimi = {**transformers.KimiLinearConfig(num_hidden_layers=3).to_dict(), "layer_types": None}
    kimi["linear_attn_config"] = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "num_heads": 2,
        "head_dim": 8,
    }
    assert [layer.spec is None for layer in specs_of(kimi)] == [True, False, True]


AS_RELEASED = {  # keys that configurations of released models have, and transformers' own do not
    "bert": {
        "pooler_num_attention_heads": 12,
        "pooler_size_per_head": 128,
        "position_embedding_type": "absolute",
    },
    "albert": {"down_scale_factor": 1, "net_structure_type": 0, "gap_size": 0},
    "t5": {"n_positions": 512, "output_past": True},
    "bart": {
        "static_position_embeddings": False,
        "add_bias_logits": False,
        "extra_pos_embeddings": 2,
    },
    "gptj": {"rotary": True, "scale_attn_weights": True},
    "codegen": {"scale_attn_weights": True},
    "gpt_bigcode": {"pre_allocate_kv_cache": True},
    "clip_text_model": {"temperature": 1.0, "pruned_heads": {}, "add_cross_attention": False},
    "modernbert": {"position_embedding_type": "absolute", "repad_logits_with_grad": False},
    "minimax_m2": {"use_qk_norm": True, "qk_norm_type": "per_layer", "attn_type_list": [1] * 62},
    "longcat_flash": {
        "attention_method": "MLA",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "lfm2": {
        "num_heads": 32,
        "block_mlp_init_scale": 1.0,
        "block_out_init_scale": 1.0,
        "theta": 1e6,
        "use_pos_enc": True,
    },
    "llama": {"rope_interleaved": False, "is_llama_config": True},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1},
    "cohere2": {
        "use_qk_norm": False,
        "order_of_interleaved_layers": "local_attn_first",
        "layer_switch": 4,
    },
    "internlm3": {"bias": False, "qkv_bias": False},
    "hunyuan_v1_dense": {
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
        "use_cla": False,
        "attention_head_dim": 128,
    },
    "bloom": {"masked_softmax_fusion": True, "bias_dropout_fusion": True, "offset_alibi": 100},
    "glm4v_text": {**TURNED_IN_PART, "attention_bias": True},
}


@sample(12)
@pytest.mark.parametrize("family", AS_RELEASED)
def test_released_keys_have_no_effect(family):
    """Keys that only configurations of released models contain do not change the layers."""
    values = transformers.AutoConfig.for_model(family).to_dict()
    values |= TURNED_IN_PART if family == "glm4v_text" else {}
    assert specs_of({**values, **AS_RELEASED[family]}) == specs_of(values)


QWEN35 = {  # as released, without tokens and numbers of training
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": [*(["linear_attention"] * 3), "full_attention"] * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_size": 1152,
        "model_type": "qwen3_5_moe",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
    },
}


def test_released_qwen3_5_moe_is_read(tmp_path, capsys):
    """`mha-parity spec` reads the two gated full-attention layers
    of Qwen3.5-MoE, with interleaved M-RoPE.
    """
    (tmp_path / "config.json").write_text(json.dumps(QWEN35))
    assert main(["spec", str(tmp_path), "--json", str(tmp_path / "spec.json")]) == 0
    layers = json.loads((tmp_path / "spec.json").read_text())["layers"]
    specs = {layer["index"]: layer["spec"] for layer in layers if layer["spec"] is not None}
    assert specs.keys() == {3, 7}
    rope = Rope(1e7, rotary_dim=64, sections=(11, 11, 10), section_order="interleaved")
    norm = Norm(weight="1+w", eps=1e-6)
    sizes = {"num_kv_heads": 2, "head_dim": 256, "qkv_bias": False, "out_bias": False}
    expected = AttentionSpec(2048, 16, qk_norm=norm, gate=Gate(), rope=rope, **sizes)
    assert [AttentionSpec.from_json(json.dumps(spec)) for spec in specs.values()] == [expected] * 2


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_disabled_gate_raises_an_error(family):
    """Gated families accept `attn_output_gate=True` and raise an error if it is False."""
    values = transformers.AutoConfig.for_model(family, num_hidden_layers=4).to_dict()
    assert specs_of({**values, "attn_output_gate": True}) == specs_of(values)
    with rejects("attn_output_gate", attn_output_gate=False):
        specs_of({**values, "attn_output_gate": False})


PARTS_AS_RELEASED = {  # which contain only unusual values
    "llama": ({"max_position_embeddings": 4096}, (4096, 32, 32)),
    "mistral": (
        {"num_key_value_heads": 8, "rope_theta": 1e6, "sliding_window": None},
        (4096, 32, 8),
    ),
    "gemma": (
        {"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 1},
        (2048, 8, 1),
    ),
    "clip_vision_model": ({"patch_size": 32}, (768, 12, 12)),
    "clip_text_model": ({"vocab_size": 32}, (512, 8, 8)),
    "siglip_text_model": ({}, (768, 12, 12)),
}


@pytest.mark.parametrize("family", PARTS_AS_RELEASED)
def test_values_missing_in_parts_are_default(family):
    """Values missing in a part of a released model are the
    defaults of the part's family in transformers.
    """
    values, (width, heads, kv_heads) = PARTS_AS_RELEASED[family]
    layers = specs_of(
        {"model_type": "llava", "text_config": {"model_type": family, **values}}, part="text_config"
    )
    assert [layer.spec for layer in layers] == [
        layer.spec for layer in specs_of(transformers.AutoConfig.for_model(family, **values))
    ]
    spec = layers[0].spec
    assert spec is not None
    assert (spec.d_model, spec.num_heads, spec.num_kv_heads) == (width, heads, kv_heads)


def test_configuration_may_be_object_or_path(tmp_path):
    """A configuration may be an object, a dict, or a path; other types raise a `TypeError`."""
    config = transformers.LlamaConfig(num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    assert (
        specs_of(config)
        == specs_of(config.to_dict())
        == specs_of(tmp_path)
        == specs_of(str(tmp_path))
    )
    for wrong in (None, 3, config.to_dict):
        with rejects_type("config"):
            specs_of(wrong)


def test_minicpm3_has_default_base_and_width():
    """MiniCPM3 without its RoPE base and the width of its
    values, as released, has the default spec.
    """
    values = transformers.MiniCPM3Config(num_hidden_layers=1).to_dict()
    assert (
        specs_of(changed(changed(values, "v_head_dim"), "rope_parameters"))[0].spec
        == specs_of(values)[0].spec
    )


def test_hunyuan_alpha_changes_rope_base():
    """HunYuan's alpha multiplies the base by alpha^(H/(H-2));
    unknown scalings, keys and widths raise errors.
    """
    rope = {
        "type": "dynamic",
        "alpha": 1000.0,
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
    }
    former = {
        **changed(
            transformers.HunYuanDenseV1Config(num_hidden_layers=1).to_dict(), "rope_parameters"
        )
    }
    former |= {"head_dim": 128, "rope_theta": 1e4, "rope_scaling": {**rope, "mscale_all_dim": 1.0}}
    layer = specs_of(former)[0]
    assert layer.spec is not None
    assert layer.spec.rope == Rope(1e4 * 1000.0 ** (128 / 126))
    assert layer.origins["rope"] == "rope_theta * rope_scaling.alpha ** (H / (H - 2))"
    without = specs_of({**former, "rope_scaling": None})[0].spec
    assert without is not None
    assert without.rope == Rope()
    for wrong, why, got in (
        ({"type": "yarn"}, rejects("layer 0"), "got 'yarn'"),
        ({"gamma": 2}, rejects("every key about attention"), "rope_scaling.gamma=2"),
    ):
        with why:
            specs_of({**former, "rope_scaling": {**rope, **wrong}})
        assert got in str(why.value)
    with rejects("layer 0"):
        specs_of({**former, "attention_head_dim": 64})


def test_rotary_dim_of_minimax_and_bamba():
    """MiniMax-M2 and Bamba have 64 rotated features; a former key of Bamba sets 32."""
    values = transformers.MiniMaxM2Config(num_hidden_layers=1).to_dict()
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
    assert specs_of({**values, "rotary_dim": 64})[0].spec.rope == Rope(5e6, rotary_dim=64)
    bamba = transformers.BambaConfig(num_hidden_layers=1, attn_layer_indices=[0]).to_dict()
    former = {**changed(bamba, "rope_parameters"), "rope_theta": 1e4, "attn_rotary_emb": 32}
    assert specs_of(bamba)[0].spec.rope == Rope(rotary_dim=64)
    assert specs_of(former)[0].spec.rope == Rope(rotary_dim=32)


def test_nested_part_is_a_dotted_path(tmp_path, capsys):
    """A part of a part is selected by its keys with a dot, in Python and on
    the command line; wrong paths raise errors.
    """
    inner = {**LLAMA, "num_hidden_layers": 1}
    values = {
        "model_type": "unseen",
        "thinker_config": {"model_type": "unseen_thinker", "text_config": inner},
    }
    way = "thinker_config.text_config"
    assert specs_of(values, part=way) == specs_of(inner)
    with rejects("part", part="thinker_config"):
        specs_of(values, part="thinker_config")
    with rejects("part", part="thinker_config.vision"):
        specs_of(values, part="thinker_config.vision")
    with rejects("part", part=f"{way}.text_config"):
        specs_of(values, part=f"{way}.text_config")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["spec", str(tmp_path), "--part", way]) == 0
    assert f"{way}" in capsys.readouterr().out


def test_modernbert_windows_must_agree():
    """A ModernBERT decoder has half of `local_attention` as its window, and another
    `sliding_window` raises an error.
    """
    values = transformers.ModernBertDecoderConfig(local_attention=10).to_dict()
    assert values["sliding_window"] == 5
    assert specs_of(values)[1].spec.window_size == 5
    assert specs_of(
        {name: x for name, x in values.items() if name != "sliding_window"}
    ) == specs_of(values)
    with rejects("layer 0"):
        specs_of({**values, "sliding_window": 7})


def test_older_names_of_layer_kinds():
    """In GraniteMoeHybrid, "attention" means full
    attention, and position type "nope" means no RoPE.
    """
    values = transformers.GraniteMoeHybridConfig(
        num_hidden_layers=2, position_embedding_type="nope"
    ).to_dict()
    layers = specs_of({**values, "layer_types": ["mamba", "attention"]})
    assert [layer.kind for layer in layers] == ["mamba", "full_attention"]
    assert layers[1].spec.rope is None


SAID = {  # values of RoPE, norms and scores, none of them the default of its family
    "llama3": {**LLAMA, "num_hidden_layers": 1},
    "yarn": {
        **LLAMA,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 1.25,
        },
    },
    "gemma2": {
        **{
            name: LLAMA[name]
            for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
        },
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 30.0,
        "sliding_window": 7,
        "rope_theta": 5e5,
    },
    "qwen3": {
        **{
            name: LLAMA[name]
            for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
        },
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "attention_bias": True,
        "attention_dropout": 0.25,
        "rms_norm_eps": 0.01,
        "sliding_window": 7,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
}


def changed(values, name):
    """Return the configuration without a key of the model or of its RoPE."""
    section, _, leaf = name.rpartition(".")
    if not section:
        return {key: value for key, value in values.items() if key != name}
    return {
        **values,
        section: {key: value for key, value in values[section].items() if key != leaf},
    }


def names_in(values):
    return [
        path
        for name, value in values.items()
        for path in ([f"{name}.{leaf}" for leaf in value] if isinstance(value, dict) else [name])
    ]


ASKED_FOR = {
    "llama3": {
        f"rope_parameters.{name}"
        for name in ("rope_type", "factor", "low_freq_factor", "high_freq_factor")
    },
    "yarn": {"rope_parameters.rope_type"},
    "gemma2": SAID["gemma2"].keys(),
    "qwen3": SAID["qwen3"].keys()
    - {"attention_bias", "attention_dropout", "use_sliding_window", "rope_scaling"}
    | {"rope_scaling.factor"},
}
"""Keys that are required in addition to the keys of every family; without any other key, layers
change.
"""


@pytest.mark.parametrize("name", SAID)
def test_removed_key_changes_layers(name):
    """Removal of a key changes the layers or raises an error if it
    is required, except for norms and lengths.
    """
    values = SAID[name]
    layers = specs_in(values)
    assert layers[0].rope.theta == 5e5
    silent, required = set(), set()
    for key in names_in(values):
        try:
            if specs_in(changed(values, key)) == layers:
                silent.add(key)
        except InputError:
            required.add(key)
    assert silent <= {
        "rms_norm_eps",
        "max_position_embeddings",
    }  # norms of these families are not in attention
    assert required == {"model_type", "num_attention_heads", *ASKED_FOR[name]}


def test_yarn_mscale_needs_both_numbers():
    """YaRN has `mscale` only together with `mscale_all_dim`,
    and its factor from two lengths if missing.
    """

    def scaling_of(**numbers):
        rope = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            **numbers,
        }
        return specs_of({**LLAMA, "rope_parameters": rope})[0].spec.rope.scaling

    both = {"mscale": 1.0, "mscale_all_dim": 0.5}
    assert scaling_of(**both) == YarnScaling(4.0, 64, **both)
    assert scaling_of(mscale=0.7) == YarnScaling(4.0, 64)
    assert scaling_of(factor=None) == YarnScaling(8.0, 64)  # from the two lengths


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "mistral4"])
@pytest.mark.parametrize(
    "numbers",
    [{}, {"mscale": 0.7}, {"attention_factor": 1.7}, {"mscale": 0.7, "attention_factor": 1.7}],
)
def test_mscale_all_dim_scales_latents(family, numbers, tmp_path):
    """Latent attention scales scores by `mscale_all_dim` as the model does, whatever RoPE reads."""
    model = ALL[family]
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale_all_dim": 0.8,
        **numbers,
    }
    parameters = {**model.config().rope_parameters, **rope}
    check_model(replace(model, options={**model.options, "rope_parameters": parameters}), tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v2", "kimi_linear"])
def test_queries_without_latent_have_no_bias(family, tmp_path):
    """With biases but no latent for queries, layers match the model's."""
    model = ALL[family]
    check_model(
        replace(model, options={**model.options, "attention_bias": True, "q_lora_rank": None}),
        tmp_path,
    )


def test_proportional_rope_keeps_whole_head():
    """Proportional RoPE sets its share and factor as scaling, and no `rotary_dim`."""
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert specs_of({**LLAMA, "rope_parameters": rope})[0].spec.rope == Rope(
        scaling=ProportionalScaling(0.25)
    )
    assert (
        specs_of({**LLAMA, "rope_parameters": {**rope, "factor": 2.0}})[0].spec.rope.scaling.factor
        == 2.0
    )


# ---- Rejected configurations ---------------------------------------------------------------------

MPT = {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 1}
REJECTED = {
    "family": ({"model_type": "speech"}, rejects("model_type", model_type="speech")),
    "near": ({"model_type": "llama5"}, rejects("model_type", model_type="llama5")),
    "no family": ({"model_type": None}, rejects("model_type", model_type=None)),
    "part": (
        {
            "model_type": "seen",
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "seen"},
        },
        rejects("part", part=None),
    ),
    "parts": (
        {
            "model_type": "seen",
            "text_config": {"model_type": "mllama_text_model"},
            "vision_config": {"depth": 1},
        },
        rejects("a part of the model"),
    ),
    "rope of two": (
        {
            "model_type": "lfm2",
            "norm_eps": 1e-5,
            "rope_parameters": None,
            "rope_theta": 1e4,
            "theta": 1e5,
        },
        rejects("layer 0"),
    ),
    "factors of two lengths": (
        {"rope_parameters": LONG | {"long_mscale": 1.5}},
        rejects("layer 0"),
    ),
    "pairs": ({"rope_interleaved": True}, rejects("rope_interleaved", rope_interleaved=True)),
    "missing": ({"hidden_size": None}, rejects("the configuration")),
    "no scaling": (
        {"rope_parameters": {**LLAMA3, "factor": None}},
        rejects("the configuration"),
    ),
    "scaling": (
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        rejects("layer 0"),
    ),
    **{  # none of which is a key of its family
        f"key {name}": ({name: 2}, rejects("every key about attention"))
        for name in (
            "multi_query",
            "num_query_groups",
            "use_dynamic_ntk",
            "sliding",
            "is_causal",
            "numAttentionHeads",
            "nheads",
        )
    },
    "scaling that is no word": (
        {"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}},
        rejects("layer 0"),
    ),
    "family that is no word": (
        {"model_type": ["llama"], "text_config": {"model_type": ["x"]}},
        rejects("a part of the model"),
    ),
    "key of attention": (
        {"attn_logit_softcapping": 30.0},
        rejects("every key about attention", "attn_logit_softcapping=30.0"),
    ),
    "key of RoPE": (
        {"rope_parameters": {**LLAMA["rope_parameters"], "beta_fast": 8.0}},
        rejects("every key about attention", "rope_parameters.beta_fast=8.0"),
    ),
    "share of a head": (
        {"rope_parameters": {**LLAMA["rope_parameters"], "partial_rotary_factor": 0.5}},
        rejects("layer 0"),
    ),
    "share of a head, before": (
        {"rope_parameters": None, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        rejects("layer 0"),
    ),
    "soft cap that no layer takes": (
        {
            **transformers.Gemma3TextConfig(num_hidden_layers=1).to_dict(),
            "attn_logit_softcapping": 30.0,
        },
        rejects("attn_logit_softcapping", attn_logit_softcapping=30.0),
    ),
    "both ways": (
        {"use_bidirectional_attention": True},
        rejects("every key about attention", "use_bidirectional_attention=True"),
    ),
    "heads": ({"num_attention_heads": 5}, rejects("layer 0")),
    "word": ({"num_attention_heads": "four"}, rejects("layer 0")),
    "RoPE": ({"rope_parameters": [1e4]}, rejects("layer 0")),
    "kind": (
        {"layer_types": ["full_attention", "global", "global"]},
        rejects("layer 1", "'global'"),
    ),
    "kind of others": (
        {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4},
        rejects("layer 0", "none in this family"),
    ),
    "number of layers": (
        {"num_hidden_layers": 0},
        rejects("num_hidden_layers", num_hidden_layers=0),
    ),
    "period": (
        {"model_type": "qwen3_next", "full_attention_interval": 0},
        rejects("full_attention_interval", full_attention_interval=0),
    ),
    "layers without RoPE": (
        {"model_type": "smollm3", "no_rope_layers": [1]},
        rejects("layer 1"),
    ),
    "window layers": (
        {"model_type": "qwen2", "use_sliding_window": True},
        rejects("the configuration"),
    ),
    "no parameters": (
        {"model_type": "ministral3", "rope_parameters": None, "head_dim": 8},
        rejects("the configuration"),
    ),
    "two bases": (
        {"rope_theta": 1e4},
        rejects("layer 0"),
    ),
    "RoPE of other layers": (
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        rejects("the configuration"),
    ),
    "layers": (
        {"layer_types": ["full_attention"]},
        rejects("layer_types", layer_types=["full_attention"]),
    ),
    "distances": (
        {**transformers.BertConfig().to_dict(), "position_embedding_type": "relative_key"},
        rejects("position_embedding_type", position_embedding_type="relative_key"),
    ),
    "another attention": (
        {**MPT, "attn_config": {"qk_ln": True}},
        rejects("attn_config.qk_ln", {"attn_config.qk_ln": True}),
    ),
    "slopes": (
        {**MPT, "attn_config": {"alibi_bias_max": 16}},
        rejects("attn_config.alibi_bias_max", {"attn_config.alibi_bias_max": 16}),
    ),
    "biases by distance": (
        {**transformers.MPNetConfig().to_dict(), "relative_attention_num_buckets": 16},
        rejects("relative_attention_num_buckets", relative_attention_num_buckets=16),
    ),
    "keys that all layers share": (
        {**transformers.Gemma4TextConfig(num_hidden_layers=6).to_dict(), "num_kv_shared_layers": 6},
        rejects("layer 0", ""),
    ),
    "decoder alone": (
        {**transformers.BartConfig().to_dict(), "is_decoder": True, "is_encoder_decoder": False},
        rejects("is_encoder_decoder", is_encoder_decoder=False),
    ),
    "encoder alone": (
        {**transformers.T5Config().to_dict(), "architectures": ["T5EncoderModel"]},
        rejects("architectures", architectures=["T5EncoderModel"]),
    ),
    "cross-attention": (
        {**transformers.BertConfig().to_dict(), "add_cross_attention": True},
        rejects("every key about attention"),
    ),
    "letters": (
        {
            **transformers.NemotronHConfig().to_dict(),
            "layers_block_type": None,
            "num_hidden_layers": 3,
        }
        | {"hybrid_override_pattern": "M*"},
        rejects("hybrid_override_pattern", "2"),
    ),
    "kinds of GPT-Neo": (
        {**transformers.GPTNeoConfig().to_dict(), "attention_layers": ["far"] * 24},
        rejects("layer 0", "'far'"),
    ),
    "kinds of Kimi": (
        {**transformers.KimiLinearConfig(num_hidden_layers=2).to_dict(), "layer_types": None}
        | {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [2]}},
        rejects(
            "linear_attn_config",
            full_attn_layers=[2],
            kda_layers=[2],
        ),
    ),
    "word for layers": ({"layer_types": 3}, rejects("layer_types", layer_types=3)),
}


def test_unsupported_configuration_raises(subtests):
    """Unknown families, keys, parts and values about attention
    raise an error with the expected fields.
    """
    for name, (keys, input_error) in REJECTED.items():
        with subtests.test(name), input_error:
            specs_of({**LLAMA, **keys})


@pytest.mark.parametrize(
    "key", ["vocab_size", "mlp_bias", "use_cache", "pretraining_tp", "_attn_implementation"]
)
def test_keys_outside_attention_are_ignored(key):
    """Keys that do not concern attention do not change the layers."""
    assert specs_of({**LLAMA, key: 1}) == specs_of(LLAMA)


def has_attention(model_type):
    """Return whether a family's modules in transformers have attention outside of parts with their
    own families.
    """
    kind = CONFIG_MAPPING[model_type]
    folder = Path(transformers.__file__).parent / "models" / kind.__module__.split(".")[2]
    files = [path.read_text("utf-8") for path in folder.glob("modeling_*.py")]
    if files and not any(
        re.search(r"^class \w*Attention\w*\(", text, re.MULTILINE) for text in files
    ):
        return False
    has_heads = any(re.search(r"heads?(_|$)", name) for name in kind.__dataclass_fields__)
    return has_heads or not kind.sub_configs


def test_all_transformers_families_are_known():
    """Each family of transformers with attention is covered or listed once with the obstacle."""
    assert not NOT_COVERED.keys() & FAMILIES.keys()
    assert not WITHOUT_ATTENTION & (FAMILIES.keys() | NOT_COVERED.keys())
    assert CONFIG_MAPPING_NAMES.keys() >= NOT_COVERED.keys() | WITHOUT_ATTENTION
    known = FAMILIES.keys() | NOT_COVERED.keys() | WITHOUT_ATTENTION
    assert [
        name for name in CONFIG_MAPPING_NAMES if name not in known and has_attention(name)
    ] == []
    assert len(NOT_COVERED) == sum(
        len(names.split()) for names in SENSES.values()
    )  # each is there once


@pytest.mark.parametrize("family", ["doge", "zamba2", "videomae"])
def test_message_names_the_obstacle(family):
    """The error for a family that is not covered ends with its
    obstacle; one without attention also raises.
    """
    with rejects("model_type", model_type=family) as caught:
        specs_of({"model_type": family, "hidden_size": 32})
    assert caught.value.hint.endswith(NOT_COVERED[family])
    with rejects("model_type", model_type="rwkv"):
        specs_of({"model_type": "rwkv"})


# ---- Files and the command -----------------------------------------------------------------------


def test_folder_equals_its_config_file(tmp_path):
    """A folder, its `config.json` and its values yield the same layers;
    a list or a missing file raises an error.
    """
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert specs_of(tmp_path) == specs_of(str(tmp_path / "config.json")) == specs_of(LLAMA)
    (tmp_path / "config.json").write_text("[1]")
    with rejects(str(tmp_path / "config.json")):
        specs_of(tmp_path)
    with pytest.raises(OSError, match="nowhere"):
        specs_of(tmp_path / "nowhere" / "config.json")


def test_spec_command_separates_t5_layers(tmp_path, capsys):
    """`mha-parity spec` prints encoder, decoder and cross-attention of T5 separately."""
    values = transformers.T5Config(num_layers=3, num_decoder_layers=2).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["spec", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for title in (
        "t5, encoder, layers 0 to 2 of 3: full_attention, not causal",
        "t5, decoder, layers 0 to 1 of 2: full_attention",
        "t5, decoder, layers 0 to 1 of 2: cross_attention",
    ):
        assert title in out


def test_spec_command_prints_layer_kinds(tmp_path, capsys):
    """`mha-parity spec` prints each kind of Gemma 3's layers and writes their specs to JSON; a
    missing part exits with 2 and lists the available one.
    """
    values = transformers.Gemma3TextConfig(num_hidden_layers=7).to_dict()
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": values})
    )
    assert (
        main(["spec", str(tmp_path), "--part", "text_config", "--json", str(tmp_path / "s.json")])
        == 0
    )
    out = capsys.readouterr().out
    assert "gemma3_text, layers 0 to 4, 6 of 7: sliding_attention" in out
    assert "gemma3_text, layer 5 of 7: full_attention" in out
    assert "query_pre_attn_scalar ** -0.5" in out
    assert (
        " rope_parameters.sliding_attention.rope_theta " in out
    )  # in one piece, while others are wrapped
    (_, _, _, _, _, full, _) = json.loads((tmp_path / "s.json").read_text())["layers"]
    assert AttentionSpec.from_json(json.dumps(full["spec"])) == specs_of(values)[5].spec
    assert main(["spec", str(tmp_path), "--part", "vision_config"]) == 2
    message = printed_text(capsys)
    assert "text_config (gemma3_text)" in message
    assert rejects("…", part="vision_config").is_printed_in(message)


def printed_text(capsys):
    """Return the output of a command as one line, whatever the width."""
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_spec_command_prints_every_part(tmp_path, capsys):
    """`mha-parity spec` prints and writes both parts of CLIP; in Python the part must be given."""
    values = transformers.CLIPConfig().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["spec", str(tmp_path), "--json", str(tmp_path / "s.json")]) == 0
    out = printed_text(capsys)
    assert "text_config clip_text_model, layers 0 to 11 of 12: full_attention field" in out
    assert (
        "vision_config clip_vision_model, layers 0 to 11 of 12: full_attention, not causal field"
        in out
    )
    report = json.loads((tmp_path / "s.json").read_text())
    assert [layer["section"] for layer in report["layers"]] == ["text_config"] * 12 + [
        "vision_config"
    ] * 12
    assert not report["not_read"]
    for part in ("text_config", "vision_config"):
        assert specs_of(values, part=part) == specs_of(values[part])
        assert specs_of(tmp_path, part=part) == specs_of(values[part])
    with rejects("part", part=None):
        specs_of(values)


QWEN2_VL = transformers.Qwen2VLConfig().to_dict()
WITH_PICTURES = {  # the configuration of the part as written now, before, and at first
    "now": QWEN2_VL,
    "before": {
        **QWEN2_VL,
        "vision_config": {**QWEN2_VL["vision_config"], "model_type": "qwen2_vl"},
    },
    "at first": {
        **QWEN2_VL["text_config"],
        "model_type": "qwen2_vl",
        "vision_config": {"depth": 32, "embed_dim": 1280},
    },
}


@pytest.mark.parametrize("dialect", WITH_PICTURES)
def test_spec_command_names_unread_parts(dialect, tmp_path, capsys):
    """`mha-parity spec` reads Qwen2-VL's text and names the
    vision part as not read, with the reason.
    """
    (tmp_path / "config.json").write_text(json.dumps(WITH_PICTURES[dialect]))
    assert main(["spec", str(tmp_path), "--json", str(tmp_path / "s.json")]) == 0
    out = printed_text(capsys)
    assert "layers 0 to 79 of 80: full_attention" in out
    why = (
        "model_type 'qwen2_vl_vision' is not covered: its attention rotates by positions on two "
        "or three axes"
    )
    assert f"vision_config not read: {why}" in out
    report = json.loads((tmp_path / "s.json").read_text())
    assert why in report["not_read"]["vision_config"]
    assert [layer["spec"] for layer in report["layers"]] == [
        layer.to_dict()["spec"] for layer in specs_of(QWEN2_VL["text_config"])
    ]
    assert main(["spec", str(tmp_path), "--part", "vision_config"]) == 2
    assert why in printed_text(capsys)


def test_spec_command_names_unread_layers(tmp_path, capsys):
    """`mha-parity spec` names layers of a model outside of its
    parts as not read, with the reason.
    """
    (tmp_path / "config.json").write_text(json.dumps(transformers.CsmConfig().to_dict()))
    assert main(["spec", str(tmp_path)]) == 0
    out = printed_text(capsys)
    assert "depth_decoder_config csm_depth_decoder_model, layers 0 to 3 of 4: full_attention" in out
    assert (
        "csm not read: model_type 'csm' is not covered: its attention is outside the parts of "
        "its model" in out
    )
