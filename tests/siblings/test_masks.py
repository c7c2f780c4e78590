"""Masks of every implementation against literal tables, and against each other."""

import numpy as np
import pytest
from helpers.samples import sample

# 1 = masked. Every table was written down by hand, from the words of the docstring.
TABLES = {
    "causal-1x1": ("create_causal_mask", (1,), {}, [[0]]),
    "causal-3x3": ("create_causal_mask", (3,), {}, [[0, 1, 1], [0, 0, 1], [0, 0, 0]]),
    "causal-2x4": ("create_causal_mask", (2, 4), {}, [[0, 1, 1, 1], [0, 0, 1, 1]]),
    "causal-4x2": ("create_causal_mask", (4, 2), {}, [[0, 1], [0, 0], [0, 0], [0, 0]]),
    "padding": ("create_padding_mask", ([1, 3], 3), {}, [[[[0, 1, 1]]], [[[0, 0, 0]]]]),
    "padding-empty": ("create_padding_mask", ([0, 2], 2), {}, [[[[1, 1]]], [[[0, 0]]]]),
    "padding-1": ("create_padding_mask", ([1], 1), {}, [[[[0]]]]),
    "attention-nothing": ("create_attention_mask", (2, 3), {}, [[[[0, 0, 0], [0, 0, 0]]]]),
    "attention-causal": (
        "create_attention_mask",
        (2, 3),
        {"is_causal": True},
        [[[[0, 1, 1], [0, 0, 1]]]],
    ),
    "attention-padding": (
        "create_attention_mask",
        (2,),
        {"key_padding_lengths": [1, 2]},
        [[[[0, 1], [0, 1]]], [[[0, 0], [0, 0]]]],
    ),
    "attention-causal-padding": (
        "create_attention_mask",
        (3,),
        {"is_causal": True, "key_padding_lengths": [2, 3, 0]},
        [
            [[[0, 1, 1], [0, 0, 1], [0, 0, 1]]],
            [[[0, 1, 1], [0, 0, 1], [0, 0, 0]]],
            [[[1, 1, 1], [1, 1, 1], [1, 1, 1]]],
        ],
    ),
    "attention-segments": (
        "create_attention_mask",
        (3,),
        {"segment_ids": np.array([[7, 7, 2]], np.int32), "key_padding_lengths": [2]},
        [[[[0, 0, 1], [0, 0, 1], [1, 1, 1]]]],
    ),
    "attention-segments-2x3": (
        "create_attention_mask",
        (2, 3),
        {
            "segment_ids": (np.array([[1, 2]], np.int32), np.array([[2, 1, 1]], np.int32)),
            "is_causal": True,
        },
        [[[[1, 1, 1], [0, 1, 1]]]],
    ),
    "cached-prefill": (
        "create_causal_mask_with_cache",
        (3, 3, 0),
        {},
        [[0, 1, 1], [0, 0, 1], [0, 0, 0]],
    ),
    "cached-step": ("create_causal_mask_with_cache", (1, 4, 3), {}, [[0, 0, 0, 0]]),
    "cached-chunk": (
        "create_causal_mask_with_cache",
        (2, 5, 3),
        {},
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]],
    ),
    "window-1": (
        "create_sliding_window_mask",
        (3,),
        {"window_size": 1},
        [[0, 1, 1], [1, 0, 1], [1, 1, 0]],
    ),
    "window-2": (
        "create_sliding_window_mask",
        (4,),
        {"window_size": 2},
        [[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0]],
    ),
    "window-2x4": (
        "create_sliding_window_mask",
        (2, 4),
        {"window_size": 2},
        [[0, 1, 1, 1], [0, 0, 1, 1]],
    ),
    "window-past-the-keys": (
        "create_sliding_window_mask",
        (4, 2),
        {"window_size": 2},
        [[0, 1], [0, 0], [1, 0], [1, 1]],
    ),
    "window-3-of-3": (
        "create_sliding_window_mask",
        (3,),
        {"window_size": 3},
        [[0, 1, 1], [0, 0, 1], [0, 0, 0]],
    ),
    "window-9-of-3": (
        "create_sliding_window_mask",
        (3,),
        {"window_size": 9},
        [[0, 1, 1], [0, 0, 1], [0, 0, 0]],
    ),
    "slots-one-token": (
        "create_cache_mask",
        (np.array([1, 0], np.int32), 1, 3),
        {},
        [[[[0, 0, 1]]], [[[0, 1, 1]]]],
    ),
    "slots-prefill": (
        "create_cache_mask",
        (np.array([0], np.int32), 3, 4),
        {},
        [[[[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]]]],
    ),
    "slots-ragged": (
        "create_cache_mask",
        ([2, 0], 2, 4),
        {},
        [[[[0, 0, 0, 1], [0, 0, 0, 0]]], [[[0, 1, 1, 1], [0, 0, 1, 1]]]],
    ),
    "slots-full": ("create_cache_mask", (np.array([3], np.int32), 1, 4), {}, [[[[0, 0, 0, 0]]]]),
    "slots-past-the-end": (
        "create_cache_mask",
        (np.array([3], np.int32), 2, 4),
        {},
        [[[[0, 0, 0, 0], [0, 0, 0, 0]]]],
    ),
}

