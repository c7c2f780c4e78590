"""Bugs in the bookkeeping of a batch that is served from a cache.

Three numbers belong to each sequence and call: the slot that the new tokens are written into, the
position that they are rotated by, and the slot up to which the mask shows keys. All three are the
number of its cached tokens. Servers take this number from another sequence, count
padding, or raise it too late, and then one, two or all of the three are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, permutations
from typing import Any

import numpy as np

from parity.explain.diagnosis.bugs.families import (
    CACHE_LENGTHS,
    CACHE_POSITIONS,
    CACHE_SLOTS,
    PADDING,
    SWAPPED,
    BugFamily,
)
from parity.explain.diagnosis.bugs.moved_slots import Change, MovedSlots, exchanged_slots
from parity.explain.diagnosis.bugs.record import Edit, Override, known_bug
from parity.explain.diagnosis.bugs.sites import NewTokens
from parity.explain.diagnosis.bugs.sites import before as with_inputs
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer
from parity.measure.core.stages import Values
from parity.measure.text import counted as with_number

New = dict[str, np.ndarray]
"""Cached heads or latents, by `keys` and `values`, or by `latents`."""

SLOTS, POSITIONS, MASK = "slots", "positions", "mask"
"""Uses of the number of cached tokens."""


@dataclass(frozen=True)
class CountedTokens:
    """Wrong numbers of cached tokens before each call, and what uses them.

    Attributes:
        case: with a cache.
        wrong: the wrong number of each call and sequence, (calls + 1, B); the last row is the
            number after the last call.
        uses: some of `SLOTS`, `POSITIONS` and `MASK`.
        is_stored: True if the cache's own lengths are the wrong numbers.
        is_clamped: True if tokens that do not fit are written into the last slots instead of being
            lost, as by JAX's `dynamic_update_slice`.
    """

    case: Case
    wrong: np.ndarray
    uses: frozenset[str]
    is_stored: bool = False
    is_clamped: bool = False

    @property
    def overrides(self) -> dict[str, Override]:
        """The methods of the reference that they override."""
        overrides: dict[str, Override] = {}
        if MASK in self.uses:
            overrides["is_later"] = with_inputs(self._with_queries)
            overrides["is_out_of_reach"] = with_inputs(self._with_queries)
        if POSITIONS in self.uses:
            overrides["project"] = with_inputs(self._with_positions)
            # Distances of a bias are counted from the same positions.
            overrides["distances"] = with_inputs(self._with_query_positions)
            overrides["buckets"] = with_inputs(self._with_query_positions)
        if SLOTS in self.uses or self.is_stored:
            overrides["appended"] = self.appended
        return overrides

    def _with_queries(self, t: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Move the queries of a mask."""
        right = t[:, 0, 0, 0]
        moved = self.wrong[call_after(self.case, right)] - right
        return t + moved[:, None, None, None], s

    def _with_positions(self, inputs: Any, positions: np.ndarray) -> tuple[Any, np.ndarray]:
        """Move the positions of a call."""
        right = positions[:, 0] - self.case.first_position
        moved = self.wrong[call_after(self.case, right)] - right
        return inputs, positions + moved[:, None]

    def _with_query_positions(self, positions: np.ndarray, key_len: int) -> tuple[np.ndarray, int]:
        """Move the positions of the queries of a bias."""
        queries, _ = self._with_queries(positions[:, None, :, None], np.zeros(1))
        return queries[:, 0, :, 0], key_len

    def appended(self, _: Layer, original: Override, *inputs: Any) -> New:
        """Append tokens to a cache: an override of that method."""
        tokens = NewTokens(*inputs)
        call = call_after(self.case, tokens.before)
        begin = tokens.before
        if SLOTS in self.uses:
            last = self.case.capacity
            if self.is_clamped:
                last = max(0, last - self.case.chunks[call])
            begin = np.minimum(self.wrong[call], last)
        # Tokens beyond the last slot are lost.
        written = np.minimum(tokens.added, self.case.capacity - begin)
        grown = original(*tokens._replace(before=begin, added=written))
        if self.is_stored:
            return tokens.with_lengths(grown, self.wrong[call + 1])
        return tokens.with_lengths(grown)


