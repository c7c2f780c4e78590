"""Live layers identified at their projections: inputs, norms, gates, clips, latents, temperatures,
padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.samples import sample
from helpers.small_models import in_attention, inputs_of, small_model
from torch import nn
from transformers import Blip2QFormerConfig, Blip2QFormerModel, DetrConfig, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.detr.modeling_detr import DetrDecoderLayer
from transformers.models.idefics2.configuration_idefics2 import Idefics2PerceiverConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverResampler
from transformers.models.llama.modeling_llama import eager_attention_forward

import parity
from mha_spec import Gate, Norm
from parity.explain.identification import Identification, identify
from parity.measure.core.weights import unheld

LATENTS: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
}
TEMPERED = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}

FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "latents": ("deepseek_v2", LATENTS),
    "latents-queries-at-once": ("deepseek_v2", {**LATENTS, "q_lora_rank": None}),
    "latents-yarn": ("deepseek_v3", {**LATENTS, "rope_scaling": YARN}),
    "latents-of-minicpm3": ("minicpm3", LATENTS),
    "gate": ("afmoe", {}),
    "gate-packed": ("qwen3_next", HYBRID),
    "norms-of-heads": ("cohere", {"use_qk_norm": True}),
    "norms-one-a-head": ("stablelm", {"qk_layernorm": True}),
    "norm-after-rope": ("hunyuan_v1_dense", {}),
    "norm-and-temperature": (
        "llama4_text",
        {
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 9,
        },
    ),
    "temperature": (
        "ministral3",
        {"rope_parameters": {**TEMPERED, "original_max_position_embeddings": 9}},
    ),
    "clip": ("olmo", {"clip_qkv": 0.5}),
    "clip-of-large-inputs": ("olmo", {"clip_qkv": 3.0}),
}
"""Families and options of their configuration, by the fields of projections that they have."""


@sample(name=["latents-yarn", "gate-packed", "norm-and-temperature"])
@pytest.mark.parametrize("name", list(FIELDS))
def test_projection_fields_match_rules(name):
    """Every layer is identified with the spec and the weights that the rules of its family read."""
    family, options = FIELDS[name]
    model = small_model(family, **options)
    layers = identify(model, inputs_of(family))
    assert layers
    for layer in layers:
        assert layer.spec is not None, str(layer)
        spec, weights = parity.from_transformers(
            model.get_submodule(layer.name), model.config, path=layer.name
        )
        assert unheld(layer.spec) == unheld(spec)
        assert layer.weights.keys() == weights.keys()
        assert all((layer.weights[name] == weight).all() for name, weight in weights.items())


def drawn(module: nn.Module) -> Any:
    """Return a module with random weights, in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return module.eval()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def detr() -> tuple[Any, dict[str, torch.Tensor]]:
    config = DetrConfig(
        d_model=32, decoder_attention_heads=4, decoder_ffn_dim=16, use_timm_backbone=False
    )
    config._attn_implementation = "eager"
    names = ("hidden_states", "object_queries_position_embeddings", "encoder_hidden_states")
    inputs = dict(
        zip(names, (numbers(2, 9, 32), numbers(2, 9, 32) + 0.5, numbers(2, 13, 32)), strict=True)
    )
    return drawn(DetrDecoderLayer(config)), {
        **inputs,
        "spatial_position_embeddings": numbers(2, 13, 32) - 0.5,
    }


def by_name(layers: list[Identification]) -> dict[str, Identification]:
    for layer in layers:
        assert layer.spec is not None, str(layer)
    return {layer.name: layer for layer in layers}


def test_added_positions_are_reported():
    """DETR's positions are reported as added to the inputs of
    queries and keys, but not of values.
    """
    layers = by_name(identify(*detr()))
    with_positions = "hidden_states + position_embeddings"
    assert layers["self_attn"].inputs == {
        "query": with_positions,
        "key": with_positions,
        "value": "hidden_states",
    }
    others = {"key": "key_value_states + encoder_position_embeddings", "value": "key_value_states"}
    assert layers["encoder_attn"].inputs == {"query": with_positions, **others}
    assert f"query={with_positions}, key={with_positions}, value=hidden_states" in str(
        layers["self_attn"]
    )
    assert layers["self_attn"].output == "the output of o_proj"
    assert layers["self_attn"].to_dict()["inputs"]["value"] == "hidden_states"


