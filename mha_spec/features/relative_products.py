"""Relative products: products of queries and keys with learned vectors of the distance between
them, or with projected sinusoids of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mha_spec.errors import InputError
from mha_spec.record import Record
from mha_spec.rules import as_boolean, as_count, as_factor

SIDES = {"relative_keys": "of_queries", "relative_queries": "of_keys"}
"""Tables of learned vectors, and the field that enables each."""

SINUSOID_WEIGHTS = {"relative_sinusoids": "ENH", "content_bias": "NH", "position_bias": "NH"}

RELATIVE_TABLES: dict[str, str] = dict.fromkeys(SIDES, "CNH") | SINUSOID_WEIGHTS
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

    def weight_shapes(
        self, num_heads: int, head_dim: int, width: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the learned tables by name: (num_buckets, H), or (num_buckets, N, H)
        if per_head. They do not depend on the width of the input.
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

        # DeBERTa's formula, each step rounded to float32 as in its code: up to `num_exact` each
        # distance has a bucket, and `num_exact - 1` more are spread logarithmically up to
        # `max_distance - 1`.
        def logarithm(distance: np.ndarray) -> np.ndarray:
            return np.log((distance / exact).astype(np.float32), dtype=np.float64).astype(
                np.float32
            )

        shares = logarithm(np.maximum(away, exact)) / logarithm(np.array(most - 1))
        shared = exact + np.ceil(shares * np.float32(exact - 1)).astype(np.int64)
        return np.sign(distances) * np.where(away <= exact, away, shared)


@dataclass(frozen=True, repr=False)
class SinusoidProducts(Record):
    """Scaled products of queries with projected sinusoids of their distance to keys, and of learned
    biases with both, added to the scores.

    A score is scale * ((q + content_bias) · k + (q + position_bias) · r). The vector r is the
    projection of d_in sinusoids of the distance query - key by `relative_sinusoids`: sine and
    cosine of the distance times theta ** (-2 i / d_in), for i = 0, 1, … in turn.

    Attributes:
        theta: base of the frequencies.

    Raises:
        TypeError: if theta is not a number.
        ValueError: if theta is not positive and finite.

    Source: Transformer-XL, arXiv:1901.02860, section 3.3; its form in Conformer, arXiv:2005.08100.
    """

    theta: float = 10000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", as_factor("theta", self.theta))

    def weight_shapes(
        self, num_heads: int, head_dim: int, width: int
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the learned weights by name, for inputs of this width:
        (width, N, H), (N, H) and (N, H).

        Raises:
            ValueError: if the width is odd.
        """
        if width % 2:
            raise InputError("d_in", "be even with SinusoidProducts", d_in=width)
        biases = dict.fromkeys(("content_bias", "position_bias"), (num_heads, head_dim))
        return {"relative_sinusoids": (width, num_heads, head_dim), **biases}

    def sinusoids(self, farthest: int, width: int) -> np.ndarray:
        """Return the sinusoids of each distance, key - query, from -farthest to farthest.

        The result is float64, (2 * farthest + 1, width).
        """
        distances = np.arange(farthest, -farthest - 1, -1)  # query - key
        angles = distances[:, None] * self.theta ** (-np.arange(0, width, 2) / width)
        return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(-1, width)
