"""Fit biases of scores: ALiBi, or a relative bias from a table of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from mha_spec import Alibi, GridBias, InputError, RelativeBias
from parity.explain.identification.trace import CLOSE

USUAL = (128, *(2**exponent for exponent in range(3, 13)))
"""Usual distances from which all keys share a bucket; T5's comes first."""


class Added(NamedTuple):
    """Numbers that are added equally to the scores of each sequence.

    Attributes:
        values: (N, T, S).
        hidden: keys that queries do not attend to, (T, S).
        tolerance: largest error of these numbers.
    """

    values: np.ndarray
    hidden: np.ndarray
    tolerance: float

    @property
    def is_zero(self) -> bool:
        """Return whether nothing is added."""
        return bool((np.abs(self.values[:, ~self.hidden]) <= self.tolerance).all())

    @property
    def distances(self) -> np.ndarray:
        """Return the tokens from each query to each key, (T, S); below 0 for earlier keys."""
        num_queries, num_keys = self.hidden.shape
        return np.arange(num_keys) - np.arange(num_queries)[:, None]

    def is_near(self, values: np.ndarray) -> bool:
        """Return whether the added numbers equal these values, (N, T, S), within the tolerance."""
        return bool((np.abs(values - self.values)[:, ~self.hidden] <= self.tolerance).all())


def scored(products: np.ndarray, scale: float, soft_cap: float | None) -> np.ndarray:
    """Return the scaled and capped products of queries and keys, in float64."""
    scaled = products.astype(np.float64) * scale
    return scaled if soft_cap is None else soft_cap * np.tanh(scaled / soft_cap)


def added_to(
    scores: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    hidden: np.ndarray,
    scale: float,
    soft_cap: float | None,
    gained: np.ndarray | float = 0.0,
) -> Added:
    """Return the numbers added to the scaled and capped products of queries and keys.

    Args:
        scores: input of the softmax, (B, N, T, S).
        q, k: heads, (B, N, T, H) and (B, K, S, H).
        hidden: keys that queries do not attend to, (T, S).
        scale, soft_cap: factor and bound for the products.
        gained: numbers that are known to be added, (B, N, T, S).

    Raises:
        ValueError: if they differ between sequences.
    """
    k = k.repeat(q.shape[1] // k.shape[1], axis=1)
    made = scored(q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3), scale, soft_cap)
    added = np.where(hidden, 0.0, scores - made - gained)
    values, tolerance = added.mean(axis=0), CLOSE * np.abs(scores[..., ~hidden]).max()
    if np.abs(added - values).max() > tolerance:
        known = (
            f"scale={scale:.6g}, soft_cap={soft_cap}, an error of "
            f"{np.abs(added - values).max():.2g}"
        )
        raise InputError(
            "scores",
            "be products times a scale, plus numbers that are equal for all sequences",
            known,
        )
    return Added(values, hidden, float(tolerance))


def fit_alibi(added: Added, scale: float) -> Alibi | None:
    """Return the ALiBi that is added, up to a constant per row, which softmax ignores; None if it
    is not ALiBi.

    Args:
        added: numbers added to scores.
        scale: factor of scores, which may also multiply the slopes.
    """
    num_heads = len(added.values)
    shown = ~added.hidden
    values, distances = (_centered(x, shown) for x in (added.values, np.abs(added.distances)))
    slopes = -(values * distances).sum(axis=(1, 2)) / (distances**2).sum()
    if (
        np.abs(values + slopes[:, None, None] * distances).max() > added.tolerance
        or slopes.min() <= 0.0
    ):
        return None
    power = 1 << (num_heads.bit_length() - 1)
    allowed = added.tolerance / np.abs(distances).max()
    for digits in range(1, 8):
        for scaled, factor in ((False, 1.0), (True, scale)):
            max_bias = float(f"{-power * np.log2(slopes[0] / factor):.{digits - 1}e}")
            with suppress(ValueError):
                alibi = Alibi(max_bias, scaled)
                if np.abs(factor * np.array(alibi.slopes(num_heads)) - slopes).max() <= allowed:
                    return alibi
    return None


def _centered(x: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Return numbers of queries and keys minus the row mean over the visible keys; 0 for hidden
    keys.
    """
    means = np.where(shown, x, 0.0).sum(axis=-1, keepdims=True) / np.maximum(
        shown.sum(axis=-1, keepdims=True), 1
    )
    return np.where(shown, x - means, 0.0)


def fit_relative_bias(
    added: Added, tables: Mapping[str, np.ndarray], max_distances: list[int]
) -> tuple[RelativeBias | GridBias, str] | None:
    """Return the relative bias that is added, by distance or on a grid, with the name of its table;
    or None.

    Args:
        added: numbers added to scores.
        tables: arrays by name, including those of shape (num_buckets, N).
        max_distances: candidates, the likeliest first.
    """
    distances = added.distances
    is_causal = bool(added.hidden[distances > 0].all())
    for name, table in tables.items():
        if table.ndim != 2 or table.shape[1] != len(added.values):
            continue
        for relative in _biases(len(table), max_distances, is_causal=is_causal):
            places = (
                np.clip(distances, -relative.max_distance, relative.max_distance)
                + relative.max_distance
            )
            if added.is_near(np.moveaxis(table[relative.buckets()[places]], -1, 0)):
                return relative, name
        for grid in _grids(distances.shape, len(table)):
            if added.is_near(np.moveaxis(table[grid.buckets()], -1, 0)):
                return grid, name
    return None


def _grids(shape: tuple[int, ...], num_buckets: int) -> Iterator[GridBias]:
    """Yield the grids with these numbers of tokens, (T, S), and buckets."""
    num_queries, num_keys = shape
    for class_token in (False, True):
        area = num_queries - class_token
        for height in range(1, area + 1):
            if area % height == 0 and num_queries == num_keys:
                grid = GridBias(height, area // height, class_token)
                if grid.num_buckets == num_buckets:
                    yield grid


def _biases(
    num_buckets: int, max_distances: list[int], *, is_causal: bool
) -> Iterator[RelativeBias]:
    """Yield relative biases with this number of buckets."""
    for max_distance in dict.fromkeys((*max_distances, *USUAL)):
        for bidirectional in (not is_causal, is_causal):
            with suppress(
                ValueError
            ):  # the candidate is too small, or the number of buckets is odd
                yield RelativeBias(num_buckets, max_distance, bidirectional)