# ---- The number of another sequence, or of tokens with their padding -----------------------------


def ragged(case: Case) -> Iterator[Edit]:
    """Yield the numbers of other sequences, and of tokens with their padding."""
    if not case.is_cached or not case.new_lengths or _has_several_axes(case):
        return
    right = _lengths(case)
    padded = np.zeros_like(right)
    padded[1:] = np.cumsum(case.chunks)[:, None]
    longest = np.broadcast_to(right.max(axis=1, keepdims=True), right.shape)
    first = np.broadcast_to(right[:, :1], right.shape)
    shortest = np.broadcast_to(right.min(axis=1, keepdims=True), right.shape)
    # In the usual case the longest prompt has no padding, and equal numbers are one bug.
    distinct: list[np.ndarray] = [right]
    for whose, wrong in (
        ("longest", longest),
        ("padded", padded),
        ("first", first),
        ("shortest", shortest),
    ):
        # The last row is not used by any call.
        if any(np.array_equal(wrong[:-1], other[:-1]) for other in distinct):
            continue
        distinct.append(wrong)
        yield from _of_other_numbers(case, whose, wrong)
    if not np.array_equal(padded, right):
        yield from _counting_padding(case, padded)


WHOSE = {
    "longest": "the longest one",
    "first": "the first one",
    "shortest": "the shortest one",
    "padded": "a sequence with its padding",
}
"""Sequences whose numbers all others have."""


def _of_other_numbers(case: Case, whose: str, wrong: np.ndarray) -> Iterator[Edit]:
    """Yield slots, positions and masks that each use the numbers of other sequences."""
    words = WHOSE[whose]
    suffix = f"of-{whose}"
    if whose == "padded":
        suffix = "after-padding"
    yield _using(
        case,
        wrong,
        {SLOTS},
        f"cache-slot-{suffix}",
        f"the new tokens of every sequence are cached in the slots of {words}",
        CACHE_SLOTS,
    )
    yield _using(
        case,
        wrong,
        {MASK},
        f"cache-mask-{suffix}",
        f"every sequence has the mask of {words}: it ends at the same slot",
        PADDING,
    )
    if not (case.spec.has_positions or case.spec.has_distance_bias):
        return
    if whose != "longest" or case.spec.rope is None:  # which is a known bug of RoPE
        yield _using(
            case,
            wrong,
            {POSITIONS},
            f"cache-position-{suffix}",
            f"the positions of every sequence continue from {words}",
            CACHE_POSITIONS,
        )
    yield _using(
        case,
        wrong,
        {MASK, POSITIONS},
        f"cache-position-{suffix}",
        f"the positions of every sequence, and its mask, continue from {words}",
        CACHE_POSITIONS,
    )


def _counting_padding(case: Case, padded: np.ndarray) -> Iterator[Edit]:
    """Yield tokens that follow the padding of earlier calls, which is visible."""
    yield _using(
        case,
        padded,
        {SLOTS, MASK},
        "cache-padding-visible",
        "later calls attend to the padding of earlier ones: tokens are cached after it, and the "
        "mask shows it",
        PADDING,
    )
    yield _using(
        case,
        padded,
        {SLOTS, MASK, POSITIONS},
        "cache-length-with-padding",
        "padding counts as cached: slots, positions and masks of later calls follow it",
        CACHE_LENGTHS,
        is_stored=True,
    )


def _using(
    case: Case,
    wrong: np.ndarray,
    uses: set[str],
    name: str,
    about: str,
    family: BugFamily,
    *,
    is_stored: bool = False,
) -> Edit:
    counted = CountedTokens(case, wrong, frozenset(uses), is_stored=is_stored)
    return _bug(name, about, counted.overrides, family)


def _bug(name: str, about: str, overrides: dict[str, Override], family: BugFamily) -> Edit:
    return known_bug(
        name, about, overrides, fix=family.fix, page=family.page, stages=STAGES_OF_A_CALL
    )


STAGES_OF_A_CALL = ("mask", "q", "k", "cache.keys", "cache.latents", "cache.lengths", "scores")


