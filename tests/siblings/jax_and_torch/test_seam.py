"""Tests of a layer's kernel: users may replace it on every path, and it receives checked inputs."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.input_errors import rejects
from helpers.samples import sample

import mha_jax
import parity
from mha_spec import AttentionSpec, Latent, Rope

SPEC = AttentionSpec(16, 4, num_kv_heads=2, window_size=2, soft_cap=5.0, sinks=True)
LATENT = AttentionSpec(
    16, 4, head_dim=8, latent=Latent(8, 4), rope=Rope(rotary_dim=4, rotated="last")
)


class Noting:
    """The plain path as a custom kernel that records its arguments."""

    def __init__(self, sibling):
        self.stages, self.calls = sibling.package.stages, []

    def __call__(self, query, key, value, mask, scores):
        self.calls.append((query, key, value, mask, scores))
        return self.stages.attend(query, key, value, mask, scores)[0]


def filled(sibling, kind, spec):
    return parity.load_into(sibling.module(kind, spec), parity.random_weights(spec), spec)


def tokens(sibling, seq_len=5, spec=SPEC):
    x = np.random.default_rng(0).standard_normal((2, seq_len, spec.d_in))
    return sibling.array(x.astype(np.float32))


def test_layer_passes_arguments_to_kernel(sibling):
    """A layer calls its kernel once, with split heads, the mask and the scores of its
    specification, and its output matches the output of the default kernel.
    """
    layer, x = filled(sibling, "MultiHeadAttention", SPEC), tokens(sibling)
    bias = sibling.array(np.random.default_rng(1).standard_normal((5, 5)).astype(np.float32))
    expected, _ = layer(x, is_causal=True, bias=bias)
    layer.kernel = kernel = Noting(sibling)
    actual, attn_weights = layer(x, is_causal=True, bias=bias)
    np.testing.assert_allclose(sibling.numpy(actual), sibling.numpy(expected), rtol=1e-5, atol=1e-6)
    ((query, key, value, mask, scores),) = kernel.calls
    assert attn_weights is None
    assert [tuple(x.shape) for x in (query, key, value)] == [
        (2, 4, 5, 4),
        (2, 2, 5, 4),
        (2, 2, 5, 4),
    ]
    assert (mask.is_causal, mask.span, mask.mask) == (True, SPEC.span, None)
    assert scores.spec == SPEC
    assert scores.bias is bias


@pytest.mark.parametrize(
    "hides", [{}, {"is_causal": True}, {"is_causal": True, "key_padding_lengths": [0, 3]}], ids=str
)
@pytest.mark.parametrize(
    "spec", [AttentionSpec(16, 4, num_kv_heads=2, window_size=2), SPEC], ids=["plain", "capped"]
)
def test_plain_sdpa_matches_default_kernel(sibling, spec, hides):
    """A layer with the plain kernel of its framework has the outputs of the default kernel, also
    for scores that the framework's function does not support.
    """
    layer, x = filled(sibling, "MultiHeadAttention", spec), tokens(sibling)
    hides = {
        name: sibling.array(np.array(x, np.int32)) if isinstance(x, list) else x
        for name, x in hides.items()
    }
    expected, _ = layer(x, **hides)
    layer.kernel = sibling.package.plain_sdpa
    actual, _ = layer(x, **hides)
    np.testing.assert_allclose(sibling.numpy(actual), sibling.numpy(expected), rtol=1e-5, atol=1e-6)


def test_attention_weights_bypass_the_kernel(sibling):
    """With `need_weights=True`, a layer returns attention weights and does not call its kernel."""
    layer = filled(sibling, "MultiHeadAttention", SPEC)
    layer.kernel = kernel = Noting(sibling)
    assert layer(tokens(sibling), need_weights=True)[1] is not None
    assert kernel.calls == []


@sample(jax=1)
@pytest.mark.parametrize("kind", ["MultiHeadAttentionWithCache", "MultiHeadLatentAttention"])
def test_cached_layers_call_their_kernel(sibling, kind):
    """A cached layer calls its kernel for a prompt and for a step, with the
    outputs of the default kernel.
    """
    spec, outputs = LATENT if kind == "MultiHeadLatentAttention" else SPEC, []
    for kernel in (None, Noting(sibling)):
        layer = filled(sibling, kind, spec)
        layer.kernel = kernel or layer.kernel
        prompt, cache = layer(tokens(sibling, 3, spec), layer.init_cache(2, 8))
        step, _ = layer(tokens(sibling, 1, spec), cache)
        outputs.append([sibling.numpy(x) for x in (prompt, step)])
    assert len(kernel.calls) == 2
    for expected, actual in zip(*outputs, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_single_token_uses_kernel_step():
    """One new token calls the `step` method of a kernel, in JAX only: its default kernel reads only
    the filled part of a cache.
    """

    class Stepping(mha_jax.fused.FusedAttention):
        def step(self, query, key, value, mask, scores):
            steps.append((query.shape, mask.q_offset.tolist()))
            return super().step(query, key, value, mask, scores)

    steps, layer = [], mha_jax.MultiHeadAttentionWithCache(SPEC, rngs=nnx.Rngs(0))
    layer.kernel = Stepping()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, SPEC.d_in)), jnp.float32)
    _, cache = layer(x[:, :3], layer.init_cache(2, 8), new_lengths=[3, 1])
    assert steps == []
    layer(x[:, 3:], cache)
    assert steps == [((2, 4, 1, 4), [3, 1])]


class Optional(Noting):
    """A kernel with the optional methods of the protocol, which records them; the methods of JAX
    and torch together.
    """

    def step(self, *arguments):
        self.calls.append("step")
        return self(*arguments)

    def check(self, *arguments):
        self.calls.append("check")

    def find_padding(self, *arguments):
        self.calls.append("find_padding")
        return arguments[0], None


def test_contained_kernel_keeps_methods(sibling):
    """A contained kernel finds padding, steps and checks as its kernel does; other kernels have the
    default.
    """
    layer, x = filled(sibling, "MultiHeadAttentionWithCache", SPEC), tokens(sibling, 1)
    cross = filled(sibling, "MultiHeadAttention", SPEC)
    kernel = Optional(sibling)
    if sibling.name == "torch":  # a kernel that finds padding there has only a part of the tokens
        with rejects("kernel", "Optional"):
            sibling.package.contained(kernel)
        kernel = type("Checking", (Noting,), {"check": Optional.check})(sibling)
    layer.kernel = cross.kernel = sibling.package.contained(kernel)
    layer(x, layer.init_cache(2, 8))
    cross(x, key_padding_lengths=[1, 1])
    methods = [call for call in kernel.calls if isinstance(call, str)]
    assert methods == {"jax": ["step", "find_padding"], "torch": ["check"]}[sibling.name]
    expected, _ = filled(sibling, "MultiHeadAttention", SPEC)(x, key_padding_lengths=[1, 1])
    cross.kernel = sibling.package.contained(Noting(sibling))
    actual, _ = cross(x, key_padding_lengths=[1, 1])
    np.testing.assert_allclose(sibling.numpy(actual), sibling.numpy(expected), rtol=1e-5, atol=1e-6)


def test_functions_accept_a_kernel(sibling):
    """`multi_head_attention` calls the given kernel once and matches the module."""
    layer, x = filled(sibling, "MultiHeadAttention", SPEC), tokens(sibling)
    weights = sibling.weights_of(layer)
    kernel = Noting(sibling)
    actual, _ = sibling.package.multi_head_attention(x, weights, SPEC, kernel=kernel)
    np.testing.assert_allclose(
        sibling.numpy(actual), sibling.numpy(layer(x)[0]), rtol=1e-5, atol=1e-6
    )
    assert len(kernel.calls) == 1


@pytest.mark.parametrize("wrong", ["mask", "bias", "lengths"])
def test_kernel_receives_only_valid_input(sibling, wrong):
    """An invalid mask, bias or length raises an error before the kernel is called."""
    layer = filled(sibling, "MultiHeadAttention", SPEC)
    layer.kernel = kernel = Noting(sibling)
    options, input_error = {
        "mask": (
            {"mask": sibling.array(np.ones((3, 3), bool))},
            rejects("mask", {"mask.shape": (3, 3)}),
        ),
        "bias": (
            {"bias": sibling.array(np.ones((3, 3), np.float32))},
            rejects("bias", {"bias.shape": (3, 3)}),
        ),
        "lengths": (
            {"key_padding_lengths": [6, 1]},
            rejects("key_padding_lengths", key_padding_lengths=[6, 1]),
        ),
    }[wrong]
    with input_error:
        layer(tokens(sibling), **options)
    assert kernel.calls == []
