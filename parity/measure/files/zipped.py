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


# bytes; 64 axes need about 300. Far below the limits of Python's parser, which NumPy uses
MAX_HEADER = 1_000
ALIGNMENT = 64  # of torch's memory-mapped data


# ---- Archives ------------------------------------------------------------------------------------


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Open the archive in a file, if it has no duplicate names and is not a zip bomb.

    Raises:
        ValueError: if it has. (The library raises many other errors.)
    """
    archive = zipfile.ZipFile(file)
    file.seek(-22 - len(archive.comment), 2)
    end = file.read(22)
    if end[:4] != b"PK\5\6" or int.from_bytes(end[20:], "little") != len(archive.comment):
        raise InputError(
            "an archive", "end where it says, but it does not"
        )  # zipfile accepts it silently
    members = archive.infolist()
    check_unique(member.filename for member in members)
    size = file.seek(0, 2)
    for member in members:
        if (
            member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            or member.flag_bits & 1
        ):
            raise InputError(
                "members", "be stored or deflated, and not encrypted", member=member.filename
            )
    if sum(member.compress_size for member in members) > size:
        raise InputError("members", "not overlap, but they do")
    check_inflation(sum(member.file_size for member in members), size)
    return archive


def check_inflation(inflated: int, size: int) -> None:
    """Refuse a small file that would fill the memory.

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
    """Open an uncompressed member for writing, with a fixed date so that equal contents result in
    equal files.
    """
    member = zipfile.ZipInfo(name)
    begin = archive.start_dir + 30 + len(name.encode()) + 20 + 4  # 64-bit sizes take 20
    padding = -begin % alignment
    member.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding) if alignment > 1 else b""
    return archive.open(member, "w", force_zip64=True)


def _comment(metadata: Mapping[str, str]) -> bytes:
    return json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()


def _metadata(archive: zipfile.ZipFile) -> dict[str, str]:
    with suppress(ValueError, RecursionError):
        if metadata := text_by_name(parse_json(archive.comment)):
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
    """Open an archive of .npy files. Names are not paths on disk; `a/b` of other programs is read
    as `a.b`.
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
    if "sha256" in metadata or len(members) < len(infos):
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
        return np.asarray(
            array.view(dtype) if dtype == BFLOAT16 else array.astype(dtype, copy=False), order="C"
        )

    return TensorFile(path, "npz", infos, metadata, fetch=fetch, ignored=ignored)


def _dotted(name: str) -> str:
    """Return a name with levels joined by dots instead of slashes; names that look like paths are
    unchanged.
    """
    levels = name.split("/")
    return name if "." in name or not all(levels) else ".".join(levels)


def _read_header(stream: IO[bytes]) -> TensorInfo:
    """Read the header of a .npy file."""
    version = npy.read_magic(stream)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise InputError("an array", "be of version 1 or 2 of .npy", str(version))
    with warnings.catch_warnings(action="ignore"):  # about unusual text, which is rejected
        shape, _, stored = read(stream, max_header_size=MAX_HEADER)
    dtype = (
        BFLOAT16 if stored == np.dtype("V2") else stored.newbyteorder("=")
    )  # NumPy has no name for bfloat16
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
        kind = torch.storage._dtype_to_storage_type_map().get(dtype)  # of torch's oldest dtypes
        size = info.nbytes // info.dtype.itemsize if kind else info.nbytes
        storage = _Storage(
            ("storage", getattr(torch, kind or "UntypedStorage"), str(i), "cpu", size)
        )
        strides = tuple(math.prod(info.shape[axis + 1 :]) for axis in range(len(info.shape)))
        arguments = (storage, 0, info.shape, strides, False, OrderedDict())
        made_by = (
            (_rebuild_tensor_v2, arguments) if kind else (_rebuild_tensor_v3, (*arguments, dtype))
        )
        entries[name] = _Tensor(*made_by)
    with new_zip(path, tensors) as archive:
        with new_member(archive, "archive/data.pkl") as member:
            _Pickler(member, protocol=2).dump(entries)
        for name, content in {"version": b"3\n", "byteorder": b"little"}.items():
            with new_member(archive, f"archive/{name}") as member:
                member.write(content)
        for i, name in enumerate(entries):
            with new_member(archive, f"archive/data/{i}", ALIGNMENT) as member:
                member.writelines(tensors.pieces(name))


LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of files of torch.save before 1.6: a sequence of pickles, then the bytes of all
tensors.
"""


def open_torch(path: Path, file: BinaryIO) -> TensorFile:
    """Open a file of `torch.save` with `weights_only`, which executes nothing; memory-mapped,
    except old formats.
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
    leaves = flatten({"": tree} if isinstance(tree, torch.Tensor) else tree)
    found = {name: leaf.detach() for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    infos = {name: _info(name, tensor) for name, tensor in found.items()}
    check_inflation(
        sum(info.nbytes for info in infos.values()), file.seek(0, 2)
    )  # a tensor may repeat a number
    checksums: dict[int, set[int]] = {0: set()}
    for member in members or ():
        checksums.setdefault(member.file_size, set()).add(member.CRC)
    # A storage with a wrong, larger size would extend into the next one.
    if members is not None and any(
        tensor.untyped_storage().nbytes() not in checksums for tensor in found.values()
    ):
        raise InputError("each storage", "be as long as the member that holds it, but one is not")
    unread = (
        {tensor.untyped_storage().data_ptr() for tensor in found.values()}
        if _has_checksums(members)
        else set()
    )

    def fetch(name: str) -> np.ndarray:
        tensor, dtype = found[name], infos[name].dtype
        storage = tensor.untyped_storage()
        if (
            storage.data_ptr() in unread
        ):  # only torch knows its member; damaged bytes match no other checksum
            content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            if content.nbytes and zlib.crc32(raw(content)) not in checksums[content.nbytes]:
                raise InputError(name, "have the CRC-32 that its archive says", "damaged bytes")
            unread.discard(storage.data_ptr())
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if (
            dtype.name not in NATIVE
        ):  # torch cannot convert these to NumPy dtypes; the bits are equal
            tensor = tensor.view(getattr(torch, f"int{8 * dtype.itemsize}"))
        return tensor.numpy().copy().view(dtype)

    ignored = [name for name in leaves if name not in found]
    return TensorFile(path, "torch", infos, metadata, fetch=fetch, ignored=ignored)


def _check_members(archive: zipfile.ZipFile, members: Iterable[zipfile.ZipInfo]) -> None:
    """Refuse an archive that torch cannot memory-map, and damage in members that describe
    tensors.
    """
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise InputError("members of an archive of torch's", "not be compressed, but they are")
    for member in members if _has_checksums(members) else ():
        if "/data/" not in member.filename:  # torch compares no checksums; zipfile does
            content = archive.read(member)
            if member.filename.endswith("/byteorder") and content != sys.byteorder.encode():
                # torch swaps the bytes, which changes checksums
                raise InputError(
                    "numbers", f"be {sys.byteorder}-endian", byteorder=content.decode()
                )


def _has_checksums(members: Iterable[zipfile.ZipInfo] | None) -> bool:
    """Return whether members have a CRC-32; torch can save without."""
    return any(member.CRC for member in members or ())


def _load(path: Path, *, mmap: bool) -> Any:
    """Load the tree of tensors from a torch file."""
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
