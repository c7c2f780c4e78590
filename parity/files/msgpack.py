"""Flax's msgpack files: nested dicts whose leaves are arrays.

The package `msgpack` writes and reads all but the heads of arrays: it would take the bytes of each into memory to pass
over them. The metadata lie beside the arrays, as a dict of the name `__metadata__`.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md and flax/serialization.py
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

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


def msgpack_library(path: Path) -> Any:
    """The library, without which there is no such file."""
    try:
        import msgpack
    except ImportError as error:
        raise ImportError(f"{path} needs msgpack: {error}; pip install msgpack") from None
    return msgpack


# ---- Writing ---------------------------------------------------------------------------------------------------------


def write_msgpack(path: Path, tensors: Tensors) -> None:
    """Write a file that `flax.serialization` reads."""
    with path.open("wb") as file:
        _Writer(file, msgpack_library(path).Packer(), tensors).write_file()


@dataclass
class _Writer:
    """Writes nested dicts: what is small by the library, arrays with a head of a fixed width."""

    file: BinaryIO
    packer: Any
    tensors: Tensors

    def write_file(self) -> None:
        tree = nest(self.tensors.infos)
        self.file.write(self.packer.pack_map_header(len(tree) + 1))
        self.write_entries(tree)
        self.file.write(self.packer.pack(METADATA) + self.packer.pack(self.tensors.metadata))

    def write_entries(self, tree: Mapping[str, Any]) -> None:
        for key, node in tree.items():
            self.file.write(self.packer.pack(key))
            if isinstance(node, dict):
                self.file.write(self.packer.pack_map_header(len(node)))
                self.write_entries(node)
            else:
                self.write_tensor(node, self.tensors.infos[node])

    def write_tensor(self, name: str, info: TensorInfo) -> None:
        array = self.tensors.read(name)
        if info.nbytes <= MAX_CHUNK:
            self.write_array(array)
            return
        step, flat, pack = max(1, MAX_CHUNK // info.dtype.itemsize), array.reshape(-1), self.packer.pack
        self.file.write(self.packer.pack_map_header(3) + pack(CHUNKED) + pack(True))
        self.file.write(pack("shape") + pack({str(i): size for i, size in enumerate(info.shape)}))
        self.file.write(pack("chunks") + self.packer.pack_map_header(-(-flat.size // step)))
        for i, start in enumerate(range(0, flat.size, step)):
            self.file.write(pack(str(i)))
            self.write_array(flat[start : start + step])

    def write_array(self, array: np.ndarray) -> None:
        head = self.packer.pack_array_header(3) + self.packer.pack(array.shape) + self.packer.pack(array.dtype.name)
        head += struct.pack(">BI", 0xC6, array.nbytes)
        self.file.write(struct.pack(">BIB", 0xC9, len(head) + array.nbytes, _ARRAY) + head)
        self.file.write(raw(array))


# ---- Reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    """An array in the file, and where its bytes are."""

    info: TensorInfo
    pieces: list[Piece]


def open_msgpack(path: Path, file: BinaryIO) -> TensorFile:
    """Open a file. What is not an array in it is ignored."""
    cursor = Cursor(file)
    tree = _Walker(cursor, msgpack_library(path).Unpacker).node()
    if not isinstance(tree, dict) or cursor.tell() != cursor.size:
        raise Refusal(path, "be one dict in msgpack and nothing more, but it is not")
    metadata = text_by_name(tree.pop(METADATA, None))
    leaves = flatten(tree)
    arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, _Array)}
    infos = {name: array.info for name, array in arrays.items()}
    places = {name: array.pieces for name, array in arrays.items()}
    ignored = [name for name in leaves if name not in arrays]
    return TensorFile(path, "msgpack", infos, metadata, places, ignored=ignored)


_LENGTHS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
"""How the length of an extension type is packed, by its first byte; of 0xD4 to 0xD8 it is 1 to 16."""

_BYTES = {b"\xc4": 2, b"\xc5": 3, b"\xc6": 5}
"""The size of the head of bytes, by its first one; their length follows."""


class _Walker:
    """Reads nested dicts, and of the arrays in them only their heads."""

    def __init__(self, cursor: Cursor, unpacker: Callable[..., Any]) -> None:
        self.cursor = cursor
        self.unpacker = unpacker
        self.count = itertools.count(1)

    def next(self, method: str) -> Any:
        """Read what a method of the library's reads here, and go behind it."""
        begin = self.cursor.tell()
        unpacker = self.unpacker(self.cursor.file, read_size=256)
        value = getattr(unpacker, method)()
        self.cursor.file.seek(begin + unpacker.tell())
        return value

    def node(self, depth: int = 0) -> Any:
        """Read the next value; None for one of a type that is not Flax's array."""
        if depth > MAX_DEPTH or next(self.count) > MAX_ENTRIES:
            raise Refusal("dicts", f"have at most {MAX_DEPTH} levels and {MAX_ENTRIES} entries", "more")
        (first,) = self.cursor.take(1)
        if first in _LENGTHS:
            return self.array(self.cursor.unpack(_LENGTHS[first]), depth + 1)
        if 0xD4 <= first <= 0xD8:
            return self.array(1 << first - 0xD4, depth + 1)
        self.cursor.file.seek(-1, 1)
        if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            return _joined(self.entries(self.next("read_map_header"), depth + 1))
        if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
            return [self.node(depth + 1) for _ in range(self.next("read_array_header"))]
        return self.next("unpack")

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
        if self.next("read_array_header") != 3:
            raise Refusal("an array", "be a shape, a dtype and bytes, but one is not")
        shape, dtype = self.node(depth), self.node(depth)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise Refusal("an array", f"hold one of {sorted(DTYPES)}", str(dtype))
        info = TensorInfo.of(shape, DTYPES[dtype])
        begin = end - info.nbytes
        head = self.cursor.take(max(0, min(5, begin - self.cursor.tell())))
        if _BYTES.get(head[:1]) != len(head) or int.from_bytes(head[1:]) != info.nbytes or self.cursor.tell() != begin:
            raise Refusal("an array", f"have {info.nbytes} bytes, as its shape says, but one does not")
        self.cursor.skip(info.nbytes)
        return _Array(info, [Piece(self.cursor.file, begin, info.nbytes)])


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
