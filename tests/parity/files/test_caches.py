"""Caches as files: any sibling's in, any sibling's out, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.refusals import refuses, refuses_type
from helpers.samples import sample

import mha_torch
import parity
from mha_spec import AttentionSpec
from parity import load_cache, load_tensors, save_cache, save_tensors
from parity.backends import load_backend

DTYPES = {name: np.dtype(name) for name in ("float32", "float16")} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


def filled(sibling, rng, dtype=np.float32):
    """A cache of two sequences of three and one tokens."""
    keys, values = (rng.standard_normal((2, 3, 5, 4)).astype(dtype) for _ in range(2))
    return sibling.package.KVCache(sibling.array(keys), sibling.array(values), sibling.array([3, 1]))


def parts(sibling, cache):
    return {name: sibling.numpy(getattr(cache, name)) for name in ("keys", "values", "lengths")}


@sample(jax=1)
@pytest.mark.parametrize("to", ["jax", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_goes_from_any_sibling_to_any_other(sibling, to, dtype, rng, tmp_path):
    cache = filled(sibling, rng, DTYPES[dtype])
    save_cache(tmp_path / "cache.safetensors", cache)
    found = load_cache(tmp_path / "cache.safetensors", to)
    assert type(found).__module__.startswith(f"mha_{to}.")
    other = load_backend(to)
    for name, expected in parts(sibling, cache).items():
        array = other.to_numpy(getattr(found, name))
        assert (array.dtype, array.tobytes()) == (expected.dtype, expected.tobytes()), name


@sample(jax=0)
def test_decoding_goes_on_with_a_cache_that_was_read(sibling, rng, tmp_path):
    module = sibling.module("MultiHeadAttentionWithCache", AttentionSpec(16, 4))
    prompt, token = (sibling.array(rng.standard_normal((2, n, 16)).astype(np.float32)) for n in (3, 1))
    _, cache = module(prompt, module.init_cache(2, 5))
    save_cache(tmp_path / "cache.safetensors", cache)
    output, _ = module(token, load_cache(tmp_path / "cache.safetensors", sibling.name))
    expected, _ = module(token, cache)
    np.testing.assert_array_equal(sibling.numpy(output), sibling.numpy(expected))


def test_values_of_another_width_are_kept(tmp_path):
    save_cache(tmp_path / "cache.safetensors", mha_torch.init_cache(1, 2, 3, 4, value_head_dim=6))
    found = load_cache(tmp_path / "cache.safetensors", "torch")
    assert (found.keys.shape, found.values.shape) == ((1, 2, 3, 4), (1, 2, 3, 6))


def test_the_bytes_depend_on_the_cache_alone(sibling, rng, tmp_path):
    cache = filled(sibling, rng)
    for name in "ab":
        save_cache(tmp_path / name, cache)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_float64_is_not_narrowed_in_silence(tmp_path):
    cache = mha_torch.init_cache(1, 2, 3, 4, dtype=torch.float64)
    save_cache(tmp_path / "cache.safetensors", cache)
    with refuses("JAX", "64"):
        load_cache(tmp_path / "cache.safetensors", "jax")


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"lengths": np.array([3, 6], np.int32)}, refuses("…/c", "[3, 6]")),
        ({"lengths": np.array([3, -1], np.int32)}, refuses("…/c", "[3, -1]")),
        ({"lengths": np.array([3], np.int32)}, refuses("…/c")),
        ({"lengths": np.array([3, 1])}, refuses("…/c", "{'lengths': 'int64', 'keys': 'float32', 'values': 'float32'}")),
        ({"keys": np.zeros((2, 3, 4, 4), np.float32)}, refuses("…/c")),
        (
            {"keys": np.zeros((2, 3, 5, 4), np.float16)},
            refuses("…/c", "{'lengths': 'int32', 'values': 'float32', 'keys': 'float16'}"),
        ),
        ({"more": np.zeros(1)}, refuses("…/c")),
    ],
)
def test_a_file_that_is_no_cache_is_refused(changes, refusal, sibling, rng, tmp_path):
    tensors = parts(sibling, filled(sibling, rng)) | changes
    save_tensors(tmp_path / "c", tensors, {"format": "1", "kind": "cache"})
    with refusal:
        load_cache(tmp_path / "c", sibling.name)


def test_weights_are_no_cache(tmp_path):
    spec = parity.AttentionSpec(8, 2)
    parity.save_weights(tmp_path / "w", parity.random_weights(spec), spec)
    with refuses("…/w"):
        load_cache(tmp_path / "w", "torch")


def test_what_is_no_cache_is_refused_and_nothing_written(tmp_path):
    with refuses_type("cache", "dict"):
        save_cache(tmp_path / "c", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("framework", "refusal"),
    [
        ("tt", refuses("framework", "framework='tt': its caches are padded to device tiles")),
        ("numpy", refuses("framework", framework="numpy")),
    ],
)
def test_frameworks_without_such_a_cache_are_refused_by_name(framework, refusal, tmp_path):
    with refusal:
        load_cache(tmp_path / "c", framework)


def test_a_cache_file_is_an_ordinary_safetensors_file(sibling, rng, tmp_path):
    save_cache(tmp_path / "c", filled(sibling, rng))
    tensors, metadata = load_tensors(tmp_path / "c")
    assert (sorted(tensors), metadata["kind"]) == (["keys", "lengths", "values"], "cache")
