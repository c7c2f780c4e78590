"""Projections that are clipped, as in the released modules of transformers."""

import pytest
import torch
from released import causal, check_equal, made, renamed, rotary

from mha_spec import AttentionSpec, Rope

O_PROJ = {"o_proj": "out_proj"}


@pytest.fixture
def x():
    return torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(3))


def test_olmo_clips_what_the_projections_give(x):
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
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
