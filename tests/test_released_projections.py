"""Clipped projections, biases of some, gates, values of another width: as in the released modules of transformers."""

import pytest
import torch
from released import Released, check_equal, made, plain_spec
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperAttention

from mha_spec import AttentionSpec, Gate, Norm, Rope


def test_olmo_clips_what_the_projections_give():
    check_equal(made("olmo", "Olmo", plain_spec(clip_qkv=0.75), options={"clip_qkv": 0.75}))


@pytest.mark.parametrize("is_causal", [False, True], ids=["encoder", "decoder"])
def test_whisper_has_a_bias_of_q_and_v_and_none_of_k(is_causal):
    config = WhisperConfig(d_model=32)
    config._attn_implementation = "eager"
    module = WhisperAttention(32, 4, is_decoder=is_causal, layer_idx=0, config=config)
    spec = AttentionSpec(32, 4, qkv_bias=(True, False, True))
    if is_causal:
        check_equal(Released(module, spec))
    else:
        everything = Released(
            module, spec, sees=lambda batch, head, query, key: torch.ones_like(key + query, dtype=torch.bool)
        )
        check_equal(everything, is_causal=False)


GATED = {"head_dim": 16, "rms_norm_eps": 0.01}


def test_qwen3_next_packs_the_gate_with_the_queries():
    def repacked(weights):
        queries, gate = weights["q_proj.weight"].reshape(4, 2, 16, 32).unbind(1)
        return weights | {"q_proj.weight": queries.flatten(0, 1), "gate_proj.weight": gate.flatten(0, 1)}

    spec = plain_spec(head_dim=16, gate=Gate(), qk_norm=Norm(weight="1+w", eps=0.01))
    options = {**GATED, "layer_types": ["full_attention"]}
    check_equal(made("qwen3_next", "Qwen3Next", spec, options=options, repacked=repacked))


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
def test_afmoe_has_a_gate_of_its_own(layer_type):
    rope = Rope() if layer_type == "sliding_attention" else None  # the others do not turn
    spec = plain_spec(head_dim=16, gate=Gate(), qk_norm=Norm(eps=0.01), rope=rope)
    options = {**GATED, "layer_types": [layer_type], "sliding_window": 64}
    check_equal(made("afmoe", "Afmoe", spec, options=options))


@pytest.mark.parametrize("features", [12, 20])
def test_mimo_v2_has_values_of_another_width_than_keys(features):
    """It multiplies them by a number, too: a factor of v_proj to us."""
    spec = plain_spec(head_dim=16, value_head_dim=features, rope=Rope(rotary_dim=8))
    options = {"head_dim": 16, "v_head_dim": features, "attention_value_scale": 0.707}
    check_equal(
        made(
            "mimo_v2_flash",
            "MiMoV2Flash",
            spec,
            {"partial_rotary_factor": 0.5},
            layer_type="full_attention",
            options=options,
            repacked=lambda weights: weights | {"v_proj.weight": weights["v_proj.weight"] * 0.707},
        )
    )
