"""Multi-head latent attention, compared with the modules released in transformers."""

from dataclasses import replace
from functools import partial

import torch
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention

from helpers.released import Released, made
from mha_spec import AttentionSpec, Latent, Rope, Temperature, YarnScaling

SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
WITH_QUERIES, WITHOUT = {**SIZES, "q_lora_rank": 24}, {**SIZES, "q_lora_rank": None}
LATENT = Latent(20, 8, q_rank=24)
YARN = YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.8)
STRETCHED = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
}
STRETCHED |= {"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.8}
rope = partial(Rope, rotary_dim=8, rotated="last")
neighbours = partial(rope, pairs="interleaved")
spec = partial(AttentionSpec, 32, 4, head_dim=20, value_head_dim=10, qkv_bias=False, out_bias=False)


def kimi_linear():
    """Return a full-attention layer of Kimi Linear, which has no rotary embedding."""
    config = KimiLinearConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, **WITHOUT)
    config._attn_implementation = "eager"
    module = KimiLinearAttention(config, layer_idx=0)
    return Released(module, spec(latent=Latent(20, 8, eps=module.kv_a_layernorm.variance_epsilon)))


LAYERS = {
    "DeepSeek-V2": partial(
        made,
        "deepseek_v2",
        "DeepseekV2",
        spec(latent=LATENT, rope=neighbours(scaling=YARN)),
        STRETCHED,
        options=WITH_QUERIES,
    ),
    "DeepSeek-V2-Lite": partial(
        made,
        "deepseek_v2",
        "DeepseekV2",
        spec(latent=Latent(20, 8), rope=neighbours()),
        options=WITHOUT,
    ),
    "DeepSeek-V3": partial(
        made,
        "deepseek_v3",
        "DeepseekV3",
        spec(latent=LATENT, rope=neighbours(scaling=YARN)),
        STRETCHED,
        options=WITH_QUERIES,
    ),
    "DeepSeek-V3, halves": partial(
        made,
        "deepseek_v3",
        "DeepseekV3",
        spec(latent=LATENT, rope=rope(), qkv_bias=True, out_bias=True),
        options={**WITH_QUERIES, "rope_interleave": False, "attention_bias": True},
    ),
    "GLM-4.7-Lite": partial(
        made,
        "glm4_moe_lite",
        "Glm4MoeLite",
        spec(latent=LATENT, rope=neighbours()),
        options=WITH_QUERIES,
    ),
    "Kimi Linear": kimi_linear,
    "LongCat": partial(
        made,
        "longcat_flash",
        "LongcatFlash",
        spec(
            latent=replace(LATENT, q_factor=(32 / 24) ** 0.5, kv_factor=(32 / 20) ** 0.5),
            rope=neighbours(),
        ),
        options={**WITH_QUERIES, "head_dim": 8},
        kind="MLA",
    ),
    "MiniCPM3": partial(
        made, "minicpm3", "MiniCPM3", spec(latent=LATENT, rope=rope()), options=WITH_QUERIES
    ),
    "Mistral 4": partial(
        made,
        "mistral4",
        "Mistral4",
        spec(latent=LATENT, rope=neighbours(), temperature=Temperature(4, 0.5)),
        {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4},
        options={**WITH_QUERIES, "head_dim": 8},
        keywords={"position_ids": torch.arange(11)[None]},
    ),
    "Youtu": partial(
        made, "youtu", "Youtu", spec(latent=LATENT, rope=neighbours()), options=WITH_QUERIES
    ),
}
