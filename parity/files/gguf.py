"""GGUF, as llama.cpp reads it: values by key, then what is known of each tensor, then their bytes.

Read here and not by the `gguf` package: that one walks through every token of a vocabulary, and on for ever where a
damaged file says so. Tensors of plain types can be read; what is quantised is reported by its type's name.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

from parity.files.tensor_file import DTYPES, Cursor, Piece, TensorFile, TensorInfo

# fmt: off
TYPES = [  # by number; None: taken out of the format
    "F32", "F16", "Q4_0", "Q4_1", None, None, "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64",
    "F64", "IQ1_M", "BF16", None, None, None, "TQ1_0", "TQ2_0", None, None, None, "MXFP4", "NVFP4",
]
# fmt: on
PLAIN = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
MAX_DIMS = 4  # as ggml has it

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _LIST = 8, 9


def _text(cursor: Cursor) -> str:
    return cursor.take(cursor.unpack("<Q")).decode()


def _value(cursor: Cursor, kind: int) -> str | None:
    """A value as text; None for a list, which is passed over."""
    if kind == _STRING:
        return _text(cursor)
    if kind in _SCALARS:
        return str(cursor.unpack(_SCALARS[kind]))
    if kind != _LIST:
        raise ValueError(f"values must be of a known type, got type {kind}")
    kind, count = cursor.unpack("<I"), cursor.unpack("<Q")
    if kind in _SCALARS:
        cursor.skip(count * struct.calcsize(_SCALARS[kind]))
    else:
        for _ in range(count):  # each takes bytes of the file, so that no count goes on for ever
            if kind == _STRING:
                cursor.skip(cursor.unpack("<Q"))
            else:
                _value(cursor, kind)
    return None


def open_gguf(path: Path, file: BinaryIO) -> TensorFile:
    """Open a file. Shapes are NumPy's: GGUF has them the other way round."""
    cursor = Cursor(file)
    cursor.skip(4)  # GGUF
    version = cursor.unpack("<I")
    if version not in (2, 3):
        raise ValueError(f"{path} must be of version 2 or 3 of GGUF and little-endian, got version {version}")
    num_tensors, num_values = cursor.unpack("<Q"), cursor.unpack("<Q")
    metadata: dict[str, str] = {}
    seen = set()
    for _ in range(num_values):
        key = _text(cursor)
        if key in seen:
            raise ValueError(f"names must differ, got {key} twice")
        seen.add(key)
        value = _value(cursor, cursor.unpack("<I"))
        if value is not None:
            metadata[key] = value
    found: dict[str, tuple[tuple[int, ...], str, int]] = {}
    for _ in range(num_tensors):
        name, num_dims = _text(cursor), cursor.unpack("<I")
        if name in found or num_dims > MAX_DIMS:
            raise ValueError(f"each tensor must be there once, with at most {MAX_DIMS} axes, but {name} is not")
        shape = tuple(cursor.unpack("<Q") for _ in range(num_dims))[::-1]
        kind, offset = cursor.unpack("<I"), cursor.unpack("<Q")
        found[name] = (shape, (TYPES[kind] if kind < len(TYPES) else None) or f"type {kind}", offset)

    alignment = int(metadata.get("general.alignment", "32"))
    if alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"the alignment must be a power of two, got {alignment}")
    data = -(-cursor.tell() // alignment) * alignment
    infos: dict[str, TensorInfo] = {}
    end = cursor.size
    for name in sorted(found, key=lambda name: found[name][2], reverse=True):  # a tensor ends before the next begins
        shape, kind, offset = found[name]
        if kind in PLAIN:
            infos[name] = TensorInfo.of(shape, DTYPES[PLAIN[kind]])
        else:
            infos[name] = TensorInfo(shape, np.dtype([(kind, "V1")]), max(0, end - data - offset))
        if data + offset + infos[name].nbytes > end:
            raise ValueError(f"tensors must lie in the file, one after the other, but {name} does not")
        end = data + offset

    def fetch(name: str) -> NoReturn:
        raise ValueError(
            f"{name} must be of one of {sorted(PLAIN)} to be read, got {found[name][1]}, which is quantised"
        )

    infos = {name: infos[name] for name in found}
    places = {
        name: [Piece(file, data + offset, infos[name].nbytes)]
        for name, (_, kind, offset) in found.items()
        if kind in PLAIN
    }
    return TensorFile(path, "gguf", infos, metadata, places, fetch)
