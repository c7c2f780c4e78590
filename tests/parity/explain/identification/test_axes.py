"""Identification of RoPE on several axes, in vision towers and text with M-RoPE; and injected
oddities.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from helpers.samples import sample
from helpers.towers import GRID, OTHERS, OWN, SIZES, TOWERS, small_tower

import parity
from parity.explain.identification import identify


@sample(name=["qwen2_vl", "pixtral", "llama4"])
@pytest.mark.parametrize("name", TOWERS)
def test_axial_rope_of_tower_is_identified(name):
    """RoPE on several axes of a vision tower is identified
    exactly, as non-causal, at integer positions.
    """
    (layer,) = identify(*small_tower(name))
    assert layer.spec is not None, str(layer)
    assert layer.spec.rope == TOWERS[name][-1]
    assert layer.is_causal is False
    assert layer.positions[0][1] in (
        3,
        4,
        5,
        6,
    )  # 4 or 6 positions; positions of Llama 4 and Muse Spark start at 1
    assert "integers on each axis" in str(layer)


@sample(name=["dinov3_vit"])
@pytest.mark.parametrize("name", OTHERS)
def test_unsupported_tower_rope_is_rejected(name):
    """No layer of a tower with a rotation that `Rope` cannot
    describe has a spec; each names the reason.
    """
    layers = identify(*small_tower(name))
    assert layers
    for layer in layers:
        assert layer.spec is None
        assert OTHERS[name][-1] in layer.reason


def test_configured_rope_base_is_found():
    """A RoPE base of 512345, set in the configuration of a tower, is identified exactly."""
    parameters = {"rope_type": "axial", "rope_theta": 512345.0}
    (layer,) = identify(*small_tower("qwen2_vl", rope_parameters=parameters))
    assert layer.spec is not None, str(layer)
    assert layer.spec.rope == OWN.replace(theta=512345.0)


@pytest.mark.thorough
def test_packed_pictures_are_segments():
    """Two packed pictures have the spec of one, and a tap
    records them as segments of 24 and 16 tokens.
    """
    model, inputs = small_tower("qwen2_vl")
    packed = {
        "hidden_states": torch.randn(40, 96),
        "grid_thw": torch.cat([GRID, torch.tensor([[1, 4, 4]])]),
    }
    (layer,) = identify(model, packed)
    (alone,) = identify(model, inputs)
    assert layer.spec == alone.spec is not None, str(layer)
    with parity.tap(model) as tapped, torch.no_grad():
        model(**packed)
    (call,) = tapped.layers[0].calls
    assert call.values["segment_ids"].tolist() == [[0] * 24 + [1] * 16]
    assert call.values["context"].shape == (1, 4, 40, 16)


@pytest.mark.thorough
def test_tower_windows_are_segments():
    """Windows that the model passes to its layer set neither `window_size` nor `chunk_size`."""
    model, inputs = small_tower("qwen2_5_vl", window_size=16)
    (layer,) = identify(model, inputs)
    assert layer.spec is not None, str(layer)
    assert layer.spec.rope == OWN
    assert layer.spec.window_size is layer.spec.chunk_size is None


@pytest.mark.parametrize("grid", [[1, 1, 24], [3, 1, 8], [24, 1, 1]])
def test_picture_of_one_row_or_column_fails(grid):
    """A picture of height or width 1 does not show both axes, so its layer has no spec."""
    model, inputs = small_tower("qwen2_vl", spatial_merge_size=1)
    (layer,) = identify(model, {**inputs, "grid_thw": torch.tensor([grid])})
    assert layer.spec is None
    assert layer.reason


# ---- Text ----------------------------------------------------------------------------------------


@sample(name=["qwen3_vl"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_text_mrope_matches_rules(name):
    """M-RoPE of Qwen-VL text models is identified as the rules
    read it, also at positions from 20000 on.
    """
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(module, f"{name.title().replace('_', '').replace('Vl', 'VL')}TextConfig")(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=97,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
    )
    torch.manual_seed(0)
    model = getattr(module, type(config).__name__.replace("Config", "Model"))(config).eval()
    (layer,) = identify(model, {"input_ids": torch.randint(1, 90, (2, 24))})
    assert layer.spec is not None, str(layer)
    spec, _ = parity.from_transformers(model.layers[0].self_attn, config, path=layer.name)
    assert layer.spec.rope == spec.rope
    assert layer.positions[1][0] >= 20000


# ---- Oddities that no field of a specification describes -----------------------------------------


def on_angles(change: Any) -> Any:
    """Change the angles (T, pairs) by which a tower rotates pairs."""

    def inject(model: Any) -> None:
        (rotary,) = (module for module in model.modules() if "Rotary" in type(module).__name__)

        def changed(module: Any, args: Any, result: Any) -> Any:
            if isinstance(result, torch.Tensor):  # complex numbers
                return torch.polar(result.abs(), change(result.angle()))
            cos, sin = (x.chunk(2, -1)[0] for x in result)
            angles = change(torch.atan2(sin, cos))
            return tuple(torch.cat([x, x], -1) for x in (angles.cos(), angles.sin()))

        rotary.register_forward_hook(changed)

    return inject


def factors(angles: Any, **of_pairs: float) -> Any:
    """Return the angles multiplied by a factor per pair, 1 for pairs without one."""
    scale = torch.ones(angles.shape[-1])
    for pair, factor in of_pairs.items():
        scale[int(pair[1:])] = factor
    return angles * scale


def swapped(angles: Any) -> Any:
    """Exchange every other pair with the pair that is half of all pairs away."""
    order = torch.arange(angles.shape[-1])
    order[1::2] = (order[1::2] + len(order) // 2) % len(order)
    return angles[..., order]


ODDITIES = {
    "axes-swapped-for-half-of-the-pairs": on_angles(swapped),
    "a-frequency-1-percent-off": on_angles(lambda angles: factors(angles, p1=1.01)),
    "the-last-frequency-1-percent-off": on_angles(lambda angles: factors(angles, p7=1.01)),
    "an-axis-reversed": on_angles(
        lambda angles: angles * torch.tensor([1.0, -1.0]).repeat_interleave(4)
    ),
    "all-reversed": on_angles(lambda angles: -angles),
    "a-token-between-two-positions": on_angles(
        lambda angles: angles + 0.05 * (torch.arange(angles.shape[-1]) == 0)
    ),
    "every-angle-a-tenth-larger": on_angles(lambda angles: 1.1 * angles),
}
"""Changes of the angles, each as a function that injects it."""


INJECTED = [(oddity, name) for name in ("qwen2_vl", "pixtral", "llama4") for oddity in ODDITIES]


@sample(where=lambda oddity, name: (oddity, name) in INJECTED[:4])
@pytest.mark.parametrize(("oddity", "name"), INJECTED)
def test_injected_axis_oddity_is_rejected(oddity, name):
    """A tower whose angles are changed on some axis or pair has no spec, and a reason."""
    model, inputs = small_tower(name)
    ODDITIES[oddity](model)
    (layer,) = identify(model, inputs)
    assert layer.spec is None, str(layer)
    assert layer.reason


def test_shifted_key_positions_are_rejected(monkeypatch):
    """A tower that rotates keys by the positions of the tokens before has no spec."""
    module = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    turned = module.apply_rotary_pos_emb_vision

    def odd(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return turned(q, k, cos, sin)[0], turned(q, k, cos.roll(1, 0), sin.roll(1, 0))[1]

    monkeypatch.setattr(module, "apply_rotary_pos_emb_vision", odd)
    (layer,) = identify(*small_tower("qwen2_vl"))
    assert layer.spec is None, str(layer)
