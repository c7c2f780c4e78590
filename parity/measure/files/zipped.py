"""npz and torch files: zip archives of arrays.

Both are written with metadata as JSON in the archive's comment, which other readers ignore. NumPy
and torch read them. Overlaps, duplicate names and zip bombs, which Python's `zipfile` silently
accepts, are rejected here. torch's archives are written here because `torch.save` needs all tensors
at once, and with `torch.serialization.skip_data` (tensor by tensor) the archive has no checksums.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
import sys
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from mha_spec import InputError
from parity.measure.files.tensor_file import (
    BFLOAT16,
    DTYPES,
    NATIVE,
    TensorFile,
    TensorInfo,
    Tensors,
    check_unique,
    flatten,
    library,
    parse_json,
    raw,
    text_by_name,
)

if TYPE_CHECKING:
    import torch


MAX_HEADER = 1_000
"""Most bytes of the header of an array: 64 axes need about 300.

Far below the limits of Python's parser, which NumPy uses.
"""

ALIGNMENT = 64
"""Alignment of torch's memory-mapped data in bytes."""


# ---- Archives ------------------------------------------------------------------------------------


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Open the archive in a file, if it has no duplicate names and is not a zip bomb.

    Raises:
        ValueError: if it has. (The library raises many other errors.)
    """
    archive = zipfile.ZipFile(file)
    # zipfile accepts an archive with other bytes after it silently. The record of its end has 22
    # bytes; the last two are the length of the comment, which follows.
    file.seek(-22 - len(archive.comment), 2)
    end = file.read(22)
    if end[:4] != b"PK\5\6" or int.from_bytes(end[20:], "little") != len(archive.comment):
        raise InputError("an archive", "end where it says, but it does not")
    members = archive.infolist()
    check_unique(member.filename for member in members)
    size = file.seek(0, 2)
    for member in members:
        is_readable = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        is_encrypted = member.flag_bits & 1
        if not is_readable or is_encrypted:
            raise InputError(
                "members", "be stored or deflated, and not encrypted", member=member.filename
            )
    if sum(member.compress_size for member in members) > size:
        raise InputError("members", "not overlap, but they do")
    check_inflation(sum(member.file_size for member in members), size)
    return archive


def check_inflation(inflated: int, size: int) -> None:
    """Reject a small file that would fill the memory.

    Weights hardly compress; zeros do, but are allowed as a part of a file.

    Raises:
        ValueError: if it expands more than 100-fold, to more than 64 MiB.
    """
    if inflated > max(100 * size, 1 << 26):
        raise InputError("it", "not expand more than 100-fold", f"{inflated} and {size} bytes")


@contextmanager
def new_zip(path: Path, tensors: Tensors) -> Iterator[zipfile.ZipFile]:
    """Open an archive for writing, with the final metadata in its comment."""
    if len(_comment(tensors.metadata)) > zipfile.ZIP_MAX_COMMENT:
        raise InputError(
            "metadata", f"have at most {zipfile.ZIP_MAX_COMMENT} bytes in a zip archive", "more"
        )
    with zipfile.ZipFile(path, "w") as archive:
        yield archive
        archive.comment = _comment(tensors.metadata)


def new_member(archive: zipfile.ZipFile, name: str, alignment: int = 1) -> IO[bytes]:
    """Open an uncompressed member for writing, whose bytes are aligned.

    Its date is fixed, so that equal contents result in equal files.
    """
    member = zipfile.ZipInfo(name)
    if alignment > 1:
        # Before the bytes come a header of 30 bytes, the name, and extra fields: 64-bit sizes of 20
        # bytes, and one for padding as torch writes it, "FB", with a head of 4.
        begin = archive.start_dir + 30 + len(name.encode()) + 20 + 4
        padding = -begin % alignment
        member.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
    return archive.open(member, "w", force_zip64=True)


def _comment(metadata: Mapping[str, str]) -> bytes:
    return json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()


def _metadata(archive: zipfile.ZipFile) -> dict[str, str]:
    """Return the metadata in the comment of an archive: JSON if we wrote it, else any text."""
    with suppress(ValueError, RecursionError):
        metadata = text_by_name(parse_json(archive.comment))
        if metadata:
            return metadata
    text = archive.comment.decode(errors="replace")  # of other programs
    return {"comment": text} if text else {}


# ---- npz -----------------------------------------------------------------------------------------


def write_npz(path: Path, tensors: Tensors) -> None:
    """Write an archive of .npy files, like `np.savez`."""
    with new_zip(path, tensors) as archive:
        for name in tensors.infos:
            with new_member(archive, f"{name}.npy") as member:
                npy.write_array(member, tensors.read(name), allow_pickle=False)


def open_npz(path: Path, file: BinaryIO) -> TensorFile:
    """Open an archive of .npy files.

    Names are not paths on disk; `a/b` of other programs is read as `a.b`.
    """
    archive = open_zip(file)
    infos: dict[str, TensorInfo] = {}
    ignored = []
    for member in archive.infolist():
        if not member.filename.endswith(".npy"):
            ignored.append(member.filename)
            continue
        with archive.open(member) as stream:
            info = _read_header(stream)
            if stream.tell() + info.nbytes != member.file_size:
                raise InputError(
                    member.filename, f"have {info.nbytes} bytes after its header, as that says"
                )
        infos[member.filename.removesuffix(".npy")] = info
    metadata = _metadata(archive)
    members = {_dotted(name): name for name in infos}
    is_ours = "sha256" in metadata
    if is_ours or len(members) < len(infos):  # or two names would become one
        members = {name: name for name in infos}
    infos = {name: infos[member] for name, member in members.items()}

    def fetch(name: str) -> np.ndarray:
        with (
            archive.open(f"{members[name]}.npy") as stream,
            warnings.catch_warnings(action="ignore"),
        ):
            array = npy.read_array(stream, max_header_size=MAX_HEADER)
            if stream.read(1):  # reading to the end compares the checksum
                raise InputError(name, f"have {array.nbytes} bytes", "more")
        dtype = infos[name].dtype
        if dtype == BFLOAT16:
            array = array.view(dtype)
        return np.asarray(array, dtype, order="C")  # swaps the bytes of a big-endian one

    return TensorFile(path, "npz", infos, metadata, fetch=fetch, ignored=ignored)


def _dotted(name: str) -> str:
    """Return a name with dots instead of slashes, unless it looks like a path."""
    levels = name.split("/")
    looks_like_path = "." in name or not all(levels)
    return name if looks_like_path else ".".join(levels)


def _read_header(stream: IO[bytes]) -> TensorInfo:
    """Read the header of a .npy file."""
    version = npy.read_magic(stream)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise InputError("an array", "be of version 1 or 2 of .npy", str(version))
    with warnings.catch_warnings(action="ignore"):  # about unusual text, which is rejected
        shape, _, stored = readers[version](stream, max_header_size=MAX_HEADER)
    dtype = stored.newbyteorder("=")
    if dtype == np.dtype("V2"):  # NumPy has no name for bfloat16
        dtype = BFLOAT16
    if dtype not in (*NATIVE.values(), BFLOAT16):
        raise InputError("an array", f"hold one of {sorted(NATIVE)} or bfloat16", str(stored))
    return TensorInfo.of(shape, dtype)


# ---- torch ---------------------------------------------------------------------------------------


class _Storage(tuple[Any, ...]):
    """Name of a storage in torch's pickles."""