def _lengths(case: Case) -> np.ndarray:
    """Return the number of cached tokens before each call, and after the last one, (calls + 1,
    B).
    """
    last = len(case.chunks) - 1
    after = np.add(case.lengths_before(last), case.added(last))
    return np.array([*(case.lengths_before(call) for call in range(last + 1)), after])


def _has_several_axes(case: Case) -> bool:
    """Return True if positions have several axes: no single number moves them."""
    return case.spec.rope is not None and bool(case.spec.rope.sections)


# ---- Padding on the left -------------------------------------------------------------------------


def left_padded(case: Case) -> Iterator[Edit]:
    """Yield slots and masks of a batch with padding on the left that count real tokens alone."""
    if not case.is_cached or case.mask is None or _has_several_axes(case):
        return
    shape = (case.batch, case.spec.num_heads, case.seq_len, case.capacity)
    mask = np.broadcast_to(case.mask, shape)
    is_padding = mask.all(axis=(1, 2))
    # Padding on the left is a run of hidden slots from the first one on.
    num_hidden = np.logical_and.accumulate(is_padding, axis=1).sum(axis=1)
    if not num_hidden.any():
        return
    wrong = np.maximum(_lengths(case) - num_hidden, 0)
    yield _using(
        case,
        wrong,
        {SLOTS},
        "cache-slot-without-padding",
        "tokens are cached in the slots of their positions, which do not count padding on the left",
        LEFT_PADDED,
    )
    yield _using(
        case,
        wrong,
        {MASK},
        "cache-mask-without-padding",
        "the mask ends at the position of each query, which does not count padding on the left: it "
        "hides the newest keys",
        LEFT_PADDED,
    )


LEFT_PADDED = BugFamily(
    "padding", "count slots with padding, for writes and masks, and positions without it"
)


# ---- Numbers that are not reset ------------------------------------------------------------------


MOST_LEFT = 32
"""The most tokens left behind of which every number is tried, if lengths were not observed."""


def not_reset(case: Case, observed: Mapping[str, np.ndarray]) -> Iterator[Edit]:
    """Yield caches whose lengths were not reset before the first call.

    Args:
        case: with a cache.
        observed: the stages, of which the lengths tell how many tokens were left.
    """
    if not case.is_cached or _has_several_axes(case):
        return
    right = _lengths(case)
    for num_left in _numbers_left(case, observed):
        wrong = right + num_left
        yield _not_reset(case, wrong, num_left, "")
        if (wrong[:-1] + np.array(case.chunks)[:, None]).max() > case.capacity:
            words = ", and writes beyond the last slot are moved back into the cache"
            yield _not_reset(case, wrong, num_left, words, is_clamped=True)


def _numbers_left(case: Case, observed: Mapping[str, np.ndarray]) -> Sequence[int]:
    """Return the numbers of tokens that may have been left: the observed one, or each that is
    possible.
    """
    lengths = observed.get("step0.cache.lengths")
    if lengths is None:
        return range(1, min(case.capacity, MOST_LEFT) + 1)
    if lengths.shape != (case.batch,):
        return []
    left = np.unique(lengths - np.array(case.added(0)))
    if len(left) == 1 and 0 < left[0] < LARGEST_LENGTH:
        return [int(left[0])]
    return []


LARGEST_LENGTH = 1 << 31
"""Lengths above this are not numbers of tokens."""


def _not_reset(
    case: Case, wrong: np.ndarray, num_left: int, words: str, *, is_clamped: bool = False
) -> Edit:
    everything = frozenset({SLOTS, MASK, POSITIONS})
    counted = CountedTokens(case, wrong, everything, is_stored=True, is_clamped=is_clamped)
    return _bug(
        "cache-length-not-reset",
        f"the first call begins after {with_number(num_left, 'token')} that the cache already "
        f"counts: slots, positions and masks follow them{words}",
        counted.overrides,
        NOT_RESET,
    )


NOT_RESET = BugFamily(
    "cache-positions", "set the lengths of a cache to 0 before its slots serve another sequence"
)


# ---- Numbers that are raised too much, and late writes -------------------------------------------


