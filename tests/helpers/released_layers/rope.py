"""Layers with RoPE as in released models, compared forward and backward, and token by token."""

from functools import partial

from helpers.released import made, plain_spec
from mha_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Norm,
    ProportionalScaling,
    Rope,
    YarnScaling,
)

FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 2.0, 5.0, 9.0]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 8}
PHI3 = {"max_position_embeddings": 32, "original_max_position_embeddings": 8, "pad_token_id": 0}
NORMS = {"qk_norm": Norm(), "head_dim": 16}  # additional features of the layers
llama = partial(made, "llama", "Llama", options={"max_position_embeddings": 8})
phi3 = partial(made, "phi3", "Phi3", options=PHI3)


def rotated(rope, **others):
    return plain_spec(rope=rope, **others)


LAYERS = {
    "Llama": partial(llama, rotated(Rope(5e5)), {"rope_theta": 5e5}),
    "Llama, linear": partial(
        llama, rotated(Rope(scaling=LinearScaling(4.0))), {"rope_type": "linear", "factor": 4.0}
    ),
    "Llama, dynamic": partial(
        llama,
        rotated(Rope(scaling=DynamicScaling(4.0, 8))),
        {"rope_type": "dynamic", "factor": 4.0},
    ),
    "Llama 3": partial(
        llama,
        rotated(Rope(5e5, scaling=Llama3Scaling(8.0, 64))),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "Llama, YaRN": partial(
        llama,
        rotated(Rope(scaling=YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.5))),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    ),
    "GPT-NeoX": partial(
        made,
        "gpt_neox",
        "GPTNeoX",
        rotated(Rope(rotary_dim=2), num_kv_heads=4, qkv_bias=True, out_bias=True),
        {"partial_rotary_factor": 0.25},
    ),
    "GLM": partial(
        made,
        "glm",
        "Glm",
        rotated(Rope(rotary_dim=8, pairs="interleaved"), head_dim=16, qkv_bias=True),
        {"partial_rotary_factor": 0.5},
        options={"head_dim": 16, "pad_token_id": 0, "attention_bias": True},
    ),
    "Cohere": partial(made, "cohere", "Cohere", rotated(Rope(pairs="interleaved"))),
    "Phi-3": partial(
        phi3,
        rotated(Rope(scaling=LongRopeScaling(4.0, 8, (1.0, 1.2, 1.5, 2.0), (1.0, 2.0, 5.0, 9.0)))),
        {**LONGROPE, **FACTORS},
    ),
    "Phi-4-mini": partial(
        phi3,
        rotated(Rope(scaling=LongRopeScaling(4.0, 8, (1.0, 1.5), (1.0, 5.0)), rotary_dim=4)),
        {
            **LONGROPE,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [1.0, 5.0],
        },
    ),
    "Qwen2-VL": partial(
        made,
        "qwen2_vl",
        "Qwen2VL",
        rotated(Rope(1e6, sections=(2, 1, 1)), qkv_bias=True),
        {"rope_theta": 1e6, "mrope_section": [2, 1, 1]},
    ),
    "Qwen3-VL": partial(
        made,
        "qwen3_vl",
        "Qwen3VL",
        rotated(Rope(5e6, sections=(4, 2, 2), section_order="interleaved"), **NORMS),
        {"rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        options={"head_dim": 16},
    ),
    "gpt-oss": partial(
        made,
        "gpt_oss",
        "GptOss",
        rotated(
            Rope(150000.0, scaling=YarnScaling(32.0, 64, truncate=False)),
            qkv_bias=True,
            out_bias=True,
            sinks=True,
        ),
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        options={"head_dim": 8, "attention_bias": True, "layer_types": ["full_attention"]},
    ),
    "Gemma 4": partial(
        made,
        "gemma4",
        "Gemma4",
        rotated(
            Rope(1e6, scaling=ProportionalScaling(0.25)),
            scale=1.0,
            v_norm=Norm(weight=None),
            **NORMS,
        ),
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        layer_type="full_attention",
        options={
            "head_dim": 16,
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0,
        },
        keywords={"shared_kv_states": {}},
    ),
}
