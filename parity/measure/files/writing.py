"""Writing of tensor files of all formats, atomically and verified."""

from __future__ import annotations

import itertools
import json
import operator
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mha_spec import InputError, InputTypeError
from parity.measure.files.msgpack import METADATA, write_msgpack
from parity.measure.files.orbax import write_orbax
from parity.measure.files.reading import INDEX, SUFFIXES, open_tensors
from parity.measure.files.safetensors import CODES, write_safetensors
from parity.measure.files.target import (
    Batch,
    check_folder_of,
    check_target,
    errors_name,
    flushing,
    locked,
    move,
    scratch_beside,
)
from parity.measure.files.tensor_file import (
    DTYPES,
    NATIVE,
    FileTensor,
    Shape,
    TensorInfo,
    Tensors,
    check_names,
    hash_of,
    library,
    nest,
)
from parity.measure.files.zipped import write_npz, write_torch

WRITERS = {
    "safetensors": (write_safetensors, CODES),
    "npz": (write_npz, NATIVE.keys() | {"bfloat16"}),
    "torch": (write_torch, DTYPES),
    "msgpack": (write_msgpack, DTYPES),
    "orbax": (write_orbax, DTYPES),
}
"""Writers by format, and the names of supported dtypes."""

LIBRARIES = {"torch": "torch", "msgpack": "msgpack", "orbax": "orbax.checkpoint"}
"""Libraries that writing a format requires."""

SHARDED = ("safetensors", "torch")
"""Formats whose files may be split."""

COMPUTED = ("sha256", "total_size")
"""Metadata that are computed for each file."""


def write_tensors(
    path: str | os.PathLike[str],
    infos: Mapping[str, TensorInfo | tuple[Shape, Any]],
    read: Callable[[str], np.ndarray | FileTensor],
    metadata: Mapping[str, str] | None = None,
    *,
    max_shard_bytes: int | None = None,
    overwrite: bool = True,
    source: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
) -> Path:
    """Write tensors to a file, atomically and verified, with one large tensor in memory at a time.

    Everything is written next to the target, read back, compared, and then moved into place. An
    existing target is kept until then, and if anything fails. It is replaced only if it has the
    same format: a file that starts like one; a folder that contains only an orbax checkpoint; an
    index with its own shards. Remains of a killed process are removed by the next write of the same
    target.

    Args:
        path: file to write; its suffix decides the format.
        infos: shape and dtype of each tensor by name, in the order of the file as far as its format
            allows (safetensors: wider dtypes first; nested formats: levels stay together).
        read: returns a tensor, in memory that it does not reuse; called once for each. With
            `TensorFile.tensor` it is copied piece by piece.
        metadata: text by name, stored in the file with `sha256`, the hash of all tensors: see
            `TensorFile.verify`.
        max_shard_bytes: write files of approximately at most this size and an index, like Hugging
            Face; larger tensors get their own file.
        overwrite: replace an existing target of the same format; False raises an error instead.
        source: file or folder that `read` reads from, which must neither be the target nor contain
            it.
        dry_run: only run the checks, without reading or writing.

    Returns:
        Path to open: the file, or the index of the shards.

    Raises:
        OSError: if a file cannot be written, or its contents differ when read back.
        FileExistsError: if the target exists and `overwrite` is False.
        TypeError, ValueError: if the format does not support the tensors, `read` returns others, or
            the target exists in a different format. Nothing is then written.
        ImportError: if the format needs a library that is not installed.

    Example:
        with open_tensors("model.safetensors") as file:
            write_tensors("model.npz", file.infos, file.tensor, file.metadata)
    """
    path_text, path = os.fspath(path), Path(path)
    kind = _kind(path)
    if kind == "orbax":  # a folder, whose name may end in /
        path_text = path_text.rstrip(os.sep)
    check_folder_of(path_text)
    metadata = metadata or {}
    for text in itertools.chain.from_iterable(metadata.items()):
        if not isinstance(text, str):
            raise InputTypeError("metadata", "be text by name", metadata=text)
    metadata = {name: text for name, text in metadata.items() if name not in COMPUTED}
    check_names(infos, metadata)
    checked = _checked_infos(path, kind, infos)
    parts = _shards(checked, max_shard_bytes, path, kind)
    if len(parts) == 1:
        # The target of a link is written, not the link.
        written, target = path, Path(os.path.realpath(path))
        shards = {target.name: parts[0]}
        names = [target.name]
    else:
        written = target = path.with_name(f"{path.name}{INDEX}")
        shards = {}
        for number, part in enumerate(parts, 1):
            shards[f"{path.stem}-{number:05}-of-{len(parts):05}{path.suffix}"] = part
        names = [*shards, target.name]
    check_target(path, kind, names, target.parent, overwrite=overwrite, source=source)
    if kind in LIBRARIES:
        library(path, LIBRARIES[kind])
    if kind in ("msgpack", "orbax"):
        nest(checked)  # raises for names that cannot be nested

    with (
        errors_name(path),
        scratch_beside(target) as scratch,
        ThreadPoolExecutor(1) as pool,  # hashes tensors while they are written
    ):
        if dry_run:  # only now: the scratch folder shows that the folder is writable
            return written
        with flushing(scratch):
            digests: dict[str, str] = {}
            for shard, part in shards.items():
                tensors = Tensors(part, read, metadata, pool)
                WRITERS[kind][0](scratch / shard, tensors)
                digests |= tensors.digests
            metadata["sha256"] = hash_of(checked, digests)
            if len(shards) > 1:
                (scratch / target.name).write_bytes(_index_of(shards, metadata))
            _verify(path, scratch / target.name, checked, metadata)
        with locked(target.parent):  # check again, because others may have written there meanwhile
            stale = check_target(
                path, kind, names, target.parent, overwrite=overwrite, source=source
            )
            move(Batch(names, scratch, target.parent, stale))
    return written


