"""Norms of queries, keys and values, as in the released modules of transformers."""

from dataclasses import dataclass, field

import pytest
import torch
from released_norms import causal, check_equal, half_split, made, renamed, rotary

from mha_spec import AttentionSpec, Norm, Rope

SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
WHOLE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}
LAYERNORMS = {"q_layernorm": "q_norm", "k_layernorm": "k_norm", "dense": "out_proj"}
O_PROJ = {"o_proj": "out_proj"}


@dataclass(frozen=True)
class Model:
    """A released module, and what it is in our words."""

    family: str
    name: str
    spec: dict
    config: str = ""
    options: dict = field(default_factory=dict)
    names: dict = field(default_factory=lambda: O_PROJ)


def plain(**others):
    return {"qkv_bias": False, "out_bias": False, "num_kv_heads": 2, "rope": Rope(10000.0), **others}


MODELS = {
    "qwen3": Model(
        "qwen3", "Qwen3", plain(head_dim=16, qk_norm=Norm(eps=0.01)), options={"head_dim": 16, "rms_norm_eps": 0.01}
    ),
    "olmo2": Model("olmo2", "Olmo2", plain(qk_norm=Norm(over="width", eps=0.01)), options={"rms_norm_eps": 0.01}),
    "hunyuan": Model(
        "hunyuan_v1_dense",
        "HunYuanDenseV1",
        plain(head_dim=16, qk_norm=Norm(after_rope=True, eps=0.01)),
        options={"head_dim": 16, "rms_norm_eps": 0.01},
        names={**O_PROJ, "query_layernorm": "q_norm", "key_layernorm": "k_norm"},
    ),
    "phi": Model(
        "phi",
        "Phi",
        {"num_kv_heads": 2, "rope": Rope(10000.0), "qk_norm": Norm("layer", bias=True, eps=0.01)},
        options={"qk_layernorm": True, "layer_norm_eps": 0.01, **WHOLE},
        names=LAYERNORMS,
    ),
}


@pytest.fixture
def x():
    return torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_equals_the_released_one(name, x):
    model = MODELS[name]
    options = {**SIZES, **THETA, **model.options}
    module, settings = made(model.family, f"{model.name}Attention", f"{model.name}Config", **options)
    tables = rotary(model.family, f"{model.name}RotaryEmbedding", settings, x)
    check_equal(
        lambda x: module(x, position_embeddings=tables, attention_mask=causal(x.shape[1]))[0],
        module,
        AttentionSpec(48, 4, **model.spec),
        lambda parameters: renamed(parameters, model.names),
        x,
    )


def test_gemma_3_multiplies_by_one_plus_w(x):
    options = {"head_dim": 16, "query_pre_attn_scalar": 4, "rms_norm_eps": 0.01, "num_hidden_layers": 6, **SIZES}
    module, settings = made("gemma3", "Gemma3Attention", "Gemma3TextConfig", **options)
    tables = rotary("gemma3", "Gemma3RotaryEmbedding", settings, x, "sliding_attention")
    spec = AttentionSpec(48, 4, **plain(head_dim=16, scale=0.5, qk_norm=Norm(weight="1+w", eps=0.01)))
    check_equal(
        lambda x: module(x, position_embeddings=tables, attention_mask=causal(x.shape[1]))[0],
        module,
        spec,
        lambda parameters: renamed(parameters, O_PROJ),
        x,
    )


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_gemma_3n_and_4_normalise_values(family, x):
    kind = {"gemma3n": "Gemma3n", "gemma4": "Gemma4"}[family]
    options = {"head_dim": 16, "rms_norm_eps": 0.01, "num_hidden_layers": 2, "num_kv_shared_layers": 0, **SIZES}
    options["layer_types"] = ["sliding_attention", "full_attention"]
    module, settings = made(family, f"{kind}TextAttention", f"{kind}TextConfig", **options)
    rotary_name = {"gemma3n": "Gemma3nRotaryEmbedding", "gemma4": "Gemma4TextRotaryEmbedding"}[family]
    tables = rotary(family, rotary_name, settings, x, "sliding_attention")
    norm = Norm(eps=0.01)
    spec = AttentionSpec(48, 4, **plain(head_dim=16, scale=1.0, qk_norm=norm, v_norm=Norm(weight=None, eps=0.01)))
    check_equal(
        lambda x: module(x, position_embeddings=tables, attention_mask=causal(x.shape[1]), shared_kv_states={})[0],
        module,
        spec,
        lambda parameters: renamed(parameters, O_PROJ),
        x,
    )


