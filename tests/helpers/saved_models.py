"""Models of transformers saved in folders."""

import torch
import transformers

from helpers.families import MODELS
from helpers.released_models import SMALL, Model, draw

SIZES = SMALL | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 8,
}
SIZES |= {
    "head_dim": 8,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "v_head_dim": 12,
    "ffn_dim": 24,
}
SIZES |= {"kv_lora_rank": 8, "q_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
SIZES |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4) | {
    "num_experts_per_tok": 2
}
SIZES |= dict.fromkeys(
    ("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1
)
SIZES |= {
    "shared_expert_intermediate_size": 8,
    "intermediate_size_mlp": 16,
    "expert_ffn_hidden_size": 8,
}
SIZES |= {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OWN = {  # additional options of some families
    "qwen2_vl_text": {"rope_parameters": SECTIONS},
    "qwen3_vl_text": {"rope_parameters": SECTIONS},
    "phi3": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
    "glm4_moe": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
}
APART = {
    "qwen2_vl",
    "qwen2_5_vl",
}  # default images need gigabytes; the text part is a separate family


def decoder(family):
    """Return a small model of a family of decoders, with some layers of each kind."""
    values = transformers.AutoConfig.for_model(family).to_dict()
    options = {name: value for name, value in SIZES.items() if name in values and name not in SMALL}
    if "kv_lora_rank" in values:
        options["num_key_value_heads"] = 4
        options.pop("head_dim", None)  # the width of RoPE in some families, and of keys in others
    if values.get("layer_types"):
        options |= {"num_hidden_layers": 6, "layer_types": values["layer_types"][:6]}
    options |= {
        name: None for name in ("no_rope_layers", "moe_layers", "mlp_layer_types") if name in values
    }
    return Model(family, options | OWN.get(family, {}), dtype=torch.float32)


def saved(name, folder):
    """Save a float32 model in a folder; return its description and the model."""
    model = MODELS.get(name) or decoder(name)
    config = model.config()
    config._attn_implementation = model.attention
    released = model.made(config)
    draw(released.float().eval())
    released.save_pretrained(folder)
    return model, released
