"""safetensors: a JSON header with the offsets of arrays, then their bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import safetensors
from safetensors import safe_open

from mha_spec import InputError
from parity.measure.files.tensor_file import (
    DTYPES,
    FileOffset,
    TensorFile,
    TensorInfo,
    Tensors,
    parse_json,
)

NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
CODES = {name: code for code, name in NAMES.items()}


def header(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return the header of a file and the order of its arrays, which depend only on the arguments.

    It is the order of `infos`, but wider dtypes come first, so that each array is aligned to its
    dtype.

    Raises:
        ValueError: if the format does not support a dtype.
    """
    order = sorted(infos, key=lambda name: -infos[name].dtype.itemsize)
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        begin, end = end, end + infos[name].nbytes
        code = CODES.get(infos[name].dtype.name)
        if code is None:
            raise InputError(
                name,
                f"be of one of {sorted(CODES)} in a safetensors file",
                {name: infos[name].dtype},
            )
        entries[name] = {"dtype": code, "shape": infos[name].shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the arrays aligned
    return struct.pack("<Q", len(text)) + text, order


def safetensors_bytes(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file, which depend only on its content.

    The library writes wrong values for non-contiguous arrays, huggingface/safetensors#825, and its
    header in varying order.
    """
    infos = {
        name: TensorInfo.of(tensors[name].shape, tensors[name].dtype) for name in sorted(tensors)
    }
    head, order = header(infos, metadata)
    return head + b"".join(tensors[name].tobytes() for name in order)


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Write a file. The hash in its header is written last."""
    head, order = header(tensors.infos, tensors.metadata)
    with path.open("wb") as file:
        file.write(head)
        for name in order:
            file.writelines(tensors.pieces(name))
        file.seek(0)
        file.write(header(tensors.infos, tensors.metadata)[0])


def open_safetensors(path: Path, file: BinaryIO) -> TensorFile:
    """Open a file: the library validates it, and arrays are read at the offsets in its header.

    Some versions of the library cannot read bfloat16, and it silently accepts duplicate names.
    """
    try:
        with safe_open(path, "numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise InputError(
            path, "be a whole safetensors file", f"{path.stat().st_size} bytes: {error}"
        ) from None
    # The length of the header, which offsets are relative to the end of.
    (length,) = struct.unpack("<Q", file.read(8))
    entries = parse_json(file.read(length))
    metadata = entries.pop("__metadata__", None) or {}
    infos: dict[str, TensorInfo] = {}
    offsets: dict[str, FileOffset] = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in NAMES:
            raise InputError(path, f"hold one of {sorted(NAMES)}", f"{entry['dtype']} for {name}")
        infos[name] = TensorInfo.of(entry["shape"], DTYPES[NAMES[entry["dtype"]]])
        offsets[name] = FileOffset(file, 8 + length + entry["data_offsets"][0])
    return TensorFile(path, "safetensors", infos, metadata, offsets)
