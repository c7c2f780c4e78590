"""Fit products of queries and keys with vectors for distances, as in Shaw et al. and DeBERTa."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from mha_spec import RelativeProducts
from mha_spec.features.relative_products import SIDES
from parity.explain.identification.ends import end_of
from parity.explain.identification.found import Fit
from parity.explain.identification.observe import ObservedLayer
from parity.explain.identification.trace import CLOSE
from parity.measure.core.arrays import to_numpy

MOST_ROWS = 4096
"""Vectors that a table has, at most: an embedding of words has more."""


class Table(NamedTuple):
    """Learned vectors that a layer may have for distances.

    Attributes:
        name: of the parameter, or of the submodule that returns them.
        vectors: (num_buckets, N or 1, H).
        is_parameter: whether they are a parameter as it is.
    """

    name: str
    vectors: np.ndarray
    is_parameter: bool


def fit_relative_products(
    layer: ObservedLayer,
    added: np.ndarray,
    hidden: np.ndarray,
    config: Mapping[str, Any],
    found: Fit,
) -> np.ndarray | None:
    """Fit products with vectors of distances, and return them, scaled, (B, N, T, S); None if there
    are none.

    Args:
        layer: the observed layer.
        added: numbers that are added to scores, (B, N, T, S); 0 for hidden keys.
        hidden: keys that queries do not see, (T, S).
        config: of the model, for distances that a short input cannot show.
        found: collects the fields.
    """
    scale = 1.0 if layer.tapped.scale is None else layer.tapped.scale
    q, k = (layer.values[name].astype(np.float64) for name in "qk")
    k = k.repeat(q.shape[1] // k.shape[1], axis=1)
    allowed = CLOSE * (np.abs(added).max() + np.abs(scale * (q @ k.swapaxes(2, 3))).max())
    known = list(_tables(layer, q.shape[1], q.shape[3], found))
    pairs: list[tuple[Table | None, Table | None]] = [(table, None) for table in known]
    if not found.is_scaled_before:  # else only products of queries have the scale
        pairs += [(None, table) for table in known]
        pairs += [
            (one, other)
            for one, other in product(known, known)
            if len(one.vectors) == len(other.vectors)
        ]
    for pair in pairs:
        made = _Made.of(scale * q, scale * k, *pair)
        for record, is_reversed in _records(
            made.rows_of_own(added, hidden, allowed), layer, config, made
        ):
            gained = made.gained(record, is_reversed=is_reversed)
            if np.abs(gained - added)[..., ~hidden].max() <= allowed:
                _take(
                    layer,
                    found,
                    dict(zip(SIDES, pair, strict=True)),
                    record,
                    len(hidden),
                    is_reversed=is_reversed,
                )
                return gained
    return None


def _take(
    layer: ObservedLayer,
    found: Fit,
    tables: Mapping[str, Table | None],
    record: RelativeProducts,
    num_tokens: int,
    *,
    is_reversed: bool,
) -> None:
    """Take a record with its tables, and how they were found."""
    names = " and ".join(
        dict.fromkeys(table.name for table in tables.values() if table is not None)
    )
    is_seen = record.num_exact is None or num_tokens > record.num_exact + 1
    way = "query - key" if is_reversed else "key - query"
    how = f"products with rows of {names} by {way} are added to scores"
    found.add("relative_products", record, how, up_to=num_tokens, is_seen=is_seen)
    for name, table in tables.items():
        if table is None:
            continue
        vectors = table.vectors[::-1] if is_reversed else table.vectors
        of_heads = np.broadcast_to(
            vectors, (len(vectors), found.fields["num_heads"], vectors.shape[2])
        )
        found.weights[name] = np.ascontiguousarray(of_heads if record.per_head else vectors[:, 0])
        if table.is_parameter:
            found.names[name] = table.name.removeprefix(f"{layer.tapped.name}.")


class _Made(NamedTuple):
    """Products of queries, of keys or of both with all vectors of their tables.

    Attributes:
        of_queries: (B, N, T, num_buckets), or None.
        of_keys: (B, N, S, num_buckets), or None.
        shape: of the scores.
        num_buckets: of the tables.
        per_head: whether a table has vectors for each head.
    """

    of_queries: np.ndarray | None
    of_keys: np.ndarray | None
    shape: tuple[int, ...]
    num_buckets: int
    per_head: bool

    @classmethod
    def of(
        cls, q: np.ndarray, k: np.ndarray, of_queries: Table | None, of_keys: Table | None
    ) -> _Made:
        """Return the products of heads (B, N, T, H) and (B, N, S, H) with tables."""
        held = [table.vectors for table in (of_queries, of_keys) if table is not None]
        per_head = any(vectors.shape[1] > 1 for vectors in held)
        by_query, by_key = (
            None if table is None else x @ table.vectors.astype(np.float64).transpose(1, 2, 0)
            for x, table in ((q, of_queries), (k, of_keys))
        )
        return cls(by_query, by_key, (*q.shape[:3], k.shape[2]), len(held[0]), per_head)

    def rows_of_own(self, added: np.ndarray, hidden: np.ndarray, allowed: float) -> list[int]:
        """Return the rows whose products are added to the scores of each query and the key at its
        place.
        """
        places = np.flatnonzero(~np.diagonal(hidden))
        if not len(places):
            return []
        products = sum(x[:, :, places] for x in (self.of_queries, self.of_keys) if x is not None)
        errors = np.abs(products - added[:, :, places, places, None]).max(axis=(0, 1, 2))
        return [int(row) for row in np.flatnonzero(errors <= allowed)]

    def gained(self, record: RelativeProducts, *, is_reversed: bool) -> np.ndarray:
        """Return the products of each query and key by the rows of a record, (B, N, T, S)."""
        num_queries, num_keys = self.shape[2:]
        distances = np.arange(num_keys) - np.arange(num_queries)[:, None]
        rows = record.buckets()[
            np.clip(distances, -record.farthest, record.farthest) + record.farthest
        ]
        rows = np.broadcast_to(self.num_buckets - 1 - rows if is_reversed else rows, self.shape)
        gained = np.zeros(self.shape)
        if self.of_queries is not None:
            gained = gained + np.take_along_axis(self.of_queries, rows, axis=3)
        if self.of_keys is not None:
            gained = gained + np.take_along_axis(
                self.of_keys, rows.swapaxes(2, 3), axis=3
            ).swapaxes(2, 3)
        return gained


def _tables(layer: ObservedLayer, num_heads: int, head_dim: int, found: Fit) -> Iterator[Table]:
    """Yield parameters of the model and outputs of submodules that may be vectors of distances."""
    for name, x in layer.model.named_parameters():
        if x.ndim == 2 and x.shape[1] == head_dim and 1 < len(x) <= MOST_ROWS:
            yield Table(name, to_numpy(x)[:, None], is_parameter=True)
    for each in layer.linears():
        rows = each.result.reshape(-1, each.result.shape[-1])
        is_of_tokens = end_of(each) in found.ends.values()
        if (
            rows.shape[1] == num_heads * head_dim
            and 1 < len(rows) <= MOST_ROWS
            and not is_of_tokens
        ):
            yield Table(
                f"the output of {each.name}",
                rows.reshape(len(rows), num_heads, head_dim),
                is_parameter=False,
            )


def _records(
    rows: list[int], layer: ObservedLayer, config: Mapping[str, Any], made: _Made
) -> Iterator[tuple[RelativeProducts, bool]]:
    """Yield records with the rows of their own place, and whether tables are read by query -
    key.
    """
    last = made.num_buckets - 1
    sides = {"of_queries": made.of_queries is not None, "of_keys": made.of_keys is not None}
    for row, is_reversed in product(rows, (False, True)):
        before = last - row if is_reversed else row
        for exact, most in _steps(layer, config):
            if max(before, last - before) <= 2 * exact:
                yield (
                    RelativeProducts(
                        before, last - before, exact, most, **sides, per_head=made.per_head
                    ),
                    is_reversed,
                )
        yield RelativeProducts(before, last - before, **sides, per_head=made.per_head), is_reversed


def _steps(layer: ObservedLayer, config: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
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
