"""Common parts of all formats: named tensors, hashes, trees of names, one-line errors."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import math
import os
import struct
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from mha_spec import InputError
from parity.measure.text import in_line

Shape = tuple[int, ...]

MAX_ENTRIES = 1_000_000
"""Most entries of a tree. A small file may reference one part many times."""

MAX_DEPTH = 64
"""Most levels of a tree, far fewer than Python's recursion allows."""

MAX_NAME = 1000
"""Most characters of a tensor's name."""

PIECE = 2**20
"""Bytes that are read, hashed and written at a time, while they are in a processor's cache."""

BUFFERS = 4
"""Buffers for pieces that are read, hashed and written at once."""

UNHASHED = 2**24
"""Bytes of tensors that may wait in memory for their hash, while the next one is read."""


class TensorInfo(NamedTuple):
    """Facts of a tensor that need no read: shape, dtype and size in bytes."""

    shape: Shape
    dtype: np.dtype
    nbytes: int

    @classmethod
    def of(cls, shape: Any, dtype: np.dtype) -> TensorInfo:
        """Describe an array; its shape is validated."""
        is_shape = isinstance(shape, (tuple, list))
        if not is_shape or not all(type(size) is int and size >= 0 for size in shape):
            raise InputError("a shape", "consist of integers >= 0", str(shape))
        return cls(tuple(shape), dtype, math.prod(shape) * dtype.itemsize)


