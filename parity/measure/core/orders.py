"""Orders of heads and of their features that converters and ports of attention confuse.

An *order* is an array of indices, int: element i of the result is element `order[i]`. Features are
the rows of a projection of queries, keys or values, or the columns of the output projection. Right
ones are in the order (N, H): head by head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


def reordered(x: Any, order: np.ndarray, axis: int) -> Any:
    """Return an array of NumPy, torch or JAX with the elements of an axis in a different order.

    Args:
        x: an array.
        order: indices along the axis, int; elements may also be left out or repeated.
        axis: the axis.
    """
    # torch cannot index with an array of negative strides, such as a reversed one.
    indices = np.ascontiguousarray(order)
    return x.swapaxes(0, axis)[indices].swapaxes(0, axis)


# ---- Heads ---------------------------------------------------------------------------------------


def reversed_heads(num_heads: int) -> np.ndarray:
    """Return the order in which the last head comes first: int, (N,)."""
    return np.arange(num_heads)[::-1]


def rolled_heads(num_heads: int) -> np.ndarray:
    """Return the order in which each head comes one position later: int, (N,).

    Two rolled heads are also reversed.
    """
    return np.roll(np.arange(num_heads), 1)


@dataclass(frozen=True)
class WrongHeadOrder:
    """A wrong order of heads that has a name.

    Attributes:
        word: its name in the names of bugs, `q-heads-reversed`, and in their descriptions.
        order: returns the order for a number of heads, int (N,).
        fewest: the fewest heads for which it is wrong, and differs from the orders before it.
    """

    word: str
    order: Callable[[int], np.ndarray]
    fewest: int


HEAD_ORDERS = (
    WrongHeadOrder("reversed", reversed_heads, fewest=2),
    WrongHeadOrder("rolled", rolled_heads, fewest=3),
)
"""The wrong orders of heads that have a name, for the reference and for a user's attention."""


def tiled_heads(num_heads: int, num_kv_heads: int) -> np.ndarray:
    """Return query heads in the order in which tiled key/value heads would be repeated: int, (N,).

    If key/value heads are tiled (0 1 0 1) instead of repeated (0 0 1 1), query head n uses n % K.
    This order puts the query heads that then use the same key/value head next to each other. So
    right attention computes tiled heads from queries in this order, and returns them in it.
    """
    return np.arange(num_heads).reshape(-1, num_kv_heads).T.reshape(-1)


# ---- Features ------------------------------------------------------------------------------------


def of_whole_heads(head_order: np.ndarray, head_dim: int) -> np.ndarray:
    """Return the order of features that puts their heads in an order: int, (N * H,)."""
    first_features = np.asarray(head_order)[:, None] * head_dim
    return (first_features + np.arange(head_dim)).reshape(-1)


def within_heads(feature_order: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the order of features that puts the features of each head in an order: int, (N *
    H,).
    """
    head_dim = len(feature_order)
    first_features = np.arange(num_heads)[:, None] * head_dim
    return (first_features + np.asarray(feature_order)).reshape(-1)


def heads_innermost(num_heads: int, head_dim: int) -> np.ndarray:
    """Return the order (H, N) of features: the first feature of each head, then the second …: int,
    (H * N,).
    """
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim).T.reshape(-1)
