"""RoPE as in released models: their tables, their layers, forward and backward, and token by
token.
"""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.released import NEAR, check_equal, check_near, positions_of
from helpers.released_layers.rope import LAYERS
from helpers.samples import sample
from transformers import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import mha_torch
from mha_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from parity import load_into

# ---- Tables --------------------------------------------------------------------------------------

SHORT, LONG = [1.0 + i / 10 for i in range(64)], [1.0 + i for i in range(64)]
TABLES = {
    "linear": (LinearScaling(8.0), {"factor": 8.0}),
    "dynamic": (DynamicScaling(4.0, 4096), {"factor": 4.0}),
    "llama3": (
        Llama3Scaling(32.0, 8192, 1.0, 4.0),
        {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (YarnScaling(4.0, 32768), {"factor": 4.0, "original_max_position_embeddings": 32768}),
    "yarn, gpt-oss": (
        YarnScaling(32.0, 4096, truncate=False),
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "yarn, DeepSeek": (
        YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=1.0),
        {
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
    ),
    "yarn, betas": (
        YarnScaling(2.0, 1024, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
        {
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
    ),
    "longrope": (
        LongRopeScaling(32.0, 4096, tuple(SHORT), tuple(LONG)),
        {
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "short_factor": SHORT,
            "long_factor": LONG,
        },
    ),
    "longrope, given": (
        LongRopeScaling(32.0, 4096, tuple(SHORT), tuple(LONG), attention_factor=1.5),
        {
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "short_factor": SHORT,
            "long_factor": LONG,
            "attention_factor": 1.5,
        },
    ),
    "proportional": (
        ProportionalScaling(0.25, 8.0),
        {"factor": 8.0, "partial_rotary_factor": 0.25},
    ),
}


def nearest_power(exponents: torch.Tensor, base: float) -> torch.Tensor:
    return (torch.tensor(base, dtype=torch.float32).double() ** exponents.double()).float()


@sample(12)
@pytest.mark.parametrize("length", [100, 4096, 4097, 131072])
@pytest.mark.parametrize("theta", [1e4, 5e5, 123456.0])
@pytest.mark.parametrize("name", TABLES)
def test_frequencies_match_transformers(name, theta, length, monkeypatch):
    """Frequencies equal transformers' with correctly rounded powers, bit for bit, and those
    of PyTorch's powers within two units in the last place.
    """
    scaling, parameters = TABLES[name]
    kind = scaling.kind
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    released, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    monkeypatch.setattr(torch.Tensor, "__rpow__", nearest_power)
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    rope = Rope(theta, scaling=scaling)

    assert rope.attention_factor == pytest.approx(factor, rel=1e-15)
    np.testing.assert_array_equal(rope.frequencies(128, length), expected.numpy())
    # PyTorch's power is off by one unit in one case of a hundred, of which a reciprocal can make
    # two units.
    unlike = np.abs(rope.frequencies(128, length).view(np.int32) - released.numpy().view(np.int32))
    assert unlike.max() <= 2
    assert np.count_nonzero(unlike > 1) <= 1


def test_partial_rope_matches_transformers():
    """Frequencies of a partial rotation equal transformers' within one unit in the last place."""
    parameters = {
        "rope_type": "linear",
        "rope_theta": 1e4,
        "factor": 2.0,
        "partial_rotary_factor": 0.25,
    }
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, rope_parameters=parameters
    )
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](config, "cpu")
    actual = Rope(scaling=LinearScaling(2.0), rotary_dim=32).frequencies(128)
    np.testing.assert_array_max_ulp(actual, expected.numpy(), maxulp=1)


# ---- Layers --------------------------------------------------------------------------------------

# Released layers compute frequencies and angles in float32, even with float64 weights: at the
# positions here, to 24, a frequency that is a few roundings off (6e-8 each) moves an angle by less
# than NEAR.


@sample(name=["Qwen3-VL"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_the_released_one(name):
    """Output, gradients and cached steps equal the released layer's, also beyond the original
    length.
    """
    released = LAYERS[name]()
    assert released.spec.rope is not None
    depends_on_length = released.spec.rope.depends_on_length
    # The original length, and more. For other layers fewer tokens are a prefix of more: none
    # attends to a later one.
    for length in (8, 11) if depends_on_length else (11,):
        check_equal(released, length=length, in_steps=not depends_on_length)


@pytest.mark.parametrize("name", LAYERS)
def test_cached_steps_match_released_cache(name):
    """A prompt, then token by token, match the released layer with its cache, also across the
    original length, where cached keys do not change.
    """
    released = LAYERS[name]()
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = mha_torch.MultiHeadAttentionWithCache(released.spec, dtype=torch.float64)
    weights = {name: weight.detach().numpy() for name, weight in released.weights().items()}
    load_into(layer, weights, released.spec)
    config: Any = released.module.config
    theirs = {
        "layer_past" if name == "GPT-NeoX" else "past_key_values": DynamicCache(config=config)
    }
    cache, past = layer.init_cache(2, 12), 0

    for count in (5, 1, 1, 1, 1, 2, 1):
        tokens = x[:, past : past + count]
        with torch.no_grad():
            expected = released(tokens, past, **theirs)
            output, cache = layer(tokens, cache, positions=positions_of(released.spec, count, past))
        check_near(output.numpy(), expected.numpy(), f"tokens from {past} on", NEAR)
        past += count


def test_equal_sections_are_plain_rope():
    """Equal positions on all three axes have the output of default positions, bit for bit."""
    spec = LAYERS["Qwen2-VL"]().spec
    torch.manual_seed(0)
    layer, x = mha_torch.MultiHeadAttention(spec), torch.randn(1, 5, 32)
    same = torch.arange(5)[None]
    plain, _ = layer(x)
    assert torch.equal(layer(x, positions=same)[0], plain)
    assert torch.equal(layer(x, positions=same.expand(3, 1, 5))[0], plain)
