"""Opening of tensor files of all formats."""

from __future__ import annotations

import os
import re
import stat
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.measure.files.gguf import open_gguf
from parity.measure.files.msgpack import open_msgpack
from parity.measure.files.orbax import MARKS, open_orbax
from parity.measure.files.safetensors import open_safetensors
from parity.measure.files.small import MAX_INDEX, check_is_file, read_json
from parity.measure.files.tensor_file import (
    FileOffset,
    TensorFile,
    TensorInfo,
    as_texts,
    in_one_line,
    text_by_name,
)
from parity.measure.files.zipped import open_npz, open_torch

OPENERS = {
    "safetensors": open_safetensors,
    "npz": open_npz,
    "torch": open_torch,
    "msgpack": open_msgpack,
    "gguf": open_gguf,
}
SUFFIXES = {
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".msgpack": "msgpack",
    ".gguf": "gguf",
    ".orbax": "orbax",
}
INDEX = ".index.json"
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")


def open_tensors(path: str | os.PathLike[str]) -> TensorFile:
    """Open a file of named tensors. The format follows from its content, or else its suffix.

    Args:
        path: a file; an index of shards (`*.index.json`), with or without this suffix; a folder of
            shards; or an orbax checkpoint.

    Raises:
        OSError: if it cannot be read.
        ValueError: if its format is unknown, or it is truncated or damaged.
        ImportError: if its format needs a library that is not installed.

    Example:
        with open_tensors("model.safetensors") as file:
            weights = {name: file.read(name) for name in file.infos}
    """
    path = Path(path)
    if not path.exists():
        index = path.parent / f"{path.name}{INDEX}"  # the path may be the base name of its shards
        if index.exists():
            path = index
    if stat.S_ISDIR(path.stat().st_mode):
        with in_one_line(path, "folder"):
            return _open_folder(path)
    if path.name.endswith(INDEX):
        return _open_index(path)
    return open_file(path)


def open_file(path: Path, kind: str | None = None) -> TensorFile:
    """Open a single file of a given or detected format."""
    check_is_file(path, path.stat().st_mode)
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        if kind is None:
            with in_one_line(path, "tensor"):
                kind = _kind(path, file.read(16))  # more than any format needs
                file.seek(0)
        with in_one_line(path, kind):
            opened = OPENERS[kind](path, file)
        opened.release = stack.pop_all().close
        return opened


def _kind(path: Path, begin: bytes) -> str:
    """Return the format of a file, by its first bytes, or else its suffix."""
    suffix = SUFFIXES.get(path.suffix.lower(), "")
    if begin[:4] == b"GGUF":
        return "gguf"
    if begin[:4] in (b"PK\3\4", b"PK\5\6"):
        if suffix in ("npz", "torch") and not zipfile.is_zipfile(path):
            return suffix  # its reader reports the problem
        with zipfile.ZipFile(path) as archive:
            has_pickle = any(name.endswith("/data.pkl") for name in archive.namelist())
        return "torch" if has_pickle else "npz"
    # The length of the header in 8 bytes, then its JSON.
    if begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") <= path.stat().st_size:
        return "safetensors"
    if suffix in OPENERS:
        return suffix
    if begin and (0x81 <= begin[0] <= 0x8F or begin[0] in (0xDE, 0xDF)):  # a dict, not empty
        return "msgpack"
    raise InputError(
        path,
        f"be a file of tensors ({', '.join(sorted(OPENERS))})",
        f"one that begins with {begin[:8]!r}",
    )


# ---- Shards and folders --------------------------------------------------------------------------


def _open_folder(path: Path) -> TensorFile:
    names = sorted(os.listdir(path))
    # Hugging Face's folders have both formats at times, with equal tensors. Other .bin files may
    # be anything.
    for suffix, pattern in (("safetensors", r".*\.safetensors"), ("bin", r"pytorch_model.*\.bin")):
        indexes = [name for name in names if name.endswith(f".{suffix}{INDEX}")]
        files = [name for name in names if re.fullmatch(pattern, name, re.IGNORECASE)]
        has_whole_file = any(name.removesuffix(INDEX) in files for name in indexes)
        if len(indexes) > 1 or has_whole_file:
            raise InputError(
                path,
                "hold one checkpoint",
                str(sorted({*indexes, *files})),
                hint="name one of them",
            )
        if indexes:
            return _open_index(path / indexes[0])
        if files:
            return _open_shards(path, path, files)
    if any(mark in names for mark in MARKS) or path.suffix.lower() == ".orbax":
        return open_orbax(path)
    raise InputError(
        path, "hold safetensors files, torch shards or an orbax checkpoint", str(names[:10])
    )


