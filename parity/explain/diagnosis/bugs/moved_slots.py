"""Slots of a cache whose tokens have moved, as the caches after two calls tell.

A cached token is not computed again, so its values are the same in every call, bit by bit. A slot
that has the values of a different slot after a call got them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.families import BugFamily
from parity.explain.diagnosis.bugs.record import Edit, Override, known_bug
from parity.explain.diagnosis.bugs.sites import NewTokens
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.text import and_listed

EMPTY, UNKNOWN = 0, -1
"""The tokens of a slot of zeros, and of a slot whose values no slot had before the call."""

CONTENTS = ("cache.keys", "cache.latents")
"""The stages of a cache that tell its tokens, the first one observed."""

Change = Callable[[np.ndarray], np.ndarray]
"""Changes a cache (B, K, S, H)."""


@dataclass(frozen=True)
class MovedSlots:
    """The tokens of each slot before a call and after it, by number.

    Attributes:
        before: the tokens, (B, S).
        after: the tokens, (B, S); of slots that the call writes, `UNKNOWN`.
        is_old: True for slots that were filled before the call, (B, S).
    """

    before: np.ndarray
    after: np.ndarray
    is_old: np.ndarray

    def may_be(self, change: Change) -> bool:
        """Return True if a change of the cache moves the tokens as they did."""
        changed = change(self.before[:, None, :, None])[:, 0, :, 0]
        # A slot that was not filled before may be empty, but has no earlier token.
        may_be_empty = (changed == UNKNOWN) & (self.after == EMPTY)
        is_known = self.is_old & (self.after != UNKNOWN)
        return bool((may_be_empty | (changed == self.after))[is_known].all())

    @property
    def sources(self) -> np.ndarray | None:
        """For each slot, as a flat index of (B, S), the slot whose token it has, if pairs of slots
        have exchanged their tokens; None if something else moved, or nothing did.
        """
        is_moved = self.is_old & (self.after != self.before)
        sources = np.arange(self.before.size)
        slot_of = {int(self.before.flat[slot]): slot for slot in np.flatnonzero(self.is_old)}
        for slot in np.flatnonzero(is_moved):
            token = int(self.after.flat[slot])
            if token <= EMPTY or token not in slot_of:
                return None
            sources[slot] = slot_of[token]
        if not is_moved.any() or not np.array_equal(sources[sources], np.arange(len(sources))):
            return None
        return sources


def moved_slots(case: Case, call: int, observed: Mapping[str, np.ndarray]) -> MovedSlots | None:
    """Return the slots that moved in a call after the first; None if the caches after it and after
    the call before were not observed.
    """
    for quantity in CONTENTS:
        before = observed.get(f"step{call - 1}.{quantity}")
        after = observed.get(f"step{call}.{quantity}")
        if before is None or after is None or before.shape != after.shape or before.ndim != 4:
            continue
        is_old = np.arange(before.shape[2]) < np.array(case.lengths_before(call))[:, None]
        if is_old.shape != (len(before), before.shape[2]):
            continue
        # -0.0 becomes 0.0, whose bits are different.
        zero = np.zeros((), before.dtype)
        before, after = before + zero, after + zero
        numbers = {np.zeros_like(before[0, :, 0]).tobytes(): EMPTY}
        tokens_before = np.full(is_old.shape, UNKNOWN)
        tokens_after = np.full(is_old.shape, UNKNOWN)
        for b, s in np.argwhere(is_old):
            token = before[b, :, s].tobytes()
            tokens_before[b, s] = numbers.setdefault(token, len(numbers))
        for b, s in np.argwhere(is_old):
            tokens_after[b, s] = numbers.get(after[b, :, s].tobytes(), UNKNOWN)
        return MovedSlots(tokens_before, tokens_after, is_old)
    return None


def exchanged_slots(case: Case, call: int, moved: MovedSlots) -> Iterator[Edit]:
    """Yield the cache in which pairs of slots have exchanged their tokens, from a call on."""
    sources = moved.sources
    if sources is not None:
        yield exchanging(case, call, sources)


def exchanging(case: Case, call: int, sources: np.ndarray) -> Edit:
    """Return the bug of a cache whose slots have the tokens of others.

    Args:
        case: with a cache.
        call: the call after which they have them.
        sources: for each slot, as a flat index of (B, S), the slot of its token.
    """
    num_slots = len(sources) // case.batch
    about = f"tokens are exchanged in the cache: {_words(sources, num_slots)}"
    bug = known_bug(
        "cache-slots-exchanged",
        about,
        {"appended": partial(_appended, sources)},
        fix=EXCHANGED.fix,
        page=EXCHANGED.page,
        stages=CONTENTS,
    )
    # The later calls find the order of this one in the cache.
    return replace(bug, calls=frozenset([call]), when=f"from call {call} on")


EXCHANGED = BugFamily(
    "cache-slots", "move all tokens of a sequence with it, keys and values, and no others"
)


def _appended(
    sources: np.ndarray, _: Layer, original: Override, *inputs: Any
) -> dict[str, np.ndarray]:
    """Append tokens to a cache, and exchange slots after that."""
    return NewTokens(*inputs).with_cached(original(*inputs), partial(_gathered, sources))


def _gathered(sources: np.ndarray, cached: np.ndarray) -> np.ndarray:
    by_slot = cached.swapaxes(1, 2)  # (B, S, K, H)
    flat = by_slot.reshape(-1, *by_slot.shape[2:])
    return flat[sources].reshape(by_slot.shape).swapaxes(1, 2)


# ---- Words ---------------------------------------------------------------------------------------

MOST_LISTED = 4
"""The number of exchanges that are listed."""


def _words(sources: np.ndarray, num_slots: int) -> str:
    """Return the exchanges in words, and join exchanges of neighboring slots."""
    runs: list[list[tuple[int, int]]] = []
    for slot in np.flatnonzero(sources > np.arange(len(sources))):
        pair = (int(slot), int(sources[slot]))
        is_next = bool(runs) and runs[-1][-1] == (pair[0] - 1, pair[1] - 1)
        starts_a_sequence = pair[0] % num_slots == 0 or pair[1] % num_slots == 0
        if is_next and not starts_a_sequence:
            runs[-1].append(pair)
        else:
            runs.append([pair])
    exchanges = []
    for run in runs:
        (one, other), (last_of_one, last_of_other) = run[0], run[-1]
        exchanges.append(
            f"{_slots(one, last_of_one, num_slots)} with {_slots(other, last_of_other, num_slots)}"
        )
    return and_listed(exchanges, MOST_LISTED)


def _slots(first: int, last: int, num_slots: int) -> str:
    sequence, slot = divmod(first, num_slots)
    if first == last:
        return f"slot {slot} of sequence {sequence}"
    return f"slots {slot}-{last % num_slots} of sequence {sequence}"
