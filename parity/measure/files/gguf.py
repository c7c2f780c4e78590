"""GGUF, the format of llama.cpp: values by key, then tensor descriptions, then tensor data.

Parsed here because the `gguf` package reads every token of a vocabulary, and never ends for some
damaged files. The package only dequantizes blocks, some at a time; nothing here quantizes.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from mha_spec import InputError
from parity.measure.files.tensor_file import (
    DTYPES,
    Cursor,
    FileOffset,
    Shape,
    TensorFile,
    TensorInfo,
    library,
)

# fmt: off
TYPES = [  # by number; None: removed from the format
    "F32", "F16", "Q4_0", "Q4_1", None, None, "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K",
    "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S",
    "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16", None, None, None, "TQ1_0",
    "TQ2_0", None, None, None, "MXFP4", "NVFP4",
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
BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Supported quantized types, read as float32: values per block, and bytes per block."""

MAX_DIMS = 4
"""Most axes of a tensor, as in ggml."""

VALUES_AT_ONCE = 1 << 16
"""Values dequantized at a time, so that intermediate results fit the CPU cache."""

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _LIST = 8, 9


def _text(cursor: Cursor) -> str:
    return cursor.take(cursor.unpack("<Q")).decode()


def _value(cursor: Cursor, kind: int) -> str:
    """Return a value as text; lists are skipped and only reported as such."""
    if kind == _STRING:
        return _text(cursor)
    if kind in _SCALARS:
        return str(cursor.unpack(_SCALARS[kind]))
    if kind != _LIST:
        raise InputError("values", "have a known type", f"type {kind}")
    kind, count = cursor.unpack("<I"), cursor.unpack("<Q")
    if kind in _SCALARS:
        cursor.skip(count * struct.calcsize(_SCALARS[kind]))
    else:
        for _ in range(count):  # each consumes bytes of the file, which bounds any count
            if kind == _STRING:
                cursor.skip(cursor.unpack("<Q"))
            else:
                _value(cursor, kind)
    return f"a list of {count}"


class _Entry(NamedTuple):
    """Tensor in a file: its shape in NumPy's order, the name of its type, and its offset."""

    shape: Shape
    kind: str
    offset: int

    def measure(self, name: str, room: int) -> tuple[TensorInfo, int]:
        """Return facts of the tensor as read, and its bytes in the file.

        An unknown type may use all of `room`.
        """
        if self.kind in PLAIN:
            info = TensorInfo.of(self.shape, DTYPES[PLAIN[self.kind]])
            return info, info.nbytes
        if self.kind in BLOCKS:
            info = TensorInfo.of(self.shape, np.dtype(np.float32))
            values, length = BLOCKS[self.kind]
            if not self.shape or self.shape[-1] % values:
                raise InputError(
                    f"rows of {self.kind}",
                    f"be whole blocks of {values}",
                    {f"{name}.shape": self.shape},
                )
            return info, info.nbytes // 4 // values * length
        room = max(0, room)
        return TensorInfo(self.shape, np.dtype([(self.kind, "V1")]), room), room


def open_gguf(path: Path, file: BinaryIO) -> TensorFile:
    """Open a file. Shapes are in NumPy's order: GGUF's is the reverse."""
    cursor = Cursor(file)
    cursor.skip(4)  # GGUF
    version = cursor.unpack("<I")
    if version not in (2, 3):
        raise InputError(
            path, "be of version 2 or 3 of GGUF and little-endian", f"version {version}"
        )
    num_tensors, num_values = cursor.unpack("<Q"), cursor.unpack("<Q")
    metadata: dict[str, str] = {}
    for _ in range(num_values):
        key = _text(cursor)
        if key in metadata:
            raise InputError("names", "differ", f"{key} twice")
        metadata[key] = _value(cursor, cursor.unpack("<I"))
    entries: dict[str, _Entry] = {}
    for _ in range(num_tensors):
        name, num_dims = _text(cursor), cursor.unpack("<I")
        if name in entries or num_dims > MAX_DIMS:
            raise InputError(
                "each tensor", f"occur once, with at most {MAX_DIMS} axes", tensor=name
            )
        shape = tuple(cursor.unpack("<Q") for _ in range(num_dims))[::-1]
        number, offset = cursor.unpack("<I"), cursor.unpack("<Q")
        kind = TYPES[number] if number < len(TYPES) else None
        if kind is None:
            kind = f"type {number}"
        entries[name] = _Entry(shape, kind, offset)
    alignment = int(metadata.get("general.alignment", "32"))
    if alignment <= 0 or alignment & (alignment - 1):
        raise InputError("the alignment", "be a power of two", str(alignment))
    data = -(-cursor.tell() // alignment) * alignment
    entries = {name: entry._replace(offset=data + entry.offset) for name, entry in entries.items()}
    # Entries are measured from the last one back, but stay in the order of the file.
    infos = dict.fromkeys(entries, TensorInfo((), np.dtype(bool), 0))
    end = cursor.size
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset, reverse=True):
        infos[name], nbytes = entry.measure(name, end - entry.offset)
        if entry.offset + nbytes > end:  # it must end before the next one begins
            raise InputError("tensors", "lie in the file, one after the other", tensor=name)
        end = entry.offset

    def fetch(name: str) -> np.ndarray:
        return _dequantized(path, file, name, entries[name])

    offsets = {}
    quantized = {}
    for name, entry in entries.items():
        if entry.kind in PLAIN:
            offsets[name] = FileOffset(file, entry.offset)
        elif entry.kind in BLOCKS:
            quantized[name] = entry.kind
    return TensorFile(path, "gguf", infos, metadata, offsets, fetch, quantized=quantized)


def _dequantized(path: Path, file: BinaryIO, name: str, entry: _Entry) -> np.ndarray:
    """Dequantize a tensor to float32, bit for bit like the `gguf` package."""
    if entry.kind not in BLOCKS:
        raise InputError(
            name, f"be of one of {sorted([*PLAIN, *BLOCKS])} to be read", {name: entry.kind}
        )
    gguf = library(path, "gguf")
    values, length = BLOCKS[entry.kind]
    array = np.empty(entry.shape, np.float32)
    flat = array.reshape(-1)
    for start in range(0, flat.size, VALUES_AT_ONCE):
        part = flat[start : start + VALUES_AT_ONCE]
        file.seek(entry.offset + start // values * length)
        blocks = np.frombuffer(file.read(part.size // values * length), np.uint8)
        with np.errstate(all="ignore"):  # damaged scales may be NaN; callers check finiteness
            part[...] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[entry.kind])
    return array
