"""Parts of a cache: slots and rows of keys alone or values alone, what is read, and its lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.laws.changes import Part
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values

Slots = Callable[[np.ndarray], np.ndarray]
"""Maps the first slots of new tokens, (B,), to others."""

Write = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Maps a cache before a call (B, K, S, H), new tokens (B, K, T, H), the first slots and the numbers
of real tokens, (B,) each, to the cache after it.
"""

WHOSE = {("keys", "values"): "keys and values", ("keys",): "keys", ("values",): "values"}

READ = {"keys": ("products", "k"), "values": ("weighed", "v")}
"""The method that reads cached keys or values, and their name there."""


def cache_parts(problem: Problem, quantity: str) -> Iterator[Part]:
    """Yield other contents of a cache, other reads of it, and other lengths.

    Args:
        problem: with the case.
        quantity: of the stage. A wrong length shows in positions, masks and slots alike, so a
            single one of them does not tell it.
    """
    if not problem.case.is_cached or problem.spec.latent is not None:
        return
    for names, whose in WHOSE.items():
        yield from _of_writes(problem, names, whose)
    for name in READ:
        yield from _of_reads(problem, name)
    if quantity == "output":
        yield from _of_lengths(problem)


# ---- Writes --------------------------------------------------------------------------------------


def one_late(before: np.ndarray) -> np.ndarray:
    return before + 1


def one_late_in_steps(before: np.ndarray) -> np.ndarray:
    return before + (before > 0)


def one_early_in_steps(before: np.ndarray) -> np.ndarray:
    return np.maximum(before - 1, 0)


def of_first_sequence(before: np.ndarray) -> np.ndarray:
    return np.full_like(before, before[0])


def of_longest_sequence(before: np.ndarray) -> np.ndarray:
    return np.full_like(before, before.max())


SLOTS: dict[str, Slots] = {
    "one slot late": one_late,
    "one slot late after the first call": one_late_in_steps,
    "one slot early after the first call": one_early_in_steps,
    "from slot 0 on in every call": np.zeros_like,
    "into the slots of the first sequence": of_first_sequence,
    "into the slots of the longest sequence": of_longest_sequence,
}


def _of_writes(problem: Problem, names: tuple[str, ...], whose: str) -> Iterator[Part]:
    capacity = problem.case.capacity
    for words, change in SLOTS.items():
        yield (
            f"{whose} are cached {words}",
            _writing(names, _into_slots(change, capacity)),
            of.CACHE_SLOTS,
        )
        if problem.case.new_lengths:
            yield (
                f"{whose}, also those of padding, are cached {words}",
                _writing(names, _into_slots(change, capacity, with_padding=True)),
                of.CACHE_SLOTS,
            )
    writes: dict[str, Write] = {
        "put before the cached ones": _prepended,
        "those of the first sequence": _of_first_sequence,
        "not cached in sequences after the first": _of_first_row_alone,
        "those of the slot before, repeated": _repeated,
        "not cached after the first call": _of_first_call_alone,
    }
    for words, write in writes.items():
        verb = "are" if words.startswith("not") else "in the cache are"
        yield f"{whose} {verb} {words}", _writing(names, write), of.CACHE_SLOTS
    if problem.spec.rope is not None and "keys" in names and len(names) == 1:
        yield from _of_unrotated(problem)


def _writing(names: tuple[str, ...], write: Write) -> Edit:
    """Return the layer that writes keys or values in another way; lengths stay right."""

    def appended(
        layer: Layer,
        original: Override,
        cache: str,
        values: Values,
        new: dict[str, np.ndarray],
        before: np.ndarray,
        added: np.ndarray,
    ) -> dict[str, np.ndarray]:
        grown = dict(original(cache, values, new, before, added))
        for name in names:
            if name not in new:
                continue
            right = grown[f"{cache}{name}"]
            empty = np.zeros_like(right)
            earlier = values.get(f"previous.{cache}{name}", empty)
            grown[f"{cache}{name}"] = layer.arithmetic.keep(
                write(earlier.astype(right.dtype), new[name].astype(right.dtype), before, added)
            )
        return grown

    return Edit(overrides={"appended": appended})