def test_added_zeros_are_reported():
    """Positions that are added to hidden states of zeros are still reported as a sum."""
    model, inputs = detr()
    layers = by_name(identify(model, {**inputs, "hidden_states": torch.zeros(2, 9, 32)}))
    assert layers["self_attn"].inputs["query"] == "hidden_states + position_embeddings"
    assert layers["self_attn"].inputs["value"] == "hidden_states"


def test_exchanged_input_is_reported():
    """Values computed from the input of queries are reported with that input."""
    model, inputs = detr()
    layer, recorded = model.self_attn, {}
    layer.v_proj.register_forward_pre_hook(lambda module, args: (recorded["q"],))
    layer.q_proj.register_forward_pre_hook(lambda module, args: recorded.update(q=args[0]))
    layers = by_name(identify(model, inputs))
    assert layers["self_attn"].inputs["value"] == "hidden_states + position_embeddings"


def test_unexplained_input_is_intermediate():
    """An input that no argument explains is reported as an intermediate of the module."""
    model, inputs = detr()
    model.self_attn.v_proj.register_forward_pre_hook(lambda module, args: (args[0].roll(1, 1),))
    layers = by_name(identify(model, inputs))
    assert layers["self_attn"].inputs["value"] == "an intermediate of the module"


def test_changing_input_is_rejected():
    """A layer whose values have a different input in one of its calls has no spec, and a reason."""
    model, inputs = detr()
    layer, recorded = model.self_attn, {"calls": 0}

    def exchange(module: nn.Module, args: Any) -> Any:
        recorded["calls"] += 1
        return (recorded["q"],) if recorded["calls"] == 2 else args

    layer.v_proj.register_forward_pre_hook(exchange)
    layer.q_proj.register_forward_pre_hook(lambda module, args: recorded.update(q=args[0]))
    (rejected,) = (layer for layer in identify(model, inputs) if layer.name == "self_attn")
    assert rejected.spec is None
    assert "be what they were with fresh inputs" in rejected.reason


def test_added_residual_is_reported():
    """Hidden states that a module adds to its output are reported with the output."""
    model, inputs = detr()
    model.self_attn.register_forward_hook(
        lambda module, args, kwargs, result: (result[0] + kwargs["hidden_states"], *result[1:]),
        with_kwargs=True,
    )
    layers = by_name(identify(model, inputs))
    assert layers["self_attn"].output == "the output of o_proj, plus hidden_states"


@sample(name=["idefics2"])
@pytest.mark.parametrize("name", ["blip-2", "idefics2"])
def test_key_input_is_reported(name):
    """Keys and values of BLIP-2 come from the encoder; those
    of Idefics2 from the context and latents.
    """
    if name == "blip-2":
        sizes = {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 16,
            "encoder_hidden_size": 24,
        }
        config = Blip2QFormerConfig(**sizes, num_hidden_layers=1)
        model, inputs = Blip2QFormerModel(config), {"query_embeds": numbers(2, 9, 32)}
        inputs["encoder_hidden_states"] = numbers(2, 13, 24)
    else:
        sizes = {
            "resampler_n_latents": 9,
            "resampler_depth": 1,
            "resampler_n_heads": 4,
            "resampler_head_dim": 8,
        }
        config = Idefics2PerceiverConfig(hidden_size=32, num_key_value_heads=2, **sizes)
        model, inputs = Idefics2PerceiverResampler(config), {"context": numbers(2, 13, 32)}
        inputs["attention_mask"] = torch.ones(2, 13)
    model.set_attn_implementation("eager")
    *_, layer = by_name(identify(drawn(model), inputs)).values()
    key = {"blip-2": "encoder_hidden_states", "idefics2": "context followed by latents"}[name]
    query = {"blip-2": "hidden_states", "idefics2": "latents"}[name]
    assert layer.inputs == {"query": query, "key": key, "value": key}


# ---- Modules of no known family ------------------------------------------------------------------


