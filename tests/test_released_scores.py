"""What released models do between the projections and the softmax: our layers of the same specification agree."""

from functools import partial

import pytest
import torch
from released import Released, check_decode, check_forward, check_gradients
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2Config, Gemma2RotaryEmbedding
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextConfig

from mha_spec import AttentionSpec, Rope

SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "eager",
}
SPEC = partial(AttentionSpec, 48, 4, num_kv_heads=2, head_dim=8, qkv_bias=False, out_bias=False, rope=Rope(10000.0))


def gemma2() -> Released:
    config = Gemma2Config(**SIZES, attn_logit_softcapping=1.5, query_pre_attn_scalar=3, sliding_window=None)
    spec = SPEC(scale=3.0**-0.5, soft_cap=1.5)
    return Released(Gemma2Attention(config, layer_idx=1), spec, Gemma2RotaryEmbedding(config))


def gemma2_sliding() -> Released:
    config = Gemma2Config(**SIZES, attn_logit_softcapping=1.5, query_pre_attn_scalar=3, sliding_window=3)
    spec = SPEC(scale=3.0**-0.5, soft_cap=1.5, window_size=3)
    layer = Gemma2Attention(config, layer_idx=0)
    return Released(layer, spec, Gemma2RotaryEmbedding(config), sees=sliding_window_causal_mask_function(3))


def llama4_chunked() -> Released:
    config = Llama4TextConfig(
        **SIZES, num_hidden_layers=1, use_qk_norm=False, no_rope_layers=[0], attn_temperature_tuning=False
    )
    layer = Llama4TextAttention(config, layer_idx=0)
    return Released(
        layer,
        SPEC(chunk_size=4, rope=None),
        lambda x, positions: None,
        sees=chunked_causal_mask_function(4, NO_PADDING),
    )


LAYERS = {"Gemma 2": gemma2, "Gemma 2, sliding": gemma2_sliding, "Llama 4, chunked": llama4_chunked}
NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.fixture(params=LAYERS, scope="module")
def released(request):
    return LAYERS[request.param]()


def test_the_output_is_that_of_the_released_layer(sibling, released):
    check_forward(sibling, released)


def test_the_gradients_are_those_of_the_released_layer(released):
    check_gradients(released)


def test_token_by_token_it_is_the_same(sibling, released):
    check_decode(sibling, released)
