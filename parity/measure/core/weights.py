"""Canonical weights: names and shapes, random weights, and atomically written safetensors files.

Canonical weights are a dict of NumPy arrays by name: `q_proj.weight` (N*H, d_in), `q_proj.bias`
(N*H,), `k_proj.weight` (K*H, d_kv) … `out_proj.weight` (E, N*H): torch's (out, in), heads outermost
in `out`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.score_weights import SCORE_WEIGHTS
from parity.measure.core.arrays import to_numpy_by_name

Weights = dict[str, np.ndarray]

FORMAT = "1"  # of files; increased if old readers could misread new files

QKV = ("q_proj", "k_proj", "v_proj")  # stored as one by fused modules

CHUNK = 1 << 16
"""Elements checked at once, which fit a CPU cache."""

EXPONENT_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits of the exponent, all set in infinities and NaN, of dtypes that are slow in NumPy."""


@cache
def dtype_named(name: str) -> np.dtype:
    """Return the NumPy dtype of a name, including bfloat16."""
    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def is_floating(dtype: np.dtype) -> bool:
    """Return whether a dtype is floating point, including bfloat16."""
    return np.issubdtype(dtype, np.floating) or dtype == ml_dtypes.bfloat16


def is_finite(array: np.ndarray) -> bool:
    """Return whether an array has neither NaN nor infinity, with little extra memory."""
    flat = np.ascontiguousarray(array).reshape(-1)
    infinity = EXPONENT_BITS.get(array.dtype.name)
    for start in range(0, flat.size, CHUNK):
        chunk = flat[start : start + CHUNK]
        if infinity is None:
            is_chunk_finite = np.isfinite(chunk).all()
        else:
            # Without the sign, bits of infinity and NaN are larger than the bits of all numbers.
            is_chunk_finite = (chunk.view(np.uint16) & 0x7FFF).max() < infinity
        if not is_chunk_finite:
            return False
    return True


