"""Relative products: products of queries and keys with learned vectors of the distance between
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mha_spec.errors import InputError
from mha_spec.record import Record
from mha_spec.rules import as_boolean, as_count

SIDES = {"relative_keys": "of_queries", "relative_queries": "of_keys"}
"""Tables of learned vectors, and the field that enables each."""

RELATIVE_TABLES: dict[str, str] = dict.fromkeys(SIDES, "CNH")
"""Axes of the learned weights of relative products: see `mha_spec.score_weights`."""


@dataclass(frozen=True, repr=False)
class RelativeProducts(Record):
    """Scaled products of queries, keys or both with learned vectors of their distance, added to the
    scores.

    With the distance key - query in a bucket b, a score is scale * (q · k + q · relative_keys[b] +
    k · relative_queries[b]). Each distance has its own bucket, and larger ones share the last
    bucket on their side. With `num_exact`, only distances up to it have their own bucket. The
    others widen logarithmically up to `max_distance`.

    Attributes:
        num_before: number of buckets for keys before the query.
        num_after: number of buckets for keys after the query.
        num_exact: largest distance with a bucket of its own; None for all.
        max_distance: distance at which a side has `2 * num_exact` buckets; None without
            `num_exact`.
        of_queries: multiply queries by `relative_keys`.
        of_keys: multiply keys by `relative_queries`.
        per_head: each query head has its own vectors.

    Raises:
        TypeError: if a number is not an integer, or a flag not a boolean.
        ValueError: if a number is negative, neither queries nor keys are multiplied, or only one of
            `num_exact` and `max_distance` is None, or they do not fit the number of buckets.

    Source: Self-Attention with Relative Position Representations, arXiv:1803.02155, equation 4;
    both sides and logarithmic steps: DeBERTa, arXiv:2006.03654, section 3.1 and its released code.
    """

    num_before: int
    num_after: int
    num_exact: int | None = None
    max_distance: int | None = None
    of_queries: bool = True
    of_keys: bool = False
    per_head: bool = False

    _positional: ClassVar[tuple[str, ...]] = ("num_before", "num_after")

    def __post_init__(self) -> None:
        for name in ("num_before", "num_after"):
            object.__setattr__(self, name, as_count(name, getattr(self, name), 0))
        for name in ("of_queries", "of_keys", "per_head"):
            object.__setattr__(self, name, as_boolean(name, getattr(self, name)))
        if not (self.of_queries or self.of_keys):
            raise InputError("of_queries or of_keys", "be True", of_queries=False, of_keys=False)
        exact = self.num_exact
        most = self.max_distance
        if (exact is None) != (most is None):
            raise InputError(
                "max_distance", "come with num_exact", num_exact=exact, max_distance=most
            )
        if exact is None or most is None:
            return
        object.__setattr__(self, "num_exact", as_count("num_exact", exact, 2))
        object.__setattr__(self, "max_distance", as_count("max_distance", most))
        if most < exact + 2:
            raise InputError(
                "max_distance", "be at least num_exact + 2", max_distance=most, num_exact=exact
            )
        for name in ("num_before", "num_after"):
            if getattr(self, name) > 2 * exact:
                raise InputError(
                    name, "be at most 2 * num_exact", {name: getattr(self, name)}, num_exact=exact
                )

    @property
    def num_buckets(self) -> int:
        """Number of vectors in each table: for keys before the query, at its position, and after
        it.
        """
        return self.num_before + 1 + self.num_after

    @property
    def farthest(self) -> int:
        """Distance after which all keys share a bucket."""
        return (
            max(self.num_before, self.num_after) if self.max_distance is None else self.max_distance
        )

    def tables(self, num_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the learned tables by name: (num_buckets, H), or (num_buckets, N, H)
        if per_head.
        """
        shape = (self.num_buckets, *([num_heads] if self.per_head else []), head_dim)
        return {name: shape for name, side in SIDES.items() if getattr(self, side)}

    def buckets(self) -> np.ndarray:
        """Return the bucket of each distance, key - query, from -farthest to farthest.

        The result is int, (2 * farthest + 1,). Larger distances share the bucket of the nearer end.
        """
        distances = np.arange(-self.farthest, self.farthest + 1)
        return np.clip(self._steps(distances), -self.num_before, self.num_after) + self.num_before

    @property
    def first_distances(self) -> tuple[int, ...]:
        """The first distance of each step of the logarithm: those after `num_exact`, up to
        `max_distance`.
        """
        exact = self.num_exact
        most = self.max_distance
        if exact is None or most is None:
            return ()
        steps = self._steps(np.arange(most))
        return tuple(
            int(np.argmax(steps > last)) if (steps > last).any() else most
            for last in range(exact, 2 * exact)
        )

    def _steps(self, distances: np.ndarray) -> np.ndarray:
        """Return distances, in logarithmic steps beyond `num_exact`."""
        exact = self.num_exact
        most = self.max_distance
        if exact is None or most is None:
            return distances
        away = np.abs(distances)

        # Each step rounded to float32, as in DeBERTa's code.
        def logarithm(distance: np.ndarray) -> np.ndarray:
            return np.log((distance / exact).astype(np.float32), dtype=np.float64).astype(
                np.float32
            )

        shares = logarithm(np.maximum(away, exact)) / logarithm(np.array(most - 1))
        shared = exact + np.ceil(shares * np.float32(exact - 1)).astype(np.int64)
        return np.sign(distances) * np.where(away <= exact, away, shared)