def raised_otherwise(case: Case) -> Iterator[Edit]:
    """Yield numbers of cached tokens that later calls raise twice, or not at all."""
    if not case.is_cached or len(case.chunks) < 3 or _has_several_axes(case):
        return
    right = _lengths(case)
    after_first = right[1:] - right[1]
    everything = {SLOTS, MASK, POSITIONS}
    for name, words, times in (
        ("twice", "raise the length by twice as many tokens as they have", 2),
        ("never", "do not raise the length: each overwrites the tokens of the one before", 0),
    ):
        wrong = right.copy()
        wrong[1:] = right[1] + times * after_first
        yield _using(
            case,
            wrong,
            everything,
            f"cache-length-raised-{name}",
            f"calls after the first {words}",
            CACHE_LENGTHS,
            is_stored=True,
        )
    yield _bug(
        "cache-write-twice",
        "calls of one token cache it in two slots, and raise the length by two",
        _writing_twice(case),
        CACHE_SLOTS,
    )


def _writing_twice(case: Case) -> dict[str, Override]:
    """Write tokens of calls with one token twice; the mask shows both."""
    right = _lengths(case)
    is_single = np.array([0, *(chunk == 1 for chunk in case.chunks)])
    wrong = right + np.cumsum(is_single)[:, None]
    counts = CountedTokens(case, wrong, frozenset({SLOTS, POSITIONS}), is_stored=True)
    # The last query also attends to the second copy of its own token.
    shown = wrong.copy()
    shown[:-1] += is_single[1:, None]
    mask = CountedTokens(case, shown, frozenset({MASK}))

    def appended(layer: Layer, original: Override, *inputs: Any) -> New:
        tokens = NewTokens(*inputs)
        if all(x.shape[2] == 1 for x in tokens.new.values()):
            twice = {name: np.repeat(x, 2, axis=2) for name, x in tokens.new.items()}
            tokens = tokens._replace(new=twice, added=2 * tokens.added)
        return counts.appended(layer, original, *tokens)

    return {**mask.overrides, "project": counts.overrides["project"], "appended": appended}


def late(case: Case) -> Iterator[Edit]:
    """Yield tokens that are cached only after their call attended."""
    if not case.is_cached or case.spec.latent is not None:
        return
    for first_call, whose in ((1, "calls after the first attend"), (0, "calls attend")):
        yield _bug(
            "cache-write-late",
            f"{whose} before their tokens are cached: their slots are stale",
            {"appended": partial(_one_call_late, case, first_call)},
            CACHE_SLOTS,
        )
        yield _bug(
            "cache-write-late",
            f"{whose} to the cache as it was before their tokens were cached",
            {
                "products": partial(_reading_before_write, first_call, "k", "keys"),
                "weighed": partial(_reading_before_write, first_call, "v", "values"),
            },
            CACHE_SLOTS,
        )


def _one_call_late(case: Case, first_call: int, _: Layer, original: Override, *inputs: Any) -> New:
    """Cache the tokens of the call before instead of the tokens of this one."""
    tokens = NewTokens(*inputs)
    call = call_after(case, tokens.before)
    if call < first_call:
        return original(*tokens)
    if call == first_call:
        written = tokens._replace(added=np.zeros_like(tokens.added))
    else:
        of_call_before = {}
        for name in tokens.new:
            of_call_before[name] = tokens.values.get(f"previous.{ENTERING[name]}")
            if of_call_before[name] is None:
                raise ValueError("a module's own path does not have them")
        earlier = np.array(case.lengths_before(call - 1))
        written = tokens._replace(new=of_call_before, before=earlier, added=tokens.before - earlier)
    return tokens.with_lengths(original(*written))


ENTERING = {"keys": "k", "values": "v"}
"""The stages that enter a cache, by their names in it."""


def _reading_before_write(
    first_call: int, argument: str, name: str, layer: Layer, original: Override, values: Values
) -> Any:
    """Attend to the keys, or the values, that were cached before the call."""
    cached_before = values.get(f"previous.cache.{name}")
    if cached_before is None:  # the first call
        if first_call == 1:
            return original(values)
        cached_before = np.zeros_like(values[argument])
    return original({**values, argument: cached_before})


# ---- Keys that are read as values ----------------------------------------------------------------


