"""Slots of a cache that hold no token of the problem: of another layer or request, or stale."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mha_spec import AttentionSpec
from parity.explain.diagnosis.fits.record import Difference
from parity.explain.diagnosis.fits.words import indices

FAR = 0.1
"""The distance of a slot from each token of the problem, relative to its own size, from which on it
holds none of them. Rounding in 16 or 8 bits is far below.
"""

MOST_SLOTS = 512
"""The most slots of all sequences that are compared with each other."""


def cache_signs(difference: Difference) -> Iterator[str]:
    """Yield the slots of a cache that hold no token of the problem, whatever its position.

    No pattern can show whose they are: that needs the other layer, or the other request.
    """
    stage, problem = difference.stage, difference.problem
    if problem is None or stage.step is None or stage.path or difference.actual.ndim != 4:
        return
    if stage.kind not in ("cache.keys", "cache.values"):
        return
    name = stage.kind.removeprefix("cache.")
    batch, _, num_slots, _ = difference.actual.shape
    if batch * num_slots > MOST_SLOTS:
        return
    actual = _without_positions(problem.spec, name, difference.actual)
    expected = _without_positions(problem.spec, name, difference.expected)
    is_token = np.any(expected, axis=2)
    is_wrong = difference.bad.any(axis=(1, 3)) & np.any(actual, axis=2)
    if not is_wrong.any() or not np.isfinite(actual[is_wrong]).all():
        return
    slots = actual[is_wrong]
    tokens = expected[is_token]
    distances = np.linalg.norm(slots[:, None] - tokens, axis=-1).min(axis=1, initial=np.inf)
    if (distances < FAR * np.linalg.norm(slots, axis=-1)).any():
        return
    which = np.flatnonzero(is_wrong.any(axis=0))
    words = indices(which, num_slots, ("slot", "slots"), in_time=False) or "all slots"
    yield (
        f"{words} have {name} of no token of this layer and batch, at any position: they may be of "
        f"another layer or request, or were written by something else"
    )
    before = np.array(problem.case.lengths_before(stage.step))[:, None]
    is_of_this_call = np.arange(num_slots) >= before
    is_added = is_token & is_of_this_call
    if stage.step > 0 and is_added.any() and not is_wrong[is_of_this_call].any():
        yield f"the {name} that this call appended are right"


def _without_positions(spec: AttentionSpec, name: str, cached: np.ndarray) -> np.ndarray:
    """Return what no rotation changes of the keys or values in each slot, (B, S, K * features)."""
    batch, _, num_slots, head_dim = cached.shape
    if name == "keys" and spec.rope is not None:
        first, second = spec.rope.pair_features(head_dim)
        others = np.setdiff1d(np.arange(head_dim), np.concatenate([first, second]))
        sizes = np.hypot(cached[..., first], cached[..., second])
        cached = np.concatenate([sizes, cached[..., others]], axis=-1)
    return np.moveaxis(cached, 1, 2).reshape(batch, num_slots, -1)
