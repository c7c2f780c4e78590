"""Flax's msgpack files: nested dicts of arrays.

The package `msgpack` writes and reads everything except the headers of arrays: it would load their
bytes to skip them. Metadata are stored next to the arrays, as a dict named `__metadata__`.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md and flax/serialization.py
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mha_spec import InputError
from parity.measure.files.tensor_file import (
    DTYPES,
    MAX_DEPTH,
    MAX_ENTRIES,
    Cursor,
    FileOffset,
    TensorFile,
    TensorInfo,
    Tensors,
    flatten,
    library,
    nest,
    raw,
    text_by_name,
)

METADATA = "__metadata__"
CHUNKED = "__msgpack_chunked_array__"
MAX_CHUNK = 1 << 30
"""Most bytes of an array, as in Flax; larger ones are chunked."""

_ARRAY, _SCALAR = 1, 3  # Flax's types: an array, and a NumPy scalar
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
"""Formats of lengths by the preceding byte.

Extensions of 1 to 16 bytes have 0xD4 to 0xD8 and no length.
"""


# ---- Writing -------------------------------------------------------------------------------------


def write_msgpack(path: Path, tensors: Tensors) -> None:
    """Write a file that `flax.serialization` reads."""
    packer = library(path, "msgpack").Packer()
    tree = nest(tensors.infos)
    with path.open("wb") as file:
        file.write(packer.pack_map_header(len(tree) + 1))
        file.writelines(_entries(packer, tree, tensors))
        file.write(packer.pack(METADATA) + packer.pack(tensors.metadata))


def _entries(
    packer: Any, tree: Mapping[str, Any], tensors: Tensors
) -> Iterator[bytes | memoryview]:
    for key, node in tree.items():
        yield packer.pack(key)
        if isinstance(node, dict):
            yield packer.pack_map_header(len(node))
            yield from _entries(packer, node, tensors)
        else:
            yield from _tensor(packer, tensors.read(node))


def _tensor(packer: Any, array: np.ndarray) -> Iterator[bytes | memoryview]:
    """Yield an array, or a dict of its chunks if it is large."""
    if array.nbytes <= MAX_CHUNK:
        yield from _array(packer, array)
        return
    flat = array.reshape(-1)
    step = max(1, MAX_CHUNK // array.itemsize)
    num_chunks = -(-flat.size // step)
    # Flax stores lists as dicts by index.
    shape = {str(i): size for i, size in enumerate(array.shape)}
    yield packer.pack_map_header(3) + packer.pack(CHUNKED) + packer.pack(True)
    yield packer.pack("shape") + packer.pack(shape)
    yield packer.pack("chunks") + packer.pack_map_header(num_chunks)
    for i in range(num_chunks):
        yield packer.pack(str(i))
        yield from _array(packer, flat[i * step : (i + 1) * step])


def _array(packer: Any, array: np.ndarray) -> Iterator[bytes | memoryview]:
    # Codes of msgpack's specification: 0xC6 is bytes, and 0xC9 an extension, with 32-bit lengths.
    head = packer.pack_array_header(3) + packer.pack(array.shape) + packer.pack(array.dtype.name)
    head += struct.pack(">BI", 0xC6, array.nbytes)
    yield struct.pack(">BIB", 0xC9, len(head) + array.nbytes, _ARRAY) + head
    yield raw(array)


# ---- Reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    """Array in the file: offsets and sizes of its bytes; several if it is chunked."""

    info: TensorInfo
    pieces: list[tuple[FileOffset, int]]


def open_msgpack(path: Path, file: BinaryIO) -> TensorFile:
    """Open a file. Anything but arrays is ignored."""
    cursor = Cursor(file)
    tree = _Walker(cursor, library(path, "msgpack").Unpacker).node()
    if not isinstance(tree, dict) or cursor.tell() != cursor.size:
        raise InputError(path, "be one dict in msgpack and nothing more, but it is not")
    metadata = text_by_name(tree.pop(METADATA, None))
    arrays: dict[str, _Array] = {}
    infos: dict[str, TensorInfo] = {}
    offsets: dict[str, FileOffset] = {}
    ignored = []
    for name, leaf in flatten(tree).items():
        if not isinstance(leaf, _Array):
            ignored.append(name)
            continue
        arrays[name] = leaf
        infos[name] = leaf.info
        if len(leaf.pieces) == 1:
            offsets[name], _ = leaf.pieces[0]

    def fetch(name: str) -> np.ndarray:
        array = np.empty(infos[name].shape, infos[name].dtype)
        buffer = raw(array)
        for start, length in arrays[name].pieces:
            start.read_into(buffer[:length])
            buffer = buffer[length:]
        return array

    return TensorFile(path, "msgpack", infos, metadata, offsets, fetch, ignored=ignored)


class _Walker:
    """Reader of nested dicts, and only the headers of their arrays."""

    def __init__(self, cursor: Cursor, unpacker: Callable[..., Any]) -> None:
        self.cursor = cursor
        self.unpacker = unpacker
        self.count = itertools.count(1)

    def next(self, method: str) -> Any:
        """Read the next item with a method of the library, and advance."""
        begin = self.cursor.tell()
        # It reads ahead by this number of bytes: more than most names, and little to read twice.
        unpacker = self.unpacker(self.cursor.file, read_size=256)
        value = getattr(unpacker, method)()
        self.cursor.file.seek(begin + unpacker.tell())
        return value

    def node(self, depth: int = 0) -> Any:
        """Read the next value; None unless its type is Flax's array."""
        if depth > MAX_DEPTH or next(self.count) > MAX_ENTRIES:
            raise InputError(
                "dicts", f"have at most {MAX_DEPTH} levels and {MAX_ENTRIES} entries", "more"
            )
        # Ranges of msgpack's specification: extensions, small ones, dicts, arrays.
        (first,) = self.cursor.take(1)
        if first in _EXTENSIONS:
            return self.array(self.cursor.unpack(_EXTENSIONS[first]), depth + 1)
        if 0xD4 <= first <= 0xD8:
            return self.array(1 << first - 0xD4, depth + 1)
        self.cursor.file.seek(-1, 1)
        if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            return self.map(depth)
        if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
            return [self.node(depth + 1) for _ in range(self.next("read_array_header"))]
        return self.next("unpack")

    def map(self, depth: int) -> Any:
        """Read a dict, or an array of chunks, which is one."""
        entries: dict[Any, Any] = {}
        for _ in range(self.next("read_map_header")):
            key = self.node(depth + 1)
            if not isinstance(key, (str, int)) or key in entries:
                raise InputError("each entry", "have a unique name", repr(key))
            entries[key] = self.node(depth + 1)
        return _joined(entries) if CHUNKED in entries else entries

    def array(self, length: int, depth: int) -> _Array | None:
        """Read the header of an array, and skip its bytes; None for any other extension.

        Args:
            length: bytes of the extension after its code.
            depth: number of levels above it.
        """
        (code,) = self.cursor.take(1)
        end = self.cursor.tell() + length
        if code not in (_ARRAY, _SCALAR):
            self.cursor.skip(length)
            return None
        if self.next("read_array_header") != 3:
            raise InputError("an array", "be a shape, a dtype and bytes, but one is not")
        shape, dtype = self.node(depth), self.node(depth)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise InputError("an array", f"hold one of {sorted(DTYPES)}", str(dtype))
        info = TensorInfo.of(shape, DTYPES[dtype])
        (first,) = self.cursor.take(1)
        nbytes = self.cursor.unpack(_BYTES[first]) if first in _BYTES else -1
        start = FileOffset(self.cursor.file, self.cursor.tell())
        if nbytes != info.nbytes or start.offset + nbytes != end:
            raise InputError(
                "an array", f"have {info.nbytes} bytes, as its shape says, but one does not"
            )
        self.cursor.skip(nbytes)
        return _Array(info, [(start, nbytes)])


def _joined(entries: dict[Any, Any]) -> _Array:
    """Join the chunks of an array."""
    shape, chunks = _listed(entries["shape"]), _listed(entries["chunks"])
    info = TensorInfo.of(shape, chunks[0].info.dtype)
    dtypes = {chunk.info.dtype for chunk in chunks}
    nbytes = sum(chunk.info.nbytes for chunk in chunks)
    if dtypes != {info.dtype} or nbytes != info.nbytes:
        raise InputError(
            "the chunks of an array",
            f"have one dtype, and {info.nbytes} bytes together, but they do not",
        )
    pieces = []
    for chunk in chunks:
        pieces.extend(chunk.pieces)
    return _Array(info, pieces)


def _listed(part: Mapping[str, Any]) -> list[Any]:
    """Return the values of a list that Flax stored as a dict by index."""
    return [part[str(i)] for i in range(len(part))]
