"""Masks against literal tables, against their one-line definitions, and against each other."""

import jax
import numpy as np
import pytest
import torch
from helpers.samples import sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mha_jax
import mha_torch

# `sibling` holds no state, so hypothesis may use one for all its examples. Compilation makes first examples slow.
definition = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SIZES = st.integers(1, 5)

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
    "attention-causal": ("create_attention_mask", (2, 3), {"is_causal": True}, [[[[0, 1, 1], [0, 0, 1]]]]),
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
    "cached-prefill": ("create_causal_mask_with_cache", (3, 3, 0), {}, [[0, 1, 1], [0, 0, 1], [0, 0, 0]]),
    "cached-step": ("create_causal_mask_with_cache", (1, 4, 3), {}, [[0, 0, 0, 0]]),
    "cached-chunk": ("create_causal_mask_with_cache", (2, 5, 3), {}, [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]),
    "window-1": ("create_sliding_window_mask", (3,), {"window_size": 1}, [[0, 1, 1], [1, 0, 1], [1, 1, 0]]),
    "window-2": (
        "create_sliding_window_mask",
        (4,),
        {"window_size": 2},
        [[0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0]],
    ),
    "window-2x4": ("create_sliding_window_mask", (2, 4), {"window_size": 2}, [[0, 1, 1, 1], [0, 0, 1, 1]]),
    "window-past-the-keys": (
        "create_sliding_window_mask",
        (4, 2),
        {"window_size": 2},
        [[0, 1], [0, 0], [1, 0], [1, 1]],
    ),
    "window-3-of-3": ("create_sliding_window_mask", (3,), {"window_size": 3}, [[0, 1, 1], [0, 0, 1], [0, 0, 0]]),
    "window-9-of-3": ("create_sliding_window_mask", (3,), {"window_size": 9}, [[0, 1, 1], [0, 0, 1], [0, 0, 0]]),
}
LENGTHS = {
    "list": lambda sibling: [2, 0],
    "tuple": lambda sibling: (2, 0),
    "int32": lambda sibling: sibling.array(np.array([2, 0], np.int32)),
    "uint8": lambda sibling: sibling.array(np.array([2, 0], np.uint8)),
    "numpy-int64": lambda sibling: np.array([2, 0]),
}


@sample(12, jax=1)
@pytest.mark.parametrize("name", TABLES)
def test_mask_is_its_table(sibling, name):
    function, args, keywords, table = TABLES[name]
    assert (
        sibling.numpy(getattr(sibling.package, function)(*args, **keywords)).tolist() == np.array(table, bool).tolist()
    )


@sample(12, jax=1)
@pytest.mark.parametrize("name", TABLES)
def test_mask_is_boolean(sibling, name):
    function, args, keywords, _ = TABLES[name]
    assert sibling.numpy(getattr(sibling.package, function)(*args, **keywords)).dtype == np.bool_


@sample(jax=1)
@pytest.mark.parametrize("kind", LENGTHS)
def test_padding_mask_takes_lengths_as(sibling, kind):
    mask = sibling.package.create_padding_mask(LENGTHS[kind](sibling), 3)
    assert sibling.numpy(mask)[:, 0, 0].tolist() == [[False, False, True], [True, True, True]]


@sample(jax=1)
@pytest.mark.parametrize("kind", LENGTHS)
def test_attention_mask_takes_lengths_as(sibling, kind):
    mask = sibling.package.create_attention_mask(1, 3, key_padding_lengths=LENGTHS[kind](sibling))
    assert sibling.numpy(mask)[:, 0, 0].tolist() == [[False, False, True], [True, True, True]]


@sample(jax=1)
@pytest.mark.parametrize("size", [np.int32(3), np.int64(3)], ids=["int32", "int64"])
def test_causal_mask_takes_the_integers_of_numpy(sibling, size):
    assert sibling.package.create_causal_mask(size).shape == (3, 3)


