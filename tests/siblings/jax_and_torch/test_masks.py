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

# `sibling` has no state, so all examples may share one. Compilation makes the first examples slow.
definition = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SIZES = st.integers(1, 5)


@sample(jax=1)
@pytest.mark.parametrize("size", [np.int32(3), np.int64(3)], ids=["int32", "int64"])
def test_causal_mask_accepts_numpy_integers(sibling, size):
    """`create_causal_mask` accepts NumPy integers as sizes."""
    assert sibling.package.create_causal_mask(size).shape == (3, 3)


@sample(jax=0)
@definition
@given(num_queries=SIZES, num_keys=SIZES)
def test_causal_mask_hides_the_future(sibling, num_queries, num_keys):
    """A causal mask hides key s from query t if s > t."""
    t, s = np.ogrid[:num_queries, :num_keys]
    assert np.array_equal(
        sibling.numpy(sibling.package.create_causal_mask(num_queries, num_keys)), s > t
    )


@definition
@given(data=st.data(), num_keys=SIZES)
def test_padding_mask_hides_padding(sibling, data, num_keys):
    """A padding mask hides key s of sequence b if s is at least the length of b."""
    lengths = data.draw(st.lists(st.integers(0, num_keys), min_size=1, max_size=3))
    b, _, _, s = np.ogrid[: len(lengths), :1, :1, :num_keys]

    mask = sibling.numpy(sibling.package.create_padding_mask(lengths, num_keys))

    assert np.array_equal(mask, s >= np.array(lengths)[b])


@definition
@given(data=st.data(), num_queries=SIZES, num_keys=SIZES)
def test_attention_mask_is_causal_and_padded(sibling, data, num_queries, num_keys):
    """An attention mask hides a key if causality or its sequence's length hides it."""
    lengths = data.draw(st.lists(st.integers(0, num_keys), min_size=1, max_size=3))
    b, _, t, s = np.ogrid[: len(lengths), :1, :num_queries, :num_keys]

    mask = sibling.package.create_attention_mask(
        num_queries, num_keys, is_causal=True, key_padding_lengths=lengths
    )

    assert np.array_equal(sibling.numpy(mask), (s > t) | (s >= np.array(lengths)[b]))


@definition
@given(num_new=SIZES, cache_len=st.integers(0, 5))
def test_cached_mask_hides_the_future(sibling, num_new, cache_len):
    """With a cache, a causal mask hides key s from new token t if s > cache_len + t."""
    t, s = np.ogrid[:num_new, : cache_len + num_new]

    mask = sibling.package.create_causal_mask_with_cache(num_new, cache_len + num_new, cache_len)

    assert np.array_equal(sibling.numpy(mask), s > cache_len + t)


@definition
@given(num_queries=SIZES, num_keys=SIZES, window_size=st.integers(1, 7))
def test_window_mask_shows_only_recent_keys(sibling, num_queries, num_keys, window_size):
    """A window mask hides all keys of a query but the last `window_size` up to its own."""
    t, s = np.ogrid[:num_queries, :num_keys]

    mask = sibling.package.create_sliding_window_mask(
        num_queries, num_keys, window_size=window_size
    )

    assert np.array_equal(sibling.numpy(mask), (s > t) | (s <= t - window_size))


def test_padding_mask_traces_lengths():
    """In JAX, `create_padding_mask` accepts traced lengths."""
    mask = jax.jit(mha_jax.create_padding_mask, static_argnums=1)(np.array([1, 3], np.int32), 3)
    assert np.array_equal(mask, mha_jax.create_padding_mask([1, 3], 3))


def test_attention_mask_traces_lengths():
    """In JAX, `create_attention_mask` accepts traced lengths."""
    masked = jax.jit(
        lambda lengths: mha_jax.create_attention_mask(
            3, is_causal=True, key_padding_lengths=lengths
        )
    )
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
def test_torch_masks_use_requested_device(function, args, keywords):
    """In PyTorch, each function of masks creates them on the requested device."""
    mask = getattr(mha_torch, function)(*args, **keywords, device="meta")
    assert mask.device == torch.device("meta")