LENGTHS = {
    "list": [2, 0],
    "tuple": (2, 0),
    "int32": np.array([2, 0], np.int32),
    "uint8": np.array([2, 0], np.uint8),
}
"""Types of lengths that callers may pass."""


def option(sibling, x):
    """Return an argument as the framework accepts it, also within a pair."""
    if isinstance(x, tuple) and isinstance(x[0], np.ndarray):
        return tuple(sibling.option(part) for part in x)
    return sibling.option(x)


@sample(12, jax=1)
@pytest.mark.parametrize("name", TABLES)
def test_mask_is_its_table(sibling, name):
    """Each function that makes a mask returns the boolean table that was written by hand."""
    function, args, keywords, table = TABLES[name]
    args = [option(sibling, x) for x in args]
    keywords = {key: option(sibling, x) for key, x in keywords.items()}
    mask = sibling.numpy(getattr(sibling.package, function)(*args, **keywords))
    np.testing.assert_array_equal(mask, np.array(table, bool), strict=True)


@sample(jax=1)
@pytest.mark.parametrize("kind", LENGTHS)
def test_padding_mask_takes_lengths(sibling, kind):
    """A padding mask accepts lengths of any integer type."""
    mask = sibling.package.create_padding_mask(option(sibling, LENGTHS[kind]), 3)
    assert sibling.numpy(mask)[:, 0, 0].tolist() == [[False, False, True], [True, True, True]]


@sample(jax=1)
@pytest.mark.parametrize("kind", LENGTHS)
def test_attention_mask_takes_lengths(sibling, kind):
    """An attention mask accepts lengths of any integer type."""
    mask = sibling.package.create_attention_mask(
        1, 3, key_padding_lengths=option(sibling, LENGTHS[kind])
    )
    assert sibling.numpy(mask)[:, 0, 0].tolist() == [[False, False, True], [True, True, True]]


def test_lengths_may_be_numpy_arrays(sibling):
    """Functions of masks accept NumPy lengths directly, in NumPy's default dtype."""
    mask = sibling.package.create_padding_mask(np.array([2, 0]), 3)
    assert sibling.numpy(mask)[:, 0, 0].tolist() == [[False, False, True], [True, True, True]]


@sample(jax=1)
@pytest.mark.parametrize("cache_len", [0, 1, 5])
def test_cached_mask_is_the_last_rows(sibling, cache_len):
    """The mask of new tokens over a cache is the last rows of the causal mask."""
    num_tokens = cache_len + 3
    cached = sibling.numpy(sibling.package.create_causal_mask_with_cache(3, num_tokens, cache_len))
    assert np.array_equal(
        cached, sibling.numpy(sibling.package.create_causal_mask(num_tokens))[cache_len:]
    )
