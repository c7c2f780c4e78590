"""Bugs in a ring cache: as many slots as the window has keys, and token s is in slot s modulo them.

The reference has a slot for each token, so these are bugs of masks, positions and weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.families import CACHE_POSITIONS, BugFamily
from parity.explain.diagnosis.bugs.record import Edit, Override, instead
from parity.explain.diagnosis.bugs.sites import before
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values

RING = BugFamily(
    "cache-slots",
    "read the ring in the order of its tokens, oldest first, with each of them once, and hide a "
    "key by its own position",
)

LARGEST = 32
"""The longest window of which every number of lost tokens is tried."""

Hides = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Returns whether the key in slot s is hidden from the query at position t, which are broadcast."""


def rings(case: Case) -> Iterator[Edit]:
    """Yield tokens of the window that a ring loses, doubles, or takes for others."""
    size = case.spec.window_size
    if not case.is_cached or size is None or case.spec.latent is not None:
        return
    if max(case.lengths_before(len(case.chunks) - 1)) < size:
        return  # no call reads a full ring
    twice = RING.shown_in("attn_weights")
    words = "are attended to twice: they are in the ring already, and are appended to it"
    yield twice(
        "cache-ring-doubled",
        f"the tokens of a call {words}",
        {"attn_weights": partial(_attending_twice, 0)},
    )
    yield twice(
        "cache-ring-doubled",
        f"once the ring is full, the tokens of a call {words}",
        {"attn_weights": partial(_attending_twice, size)},
    )
    if case.spec.rope is not None:
        yield from _positions(size)
    if max(case.chunks) > 1:
        yield RING.shown_in("mask")(
            "cache-ring-masked-by-slot",
            "the mask takes the slots of the ring for its tokens in order: it hides the wrong "
            "ones if the ring does not begin with the oldest",
            {"is_before_window": instead(_is_before_by_slot)},
        )
    yield from _lost(case)


# ---- Tokens that are lost or doubled -------------------------------------------------------------


def _lost(case: Case) -> Iterator[Edit]:
    """Yield calls of several tokens that find only some of a ring's, or none."""
    lost = RING.shown_in("mask")
    yield lost(
        "cache-ring-lost",
        "older tokens of the window are lost: calls of several tokens find only those in the "
        "first slots of the ring, which were written since its last round",
        {"is_before_window": _is_of_last_round},
    )
    if 1 not in case.chunks[1:]:
        return  # that is a cache that no call reads: `cache-not-read`
    yield lost(
        "cache-ring-lost",
        "all tokens of the ring are lost in calls of several tokens",
        {"is_before_window": partial(_is_lost_for_several, 0)},
    )


def lost_in_call(case: Case, call: int) -> Iterator[Edit]:
    """Yield the bugs that a single call finds only the newest tokens of a ring."""
    size = case.spec.window_size
    if size is None or size > LARGEST or case.spec.latent is not None:
        return
    if max(case.lengths_before(call)) < size:
        return
    for count in range(size - 1):
        bug = RING.shown_in("mask")(
            "cache-ring-lost",
            f"older tokens of the window are lost: the ring has only the newest {count} of "
            f"those before the call",
            {"is_before_window": partial(_is_lost, count)},
        )
        yield replace(bug, calls=frozenset([call]), when=f"in call {call} alone")


def _is_lost(
    count: int, _: Layer, original: Override, t: np.ndarray, s: np.ndarray, size: int
) -> np.ndarray:
    first = t[:, :, :1]
    return original(t, s, size) | (s < first - count)


def _is_lost_for_several(
    count: int, layer: Layer, original: Override, t: np.ndarray, s: np.ndarray, size: int
) -> np.ndarray:
    if t.shape[2] == 1:
        return original(t, s, size)
    return _is_lost(count, layer, original, t, s, size)


def _is_of_last_round(
    _: Layer, original: Override, t: np.ndarray, s: np.ndarray, size: int
) -> np.ndarray:
    """Keep the slots before the next one that is written."""
    first = t[:, :, :1]
    is_earlier_round = (s < first) & (s // size < first // size)
    is_several = t.shape[2] > 1
    return original(t, s, size) | (is_earlier_round & (first >= size) & is_several)


def _attending_twice(
    least: int, _: Layer, original: Override, values: Values
) -> dict[str, np.ndarray]:
    """Double the weight of the tokens of a call, before the sum of all is 1.

    Args:
        least: the number of cached tokens with which it does.

    Raises:
        ValueError: if another bug passes no lengths.
    """
    if "cache.lengths" not in values:
        raise ValueError("another bug in the softmax passes scores alone")
    scores = values["scores"]
    lengths = values["cache.lengths"][:, None, None, None]
    slots = np.arange(scores.shape[3])
    is_own = (slots < lengths) & (slots >= lengths - scores.shape[2]) & (lengths >= least)
    doubled = np.where(is_own, scores + scores.dtype.type(math.log(2.0)), scores)
    return original({**values, "scores": doubled})


# ---- Slots that are taken for positions ----------------------------------------------------------


def _is_before_by_slot(t: np.ndarray, s: np.ndarray, size: int) -> np.ndarray:
    """Take slot i of a full ring for the token i positions after the oldest."""
    first = t[:, :, :1]
    oldest = first - size
    is_in_ring = (s >= oldest) & (s < first) & (oldest >= 0)
    supposed = np.where(is_in_ring, oldest + s % size, s)
    return (s < oldest) | (supposed <= t - size)


def _positions(size: int) -> Iterator[Edit]:
    positions = CACHE_POSITIONS.shown_in("q", "k")
    for words, change in (
        ("start again at 0 after each round of the ring", partial(_in_ring, size)),
        ("stop at the last slot of the ring", partial(_clipped, size)),
    ):
        yield positions(
            "cache-ring-positions",
            f"the positions of queries and keys {words}",
            {"project": before(change)},
        )
    yield positions(
        "cache-ring-positions",
        "keys are rotated when they are read, by their slots in the ring instead of their "
        "positions",
        {"products": partial(_rotated_by_slot, size)},
    )


def _in_ring(size: int, inputs: Any, positions: np.ndarray) -> tuple[Any, np.ndarray]:
    return inputs, positions % size


def _clipped(size: int, inputs: Any, positions: np.ndarray) -> tuple[Any, np.ndarray]:
    return inputs, np.minimum(positions, size - 1)


def _rotated_by_slot(size: int, layer: Layer, original: Override, values: Values) -> np.ndarray:
    """Rotate cached keys from their positions to the positions of their slots, if the ring is
    full.
    """
    keys = values["k"]
    tokens = np.arange(keys.shape[2])[None]
    moved = tokens % size - tokens
    if keys.shape[2] <= size:
        return original(values)
    turned = layer.rotate(keys, moved) / keys.dtype.type(layer.attention_factor())
    return original({**values, "k": turned})
