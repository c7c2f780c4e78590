"""Fit biases and masks that depend on the distance between a query and a key."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Band(NamedTuple):
    """Distances, key - query, that a mask shows: from first to last, both included."""

    first: int
    last: int


def key_distances(num_queries: int, num_keys: int) -> np.ndarray:
    """Return key - query for queries and keys that both start at position 0, (T, S)."""
    return np.arange(num_keys) - np.arange(num_queries)[:, None]


def slopes_of(values: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Return the slope by which values of each head grow with distances, by least squares.

    Args:
        values: (B, N, T, S), 0 for cells that do not count.
        distances: an array that broadcasts against the values, 0 for cells that do not count.

    Returns:
        (N,); 0 if all distances are 0.
    """
    distances = np.broadcast_to(distances, values.shape)
    size = (distances * distances).sum(axis=(0, 2, 3))
    product = (values * distances).sum(axis=(0, 2, 3))
    return np.divide(product, size, out=np.zeros_like(product), where=size > 0)


def band_of(
    hidden: np.ndarray, distances: np.ndarray, cells: np.ndarray | None = None
) -> Band | None:
    """Return the band of distances that a mask shows, if it hides exactly the others.

    Args:
        hidden: the mask, (…, T, S), True for hidden keys.
        distances: key - query, an array that broadcasts against the mask.
        cells: cells that count, an array that broadcasts against the mask; all by default.

    Returns:
        None if the mask has a different pattern, or shows nothing.
    """
    distances = np.broadcast_to(distances, hidden.shape)
    if cells is None:
        cells = np.ones(hidden.shape, bool)
    cells = np.broadcast_to(cells, hidden.shape)
    shown = distances[cells & ~hidden]
    if not shown.size:
        return None
    band = Band(int(shown.min()), int(shown.max()))
    outside = (distances < band.first) | (distances > band.last)
    if np.array_equal(hidden[cells], outside[cells]):
        return band
    return None


def chunk_of(hidden: np.ndarray, cells: np.ndarray) -> int | None:
    """Return the length of the chunks within which a mask (T, T) shows keys; None if none fits.

    Args:
        hidden: the mask, True for hidden keys.
        cells: cells that count, (T, T): those in the future of a causal mask do not.
    """
    positions = np.arange(len(hidden))
    for size in range(1, len(hidden)):
        chunks = positions // size
        is_other = chunks[:, None] != chunks
        if np.array_equal(hidden[cells], is_other[cells]):
            return size
    return None
