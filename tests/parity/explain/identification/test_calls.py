"""Calls that verify an identified layer: it is rejected if it depends on inputs as no field
describes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.input_errors import rejects
from helpers.small_models import inputs_of, small_model
from torch import nn
from transformers import LlamaConfig, LlamaModel

from parity.explain.identification import identify


class Attention(nn.Module):
    """Causal attention of 4 heads, whose scores a function may change."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = change
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (4, 8)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        scores = self.change(q @ k.mT * 8**-0.5, x)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def numbers(*shape: int) -> torch.Tensor:
    """Return random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_unchanged_layer_is_identified():
    """Attention without changes is identified from calls with 24 and with 13 tokens."""
    (layer,) = identify(
        nn.Sequential(Attention(lambda scores, x: scores)).eval(), {"input": numbers(3, 24, 32)}
    )
    assert layer.spec is not None, layer.reason
    assert (layer.num_tokens, layer.fewest_tokens) == (24, 13)


HIDDEN = {
    "scale-by-length": lambda scores, x: scores * (scores.shape[-1] / 24),
    "batch-size": lambda scores, x: scores * (2.0 if len(x) > 2 else 1.0),
    "scale-of-large-scores": lambda scores, x: scores * (0.9 if scores.abs().max() > 20 else 1.0),
}
"""Changes of scores that the inputs of a single call do not show."""


@pytest.mark.parametrize("name", HIDDEN)
def test_input_dependence_is_rejected(name):
    """A layer whose scores depend on the length, the batch size or their own size has no spec."""
    model = nn.Sequential(Attention(HIDDEN[name])).eval()
    (layer,) = identify(model, {"input": numbers(3, 24, 32)})
    assert layer.spec is None, str(layer)


def test_equal_tokens_show_no_attention():
    """With equal tokens, and an implementation that returns no weights, no layer is identified."""
    model = small_model("llama")
    model.set_attn_implementation("sdpa")  # which returns no weights
    layers = identify(model, {"input_ids": torch.ones(2, 16, dtype=torch.long)})
    assert len(layers) == 2
    for layer in layers:
        assert layer.spec is None
        assert "differ between tokens" in layer.reason


def test_second_softmax_rejects_one_layer():
    """A layer with a second softmax for large inputs is rejected; the other is identified."""
    model = nn.Sequential(
        Attention(lambda scores, x: scores.softmax(-1) if scores.abs().max() > 20 else scores),
        Attention(lambda scores, x: scores),
    ).eval()
    first, second = identify(model, {"input": numbers(3, 24, 32)})
    assert "attention with large inputs" in first.reason
    assert second.spec is not None, second.reason


class WithPositions(nn.Module):
    """Attention to patches whose first feature is their position and the rest their values, as in
    Pix2Struct.
    """

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.attention, self.positions = Attention(change), nn.Embedding(24, 32)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.attention(self.positions(patches[..., 0].long()) + patches[..., 1:])


def patches() -> torch.Tensor:
    return torch.cat([torch.arange(24.0).expand(3, 24)[..., None], numbers(3, 24, 32)], dim=-1)


def test_positions_in_patches_are_identified():
    """Attention to patches that contain their positions is identified;
    with a bias from the input it is rejected.
    """
    (layer,) = identify(WithPositions(lambda scores, x: scores).eval(), {"patches": patches()})
    assert layer.spec is not None, layer.reason
    (layer,) = identify(
        WithPositions(lambda scores, x: scores + x[:, None, None, :, 0]).eval(),
        {"patches": patches()},
    )
    assert layer.spec is None


def test_float64_model_raises():
    """A model in float64 raises an error that names `model`."""
    with rejects("model"):
        identify(small_model("llama").double(), inputs_of("llama"))


def test_identify_leaves_model_unchanged():
    """After identification, a model with dynamic RoPE
    returns the same output as before, bit for bit.
    """
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=16,
        num_hidden_layers=1,
        vocab_size=50,
        max_position_embeddings=8,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    model, inputs = LlamaModel(config).eval(), {"input_ids": torch.arange(32).reshape(2, 16)}
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
        identify(model, inputs)
        assert torch.equal(model(**inputs).last_hidden_state, before)
