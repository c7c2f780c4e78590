"""Fit a relative bias on a grid of tokens to numbers that are added to scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mha_spec import GridBias
from parity.core.arrays import to_numpy
from parity.identification.found import Fit
from parity.identification.observe import ObservedLayer

CLOSE = 1e-6
"""Largest error of an added number, of the largest one."""


def fit_grid_bias(layer: ObservedLayer, added: np.ndarray, found: Fit) -> bool:
    """Fit the grid whose table, which the model holds, has the numbers that are added; return whether there is one.

    Args:
        layer: the layer.
        added: what is added to the scores of each sequence, (N, T, S).
        found: takes what is found.
    """
    num_heads, num_queries, num_keys = added.shape
    for name, parameter in layer.model.named_parameters():
        if num_queries != num_keys or parameter.ndim != 2 or parameter.shape[1] != num_heads:
            continue
        table = to_numpy(parameter)
        for grid in _grids(num_queries, len(table)):
            made = np.moveaxis(table[grid.buckets()], -1, 0)
            if np.abs(made - added).max() <= CLOSE * np.abs(added).max():
                found.add("relative_bias", grid, f"numbers that are added to scores are those of {name}")
                found.weights["relative_bias"] = table
                found.names["relative_bias"] = name.removeprefix(f"{layer.tapped.name}.")
                return True
    return False


def _grids(num_tokens: int, num_buckets: int) -> Iterator[GridBias]:
    """Yield the grids of so many tokens and buckets."""
    for class_token in (False, True):
        area = num_tokens - class_token
        for height in range(1, area + 1):
            if area % height == 0:
                grid = GridBias(height, area // height, class_token)
                if grid.num_buckets == num_buckets:
                    yield grid
