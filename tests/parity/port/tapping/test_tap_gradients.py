"""A tapped training step shows the first wrong gradient of a live model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import linen, nnx
from transformers.models.qwen3 import modeling_qwen3

import mha_torch
import parity

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TOKENS = torch.tensor([[5, 3, 8, 1, 7, 2], [1, 2, 3, 4, 5, 6]])


def made(dtype=torch.float32, attention="eager"):
    """Return a small model."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **SIZES,
        num_hidden_layers=2,
        intermediate_size=48,
        vocab_size=64,
        attn_implementation=attention,
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()


def verdict_on(model, tokens=TOKENS, **inputs):
    """Tap a training step and compare its layers."""
    specs = parity.specs_of(model.config.to_dict())
    weights = {
        i: parity.from_transformers(layer.self_attn, model.config)[1]
        for i, layer in enumerate(model.model.layers)
    }
    with parity.tap(model) as tapped:
        model(tokens, labels=tokens, **inputs).loss.backward()
    return parity.check_tap(tapped, specs, weights)


def verdict_without_head(model, attentions):
    """Tap a step of a model that returns hidden states, and compare its layers."""
    weights = {}
    for index, attention in enumerate(attentions):
        _, weights[index] = parity.from_transformers(attention, model.config, index)
    with parity.tap(model) as tapped:
        model(TOKENS).last_hidden_state.square().sum().backward()
    return parity.check_tap(tapped, parity.specs_of(model.config.to_dict()), weights)


def in_layer_1(monkeypatch, attention):
    """Replace the attention function of layer 1."""
    original = modeling_qwen3.eager_attention_forward

    def function(module, query, key, value, mask, **options):
        if module.layer_idx != 1:
            return original(module, query, key, value, mask, **options)
        return attention(original, module, query, key, value, mask, **options)

    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", function)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_training_step_agrees(dtype, attention):
    """All layers of a right training step agree, and their gradients were compared."""
    verdict = verdict_on(made(dtype, attention))
    assert verdict.passed
    stages = [comparison.stage for comparison in verdict.layers[1].comparisons]
    assert stages[-5:] == ["grad.context", "grad.v", "grad.q", "grad.k", "grad.query"]


def detached_keys(original, module, query, key, value, mask, **options):
    return original(module, query, key.detach(), value, mask, **options)


def first_of_group(original, module, query, key, value, mask, **options):
    """Let the first query head of each group alone reach keys and values."""
    is_first = (torch.arange(4) % 2 == 0)[:, None, None]
    keys, values = (x.repeat_interleave(2, 1) for x in (key, value))
    keys = torch.where(is_first, keys, keys.detach())
    values = torch.where(is_first, values, values.detach())
    scores = query @ keys.mT * options["scaling"] + mask
    attn_weights = scores.softmax(-1)
    return (attn_weights @ values).transpose(1, 2).contiguous(), attn_weights


def detached_weights(original, module, query, key, value, mask, **options):
    keys, values = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ keys.mT * options["scaling"] + mask
    attn_weights = scores.softmax(-1).detach()
    return (attn_weights @ values).transpose(1, 2).contiguous(), attn_weights


@pytest.mark.parametrize(
    ("attention", "name", "stage"),
    [
        (detached_keys, "grad-stopped-at-k", "grad.k"),
        (detached_weights, "grad-stopped-at-attn-weights", "grad.q"),
        (first_of_group, "grad-group-not-summed", "grad.v"),
    ],
)
def test_first_wrong_gradient_is_named(monkeypatch, attention, name, stage):
    """A gradient that is stopped in one layer is named there, and other layers agree."""
    in_layer_1(monkeypatch, attention)
    verdict = verdict_on(made())
    assert [layer.index for layer in verdict.wrong] == [1]
    assert verdict.first.diagnosis.likely_bug == name
    assert verdict.first.difference.stage == stage


def test_forward_bug_hides_its_gradients():
    """If a layer's forward pass is wrong, its gradients are not compared."""
    model = made()
    model.model.layers[1].self_attn.scaling = 1.0
    verdict = verdict_on(model)
    assert verdict.first.diagnosis.likely_bug == "scale-missing"
    stages = [comparison.stage for comparison in verdict.first.comparisons]
    assert not any(stage.startswith("grad.") for stage in stages)


def test_frozen_inputs_raise_no_alarm():
    """Frozen embeddings and projections are no stopped gradients, and padding is left out."""
    model = made()
    model.model.embed_tokens.weight.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.requires_grad_(False)
    assert verdict_on(model).passed
    padded = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    assert verdict_on(made(), attention_mask=padded).passed


def test_bert_gradients_end_at_the_context():
    """A right training step of BERT agrees: its output projection is in another module."""
    config = transformers.BertConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertModel(config).eval()
    verdict = verdict_without_head(model, [layer.attention for layer in model.encoder.layer])
    assert verdict.passed, str(verdict)
    assert "grad.context" in {comparison.stage for comparison in verdict.layers[1].comparisons}


def test_bloom_gradients_lack_the_residual():
    """A right training step of BLOOM agrees: its layers add a residual, which gets no gradient."""
    config = transformers.BloomConfig(vocab_size=16, hidden_size=16, n_head=2, n_layer=2)
    model = transformers.BloomModel(config).eval()
    verdict = verdict_without_head(model, [layer.self_attention for layer in model.h])
    assert verdict.passed, str(verdict)
    assert "grad.query" in {comparison.stage for comparison in verdict.layers[1].comparisons}


