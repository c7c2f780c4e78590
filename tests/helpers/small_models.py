"""Small models of transformers with random weights, their inputs, and changes of their attention
function.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "n_embd": 64,
    "n_head": 8,
    "n_layer": 2,
    "n_positions": 128,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "rotary_dim": 4,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "image_size": 32,
    "patch_size": 8,
}
WITHOUT_RULES = [
    *(
        "nomic_bert",
        "distilbert",
        "bert",
        "roberta",
        "vit",
        "deit",
        "dinov2",
        "beit",
        "ijepa",
        "yolos",
    ),
    *("mpnet", "layoutlm", "roformer"),
]
"""Families whose live modules have no rules, or rules about a larger module."""
IMAGES = {"vit", "deit", "dinov2", "beit", "ijepa", "yolos"}


def small_model(family: str, **options: Any) -> Any:
    """Return a small model of a family with random weights, in evaluation."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family)
    settings = {name: value for name, value in SMALL.items() if hasattr(config, name)}
    if family in IMAGES:
        settings["num_attention_heads"] = 4
    if isinstance(getattr(config, "image_size", None), (list, tuple)):
        settings["image_size"] = [32, 32]
    known = {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("layer_types", "model_type")
    }
    others = ("transformers_version", "out_features", "out_indices", "stage_names")
    known = {name: value for name, value in known.items() if name.lstrip("_") not in others}
    model = AutoModel.from_config(
        type(config)(**{**known, **settings, **options}), attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # so that weights of norms and biases have an effect
            parameter.data = torch.randn(parameter.shape) * 0.3 + (
                1.0 if parameter.data.mean() > 0.5 else 0.0
            )
    return model


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family in IMAGES:
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    return {"input_ids": torch.randint(1, 90, (3, 24), generator=generator)}


def in_attention(change: Any) -> Any:
    """Change what the attention function receives or returns."""

    def inject(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module(type(model).__module__)
        original = module.eager_attention_forward

        def odd(
            layer: nn.Module, q: Any, k: Any, v: Any, mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            return change(lambda *heads: original(layer, *heads, *args, **kwargs), q, k, v, mask)

        monkeypatch.setattr(module, "eager_attention_forward", odd)

    return inject