def _index_of(shards: Mapping[str, Mapping[str, TensorInfo]], metadata: Mapping[str, str]) -> bytes:
    """Return the index of shards, like Hugging Face's."""
    shard_of = {}
    total_size = 0
    for shard, infos in shards.items():
        for name, info in infos.items():
            shard_of[name] = shard
            total_size += info.nbytes
    index = {"metadata": {**metadata, "total_size": total_size}, "weight_map": shard_of}
    return f"{json.dumps(index, indent=2, sort_keys=True)}\n".encode()


# ---- Validation ----------------------------------------------------------------------------------


def _kind(path: Path) -> str:
    kind = SUFFIXES.get(path.suffix.lower())
    if kind not in WRITERS:
        suffixes = [suffix for suffix, kind in SUFFIXES.items() if kind in WRITERS]
        reason = "; GGUF files are only read" if kind == "gguf" else ""
        raise InputError(
            path, f"end in one of {suffixes} to be written", f"{path.suffix!r}{reason}"
        )
    return kind


def _checked_infos(
    path: Path, kind: str, infos: Mapping[str, TensorInfo | tuple[Shape, Any]]
) -> dict[str, TensorInfo]:
    """Return infos with checked names and shapes, and with dtypes that the format supports."""
    dtypes = WRITERS[kind][1]
    checked = {}
    for name, info in infos.items():
        shape, dtype = info[:2]
        dtype = np.dtype(dtype).newbyteorder("=")
        if dtype.name not in dtypes:
            raise InputError(path, f"hold one of {sorted(dtypes)}", f"{dtype} for {name}")
        if name.partition(".")[0] == METADATA:
            raise InputError("names", f"not be {METADATA}, which stands for metadata", names=name)
        checked[name] = TensorInfo.of(tuple(map(operator.index, shape)), dtype)
    return checked


def _shards(
    infos: dict[str, TensorInfo], max_bytes: int | None, path: Path, kind: str
) -> list[dict[str, TensorInfo]]:
    """Return the tensors of each file, in order."""
    if max_bytes is None:
        return [infos]
    if kind not in SHARDED:
        raise InputError(
            "max_shard_bytes",
            f"be None except for {SHARDED}",
            f"max_shard_bytes={max_bytes} for {path}",
        )
    if max_bytes <= 0:
        raise InputError("max_shard_bytes", "be > 0", max_shard_bytes=max_bytes)
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in infos.items():
        # A tensor that is larger than a whole file gets its own, which is empty until then.
        if shards[-1] and size + info.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.nbytes
    return shards


def _verify(
    path: Path, written: Path, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> None:
    """Open the written files like any user, and compare the hash in the metadata."""
    try:
        with open_tensors(written) as file:
            if dict(file.infos) != infos or not metadata.items() <= file.metadata.items():
                raise OSError(f"{path} must read back as it was written, its header does not")
            file.verify()
    except ValueError as error:
        text = str(error).replace(f"{written.parent}{os.sep}", "")
        raise OSError(f"{path} must read back as it was written: {text}") from None
