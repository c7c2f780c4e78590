"""Flax's msgpack files: nested dicts whose leaves are arrays.

Read and written here, and not by `flax.serialization`, which has the whole file in memory twice: this walks from head
to head and leaves the arrays on the disk. The metadata lie beside the arrays, as a dict of the name `__metadata__`.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md and flax/serialization.py
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mha_spec import Refusal
from parity.files.tensor_file import (
    DTYPES,
    MAX_DEPTH,
    MAX_ENTRIES,
    Cursor,
    Piece,
    TensorFile,
    TensorInfo,
    Tensors,
    flatten,
    nest,
    raw,
    text_by_name,
)

METADATA = "__metadata__"
CHUNKED = "__msgpack_chunked_array__"
MAX_CHUNK = 1 << 30  # bytes of an array, as Flax has it; a larger one is divided

_ARRAY, _SCALAR = 1, 3  # Flax's types: an array, and one that was a NumPy scalar


# ---- Writing ---------------------------------------------------------------------------------------------------------


def write_msgpack(path: Path, tensors: Tensors) -> None:
    """Write a file that `flax.serialization` reads."""
    tree = nest(tensors.infos)
    with path.open("wb") as file:
        file.write(_map_head(len(tree) + 1))
        _write_entries(file, tree, tensors)
        file.write(_text(METADATA) + _map_head(len(tensors.metadata)))
        for pair in tensors.metadata.items():
            file.write(b"".join(map(_text, pair)))


def _write_entries(file: BinaryIO, tree: Mapping[str, Any], tensors: Tensors) -> None:
    for key, node in tree.items():
        file.write(_text(key))
        if isinstance(node, dict):
            file.write(_map_head(len(node)))
            _write_entries(file, node, tensors)
        else:
            _write_tensor(file, node, tensors.infos[node], tensors)


def _write_tensor(file: BinaryIO, name: str, info: TensorInfo, tensors: Tensors) -> None:
    step = max(1, MAX_CHUNK // info.dtype.itemsize)
    if info.nbytes <= MAX_CHUNK:
        file.write(_array_head(info.shape, info.dtype.name, info.nbytes))
        file.write(raw(tensors.read(name)))
        return
    file.write(_map_head(3) + _text(CHUNKED) + b"\xc3")  # true
    file.write(_text("shape") + _map_head(len(info.shape)))
    for i, size in enumerate(info.shape):
        file.write(_text(str(i)) + struct.pack(">BQ", 0xCF, size))
    flat = tensors.read(name).reshape(-1)
    file.write(_text("chunks") + _map_head(-(-flat.size // step)))
    for i, start in enumerate(range(0, flat.size, step)):
        chunk = flat[start : start + step]
        file.write(_text(str(i)) + _array_head(chunk.shape, info.dtype.name, chunk.nbytes))
        file.write(raw(chunk))


# Everything has the widest head that there is for it, which every reader knows.


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">BI", 0xDB, len(data)) + data


def _map_head(length: int) -> bytes:
    return struct.pack(">BI", 0xDF, length)


def _list_head(length: int) -> bytes:
    return struct.pack(">BI", 0xDD, length)


def _array_head(shape: tuple[int, ...], dtype: str, nbytes: int) -> bytes:
    sizes = b"".join(struct.pack(">BQ", 0xCF, size) for size in shape)
    head = _list_head(3) + _list_head(len(shape)) + sizes + _text(dtype) + struct.pack(">BI", 0xC6, nbytes)
    return struct.pack(">BIB", 0xC9, len(head) + nbytes, _ARRAY) + head


# ---- Reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    """An array in the file, and where its bytes are."""

    info: TensorInfo
    pieces: list[Piece]


def open_msgpack(path: Path, file: BinaryIO) -> TensorFile:
    """Open a file. What is not an array in it is ignored."""
    cursor = Cursor(file)
    tree = _Walker(cursor).node()
    if not isinstance(tree, dict) or cursor.tell() != cursor.size:
        raise Refusal(path, "be one dict in msgpack and nothing more, but it is not")
    metadata = text_by_name(tree.pop(METADATA, None))
    leaves = flatten(tree)
    arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, _Array)}
    infos = {name: array.info for name, array in arrays.items()}
    places = {name: array.pieces for name, array in arrays.items()}
    ignored = [name for name in leaves if name not in arrays]
    return TensorFile(path, "msgpack", infos, metadata, places, ignored=ignored)


# By the first byte: what follows, and how many of them there are, or how that is packed.
_HEADS: list[tuple[str, int | str]] = [
    *(("number", i) for i in range(128)),
    *(("map", i) for i in range(16)),
    *(("list", i) for i in range(16)),
    *(("text", i) for i in range(32)),
    *(("none", 0), ("unused", 0), ("bool", 0), ("bool", 1)),
    *(("bytes", code) for code in (">B", ">H", ">I")),
    *(("typed", code) for code in (">B", ">H", ">I")),
    *(("number", code) for code in (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q")),
    *(("typed", 1 << i) for i in range(5)),
    *(("text", code) for code in (">B", ">H", ">I")),
    *(("list", code) for code in (">H", ">I")),
    *(("map", code) for code in (">H", ">I")),
    *(("number", i) for i in range(-32, 0)),
]


class _Walker:
    """Reads nested dicts, and of the arrays in them only their heads."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.count = itertools.count(1)

    def head(self) -> tuple[str, Any]:
        """What follows, and how many of them there are; of a number, the number."""
        (first,) = self.cursor.take(1)
        kind, length = _HEADS[first]
        return kind, self.cursor.unpack(length) if isinstance(length, str) else length

    def node(self, depth: int = 0) -> Any:
        """The next value; None for one of a type that is not Flax's array."""
        if depth > MAX_DEPTH or next(self.count) > MAX_ENTRIES:
            raise Refusal("dicts", f"have at most {MAX_DEPTH} levels and {MAX_ENTRIES} entries", "more")
        kind, length = self.head()
        match kind:
            case "map":
                return _joined(self.entries(length, depth + 1))
            case "list":
                return [self.node(depth + 1) for _ in range(length)]
            case "text":
                return self.cursor.take(length).decode()
            case "bytes":
                return self.cursor.take(length)
            case "typed":
                return self.array(length, depth + 1)
            case "number":
                return length
            case "bool":
                return bool(length)
            case "none":
                return None
        raise Refusal("a value", f"be of a kind that msgpack has, but one at {self.cursor.tell() - 1} is not")

    def entries(self, length: int, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for _ in range(length):
            key = self.node(depth)
            if not isinstance(key, (str, int)) or key in found:
                raise Refusal("each entry", "have a name of its own", repr(key))
            found[key] = self.node(depth)
        return found

    def array(self, length: int, depth: int) -> _Array | None:
        (code,) = self.cursor.take(1)
        end = self.cursor.tell() + length
        if code not in (_ARRAY, _SCALAR):
            self.cursor.skip(length)
            return None
        if self.head() != ("list", 3):
            raise Refusal("an array", "be a shape, a dtype and bytes, but one is not")
        shape, dtype = self.node(depth), self.node(depth)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise Refusal("an array", f"hold one of {sorted(DTYPES)}", str(dtype))
        info = TensorInfo.of(shape, DTYPES[dtype])
        kind, size = self.head()
        begin = self.cursor.tell()
        if kind != "bytes" or info.nbytes != size or begin + size != end:
            raise Refusal("an array", f"have {info.nbytes} bytes, as its shape says, but one does not")
        self.cursor.skip(size)
        return _Array(info, [Piece(self.cursor.file, begin, size)])


def _joined(entries: dict[Any, Any]) -> Any:
    """The array whose chunks are in a dict, where Flax has divided one; any other dict as it is."""
    if CHUNKED not in entries:
        return entries
    shape, chunks = ([part[str(i)] for i in range(len(part))] for part in (entries["shape"], entries["chunks"]))
    info = TensorInfo.of(shape, chunks[0].info.dtype)
    if any(chunk.info.dtype != info.dtype for chunk in chunks):
        raise Refusal("the chunks of an array", "have one dtype, but they do not")
    if sum(chunk.info.nbytes for chunk in chunks) != info.nbytes:
        raise Refusal("the chunks of an array", f"have {info.nbytes} bytes together, but they do not")
    return _Array(info, [piece for chunk in chunks for piece in chunk.pieces])