def _into_slots(change: Slots, capacity: int, *, with_padding: bool = False) -> Write:
    def write(
        earlier: np.ndarray, new: np.ndarray, before: np.ndarray, added: np.ndarray
    ) -> np.ndarray:
        grown = earlier.copy()
        for b, begin in enumerate(change(before)):
            written = new.shape[2] if with_padding else int(added[b])
            count = min(written, capacity - int(begin))
            grown[b, :, begin : begin + count] = new[b, :, :count]
        return grown

    return write


def _prepended(
    earlier: np.ndarray, new: np.ndarray, before: np.ndarray, added: np.ndarray
) -> np.ndarray:
    grown = earlier.copy()
    for b, count in enumerate(added):
        grown[b, :, count : count + before[b]] = earlier[b, :, : before[b]]
        grown[b, :, :count] = new[b, :, :count]
    return grown


def _written(
    earlier: np.ndarray, new: np.ndarray, before: np.ndarray, added: np.ndarray
) -> np.ndarray:
    """Return the right cache."""
    grown = earlier.copy()
    for b, count in enumerate(added):
        grown[b, :, before[b] : before[b] + count] = new[b, :, :count]
    return grown


def _of_first_sequence(
    earlier: np.ndarray, new: np.ndarray, before: np.ndarray, added: np.ndarray
) -> np.ndarray:
    grown = _written(earlier, new, before, added)
    return np.broadcast_to(grown[:1], grown.shape).copy()


def _of_first_row_alone(
    earlier: np.ndarray, new: np.ndarray, before: np.ndarray, added: np.ndarray
) -> np.ndarray:
    grown = earlier.copy()
    grown[:1] = _written(earlier, new, before, added)[:1]
    return grown


def _of_first_call_alone(
    earlier: np.ndarray, new: np.ndarray, before: np.ndarray, added: np.ndarray
) -> np.ndarray:
    return earlier.copy() if before.any() else _written(earlier, new, before, added)


def _repeated(
    earlier: np.ndarray, new: np.ndarray, before: np.ndarray, added: np.ndarray
) -> np.ndarray:
    """Write the last cached token again instead of each new one; the first call is right."""
    if not before.all():
        return _written(earlier, new, before, added)
    grown = earlier.copy()
    for b, count in enumerate(added):
        last = earlier[b, :, before[b] - 1 : before[b]]
        grown[b, :, before[b] : before[b] + count] = last
    return grown


def _of_unrotated(problem: Problem) -> Iterator[Part]:
    """Yield caches of keys before their rotation, in every call or after the first."""
    for is_later, words in ((False, ""), (True, " after the first call")):

        def appended(
            layer: Layer,
            original: Override,
            cache: str,
            values: Values,
            new: dict[str, np.ndarray],
            before: np.ndarray,
            added: np.ndarray,
            is_later: bool = is_later,
        ) -> dict[str, np.ndarray]:
            keys = new["keys"]
            if before.any() or not is_later:
                tokens = before[:, None] + np.arange(keys.shape[2])
                places = problem.case.first_position + tokens
                shrunk = layer.attention_factor() ** -2
                keys = layer.rotate(keys, places, -1) * keys.dtype.type(shrunk)
            return original(cache, values, {**new, "keys": keys}, before, added)

        words_of_keys = f"keys are cached before their rotation{words}"
        yield words_of_keys, Edit(overrides={"appended": appended}), of.MISSING_ROPE


# ---- Reads ---------------------------------------------------------------------------------------


