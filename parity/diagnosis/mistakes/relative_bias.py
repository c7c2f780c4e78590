"""Mistakes in T5's relative bias: what scores gain for the distance of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np

from mha_spec import RelativeBias
from parity.core.case import Case
from parity.core.reference import Layer
from parity.diagnosis.mistakes.record import Mistake, Override
from parity.diagnosis.mistakes.sites import RESTARTED, Overrides, after, before


def relative_bias(case: Case) -> Iterator[Mistake]:
    spec = case.spec
    right, num_heads = spec.relative_bias, spec.num_heads
    if right is None:
        return

    def mistake(name: str, about: str, in_reference: Overrides) -> Mistake:
        return Mistake(
            f"relative-bias-{name}",
            about,
            in_reference,
            fix="add to the scaled scores what the table has for the bucket of key - query, counted from the first of "
            "all keys",
            page="relative-bias",
            stages=("scores",),
        )

    yield mistake("ignored", "scores gain nothing for the distance of their keys", _times(0.0))
    if right.bidirectional and right.max_distance > right.num_buckets // 2:
        about = "keys after the query share its own bucket, as in a decoder"
        yield mistake("one-directional", about, _with(bidirectional=False))
    if not right.bidirectional and right.num_buckets >= 4 and right.num_buckets % 2 == 0:
        about = "half of the buckets are for keys after the query, as in an encoder"
        yield mistake("bidirectional", about, _with(bidirectional=True))
    yield mistake("flipped", "distances are query - key", {"bucket": before(lambda distance: (-distance,))})
    about = "queries are counted from 1, keys from 0"
    yield mistake("off-by-one", about, {"bucket": before(lambda distance: (distance - 1,))})
    if not np.array_equal(_Linear(**asdict(right)).buckets(), right.buckets()):
        about = "all buckets of more than one distance are of equal width"
        yield mistake("linear", about, {"share_of_logarithm": _share_of_distance})
    if spec.score_scale != 1.0:
        yield mistake("scaled", "the bias is added before the scores are scaled", _times(spec.score_scale))
    transposed = after(lambda table: table.reshape(num_heads, -1).T)
    yield mistake("transposed", "the table is read as (N, num_buckets)", {"relative_table": transposed})
    if case.is_cached:
        yield mistake("restarted", "the distance is counted from the first key in each call with a cache", RESTARTED)


def _times(factor: float) -> Overrides:
    return {"gained_by_distance": after(lambda gained: gained.dtype.type(factor) * gained)}


def _with(*, bidirectional: bool) -> Overrides:
    return {"relative_bias": after(lambda right: replace(right, bidirectional=bidirectional))}


class _Linear(RelativeBias):
    """Buckets of equal width where they have more than one distance."""

    def buckets(self) -> np.ndarray:
        distances = np.arange(-self.max_distance, self.max_distance + 1)
        count = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        away = np.abs(distances) if self.bidirectional else np.maximum(-distances, 0)
        first, width = count // 2, (self.max_distance - count // 2) / (count - count // 2)
        shared = np.minimum(first + np.floor((away - first) / width).astype(np.int64), count - 1)
        return np.where(away < first, away, shared) + (count * (distances > 0) if self.bidirectional else 0)


def _share_of_distance(layer: Layer, _: Override, away: np.ndarray, exact: int) -> np.ndarray:
    return (away - exact) / (layer.relative_bias().max_distance - exact)
