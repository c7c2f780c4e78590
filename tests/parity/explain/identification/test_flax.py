"""Attention layers of Flax models, identified from the program of their call; and injected
oddities.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import flax_layers
from helpers.flax_layers import (
    Decoder,
    EinsumAttention,
    LibraryAttention,
    PackedAttention,
    tokens_of,
)
from helpers.input_errors import rejects
from helpers.samples import sample

from mha_spec import Alibi, AttentionSpec, Gate, Norm, Rope
from parity.explain.identification import Identification, identify
from parity.measure.core.weights import unheld


@pytest.fixture(autouse=True)
def promotion():
    """Let layers add arrays of different ranks and dtypes, as users' layers do."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def identified(model: Any, inputs: dict[str, Any], **options: Any) -> list[Identification]:
    """Identify all layers of a model; each must have a spec and a share above 0."""
    layers = identify(model, inputs, **options)
    assert all(layer.spec is not None for layer in layers), "\n".join(map(str, layers))
    assert all(layer.share is not None and 0.0 < layer.share <= 1.0 for layer in layers)
    return layers


def array(*shape: int) -> Any:
    return jax.random.normal(jax.random.key(3), shape)


CAUSAL = np.tril(np.ones((2, 1, 10, 10), bool))

# ---- Layers of Flax ------------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "has_bias"), [(CAUSAL, True), (None, False)])
def test_nnx_attention_is_identified(mask, has_bias):
    """`nnx.MultiHeadAttention` is identified with its biases, its
    causality, and the name and values of weights.
    """
    module = nnx.MultiHeadAttention(
        4,
        32,
        use_bias=has_bias,
        bias_init=nnx.initializers.normal(0.3),
        decode=False,
        rngs=nnx.Rngs(0),
    )
    (layer,) = identified(module, {"inputs_q": array(2, 10, 32), "mask": mask})
    assert layer.spec == AttentionSpec(32, 4, qkv_bias=has_bias, out_bias=has_bias)
    assert layer.is_causal is (mask is not None)
    assert layer.inputs["query"] == "inputs_q"
    assert layer.names["q_proj.weight"] == "query.kernel"
    kernel = np.asarray(module.key.kernel[...]).reshape(32, 32).T
    assert (layer.weights["k_proj.weight"] == kernel).all()


def test_nnx_cross_attention_is_identified():
    """Cross-attention of nnx to width 24 is identified as non-causal, with `d_kv` 24."""
    module = nnx.MultiHeadAttention(4, 32, in_kv_features=24, decode=False, rngs=nnx.Rngs(0))
    (layer,) = identified(module, {"inputs_q": array(2, 10, 32), "inputs_k": array(2, 12, 24)})
    assert layer.spec is not None
    assert layer.spec.d_kv == 24
    assert layer.is_causal is False


def test_bound_linen_attention_is_identified():
    """An unbound linen block raises an error; a bound one is
    identified, with paths such as `value/bias`.
    """
    block, inputs = flax_layers.LinenBlock(), {"x": array(2, 10, 32), "mask": CAUSAL}
    with rejects("model", "unbound LinenBlock"):
        identify(block, inputs)
    bound = block.bind(block.init(jax.random.key(0), **inputs))
    (layer,) = identified(bound, inputs, layers="*MultiHeadDotProduct*")
    assert layer.spec == AttentionSpec(32, 4)
    assert layer.name == "MultiHeadDotProductAttention_0"
    assert layer.names["v_proj.bias"] == "value/bias"


# ---- Handwritten layers --------------------------------------------------------------------------

BY_EINSUM = AttentionSpec(
    32,
    4,
    num_kv_heads=2,
    qkv_bias=False,
    out_bias=False,
    qk_norm=Norm(weight="1+w"),
    rope=Rope(),
    scale=0.25,
    soft_cap=20.0,
    window_size=5,
)
BY_LIBRARY = AttentionSpec(
    32, 4, num_kv_heads=2, qkv_bias=False, out_bias=False, rope=Rope(500000.0, pairs="interleaved")
)
PACKED = AttentionSpec(32, 4, num_kv_heads=2, qk_norm=Norm(over="width", eps=1e-5))


