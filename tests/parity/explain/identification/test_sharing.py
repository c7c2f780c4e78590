"""Identification of layers that share the keys and values of another layer, and rejection of
oddities.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.released_models import draw
from helpers.samples import sample

import parity

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}
SIZES |= {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 4,
    "pad_token_id": 0,
}
SIZES |= {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": 5}
KINDS = [
    "full_attention",
    "sliding_attention",
    "sliding_attention",
    "sliding_attention",
    "full_attention",
]
SHARED, SOURCE = 4, 0

MODELS = {
    "Gemma 3n": ("Gemma3nText", {"laurel_rank": 4, "activation_sparsity_pattern": None}),
    "Gemma 4": ("Gemma4Text", {"global_head_dim": 16}),
}


def model_of(name: str, kinds: list[str] = KINDS) -> Any:
    """Return a small model with random weights, in evaluation mode."""
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options, layer_types=kinds)
    torch.manual_seed(0)
    model = (
        getattr(transformers, f"{kind}Model")
        ._from_config(config, attn_implementation="eager")
        .eval()
    )
    draw(model)
    return model


def inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))}


@sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_source_of_shared_kv_is_found(name):
    """Each sharing layer names the layer of its keys and values, has
    evidence of it, and lacks their weights.
    """
    model = model_of(name)
    layers = parity.layers_of(model, inputs())
    assert [layer.source for layer in layers] == ["both"] * 5
    for layer, source in {3: 2, SHARED: SOURCE}.items():
        identification = layers[layer].identification
        assert identification.spec is not None
        assert identification.spec.shared_kv
        assert identification.inputs["key"] == f"the keys of layers.{source}.self_attn"
        assert identification.inputs["value"] == f"the values of layers.{source}.self_attn"
        (evidence,) = (entry for entry in identification.evidence if entry.field == "shared_kv")
        assert f"layers.{source}.self_attn" in str(evidence)
        assert {*identification.weights} == {"q_proj.weight", "q_norm.weight", "out_proj.weight"}


def test_wrong_key_source_contradicts_rules():
    """Keys of layer 1 are identified as such, but the configuration names a different layer, so the
    merged result is rejected.
    """
    kinds = ["full_attention"] * 5
    model = model_of("Gemma 3n", kinds)
    heads = heads_of(model.layers[1].self_attn)
    inject(model, lambda k, v: (heads["k"], heads["v"]))
    (layer,) = (
        layer
        for layer in parity.layers_of(model, inputs())
        if layer.name == f"layers.{SHARED}.self_attn"
    )
    assert layer.identification.spec is not None
    assert layer.identification.inputs["key"] == "the keys of layers.1.self_attn"
    assert layer.spec is None
    assert "layers.1" in layer.reason


def heads_of(module: Any) -> dict[str, torch.Tensor]:
    """Return the keys and values of a Gemma 3n module, which each call replaces."""
    heads: dict[str, torch.Tensor] = {}
    rotate = transformers.models.gemma3n.modeling_gemma3n.apply_rotary_pos_emb

    def rotated(module: Any, args: Any, kwargs: dict[str, Any], _: Any) -> None:
        heads["k"] = rotate(heads["k"], *kwargs["position_embeddings"], unsqueeze_dim=2).transpose(
            1, 2
        )

    module.k_norm.register_forward_hook(lambda *call: heads.update(k=call[-1]))
    module.v_norm.register_forward_hook(lambda *call: heads.update(v=call[-1].transpose(1, 2)))
    module.register_forward_hook(rotated, with_kwargs=True)
    return heads


def inject(model: Any, change: Any) -> None:
    """Make the last layer attend to keys and values other than those it receives."""

    def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        states = {kind: change(*heads) for kind, heads in kwargs["shared_kv_states"].items()}
        return args, {**kwargs, "shared_kv_states": states}

    model.layers[SHARED].self_attn.register_forward_pre_hook(begin, with_kwargs=True)


def rotated(k: torch.Tensor) -> torch.Tensor:
    """Return keys that are rotated by their positions again."""
    angles = torch.arange(k.shape[2])[:, None] * 1e4 ** (
        -torch.arange(0, k.shape[-1], 2) / k.shape[-1]
    )
    cos, sin = (torch.cat([table, table], dim=-1).float() for table in (angles.cos(), angles.sin()))
    first, second = k.chunk(2, dim=-1)
    return k * cos + torch.cat([-second, first], dim=-1) * sin


def of_large_alone(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (k, v) if v.abs().max() < 2.5 else (k.flip(1), v)


ODDITIES = {
    "rotated-again": lambda k, v: (rotated(k), v),
    "values-rotated": lambda k, v: (k, rotated(v)),
    "normalized-again": lambda k, v: (torch.nn.functional.rms_norm(k, k.shape[-1:]) * 1.5, v),
    "keys-as-values": lambda k, v: (k, k),
    "values-as-keys": lambda k, v: (v, v),
    "exchanged": lambda k, v: (v, k),
    "heads-exchanged": lambda k, v: (k.flip(1), v.flip(1)),
    "heads-of-keys-exchanged": lambda k, v: (k.flip(1), v),
    "the-token-before": lambda k, v: (k.roll(1, 2), v.roll(1, 2)),
    "values-of-the-token-before": lambda k, v: (k, v.roll(1, 2)),
    "other-sequences": lambda k, v: (k.flip(0), v.flip(0)),
    "larger": lambda k, v: (k * 1.001, v),
    "squashed": lambda k, v: (k, 8.0 * torch.tanh(v / 8.0)),
    "one-number-changed": lambda k, v: (k, v + 0.01 * (torch.arange(v.numel()) == 7).view(v.shape)),
    "of-large-values-alone": of_large_alone,
    "added": lambda k, v: (k + 0.01 * v, v),
}


@sample(family=["Gemma 3n"], name=["rotated-again", "exchanged"])
@pytest.mark.parametrize("name", ODDITIES)
@pytest.mark.parametrize("family", ["Gemma 3n", "Gemma 4"])
def test_injected_oddity_is_never_accepted(name, family):
    """A layer that changes the keys or values it shares has no spec, and
    a reason; earlier layers are identified.
    """
    model = model_of(family)
    inject(model, ODDITIES[name])
    layers = parity.identify(model, inputs())
    assert all(layer.spec is not None for layer in layers[:SHARED])
    assert layers[SHARED].spec is None, str(layers[SHARED])
    assert layers[SHARED].reason


def test_keys_of_two_layers_are_not_shared():
    """Keys of one layer with values of another belong to no single layer and have no spec."""
    model = model_of("Gemma 3n", ["full_attention"] * 5)
    heads = heads_of(model.layers[0].self_attn)
    inject(model, lambda k, v: (heads["k"], v))
    assert parity.identify(model, inputs())[SHARED].spec is None


def test_tap_compares_keys_of_source_layer():
    """A tapped layer is compared with the keys of its source layer: shifted keys
    fail it at stage `k`, and no other layer.
    """
    model = model_of("Gemma 3n")
    specs = {layer.index: layer for layer in parity.specs_of(model.config)}
    with torch.no_grad(), parity.tap(model) as tapped:
        model(**inputs())
    weights = {
        index: parity.from_transformers(model.layers[index].self_attn, model.config, index)[1]
        for index in specs
    }
    assert parity.check_tap(tapped, list(specs.values()), weights).passed
    call = tapped.layers[SHARED].calls[0]
    call.values["k"] = np.roll(call.values["k"], 1, axis=2)
    verdict = parity.check_tap(tapped, list(specs.values()), weights)
    assert [layer.passed for layer in verdict.layers] == [True] * SHARED + [False]
    assert verdict.layers[SHARED].difference.stage == "k"
