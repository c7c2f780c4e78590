"""Attention layers of live models, identified by their behavior, without rules of families; and
injected oddities.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.small_models import WITHOUT_RULES, in_attention, inputs_of, small_model
from torch import nn

import parity
from parity.explain.identification import Identification, identify
from parity.measure.core.weights import unheld

DECODERS = [
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt_neox",
        "phi",
        "gpt2",
        "olmo2",
    ),
    *(
        "cohere",
        "cohere2",
        "glm",
        "glm4",
        "stablelm",
        "starcoder2",
        "granite",
        "smollm3",
        "gpt_oss",
        "nemotron",
    ),
    *(
        "persimmon",
        "phi3",
        "mixtral",
        "exaone4",
        "ernie4_5",
        "olmo3",
        "apertus",
        "arcee",
        "seed_oss",
        "biogpt",
        "opt",
    ),
    *("bloom", "codegen", "gptj", "mpt", "xglm"),
    "bitnet",
]
"""Families whose rules agree with identification, which reads none of them."""

ENCODERS = ["modernbert", "eurobert"]
"""Families of encoders whose rules agree with identification."""


@sample(family=["llama", "gemma2", "gpt_oss", "olmo2", "gpt_neox", "modernbert", "bitnet"])
@pytest.mark.parametrize(
    "family",
    [*DECODERS, *ENCODERS],
)
def test_identification_matches_rules(family):
    """Both layers of a family have the spec and the weights
    that its rules read, and a share above 0.
    """
    model = small_model(family)
    layers = identify(model, inputs_of(family))
    assert len(layers) == 2
    for layer in layers:
        assert layer.spec is not None, str(layer)
        spec, weights = parity.from_transformers(
            model.get_submodule(layer.name), model.config, path=layer.name
        )
        assert unheld(layer.spec) == unheld(spec)
        assert layer.weights.keys() == weights.keys()
        assert all((layer.weights[name] == weight).all() for name, weight in weights.items())
        assert layer.share is not None
        assert 0.0 < layer.share <= 1.0


@sample(family=["nomic_bert", "dinov2"])
@pytest.mark.parametrize("family", WITHOUT_RULES)
def test_family_without_rules_is_identified(family):
    """Both layers of an encoder without rules are identified as non-causal."""
    model = small_model(family)
    layers = identify(model, inputs_of(family))
    assert all(layer.spec is not None and layer.is_causal is False for layer in layers), "\n".join(
        map(str, layers)
    )
    assert len(layers) == 2
    expected = {
        "nomic_bert": "rope=Rope(theta=1000.0)",
        "beit": "qkv_bias=(True, False, True)",
    }.get(family, "")
    assert expected in str(layers[0].spec)


def test_encoder_decoder_is_identified():
    """mBART's self-attention is causal in the decoder only, and
    its cross-attention is not causal.
    """
    model = small_model("mbart")
    by_name = {layer.name: layer for layer in identify(model, inputs_of("mbart"))}
    between = by_name["decoder.layers.0.encoder_attn"]
    assert between.spec is not None, str(between)
    assert between.is_causal is False
    assert by_name["decoder.layers.0.self_attn"].is_causal is True
    assert by_name["encoder.layers.0.self_attn"].is_causal is False


def test_scaled_queries_are_evidence():
    """OPT has the default scale, and the evidence states that its queries are multiplied."""
    (layer, _) = identify(small_model("opt"), inputs_of("opt"))
    assert layer.spec is not None, str(layer)
    assert layer.spec.scale is None
    assert any(
        entry.field == "scale" and "queries are multiplied" in entry.how for entry in layer.evidence
    )


def test_evidence_names_its_observations():
    """Evidence of Gemma 2 names the observation behind each
    field, and the report the verified positions.
    """
    first, second = identify(small_model("gemma2"), inputs_of("gemma2"))
    how = {entry.field: entry for entry in first.evidence}
    assert how["window_size"].up_to == 24
    assert how["window_size"].how == "the mask"
    assert how["soft_cap"].how == "tanh of scores"
    assert how["soft_cap"].is_observed
    assert how["rope"].up_to == 24
    assert second.spec is not None
    assert second.spec.window_size is None
    assert second.names["k_proj.weight"] == "k_proj.weight"
    assert first.positions == ((0, 23), (20000, 20034))
    assert "verified with 13 and 24 tokens at positions 0 to 23 and 20000 to 20034" in str(first)


def test_window_beyond_input_is_unobserved():
    """A window of 100, longer than the input, is marked as not observed in both layers."""
    model = small_model("mistral", sliding_window=100)
    layers = identify(model, inputs_of("mistral"))
    assert len(layers) == 2
    for layer in layers:
        assert layer.spec is not None
        (window,) = (entry for entry in layer.evidence if entry.field == "window_size")
        assert not window.is_observed
        assert str(window).endswith("not observed")


def test_packed_projections_are_found():
    """Queries and keys of GPT-NeoX are found in the same parameter, `query_key_value.weight`."""
    (layer, _) = identify(small_model("gpt_neox"), inputs_of("gpt_neox"))
    assert layer.names["k_proj.weight"] == layer.names["q_proj.weight"] == "query_key_value.weight"


# ---- Errors --------------------------------------------------------------------------------------


def test_layer_without_softmax_is_rejected():
    """Mixers of Mamba have no spec, and the reason counts 0 softmaxes."""
    layers = identify(small_model("mamba"), inputs_of("mamba"), layers="*.mixer")
    assert len(layers) == 2
    for layer in layers:
        assert layer.spec is None
        assert "not identified" in str(layer)
        assert "0 softmaxes" in layer.reason


def test_invalid_model_or_inputs_raise():
    """A string, a model in training mode, and inputs with a cache raise errors."""
    with rejects_type("model"):
        identify("llama", {})
    with rejects("model", {"training": True}):
        identify(small_model("llama").train(), inputs_of("llama"))
    with rejects("inputs", "past_key_values"):
        identify(small_model("llama"), {**inputs_of("llama"), "past_key_values": object()})


@pytest.mark.parametrize("shape", [(1, 15), (3, 7)])
def test_too_few_tokens_are_rejected(shape):
    """One sequence of 15 tokens, or three of 7, are too few,
    and the reason states how many are needed.
    """
    tokens = inputs_of("llama")["input_ids"][: shape[0], : shape[1]]
    layers = identify(small_model("llama"), {"input_ids": tokens})
    assert len(layers) == 2
    for layer in layers:
        assert layer.spec is None
        assert "at least 8 tokens of 2 sequences, or 16 of one" in layer.reason


def test_rejected_layer_leaves_others():
    """A layer with unused sinks is rejected, and the next layer is identified."""
    model = small_model("llama")
    model.layers[0].self_attn.sinks = nn.Parameter(
        torch.zeros(8)
    )  # which its attention function ignores
    first, second = identify(model, inputs_of("llama"))
    assert first.spec is None
    assert second.spec is not None, str(second)


def test_configured_rope_base_is_found():
    """A RoPE base of 512345 in the configuration is identified exactly."""
    parameters = {"rope_type": "default", "rope_theta": 512345.0}
    (layer, _) = identify(small_model("llama", rope_parameters=parameters), inputs_of("llama"))
    assert layer.spec is not None, str(layer)
    assert layer.spec.rope is not None
    assert layer.spec.rope.theta == 512345.0


def test_clipped_cross_values_are_rejected(monkeypatch):
    """Cross-attention whose values are clipped to 1 has no spec."""
    model = small_model("mbart")
    layer = model.decoder.layers[0].encoder_attn
    layer.v_proj.register_forward_hook(lambda module, args, v: v.clamp(-1.0, 1.0))
    by_name = {layer.name: layer for layer in identify(model, inputs_of("mbart"))}
    assert by_name["decoder.layers.0.encoder_attn"].spec is None


# ---- Oddities that no field of a specification describes -----------------------------------------


def on_children(name: str, change: Any) -> Any:
    """Change the results of modules in attention layers whose names end with `name`."""

    def inject(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        modules = [
            module
            for path, module in model.named_modules()
            if path.endswith(name) and ("attn" in path or "att" in path)
        ]
        assert modules
        for child in modules:
            child.register_forward_hook(lambda module, args, result: change(result, args[0]))

    return inject


def on_layers(change: Any) -> Any:
    """Change the output of attention layers."""

    def inject(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in model.modules():
            if type(module).__name__.endswith("Attention"):
                module.register_forward_hook(
                    lambda module, args, kwargs, result: (
                        change(result[0], args[0] if args else kwargs["hidden_states"]),
                        *result[1:],
                    ),
                    with_kwargs=True,
                )

    return inject


def on_rotation(change: Any) -> Any:
    """Change the cosines and sines that a model computes from positions."""

    def inject(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        (rotary,) = (
            module
            for module in model.modules()
            if type(module).__name__.endswith("RotaryEmbedding")
        )
        rotary.register_forward_hook(
            lambda module, args, kwargs, result: change(
                *result, args[1] if len(args) > 1 else kwargs["position_ids"]
            ),
            with_kwargs=True,
        )

    return inject


def distances(q: Any, k: Any) -> Any:
    return (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).float()


def capped(attend: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    return attend(20.0 * torch.tanh(q / 20.0), k, v, mask)


def after(change: Any) -> Any:
    """Change the context that attention returns."""

    def odd(attend: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        context, *rest = attend(q, k, v, mask)
        return change(context), *rest

    return odd


def leaking(mask: Any) -> Any:
    leak = mask.clone()
    leak[..., 3, 4] = 0.0
    return leak


ODDITIES = {
    "values-larger": in_attention(lambda attend, q, k, v, mask: attend(q, k, 1.001 * v, mask)),
    "queries-larger": in_attention(lambda attend, q, k, v, mask: attend(1.01 * q, k, v, mask)),
    "queries-capped": in_attention(capped),
    "queries-centered": in_attention(
        lambda attend, q, k, v, mask: attend(q - 0.1 * q.mean(-1, True), k, v, mask)
    ),
    "keys-of-the-token-before": in_attention(
        lambda attend, q, k, v, mask: attend(q, k.roll(1, 2), v, mask)
    ),
    "values-of-the-token-before": in_attention(
        lambda attend, q, k, v, mask: attend(q, k, v.roll(1, 2), mask)
    ),
    "distance-bias": in_attention(
        lambda attend, q, k, v, mask: attend(q, k, v, mask - 0.01 * distances(q, k).clamp(min=0.0))
    ),
    "first-key-favored": in_attention(
        lambda attend, q, k, v, mask: attend(q, k, v, mask + 0.1 * (torch.arange(k.shape[2]) == 0))
    ),
    "one-key-of-the-future": in_attention(
        lambda attend, q, k, v, mask: attend(q, k, v, leaking(mask))
    ),
    "values-clipped": in_attention(
        lambda attend, q, k, v, mask: attend(
            q, k, v.clamp(-0.5 * v.abs().max(), 0.5 * v.abs().max()), mask
        )
    ),
    "context-of-a-head-lost": in_attention(
        after(lambda context: context * (torch.arange(context.shape[2]) > 0)[:, None])
    ),
    "context-squashed": in_attention(after(lambda context: 8.0 * torch.tanh(context / 8.0))),
    "context-by-position": in_attention(
        after(
            lambda context: context * (1.0 + 0.001 * torch.arange(context.shape[1]))[:, None, None]
        )
    ),
    "context-of-heads-exchanged": in_attention(after(lambda context: context.flip(2))),
    "output-larger": on_layers(lambda output, x: 1.001 * output),
    "output-with-input": on_layers(lambda output, x: output + 0.01 * x),
    "output-of-the-token-before": on_layers(lambda output, x: output.roll(1, 1)),
    "projection-by-position": on_children(
        "q_proj", lambda q, x: q * (1.0 + 0.01 * torch.arange(q.shape[1]))[:, None]
    ),
    "projection-with-square": on_children("v_proj", lambda v, x: v + 0.01 * v**2),
    "rotation-of-a-pair-faster": on_rotation(lambda cos, sin, positions: (cos, sin.roll(1, -1))),
    "rotation-one-late": on_rotation(lambda cos, sin, positions: (cos.roll(1, 1), sin.roll(1, 1))),
    "rotation-only-near": on_rotation(
        lambda cos, sin, positions: (cos, torch.where(positions[..., None] < 1000, sin, 0.99 * sin))
    ),
}
"""Changes of a layer that no field describes, each with a function that injects it."""

OF_FAMILIES = [
    "llama",
    "qwen3",
    "olmo2",
    "gemma",
    "starcoder2",
    "cohere",
    "granite",
    "smollm3",
    "arcee",
    "mixtral",
]
"""Families into which each oddity is injected."""


@sample(8, family=["llama"])
@pytest.mark.parametrize("family", OF_FAMILIES)
@pytest.mark.parametrize("name", list(ODDITIES))
def test_injected_oddity_is_rejected(name, family, monkeypatch):
    """No layer of a model with an injected oddity has a spec, and each has a reason."""
    model = small_model(family)
    ODDITIES[name](model, monkeypatch)
    layers: list[Identification] = identify(model, inputs_of(family))
    accepted = [str(layer) for layer in layers if layer.spec is not None]
    assert not accepted, accepted[0]
    assert all(layer.reason for layer in layers)


# ---- The command ---------------------------------------------------------------------------------

LIVE = """
import torch
from transformers import LlamaConfig, LlamaModel