def test_llama_4_normalises_without_weights_after_rope(x):
    options = {"head_dim": 16, "rms_norm_eps": 0.01, "num_hidden_layers": 4, **SIZES, **THETA}
    module, settings = made("llama4", "Llama4TextAttention", "Llama4TextConfig", **options)
    turns = rotary("llama4", "Llama4TextRotaryEmbedding", settings, x)

    def weights_of(parameters):
        held = renamed(parameters, O_PROJ)
        return {name: half_split(w, 16) if name[0] in "qk" else w for name, w in held.items()}

    check_equal(
        lambda x: module(x, position_embeddings=turns, attention_mask=causal(x.shape[1]))[0],
        module,
        AttentionSpec(48, 4, **plain(head_dim=16, qk_norm=Norm(weight=None, after_rope=True, eps=0.01))),
        weights_of,
        x,
    )


def test_command_r_plus_has_weights_for_each_head(x):
    options = {"use_qk_norm": True, "layer_norm_eps": 0.01, **SIZES, **THETA}
    module, settings = made("cohere", "CohereAttention", "CohereConfig", **options)
    tables = rotary("cohere", "CohereRotaryEmbedding", settings, x)

    def weights_of(parameters):
        held = renamed(parameters, O_PROJ)
        for name, w in held.items():
            if "norm" in name:
                held[name] = half_split(w.flatten(), 12).reshape(w.shape)
            elif name[0] in "qk":
                held[name] = half_split(w, 12)
        return held

    check_equal(
        lambda x: module(x, position_embeddings=tables, attention_mask=causal(x.shape[1]))[0],
        module,
        AttentionSpec(48, 4, **plain(qk_norm=Norm("layer", per_head=True, eps=0.01))),
        weights_of,
        x,
    )


def test_stablelm_has_a_norm_for_each_head(x):
    options = {"qk_layernorm": True, "layer_norm_eps": 0.01, **SIZES, **WHOLE}
    module, settings = made("stablelm", "StableLmAttention", "StableLmConfig", **options)
    tables = rotary("stablelm", "StableLmRotaryEmbedding", settings, x)

    def weights_of(parameters):
        held = {name: w for name, w in renamed(parameters, O_PROJ).items() if "layernorm" not in name}
        for each in "qk":
            own = [w for name, w in parameters.items() if name.startswith(f"{each}_layernorm.norms.")]
            held[f"{each}_norm.weight"] = torch.stack(own)
        return held

    check_equal(
        lambda x: module(x, position_embeddings=tables, attention_mask=causal(x.shape[1]))[0],
        module,
        AttentionSpec(48, 4, **plain(qk_norm=Norm("layer", per_head=True, eps=0.01))),
        weights_of,
        x,
    )


def test_persimmon_normalises_what_it_took_from_one_projection(x):
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    options = {"qk_layernorm": True, "layer_norm_eps": 0.01, **sizes, **WHOLE}
    module, settings = made("persimmon", "PersimmonAttention", "PersimmonConfig", **options)
    tables = rotary("persimmon", "PersimmonRotaryEmbedding", settings, x)

    def weights_of(parameters):
        held = renamed(parameters, LAYERNORMS)
        for leaf in ("weight", "bias"):
            packed = held.pop(f"query_key_value.{leaf}")
            parts = packed.reshape(4, 3, 12, *packed.shape[1:]).unbind(1)
            held |= {f"{each}_proj.{leaf}": part.flatten(0, 1) for each, part in zip("qkv", parts, strict=True)}
        return held

    check_equal(
        lambda x: module(x, position_embeddings=tables, attention_mask=causal(x.shape[1]))[0],
        module,
        AttentionSpec(48, 4, rope=Rope(10000.0), qk_norm=Norm("layer", bias=True, eps=0.01)),
        weights_of,
        x,
    )