@pytest.mark.thorough
@pytest.mark.costly("JAX compiles each layer")
def test_handwritten_layers_are_identified():
    """Three handwritten layers of a decoder are identified in
    order, with specs, positions and weight names.
    """
    layers = identified(Decoder(EinsumAttention, LibraryAttention, PackedAttention), tokens_of())
    assert [layer.name for layer in layers] == ["layers.0.attn", "layers.1.attn", "layers.2.attn"]
    assert [unheld(layer.spec) for layer in layers if layer.spec is not None] == [
        BY_EINSUM,
        BY_LIBRARY,
        PACKED,
    ]
    assert all(layer.is_causal for layer in layers)
    assert layers[0].positions == layers[1].positions == ((0, 15), (20000, 20015))
    assert layers[2].names["v_proj.bias"] == "qkv.bias"
    assert layers[0].names["q_norm.weight"] == "query_norm.scale"


def test_context_gate_is_identified():
    """A sigmoid gate on the context is `Gate(bias=True)`, with the name of its bias."""

    class Gated(LibraryAttention):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.gate = nnx.Linear(32, 32, rngs=rngs)

        def attended(self, x: Any) -> Any:
            context = super().attended(x)
            return context * jax.nn.sigmoid(self.gate(x)).reshape(context.shape)

    (layer,) = identified(Decoder(Gated), tokens_of())
    assert layer.spec == BY_LIBRARY.replace(gate=Gate(bias=True))
    assert layer.names["gate_proj.bias"] == "gate.bias"


def test_tiled_key_heads_are_reordered():
    """Query heads of tiled key heads are put in the order 0 2 1 3, in
    weights and rows, which the report states.
    """

    class Tiled(LibraryAttention):
        def attended(self, x: Any) -> Any:
            k, v = (jnp.tile(part(x), (1, 1, 2, 1)) for part in (self.key, self.value))
            return jax.nn.dot_product_attention(self.query(x), k, v)

    model = Decoder(Tiled)
    (layer,) = identified(model, tokens_of())
    assert layer.spec == BY_LIBRARY.replace(rope=None)
    kernel = np.asarray(model.layers[0].attn.query.kernel[...])[:, [0, 2, 1, 3]]
    assert (layer.weights["q_proj.weight"] == kernel.reshape(32, 32).T).all()
    assert (
        "in the order 0 2 1 3, whose head n uses key head n mod 2: tiled; so are columns of "
        "out_proj" in str(layer)
    )
    assert layer.rows["q_proj.weight"] == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
    assert "k_proj.weight" not in layer.rows


def test_evidence_of_scores_is_observed():
    """The soft cap counts as seen, and the scale was found as a factor of the scores."""
    (layer,) = identified(Decoder(EinsumAttention), tokens_of())
    how = {entry.field: entry for entry in layer.evidence}
    assert how["soft_cap"].is_observed
    assert how["scale"].how == "factor of the scores"


def test_flax_alibi_is_identified():
    """A bias of minus slope times distance on the scores is identified as `Alibi()`."""

    def biased(scores: Any) -> Any:
        distances = jnp.abs(jnp.arange(16)[:, None, None] - jnp.arange(16))
        return scores - distances * (2.0 ** -(2.0 * jnp.arange(1, 5)))[:, None]

    (layer,) = identified(Decoder(EinsumAttention, capped=False, scores=biased), tokens_of())
    assert layer.spec == BY_EINSUM.replace(soft_cap=None, alibi=Alibi())


def test_layers_are_selected_by_pattern():
    """`layers` selects layers by a pattern of their class, or by patterns of their names."""
    model = Decoder(LibraryAttention, PackedAttention)
    assert [layer.name for layer in identified(model, tokens_of(), layers="Packed*")] == [
        "layers.1.attn"
    ]
    assert [layer.name for layer in identified(model, tokens_of(), layers=["layers.0*"])] == [
        "layers.0.attn"
    ]


