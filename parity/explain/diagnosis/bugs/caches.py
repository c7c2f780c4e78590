"""Bugs in the contents and the slots of a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.families import CACHE_LENGTHS, CACHE_SLOTS
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.sites import NewTokens, before
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.reference.layer import CachedCall
from parity.measure.core.stages import Values

New = dict[str, np.ndarray]
"""Cached heads or latents, by `keys` and `values`, or by `latents`."""

Slots = tuple[np.ndarray, np.ndarray]
"""The first slot of new tokens, and their number, for each sequence."""


def lengths(case: Case) -> Iterator[Edit]:
    """Yield wrong numbers of cached tokens, from which masks, positions and slots follow."""
    if not case.is_cached or len(case.chunks) < 2:
        return
    for name, words, by in (("low", "few", -1), ("high", "many", 1)):
        yield CACHE_LENGTHS.shown_in("cache.lengths", "mask", "q", "k")(
            f"cache-length-{name}",
            f"the first call counts one token too {words}, and the mask, positions and slots of "
            f"later calls follow from that number",
            {
                "call": partial(_call_with_other_length, by),
                "project": before(partial(_with_later_positions, by)),
                "appended": partial(_with_first_length, by),
            },
        )


def _call_with_other_length(by: int, layer: Layer, original: Override, index: int) -> CachedCall:
    """Begin a later call at the wrong number of cached tokens."""
    call = original(index)
    if index == 0:
        return call
    last = layer.problem.case.capacity - call.added
    return replace(call, before=np.clip(call.before + by, 0, last))


def _with_later_positions(by: int, inputs: Any, positions: np.ndarray) -> tuple[Any, np.ndarray]:
    """Move the positions of later calls."""
    is_later = positions[..., :1] > 0
    return inputs, positions + by * is_later


def _with_first_length(by: int, _: Layer, original: Override, *inputs: Any) -> New:
    """Count the wrong number of tokens in the first call. Later ones add theirs to that number."""
    tokens, grown = NewTokens(*inputs), original(*inputs)
    if tokens.before.any():
        return grown
    return tokens.with_lengths(grown, tokens.added + by)


def caches(case: Case) -> Iterator[Edit]:
    if not case.is_cached:
        return
    spec = case.spec
    cached = CACHE_SLOTS.shown_in("cache.latents", "cache.keys")
    first = "keys"
    if spec.latent is not None:
        first = "latents"
    if spec.value_head_dim == spec.head_dim and spec.latent is None:
        yield cached(
            "cache-keys-as-values",
            "the cache of values contains keys",
            _caching(_keys_as_values),
            fix="append new keys to the keys, and new values to the values",
            stages=("cache.values",),
        )
    if spec.latent is None:
        yield cached(
            "cache-values-missing",
            "new values are not cached",
            _caching(_without_values),
            fix="append keys and values, both",
            stages=("cache.values",),
        )
    yield cached(
        "cache-keys-rolled",
        "the new keys are cached in the order last, first, second, …",
        _caching(partial(_with_rolled_tokens, first)),
    )
    if case.batch > 1:
        yield cached(
            "cache-rows-rolled",
            "the new tokens of each sequence are cached in the row of the next one",
            _caching(_with_rolled_rows),
            fix="keep sequence b in row b of the cache, and reorder the rows with the sequences",
        )
    yield cached(
        "cache-slot-stale",
        "the last token of each call is not cached: its slot is stale",
        _into_slots(_without_last_token, case),
        fix="write all new tokens, then attend",
    )
    yield cached(
        "cache-slot-late",
        "after the first call, tokens are cached one slot too late",
        _into_slots(_late, case),
    )
    if _is_full_when_late(case):
        yield cached(
            "cache-slot-late",
            "after the first call, tokens are cached one slot too late, and writes beyond the last "
            "slot are moved back into the cache",
            _into_slots(partial(_late_and_clamped, case.capacity), case),
        )
    yield cached(
        "cache-slot-early",
        "after the first call, tokens are cached one slot too early and overwrite the last one",
        _into_slots(_early, case),
    )
    yield cached(
        "cache-slot-first",
        "every call caches its tokens from slot 0 and overwrites the first ones",
        _into_slots(_from_slot_0, case),
    )
    if case.cache_quantization is None:  # whose scales may be 0
        yield cached(
            "cache-empty",
            "cached keys and values are 0 when they are read",
            {"appended": _emptied},
            fix="read the memory that was written, and clear it only for a new sequence",
        )


# ---- Contents ------------------------------------------------------------------------------------


def _caching(change: Callable[[New], New]) -> dict[str, Override]:
    """Append something other than the new tokens."""

    def appended(cache: str, values: Values, new: New, *slots: Any) -> tuple[Any, ...]:
        return cache, values, change(new), *slots

    return {"appended": before(appended)}


def _keys_as_values(new: New) -> New:
    return {**new, "values": new["keys"]}


def _without_values(new: New) -> New:
    return {**new, "values": np.zeros_like(new["values"])}


def _with_rolled_tokens(name: str, new: New) -> New:
    return {**new, name: np.roll(new[name], 1, axis=2)}


def _with_rolled_rows(new: New) -> New:
    return {name: np.roll(x, 1, axis=0) for name, x in new.items()}


def _emptied(_: Layer, original: Override, *inputs: Any) -> New:
    """Write into the right cache, and read zeros."""
    return NewTokens(*inputs).with_cached(original(*inputs), np.zeros_like)


# ---- Slots ---------------------------------------------------------------------------------------


def _into_slots(
    slots: Callable[[np.ndarray, np.ndarray], Slots], case: Case
) -> dict[str, Override]:
    """Write new tokens into the slots that `slots(before, added)` returns; lengths stay right.

    Tokens beyond the last slot are lost.
    """

    def appended(_: Layer, original: Override, *inputs: Any) -> New:
        tokens = NewTokens(*inputs)
        first, count = slots(tokens.before, tokens.added)
        if case.cache_slots is None:
            first = np.minimum(first, case.capacity)
            count = np.minimum(count, case.capacity - first)
        grown = original(*tokens._replace(before=first, added=count))
        return tokens.with_lengths(grown)

    return {"appended": appended}


def _late(before: np.ndarray, added: np.ndarray) -> Slots:
    is_later_call = before > 0
    return before + is_later_call, added


def _late_and_clamped(capacity: int, before: np.ndarray, added: np.ndarray) -> Slots:
    """Clamp the first slot like JAX's `dynamic_update_slice`."""
    first, _ = _late(before, added)
    return np.minimum(first, capacity - added), added


def _is_full_when_late(case: Case) -> bool:
    """Return True if a token that is cached one slot too late is beyond the last slot."""
    if case.cache_slots is not None or len(case.chunks) < 2:
        return False
    last = len(case.chunks) - 1
    return max(np.add(case.lengths_before(last), case.added(last))) == case.capacity


def _early(before: np.ndarray, added: np.ndarray) -> Slots:
    return np.maximum(before - 1, 0), added


def _from_slot_0(before: np.ndarray, added: np.ndarray) -> Slots:
    return np.zeros_like(before), added


def _without_last_token(before: np.ndarray, added: np.ndarray) -> Slots:
    return before, np.maximum(added - 1, 0)
