"""Clipped projections, biases of some, gates of the context: as in the released modules of transformers."""

import importlib

import pytest
import torch
from released_norms import causal, check_equal, drawn, made, renamed, rotary

from mha_spec import AttentionSpec, Gate, Norm, Rope

O_PROJ = {"o_proj": "out_proj"}


@pytest.fixture
def x():
    return torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(3))


def test_olmo_clips_what_the_projections_give(x):
    sizes: dict = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    theta: dict = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    module, settings = made("olmo", "OlmoAttention", "OlmoConfig", clip_qkv=0.75, **sizes, **theta)
    tables = rotary("olmo", "OlmoRotaryEmbedding", settings, x)
    spec = AttentionSpec(48, 4, num_kv_heads=2, qkv_bias=False, out_bias=False, clip_qkv=0.75, rope=Rope(10000.0))
    check_equal(
        lambda x: module(x, position_embeddings=tables, attention_mask=causal(x.shape[1]))[0],
        module,
        spec,
        lambda parameters: renamed(parameters, O_PROJ),
        x,
    )


@pytest.mark.parametrize("is_causal", [False, True], ids=["encoder", "decoder"])
def test_whisper_has_a_bias_of_q_and_v_and_none_of_k(x, is_causal):
    attention = importlib.import_module("transformers.models.whisper.modeling_whisper").WhisperAttention
    config = importlib.import_module("transformers.models.whisper").WhisperConfig(d_model=48)
    config._attn_implementation = "eager"
    module = drawn(attention(48, 4, is_decoder=is_causal, layer_idx=0, config=config))
    mask = causal(x.shape[1]) if is_causal else None
    check_equal(
        lambda x: module(x, attention_mask=mask)[0],
        module,
        AttentionSpec(48, 4, qkv_bias=(True, False, True)),
        dict,
        x,
        is_causal=is_causal,
    )


GATED = {"head_dim": 16, "rms_norm_eps": 0.01, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
BARE = {"num_kv_heads": 2, "head_dim": 16, "qkv_bias": False, "out_bias": False, "gate": Gate()}


def test_qwen3_next_packs_the_gate_with_the_queries(x):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    options = {**GATED, "rope_parameters": rope, "layer_types": ["full_attention"], "num_hidden_layers": 1}
    module, settings = made("qwen3_next", "Qwen3NextAttention", "Qwen3NextConfig", **options)
    tables = rotary("qwen3_next", "Qwen3NextRotaryEmbedding", settings, x)

    def weights_of(parameters):
        held = renamed(parameters, O_PROJ)
        queries, gate = held["q_proj.weight"].reshape(4, 2, 16, 48).unbind(1)
        return {**held, "q_proj.weight": queries.flatten(0, 1), "gate_proj.weight": gate.flatten(0, 1)}

    check_equal(
        lambda x: module(x, position_embeddings=tables, attention_mask=causal(x.shape[1]))[0],
        module,
        AttentionSpec(48, 4, rope=Rope(10000.0), qk_norm=Norm(weight="1+w", eps=0.01), **BARE),
        weights_of,
        x,
    )


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
def test_afmoe_has_a_gate_of_its_own(x, layer_type):
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    options = {**GATED, **theta, "layer_types": [layer_type], "num_hidden_layers": 1, "sliding_window": 64}
    module, settings = made("afmoe", "AfmoeAttention", "AfmoeConfig", **options)
    tables = rotary("afmoe", "AfmoeRotaryEmbedding", settings, x)
    rope = Rope(10000.0) if layer_type == "sliding_attention" else None  # the others do not turn
    check_equal(
        lambda x: module(x, position_embeddings=tables, attention_mask=causal(x.shape[1]))[0],
        module,
        AttentionSpec(48, 4, rope=rope, qk_norm=Norm(eps=0.01), **BARE),
        lambda parameters: renamed(parameters, O_PROJ),
        x,
    )
