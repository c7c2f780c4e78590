"""Inputs with any number of batch axes match a single batch axis bit for bit, in every
implementation.
"""

import math

import numpy as np
import pytest
from helpers.samples import sample

from mha_spec import AttentionSpec, Rope

SPEC = AttentionSpec(8, 2, rope=Rope())
AXES, T = (2, 3), 5
LENGTHS = np.array([[5, 0, 2], [4, 1, 5]], np.int32)


def merged(x, num_unmerged):
    """The array with its batch axes merged into one."""
    unmerged = x.shape[x.ndim - num_unmerged :]
    return np.broadcast_to(x, (*AXES, *unmerged)).reshape(math.prod(AXES), *unmerged)


def assert_same(sibling, x, options, of_one, axes):
    """Compare a layer with itself on one batch axis, with the options of `of_one`."""
    layer = sibling.filled("MultiHeadAttention", SPEC)
    results = []
    for tokens, options_of_call in (
        (x, options),
        (x.reshape(-1, *x.shape[-2:]), {**options, **of_one}),
    ):
        options_of_call = {name: sibling.option(option) for name, option in options_of_call.items()}
        results.append(
            [
                sibling.numpy(part)
                for part in layer(sibling.array(tokens), **options_of_call, need_weights=True)
            ]
        )
    for actual, expected in zip(*results, strict=True):
        assert actual.shape == (*axes, *expected.shape[1:])
        assert np.array_equal(actual.reshape(expected.shape), expected)


@sample(jax=0)  # in jax_and_torch/test_axes.py with gradients
@pytest.mark.parametrize("shape", [(T, T), (2, T, T), (3, 1, T, T), (2, 1, 1, T, T)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_several_batch_axes_are_one(sibling, rng, is_causal, shape):
    """A layer accepts several batch axes of its input, masks, biases, lengths and positions."""
    x = rng.standard_normal((*AXES, T, 8)).astype(np.float32)
    mask, bias = rng.random(shape) > 0.5, rng.random(shape).astype(np.float32)
    positions = np.arange(3 * T, dtype=np.int32).reshape(3, T)
    options = {"mask": mask, "bias": bias, "key_padding_lengths": LENGTHS, "positions": positions}
    of_one = {"key_padding_lengths": LENGTHS.reshape(-1), "positions": np.tile(positions, (2, 1))}
    if len(shape) > 3:
        of_one |= {"mask": merged(mask, 3), "bias": merged(bias, 3)}
    assert_same(sibling, x, {**options, "is_causal": is_causal}, of_one, AXES)


@sample(jax=0)  # in jax_and_torch/test_axes.py with gradients
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"key_padding_lengths": 3}], ids=str)
def test_no_batch_axis_is_a_batch_of_one(sibling, rng, options):
    """A layer accepts a single sequence without a batch axis."""
    of_one = {"key_padding_lengths": [3]} if "key_padding_lengths" in options else {}
    assert_same(sibling, rng.standard_normal((T, 8)).astype(np.float32), options, of_one, ())
