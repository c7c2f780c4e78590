"""Mistakes in T5's relative bias: what scores gain for the distance of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from mha_spec import RelativeBias
from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.record import Mistake, Override

FIX = "add to the scaled scores what the table has for the bucket of key - query, counted from the first of all keys"


def relative_bias(case: Case) -> Iterator[Mistake]:
    spec = case.spec
    if spec.relative_bias is None:
        return
    right, num_heads = spec.relative_bias, spec.num_heads
    yield _times("ignored", "scores gain nothing for the distance of their keys", 0.0)
    if right.bidirectional and right.max_distance > right.num_buckets // 2:
        yield _other_record("one-directional", "keys after the query share its own bucket, as in a decoder", False)
    if not right.bidirectional and right.num_buckets >= 4 and right.num_buckets % 2 == 0:
        yield _other_record("bidirectional", "half of the buckets are for keys after the query, as in an encoder", True)
    yield _mistake(
        "flipped",
        "distances are query - key",
        {"bucket": lambda _, original, distance: original(-distance)},
    )
    yield _mistake(
        "off-by-one",
        "queries are counted from 1, keys from 0",
        {"bucket": lambda _, original, distance: original(distance - 1)},
    )
    if not np.array_equal(_Linear(**asdict(right)).buckets(), right.buckets()):
        yield _mistake(
            "linear",
            "all buckets of more than one distance are of equal width",
            {"share_of_logarithm": _share_of_distance},
        )
    if spec.score_scale != 1.0:
        yield _times("scaled", "the bias is added before the scores are scaled", spec.score_scale)
    yield _mistake(
        "transposed",
        "the table is read as (N, num_buckets)",
        {"relative_table": lambda _, original: original().reshape(num_heads, -1).T},
    )
    if case.is_cached:
        yield _mistake(
            "restarted",
            "the distance is counted from the first key in each call with a cache",
            {"scores": _without_places},
        )


def _mistake(name: str, about: str, in_reference: dict[str, Override]) -> Mistake:
    return Mistake(f"relative-bias-{name}", about, FIX, "relative-bias", ("scores",), in_reference)


def _times(name: str, about: str, factor: float) -> Mistake:
    return _mistake(
        name,
        about,
        {"gained_by_distance": lambda layer, original, buckets: layer.arithmetic.wide.type(factor) * original(buckets)},
    )


def _other_record(name: str, about: str, bidirectional: bool) -> Mistake:
    return _mistake(
        name,
        about,
        {"relative_bias": lambda _, original: replace(original(), bidirectional=bidirectional)},
    )


class _Linear(RelativeBias):
    """Buckets of equal width where they have more than one distance."""

    def buckets(self) -> np.ndarray:
        distances = np.arange(-self.max_distance, self.max_distance + 1)
        count = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        away = np.abs(distances) if self.bidirectional else np.maximum(-distances, 0)
        first, width = count // 2, (self.max_distance - count // 2) / (count - count // 2)
        shared = np.minimum(first + np.floor((away - first) / width).astype(np.int64), count - 1)
        return np.where(away < first, away, shared) + (count * (distances > 0) if self.bidirectional else 0)


def _share_of_distance(layer: Layer, _: Any, away: np.ndarray, exact: int) -> np.ndarray:
    return (away - exact) / (layer.relative_bias().max_distance - exact)


def _without_places(layer: Layer, original: Any, values: Values, *places: Any) -> dict[str, np.ndarray]:
    return original(values)
