"""Tensors in files, compared bit by bit."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from parity.measure.files import open_tensors, write_tensors


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a file."""
    with open_tensors(path) as file:
        return {name: file.read(name) for name in file.infos}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file."""
    with open_tensors(path) as file:
        return dict(file.metadata)


def write_tensor_file(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> Path:
    """Write tensors to a file, and return its path."""
    write_tensors(
        path,
        {name: (x.shape, x.dtype) for name, x in tensors.items()},
        tensors.__getitem__,
        metadata,
    )
    return path


def bits_of(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the dtype, shape and bytes of each tensor."""
    return {name: (x.dtype.name, x.shape, x.tobytes()) for name, x in tensors.items()}


def same_array(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays have the same dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_tensors(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Return whether two sets of tensors have the same names, dtypes, shapes and bytes."""
    return bits_of(one) == bits_of(other)