def shards_in(path: Path) -> list[str]:
    """Return the names of shards in an index.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not an index, or refers to other folders.
    """
    with in_one_line(path, "index"):
        return sorted(set(_read_index(path)["weight_map"].values()))


def _read_index(path: Path) -> dict[str, Any]:
    index = read_json(path, MAX_INDEX)
    shard_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shard_of, dict) or not shard_of or shard_of != text_by_name(shard_of):
        raise InputError(
            path,
            "have a weight_map from the names of tensors to the names of files, but it has none",
        )
    for shard in shard_of.values():
        if shard in ("", ".", "..") or any(character in shard for character in "/\\\0"):
            raise InputError(path, "list shards in its own folder", repr(shard))
    return index


def _open_index(path: Path) -> TensorFile:
    with in_one_line(path, "index"):
        index = _read_index(path)
        names = sorted(set(index["weight_map"].values()))
        missing = [name for name in names if not (path.parent / name).exists()]
        if missing:
            raise FileNotFoundError(
                f"{path} must list existing shards, got {', '.join(map(repr, missing[:3]))}"
            )
        return _open_shards(path, path.parent, names, index)


def _open_shards(
    path: Path, folder: Path, names: list[str], index: Mapping[str, Any] | None = None
) -> TensorFile:
    """Open several files as one.

    Metadata are the entries that all files share, and the entries of the index.
    """
    for name in names:
        match = SHARD.fullmatch(name)
        if match is not None:
            _check_complete(path, names, match)
    infos: dict[str, TensorInfo] = {}
    offsets: dict[str, FileOffset] = {}
    shard_of: dict[str, TensorFile] = {}
    ignored: list[str] = []
    with ExitStack() as stack:
        shards = [stack.enter_context(open_file(folder / name)) for name in names]
        for shard in shards:
            duplicates = infos.keys() & shard.infos.keys()
            if duplicates:
                raise InputError(
                    path, "have each tensor once", tensor=min(duplicates), shards=names
                )
            infos |= shard.infos
            shard_of |= dict.fromkeys(shard.infos, shard)
            offsets |= shard.offsets
            ignored += shard.ignored
        metadata, differing = _shared_metadata(shards)
        ignored += [f"{key} in the metadata of each shard" for key in differing]
        if index is not None:
            unmatched = sorted(infos.keys() ^ index["weight_map"].keys())
            if unmatched:
                raise InputError(path, "list just the tensors of its shards", tensor=unmatched[0])
            metadata |= _metadata_of_index(index)

        def fetch(name: str) -> np.ndarray:
            return shard_of[name].read(name)

        kind = "+".join(sorted({shard.format for shard in shards}))
        file = TensorFile(path, kind, infos, metadata, offsets, fetch, ignored=ignored)
        file.release = stack.pop_all().close
        return file


def _check_complete(path: Path, names: list[str], match: re.Match[str]) -> None:
    """Reject a set of shards if one is missing, by the count in the name of one of them."""
    stem, _, count, suffix = match.groups()
    for i in range(1, int(count) + 1):
        name = f"{stem}-{i:05}-of-{count}{suffix}"
        if name not in names:
            raise InputError(path, f"have all {int(count)} shards", missing=name)


def _shared_metadata(shards: list[TensorFile]) -> tuple[dict[str, str], list[str]]:
    """Return the metadata that are the same in all shards, and the names of the others.

    Each shard has a sha256 of its own, which is not among them.
    """
    shared = set.intersection(*(set(shard.metadata.items()) for shard in shards))
    metadata = {key: text for key, text in shards[0].metadata.items() if (key, text) in shared}
    names: set[str] = set()
    for shard in shards:
        names.update(shard.metadata)
    return metadata, sorted(names - metadata.keys() - {"sha256"})


def _metadata_of_index(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of an index as text, except the size, which the tensors determine."""
    entries = index.get("metadata")
    if not isinstance(entries, dict):
        return {}
    return as_texts({key: entry for key, entry in entries.items() if key != "total_size"})