@pytest.mark.thorough
def test_scanned_layers_are_identified():
    """Both layers of an `nnx.scan` are identified, under different names."""

    class Loop(nnx.Module):
        def __init__(self):
            @nnx.vmap(in_axes=0)
            def make(rngs: nnx.Rngs) -> LibraryAttention:
                return LibraryAttention(rngs)

            self.layers = make(nnx.Rngs(0).split(2))

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, layer):
                return x + layer(x)

            return forward(x, self.layers)

    layers = identified(Loop(), {"x": array(2, 10, 32)})
    assert [layer.spec for layer in layers] == [BY_LIBRARY, BY_LIBRARY]
    assert len({layer.name for layer in layers}) == 2


def test_scale_applied_twice_is_squared():
    """Queries and scores that are both multiplied by 0.25 have a scale of 0.0625."""
    (layer,) = identified(
        Decoder(EinsumAttention, scores=lambda scores: 0.25 * scores), tokens_of()
    )
    assert layer.spec == BY_EINSUM.replace(scale=0.0625)


def test_fixed_key_positions_are_seen_near():
    """A mask whose keys always count from 0 is identified
    at positions 0 to 15 alone, none far away.
    """
    (layer,) = identified(
        Decoder(EinsumAttention, key_positions=lambda positions: jnp.arange(16)[None]), tokens_of()
    )
    assert layer.spec == BY_EINSUM
    assert layer.positions == ((0, 15),)


# ---- Errors --------------------------------------------------------------------------------------


