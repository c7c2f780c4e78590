"""Mistakes in what is cached, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parity.core.cases import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.record import Mistake, Override, Plan, breaking

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


def _appending(append: Override) -> Callable[[Plan], None]:
    """Plants another way to append to a cache of either kind: `append(plan, original, cache, *new, **options)`."""
    return breaking(append_to_cache=append, append_to_latent_cache=append)


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
        breaking(append_to_cache=lambda _, append, cache, k, v, **options: append(cache, k, k, **options)),
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
        breaking(append_to_cache=lambda _, append, cache, k, v, **options: append(cache, k, v * 0.0, **options)),
    )


def _rows_rolled() -> Mistake:
    def appended(_: Layer, original: Any, cache: str, values: Values, new: dict[str, np.ndarray], *rest: Any) -> Any:
        return original(cache, values, {name: np.roll(x, 1, axis=0) for name, x in new.items()}, *rest)

    def append(_: Plan, original: Any, cache: Any, *new: Any, **options: Any) -> Any:
        last = new[0].shape[0] - 1
        return original(cache, *(x[np.array([last, *range(last)])] for x in new), **options)

    return Mistake(
        "cache-rows-rolled",
        "the new tokens of each sequence are cached in the row of the next one",
        "let row b of the cache be sequence b, and reorder it with the sequences",
        "cache-slots",
        STAGES,
        {"appended": appended},
        _appending(append),
    )


def _keys_rolled() -> Mistake:
    def appended(_: Layer, original: Any, cache: str, values: Values, new: dict[str, np.ndarray], *rest: Any) -> Any:
        (name, first), *others = new.items()
        return original(cache, values, {name: np.roll(first, 1, axis=2), **dict(others)}, *rest)

    def append(_: Plan, original: Any, cache: Any, first: Any, *others: Any, **options: Any) -> Any:
        return original(cache, first[:, :, np.roll(np.arange(first.shape[2]), 1)], *others, **options)

    return Mistake(
        "cache-keys-rolled",
        "the new keys are cached in the order last, first, second, …",
        "write new token i into slot length + i",
        "cache-slots",
        STAGES,
        {"appended": appended},
        _appending(append),
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
    def append(plan: Plan, original: Any, cache: Any, *new: Any, **options: Any) -> Any:
        lengths = plan.xp.where(cache.lengths > 0, cache.lengths + 1, cache.lengths)
        late = original(cache.with_slots(cache.slots.values(), lengths), *new, **options)
        return late.with_slots(late.slots.values(), original(cache, *new, **options).lengths)

    return Mistake(
        "cache-slot-late",
        "after the first call tokens are cached one slot too late",
        "write new token i into slot length + i",
        "cache-slots",
        STAGES,
        _into_slots(lambda _, before, added: (np.minimum(before + (before > 0), case.capacity - added), added)),
        _appending(append),
    )


def _slots_before() -> Iterator[Mistake]:
    """Too early, over tokens that were cached before."""

    def appending(begin: Any) -> Callable[[Plan], None]:
        def append(plan: Plan, original: Any, cache: Any, *new: Any, new_lengths: Any = None) -> Any:
            added = new[0].shape[2] if new_lengths is None else new_lengths
            earlier = cache.with_slots(cache.slots.values(), begin(plan, cache.lengths))
            early = original(earlier, *new, new_lengths=new_lengths)
            return early.with_slots(early.slots.values(), cache.lengths + added)

        return _appending(append)

    for name, about, begin, planted in (
        (
            "cache-slot-early",
            "after the first call tokens are cached one slot too early, over the last one",
            lambda before: np.maximum(before - 1, 0),
            lambda plan, lengths: plan.xp.where(lengths > 0, lengths - 1, lengths),
        ),
        (
            "cache-slot-first",
            "every call caches its tokens from slot 0 on, over the first ones",
            np.zeros_like,
            lambda _, lengths: lengths * 0,
        ),
    ):
        yield Mistake(
            name,
            about,
            "write new token i into slot length + i",
            "cache-slots",
            STAGES,
            _into_slots(lambda _, before, added, begin=begin: (begin(before), added)),
            appending(planted),
        )


def _slot_stale() -> Mistake:
    def append(plan: Plan, original: Any, cache: Any, *new: Any, new_lengths: Any = None) -> Any:
        added = cache.lengths * 0 + new[0].shape[2] if new_lengths is None else new_lengths
        right = original(cache, *new, new_lengths=new_lengths)
        short = original(cache, *new, new_lengths=plan.xp.where(added > 0, added - 1, added))
        return short.with_slots(short.slots.values(), right.lengths)

    return Mistake(
        "cache-slot-stale",
        "the last token of each call is not cached: its slot is stale",
        "write all new tokens, then attend",
        "cache-slots",
        STAGES,
        _into_slots(lambda _, before, added: (before, np.maximum(added - 1, 0))),
        _appending(append),
    )


def _holds_padding(case: Case) -> Mistake:
    def append(_: Plan, original: Any, cache: Any, *new: Any, new_lengths: Any = None) -> Any:
        whole, right = original(cache, *new), original(cache, *new, new_lengths=new_lengths)
        return whole.with_slots(whole.slots.values(), right.lengths)

    return Mistake(
        "cache-holds-padding",
        "padding is cached with the real tokens",
        "append only the first new_lengths tokens of each sequence",
        "cache-slots",
        STAGES,
        _into_slots(lambda seq_len, before, added: (before, np.minimum(seq_len, case.capacity - before))),
        _appending(append),
    )