def make(sequences=2):
    config = LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=32,
                         num_hidden_layers=1, vocab_size=32)
    return LlamaModel(config).eval(), {"input_ids": torch.arange(20)[: 10 * sequences].reshape(sequences, -1)}

def make_one_sequence():
    return make(1)

def make_other():
    model, inputs = make()
    model.layers[0].self_attn.scaling = 0.3
    return model, inputs

def make_nothing():
    return None

def make_unnamed():
    return make()[0], (torch.arange(10),)
"""


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("make", 0, "rules agree"),
        ("make_one_sequence", 0, "by rules"),
        ("make_other", 1, "rules say scale=None, and observation 0.3"),
        ("make_nothing", 2, "mha-parity: error: --live "),
        ("make_unnamed", 2, "mha-parity: error: --live "),
    ],
)
def test_spec_command_observes_live_model(name, status, words, tmp_path, monkeypatch, capsys):
    """`mha-parity spec --live` compares rules with observation, exits with 1 if they differ, and
    with 2 if the function does not return a model and named inputs.
    """
    from parity.use.cli.main import main

    (tmp_path / f"live_{name}.py").write_text(LIVE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = tmp_path / "report.json"
    assert main(["spec", "--live", f"live_{name}:{name}", "--json", str(report)]) == status
    printed = capsys.readouterr()
    assert words in printed.out + printed.err
    if status == 0:
        assert "num_kv_heads=2" in printed.out or name != "make"
    if status < 2:
        (layer,) = json.loads(report.read_text())["layers"]
        assert (layer["spec"] is None) == bool(status)


@pytest.mark.parametrize("arguments", [["spec"], ["spec", "somewhere", "--live", "m:make"]])
def test_spec_command_requires_one_source(arguments, capsys):
    """`mha-parity spec` without a source, or with a path and `--live`, exits with 2."""
    from parity.use.cli.main import main

    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("mha-parity: error: PATH, --live or --families ")