class ByHand(torch.nn.Module):
    """Attention as two products, with a residual around it."""

    def __init__(self, gradient_factor=1.0):
        super().__init__()
        self.layer = mha_torch.MultiHeadSelfAttention(16, 2)
        self.gradient_factor = gradient_factor

    def forward(self, x):
        heads = []
        for name in "qkv":
            features = getattr(self.layer, f"{name}_proj")(x)
            if name == "k" and features.requires_grad:
                features.register_hook(lambda gradient: gradient * self.gradient_factor)
            heads.append(features.unflatten(-1, (2, 8)).transpose(1, 2))
        q, k, v = heads
        context = (q @ k.mT * 8**-0.5).softmax(-1) @ v
        return self.layer.out_proj(context.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("kind", ["ours", "nn.MultiheadAttention", "by hand"])
def test_layers_of_torch_agree_in_training(kind):
    """The gradient of the input of any torch layer is compared, apart from a residual."""
    torch.manual_seed(0)
    if kind == "by hand":
        layer = ByHand()
        spec, weights = parity.AttentionSpec(16, 2), parity.weights_of(layer.layer)
    elif kind == "ours":
        layer = mha_torch.MultiHeadSelfAttention(16, 2)
        spec, weights = layer.spec, parity.weights_of(layer)
    else:
        layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        spec, weights = parity.from_module(layer)
    x = torch.randn(2, 5, 16, requires_grad=True)
    with parity.tap(torch.nn.Sequential(layer), layers=["0"]) as tapped:
        result = layer(x, x, x) if kind == "nn.MultiheadAttention" else layer(x)
        output = result[0] if isinstance(result, tuple) else result
        (output + x).square().sum().backward()
    verdict = parity.check_tap(tapped, [spec], [weights], is_causal=False)
    assert verdict.passed, str(verdict)
    assert [comparison.stage for comparison in verdict.layers[0].comparisons][-1] == "grad.query"


def test_gradient_lost_at_a_projection_shows():
    """A gradient that changes between the heads and the input differs at the input."""
    torch.manual_seed(0)
    layer = ByHand(gradient_factor=0.5)
    x = torch.randn(2, 5, 16, requires_grad=True)
    with parity.tap(torch.nn.Sequential(layer), layers=["0"]) as tapped:
        layer(x).square().sum().backward()
    weights = [parity.weights_of(layer.layer)]
    verdict = parity.check_tap(tapped, [parity.AttentionSpec(16, 2)], weights, is_causal=False)
    assert verdict.first.difference.stage == "grad.query"


def test_saved_recordings_have_gradients(tmp_path):
    """A saved recording has its gradients; after the tap, nothing is recorded any more."""
    model = made()
    with parity.tap(model) as tapped:
        loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    assert "grad.output" not in tapped.layers[0].calls[0].values
    with parity.tap(model) as tapped:
        model(TOKENS, labels=TOKENS).loss.backward()
    tapped.save(tmp_path / "tap.safetensors")
    loaded = parity.load_tap(tmp_path / "tap.safetensors")
    assert loaded.layers[0].calls[0].values["grad.k"].shape == (2, 2, 6, 8)


# ---- Flax ----------------------------------------------------------------------------------------


def keys_stopped(query, key, value, **options):
    return linen.dot_product_attention(query, jax.lax.stop_gradient(key), value, **options)


class LinenLayers(linen.Module):
    """Two layers of linen, the second with an attention function of its own."""

    function: object = linen.dot_product_attention

    @linen.compact
    def __call__(self, x):
        functions = (linen.dot_product_attention, self.function)
        for index, function in enumerate(functions):
            layer = linen.MultiHeadDotProductAttention(2, attention_fn=function, name=f"{index}")
            x = x + layer(x)
        return x


@pytest.mark.thorough
@pytest.mark.costly("a training step of JAX, operation by operation")
def test_training_step_of_linen_is_tapped(rng):
    """A right training step of linen agrees, and a stopped gradient is named in its layer."""
    x = jnp.asarray(rng.standard_normal((2, 4, 8), dtype=np.float32))
    variables = LinenLayers().init(jax.random.key(0), x)
    spec = parity.AttentionSpec(8, 2)
    weights = {}
    for index in range(2):
        params = {"params": variables["params"][f"{index}"]}
        layer = linen.MultiHeadDotProductAttention(2, qkv_features=8).bind(params)
        weights[index] = parity.weights_of(layer)
    for function, wrong in ((linen.dot_product_attention, []), (keys_stopped, [1])):
        model = LinenLayers(function)

        def loss(variables, model=model):
            return jnp.square(model.apply(variables, x)).sum()

        with parity.tap(model) as tapped, jax.disable_jit():
            jax.grad(loss)(variables)
        verdict = parity.check_tap(tapped, [spec, spec], weights, is_causal=False)
        assert [layer.index for layer in verdict.wrong] == wrong
        stages = [comparison.stage for comparison in verdict.layers[1].comparisons]
        assert stages[-5:] == ["grad.context", "grad.v", "grad.q", "grad.k", "grad.query"]
    assert verdict.first.diagnosis.likely_bug == "grad-stopped-at-k"


@pytest.mark.costly("a training step of JAX, operation by operation")
def test_training_step_of_nnx_is_tapped(rng):
    """`nnx.grad`, which calls copies of modules, is tapped; the modules are as before."""
    layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.standard_normal((2, 4, 8), dtype=np.float32))
    attributes = set(vars(layer))
    with parity.tap(layer) as tapped, jax.disable_jit():
        nnx.grad(lambda layer: jnp.square(layer(x)).sum())(layer)
    assert set(vars(layer)) == attributes
    values = tapped.layers[0].calls[0].values
    assert {"grad.output", "grad.context", "grad.q", "grad.k", "grad.v"} <= values.keys()
    verdict = parity.check_tap(
        tapped, [parity.AttentionSpec(8, 2)], [parity.weights_of(layer)], is_causal=False
    )
    assert verdict.passed
