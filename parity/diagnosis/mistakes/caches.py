"""Mistakes in what is cached, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.record import Mistake, Override

STAGES = ("cache.latents", "cache.keys")


def caches(case: Case) -> Iterator[Mistake]:
    if case.is_cached:
        if case.spec.value_head_dim == case.spec.head_dim and case.spec.latent is None:
            yield _keys_as_values()
        if case.spec.latent is None:
            yield _values_missing()
        yield _keys_rolled()
        if case.batch > 1:
            yield _rows_rolled()
        yield _slot_late(case)
        yield from _slots_before()
        yield _slot_stale()
        if case.new_lengths:
            yield _holds_padding(case)


def _keys_as_values() -> Mistake:
    def appended(_: Layer, original: Any, cache: str, values: Values, new: dict[str, np.ndarray], *rest: Any) -> Any:
        return original(cache, values, {"keys": new["keys"], "values": new["keys"]}, *rest)

    return Mistake(
        "cache-keys-as-values",
        "the cache of values holds keys",
        "append keys to keys and values to values",
        "cache-slots",
        ("cache.values",),
        {"appended": appended},
    )


def _values_missing() -> Mistake:
    def appended(_: Layer, original: Any, cache: str, values: Values, new: dict[str, np.ndarray], *rest: Any) -> Any:
        return original(cache, values, {**new, "values": np.zeros_like(new["values"])}, *rest)

    return Mistake(
        "cache-values-missing",
        "new values are not cached",
        "append keys and values, both",
        "cache-slots",
        ("cache.values",),
        {"appended": appended},
    )


def _rows_rolled() -> Mistake:
    def appended(_: Layer, original: Any, cache: str, values: Values, new: dict[str, np.ndarray], *rest: Any) -> Any:
        return original(cache, values, {name: np.roll(x, 1, axis=0) for name, x in new.items()}, *rest)

    return Mistake(
        "cache-rows-rolled",
        "the new tokens of each sequence are cached in the row of the next one",
        "let row b of the cache be sequence b, and reorder it with the sequences",
        "cache-slots",
        STAGES,
        {"appended": appended},
    )


def _keys_rolled() -> Mistake:
    def appended(_: Layer, original: Any, cache: str, values: Values, new: dict[str, np.ndarray], *rest: Any) -> Any:
        (name, first), *others = new.items()
        return original(cache, values, {name: np.roll(first, 1, axis=2), **dict(others)}, *rest)

    return Mistake(
        "cache-keys-rolled",
        "the new keys are cached in the order last, first, second, …",
        "write new token i into slot length + i",
        "cache-slots",
        STAGES,
        {"appended": appended},
    )


# ---- Wrong slots, the lengths as they should be ----------------------------------------------------------------------


def _into_slots(slots: Any) -> dict[str, Override]:
    """The reference that writes `slots(seq_len, before, added)`: so many tokens from there on."""

    def appended(
        _: Layer,
        original: Any,
        cache: str,
        values: Values,
        new: dict[str, np.ndarray],
        before: np.ndarray,
        added: np.ndarray,
    ) -> dict[str, np.ndarray]:
        seq_len = next(iter(new.values())).shape[2]
        grown = original(cache, values, new, *slots(seq_len, before, added))
        return {**grown, f"{cache}lengths": (before + added).astype(np.int32)}

    return {"appended": appended}


def _slot_late(case: Case) -> Mistake:
    return Mistake(
        "cache-slot-late",
        "after the first call tokens are cached one slot too late",
        "write new token i into slot length + i",
        "cache-slots",
        STAGES,
        _into_slots(lambda _, before, added: (np.minimum(before + (before > 0), case.capacity - added), added)),
    )


def _slots_before() -> Iterator[Mistake]:
    """Too early, over tokens that were cached before."""
    for name, about, begin in (
        (
            "cache-slot-early",
            "after the first call tokens are cached one slot too early, over the last one",
            lambda before: np.maximum(before - 1, 0),
        ),
        (
            "cache-slot-first",
            "every call caches its tokens from slot 0 on, over the first ones",
            np.zeros_like,
        ),
    ):
        yield Mistake(
            name,
            about,
            "write new token i into slot length + i",
            "cache-slots",
            STAGES,
            _into_slots(lambda _, before, added, begin=begin: (begin(before), added)),
        )


def _slot_stale() -> Mistake:
    return Mistake(
        "cache-slot-stale",
        "the last token of each call is not cached: its slot is stale",
        "write all new tokens, then attend",
        "cache-slots",
        STAGES,
        _into_slots(lambda _, before, added: (before, np.maximum(added - 1, 0))),
    )


def _holds_padding(case: Case) -> Mistake:
    return Mistake(
        "cache-holds-padding",
        "padding is cached with the real tokens",
        "append only the first new_lengths tokens of each sequence",
        "cache-slots",
        STAGES,
        _into_slots(lambda seq_len, before, added: (before, np.minimum(seq_len, case.capacity - before))),
    )