def exchanged_when_read(case: Case) -> Iterator[Edit]:
    """Yield calls that take cached keys for values, and values for keys, but cache them rightly."""
    spec = case.spec
    if not case.is_cached or spec.latent is not None or spec.value_head_dim != spec.head_dim:
        return
    if spec.shared_kv:
        return
    yield SWAPPED.shown_in("scores")(
        "k-v-swapped",
        "keys and values are exchanged when they are read from the cache",
        dict.fromkeys(("products", "weighed"), with_inputs(_keys_and_values_exchanged)),
        fix="pass keys and values in the order of the function that attends to them",
    )


def _keys_and_values_exchanged(values: Values) -> tuple[Values]:
    return ({**values, "k": values["v"], "v": values["k"]},)


# ---- Keys that are rotated again -----------------------------------------------------------------


def rotated_again(case: Case) -> Iterator[Edit]:
    """Yield cached keys that later calls rotate again."""
    rope, spec = case.spec.rope, case.spec
    if rope is None or not case.is_cached or len(case.chunks) < 2 or _has_several_axes(case):
        return
    has_own_positions = case.position_ids is not None or case.cache_slots is not None
    if spec.latent is not None or rope.depends_on_length or has_own_positions:
        return
    if case.cache_quantization is not None:
        return
    for words, is_cached in (
        ("each later call rotates all cached keys again, and caches them so", True),
        ("later calls rotate the cached keys again when they read them", False),
    ):
        yield _bug(
            "cache-keys-rotated-again",
            words,
            {"appended": partial(_with_keys_rotated_again, case, is_cached)},
            ROTATED_ONCE,
        )


ROTATED_ONCE = BugFamily(
    "cache-positions", "rotate the new keys of each call before they are cached, and no others"
)


def _with_keys_rotated_again(
    case: Case, is_cached: bool, layer: Layer, original: Override, *inputs: Any
) -> New:
    """Append tokens to a cache whose keys are rotated once more."""
    tokens = NewTokens(*inputs)
    stage = f"previous.{tokens.cache}keys"
    cached = tokens.values.get(stage)
    if cached is None:  # the first call
        return original(*tokens)
    slots = np.arange(cached.shape[2])
    is_rotated = slots < tokens.before[:, None]
    if not is_cached:
        # The keys before those of the last call are rotated again already.
        call = call_after(case, tokens.before)
        is_rotated &= slots >= np.array(case.lengths_before(call - 1))[:, None]
    rotated = layer.rotate(cached, case.first_position + slots[None])
    changed = np.where(is_rotated[:, None, :, None], rotated, cached)
    return original(*tokens._replace(values={**tokens.values, stage: changed}))


# ---- A different order of sequences --------------------------------------------------------------


def reordered(case: Case, call: int, moved: MovedSlots | None) -> Iterator[Edit]:
    """Yield caches whose sequences are in a different order than in the call: as after a step of
    beam search that reorders only one of them, or because every call reads them so. They are so
    from a call on.

    Args:
        case: with a cache.
        call: the call.
        moved: the slots that moved in the call; None if the cache was not observed.
    """
    if case.batch < 2:
        return
    for order in _orders(case.batch):
        change = partial(_in_rows, np.array(order))
        if moved is not None and not moved.may_be(change):
            continue
        if call > 0:  # before, there is nothing to reorder
            yield from _stored_in_order(case, call, order)
        about = (
            f"the rows of the cache are read in a different order than that of the sequences: "
            f"{' '.join(map(str, order))}"
        )
        restore = partial(_out_of_rows, np.array(order))
        words = ("cache-rows-reordered", about)
        yield _read_differently(case, call, words, change, restore, ROWS)


def _stored_in_order(case: Case, call: int, order: tuple[int, ...]) -> Iterator[Edit]:
    """Yield caches that are brought into a different order, which the next call finds."""
    about = (
        f"the sequences of the cache are in a different order than in the call: "
        f"{' '.join(map(str, order))}"
    )
    later_calls = frozenset(range(1, len(case.chunks)))
    rows = np.array(order)
    changed = _changed_sequences(case, partial(_in_rows, rows))
    for words, change in (("", _with_earlier_rows), (", with the new tokens", _with_all_rows)):
        bug = _bug("cache-rows-reordered", about + words, {"appended": partial(change, rows)}, ROWS)
        bug = replace(bug, sequences=changed)
        # The later calls find the order of this one in the cache.
        yield replace(bug, calls=frozenset([call]), when=f"from call {call} on")
        is_read_so = change is _with_all_rows and np.array_equal(rows[rows], rows)
        if call == 1 and len(later_calls) > 1 and not is_read_so:
            yield replace(bug, calls=later_calls, when="again in every later call")


