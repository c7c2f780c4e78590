"""Bugs in the contents and the slots of a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from parity.explain.diagnosis.bugs.families import CACHE_SLOTS
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.sites import before
from parity.measure.core.case import Case
from parity.measure.core.stages import Values

New = dict[str, np.ndarray]
"""Cached heads or latents, by `keys` and `values`, or by `latents`."""


def caches(case: Case) -> Iterator[Edit]:
    if not case.is_cached:
        return
    spec, capacity = case.spec, case.capacity
    cached = CACHE_SLOTS.seen_in("cache.latents", "cache.keys")
    if spec.value_head_dim == spec.head_dim and spec.latent is None:
        yield cached(
            "cache-keys-as-values",
            "the cache of values contains keys",
            _caching(lambda new: {**new, "values": new["keys"]}),
            fix="append new keys to the keys, and new values to the values",
            stages=("cache.values",),
        )
    if spec.latent is None:
        yield cached(
            "cache-values-missing",
            "new values are not cached",
            _caching(lambda new: {**new, "values": np.zeros_like(new["values"])}),
            fix="append keys and values, both",
            stages=("cache.values",),
        )
    first = "keys" if spec.latent is None else "latents"
    yield cached(
        "cache-keys-rolled",
        "the new keys are cached in the order last, first, second, …",
        _caching(lambda new: {**new, first: np.roll(new[first], 1, axis=2)}),
    )
    if case.batch > 1:
        yield cached(
            "cache-rows-rolled",
            "the new tokens of each sequence are cached in the row of the next one",
            _caching(lambda new: {name: np.roll(x, 1, axis=0) for name, x in new.items()}),
            fix="keep sequence b in row b of the cache, and reorder the rows with the sequences",
        )
    yield cached(
        "cache-slot-late",
        "after the first call, tokens are cached one slot too late",
        _into_slots(
            lambda _, before, added: (np.minimum(before + (before > 0), capacity - added), added)
        ),
    )
    yield cached(
        "cache-slot-early",
        "after the first call, tokens are cached one slot too early and overwrite the last one",
        _into_slots(lambda _, before, added: (np.maximum(before - 1, 0), added)),
    )
    yield cached(
        "cache-slot-first",
        "every call caches its tokens from slot 0 and overwrites the first ones",
        _into_slots(lambda _, before, added: (np.zeros_like(before), added)),
    )
    yield cached(
        "cache-slot-stale",
        "the last token of each call is not cached: its slot is stale",
        _into_slots(lambda _, before, added: (before, np.maximum(added - 1, 0))),
        fix="write all new tokens, then attend",
    )


def _caching(change: Callable[[New], New]) -> dict[str, Override]:
    """Append something other than the new tokens."""
    return {
        "appended": before(lambda cache, values, new, *slots: (cache, values, change(new), *slots))
    }


def _into_slots(slots: Callable[..., tuple[np.ndarray, np.ndarray]]) -> dict[str, Override]:
    """Write the number of tokens, from the slot, that `slots(seq_len, before, added)` returns;
    lengths stay right.
    """

    def appended(
        _: object,
        original: Override,
        cache: str,
        values: Values,
        new: New,
        before: np.ndarray,
        added: np.ndarray,
    ) -> New:
        seq_len = next(iter(new.values())).shape[2]
        grown = original(cache, values, new, *slots(seq_len, before, added))
        return {**grown, f"{cache}lengths": (before + added).astype(np.int32)}

    return {"appended": appended}