class Dropping(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attn = nnx.MultiHeadAttention(4, 32, dropout_rate=0.5, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attn(x)


class Deciding(nnx.Module):
    def __call__(self, x):
        return x if x.sum() > 0 else -x


def test_unsupported_flax_model_raises():
    """Dropout in training, a condition on array values, and a model without attention raise errors;
    the model with dropout is identified after `eval()`.
    """
    inputs, model = {"x": array(2, 10, 32)}, Dropping()
    model.train()
    with rejects("model", "random numbers"):
        identify(model, inputs)
    with rejects("model", "bool"):
        identify(Deciding(), inputs)
    with rejects("model", "none"):
        identify(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), {"inputs": inputs["x"]})
    model.eval()
    identified(model, inputs)


def test_flax_attention_sinks_are_rejected():
    """A layer that appends zeros to its scores, as sinks do, is rejected, naming sinks."""

    def with_sinks(scores: Any) -> Any:
        return jnp.concatenate([scores, jnp.zeros((*scores.shape[:-1], 1))], axis=-1)

    odd = {"capped": False, "logits": with_sinks, "weights": lambda weights: weights[..., :-1]}
    (layer,) = identify(Decoder(EinsumAttention, **odd), tokens_of())
    assert layer.spec is None
    assert "sinks" in layer.reason


def test_bfloat16_attention_is_rejected():
    """A layer that computes in bfloat16 is rejected, naming the dtype."""
    module = nnx.MultiHeadAttention(4, 32, dtype=jnp.bfloat16, decode=False, rngs=nnx.Rngs(0))
    (layer,) = identify(module, {"inputs_q": array(2, 10, 32)})
    assert layer.spec is None
    assert "bfloat16" in layer.reason


@sample(1)
@pytest.mark.parametrize("shape", [(1, 16), (2, 7)])
def test_too_few_tokens_are_rejected(shape):
    """One sequence of 16 tokens, or two of 7, are too few to identify a layer."""
    tokens = {name: x[: shape[0], : shape[1]] for name, x in tokens_of().items()}
    (layer,) = identify(Decoder(LibraryAttention), tokens)
    assert layer.spec is None
    assert layer.reason


# ---- Oddities that no field of a specification describes -----------------------------------------


def leaked(scores: Any) -> Any:
    """Favor the first key."""
    return scores.at[..., 0].add(0.1)


ODDITIES: dict[str, dict[str, Any]] = {
    "half-of-the-pairs-faster": {"faster": 1.01},
    "norm-eps-of-keys": {"key_eps": 1e-3},
    "mask-one-off": {"first": -1},
    "mask-without-the-token": {"first": 1},
    "cap-after-the-mask": {"cap_last": True},
    "positions-of-queries-one-late": {"turned_positions": lambda positions: positions + 1},
    "positions-only-near": {
        "turned_positions": lambda positions: jnp.where(positions < 1000, positions, positions + 1)
    },
    "heads-of-queries-mixed": {"queries": lambda q: q + 0.1 * q[:, :, ::-1]},
    "queries-larger": {"queries": lambda q: q * jnp.where(jnp.arange(8) < 4, 1.01, 1.0)},
    "queries-centered": {"queries": lambda q: q - 0.1 * q.mean(axis=-1, keepdims=True)},
    "keys-of-the-token-before": {"keys": lambda k: jnp.roll(k, 1, axis=1)},
    "values-squared": {"values": lambda v: v + 0.01 * v**2},
    "values-of-the-token-before": {"values": lambda v: jnp.roll(v, 1, axis=1)},
    "values-larger": {"values": lambda v: 1.001 * v},
    "values-clipped-if-large": {"values": lambda v: jnp.clip(v, -20.0, 20.0)},
    "queries-squashed-if-large": {"queries": lambda q: jnp.where(jnp.abs(q) > 3.0, 1.01 * q, q)},
    "first-key-favored": {"scores": leaked},
    "scores-squared": {"scores": lambda scores: scores + 0.01 * scores**2},
    "weights-sharper": {"weights": lambda weights: weights**1.01},
    "context-of-heads-exchanged": {"context": lambda context: context + 0.1 * context[:, :, ::-1]},
    "context-squashed": {"context": lambda context: 8.0 * jnp.tanh(context / 8.0)},
    "context-by-position": {
        "context": lambda context: context * (1.0 + 0.001 * jnp.arange(16))[:, None, None]
    },
    "output-with-input": {"output": lambda output, x: output + 0.01 * x},
    "output-larger": {"output": lambda output, x: 1.001 * output},
}
"""Changes of a layer that no field of a specification describes."""

OUTSIDE = {"output-with-input", "output-larger"}
"""Changes after the output projection, and so outside of attention."""


SHORT = [
    "half-of-the-pairs-faster",
    "mask-one-off",
    "cap-after-the-mask",
    "positions-only-near",
    "values-squared",
]


@sample(name=[*SHORT, "values-clipped-if-large"])
@pytest.mark.parametrize("name", list(ODDITIES))
def test_injected_oddity_is_rejected(name):
    """A layer with an oddity in attention has no spec, and a reason; oddities after the output
    projection do not change the spec.
    """
    (layer,) = identify(Decoder(EinsumAttention, **ODDITIES[name]), tokens_of())
    assert (
        (layer.spec == BY_EINSUM) if name in OUTSIDE else (layer.spec is None and layer.reason)
    ), str(layer)


# ---- The command ---------------------------------------------------------------------------------

LIVE = """
import jax
from flax import nnx

def make():
    layer = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    return layer, {"inputs_q": jax.random.normal(jax.random.key(0), (2, 10, 32))}
"""


def test_spec_command_observes_flax_model(tmp_path, monkeypatch, capsys):
    """`mha-parity spec --live` prints the spec of a Flax model
    and writes weight names to the JSON report.
    """
    from parity.use.cli.main import main

    (tmp_path / "live_flax.py").write_text(LIVE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = tmp_path / "report.json"
    assert main(["spec", "--live", "live_flax:make", "--json", str(report)]) == 0
    assert "AttentionSpec(32, 4)" in capsys.readouterr().out
    (layer,) = json.loads(report.read_text())["layers"]
    assert layer["identification"]["names"]["out_proj.weight"] == "out.kernel"