def _read_differently(
    case: Case,
    call: int,
    words: tuple[str, str],
    change: Change,
    restore: Change,
    family: BugFamily,
) -> Edit:
    """Return the bug that a call and all later ones read a right cache with a change.

    Args:
        case: with a cache.
        call: the first call.
        words: the name of the bug, and its description.
        change: changes the cache when it is read.
        restore: returns the cache of a change of it, as far as the change reads it.
        family: of the bug.
    """
    name, about = words
    overrides = {"appended": partial(_read_through, change, restore, case, call)}
    bug = _bug(name, about, overrides, family)
    bug = replace(bug, sequences=_changed_sequences(case, change))
    if call == 0:
        return bug
    return replace(bug, calls=frozenset(range(call, len(case.chunks))), when=f"from call {call} on")


def _changed_sequences(case: Case, change: Change) -> frozenset[int]:
    """Return the sequences whose cached tokens are changed."""
    # Not from 0, which is an empty slot.
    tokens = np.arange(1, case.batch * case.capacity + 1).reshape(case.batch, 1, case.capacity, 1)
    is_changed = (change(tokens) != tokens).any(axis=(1, 2, 3))
    return frozenset(np.flatnonzero(is_changed).tolist())


def unordered_rows(case: Case, caches: Mapping[tuple[int, str], np.ndarray]) -> Iterator[Edit]:
    """Yield the cache that keeps its rows where beam search continues other sequences in them.

    Args:
        case: with a cache.
        caches: keys and values of the sequences that were in these rows, (B, K, S, H), by call and
            by `keys` or `values`; of the calls in which others should be.
    """
    calls = sorted({call for call, _ in caches})
    if not calls:
        return
    bug = _bug(
        "cache-rows-reordered",
        f"the cache keeps its rows where beam search continues other sequences in them, from call "
        f"{calls[0]} on: the order that it asks for is lost",
        {"appended": partial(_in_unordered_rows, case, caches)},
        ROWS,
    )
    yield replace(bug, fixes=(BEAM_ORDER_FIX,))


BEAM_ORDER_FIX = "reorder the keys and values of every layer's cache by beam_idx: reorder_cache"


def _in_unordered_rows(
    case: Case,
    caches: Mapping[tuple[int, str], np.ndarray],
    _: Layer,
    original: Override,
    *inputs: Any,
) -> New:
    """Append the tokens of a call to the cache of the sequences that were in its rows."""
    tokens = NewTokens(*inputs)
    call = call_after(case, tokens.before)
    grown = original(*tokens)
    changed = {}
    for name in tokens.new:
        in_rows = caches.get((call, name))
        if in_rows is None:
            continue
        stage = f"{tokens.cache}{name}"
        changed[stage] = grown[stage].copy()
        changed[stage][:, :, : in_rows.shape[2]] = in_rows
    return {**grown, **changed}


ROWS = BugFamily(
    "cache-slots", "keep sequence b in row b of the cache, and reorder the rows with the sequences"
)


def _orders(batch: int) -> Iterator[tuple[int, ...]]:
    """Yield wrong orders of sequences: all of a few, the usual ones of many."""
    right = tuple(range(batch))
    if batch <= FEW_SEQUENCES:
        orders = list(permutations(right))
    else:
        neighbors = tuple(b + 1 - 2 * (b % 2) for b in right if b + 1 < batch or b % 2)
        orders = [
            (*right[1:], 0),
            (batch - 1, *right[:-1]),
            right[::-1],
            (*neighbors, *right[len(neighbors) :]),
        ]
    orders.append((0,) * batch)
    for order in dict.fromkeys(orders):
        if order != right:
            yield order


