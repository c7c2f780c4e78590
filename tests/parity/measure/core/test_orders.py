"""Orders of heads and features, on small examples by hand."""

import jax.numpy as jnp
import numpy as np
import torch

from parity.measure.core.orders import (
    heads_innermost,
    of_whole_heads,
    reordered,
    reversed_heads,
    rolled_heads,
    tiled_heads,
    within_heads,
)


def test_orders_of_heads_equal_examples():
    """Reversed, rolled and tiled heads match an example."""
    assert reversed_heads(4).tolist() == [3, 2, 1, 0]
    assert rolled_heads(4).tolist() == [3, 0, 1, 2]
    assert tiled_heads(6, 2).tolist() == [0, 2, 4, 1, 3, 5]


def test_repeated_heads_match_tiling():
    """Query heads in the order of `tiled_heads` use by repetition the heads that they use by
    tiling.
    """
    num_heads, num_kv_heads = 12, 3
    used_by_tiling = np.arange(num_heads) % num_kv_heads
    used_by_repetition = np.arange(num_heads) // (num_heads // num_kv_heads)
    order = tiled_heads(num_heads, num_kv_heads)
    np.testing.assert_array_equal(used_by_tiling[order], used_by_repetition)


def test_orders_of_features_equal_examples():
    """Features of 3 heads of width 2 are reordered by heads, within heads, and heads innermost."""
    assert of_whole_heads(np.array([2, 0, 1]), 2).tolist() == [4, 5, 0, 1, 2, 3]
    assert within_heads(np.array([1, 0]), 3).tolist() == [1, 0, 3, 2, 5, 4]
    assert heads_innermost(3, 2).tolist() == [0, 2, 4, 1, 3, 5]


def test_arrays_of_frameworks_are_reordered():
    """An axis of a NumPy, torch or JAX array is reordered by an order of negative strides."""
    x = np.arange(12.0).reshape(3, 4)
    expected = x[:, ::-1]
    for array in (x, torch.from_numpy(x), jnp.asarray(x)):
        for axis in (1, -1):
            np.testing.assert_array_equal(reordered(array, reversed_heads(4), axis), expected)