def weight_shapes(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Return the canonical names and shapes of a layer's weights, in order."""
    return spec.weight_shapes


def unheld(spec: AttentionSpec) -> AttentionSpec:
    """Return the layer without fields that evaluation mode ignores.

    They change neither its canonical weights nor its results.
    """
    return replace(spec, fused_qkv=False, dropout=0.0, output_dropout=0.0)


def random_weights(spec: AttentionSpec, seed: int | list[int] = 0) -> Weights:
    """Return Xavier-uniform weights, float32.

    Biases are in [-1/2, 1/2], so that a missing bias shows. Factors of norms are 0.5 to 0.8 or 1.2
    to 1.5, so that a missing weight of a norm also shows. Sinks and learned values of distances
    are between 0.5 and 1.5 in size.

    Args:
        spec: layer.
        seed: equal seeds give equal weights on all machines.

    Example:
        >>> weights = parity.random_weights(parity.AttentionSpec(64, 8, num_kv_heads=2))
        >>> weights["k_proj.weight"].shape
        (16, 64)
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        part, _, leaf = name.partition(".")
        if part in spec.norms and leaf == "weight":
            weight = 1.0 + rng.choice([-1.0, 1.0], shape) * (0.2 + 0.3 * rng.random(shape))
            if spec.norms[part].weight == "1+w":
                weight -= 1.0
        elif name in SCORE_WEIGHTS and "E" not in SCORE_WEIGHTS[name]:  # not a projection
            weight = rng.choice([-1.0, 1.0], shape) * (0.5 + rng.random(shape))
        elif len(shape) == 1:
            weight = 0.5 * (2.0 * rng.random(shape) - 1.0)
        else:
            weight = np.sqrt(6.0 / sum(shape)) * (2.0 * rng.random(shape) - 1.0)
        weights[name] = weight.astype(np.float32)
    return weights


def check_weights(weights: Mapping[str, Any], spec: AttentionSpec) -> Weights:
    """Reject weights that do not match the layer exactly.

    Args:
        weights: canonical weights, as arrays of any framework: see `parity.to_numpy`.
        spec: layer.

    Returns:
        Weights as NumPy arrays.

    Raises:
        TypeError: if an entry is not a floating-point array, or the dtypes differ.
        ValueError: if names are missing or unexpected, a shape differs, or a value is not finite.
    """
    weights, shapes = to_numpy_by_name(weights), weight_shapes(spec)
    missing = sorted(shapes.keys() - weights.keys())
    unexpected = sorted(weights.keys() - shapes.keys())
    if missing or unexpected:
        rule = "have exactly the names of the spec"
        raise InputError("weights", rule, missing=missing, unexpected=unexpected)
    dtypes = set()
    for name, shape in shapes.items():
        weight = weights[name]
        if not is_floating(weight.dtype):
            raise InputTypeError(name, "be a floating-point array", {f"{name}.dtype": weight.dtype})
        if weight.shape != shape:
            hint = "; it looks transposed" if weight.shape == shape[::-1] else ""
            raise InputError(name, f"have shape {shape}", f"{name}.shape={weight.shape}{hint}")
        if not is_finite(weight):
            num_bad = np.count_nonzero(~np.isfinite(weight))
            raise InputError(name, "be finite", f"{num_bad} NaN or infinities")
        dtypes.add(weight.dtype.name)
    if len(dtypes) > 1:
        raise InputTypeError("weights", "have one dtype", str(sorted(dtypes)))
    return weights


def check_held(names: Iterable[str], spec: AttentionSpec) -> None:
    """Reject a module whose weights, by canonical name, do not match its specification.

    Raises:
        ValueError: if names are missing or unexpected.
    """
    required, present = set(spec.stored_shapes), set(names)
    missing, unexpected = sorted(required - present), sorted(present - required)
    if missing or unexpected:
        hint = ""
        if missing and unexpected:  # as if renamed
            hint = "a projection that is wrapped, as by LoRA, must be merged first"
        rule = "have exactly the weights of its spec"
        raise InputError("module", rule, missing=missing, unexpected=unexpected, hint=hint)


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    """Write arrays to a safetensors file, atomically and verified.

    The bytes depend only on the arguments. They are written to a temporary file next to `path`,
    read back, compared, and then moved into place; an existing file stays until then. Existing
    safetensors files are replaced, files of other formats are not.

    Args:
        path: file to write; its suffix must not belong to a different format.
        tensors: arrays by name, of any framework and memory order.
        metadata: text by name, for the file's header.

    Raises:
        OSError: if the file cannot be written, or its contents differ when read back.
        TypeError: if an entry is not an array.
        ValueError: if the suffix or the existing file has a different format.
    """
    # A comparison of arrays needs no files: their modules are imported for the first one.
    from parity.measure.files.reading import SUFFIXES
    from parity.measure.files.safetensors import safetensors_bytes
    from parity.measure.files.target import reject_other_file, write_whole

    tensors = to_numpy_by_name(tensors)
    kind = SUFFIXES.get(Path(path).suffix.lower(), "safetensors")
    if kind != "safetensors":
        rule = "end in .safetensors, the only format written here"
        raise InputError(path, rule, f"the suffix of {kind}")
    reject_other_file(path, kind)

    def verify(written: Path) -> None:
        read_back, _ = load_tensors(written)
        for name, tensor in tensors.items():
            other = read_back[name]
            has_same_form = (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
            if not has_same_form or other.tobytes() != tensor.tobytes():
                raise OSError(f"{path} must read back as it was written, {name} does not")

    write_whole(path, safetensors_bytes(tensors, metadata), verify)


def load_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read a safetensors file: its arrays, including bfloat16, and its metadata.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a safetensors file, is truncated, or contains a dtype that NumPy
            cannot represent.
    """
    from parity.measure.files.reading import open_file

    with open_file(Path(path), "safetensors") as file:
        return {name: file.read(name) for name in file.infos}, file.metadata


def save_weights(
    path: str | os.PathLike[str], weights: Mapping[str, Any], spec: AttentionSpec
) -> None:
    """Write canonical weights and their specification to a safetensors file, atomically.

    `parity.save` also writes other formats.

    Raises:
        OSError: if the file cannot be written.
        TypeError, ValueError: if the weights do not fit the spec, or `save_tensors` rejects
            the path.
    """
    save_tensors(path, check_weights(weights, spec), {"format": FORMAT, "spec": spec.to_json()})


def load_weights(path: str | os.PathLike[str]) -> tuple[Weights, AttentionSpec]:
    """Read canonical weights and their specification.

    Raises:
        OSError: if the file cannot be read.
        TypeError, ValueError: if it is not a complete file of canonical weights that fit their
            specification, or its metadata list attention keys that no specification has.
    """
    tensors, metadata = load_tensors(path)
    spec = read_spec(path, metadata)
    unread = metadata.get("unread", "{}")
    if unread != "{}":
        hint = "parity.load reads the rest and reports these"
        raise InputError(path, "describe its whole layer in its spec", unread=unread, hint=hint)
    check_weights(tensors, spec)
    return tensors, spec


def read_spec(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> AttentionSpec:
    """Return the specification in a file's metadata.

    Raises:
        ValueError: if there is none, or the file has a different format.
    """
    if metadata.get("format") != FORMAT or "spec" not in metadata:
        rule = f"hold a spec in format {FORMAT} in its metadata"
        keys, convert = sorted(metadata), "`mha-parity convert --to canonical`"
        hint = f"parity.load reads other layouts, {convert} writes this one"
        raise InputError(path, rule, format=metadata.get("format"), metadata=keys, hint=hint)
    try:
        return AttentionSpec.from_json(metadata["spec"])
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(path, f"hold a valid spec: {error}") from None


def pack_qkv(weights: Mapping[str, np.ndarray]) -> Weights:
    """Return canonical weights as in a fused module.

    q_proj, k_proj and v_proj are stacked into one qkv_proj.
    """
    packed = {}
    for leaf in ("weight", "bias"):
        if f"q_proj.{leaf}" in weights:
            stacked = [weights[f"{projection}.{leaf}"] for projection in QKV]
            packed[f"qkv_proj.{leaf}"] = np.concatenate(stacked)
    for name, weight in weights.items():
        if name.partition(".")[0] not in QKV:
            packed[name] = weight
    return packed


def unpack_qkv(packed: Mapping[str, np.ndarray], spec: AttentionSpec) -> Weights:
    """Return canonical weights from the weights of a fused module: the inverse of `pack_qkv`."""
    weights, ends = {}, np.cumsum([spec.q_width, spec.k_width])
    for name in weight_shapes(spec):
        projection, _, leaf = name.partition(".")
        if projection in QKV:
            parts = np.split(packed[f"qkv_proj.{leaf}"], ends)
            weights[name] = np.ascontiguousarray(parts[QKV.index(projection)])
        else:
            weights[name] = packed[name]
    return weights