FEW_SEQUENCES = 3
"""The largest batch of which every order is tried."""


def _with_earlier_rows(order: np.ndarray, _: Layer, original: Override, *inputs: Any) -> New:
    """Append tokens to a cache whose rows are in a different order."""
    return original(*NewTokens(*inputs).with_cached_before(partial(_in_rows, order)))


def _with_all_rows(order: np.ndarray, _: Layer, original: Override, *inputs: Any) -> New:
    """Append tokens, and bring the rows of the cache into a different order after that."""
    return NewTokens(*inputs).with_cached(original(*inputs), partial(_in_rows, order))


def _in_rows(order: np.ndarray, cached: np.ndarray) -> np.ndarray:
    return cached[order]


def _out_of_rows(order: np.ndarray, changed: np.ndarray) -> np.ndarray:
    """Return a cache from its rows in an order; rows that the order leaves out are not read."""
    cached = changed.copy()
    cached[order] = changed
    return cached


# ---- Blocks of a paged cache ---------------------------------------------------------------------


def blocks(case: Case, call: int, moved: MovedSlots | None) -> Iterator[Edit]:
    """Yield caches in blocks of which two are exchanged, or one is stale, from a call on; if the
    cache was observed, only changes that its tokens allow.

    Args:
        case: with a cache.
        call: the call.
        moved: the slots that moved in the call; None if the cache was not observed.
    """
    for name, about, change in _changes_of_blocks(case, call):
        if moved is not None and not moved.may_be(change):
            continue
        # Twice is undone, or is once.
        yield _read_differently(case, call, (name, about), change, change, BLOCKS)


BLOCKS = BugFamily(
    "cache-slots", "read the blocks of each sequence in the order of its own block table"
)

MOST_BLOCKS = 8
"""The most blocks of a cache for which exchanges are tried: a table of more has many."""


def exchanges(case: Case, call: int, moved: MovedSlots) -> Iterator[Edit]:
    """Yield the cache whose observed tokens have exchanged their slots in a call, unless these are
    whole blocks or sequences, which have names of their own.
    """
    named = [partial(_in_rows, np.array(order)) for order in _orders(case.batch)]
    named += [change for _, _, change in _changes_of_blocks(case, call)]
    if any(moved.may_be(change) for change in named):
        return
    yield from exchanged_slots(case, call, moved)