@sample(jax=0)
@definition
@given(num_queries=SIZES, num_keys=SIZES)
def test_causal_mask_hides_the_future(sibling, num_queries, num_keys):
    t, s = np.ogrid[:num_queries, :num_keys]
    assert np.array_equal(sibling.numpy(sibling.package.create_causal_mask(num_queries, num_keys)), s > t)


@definition
@given(data=st.data(), num_keys=SIZES)
def test_padding_mask_hides_what_lies_beyond_the_length(sibling, data, num_keys):
    lengths = data.draw(st.lists(st.integers(0, num_keys), min_size=1, max_size=3))
    b, _, _, s = np.ogrid[: len(lengths), :1, :1, :num_keys]

    mask = sibling.numpy(sibling.package.create_padding_mask(lengths, num_keys))

    assert np.array_equal(mask, s >= np.array(lengths)[b])


@definition
@given(data=st.data(), num_queries=SIZES, num_keys=SIZES)
def test_attention_mask_joins_causality_and_padding(sibling, data, num_queries, num_keys):
    lengths = data.draw(st.lists(st.integers(0, num_keys), min_size=1, max_size=3))
    b, _, t, s = np.ogrid[: len(lengths), :1, :num_queries, :num_keys]

    mask = sibling.package.create_attention_mask(num_queries, num_keys, is_causal=True, key_padding_lengths=lengths)

    assert np.array_equal(sibling.numpy(mask), (s > t) | (s >= np.array(lengths)[b]))


@definition
@given(num_new=SIZES, cache_len=st.integers(0, 5))
def test_cached_mask_hides_the_future_from_the_newest_tokens(sibling, num_new, cache_len):
    t, s = np.ogrid[:num_new, : cache_len + num_new]

    mask = sibling.package.create_causal_mask_with_cache(num_new, cache_len + num_new, cache_len)

    assert np.array_equal(sibling.numpy(mask), s > cache_len + t)


@definition
@given(num_queries=SIZES, num_keys=SIZES, window_size=st.integers(1, 7))
def test_window_mask_shows_only_the_last_keys(sibling, num_queries, num_keys, window_size):
    t, s = np.ogrid[:num_queries, :num_keys]

    mask = sibling.package.create_sliding_window_mask(num_queries, num_keys, window_size=window_size)

    assert np.array_equal(sibling.numpy(mask), (s > t) | (s <= t - window_size))


@sample(jax=1)
@pytest.mark.parametrize("cache_len", [0, 1, 5])
def test_cached_mask_is_the_last_rows_of_the_causal_mask(sibling, cache_len):
    num_tokens = cache_len + 3

    cached = sibling.numpy(sibling.package.create_causal_mask_with_cache(3, num_tokens, cache_len))

    assert np.array_equal(cached, sibling.numpy(sibling.package.create_causal_mask(num_tokens))[cache_len:])


def test_padding_mask_traces_lengths():
    mask = jax.jit(mha_jax.create_padding_mask, static_argnums=1)(np.array([1, 3], np.int32), 3)
    assert np.array_equal(mask, mha_jax.create_padding_mask([1, 3], 3))


def test_attention_mask_traces_lengths():
    masked = jax.jit(lambda lengths: mha_jax.create_attention_mask(3, is_causal=True, key_padding_lengths=lengths))
    assert np.array_equal(
        masked(np.array([1, 3], np.int32)),
        mha_jax.create_attention_mask(3, is_causal=True, key_padding_lengths=[1, 3]),
    )


@pytest.mark.parametrize(
    ("function", "args", "keywords"),
    [
        ("create_causal_mask", (2,), {}),
        ("create_padding_mask", ([1], 2), {}),
        ("create_attention_mask", (2,), {"is_causal": True, "key_padding_lengths": [1]}),
        ("create_causal_mask_with_cache", (1, 3, 2), {}),
        ("create_sliding_window_mask", (2,), {"window_size": 1}),
    ],
)
def test_torch_mask_lies_on_the_device_asked_for(function, args, keywords):
    mask = getattr(mha_torch, function)(*args, **keywords, device="meta")
    assert mask.device == torch.device("meta")