def _of_reads(problem: Problem, name: str) -> Iterator[Part]:
    method, of_method = READ[name]

    def before_write(_: Layer, cached: np.ndarray, values: Values) -> np.ndarray:
        return values.get(f"previous.cache.{name}", np.zeros_like(cached))

    def without_last(layer: Layer, cached: np.ndarray, values: Values) -> np.ndarray:
        """Lack the last real token of each call."""
        read = cached.copy()
        for b, length in enumerate(values["cache.lengths"]):
            read[b, :, max(int(length) - 1, 0)] = 0.0
        return read

    def of_first(_: Layer, cached: np.ndarray, __: Values) -> np.ndarray:
        return np.broadcast_to(cached[:1], cached.shape)

    reads = {
        "those before the call": before_write,
        "those without the last token": without_last,
        "those of the first sequence": of_first,
    }
    for words, read in reads.items():
        yield (
            f"the cached {name} used are {words}",
            _reading(method, of_method, read),
            (of.CACHE_SLOTS),
        )
    if name == "keys" and problem.spec.rope is not None:

        def rotated(layer: Layer, cached: np.ndarray, _: Values) -> np.ndarray:
            slots = np.arange(cached.shape[2])[None]
            return layer.rotate(cached, problem.case.first_position + slots)

        yield (
            "cached keys, already rotated, are rotated again when they are used",
            _reading(method, of_method, rotated),
            of.POSITIONS,
        )


def _reading(
    method: str, name: str, read: Callable[[Layer, np.ndarray, Values], np.ndarray]
) -> Edit:
    def override(layer: Layer, original: Override, values: Values) -> Any:
        return original({**values, name: read(layer, values[name], values)})

    return Edit(overrides={method: override})


# ---- Lengths -------------------------------------------------------------------------------------


def _of_lengths(problem: Problem) -> Iterator[Part]:
    """Yield lengths of a cache that count other tokens; positions and masks follow them."""
    case = problem.case

    def with_padding(call: int) -> np.ndarray:
        return np.full(case.batch, case.chunks[call])

    def one_less(call: int) -> np.ndarray:
        return np.maximum(np.array(case.added(call)) - 1, 1)

    def one(_: int) -> np.ndarray:
        return np.ones(case.batch, int)

    def one_more(call: int) -> np.ndarray:
        return np.array(case.added(call)) + 1

    counts: dict[str, Callable[[int], np.ndarray]] = {
        "padding counts as cached": with_padding,
        "each call counts one token less than it has": one_less,
        "each call counts one token": one,
        "each call counts one token more than it has": one_more,
    }
    for words, count in counts.items():
        changed = _counting(count, caches_all=count is with_padding)
        yield f"the length of the cache is wrong: {words}", changed, of.CACHE_LENGTHS


def _counting(count: Callable[[int], np.ndarray], *, caches_all: bool) -> Edit:
    def call(layer: Layer, original: Override, index: int) -> Any:
        before = np.sum([count(earlier) for earlier in range(index)], axis=0, dtype=int)
        right = original(index)
        before = np.broadcast_to(before, right.before.shape)
        return _OtherLengths(right, before, count(index), caches_all=caches_all)

    return Edit(overrides={"call": call})


class _OtherLengths:
    """A call that begins after another number of cached tokens."""

    def __init__(
        self, right: Any, before: np.ndarray, counted: np.ndarray, *, caches_all: bool
    ) -> None:
        added = counted if caches_all else right.added
        self._right, self._counted = replace(right, before=before, added=added), counted

    def __getattr__(self, name: str) -> Any:
        """Return a step that does not depend on the positions of queries."""
        return getattr(self._right, name)

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        right, problem = self._right, self._right.layer.problem
        inputs = {
            name: problem.step_input(right.index, side) for name, side in problem.sides.items()
        }
        places = problem.case.first_position + right.slots
        return right.layer.project({**inputs, "q": right.x}, places)

    def cache(self, values: Values) -> dict[str, np.ndarray]:
        grown = self._right.cache(values)
        lengths = (self._right.before + self._counted).astype(np.int32)
        return {**grown, "cache.lengths": lengths}