def _changes_of_blocks(case: Case, call: int) -> Iterator[tuple[str, str, Change]]:
    """Yield changes of a cache (B, K, S, H), with a name and words. Twice is undone, or is once."""
    num_cached = int(max(np.add(case.lengths_before(call), case.added(call))))
    batch, size = case.batch, 2
    while size < num_cached:
        num_blocks = -(-num_cached // size)
        if num_blocks <= MOST_BLOCKS:
            yield from _changes_of_size(batch, num_blocks, size)
        size *= 2
    # After single blocks: the first call cannot distinguish a block from the whole table.
    if batch <= FEW_SEQUENCES:
        for one, other in permutations(range(batch), 2):
            rows = np.arange(batch)
            rows[one] = other
            about = f"sequence {one} reads the whole block table of sequence {other}"
            yield "cache-block-of-another", about, partial(_in_rows, rows)


def _changes_of_size(batch: int, num_blocks: int, size: int) -> Iterator[tuple[str, str, Change]]:
    of_size = f"of {size} tokens"
    whose: list[tuple[str, list[int]]] = [("every sequence", list(range(batch)))]
    if 1 < batch <= FEW_SEQUENCES:
        whose += [(f"sequence {b}", [b]) for b in range(batch)]
    for words, rows in whose:
        for one, other in combinations(range(num_blocks), 2):
            about = f"blocks {one} and {other} {of_size} of {words} are exchanged in the cache"
            yield "cache-blocks-exchanged", about, partial(_exchanged, rows, size, one, other)
        for block in range(num_blocks):
            about = f"block {block} {of_size} of {words} is stale in the cache: it is empty"
            yield "cache-block-stale", about, partial(_emptied, rows, size, block)
    if batch > FEW_SEQUENCES:
        return
    # Before exchanges: if the other sequence no longer sees the block, this is all that is known.
    for one, other in permutations(range(batch), 2):
        for block in range(num_blocks):
            about = f"sequence {one} reads block {block} {of_size} of sequence {other}"
            yield "cache-block-of-another", about, partial(_shared, one, other, size, block)
    for one, other in combinations(range(batch), 2):
        for block in range(num_blocks):
            about = f"sequences {one} and {other} have exchanged block {block} {of_size}"
            yield "cache-blocks-exchanged", about, partial(_between, one, other, size, block)


def _exchanged(rows: list[int], size: int, one: int, other: int, cached: np.ndarray) -> np.ndarray:
    order = np.arange(cached.shape[2])
    first, second = _slots_of(one, size, order), _slots_of(other, size, order)
    # The last block may lack slots.
    count = min(len(first), len(second))
    order[first[:count]], order[second[:count]] = second[:count].copy(), first[:count].copy()
    changed = cached.copy()
    changed[rows] = cached[rows][:, :, order]
    return changed


def _emptied(rows: list[int], size: int, block: int, cached: np.ndarray) -> np.ndarray:
    changed = cached.copy()
    for row in rows:
        changed[row, :, block * size : (block + 1) * size] = 0
    return changed


def _between(one: int, other: int, size: int, block: int, cached: np.ndarray) -> np.ndarray:
    slots = slice(block * size, (block + 1) * size)
    changed = cached.copy()
    changed[one, :, slots] = cached[other, :, slots]
    changed[other, :, slots] = cached[one, :, slots]
    return changed


def _shared(one: int, other: int, size: int, block: int, cached: np.ndarray) -> np.ndarray:
    slots = slice(block * size, (block + 1) * size)
    changed = cached.copy()
    changed[one, :, slots] = cached[other, :, slots]
    return changed


def _slots_of(block: int, size: int, slots: np.ndarray) -> np.ndarray:
    return slots[block * size : (block + 1) * size]


def _read_through(
    change: Change,
    restore: Change,
    case: Case,
    first_call: int,
    _: Layer,
    original: Override,
    *inputs: Any,
) -> New:
    """Write into the right cache, and read it with a change. Calls after the first one that has it
    find the changed cache of the call before, and restore it.
    """
    tokens = NewTokens(*inputs)
    if call_after(case, tokens.before) > first_call:
        tokens = tokens.with_cached_before(restore)
    return tokens.with_cached(original(*tokens), change)


# ---- Padding in a cache --------------------------------------------------------------------------


def has_padding(case: Case, num_calls: int) -> bool:
    """Return True if one of the first calls with a cache has padding."""
    return any(min(case.added(call)) < case.chunks[call] for call in range(num_calls))


def caching_padding() -> dict[str, Override]:
    """Return the overrides by which padding is cached after the tokens of its call, and rotated by
    the positions that follow theirs.

    Most servers do so, and the next tokens overwrite it: it is not a bug. It matters to a layer
    with a bug that shows it.
    """
    return {"project": with_inputs(_with_running_positions), "appended": _appended_with_padding}


def _with_running_positions(inputs: Any, positions: np.ndarray) -> tuple[Any, np.ndarray]:
    """Move padding, which has the position of the first token, to those after the last one."""
    indices = np.arange(positions.shape[-1])
    is_padding = (positions == positions[..., :1]) & (indices > 0)
    return inputs, np.where(is_padding, positions + indices, positions)


def _appended_with_padding(layer: Layer, original: Override, *inputs: Any) -> New:
    tokens = NewTokens(*inputs)
    num_tokens = max(x.shape[2] for x in tokens.new.values())
    room = layer.problem.case.capacity - tokens.before
    written = np.where(tokens.added > 0, np.minimum(num_tokens, room), 0)
    return tokens.with_lengths(original(*tokens._replace(added=written)))


# ---- Calls ---------------------------------------------------------------------------------------


def call_after(case: Case, before: np.ndarray) -> int:
    """Return the call that begins after some numbers of cached tokens, (B,).

    Raises:
        ValueError: if none does, because another bug changes these numbers.
    """
    for call in range(len(case.chunks)):
        if np.array_equal(before, case.lengths_before(call)):
            return call
    raise ValueError("another bug counts tokens differently")
