"""Files of key/value caches, exchangeable between mha_jax and mha_torch."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from mha_spec import InputError, InputTypeError
from parity.measure.backends import BACKENDS, backend_of, load_backend
from parity.measure.core.weights import FORMAT, is_floating, load_tensors, save_tensors

FRAMEWORKS = [name for name, backend in BACKENDS.items() if not backend.why_no_cache_files]
"""Backends whose caches have the standard shapes."""

PARTS = ("keys", "values", "lengths")


def save_cache(path: str | os.PathLike[str], cache: Any) -> None:
    """Write a cache to a safetensors file, atomically.

    Args:
        path: file to write.
        cache: a `KVCache` of mha_jax or mha_torch. All slots are stored bit for bit, including
            empty ones.

    Raises:
        OSError: if the file cannot be written.
        TypeError: if it is not such a cache.
        ValueError: if keys, values and lengths do not fit together.

    Example:
        >>> import mha_torch
        >>> parity.save_cache("cache.safetensors", mha_torch.init_cache(1, 2, 16, 8))
    """
    framework = backend_of(cache)
    classes = [kind.__name__ for kind in type(cache).__mro__]
    if framework is None or "KVCache" not in classes:
        raise InputTypeError("cache", "be a KVCache of mha_jax or mha_torch", type(cache).__name__)
    _check_framework(framework)
    backend = load_backend(framework)
    tensors = {}
    for part in PARTS:
        array = getattr(cache, part)
        tensors[part] = array if isinstance(array, np.ndarray) else backend.to_numpy(array)
    _check("cache", tensors)
    save_tensors(path, tensors, {"format": FORMAT, "kind": "cache"})


def load_cache(path: str | os.PathLike[str], framework: str) -> Any:
    """Read a cache that `save_cache` wrote, for either framework.

    Args:
        path: file to read.
        framework: framework of the `KVCache`: `jax` or `torch`.

    Raises:
        ModuleNotFoundError: if the framework is not installed.
        OSError: if the file cannot be read.
        ValueError: if the framework is unknown, the file is not a cache, or JAX would narrow its
            float64.

    Example:
        >>> import mha_torch
        >>> parity.save_cache("cache.safetensors", mha_torch.init_cache(1, 2, 16, 8))
        >>> parity.load_cache("cache.safetensors", "jax").keys.shape
        (1, 2, 16, 8)
    """
    _check_framework(framework)
    backend = load_backend(framework)
    tensors, metadata = load_tensors(path)
    is_cache = metadata.get("kind") == "cache" and metadata.get("format") == FORMAT
    if not is_cache or tensors.keys() != set(PARTS):
        raise InputError(
            path, f"be a cache in format {FORMAT}", f"{sorted(tensors)} and metadata {metadata}"
        )
    _check(str(path), tensors)
    arrays = {part: backend.from_numpy(tensors[part]) for part in PARTS}
    dtype, loaded_dtype = tensors["keys"].dtype, backend.to_numpy(arrays["keys"]).dtype
    if loaded_dtype != dtype:
        raise InputError(
            "JAX", f"have jax_enable_x64 to hold {dtype}", f"{loaded_dtype} from {path}"
        )
    return backend.SIBLING.KVCache(**arrays)


def _check_framework(framework: str) -> None:
    if framework in BACKENDS and framework not in FRAMEWORKS:
        reason = BACKENDS[framework].why_no_cache_files
        raise InputError(
            "framework", f"be {' or '.join(FRAMEWORKS)}", f"framework={framework!r}: {reason}"
        )
    if framework not in FRAMEWORKS:
        raise InputError("framework", f"be one of {list(FRAMEWORKS)}", framework=framework)


def _check(name: str, tensors: dict[str, np.ndarray]) -> None:
    """Reject keys, values and lengths that do not form a cache."""
    keys, values, lengths = (tensors[part] for part in PARTS)
    fit_together = (
        keys.ndim == 4
        and values.ndim == 4
        and values.shape[:3] == keys.shape[:3]
        and lengths.shape == keys.shape[:1]
    )
    if not fit_together:
        shapes = {part: tensor.shape for part, tensor in tensors.items()}
        raise InputError(
            name,
            "have keys (B, K, capacity, H), values (B, K, capacity, Hv) and lengths (B,)",
            str(shapes),
        )
    if not is_floating(keys.dtype) or values.dtype != keys.dtype or lengths.dtype != np.int32:
        dtypes = {part: tensor.dtype.name for part, tensor in tensors.items()}
        raise InputError(
            name, "have keys and values of one floating-point dtype and int32 lengths", str(dtypes)
        )
    if ((lengths < 0) | (lengths > keys.shape[2])).any():
        raise InputError(
            name, f"have lengths between 0 and its capacity {keys.shape[2]}", str(lengths.tolist())
        )