class TinyAttention(nn.Module):
    """Attention with a norm before its projections, values of a different width, and a gate per
    head.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.config = LlamaConfig(attn_implementation="eager")
        self.kind, self.num_key_value_groups = kind, 1
        make = {"convolutions": partial(nn.Conv1d, kernel_size=1)}.get(kind, nn.Linear)
        self.norm, self.value_norm = nn.LayerNorm(32), nn.LayerNorm(6)
        self.q, self.kv, self.gate, self.out = (
            make(32, 32),
            make(32, 56),
            nn.Linear(32, 4),
            make(24, 32),
        )
        self.after = nn.LayerNorm(24 if kind == "norm-before-output" else 32)

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        module = getattr(self, name)
        return module(x.mT).mT if self.kind == "convolutions" else module(x)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden_states)
        heads = (*x.shape[:-1], 4, -1)
        q, (k, v) = self.project("q", x), self.project("kv", x).split([32, 24], -1)
        q, k, v = (tensor.reshape(heads).transpose(1, 2) for tensor in (q, k, v))
        v = self.value_norm(v)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager_attention_forward)
        context, _ = interface(self, q, k, v, None, scaling=8**-0.5)
        context = (
            context
            if self.kind == "norm-before-output"
            else context * torch.sigmoid(self.gate(x))[..., None]
        )
        context = context.reshape(*x.shape[:-1], -1)
        if self.kind == "norm-before-output":
            return self.out(self.after(context)) + hidden_states
        return self.after(self.project("out", context)) + hidden_states


def tiny(kind: str) -> Identification:
    (layer,) = identify(drawn(TinyAttention(kind)), {"hidden_states": numbers(2, 9, 32)})
    assert layer.spec is not None, str(layer)
    assert set(layer.inputs.values()) == {"the output of norm"}
    return layer


@pytest.mark.parametrize("kind", ["linear", "convolutions"])
def test_head_gate_and_value_width(kind):
    """A gate per head, values of width 6 and their norm are
    identified, with linear layers or convolutions.
    """
    layer = tiny(kind)
    assert layer.spec is not None
    assert layer.spec.gate == Gate(per_head=True, bias=True)
    assert layer.spec.value_head_dim == 6
    assert layer.spec.v_norm == Norm(kind="layer", bias=True, eps=1e-5)
    assert layer.weights["v_proj.weight"].shape == (24, 32)
    assert layer.output == "the output of out, then after, plus hidden_states"


def test_context_norm_is_identified():
    """A norm between the context and the output projection is identified as `context_norm`."""
    (layer,) = identify(
        drawn(TinyAttention("norm-before-output")), {"hidden_states": numbers(2, 9, 32)}
    )
    assert layer.spec is not None, layer.reason
    assert layer.spec.context_norm is not None


def test_positions_from_one_are_reported():
    """Positions 1 to 24 are reported, and the far ones that verify them, 20000 to 20034."""
    model = small_model("llama")

    def count_from_one(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {"position_ids": torch.arange(1, 25)[None], **kwargs}

    model.register_forward_pre_hook(count_from_one, with_kwargs=True)
    layers = identify(model, inputs_of("llama"))
    assert len(layers) == 2
    for layer in layers:
        assert layer.spec is not None, str(layer)
        assert layer.positions == ((1, 24), (20000, 20034))


# ---- Padding -------------------------------------------------------------------------------------


def padded(side: str) -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[0, :2] = mask[1, :5] = mask[2, :9] = 0
    return {**inputs_of("llama"), "attention_mask": mask if side == "left" else mask.flip(1)}


@sample(where=lambda family, side: (family, side) in [("gemma2", "left")])
@pytest.mark.parametrize(
    ("family", "side"),
    [("gemma2", "right"), ("gemma2", "left"), ("mbart", "right")],
)
def test_padding_is_left_out(family, side):
    """Layers are identified from padded inputs, by 22 of 24 tokens
    outside of decoders, with exact windows.
    """
    layers = identify(small_model(family), padded(side))
    assert len(layers) >= 2
    for layer in layers:
        assert layer.spec is not None
        assert layer.spec.window_size == (
            6 if (family, layer.name) == ("gemma2", "layers.0.self_attn") else None
        )
        assert layer.num_tokens == (24 if layer.name.startswith("decoder") else 22)


# ---- Oddities that no field of a specification describes -----------------------------------------


def on_sigmoid(change: Any) -> Any:
    """Change the sigmoid of gates."""
    sigmoid = torch.sigmoid
    return lambda model, monkeypatch: monkeypatch.setattr(
        torch, "sigmoid", lambda x: change(sigmoid, x)
    )


def on_norms(name: str, change: Any) -> Any:
    """Change the norms whose names end with `name`."""

    def inject(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        norms = [module for path, module in model.named_modules() if path.endswith(name)]
        assert norms
        for norm in norms:
            change(norm)

    return inject


def on_temperature(change: Any) -> Any:
    """Change the factors of queries that a model computes from positions."""

    def inject(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        import transformers.models.ministral3.modeling_ministral3 as module

        original = module.get_llama_4_attn_scale
        monkeypatch.setattr(module, "get_llama_4_attn_scale", lambda *args: change(original, *args))

    return inject


def hooked(change: Any) -> Any:
    return lambda module: module.register_forward_hook(lambda module, args, result: change(result))


def with_larger_eps(module: Any) -> None:
    forward, eps = module.forward, module.variance_epsilon

    def odd(x: torch.Tensor) -> torch.Tensor:
        module.variance_epsilon = 3.0 * eps
        result = forward(x)
        module.variance_epsilon = eps
        return result

    module.forward = odd


def sees_padding(attend: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    leak = mask.clone()
    leak[-1] = torch.where(torch.ones(q.shape[2], q.shape[2]).tril() > 0, 0.0, leak[-1])
    return attend(q, k, v, leak)


def shared_differently(attend: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    by_head = torch.ones(k.shape[1], 1, k.shape[3])
    by_head[1, :, -8:] = 1.001
    return attend(q, k * by_head, v, mask)


ODDITIES: dict[str, tuple[str, Any]] = {
    "gate-tanh": ("gate", on_sigmoid(lambda sigmoid, x: torch.tanh(x))),
    "gate-doubled": ("gate", on_sigmoid(lambda sigmoid, x: 2.0 * sigmoid(x))),
    "gate-steeper": ("gate-packed", on_sigmoid(lambda sigmoid, x: sigmoid(1.001 * x))),
    "gate-of-the-token-before": ("gate", on_sigmoid(lambda sigmoid, x: sigmoid(x).roll(1, 1))),
    "gate-of-clipped-features": ("gate", on_sigmoid(lambda sigmoid, x: sigmoid(x.clamp(max=8.0)))),
    "norm-with-another-eps-for-keys": (
        "gate",
        on_norms("k_norm", lambda module: setattr(module, "variance_epsilon", 1e-3)),
    ),
    "norm-with-an-eps-that-it-does-not-hold": (
        "norm-after-rope",
        on_norms("layernorm", with_larger_eps),
    ),
    "norm-with-square": ("norms-of-heads", on_norms("q_norm", hooked(lambda x: x + 0.001 * x**2))),
    "latent-capped": (
        "latents",
        on_norms("kv_a_layernorm", hooked(lambda x: 5.0 * torch.tanh(x / 5.0))),
    ),
    "latent-of-the-token-before": (
        "latents",
        on_norms("kv_a_layernorm", hooked(lambda x: x.roll(1, 1))),
    ),
    "latent-with-square": (
        "latents",
        on_norms("q_a_layernorm", hooked(lambda x: x + 0.001 * x**2)),
    ),
    "shared-features-differ": ("latents", in_attention(shared_differently)),
    "temperature-of-the-double-position": (
        "temperature",
        on_temperature(lambda original, positions, *args: original(2 * positions, *args)),
    ),
    "temperature-without-logarithm": (
        "temperature",
        on_temperature(
            lambda original, positions, *args: 1.0 + 0.1 * (original(positions, *args) - 1.0).sqrt()
        ),
    ),
    "temperature-of-keys": (
        "temperature",
        in_attention(
            lambda attend, q, k, v, mask: attend(
                q, k * (1.0 + torch.arange(24) // 9)[:, None], v, mask
            )
        ),
    ),
    "clip-of-keys-wider": (
        "clip",
        in_attention(lambda attend, q, k, v, mask: attend(q, 1.5 * k, v, mask)),
    ),
    "clip-of-values-alone": (
        "temperature",
        in_attention(lambda attend, q, k, v, mask: attend(q, k, v.clamp(-0.3, 0.3), mask)),
    ),
}
"""Changes that no field describes, each with an entry of FIELDS and a function that injects it."""


@sample(name=["gate-doubled", "latent-capped"])
@pytest.mark.parametrize("name", list(ODDITIES))
def test_projection_oddity_is_rejected(name, monkeypatch):
    """No layer has a spec if a gate, norm, latent,
    temperature or clip behaves as no field describes.
    """
    field, inject = ODDITIES[name]
    family, options = FIELDS[field]
    model = small_model(family, **options)
    inject(model, monkeypatch)
    accepted = [
        str(layer) for layer in identify(model, inputs_of(family)) if layer.spec is not None
    ]
    assert not accepted, accepted[0]


def test_attention_to_padding_is_rejected(monkeypatch):
    """No layer has a spec if tokens of one sequence attend to its padding."""
    model = small_model("llama")
    in_attention(sees_padding)(model, monkeypatch)
    assert [layer.spec for layer in identify(model, padded("left"))] == [None, None]


class SharingHeads(nn.Module):
    """Attention of 4 query heads with 2 key/value heads, which are copied in separate orders for
    keys and values.
    """

    def __init__(self, order_of_keys: list[int], order_of_values: list[int]) -> None:
        super().__init__()
        self.orders = order_of_keys, order_of_values
        self.to_q, self.to_out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.to_k, self.to_v = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, 8)).transpose(1, 2)
            for projection in (self.to_q, self.to_k, self.to_v)
        )
        k, v = k[:, self.orders[0]], v[:, self.orders[1]]
        weights = (q @ k.mT * 8**-0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("of_keys", "of_values", "words"),
    [
        (
            [0, 1, 0, 1],
            [0, 1, 0, 1],
            "to_k returns 2 heads, and query heads use 0 1 0 1 of them: tiled, head n mod 2",
        ),
        (
            [0, 1, 0, 1],
            [0, 0, 1, 1],
            "to_v returns 2 heads, and query heads use 0 0 1 1 of them: repeated",
        ),
        ([0, 0, 1, 0], [0, 0, 1, 1], "to_k returns 2 heads, and query heads use 0 0 1 0 of them;"),
    ],
)
def test_copied_key_heads_are_reported(of_keys, of_values, words):
    """Copied key or value heads are reported with their order, and rows of weights follow it."""
    torch.manual_seed(0)
    model = nn.Sequential(SharingHeads(of_keys, of_values)).eval()
    (layer,) = identify(model, {"input": torch.randn(2, 12, 32)}, layers="SharingHeads")
    assert layer.spec is not None, str(layer)
    assert layer.spec.num_kv_heads in (None, 4)
    assert words in str(layer)
    assert "each once" not in str(layer)
    assert layer.names["k_proj.weight"] == "to_k.weight"
    assert layer.rows["k_proj.weight"] == [
        row for head in of_keys for row in range(8 * head, 8 * head + 8)
    ]
    parameter = model[0].to_k.weight.detach().numpy()
    assert (layer.weights["k_proj.weight"] == parameter[layer.rows["k_proj.weight"]]).all()


def test_partial_weight_rows_are_reported():
    """Rows are reported for a projection packed with others,
    and none for weights that are used whole.
    """
    torch.manual_seed(0)
    (repeated,) = identify(
        nn.Sequential(SharingHeads([0, 0, 1, 1], [0, 0, 1, 1])).eval(),
        {"input": torch.randn(2, 12, 32)},
        layers="SharingHeads",
    )
    assert repeated.spec is not None
    assert repeated.spec.num_kv_heads == 2
    assert repeated.rows == {}
    x = torch.randn(2, 12, 32)
    arguments = {"query": x, "key": x, "value": x}
    (packed,) = identify(nn.MultiheadAttention(32, 4, batch_first=True).eval(), arguments)
    assert packed.names["k_proj.weight"] == "in_proj_weight"
    assert packed.rows["k_proj.weight"] == [*range(32, 64)]
