"""Clipped projections, some biases, gates and values of a different width, as in released modules
of transformers.
"""

from functools import partial

from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperAttention

from helpers.released import Released, made, plain_spec
from mha_spec import AttentionSpec, Gate, Norm, Rope

GATED = {"head_dim": 16, "rms_norm_eps": 0.01}
NORMED_AND_GATED = partial(plain_spec, head_dim=16, gate=Gate())


def whisper(family, prefix, spec, *, is_decoder, **others):
    """Return a layer with other names in its configuration."""
    config = WhisperConfig(d_model=32)
    config._attn_implementation = "eager"
    return Released(
        WhisperAttention(32, 4, is_decoder=is_decoder, layer_idx=0, config=config), spec, **others
    )


def unpacked(weights):
    """Return the queries and the gate, which Qwen3-Next packs head by head."""
    queries, gate = weights["q_proj.weight"].reshape(4, 2, 16, 32).unbind(1)
    return weights | {
        "q_proj.weight": queries.flatten(0, 1),
        "gate_proj.weight": gate.flatten(0, 1),
    }


def afmoe(layer_type):
    rope = Rope() if layer_type == "sliding_attention" else None  # other layers do not rotate
    options = {**GATED, "layer_types": [layer_type], "sliding_window": 64}
    return partial(
        made, "afmoe", "Afmoe", NORMED_AND_GATED(qk_norm=Norm(eps=0.01), rope=rope), options=options
    )


def mimo(features):
    """Return a layer whose values differ in width from keys, and a factor, which v_proj contains
    in ours.
    """
    return partial(
        made,
        "mimo_v2_flash",
        "MiMoV2Flash",
        plain_spec(head_dim=16, value_head_dim=features, rope=Rope(rotary_dim=8)),
        {"partial_rotary_factor": 0.5},
        layer_type="full_attention",
        options={"head_dim": 16, "v_head_dim": features, "attention_value_scale": 0.707},
        repacked=lambda weights: weights | {"v_proj.weight": weights["v_proj.weight"] * 0.707},
    )


WHISPER = partial(whisper, "whisper", "Whisper", AttentionSpec(32, 4, qkv_bias=(True, False, True)))
LAYERS = {
    "OLMo": partial(made, "olmo", "Olmo", plain_spec(clip_qkv=0.75), options={"clip_qkv": 0.75}),
    "Whisper": partial(WHISPER, is_decoder=True),
    "Qwen3-Next": partial(
        made,
        "qwen3_next",
        "Qwen3Next",
        NORMED_AND_GATED(qk_norm=Norm(weight="1+w", eps=0.01)),
        options={**GATED, "layer_types": ["full_attention"]},
        repacked=unpacked,
    ),
    "AFMoE, sliding": afmoe("sliding_attention"),
    "AFMoE": afmoe("full_attention"),
    "MiMo-V2": mimo(12),
    "MiMo-V2, wide values": mimo(20),
}
