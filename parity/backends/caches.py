"""A cache of keys and values as a file: any sibling's in, any sibling's out."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from parity.backends import NEEDS, load_backend
from parity.core.weights import FORMAT, is_floating, load_tensors, save_tensors

FRAMEWORKS = ("jax", "torch")
"""The siblings whose caches have the shapes of the contract. Those of mha_tt are padded to the tiles of a device."""

PARTS = ("keys", "values", "lengths")


def save_cache(path: str | os.PathLike[str], cache: Any) -> None:
    """Write a cache to a safetensors file, whole or not at all.

    Args:
        path: file to write.
        cache: a `KVCache` of mha_jax or mha_torch. Every slot is kept bit for bit, those that hold nothing among them.

    Raises:
        OSError: if the file cannot be written.
        TypeError: if it is no such cache.
        ValueError: if keys, values and lengths do not fit together.
    """
    backend = load_backend(_framework_of(cache))
    tensors = {}
    for part in PARTS:
        array = getattr(cache, part)
        tensors[part] = array if isinstance(array, np.ndarray) else backend.to_numpy(array)
    _check("cache", tensors)
    save_tensors(path, tensors, {"format": FORMAT, "kind": "cache"})


def load_cache(path: str | os.PathLike[str], framework: str) -> Any:
    """Read a cache that `save_cache` wrote, whichever sibling's it was.

    Args:
        path: the file.
        framework: whose `KVCache` to make: `jax` or `torch`.

    Raises:
        ModuleNotFoundError: if the framework is not installed.
        OSError: if the file cannot be read.
        ValueError: if there is no such framework, the file is no cache, or JAX would narrow its float64.
    """
    _check_framework(framework)
    backend = load_backend(framework)
    tensors, metadata = load_tensors(path)
    if metadata.get("kind") != "cache" or metadata.get("format") != FORMAT or tensors.keys() != set(PARTS):
        raise ValueError(f"{path} must be a cache in format {FORMAT}, got {sorted(tensors)} and metadata {metadata}")
    _check(str(path), tensors)
    arrays = {part: backend.from_numpy(tensors[part]) for part in PARTS}
    if (kept := backend.to_numpy(arrays["keys"]).dtype) != tensors["keys"].dtype:
        raise ValueError(f"JAX must have jax_enable_x64 to hold {tensors['keys'].dtype}, got {kept} from {path}")
    return importlib.import_module(f"mha_{framework}").KVCache(**arrays)


def _framework_of(cache: Any) -> str:
    packages = {kind.__module__.partition(".")[0] for kind in type(cache).__mro__ if kind.__name__ == "KVCache"}
    for framework in NEEDS:
        if f"mha_{framework}" in packages:
            _check_framework(framework)
            return framework
    raise TypeError(f"cache must be a KVCache of mha_jax or mha_torch, got {type(cache).__name__}")


def _check_framework(framework: str) -> None:
    if framework == "tt":
        raise ValueError("framework must be jax or torch, got framework='tt': its caches are padded to device tiles")
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework must be one of {list(FRAMEWORKS)}, got framework={framework!r}")


def _check(name: str, tensors: dict[str, np.ndarray]) -> None:
    """Refuse keys, values and lengths that make no cache."""
    keys, values, lengths = (tensors[part] for part in PARTS)
    if keys.ndim != 4 or values.shape != keys.shape or lengths.shape != keys.shape[:1]:
        shapes = {part: tensor.shape for part, tensor in tensors.items()}
        raise ValueError(f"{name} must have keys and values (B, K, capacity, H) and lengths (B,), got {shapes}")
    if not is_floating(keys.dtype) or values.dtype != keys.dtype or lengths.dtype != np.int32:
        dtypes = {part: tensor.dtype.name for part, tensor in tensors.items()}
        raise ValueError(
            f"{name} must have keys and values of one floating-point dtype and int32 lengths, got {dtypes}"
        )
    if ((lengths < 0) | (lengths > keys.shape[2])).any():
        raise ValueError(f"{name} must have lengths between 0 and its capacity {keys.shape[2]}, got {lengths.tolist()}")
