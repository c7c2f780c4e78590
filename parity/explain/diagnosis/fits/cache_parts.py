"""Parts of a cache: slots and rows of keys alone or values alone, what is read, and its lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs import families as of
from parity.explain.diagnosis.bugs.record import Edit, Override
from parity.explain.diagnosis.bugs.sites import NewTokens
from parity.explain.diagnosis.fits.changes import part
from parity.measure.core.case import Case
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


def cache_parts(problem: Problem, quantity: str) -> Iterator[Edit]:
    """Yield other contents of a cache, other reads of it, and other lengths.

    Args:
        problem: with the case.
        quantity: quantity of the stage. A wrong length shows in positions, masks and slots alike,
            so a single one of them does not tell it.
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


def _of_writes(problem: Problem, names: tuple[str, ...], whose: str) -> Iterator[Edit]:
    capacity = problem.case.capacity
    for words, slots in SLOTS.items():
        about = f"{whose} are cached {words}"
        yield _written_by(problem, names, about, _into_slots(slots, capacity))
        if problem.case.new_lengths:
            about = f"{whose}, padding included, are cached {words}"
            write = _into_slots(slots, capacity, with_padding=True)
            yield _written_by(problem, names, about, write)
    for words, write in WRITES.items():
        yield _written_by(problem, names, f"{whose} {words}", write)
    if problem.spec.rope is not None and "keys" in names and len(names) == 1:
        yield from _of_unrotated(problem)


def _written_by(problem: Problem, names: tuple[str, ...], about: str, write: Write) -> Edit:
    return part(problem, "cache", about, _writing(names, write), of.CACHE_SLOTS)


def _writing(names: tuple[str, ...], write: Write) -> Edit:
    """Return the edit that writes keys or values differently; lengths stay right."""
    return Edit(overrides={"appended": partial(_append_otherwise, names, write)})


def _append_otherwise(
    names: tuple[str, ...], write: Write, layer: Layer, original: Override, *inputs: Any
) -> dict[str, np.ndarray]:
    """Write new keys or values, of some names, differently."""
    tokens = NewTokens(*inputs)
    grown = dict(original(*tokens))
    for name in names:
        if name not in tokens.new:
            continue
        right = grown[f"{tokens.cache}{name}"]
        earlier = tokens.values.get(f"previous.{tokens.cache}{name}", np.zeros_like(right))
        written = write(
            earlier.astype(right.dtype),
            tokens.new[name].astype(right.dtype),
            tokens.before,
            tokens.added,
        )
        grown[f"{tokens.cache}{name}"] = layer.arithmetic.keep(written)
    return grown


def _into_slots(change: Slots, capacity: int, *, with_padding: bool = False) -> Write:
    def write(
        earlier: np.ndarray, new: np.ndarray, before: np.ndarray, added: np.ndarray
    ) -> np.ndarray:
        grown = earlier.copy()
        for b, begin in enumerate(change(before)):
            written = int(added[b])
            if with_padding:
                written = new.shape[2]
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
    if before.any():
        return earlier.copy()
    return _written(earlier, new, before, added)


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


WRITES: dict[str, Write] = {
    "in the cache are put before the cached ones": _prepended,
    "in the cache come from the first sequence": _of_first_sequence,
    "are not cached in sequences after the first": _of_first_row_alone,
    "in the cache repeat the slot before": _repeated,
    "are not cached after the first call": _of_first_call_alone,
}


def _of_unrotated(problem: Problem) -> Iterator[Edit]:
    """Yield caches of keys before their rotation, in every call or after the first."""
    words = "keys are cached before their rotation"
    always = Edit(overrides={"appended": _append_unrotated})
    yield part(problem, "cache", words, always, of.MISSING_ROPE)
    later = Edit(overrides={"appended": _append_unrotated_later})
    yield part(problem, "cache", f"{words} after the first call", later, of.MISSING_ROPE)


def _append_unrotated(layer: Layer, original: Override, *inputs: Any) -> dict[str, np.ndarray]:
    tokens = NewTokens(*inputs)
    keys = tokens.new["keys"]
    slots = tokens.before[:, None] + np.arange(keys.shape[2])
    positions = layer.problem.case.first_position + slots
    shrunk = layer.attention_factor() ** -2
    unrotated = layer.rotate(keys, positions, -1) * keys.dtype.type(shrunk)
    return original(*tokens._replace(new={**tokens.new, "keys": unrotated}))


def _append_unrotated_later(
    layer: Layer, original: Override, *inputs: Any
) -> dict[str, np.ndarray]:
    is_first_call = not NewTokens(*inputs).before.any()
    if is_first_call:
        return original(*inputs)
    return _append_unrotated(layer, original, *inputs)


# ---- Reads ---------------------------------------------------------------------------------------

