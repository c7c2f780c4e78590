"""Multi-head latent attention: its two forms, its cache and its errors; other files test released
layers.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from helpers.frameworks import SIBLINGS
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

import mha_torch
import parity
from mha_spec import AttentionSpec, Latent, Rope, Temperature
from parity.measure.core.weights import random_weights

SPEC = AttentionSpec(
    *(32, 4),
    head_dim=16,
    value_head_dim=8,
    latent=Latent(32, 8, q_rank=12),
    rope=Rope(100.0, rotary_dim=8, rotated="last", pairs="interleaved"),
    temperature=Temperature(4, scale=0.5),
)
PLAIN = AttentionSpec(32, 4)
WEIGHTS = random_weights(SPEC, 3)
X = np.random.default_rng(4).standard_normal((2, 13, 32)).astype(np.float32)


def module(sibling, spec=SPEC):
    return parity.load_into(
        sibling.module("MultiHeadLatentAttention", spec), random_weights(spec, 3), spec
    )


def expected(sibling, **keywords):
    whole = parity.load_into(sibling.module("MultiHeadSelfAttention", SPEC), WEIGHTS, SPEC)
    return sibling.numpy(whole(sibling.array(X), is_causal=True, **keywords))


def near(actual, wanted, allowed=2e-6):
    return np.abs(actual - wanted).max() <= allowed * np.abs(wanted).max()


@sample(jax=0)
@pytest.mark.parametrize("absorb", [True, False])
def test_both_latent_forms_match_full_pass(sibling, absorb):
    """Chunks and steps with absorbed or expanded latents match one causal pass."""
    layer, outputs = module(sibling), []
    framework_weights = (
        sibling.backend.to_params if sibling.name == "jax" else sibling.backend.to_state_dict
    )
    cache = layer.init_cache(2, 14)
    for begin, end in [(0, 7), (7, 8), (8, 12), (12, 13)]:
        output, cache = sibling.package.multi_head_latent_attention(
            sibling.array(X[:, begin:end]),
            framework_weights(WEIGHTS, SPEC),
            SPEC,
            cache,
            absorb=absorb,
        )
        outputs.append(sibling.numpy(output))
    assert near(np.concatenate(outputs, axis=1), expected(sibling))


@sample(jax=0)
@pytest.mark.parametrize("absorb", [True, False])
def test_latent_factors_equal_scaled_norms(sibling, absorb):
    """Factors of latents give the outputs of norm weights multiplied by them, and differ from no
    factors by more than 10%.
    """
    spec = replace(SPEC, latent=replace(SPEC.latent, q_factor=1.75, kv_factor=2.5))
    framework_weights = (
        sibling.backend.to_params if sibling.name == "jax" else sibling.backend.to_state_dict
    )
    folded = {
        name: WEIGHTS[name] * factor
        for name, factor in (("q_a_norm.weight", 1.75), ("kv_a_norm.weight", 2.5))
    }
    results = []
    for weights, spec_of_layer in ((WEIGHTS, spec), (WEIGHTS | folded, SPEC), (WEIGHTS, SPEC)):
        cache, outputs = sibling.package.init_latent_cache(2, 13, 32, 8), []
        for begin, end in ((0, 12), (12, 13)):
            output, cache = sibling.package.multi_head_latent_attention(
                sibling.array(X[:, begin:end]),
                framework_weights(weights, spec_of_layer),
                spec_of_layer,
                cache,
                absorb=absorb,
            )
            outputs.append(sibling.numpy(output))
        whole = parity.load_into(
            sibling.module("MultiHeadSelfAttention", spec_of_layer), weights, spec_of_layer
        )
        results += [
            np.concatenate(outputs, axis=1),
            sibling.numpy(whole(sibling.array(X), is_causal=True)),
        ]
    with_factors, _, *others = results
    assert all(near(other, with_factors) for other in results[1:4])
    assert not any(near(other, with_factors, 0.1) for other in others[2:])


@sample(jax=0)
def test_module_uses_the_cheaper_form(sibling, monkeypatch):
    """A module expands latents for a prompt of 12 tokens and absorbs keys in a step; the limit is
    10 tokens.
    """
    package, taken = sibling.package, []
    for name in ("absorb_keys", "expand_latents"):
        original = getattr(package, name)

        def counted(*inputs, name=name, original=original):
            taken.append(name)
            return original(*inputs)

        monkeypatch.setattr(f"{package.__name__}.cache_mha.{name}", counted)
    layer = module(sibling)
    cache = layer.init_cache(2, 13)
    for begin, end in [(0, 12), (12, 13)]:
        _, cache = layer(sibling.array(X[:, begin:end]), cache)
    assert taken == ["expand_latents", "absorb_keys"]
    assert SPEC.absorbs(10)
    assert not SPEC.absorbs(11)


@sample(jax=0)
def test_ragged_sequences_match_full_passes(sibling):
    """Sequences of different lengths match a full pass of each, and outputs of padding are 0."""
    layer, outputs = module(sibling), []
    cache = layer.init_cache(2, 10)
    for (begin, end), added in (((0, 5), (5, 3)), ((5, 6), (1, 0)), ((6, 9), (2, 3))):
        output, cache = layer(sibling.array(X[:, begin:end]), cache, new_lengths=list(added))
        outputs.append(sibling.numpy(output))
    assert sibling.numpy(cache.lengths).tolist() == [8, 6]
    for row, tokens in enumerate(([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 6, 7, 8])):
        whole = parity.load_into(sibling.module("MultiHeadSelfAttention", SPEC), WEIGHTS, SPEC)
        wanted = sibling.numpy(whole(sibling.array(X[row : row + 1, tokens]), is_causal=True))
        rows = np.concatenate(outputs, axis=1)[row][tokens]
        assert near(rows, wanted[0])
    assert not outputs[0][1, 3:].any()
    assert not outputs[1][1].any()


def test_cache_size_per_token(sibling):
    """A cache has kv_rank + rope_dim elements per token, as cache_nbytes says."""
    cache = module(sibling).init_cache(2, 10)
    assert cache.latents.shape == (2, 1, 10, 40)
    assert cache.latents.nbytes == SPEC.cache_nbytes(2, 10, np.dtype(np.float32))


@sample(jax=0)
def test_cache_can_be_changed(sibling):
    """Reordered, repeated, grown and cropped caches hold the expected latents and lengths."""
    layer = module(sibling)
    _, cache = layer(sibling.array(X[:, :5]), layer.init_cache(2, 6))
    latents = sibling.numpy(cache.latents)
    reordered, repeated, grown, cropped = (
        cache.reorder([1, 0]),
        cache.repeat(2),
        cache.grow(9),
        cache.crop([2, 5]),
    )
    assert (sibling.numpy(reordered.latents) == latents[[1, 0]]).all()
    assert (sibling.numpy(repeated.latents) == latents[[0, 0, 1, 1]]).all()
    assert (sibling.numpy(grown.latents)[:, :, :6] == latents).all()
    assert grown.capacity == 9
    assert sibling.numpy(cropped.lengths).tolist() == [2, 5]
    assert not sibling.numpy(cropped.latents)[0, 0, 2:].any()
    assert all(
        isinstance(changed, sibling.package.LatentCache)
        for changed in (reordered, repeated, grown, cropped)
    )


@sample(jax=0)
def test_mask_and_bias_apply_to_latents(sibling):
    """A step over latents with a mask and a bias matches one causal pass with them."""
    mask = np.zeros((2, 1, 1, 14), bool)
    mask[:, :, :, 3] = True
    bias = np.random.default_rng(5).standard_normal((1, 4, 1, 14)).astype(np.float32)
    layer = module(sibling)
    _, cache = layer(sibling.array(X[:, :12]), layer.init_cache(2, 14))
    output, _ = layer(
        sibling.array(X[:, 12:]), cache, mask=sibling.array(mask), bias=sibling.array(bias)
    )
    of_last = {"mask": sibling.array(mask[..., :13]), "bias": sibling.array(bias[..., :13])}
    assert near(sibling.numpy(output), expected(sibling, **of_last)[:, 12:])


@sample(jax=0)
def test_missing_norm_is_detected(sibling):
    """Control: without the weights of the norm of latents, outputs differ by more than 1%."""
    weights = {**WEIGHTS, "kv_a_norm.weight": np.ones_like(WEIGHTS["kv_a_norm.weight"])}
    layer = parity.load_into(sibling.module("MultiHeadLatentAttention", SPEC), weights, SPEC)
    output, _ = layer(sibling.array(X[:, :5]), layer.init_cache(2, 6))
    assert not near(sibling.numpy(output), expected(sibling)[:, :5], 1e-2)


@pytest.mark.parametrize(
    ("call", "input_error"),
    {
        "no latents": (
            lambda sibling, _: sibling.module("MultiHeadLatentAttention", PLAIN),
            rejects("spec", spec=...),
        ),
        "cache of keys": (
            lambda sibling, layer: layer(
                sibling.array(X),
                sibling.module("MultiHeadAttentionWithCache", SPEC).init_cache(2, 4),
            ),
            rejects_type("cache", "KVCache"),
        ),
        "cache of latents": (
            lambda sibling, layer: sibling.module("MultiHeadAttentionWithCache", SPEC)(
                sibling.array(X), layer.init_cache(2, 20)
            ),
            rejects_type("cache", "LatentCache"),
        ),
        "cache of another layer": (
            lambda sibling, layer: layer(
                sibling.array(X), sibling.package.init_latent_cache(2, 20, 16, 8)
            ),
            rejects("cache.latents", {"cache.latents.shape": (2, 1, 20, 24)}),
        ),
        "no array": (
            lambda sibling, layer: layer([1.0, 2.0], layer.init_cache(2, 12)),
            rejects_type("x", "list"),
        ),
        "one axis": (
            lambda sibling, layer: layer(sibling.array(X[0, 0]), layer.init_cache(2, 12)),
            rejects("x", {"x.shape": (32,)}),
        ),
        "too many tokens": (
            lambda sibling, layer: layer(sibling.array(X), layer.init_cache(2, 12)),
            rejects("lengths + new tokens", lengths=[0, 0], new_lengths=...),
        ),
        "a key": (
            lambda sibling, _: sibling.module(
                "MultiHeadAttention", AttentionSpec(32, 4, latent=Latent(8, 4))
            )(sibling.array(X), sibling.array(X)),
            rejects("key"),
        ),
        "widths of latents": (
            lambda sibling, layer: sibling.package.expand_latents(
                layer.project, sibling.array(X[:, None]), SPEC
            ),
            rejects("latents", {"latents.shape": (2, 1, 13, 32)}),
        ),
        "size of a cache": (
            lambda sibling, _: sibling.package.init_latent_cache(2, 4, 0, 8),
            rejects("kv_rank", kv_rank=0),
        ),
    }.values(),
)
def test_invalid_latent_inputs_raise(sibling, call, input_error):
    """Specs, caches, inputs and sizes that do not fit latents raise an error that names the
    argument.
    """
    with input_error:
        call(sibling, module(sibling))


@sample(jax=0)
def test_empty_inputs_yield_empty_outputs(sibling):
    """Inputs without tokens or sequences give outputs of their shape and unchanged lengths."""
    layer, whole = (
        module(sibling),
        parity.load_into(sibling.module("MultiHeadSelfAttention", SPEC), WEIGHTS, SPEC),
    )
    for x in (X[:, :0], X[:0]):
        assert whole(sibling.array(x), is_causal=True).shape == x.shape
        output, cache = layer(sibling.array(x), layer.init_cache(len(x), 4))
        assert output.shape == x.shape
        assert sibling.numpy(cache.lengths).tolist() == [x.shape[1]] * len(x)


@sample(jax=0)
@pytest.mark.parametrize("absorb", [True, False])
def test_nan_padding_reaches_no_gradient(sibling, absorb):
    """NaN in the padding of a prompt leaves the gradients of all weights finite and non-zero."""
    x = X[:, :5].copy()
    x[:, 3:] = np.nan
    framework_weights = (
        sibling.backend.to_params if sibling.name == "jax" else sibling.backend.to_state_dict
    )
    weights, cache = (
        framework_weights(WEIGHTS, SPEC),
        sibling.package.init_latent_cache(2, 6, 32, 8),
    )

    def loss(weights):
        options = {"new_lengths": sibling.array([3, 3]), "absorb": absorb}
        output, _ = sibling.package.multi_head_latent_attention(
            sibling.array(x), weights, SPEC, cache, **options
        )
        return (output**2).sum()

    if sibling.name == "jax":
        grads = jax.tree.leaves(jax.grad(loss)(weights))
    else:
        grads = torch.autograd.grad(
            loss({name: w.requires_grad_() for name, w in weights.items()}), weights.values()
        )
    assert all(np.isfinite(sibling.numpy(grad)).all() for grad in grads)
    assert all(sibling.numpy(grad).any() for grad in grads)


# ---- Features of one framework -------------------------------------------------------------------


class Wrapped(torch.nn.Module):
    """A projection with an additional one, as in LoRA."""

    def __init__(self, module):
        super().__init__()
        self.layer, self.beside = module, torch.nn.Linear(32, 64, bias=False)

    def forward(self, x):
        return self.layer(x) + self.beside(x)


def test_replaced_projection_is_used():
    """A kv_b_proj replaced by a wrapped one, as LoRA does, is used in steps over latents."""
    layer = module(SIBLINGS["torch"])
    whole = parity.load_into(mha_torch.MultiHeadSelfAttention(SPEC), WEIGHTS, SPEC)
    layer.kv_b_proj = whole.kv_b_proj = Wrapped(layer.kv_b_proj)
    x = torch.from_numpy(X[:, :5])
    with torch.no_grad():
        wanted = whole(x, is_causal=True)
        _, cache = layer(x[:, :4], layer.init_cache(2, 6))
        output, _ = layer(x[:, 4:], cache)
    assert near(output.numpy(), wanted[:, 4:].numpy())


def doubled(layer):
    layer.kv_b_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def called_otherwise(layer):
    forward = layer.kv_b_proj.forward
    layer.kv_b_proj.forward = lambda x: 2 * forward(x)


def pruned(layer):
    torch.nn.utils.prune.l1_unstructured(layer.kv_b_proj, "weight", amount=0.5)
    with torch.no_grad():
        layer.kv_b_proj.weight_orig *= 3  # `weight` is computed from it only during the call


@pytest.mark.parametrize("change", [doubled, called_otherwise, pruned])
def test_modified_projection_is_called(change):
    """A kv_b_proj with a hook, a replaced forward or pruning is called in steps over latents."""
    layer = module(SIBLINGS["torch"])
    whole = parity.load_into(mha_torch.MultiHeadSelfAttention(SPEC), WEIGHTS, SPEC)
    change(layer)
    change(whole)
    x = torch.from_numpy(X[:, :5])
    with torch.no_grad():
        _, cache = layer(x[:, :4], layer.init_cache(2, 6))
        output, _ = layer(x[:, 4:], cache)
        assert near(output.numpy(), whole(x, is_causal=True)[:, 4:].numpy())


def test_autocast_narrows_the_cache():
    """Under autocast, latents and outputs are bfloat16 and match one pass within 5%."""
    layer = module(SIBLINGS["torch"])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = layer.init_cache(2, 6)
        output, cache = layer(torch.from_numpy(X[:, :5]), cache)
    assert cache.latents.dtype == output.dtype == torch.bfloat16
    assert near(output.float().numpy(), expected(SIBLINGS["torch"])[:, :5], 0.05)


def test_gradients_reach_cached_latents():
    """Gradients of a step with respect to all tokens match the gradients of one pass."""
    sibling = SIBLINGS["torch"]
    layer, x = module(sibling).double(), torch.from_numpy(X[:, :6]).double().requires_grad_()
    _, cache = layer(x[:, :5], layer.init_cache(2, 6))
    output, _ = layer(x[:, 5:], cache)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    whole = parity.load_into(mha_torch.MultiHeadSelfAttention(SPEC), WEIGHTS, SPEC).double()
    (wanted,) = torch.autograd.grad(whole(x, is_causal=True)[:, 5:].sum(), x)
    assert near(gradient.numpy(), wanted.numpy(), 1e-12)


def test_unknown_overflow_in_jit_yields_nan():
    """Under jit, a token beyond the capacity returns NaN, and the cache keeps its length; earlier
    ones match one pass.
    """
    sibling = SIBLINGS["jax"]
    layer = module(sibling)
    step = jax.jit(lambda x, cache: layer(x, cache))
    cache, outputs = layer.init_cache(2, 6), []
    for begin, end in ((0, 5), (5, 6), (6, 7)):
        output, cache = step(sibling.array(X[:, begin:end]), cache)
        outputs.append(np.asarray(output))
    assert near(np.concatenate(outputs[:2], axis=1), expected(sibling)[:, :6])
    assert np.isnan(outputs[2]).all()
    assert np.asarray(cache.lengths).tolist() == [6, 6]


def test_yarn_factor_is_kept_in_diagnosis():
    """A layer with YaRN's score factor and the scale of value heads is diagnosed as scale-by-value-
    head-dim alone.
    """
    case = replace(parity.CASES["latent-yarn"], key_padding_lengths=None)
    problem = parity.make_problem(case, "float32")
    spec = problem.spec
    wrong = replace(spec, scale=spec.rope.scaling.score_factor * spec.value_head_dim**-0.5)
    weights = {name: torch.from_numpy(weight) for name, weight in problem.weights.items()}
    output, _ = mha_torch.multi_head_attention(
        torch.from_numpy(problem.inputs["query"]), weights, wrong
    )
    (finding,) = parity.diagnose({"output": output.numpy()}, problem).named
    assert finding.bugs == ("scale-by-value-head-dim",)
