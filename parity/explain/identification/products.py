"""Fit products of queries and keys with vectors for distances, as in Shaw et al. and DeBERTa."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from mha_spec import RelativeProducts
from parity.explain.fitting.distances import key_distances
from parity.explain.identification.biases import products_of
from parity.explain.identification.endpoints import endpoint_of
from parity.explain.identification.evidence import FittedLayer
from parity.explain.identification.observe import ObservedLayer
from parity.explain.identification.trace import CLOSE
from parity.measure.core.arrays import to_numpy

MOST_ROWS = 4096
"""Vectors that a table has, at most: an embedding of words has more."""


@dataclass(frozen=True)
class VectorTable:
    """Learned vectors that a layer may have for distances.

    Attributes:
        name: name of the parameter, or of the submodule that returns them.
        vectors: (num_buckets, N or 1, H).
        is_parameter: whether they are a parameter as it is.
    """

    name: str
    vectors: np.ndarray
    is_parameter: bool


@dataclass(frozen=True)
class TablePair:
    """The tables of queries and of keys; one of them may be missing."""

    of_queries: VectorTable | None
    of_keys: VectorTable | None

    @property
    def tables(self) -> dict[str, VectorTable]:
        """Return the tables by the names of their canonical weights."""
        tables = {}
        if self.of_queries is not None:
            tables["relative_keys"] = self.of_queries
        if self.of_keys is not None:
            tables["relative_queries"] = self.of_keys
        return tables


@dataclass(frozen=True)
class VectorProducts:
    """Products of queries, of keys or of both with all vectors of their tables.

    Attributes:
        of_queries: (B, N, T, num_buckets), or None.
        of_keys: (B, N, S, num_buckets), or None.
        shape: shape of the scores.
        num_buckets: number of buckets of the tables.
        per_head: whether a table has vectors for each head.
    """

    of_queries: np.ndarray | None
    of_keys: np.ndarray | None
    shape: tuple[int, ...]
    num_buckets: int
    per_head: bool

    def rows_at_own_position(
        self, added: np.ndarray, hidden: np.ndarray, allowed: float
    ) -> list[int]:
        """Return the rows whose products are added to the scores of each query and the key at its
        position.
        """
        positions = np.flatnonzero(~np.diagonal(hidden))
        if not len(positions):
            return []
        products = np.zeros(1)
        if self.of_queries is not None:
            products = products + self.of_queries[:, :, positions]
        if self.of_keys is not None:
            products = products + self.of_keys[:, :, positions]
        errors = np.abs(products - added[:, :, positions, positions, None]).max(axis=(0, 1, 2))
        return np.flatnonzero(errors <= allowed).tolist()

    def added_by(self, record: RelativeProducts, *, is_reversed: bool) -> np.ndarray:
        """Return the products of each query and key by the rows of a record, (B, N, T, S)."""
        distances = key_distances(*self.shape[2:])
        farthest = record.farthest
        rows = record.buckets()[np.clip(distances, -farthest, farthest) + farthest]
        if is_reversed:
            rows = self.num_buckets - 1 - rows
        rows = np.broadcast_to(rows, self.shape)
        added = np.zeros(self.shape)
        if self.of_queries is not None:
            added = added + np.take_along_axis(self.of_queries, rows, axis=3)
        if self.of_keys is not None:
            of_keys = np.take_along_axis(self.of_keys, rows.swapaxes(2, 3), axis=3)
            added = added + of_keys.swapaxes(2, 3)
        return added


def fit_relative_products(
    layer: ObservedLayer,
    added: np.ndarray,
    hidden: np.ndarray,
    config: Mapping[str, Any],
    fitted: FittedLayer,
) -> np.ndarray | None:
    """Fit products with vectors of distances, and return them, scaled, (B, N, T, S); None if there
    are none.

    Args:
        layer: the observed layer.
        added: values that are added to scores, (B, N, T, S); 0 for hidden keys.
        hidden: keys that queries do not see, (T, S).
        config: configuration of the model, for distances that a short input cannot show.
        fitted: collects the fields.
    """
    q, k = layer.values["q"].astype(np.float64), layer.values["k"].astype(np.float64)
    k = k.repeat(q.shape[1] // k.shape[1], axis=1)
    scores = layer.scale * products_of(q, k)
    allowed = CLOSE * (np.abs(added).max() + np.abs(scores).max())
    for pair in _candidate_pairs(layer, fitted):
        products = _vector_products(layer.scale * q, layer.scale * k, pair)
        rows = products.rows_at_own_position(added, hidden, allowed)
        for record, is_reversed in _candidate_records(rows, layer, config, products):
            expected = products.added_by(record, is_reversed=is_reversed)
            if np.abs(expected - added)[..., ~hidden].max() <= allowed:
                _add(layer, fitted, pair, record, len(hidden), is_reversed=is_reversed)
                return expected
    return None


def _vector_products(q: np.ndarray, k: np.ndarray, pair: TablePair) -> VectorProducts:
    """Return the products of heads (B, N, T, H) and (B, N, S, H) with tables."""
    of_queries = of_keys = None
    if pair.of_queries is not None:
        of_queries = _with_vectors(q, pair.of_queries)
    if pair.of_keys is not None:
        of_keys = _with_vectors(k, pair.of_keys)
    tables = list(pair.tables.values())
    per_head = any(table.vectors.shape[1] > 1 for table in tables)
    shape = (*q.shape[:3], k.shape[2])
    return VectorProducts(of_queries, of_keys, shape, len(tables[0].vectors), per_head)


def _with_vectors(heads: np.ndarray, table: VectorTable) -> np.ndarray:
    """Return the products of heads (B, N, T, H) with vectors, (B, N, T, num_buckets)."""
    return heads @ table.vectors.astype(np.float64).transpose(1, 2, 0)


def _add(
    layer: ObservedLayer,
    fitted: FittedLayer,
    pair: TablePair,
    record: RelativeProducts,
    num_tokens: int,
    *,
    is_reversed: bool,
) -> None:
    """Add a record with its tables, and how they were found."""
    names = " and ".join(dict.fromkeys(table.name for table in pair.tables.values()))
    order = "key - query"
    if is_reversed:
        order = "query - key"
    how = f"products with rows of {names} by {order} are added to scores"
    is_observed = record.num_exact is None or num_tokens > record.num_exact + 1
    fitted.add("relative_products", record, how, up_to=num_tokens, is_observed=is_observed)
    num_heads = fitted.fields["num_heads"]
    for name, table in pair.tables.items():
        vectors = table.vectors
        if is_reversed:
            vectors = vectors[::-1]
        if record.per_head:
            shape = (len(vectors), num_heads, vectors.shape[2])
            weight = np.broadcast_to(vectors, shape)
        else:
            weight = vectors[:, 0]
        fitted.weights[name] = np.ascontiguousarray(weight)
        if table.is_parameter:
            fitted.names[name] = table.name.removeprefix(f"{layer.tapped.name}.")


# ---- Candidates ----------------------------------------------------------------------------------


def _candidate_pairs(layer: ObservedLayer, fitted: FittedLayer) -> Iterator[TablePair]:
    """Yield the tables that a layer may have: of queries, of keys, or of both."""
    tables = list(_candidate_tables(layer, fitted))
    for table in tables:
        yield TablePair(table, None)
    if fitted.is_scaled_before:  # then products of keys lack the scale
        return
    for table in tables:
        yield TablePair(None, table)
    for of_queries, of_keys in product(tables, tables):
        if len(of_queries.vectors) == len(of_keys.vectors):
            yield TablePair(of_queries, of_keys)


def _candidate_tables(layer: ObservedLayer, fitted: FittedLayer) -> Iterator[VectorTable]:
    """Yield parameters of the model and outputs of submodules that may be vectors of distances."""
    _, num_heads, _, head_dim = layer.values["q"].shape
    for name, parameter in layer.model.named_parameters():
        if parameter.ndim != 2 or parameter.shape[1] != head_dim:
            continue
        if 1 < len(parameter) <= MOST_ROWS:
            yield VectorTable(name, to_numpy(parameter)[:, None], is_parameter=True)
    for linear in layer.linears():
        rows = linear.output.reshape(-1, linear.output.shape[-1])
        is_of_tokens = endpoint_of(linear) in fitted.endpoints.values()
        if is_of_tokens or rows.shape[1] != num_heads * head_dim:
            continue
        if 1 < len(rows) <= MOST_ROWS:
            vectors = rows.reshape(len(rows), num_heads, head_dim)
            yield VectorTable(f"the output of {linear.name}", vectors, is_parameter=False)


def _candidate_records(
    rows: list[int], layer: ObservedLayer, config: Mapping[str, Any], products: VectorProducts
) -> Iterator[tuple[RelativeProducts, bool]]:
    """Yield records with the rows of their own position, and whether tables are read by query -
    key.
    """
    last = products.num_buckets - 1
    sides = {
        "of_queries": products.of_queries is not None,
        "of_keys": products.of_keys is not None,
        "per_head": products.per_head,
    }
    for row, is_reversed in product(rows, (False, True)):
        num_before = row
        if is_reversed:
            num_before = last - row
        num_after = last - num_before
        for num_exact, most in _logarithmic_steps(layer, config):
            if max(num_before, num_after) <= 2 * num_exact:
                record = RelativeProducts(num_before, num_after, num_exact, most, **sides)
                yield record, is_reversed
        yield RelativeProducts(num_before, num_after, **sides), is_reversed


def _logarithmic_steps(
    layer: ObservedLayer, config: Mapping[str, Any]
) -> Iterator[tuple[int, int]]:
    """Yield the steps of the logarithm that attributes and a configuration tell of: DeBERTa's
    `position_buckets`.
    """
    settings = {**config, **vars(layer.module)}
    buckets = settings.get("position_buckets")
    if type(buckets) is not int or buckets < 4:
        return
    for name in ("max_relative_positions", "max_position_embeddings"):
        most = settings.get(name)
        if type(most) is int and most >= buckets // 2 + 2:
            yield buckets // 2, most