Read = Callable[[Layer, str, np.ndarray, Values], np.ndarray]
"""Maps cached `keys` or `values` (B, K, S, H), and all stages, to those that are used."""


def _before_call(_: Layer, name: str, cached: np.ndarray, values: Values) -> np.ndarray:
    return values.get(f"previous.cache.{name}", np.zeros_like(cached))


def _without_last(_: Layer, __: str, cached: np.ndarray, values: Values) -> np.ndarray:
    """Lack the last real token of each call."""
    read = cached.copy()
    for b, length in enumerate(values["cache.lengths"]):
        read[b, :, max(int(length) - 1, 0)] = 0.0
    return read


def _of_first(_: Layer, __: str, cached: np.ndarray, ___: Values) -> np.ndarray:
    return np.broadcast_to(cached[:1], cached.shape)


def _rotated_again(layer: Layer, _: str, cached: np.ndarray, __: Values) -> np.ndarray:
    slots = np.arange(cached.shape[2])[None]
    return layer.rotate(cached, layer.problem.case.first_position + slots)


READS: dict[str, Read] = {
    "those before the call": _before_call,
    "those without the last token": _without_last,
    "the first sequence's": _of_first,
}


def _of_reads(problem: Problem, name: str) -> Iterator[Edit]:
    for words, read in READS.items():
        about = f"the cached {name} used are {words}"
        yield part(problem, "cache", about, _reading(name, read), of.CACHE_SLOTS)
    if name == "keys" and problem.spec.rope is not None:
        about = "cached keys, already rotated, are rotated again when they are used"
        yield part(problem, "cache", about, _reading(name, _rotated_again), of.POSITIONS)


def _reading(name: str, read: Read) -> Edit:
    """Return the edit that uses other keys, or values, than the cached ones.

    Args:
        name: `keys` or `values`.
        read: the result is used instead.
    """
    method, argument = READ[name]

    def override(layer: Layer, original: Override, values: Values) -> Any:
        return original({**values, argument: read(layer, name, values[argument], values)})

    return Edit(overrides={method: override})


# ---- Lengths -------------------------------------------------------------------------------------


Count = Callable[[Case, int], np.ndarray]
"""Returns how many tokens of each sequence a call counts, (B,)."""


def _with_padding(case: Case, call: int) -> np.ndarray:
    return np.full(case.batch, case.chunks[call])


def _one_less(case: Case, call: int) -> np.ndarray:
    return np.maximum(np.array(case.added(call)) - 1, 1)


def _one(case: Case, _: int) -> np.ndarray:
    return np.ones(case.batch, int)


def _one_more(case: Case, call: int) -> np.ndarray:
    return np.array(case.added(call)) + 1


COUNTS: dict[str, Count] = {
    "padding counts as cached": _with_padding,
    "each call counts one token less than it has": _one_less,
    "each call counts one token": _one,
    "each call counts one token more than it has": _one_more,
}


def _of_lengths(problem: Problem) -> Iterator[Edit]:
    """Yield lengths of a cache that count other tokens; positions and masks follow them."""
    for words, count in COUNTS.items():
        about = f"the length of the cache is wrong: {words}"
        yield part(problem, "cache", about, _counting(problem.case, count), of.CACHE_LENGTHS)


def _counting(case: Case, count: Count) -> Edit:
    def call(layer: Layer, original: Override, index: int) -> Any:
        counted_before = [count(case, earlier) for earlier in range(index)]
        before = np.sum(counted_before, axis=0, dtype=int)
        right = original(index)
        before = np.broadcast_to(before, right.before.shape)
        counted, added = count(case, index), right.added
        if count is _with_padding:
            added = counted  # padding is cached
        return _OtherLengths(right, before, counted, added)

    return Edit(overrides={"call": call})


class _OtherLengths:
    """A call that begins after the wrong number of cached tokens."""

    def __init__(
        self, right: Any, before: np.ndarray, counted: np.ndarray, added: np.ndarray
    ) -> None:
        self._right, self._counted = replace(right, before=before, added=added), counted

    def __getattr__(self, name: str) -> Any:
        """Return a step that does not depend on the positions of queries."""
        return getattr(self._right, name)

    def qkv(self, _: Values) -> dict[str, np.ndarray]:
        right, problem = self._right, self._right.layer.problem
        inputs = {}
        for name, side in problem.sides.items():
            inputs[name] = problem.step_input(right.index, side)
        positions = problem.case.first_position + right.slots
        return right.layer.project({**inputs, "q": right.x}, positions)

    def cache(self, values: Values) -> dict[str, np.ndarray]:
        grown = self._right.cache(values)
        lengths = (self._right.before + self._counted).astype(np.int32)
        return {**grown, "cache.lengths": lengths}