class FileOffset(NamedTuple):
    """Offset in an open file."""

    file: BinaryIO
    offset: int

    def read_into(self, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from here on. Threads may do so at the same time."""
        num_read = 0
        while num_read < len(buffer):  # one call reads at most 2 GiB
            rest = buffer[num_read:]
            count = os.preadv(self.file.fileno(), [rest], self.offset + num_read)
            if not count:
                raise InputError(f"{len(buffer)} bytes", "be there", str(num_read))
            num_read += count


def _closed(name: str) -> NoReturn:
    raise InputError(name, "be read before the file is closed")


@dataclass
class TensorFile:
    """Open file of named tensors, and context manager. Tensors remain valid after it is closed.

    Attributes:
        path: file, folder or index of shards.
        format: `safetensors`, `npz`, `torch`, `msgpack`, `orbax` or `gguf`.
        infos: facts of each tensor, in the order of the file.
        metadata: text by name.
        offsets: positions in the file of tensors that are stored as plain bytes.
        fetch: reads the other tensors.
        release: closes the file.
        ignored: names of entries that are not tensors.
        quantized: types of quantized tensors by name; `read` dequantizes them.
    """

    path: Path
    format: str
    infos: Mapping[str, TensorInfo]
    metadata: dict[str, str]
    offsets: Mapping[str, FileOffset] = field(repr=False, default_factory=dict)
    fetch: Callable[[str], np.ndarray] = field(repr=False, default=_closed)
    release: Callable[[], object] = field(repr=False, default=lambda: None)
    ignored: list[str] = field(default_factory=list)
    quantized: Mapping[str, str] = field(default_factory=dict)
    _buffers: list[deque[memoryview]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        check_names(self.infos, self.metadata)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.offsets, self.fetch = {}, _closed
        self.release()

    def read(self, name: str) -> np.ndarray:
        """Read one tensor, as a new array in C order.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if the tensor does not exist, its type is unsupported, or the file is
                damaged.
            ImportError: if a quantized tensor needs a library that is not installed.
        """
        info = self._info(name)
        with in_one_line(self.path, self.format):
            if name in self.offsets:
                array = np.empty(info.shape, info.dtype)
                self.offsets[name].read_into(raw(array))
            else:
                array = self.fetch(name)
            if (array.shape, array.dtype) != info[:2]:
                raise InputError(
                    name, f"be {info.dtype}{info.shape}", f"{array.dtype}{array.shape}"
                )
        return array

    def read_entry(self, name: str, index: int) -> np.ndarray:
        """Read one entry of the first axis of a tensor; only this part if the format allows it.

        Errors as in `read`.
        """
        info = self._info(name)
        if name not in self.offsets:
            return self.read(name)[index].copy()
        array = np.empty(info.shape[1:], info.dtype)
        with in_one_line(self.path, self.format):
            file, offset = self.offsets[name]
            FileOffset(file, offset + index * array.nbytes).read_into(raw(array))
        return array

    def tensor(self, name: str) -> FileTensor:
        """Return a tensor that is read later, see `read`."""
        return FileTensor(self, name, *self._info(name)[:2])

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Read a tensor in pieces of its bytes.

        Each is valid until `BUFFERS` more of the file are read. Errors as in `read`.
        """
        if name not in self.offsets:
            yield from pieces_of(self.read(name))
            return
        file, offset = self.offsets[name]
        size = self._info(name).nbytes
        # Two threads may read pieces at once, each with buffers of its own.
        if self._buffers:
            buffers = self._buffers.pop()
        else:
            buffers = deque(memoryview(bytearray(PIECE)) for _ in range(BUFFERS))
        try:
            for begin in range(0, size, PIECE):
                buffers.rotate()
                piece = buffers[0][: size - begin]
                with in_one_line(self.path, self.format):
                    FileOffset(file, offset + begin).read_into(piece)
                yield piece
        finally:
            self._buffers.append(buffers)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.infos:
            raise InputError("name", f"be a tensor in {self.path}", name=name)
        return self.infos[name]

    def sha256(self) -> str:
        """Hash all tensors: names, dtypes, shapes and bytes, independent of order and format."""
        names = [name for name in self.infos if name in self.offsets]
        with ThreadPoolExecutor(2) as pool:
            digests = dict(zip(names, pool.map(self._digest, names), strict=True))
        # The libraries that read the other tensors may not be called from several threads.
        for name in self.infos:
            if name not in digests:
                digests[name] = self._digest(name)
        return hash_of(self.infos, digests)

    def _digest(self, name: str) -> str:
        return digest(self.pieces(name))

    def verify(self) -> None:
        """Read all tensors, and compare their hash with that in the metadata of `write_tensors`.

        Raises:
            ValueError: if they differ, or the metadata have none.
        """
        expected = self.metadata.get("sha256")
        if expected is None:
            raise InputError(self.path, "have a sha256 in its metadata", str(sorted(self.metadata)))
        actual = self.sha256()
        if actual != expected:
            raise InputError(
                self.path,
                "be unchanged since it was written",
                f"sha256={actual} and {expected} in its metadata",
            )


class FileTensor(NamedTuple):
    """Tensor of an open file, which NumPy reads when it needs the values.

    Attributes:
        file: open file.
        name: name of the tensor in the file.
        shape: its shape.
        dtype: its dtype.
    """

    file: TensorFile
    name: str
    shape: Shape
    dtype: np.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read the tensor."""
        return np.asarray(self.file.read(self.name), dtype=dtype)

    def pieces(self) -> Iterator[memoryview]:
        """Read the bytes, see `TensorFile.pieces`."""
        return self.file.pieces(self.name)


# ---- Bytes and their hashes ----------------------------------------------------------------------


def raw(array: np.ndarray) -> memoryview:
    """Return an array's bytes in C order; without a copy if it is in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def pieces_of(array: np.ndarray) -> Iterator[memoryview]:
    """Return an array's bytes in C order, in pieces."""
    whole = raw(array)
    return (whole[begin : begin + PIECE] for begin in range(0, len(whole), PIECE))


def digest(pieces: Iterable[memoryview]) -> str:
    """Return the sha256 of bytes in pieces."""
    sha256 = hashlib.sha256()
    for piece in pieces:
        sha256.update(piece)
    return sha256.hexdigest()


def hash_of(infos: Mapping[str, TensorInfo], digests: Mapping[str, str]) -> str:
    """Return one sha256 for tensors, independent of order, from the hash of each."""
    lines = []
    for name in sorted(infos):
        info = infos[name]
        lines.append(json.dumps([name, info.dtype.name, info.shape, digests[name]]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass
class Tensors:
    """Tensors to write: each is read once, checked, and hashed while it is written.

    Attributes:
        infos: facts of the tensors of the file.
        source: returns a tensor.
        own_metadata: metadata without the hash.
        pool: pool of one thread for hashing.
    """

    infos: Mapping[str, TensorInfo]
    source: Callable[[str], np.ndarray | FileTensor]
    own_metadata: Mapping[str, str]
    pool: ThreadPoolExecutor
    _digests: dict[str, Future[str]] = field(default_factory=dict)
    # Hashes of arrays, which stay in memory until these are done, and their sizes.
    _pending_arrays: deque[tuple[Future[str], int]] = field(default_factory=deque)
    # Updates of hashes by pieces of files, whose buffers will be filled again.
    _pending_pieces: deque[Future[None]] = field(default_factory=deque)

    def read(self, name: str) -> np.ndarray:
        """Read a tensor, in C order.

        Raises:
            TypeError, ValueError: if it does not match its facts.
        """
        array = np.asarray(self._checked(name), dtype=self.infos[name].dtype, order="C")
        self._hash(name, pieces_of(array))
        return array

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Read a tensor in pieces of its bytes in C order. Errors as in `read`."""
        tensor = self._checked(name)
        if not isinstance(tensor, FileTensor):
            self._hash(name, pieces_of(tensor))
            yield from pieces_of(tensor)
            return
        sha256 = hashlib.sha256()
        for piece in tensor.pieces():
            if len(self._pending_pieces) == BUFFERS - 1:
                self._pending_pieces.popleft().result()  # its memory holds the next piece
            self._pending_pieces.append(self.pool.submit(sha256.update, piece))
            yield piece
        self._digests[name] = self.pool.submit(sha256.hexdigest)

    def _hash(self, name: str, pieces: Iterable[memoryview]) -> None:
        self._digests[name] = self.pool.submit(digest, pieces)
        self._pending_arrays.append((self._digests[name], self.infos[name].nbytes))

    def _checked(self, name: str) -> np.ndarray | FileTensor:
        info = self.infos[name]
        while self._pending_arrays:
            num_pending = sum(size for _, size in self._pending_arrays)
            if num_pending + info.nbytes <= UNHASHED:
                break
            self._pending_arrays.popleft()[0].result()
        tensor = self.source(name)
        if not isinstance(tensor, FileTensor):
            tensor = np.asarray(tensor, order="C")
        if tensor.shape != info.shape or tensor.dtype != info.dtype:
            raise InputError(
                name,
                f"be read as described in infos, {info.dtype}{info.shape}",
                f"{tensor.dtype}{tensor.shape}",
            )
        return tensor

    @property
    def digests(self) -> dict[str, str]:
        """sha256 of each tensor that was read."""
        return {name: pending.result() for name, pending in self._digests.items()}

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata with the hash of all tensors; zeros of the same length until all are read."""
        sha256 = "0" * 64
        if self._digests.keys() == self.infos.keys():
            sha256 = hash_of(self.infos, self.digests)
        return {**self.own_metadata, "sha256": sha256}


class Cursor:
    """Position in a file, never beyond its end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = file.seek(0, 2)
        file.seek(0)

    def tell(self) -> int:
        """Return the position."""
        return self.file.tell()

    def take(self, count: int) -> bytes:
        """Read the next bytes."""
        return self.file.read(self._within(count))

    def skip(self, count: int) -> None:
        """Skip the next bytes."""
        self.file.seek(self._within(count), 1)

    def unpack(self, code: str) -> Any:
        """Read the next number, in a format of `struct`."""
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def _within(self, count: int) -> int:
        num_left = self.size - self.tell()
        if count > num_left:
            raise InputError(f"{count} more bytes", "be there", str(num_left))
        return count


# ---- Trees ---------------------------------------------------------------------------------------


def flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of nested dicts and lists in order, with names joined by dots.

    Levels that contain only `value`, which nnx adds around each array, are omitted.

    Raises:
        ValueError: if two leaves get the same name, or the tree is too deep or too large.
    """
    leaves: dict[str, Any] = {}
    for name, leaf in _leaves(tree, (), itertools.count(1)):
        if name in leaves:
            raise InputError(
                "names", "differ after their levels are joined with dots", f"{name} twice"
            )
        leaves[name] = leaf
    return leaves


def _leaves(node: Any, levels: tuple[str, ...], visits: Iterator[int]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a node in order, with their names.

    Args:
        node: a tree, or a part of it.
        levels: names of the levels above it.
        visits: counts the visited nodes of the whole tree.
    """
    if len(levels) > MAX_DEPTH or next(visits) > MAX_ENTRIES:
        raise InputError(
            "names", f"have at most {MAX_DEPTH} levels, and be at most {MAX_ENTRIES}", "more"
        )
    if isinstance(node, Mapping):
        if levels and _is_variable_of_nnx(node):
            yield from _leaves(node["value"], levels, visits)
            return
        children = node.items()
    elif isinstance(node, (list, tuple)):
        children = enumerate(node)
    else:
        yield ".".join(levels), node
        return
    for key, child in children:
        yield from _leaves(child, (*levels, str(key)), visits)


def _is_variable_of_nnx(node: Mapping[Any, Any]) -> bool:
    if list(node) != ["value"]:
        return False
    return not isinstance(node["value"], (Mapping, list, tuple))


def nest(names: Iterable[str]) -> dict[str, Any]:
    """Return the nested dicts that `flatten` maps to these names; each leaf is its name.

    Raises:
        ValueError: if no nested dicts have these names: one is a level of another, or ends in a
            level that `flatten` omits.
    """
    tree: dict[str, Any] = {}
    for name in names:
        *levels, last = name.split(".")
        node: Any = tree
        for level in levels:
            if isinstance(node, dict):
                node = node.setdefault(level, {})
        if not isinstance(node, dict) or last in node:
            raise ValueError(
                f"no name may be a level of another one where names are nested, got {name} and "
                f"another"
            )
        node[last] = name
    for flattened_name, name in flatten(tree).items():
        if flattened_name != name:
            raise ValueError(
                f"no name may end in a level that nnx adds where names are nested, got {name}"
            )
    return tree


# ---- Errors and JSON -----------------------------------------------------------------------------


def library(path: Path, module: str) -> Any:
    """Import the library of a format."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.replace(".", "-")
        raise ImportError(f"{path} needs {package}: {error}; pip install {package}") from None


@contextmanager
def in_one_line(path: Path, kind: str) -> Iterator[None]:
    """Convert all errors of readers to an OSError or InputError of one line with the name of the
    file.

    Damaged files can cause almost any error. Missing libraries are reported unchanged.
    """
    try:
        yield
    except (ImportError, FileNotFoundError, PermissionError):
        raise
    except InputError as error:
        if str(path) not in str(error):
            error = error.within(str(path))
        raise error from None
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        text = in_line(first_line or type(error).__name__)
        if isinstance(error, OSError):
            if str(path) not in text:
                text = f"{path}: {text}"
            raise OSError(text) from None
        raise InputError(path, f"be a whole {kind} file", text) from None


def check_names(names: Iterable[str], metadata: Mapping[str, str]) -> None:
    """Reject text that cannot be printed or written, which files may contain.

    Raises:
        ValueError: if a name is too long or has a control character, or any text has a lone
            surrogate.
    """
    for name in names:
        if not name.isprintable():
            raise InputError("names", "be printable", names=name)
        if len(name) > MAX_NAME:
            raise InputError("names", f"have at most {MAX_NAME} characters", str(len(name)))
    for text in itertools.chain(metadata, metadata.values()):
        text.encode()  # raises for a lone surrogate; names have none, since it is not printable


def check_unique(names: Iterable[str]) -> None:
    """Reject duplicate names."""
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError("names", "differ", f"{name} twice")


def parse_json(data: bytes) -> Any:
    """Parse JSON without duplicate names.

    Raises:
        ValueError: if it is not JSON, an object has duplicate names, or it is too deep or has too
            long a number.
    """
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise InputError("JSON", "not be nested as deeply") from None
    except ValueError as error:
        if type(error) is not ValueError:  # of the text, or of duplicate names
            raise
        # Only integers raise it: their conversion takes quadratic time, so Python limits their
        # digits.
        raise InputError(
            "integers", f"have at most {sys.get_int_max_str_digits()} digits"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        check_unique(name for name, _ in pairs)
    return values


def text_by_name(entries: Any) -> dict[str, str]:
    """Return metadata if they are text by name, otherwise none: programs may store anything."""
    if not isinstance(entries, dict):
        return {}
    texts = itertools.chain(entries, entries.values())
    return entries if all(isinstance(text, str) for text in texts) else {}


def as_texts(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata of other programs as text; other values become JSON."""
    texts = {}
    for name, value in entries.items():
        texts[name] = value if isinstance(value, str) else json.dumps(value)
    return texts


# ---- Dtypes --------------------------------------------------------------------------------------

NATIVE = {
    name: np.dtype(name)
    for name in (
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
}
"""NumPy's own dtypes by name."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
# Older versions of ml_dtypes lack some.
_FLOAT8_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name)) for name in FLOAT8 if hasattr(ml_dtypes, name)
}
DTYPES = {**NATIVE, "bfloat16": BFLOAT16, **_FLOAT8_DTYPES}
"""Supported dtypes of tensors by name."""