class _Tensor(NamedTuple):
    """Deferred tensor: torch's function that rebuilds it, and its arguments."""

    make: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.make, self.arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return tuple(obj) if isinstance(obj, _Storage) else None


def write_torch(path: Path, tensors: Tensors) -> None:
    """Write the archive that `torch.save` writes for a state dict."""
    import torch
    from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

    entries: dict[str, _Tensor] = {}
    for i, (name, info) in enumerate(tensors.infos.items()):
        dtype = getattr(torch, info.dtype.name)
        strides = [math.prod(info.shape[axis + 1 :]) for axis in range(len(info.shape))]
        # torch's oldest dtypes have a class of storages each, whose size is a number of values. The
        # others have one class, whose size is in bytes.
        storage_class = torch.storage._dtype_to_storage_type_map().get(dtype)
        size = info.nbytes
        if storage_class:
            size //= info.dtype.itemsize
        kind = getattr(torch, storage_class or "UntypedStorage")
        storage = _Storage(("storage", kind, str(i), "cpu", size))
        arguments = (storage, 0, info.shape, tuple(strides), False, OrderedDict())
        if storage_class:
            entries[name] = _Tensor(_rebuild_tensor_v2, arguments)
        else:
            entries[name] = _Tensor(_rebuild_tensor_v3, (*arguments, dtype))
    with new_zip(path, tensors) as archive:
        with new_member(archive, "archive/data.pkl") as member:
            _Pickler(member, protocol=2).dump(entries)
        with new_member(archive, "archive/version") as member:
            member.write(b"3\n")
        with new_member(archive, "archive/byteorder") as member:
            member.write(b"little")
        for i, name in enumerate(entries):
            with new_member(archive, f"archive/data/{i}", ALIGNMENT) as member:
                member.writelines(tensors.pieces(name))


LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of files of torch.save before 1.6: pickles, then the bytes of all tensors."""


def open_torch(path: Path, file: BinaryIO) -> TensorFile:
    """Open a file of `torch.save` with `weights_only`, which executes nothing.

    It is memory-mapped, except in old formats.
    """
    if zipfile.is_zipfile(file):
        archive = open_zip(file)
        members = archive.infolist()
        _check_members(archive, members)
        metadata = _metadata(archive)
    else:
        file.seek(0)
        if file.read(len(LEGACY)) != LEGACY:
            raise InputError(
                path, "be a file that torch.save wrote, but it is something else or cut off"
            )
        members, metadata = None, {}
    torch = library(path, "torch")
    tree = _load(path, mmap=members is not None)
    if isinstance(tree, torch.Tensor):
        tree = {"": tree}
    leaves = flatten(tree)
    tensors = {}
    ignored = []
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            tensors[name] = leaf.detach()
        else:
            ignored.append(name)
    infos = {name: _info(name, tensor) for name, tensor in tensors.items()}
    # A small file may have a large tensor that repeats a number.
    check_inflation(sum(info.nbytes for info in infos.values()), file.seek(0, 2))
    checksums = _Checksums(members or ())
    if members is not None:
        checksums.check_sizes(tensors.values())

    def fetch(name: str) -> np.ndarray:
        tensor, dtype = tensors[name], infos[name].dtype
        checksums.check(name, tensor)
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if dtype.name not in NATIVE:
            # torch cannot convert these to NumPy's dtypes; the bits are equal.
            tensor = tensor.view(getattr(torch, f"int{8 * dtype.itemsize}"))
        return tensor.numpy().copy().view(dtype)

    return TensorFile(path, "torch", infos, metadata, fetch=fetch, ignored=ignored)


class _Checksums:
    """The CRC-32 of storages, compared when a storage is first read; torch compares none.

    Only torch knows which member holds a storage. The checksums of all members of its size are
    allowed, which damaged bytes do not match either.
    """

    def __init__(self, members: Iterable[zipfile.ZipInfo]) -> None:
        self._are_present = _has_checksums(members)
        self._by_size: dict[int, set[int]] = {0: set()}
        for member in members:
            self._by_size.setdefault(member.file_size, set()).add(member.CRC)
        self._checked: set[int] = set()

    def check_sizes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Reject a storage with a wrong, larger size, which would extend into the next one."""
        for tensor in tensors:
            if tensor.untyped_storage().nbytes() not in self._by_size:
                raise InputError(
                    "each storage", "be as long as the member that holds it, but one is not"
                )

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Reject a tensor whose storage is damaged."""
        import torch

        storage = tensor.untyped_storage()
        if not self._are_present or storage.data_ptr() in self._checked:
            return
        content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        if content.nbytes and zlib.crc32(raw(content)) not in self._by_size[content.nbytes]:
            raise InputError(name, "have the CRC-32 that its archive says", "damaged bytes")
        self._checked.add(storage.data_ptr())


def _check_members(archive: zipfile.ZipFile, members: Iterable[zipfile.ZipInfo]) -> None:
    """Reject an archive that torch cannot memory-map, and damage in members besides storages."""
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise InputError("members of an archive of torch's", "not be compressed, but they are")
    if not _has_checksums(members):
        return
    for member in members:
        if "/data/" in member.filename:
            continue
        content = archive.read(member)  # zipfile compares the checksum, which torch does not
        if member.filename.endswith("/byteorder") and content != sys.byteorder.encode():
            # torch swaps the bytes, which changes checksums.
            raise InputError("numbers", f"be {sys.byteorder}-endian", byteorder=content.decode())


def _has_checksums(members: Iterable[zipfile.ZipInfo]) -> bool:
    """Return whether members have a CRC-32; torch can save without."""
    return any(member.CRC for member in members)


def _load(path: Path, *, mmap: bool) -> Any:
    """Load the tree of tensors from a torch file; with `mmap` tensors are read when they are used,
    which only zip archives allow.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about kinds of tensors that are rejected
            return library(path, "torch").load(
                path, map_location="cpu", weights_only=True, mmap=mmap
            )
    except pickle.UnpicklingError as error:  # its message explains how to load it anyway
        reason = re.search(r"WeightsUnpickler error: (.*)", str(error))
        what = reason[1] if reason else "its content cannot be determined"
        raise InputError(path, f"hold tensors and nothing that is executed: {what}") from None


def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or str(tensor.layout) != "torch.strided" or tensor.device.type != "cpu":
        raise InputError(
            name, f"be a dense tensor of {sorted(DTYPES)}", f"{dtype} in {tensor.layout}"
        )
    return TensorInfo.of(tuple(tensor.shape), DTYPES[dtype])
