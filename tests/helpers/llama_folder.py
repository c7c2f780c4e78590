"""A folder with a Llama of two layers."""

import json

import numpy as np
from safetensors.numpy import save_file

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
}


def make_model(folder):
    """Write a Llama of two layers."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    names = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in "qkvo"]
    save_file(
        {name: rng.standard_normal((8, 8)).astype(np.float32) for name in names},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(LLAMA))
