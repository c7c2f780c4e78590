"""RoPE is what released models have: their tables, their layers, forward and backward, and token by token."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from released_rope import assert_near, causal, fill, gradients_of
from transformers import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import mha_torch
from mha_spec import (
    AttentionSpec,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from parity import load_into, random_weights

# Released layers take frequencies and angles in float32, also with float64 weights: at the positions below, at most 24,
# a frequency that is a few roundings off (6e-8 each) moves an angle by less than this.
NEAR = 3e-6

# ---- Tables ----------------------------------------------------------------------------------------------------------

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
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0},
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
        {"factor": 32.0, "original_max_position_embeddings": 4096, "short_factor": SHORT, "long_factor": LONG},
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
    "proportional": (ProportionalScaling(0.25, 8.0), {"factor": 8.0, "partial_rotary_factor": 0.25}),
}


@pytest.mark.parametrize("length", [100, 4096, 4097, 131072])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("name", TABLES)
def test_frequencies_are_those_of_transformers(name, theta, length):
    scaling, parameters = TABLES[name]
    kind = scaling.kind
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    rope = Rope(theta, scaling=scaling)

    assert rope.attention_factor == pytest.approx(factor, rel=1e-15)
    # Ours are the formula in float64. Theirs are taken in float32: a power, whose exponent is rounded and at most
    # ln(theta) < 14, a reciprocal and a few products; where scaled and unscaled ones are added 1 - share cancels, too.
    allowed = 14 * 2**-24 + (40 if kind in ("llama3", "yarn") else 3) * 2**-24
    assert rope.frequencies(128, length) == pytest.approx(expected.double().numpy(), rel=allowed)


def test_partial_frequencies_are_those_of_transformers():
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.25},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](config, "cpu")
    found = Rope(scaling=LinearScaling(2.0), rotary_dim=32).frequencies(128)
    assert found == pytest.approx(expected.double().numpy(), rel=17 * 2**-24)


# ---- Layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Released:
    """A released layer: the names of its configuration and classes, what they are given, and its specification."""

    model: str
    config: str
    prefix: str
    rope: Rope
    parameters: dict[str, Any]
    sizes: dict[str, Any]
    spec: dict[str, Any]
    layer_type: str | None = None

    def layer_spec(self) -> AttentionSpec:
        """The specification of the layer."""
        options = {"num_kv_heads": 2, "qkv_bias": False, "out_bias": False} | self.spec
        return AttentionSpec(32, 4, rope=self.rope, **options)

    def built(self) -> tuple[torch.nn.Module, torch.nn.Module, Any]:
        """The attention layer and the rotary embedding in float64, and their configuration."""
        modeling = __import__(
            f"transformers.models.{self.model}.modeling_{self.model}", fromlist=["*"]
        )  # the names of its classes
        parameters = {self.layer_type: self.parameters} if self.layer_type else self.parameters
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        config = getattr(transformers, self.config)(**sizes | self.sizes, rope_parameters=parameters)
        config._attn_implementation = "eager"
        attention = getattr(modeling, f"{self.prefix}Attention")(config, layer_idx=0).double().eval()
        for norm in ("q_norm", "k_norm", "v_norm"):  # another feature: here only what RoPE does is compared
            if hasattr(attention, norm):
                setattr(attention, norm, torch.nn.Identity())
        if hasattr(attention, "sinks"):
            torch.nn.init.constant_(attention.sinks, -torch.inf)  # they weigh nothing
        embedding = getattr(modeling, f"{self.prefix.removesuffix('Text') or self.prefix}RotaryEmbedding", None)
        embedding = getattr(modeling, f"{self.prefix}RotaryEmbedding", embedding)
        return attention, embedding(config), config


def of_llama(rope, **parameters):
    return Released(
        "llama",
        "LlamaConfig",
        "Llama",
        rope,
        {"rope_theta": rope.theta, **parameters},
        {"max_position_embeddings": 8},
        {},
    )


FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 2.0, 5.0, 9.0]}
LONGROPE = LongRopeScaling(4.0, 8, tuple(FACTORS["short_factor"]), tuple(FACTORS["long_factor"]))
WITHOUT_GROUPS = {"num_kv_heads": 4}
RELEASED = {
    "Llama": of_llama(Rope(5e5), rope_type="default"),
    "Llama, linear": of_llama(Rope(scaling=LinearScaling(4.0)), rope_type="linear", factor=4.0),
    "Llama, dynamic": of_llama(Rope(scaling=DynamicScaling(4.0, 8)), rope_type="dynamic", factor=4.0),
    "Llama 3": of_llama(
        Rope(5e5, scaling=Llama3Scaling(8.0, 64)),
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "Llama, YaRN": of_llama(
        Rope(scaling=YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.5)),
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        mscale=1.0,
        mscale_all_dim=0.5,
    ),
    "GPT-NeoX": Released(
        "gpt_neox",
        "GPTNeoXConfig",
        "GPTNeoX",
        Rope(rotary_dim=2),
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        {},
        {**WITHOUT_GROUPS, "qkv_bias": True, "out_bias": True},
    ),
    "GLM": Released(
        "glm",
        "GlmConfig",
        "Glm",
        Rope(rotary_dim=8, pairs="interleaved"),
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"head_dim": 16, "pad_token_id": 0, "attention_bias": True},
        {"head_dim": 16, "qkv_bias": True},
    ),
    "Cohere": Released(
        "cohere",
        "CohereConfig",
        "Cohere",
        Rope(pairs="interleaved"),
        {"rope_type": "default", "rope_theta": 1e4},
        {},
        {},
    ),
    "Phi-3": Released(
        "phi3",
        "Phi3Config",
        "Phi3",
        Rope(scaling=LONGROPE),
        {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, **FACTORS},
        {"max_position_embeddings": 32, "original_max_position_embeddings": 8, "pad_token_id": 0},
        {},
    ),
    "Phi-4-mini": Released(
        "phi3",
        "Phi3Config",
        "Phi3",
        Rope(scaling=LongRopeScaling(4.0, 8, (1.0, 1.5), (1.0, 5.0)), rotary_dim=4),
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 8,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [1.0, 5.0],
        },
        {"max_position_embeddings": 32, "original_max_position_embeddings": 8, "pad_token_id": 0},
        {},
    ),
    "Qwen2-VL": Released(
        "qwen2_vl",
        "Qwen2VLTextConfig",
        "Qwen2VL",
        Rope(1e6, sections=(2, 1, 1)),
        {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
        {},
        {"qkv_bias": True},
    ),
    "Qwen3-VL": Released(
        "qwen3_vl",
        "Qwen3VLTextConfig",
        "Qwen3VLText",
        Rope(5e6, sections=(4, 2, 2), section_order="interleaved"),
        {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        {"head_dim": 16},
        {"head_dim": 16},
    ),
    "gpt-oss": Released(
        "gpt_oss",
        "GptOssConfig",
        "GptOss",
        Rope(150000.0, scaling=YarnScaling(32.0, 64, truncate=False)),
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        {"head_dim": 8, "attention_bias": True, "layer_types": ["full_attention"]},
        {"qkv_bias": True, "out_bias": True},
    ),
    "Gemma 4": Released(
        "gemma4",
        "Gemma4TextConfig",
        "Gemma4Text",
        Rope(1e6, scaling=ProportionalScaling(0.25)),
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        {
            "head_dim": 16,
            "global_head_dim": 16,
            "layer_types": ["full_attention"],
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
        {"head_dim": 16, "scale": 1.0},
        "full_attention",
    ),
}


class Layer:
    """A released layer with the weights of its specification, called with positions."""

    def __init__(self, released: Released) -> None:
        self.released, self.spec = released, released.layer_spec()
        self.attention, self.embedding, config = released.built()
        self.weights = random_weights(self.spec, 7)
        fill(self.attention, self.spec, self.weights)
        self.cache = DynamicCache(config=config)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, past: int | None = None) -> torch.Tensor:
        """The output; with `past` tokens in the cache, to which those of x are added."""
        positions = positions.long()
        if self.spec.rope.sections and positions.ndim == 2:
            positions = positions.expand(3, -1, -1)
        layer_type = {"layer_type": self.released.layer_type} if self.released.layer_type else {}
        given = {"position_embeddings": self.embedding(x, positions, **layer_type)}
        if past is not None:
            given["layer_past" if self.released.prefix == "GPTNeoX" else "past_key_values"] = self.cache
        if self.released.model == "gemma4":
            given["shared_kv_states"] = {}
        return self.attention(hidden_states=x, attention_mask=causal(x.shape[1], past or 0), **given)[0]


def positions_of(spec, length, start=0):
    """Of a text, or of frames of 2 x 3 patches."""
    tokens = torch.arange(start, start + length)[None]
    if spec.rope.sections is None:
        return tokens
    return torch.stack([tokens // 6, tokens // 6 + tokens % 6 // 3, tokens // 6 + tokens % 3])


LENGTHS = [8, 11]  # of which one lies beyond the original length of those whose frequencies depend on it


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", RELEASED)
def test_a_layer_is_the_released_one_forward_and_backward(name, length):
    released = Layer(RELEASED[name])
    spec, generator = released.spec, torch.Generator().manual_seed(0)
    x = torch.randn(2, length, 32, generator=generator, dtype=torch.float64)
    cotangent = torch.randn(2, length, 32, generator=generator, dtype=torch.float64)
    positions = positions_of(spec, length)
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer = mha_torch.MultiHeadAttention(spec, dtype=torch.float64)
    load_into(layer, {name: weight.astype(np.float64) for name, weight in released.weights.items()})

    expected = released(theirs, positions.expand(*positions.shape[:-2], 2, length))
    expected.backward(cotangent)
    for need_weights in (True, False):
        ours.grad = None
        layer.zero_grad()
        output, _ = layer(ours, is_causal=True, need_weights=need_weights, positions=positions)
        output.backward(cotangent)
        assert_near(output.detach(), expected.detach(), "output", NEAR)
        assert_near(ours.grad, theirs.grad, "grad of x", NEAR)
        grads = gradients_of(released.attention, spec)
        for parameter, grad in grads.items():
            if not parameter.startswith("k_proj.bias"):  # whose terms cancel where little is rotated
                assert_near(layer.get_parameter(parameter).grad, grad, f"grad of {parameter}", NEAR)
        assert grads.keys() == released.weights.keys()


@pytest.mark.parametrize("name", RELEASED)
def test_each_sibling_gives_the_output_of_the_released_layer(sibling, name):
    released, length = Layer(RELEASED[name]), 11
    x = np.random.default_rng(0).standard_normal((2, length, 32)).astype(np.float32)
    positions = positions_of(released.spec, length)
    layer = sibling.backend.load_into(sibling.module("MultiHeadAttention", released.spec), released.weights)

    output, _ = layer(sibling.array(x), is_causal=True, positions=sibling.array(positions.int().numpy()))

    with torch.no_grad():
        expected = released(torch.from_numpy(x).double(), positions.expand(*positions.shape[:-2], 2, length))
    assert_near(sibling.numpy(output), expected, "output", 2 * NEAR)


@pytest.mark.parametrize("name", RELEASED)
def test_tokens_in_steps_are_those_of_the_released_cache(name):
    """A prompt, then token by token, across the original length where there is one: cached keys stay as they were."""
    released = Layer(RELEASED[name])
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = mha_torch.MultiHeadAttentionWithCache(released.spec, dtype=torch.float64)
    load_into(layer, {name: weight.astype(np.float64) for name, weight in released.weights.items()})
    cache, past = layer.init_cache(2, 12), 0

    for count in (5, 1, 1, 1, 1, 2, 1):
        tokens, positions = x[:, past : past + count], positions_of(released.spec, count, past)
        with torch.no_grad():
            expected = released(tokens, positions.expand(*positions.shape[:-2], 2, count), past)
            output, cache = layer(tokens, cache, positions=positions)
        assert_near(output, expected, f"tokens from {past} on", NEAR)
        past += count


def test_text_of_a_model_with_sections_is_plain_rope():
    spec = RELEASED["Qwen2-VL"].layer_spec()
    torch.manual_seed(0)
    layer, x = mha_torch.MultiHeadAttention(spec), torch.randn(1, 5, 32)
    same = torch.arange(5)[None]
    plain, _ = layer(x)
    assert torch.equal(layer(x, positions=same)[0], plain)
    assert torch.equal(layer(x, positions=same.expand(3, 1, 5))[0], plain)
