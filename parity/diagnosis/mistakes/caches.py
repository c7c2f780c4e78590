"""Mistakes in what is cached, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from parity.core.cases import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.record import Mistake, Override, Plan, breaking


def caches(case: Case) -> Iterator[Mistake]:
    if case.is_cached:
        if case.spec.value_head_dim == case.spec.head_dim:
            yield _keys_as_values()
        yield _keys_rolled()
        yield _slot_late(case)
        yield _slot_stale()
        if case.new_lengths:
            yield _holds_padding(case)


def _keys_as_values() -> Mistake:
    def appended(_: Layer, original: Any, cache: str, values: Values, k: Any, v: Any, *rest: Any) -> Any:
        return original(cache, values, k, k, *rest)

    return Mistake(
        "cache-keys-as-values",
        "the cache of values holds keys",
        "append keys to keys and values to values",
        "cache-slots",
        ("cache.values",),
        {"appended": appended},
        breaking(append_to_cache=lambda _, append, cache, k, v, **options: append(cache, k, k, **options)),
    )


def _keys_rolled() -> Mistake:
    def appended(_: Layer, original: Any, cache: str, values: Values, k: np.ndarray, *rest: Any) -> Any:
        return original(cache, values, np.roll(k, 1, axis=2), *rest)

    def append_to_cache(_: Plan, append: Any, cache: Any, k: Any, v: Any, **options: Any) -> Any:
        return append(cache, k[:, :, np.roll(np.arange(k.shape[2]), 1)], v, **options)

    return Mistake(
        "cache-keys-rolled",
        "the new keys are cached in the order last, first, second, …",
        "write new token i into slot length + i",
        "cache-slots",
        ("cache.keys",),
        {"appended": appended},
        breaking(append_to_cache=append_to_cache),
    )


# ---- Wrong slots, the lengths as they should be ----------------------------------------------------------------------


def _into_slots(slots: Any) -> dict[str, Override]:
    """The reference that writes `slots(k, before, added)`: so many tokens from there on."""

    def appended(
        _: Layer, original: Any, cache: str, values: Values, k: Any, v: Any, before: np.ndarray, added: np.ndarray
    ) -> dict[str, np.ndarray]:
        grown = original(cache, values, k, v, *slots(k, before, added))
        return {**grown, f"{cache}lengths": (before + added).astype(np.int32)}

    return {"appended": appended}


def _slot_late(case: Case) -> Mistake:
    def append_to_cache(plan: Plan, append: Any, cache: Any, k: Any, v: Any, **options: Any) -> Any:
        lengths = plan.xp.where(cache.lengths > 0, cache.lengths + 1, cache.lengths)
        late = append(type(cache)(cache.keys, cache.values, lengths), k, v, **options)
        return type(cache)(late.keys, late.values, append(cache, k, v, **options).lengths)

    return Mistake(
        "cache-slot-late",
        "after the first call tokens are cached one slot too late",
        "write new token i into slot length + i",
        "cache-slots",
        ("cache.keys",),
        _into_slots(lambda k, before, added: (np.minimum(before + (before > 0), case.capacity - added), added)),
        breaking(append_to_cache=append_to_cache),
    )


def _slot_stale() -> Mistake:
    def append_to_cache(plan: Plan, append: Any, cache: Any, k: Any, v: Any, *, new_lengths: Any = None) -> Any:
        added = cache.lengths * 0 + k.shape[2] if new_lengths is None else new_lengths
        right = append(cache, k, v, new_lengths=new_lengths)
        short = append(cache, k, v, new_lengths=plan.xp.where(added > 0, added - 1, added))
        return type(cache)(short.keys, short.values, right.lengths)

    return Mistake(
        "cache-slot-stale",
        "the last token of each call is not cached: its slot is stale",
        "write all new tokens, then attend",
        "cache-slots",
        ("cache.keys",),
        _into_slots(lambda k, before, added: (before, np.maximum(added - 1, 0))),
        breaking(append_to_cache=append_to_cache),
    )


def _holds_padding(case: Case) -> Mistake:
    def append_to_cache(_: Plan, append: Any, cache: Any, k: Any, v: Any, *, new_lengths: Any = None) -> Any:
        whole, right = append(cache, k, v), append(cache, k, v, new_lengths=new_lengths)
        return type(cache)(whole.keys, whole.values, right.lengths)

    return Mistake(
        "cache-holds-padding",
        "padding is cached with the real tokens",
        "append only the first new_lengths tokens of each sequence",
        "cache-slots",
        ("cache.keys",),
        _into_slots(lambda k, before, added: (before, np.minimum(k.shape[2], case.capacity - before))),
        breaking(append_to_cache=append_to_cache),
    )
