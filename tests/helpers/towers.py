"""Small vision towers whose RoPE has several axes."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from mha_spec import Rope

GRID = torch.tensor([[1, 4, 6]])
"""One image with 4 rows and 6 columns of patches."""
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
}
DEPTH = {"hidden_size": 64, "num_heads": 4, "depth": 1}
OWN = Rope(sections=(4, 4), section_frequencies="own")
TOWERS = {
    "qwen2_vl": (
        *("Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel"),
        {**DEPTH, "embed_dim": 64, "patch_size": 4, "mlp_ratio": 2},
        {"hidden_states": (24, 96), "grid_thw": GRID},
        OWN,
    ),
    "qwen2_5_vl": (
        *("Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
        {
            **DEPTH,
            "intermediate_size": 32,
            "patch_size": 4,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [],
        },
        {"hidden_states": (24, 96), "grid_thw": GRID},
        OWN,
    ),
    "pixtral": (
        *("PixtralVisionConfig", "PixtralVisionModel"),
        {**SIZES, "image_size": 64, "patch_size": 8},
        {"pixel_values": (1, 3, 32, 48)},
        OWN.replace(section_frequencies="strided"),
    ),
    "llama4": (
        *("Llama4VisionConfig", "Llama4VisionModel"),
        {
            **SIZES,
            "intermediate_size": 256,
            "image_size": 32,
            "patch_size": 8,
            "projector_input_dim": 64,
        }
        | {"projector_output_dim": 64, "vision_output_dim": 64},
        {"pixel_values": (2, 3, 32, 32)},
        OWN.replace(pairs="interleaved"),
    ),
    "kimi_k25": (
        *("Kimi_K25VisionConfig", "Kimi_K25VisionModel"),
        {**SIZES, "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8},
        {"pixel_values": (24, 3, 4, 4), "grid_thw": GRID},
        OWN.replace(section_order="interleaved"),
    ),
    "minimax_m3_vl": (
        *("MiniMaxM3VLVisionConfig", "MiniMaxM3VLVisionModel"),
        {**SIZES, "image_size": 32, "patch_size": 4},
        {"pixel_values": (48, 96), "grid_thw": torch.tensor([[2, 4, 6]])},
        Rope(rotary_dim=12, sections=(2, 2, 2), section_frequencies="own"),
    ),
    "muse_spark": (
        *("MuseSparkVisionConfig", "MuseSparkVisionModel"),
        {**SIZES, "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8},
        {"pixel_values": (24, 96), "grid_thw": GRID},
        OWN,
    ),
    "sam3": (
        *("Sam3ViTConfig", "Sam3ViTModel"),
        {**SIZES, "image_size": 32, "pretrain_image_size": 32, "patch_size": 8, "window_size": 4},
        {"pixel_values": (2, 3, 32, 32)},
        OWN.replace(pairs="interleaved"),
    ),
}
"""Vision towers: configuration, model, options, inputs or their shapes, and their RoPE."""
OTHERS = {
    "gemma4": (
        *("Gemma4VisionConfig", "Gemma4VisionModel"),
        {
            **SIZES,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 32,
        }
        | {"pooling_kernel_size": 1},
        {
            "pixel_values": (2, 24, 48),
            "pixel_position_ids": torch.stack([torch.arange(24) % 6, torch.arange(24) // 6], -1)[
                None
            ].repeat(2, 1, 1),
        },
        "no pairs that turn",
    ),
    "dinov3_vit": (
        *("DINOv3ViTConfig", "DINOv3ViTModel"),
        {**SIZES, "image_size": 32, "patch_size": 8},
        {"pixel_values": (2, 3, 32, 32)},
        "pairs that turn by other angles",
    ),
    "vjepa2": (
        *("VJEPA2Config", "VJEPA2Model"),
        {
            "hidden_size": 96,
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "crop_size": 32,
            "patch_size": 8,
        }
        | {
            "frames_per_clip": 4,
            "pred_hidden_size": 96,
            "pred_num_attention_heads": 4,
            "pred_num_hidden_layers": 1,
        },
        {"pixel_values_videos": (2, 4, 3, 32, 32)},
        "no pairs that turn",
    ),
}
"""Towers whose rotation no field describes, and the reasons."""


def small_tower(name: str, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a small tower with random weights, in evaluation, and inputs."""
    config, model, known, inputs, _ = {**TOWERS, **OTHERS}[name]
    torch.manual_seed(0)
    of_config, of_model = (
        importlib.import_module(f"transformers.models.{name}.{kind}_{name}")
        for kind in ("configuration", "modeling")
    )
    config = getattr(of_config, config)(**known, **options)
    config._attn_implementation = "eager"
    arguments = {name: torch.randn(x) if isinstance(x, tuple) else x for name, x in inputs.items()}
    return getattr(of_model, model)(config).eval(), arguments
