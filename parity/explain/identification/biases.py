"""Fit biases of scores: ALiBi, or a relative bias from a table of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mha_spec import Alibi, GridBias, InputError, RelativeBias
from parity.explain.fitting.distances import key_distances, slopes_of
from parity.explain.fitting.numbers import FLOAT32_DIGITS, round_numbers
from parity.explain.identification.trace import CLOSE

USUAL_DISTANCES = (128, *(2**exponent for exponent in range(3, 13)))
"""Usual distances from which all keys share a bucket; T5's comes first."""


@dataclass(frozen=True)
class AddedNumbers:
    """Values that are added equally to the scores of each sequence.

    Attributes:
        values: (N, T, S).
        hidden: keys that queries do not attend to, (T, S).
        tolerance: largest error of these values.
    """

    values: np.ndarray
    hidden: np.ndarray
    tolerance: float

    @property
    def is_zero(self) -> bool:
        """Return whether nothing is added."""
        return self.is_near(np.zeros_like(self.values))

    @property
    def distances(self) -> np.ndarray:
        """Return the tokens from each query to each key, (T, S); below 0 for earlier keys."""
        return key_distances(*self.hidden.shape)

    def is_near(self, values: np.ndarray) -> bool:
        """Return whether the added values equal these values, (N, T, S), within the tolerance."""
        errors = np.abs(values - self.values)[:, ~self.hidden]
        return bool((errors <= self.tolerance).all())


def scored(products: np.ndarray, scale: float, soft_cap: float | None) -> np.ndarray:
    """Return the scaled and capped products of queries and keys, in float64."""
    scaled = products.astype(np.float64) * scale
    if soft_cap is None:
        return scaled
    return soft_cap * np.tanh(scaled / soft_cap)


def products_of(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return the products of queries and keys, (B, N, T, S), in float64.

    Args:
        q: queries, (B, N, T, H).
        k: keys, (B, K, S, H).
    """
    q, k = q.astype(np.float64), k.astype(np.float64)
    k = k.repeat(q.shape[1] // k.shape[1], axis=1)
    return q @ k.swapaxes(2, 3)


def added_to(
    scores: np.ndarray,
    expected: np.ndarray,
    hidden: np.ndarray,
    description: str,
) -> AddedNumbers:
    """Return the values added to expected scores.

    Args:
        scores: input of the softmax, (B, N, T, S).
        expected: scores without these values, (B, N, T, S).
        hidden: keys that queries do not attend to, (T, S).
        description: description of the expected scores, for messages.

    Raises:
        ValueError: if they differ between sequences.
    """
    added = np.where(hidden, 0.0, scores - expected)
    values = added.mean(axis=0)
    tolerance = float(CLOSE * np.abs(scores[..., ~hidden]).max())
    error = np.abs(added - values).max()
    if error > tolerance:
        rule = "be products times a scale, plus values that are equal for all sequences"
        raise InputError("scores", rule, f"{description}, an error of {error:.2g}")
    return AddedNumbers(values, hidden, tolerance)


# ---- ALiBi ---------------------------------------------------------------------------------------


def fit_alibi(added: AddedNumbers, scale: float) -> Alibi | None:
    """Return the ALiBi that is added, up to a constant per row, which softmax ignores; None if it
    is not ALiBi.

    Args:
        added: values added to scores.
        scale: factor of scores, which may also multiply the slopes.
    """
    num_heads = len(added.values)
    shown = ~added.hidden
    values = _centered(added.values, shown)
    distances = _centered(np.abs(added.distances), shown)
    slopes = -slopes_of(values[None], distances)
    error = np.abs(values + slopes[:, None, None] * distances).max()
    if error > added.tolerance or slopes.min() <= 0.0:
        return None
    allowed = added.tolerance / np.abs(distances).max()
    for digits in FLOAT32_DIGITS:
        for is_scaled, factor in ((False, 1.0), (True, scale)):
            max_bias = _max_bias(slopes[0] / factor, num_heads, digits)
            with suppress(ValueError):
                alibi = Alibi(max_bias, is_scaled)
                expected = factor * np.array(alibi.slopes(num_heads))
                if np.abs(expected - slopes).max() <= allowed:
                    return alibi
    return None


def _max_bias(first_slope: float, num_heads: int, digits: int) -> float:
    """Return the max_bias of ALiBi by the slope of its first head, rounded to digits."""
    largest_power = 1 << (num_heads.bit_length() - 1)
    return next(round_numbers(-largest_power * np.log2(first_slope), [digits]))


def _centered(x: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Return values of queries and keys minus the row mean over the visible keys; 0 for hidden
    keys.
    """
    counts = np.maximum(shown.sum(axis=-1, keepdims=True), 1)
    means = np.where(shown, x, 0.0).sum(axis=-1, keepdims=True) / counts
    return np.where(shown, x - means, 0.0)


# ---- Tables --------------------------------------------------------------------------------------


def fit_relative_bias(
    added: AddedNumbers, tables: Mapping[str, np.ndarray], max_distances: list[int]
) -> tuple[RelativeBias | GridBias, str] | None:
    """Return the relative bias that is added, by distance or on a grid, with the name of its table;
    or None.

    Args:
        added: values added to scores.
        tables: arrays by name, including arrays of shape (num_buckets, N).
        max_distances: candidates, the likeliest first.
    """
    distances = added.distances
    is_causal = bool(added.hidden[distances > 0].all())
    for name, table in tables.items():
        if table.ndim != 2 or table.shape[1] != len(added.values):
            continue
        for relative in _relative_biases(len(table), max_distances, is_causal=is_causal):
            farthest = relative.max_distance
            bucket_indices = np.clip(distances, -farthest, farthest) + farthest
            if added.is_near(_looked_up(table, relative.buckets()[bucket_indices])):
                return relative, name
        for grid in _grids(distances.shape, len(table)):
            if added.is_near(_looked_up(table, grid.buckets())):
                return grid, name
    return None


def _looked_up(table: np.ndarray, buckets: np.ndarray) -> np.ndarray:
    """Return the rows (N,) of a table for buckets (T, S) as (N, T, S)."""
    return np.moveaxis(table[buckets], -1, 0)


def _relative_biases(
    num_buckets: int, max_distances: list[int], *, is_causal: bool
) -> Iterator[RelativeBias]:
    """Yield relative biases with this number of buckets."""
    for max_distance in dict.fromkeys((*max_distances, *USUAL_DISTANCES)):
        for bidirectional in (not is_causal, is_causal):
            # The candidate may be too small, or the number of buckets odd.
            with suppress(ValueError):
                yield RelativeBias(num_buckets, max_distance, bidirectional)


def _grids(shape: tuple[int, ...], num_buckets: int) -> Iterator[GridBias]:
    """Yield the grids with these numbers of tokens, (T, S), and buckets."""
    num_queries, num_keys = shape
    if num_queries != num_keys:
        return
    for class_token in (False, True):
        area = num_queries - class_token
        for height in range(1, area + 1):
            if area % height:
                continue
            grid = GridBias(height, area // height, class_token)
            if grid.num_buckets == num_buckets:
                yield grid
