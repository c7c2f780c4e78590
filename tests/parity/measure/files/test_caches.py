"""Caches as files: saved from one framework and loaded in any other, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample

import mha_torch
import parity
from mha_spec import AttentionSpec
from parity import load_cache, save_cache
from parity.measure.backends import load_backend
from parity.measure.core.weights import load_tensors, save_tensors, save_weights

DTYPES = {name: np.dtype(name) for name in ("float32", "float16")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}


def filled(sibling, rng, dtype=np.float32):
    """A cache of two sequences of three and one tokens."""
    keys, values = (rng.standard_normal((2, 3, 5, 4)).astype(dtype) for _ in range(2))
    return sibling.package.KVCache(
        sibling.array(keys), sibling.array(values), sibling.array([3, 1])
    )


def parts(sibling, cache):
    return {name: sibling.numpy(getattr(cache, name)) for name in ("keys", "values", "lengths")}


@sample(jax=1)
@pytest.mark.parametrize("to", ["jax", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_loads_in_either_framework(sibling, to, dtype, rng, tmp_path):
    """A cache saved from one framework loads in JAX and PyTorch with the same dtypes and bytes."""
    cache = filled(sibling, rng, DTYPES[dtype])
    save_cache(tmp_path / "cache.safetensors", cache)
    loaded = load_cache(tmp_path / "cache.safetensors", to)
    assert type(loaded).__module__.startswith(f"mha_{to}.")
    other = load_backend(to)
    for name, expected in parts(sibling, cache).items():
        array = other.to_numpy(getattr(loaded, name))
        assert (array.dtype, array.tobytes()) == (expected.dtype, expected.tobytes()), name


@sample(jax=0)
def test_decoding_continues_with_read_cache(sibling, rng, tmp_path):
    """Decoding a token gives the same output with the cache and with its saved copy."""
    module = sibling.module("MultiHeadAttentionWithCache", AttentionSpec(16, 4))
    prompt, token = (
        sibling.array(rng.standard_normal((2, n, 16)).astype(np.float32)) for n in (3, 1)
    )
    _, cache = module(prompt, module.init_cache(2, 5))
    save_cache(tmp_path / "cache.safetensors", cache)
    output, _ = module(token, load_cache(tmp_path / "cache.safetensors", sibling.name))
    expected, _ = module(token, cache)
    np.testing.assert_array_equal(sibling.numpy(output), sibling.numpy(expected))


def test_cache_keeps_the_width_of_values(tmp_path):
    """Values of 6 features keep their width next to keys of 4."""
    save_cache(tmp_path / "cache.safetensors", mha_torch.init_cache(1, 2, 3, 4, value_head_dim=6))
    loaded = load_cache(tmp_path / "cache.safetensors", "torch")
    assert (loaded.keys.shape, loaded.values.shape) == ((1, 2, 3, 4), (1, 2, 3, 6))


def test_cache_file_is_deterministic(sibling, rng, tmp_path):
    """Saving a cache twice writes the same bytes."""
    cache = filled(sibling, rng)
    for name in "ab":
        save_cache(tmp_path / name, cache)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_float64_cache_raises_in_jax(tmp_path):
    """Loading a float64 cache in JAX without x64 raises an error."""
    cache = mha_torch.init_cache(1, 2, 3, 4, dtype=torch.float64)
    save_cache(tmp_path / "cache.safetensors", cache)
    with rejects("JAX", "64"):
        load_cache(tmp_path / "cache.safetensors", "jax")


@pytest.mark.parametrize(
    ("changes", "input_error"),
    [
        ({"lengths": np.array([3, 6], np.int32)}, rejects("…/c", "[3, 6]")),
        ({"lengths": np.array([3, -1], np.int32)}, rejects("…/c", "[3, -1]")),
        ({"lengths": np.array([3], np.int32)}, rejects("…/c")),
        (
            {"lengths": np.array([3, 1])},
            rejects("…/c", "{'lengths': 'int64', 'keys': 'float32', 'values': 'float32'}"),
        ),
        ({"keys": np.zeros((2, 3, 4, 4), np.float32)}, rejects("…/c")),
        (
            {"keys": np.zeros((2, 3, 5, 4), np.float16)},
            rejects("…/c", "{'lengths': 'int32', 'values': 'float32', 'keys': 'float16'}"),
        ),
        ({"more": np.zeros(1)}, rejects("…/c")),
    ],
)
def test_invalid_cache_file_raises(changes, input_error, sibling, rng, tmp_path):
    """Wrong lengths, shapes, dtypes or names in a cache file raise an error with its path."""
    tensors = parts(sibling, filled(sibling, rng)) | changes
    save_tensors(tmp_path / "c", tensors, {"format": "1", "kind": "cache"})
    with input_error:
        load_cache(tmp_path / "c", sibling.name)


def test_weights_file_as_cache_raises(tmp_path):
    """Loading a file of weights as a cache raises an error with its path."""
    spec = parity.AttentionSpec(8, 2)
    save_weights(tmp_path / "w", parity.random_weights(spec), spec)
    with rejects("…/w"):
        load_cache(tmp_path / "w", "torch")


def test_saving_a_dict_as_cache_raises(tmp_path):
    """Saving a dictionary as a cache raises a TypeError and writes nothing."""
    with rejects_type("cache", "dict"):
        save_cache(tmp_path / "c", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("framework", "input_error"),
    [
        ("tt", rejects("framework", "framework='tt': its caches are padded to device tiles")),
        ("numpy", rejects("framework", framework="numpy")),
    ],
)
def test_cache_in_other_frameworks_raises(framework, input_error, tmp_path):
    """Loading a cache for `tt` or `numpy` raises an error with the framework."""
    with input_error:
        load_cache(tmp_path / "c", framework)


def test_cache_file_is_a_tensor_file(sibling, rng, tmp_path):
    """A cache file has the tensors keys, values and lengths, and its kind in the metadata."""
    save_cache(tmp_path / "c", filled(sibling, rng))
    tensors, metadata = load_tensors(tmp_path / "c")
    assert (sorted(tensors), metadata["kind"]) == (["keys", "lengths", "values"], "cache")
