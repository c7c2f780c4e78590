"""Inputs with any number of batch axes match a single batch axis bit for bit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.input_errors import rejects
from helpers.samples import sample

import mha_torch
from mha_spec import AttentionSpec, Rope

SPEC = AttentionSpec(8, 2, head_dim=8, fused_qkv=True, rope=Rope(sections=(1, 2, 1)))
CROSS = AttentionSpec(8, 2, d_kv=6, dropout=0.5)
AXES, T, S = (2, 3), 5, 4


def numbers(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def hides(*shape):
    return numbers(*shape) > 0.5


def merged(x, axes, num_unmerged):
    """Return the array with its batch axes merged into one, using NumPy."""
    unmerged = x.shape[x.ndim - num_unmerged :]
    return np.broadcast_to(x, (*axes, *unmerged)).reshape(math.prod(axes), *unmerged)


def results(sibling, function, x, options):
    """Return the output, the attention weights and the gradient of x."""
    options = {
        name: sibling.array(option) if isinstance(option, np.ndarray) else option
        for name, option in options.items()
    }
    cotangent = np.cos(np.arange(x.size, dtype=np.float32)).reshape(
        x.shape
    )  # the output has the shape of x
    if sibling.name == "jax":
        output, pull_back, attn_weights = jax.vjp(
            lambda x: function(x, **options), jnp.asarray(x), has_aux=True
        )
        (gradient,) = pull_back(jnp.asarray(cotangent))
    else:
        x = sibling.array(x).requires_grad_()
        output, attn_weights = function(x, **options)
        output.backward(sibling.array(cotangent))
        output, gradient = output.detach(), x.grad
        attn_weights = None if attn_weights is None else attn_weights.detach()
    return {
        name: sibling.numpy(tensor)
        for name, tensor in {
            "output": output,
            "attn_weights": attn_weights,
            "gradient": gradient,
        }.items()
        if tensor is not None
    }


def assert_gives_the_bits_of_one_axis(sibling, function, x, options, of_one):
    """Compare a call with a call on one merged batch axis, where `of_one` replaces the options that
    differ.
    """
    axes = x.shape[:-2]
    actual = results(sibling, function, x, options)
    expected = results(sibling, function, merged(x, axes, 2), options | of_one)
    assert actual.keys() == expected.keys()
    for name, one in expected.items():
        assert actual[name].shape == (*axes, *one.shape[1:])
        np.testing.assert_array_equal(actual[name].reshape(one.shape), one, err_msg=name)


@sample(jax=1)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "shape", [(T, T), (2, T, T), (3, 1, T, T), (2, 1, 1, T, T), (2, 3, 2, T, T)]
)
def test_several_batch_axes_match_one(sibling, shape, need_weights):
    """Self-attention with two batch axes matches one merged axis bit for bit in output, attention
    weights and gradient; a mask and a bias have 2 to 5 axes.
    """
    layer, mask, bias = sibling.module("MultiHeadAttention", SPEC), hides(*shape), numbers(*shape)
    lengths = np.array([[5, 0, 2], [4, 1, 5]], np.int32)
    positions = np.arange(3 * 3 * T, dtype=np.int32).reshape(3, 1, 3, T)
    options = {"mask": mask, "bias": bias, "key_padding_lengths": lengths, "positions": positions}
    of_one = {
        "key_padding_lengths": lengths.reshape(-1),
        "positions": np.tile(positions[:, 0], (1, 2, 1)),
    }
    of_one |= (
        {"mask": merged(mask, AXES, 3), "bias": merged(bias, AXES, 3)} if len(shape) > 3 else {}
    )
    options["need_weights"] = need_weights
    assert_gives_the_bits_of_one_axis(sibling, layer, numbers(*AXES, T, 8), options, of_one)


@sample(jax=1)
@pytest.mark.parametrize("need_weights", [False, True])
def test_no_batch_axis_matches_one(sibling, need_weights):
    """Self-attention without a batch axis matches one axis of size 1 bit for bit in output,
    attention weights and gradient.
    """
    layer = sibling.module("MultiHeadAttention", AttentionSpec(8, 2, rope=Rope()))
    positions = np.arange(2, 2 + T, dtype=np.int32)
    options = {
        "mask": hides(2, T, T),
        "key_padding_lengths": 4,
        "positions": positions,
        "need_weights": need_weights,
    }
    of_one = {"key_padding_lengths": [4], "positions": positions[None]}
    assert_gives_the_bits_of_one_axis(sibling, layer, numbers(T, 8), options, of_one)


def test_functions_accept_batch_axes(sibling):
    """`multi_head_attention` with keys and a dropout mask of two batch axes matches
    one merged axis bit for bit.
    """
    weights = sibling.weights_of(sibling.module("MultiHeadAttention", CROSS))
    key, keep = numbers(*AXES, S, 6), hides(3, 2, T, S)

    def function(x, **options):
        options |= {"weights": weights, "spec": CROSS, "training": True, "need_weights": True}
        return sibling.package.multi_head_attention(x, **options)

    of_one = {"key": merged(key, AXES, 2), "dropout_keep": merged(keep, AXES, 3)}
    options = {"key": key, "dropout_keep": keep}
    assert_gives_the_bits_of_one_axis(sibling, function, numbers(*AXES, T, 8), options, of_one)


def test_self_attention_accepts_batch_axes(sibling):
    """Causal self-attention with lengths and no or three batch axes
    matches one axis bit for bit.
    """
    layer = sibling.module("MultiHeadSelfAttention", AttentionSpec(8, 2))
    for axes, lengths in [((), np.int32(3)), ((2, 1, 2), np.array([[[1, 2]], [[3, 4]]], np.int32))]:
        x = numbers(*axes, T, 8)
        actual = layer(sibling.array(x), is_causal=True, key_padding_lengths=lengths.tolist())
        of_one = {"is_causal": True, "key_padding_lengths": lengths.reshape(-1).tolist()}
        expected = layer(sibling.array(x.reshape(-1, T, 8)), **of_one)
        np.testing.assert_array_equal(
            sibling.numpy(actual), sibling.numpy(expected).reshape(x.shape)
        )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("query", numbers(8)),
        ("key", numbers(6, S, 6)),
        ("key", numbers(1, 3, S, 6)),
        ("value", numbers(3, 2, S, 6)),
        ("mask", hides(2, 1, T, S)),
        ("bias", numbers(1, 2, 3, 1, T, S)),
        ("key_padding_lengths", np.array([1, 2, 3], np.int32)),
        ("positions", np.zeros((6, T), np.int32)),
    ],
)
def test_mismatched_batch_axes_raise(sibling, name, wrong):
    """An argument whose batch axes do not match the queries' raises an
    error with its name and shape.
    """
    layer = sibling.module("MultiHeadAttention", CROSS)
    tokens = {"query": numbers(*AXES, T, 8), "key": numbers(*AXES, S, 6), name: wrong}
    with rejects(name, {f"{name}.shape": wrong.shape}):
        layer(**{name: sibling.array(x) for name, x in tokens.items()})


def test_ambiguous_section_positions_raise(sibling):
    """With two batch axes and three sections, positions of shape (3, 1, T) raise an error: they
    could be three sections or broadcast batch axes.
    """
    layer = sibling.module("MultiHeadSelfAttention", SPEC)
    with rejects("positions", {"positions.ndim": 3}):
        layer(
            sibling.array(numbers(3, 2, T, 8)),
            positions=sibling.array(np.zeros((3, 1, T), np.int32)),
        )


def test_segments_accept_batch_axes(sibling):
    """Self-attention with segments and two batch axes matches one merged axis bit for bit."""
    layer, x = sibling.module("MultiHeadSelfAttention", AttentionSpec(8, 2)), numbers(*AXES, T, 8)
    ids = np.arange(2 * 3 * T, dtype=np.int32).reshape(*AXES, T) // 3
    actual = layer(sibling.array(x), segment_ids=sibling.array(ids))
    expected = layer(
        sibling.array(x.reshape(6, T, 8)), segment_ids=sibling.array(ids.reshape(6, T))
    )
    np.testing.assert_array_equal(sibling.numpy(actual).reshape(6, T, 8), sibling.numpy(expected))


def test_compiled_layer_accepts_batch_sizes():
    """In PyTorch, one compiled layer accepts inputs with two batch axes whose
    first size is 2 and then 4.
    """
    layer = mha_torch.MultiHeadAttention(AttentionSpec(8, 2))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for size in (2, 4):
        x = torch.ones(size, 3, T, 8)
        torch.testing.assert_close(
            compiled(x, key_padding_lengths=[[1, 2, 3]] * size)[0], layer(x)[0]
        )
