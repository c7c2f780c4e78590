"""Equality of weights bit for bit, without the reference that `verify` compares them with."""

from __future__ import annotations

import numpy as np

from parity.measure.core.weights import Weights


def same_array(array: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays have equal shapes, dtypes and bits."""
    if array.dtype != other.dtype or array.shape != other.shape:
        return False
    return array.tobytes() == other.tobytes()


def same_bits(weights: Weights, other: Weights) -> bool:
    """Return whether two sets of weights have equal names, dtypes and bits."""
    if weights.keys() != other.keys():
        return False
    return all(same_array(array, other[name]) for name, array in weights.items())
