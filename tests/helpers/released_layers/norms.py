"""Norms of queries, keys and values, as in the released modules of transformers."""

from functools import partial

import torch

from helpers.released import made, plain_spec
from mha_spec import AttentionSpec, Norm, Rope

RMS = {"rms_norm_eps": 0.01}
WIDE = {"head_dim": 16, **RMS}
LAYER = {"qk_layernorm": True, "layer_norm_eps": 0.01}
SHARED = {**WIDE, "num_kv_shared_layers": 0}
GLOBAL = {**SHARED, "global_head_dim": 16, "num_global_key_value_heads": 2}


def normed(**norm):
    return plain_spec(head_dim=16, qk_norm=Norm(eps=0.01, **norm))


def stacked(weights):
    """Return one norm for all heads instead of one per head."""
    stacked_weights = {name: weight for name, weight in weights.items() if ".norms." not in name}
    for letter in "qk":
        own = [
            weight for name, weight in weights.items() if name.startswith(f"{letter}_norm.norms.")
        ]
        stacked_weights[f"{letter}_norm.weight"] = torch.stack(own)
    return stacked_weights


V_NORMED = plain_spec(
    head_dim=16, scale=1.0, qk_norm=Norm(eps=0.01), v_norm=Norm(weight=None, eps=0.01)
)
PER_HEAD = Norm("layer", per_head=True, eps=0.01)
WITH_BIAS = partial(AttentionSpec, 32, 4, rope=Rope(), qk_norm=Norm("layer", bias=True, eps=0.01))
LAYERS = {
    "Qwen3": partial(made, "qwen3", "Qwen3", normed(), options=WIDE),
    "OLMo 2": partial(
        made, "olmo2", "Olmo2", plain_spec(qk_norm=Norm(over="width", eps=0.01)), options=RMS
    ),
    "HunYuan": partial(
        made, "hunyuan_v1_dense", "HunYuanDenseV1", normed(after_rope=True), options=WIDE
    ),
    "Phi": partial(made, "phi", "Phi", WITH_BIAS(num_kv_heads=2), options=LAYER),
    "Gemma 3": partial(
        made,
        "gemma3",
        "Gemma3",
        plain_spec(head_dim=16, scale=0.5, qk_norm=Norm(weight="1+w", eps=0.01)),
        layer_type="sliding_attention",
        options={**WIDE, "query_pre_attn_scalar": 4},
    ),
    "Gemma 3n": partial(
        made, "gemma3n", "Gemma3n", V_NORMED, layer_type="sliding_attention", options=SHARED
    ),
    "Gemma 4": partial(
        made,
        "gemma4",
        "Gemma4",
        V_NORMED,
        layer_type="full_attention",
        options=GLOBAL,
        keywords={"shared_kv_states": {}},
    ),
    "Llama 4": partial(
        made,
        "llama4",
        "Llama4",
        plain_spec(
            head_dim=16,
            rope=Rope(pairs="interleaved"),
            qk_norm=Norm(weight=None, after_rope=True, eps=0.01),
        ),
        options=WIDE,
    ),
    "Command R+": partial(
        made,
        "cohere",
        "Cohere",
        plain_spec(rope=Rope(pairs="interleaved"), qk_norm=PER_HEAD),
        options={"use_qk_norm": True, "layer_norm_eps": 0.01},
    ),
    "StableLM": partial(
        made, "stablelm", "StableLm", plain_spec(qk_norm=PER_HEAD), options=LAYER, repacked=stacked
    ),
    "Persimmon": partial(made, "persimmon", "Persimmon", WITH_BIAS(), options=LAYER),
}
