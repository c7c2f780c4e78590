"""Bugs in masks: in their construction, and in their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from parity.explain.diagnosis.bugs.families import (
    CACHE_SLOTS,
    CAUSAL,
    CHUNK,
    PADDING,
    SHOWN_PADDING,
    WINDOW,
)
from parity.explain.diagnosis.bugs.record import Edit, Override, WrongField, instead, known_bug
from parity.explain.diagnosis.bugs.sites import Overrides, always, before
from parity.measure.core.case import Case
from parity.measure.core.reference import Layer

of_mask = partial(known_bug, stages=("mask",))


def _of_no_pair(t: np.ndarray, s: np.ndarray, *_: object) -> np.ndarray:
    return np.zeros(np.broadcast_shapes(t.shape, s.shape), bool)


# ---- Any mask ------------------------------------------------------------------------------------


def used_or_made(case: Case) -> Iterator[Edit]:
    """A right mask that is wrongly used, which is more usual, or a wrong mask."""
    flipped = partial(
        known_bug,
        "mask-flipped",
        fix=(
            "invert the mask once: True hides a key here, but shows it in PyTorch's SDPA, JAX "
            "and Flax"
        ),
        page="mask-polarity",
    )
    ignored = partial(
        known_bug,
        "mask-ignored",
        fix="pass the mask on every path (with attention weights, without, cached)",
        page="mask-ignored",
    )
    if case.has_mask or case.is_cached:
        used, made = ("attn_weights",), ("mask",)
        yield flipped(
            "the mask is used with inverted polarity: hidden keys are visible, and visible ones "
            "hidden",
            _using(np.logical_not),
            stages=used,
        )
        yield ignored("the mask is ignored", _using(np.zeros_like), stages=used)
        yield flipped(
            "the mask is built with inverted polarity", _making(np.logical_not), stages=made
        )
        yield ignored("the mask is empty", _making(np.zeros_like), stages=made)
    if case.segment_ids is not None:
        yield of_mask(
            "segment-ids-ignored",
            "packed sequences attend to each other",
            {"is_in_another_segment": instead(lambda ids: np.zeros((*ids.shape[:2], 1, 1), bool))},
            fix="hide the keys whose segment id is not the query's",
            page="mask-ignored",
        )


def by_slot(case: Case) -> Iterator[Edit]:
    """Yield the mask of slots whose tokens are not in order, as if they were."""
    if case.cache_slots is None:
        return
    in_order = np.arange(case.capacity)[None]
    yield of_mask(
        "cache-mask-by-slot",
        "the mask compares positions with the numbers of slots instead of the tokens in them",
        {"tokens_in_slots": always(in_order)},
        fix="keep the position of the token in each slot, and mask by that",
        page="cache-slots",
    )


def own(case: Case) -> Iterator[Edit]:
    """Yield bugs in a mask of the case's own, and in its use with other masks."""
    if not case.has_own_mask:
        return
    has_others = case.is_causal or case.is_cached or case.key_padding_lengths or case.segment_ids
    if case.mask is not None and has_others:
        yield of_mask(
            "own-mask-ignored",
            "the mask that was passed is ignored; other masks are used",
            {"own_mask": instead(np.zeros_like)},
            fix="combine the passed mask with the others: hide a key if any of them does",
            page="mask-ignored",
        )
        yield of_mask(
            "own-mask-inverted",
            "the mask that was passed is inverted before it is combined with the others",
            {"own_mask": instead(np.logical_not)},
            fix="let True hide in both masks before they are combined",
            page="mask-polarity",
        )
    shown = SHOWN_PADDING.shown_in("mask")
    words = "keys that the mask hides from every query, as padding, are visible to"
    yield shown("own-mask-padding-visible", f"{words} every query", {"own_mask": _showing_padding})
    if not (case.is_cached or case.is_causal):  # a causal mask hides them already
        yield shown(
            "own-mask-padding-visible",
            f"{words} every later query",
            {"own_mask": _showing_padding_to_later},
        )
    yield shown(
        "own-mask-reversed",
        "the mask that was passed has its keys in reverse order: it hides padding at the other end",
        {"own_mask": instead(lambda mask: mask[..., ::-1])},
        fix="hide padding at the end where it is: on the left if prompts end at the same slot",
    )


def _showing_padding(layer: Layer, original: Override, mask: np.ndarray) -> np.ndarray:
    """Show the keys that the mask of all calls hides from every query."""
    is_padding = layer.problem.inputs["mask"].all(axis=2, keepdims=True)
    return original(mask) & ~is_padding


def _showing_padding_to_later(layer: Layer, original: Override, mask: np.ndarray) -> np.ndarray:
    """Show them to the queries that are not before them."""
    is_later = ~np.tri(*mask.shape[2:], dtype=bool)
    return np.where(is_later, original(mask), _showing_padding(layer, original, mask))


def _using(change: Callable[[np.ndarray], np.ndarray]) -> Overrides:
    return {"attn_weights": before(lambda values: ({**values, "mask": change(values["mask"])},))}


def _making(change: Callable[[np.ndarray], np.ndarray]) -> Overrides:
    return {"hidden": before(lambda masked: (change(masked),))}


# ---- The keys of earlier calls -------------------------------------------------------------------


def earlier_calls(case: Case) -> Iterator[Edit]:
    """Yield calls that attend to their own tokens alone."""
    if case.is_cached and len(case.chunks) > 1:
        yield CACHE_SLOTS.shown_in("mask")(
            "cache-not-read",
            "calls attend to their own tokens alone: the cached keys of earlier calls are not read",
            {"is_later": _hiding_earlier_calls},
            fix="attend to the keys and values of the whole cache, not to the new ones alone",
        )


def _hiding_earlier_calls(_: Layer, original: Override, t: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Override `is_later`: hide the keys before the first query of the call as well."""
    return original(t, s) | (s < t[:, :, :1])


# ---- The causal mask -----------------------------------------------------------------------------


def causal(case: Case) -> Iterator[Edit]:
    bug = CAUSAL.shown_in("mask")
    is_causal = case.is_causal or case.is_cached or case.window_size is not None
    if is_causal:
        yield bug(
            "causal-off-by-one",
            "each token also attends to the next one: the causal mask starts one key too late",
            {"is_later": instead(lambda t, s: s > t + 1)},
        )
        yield bug(
            "causal-excludes-self",
            "no token attends to itself: the causal mask starts one key too early",
            {"is_later": instead(np.less_equal)},  # t <= s
        )
    is_square = case.seq_len == case.key_len and not case.is_cached and case.seq_len > 1
    is_triangle = is_square and is_causal
    if is_triangle:
        yield bug(
            "causal-transposed",
            "each token attends to itself and later tokens: the causal mask is transposed",
            {"is_later": instead(np.greater)},  # t > s
            fix="hide every key after the query, s > t: the upper triangle without the diagonal",
        )
    if (is_triangle and case.key_padding_lengths) or (is_square and case.has_own_mask):
        yield of_mask(
            "mask-transposed",
            "the whole mask is transposed, (B, N, S, T) instead of (B, N, T, S)",
            _making(lambda masked: masked.swapaxes(2, 3)),
            fix="use rows of a mask for queries, and columns for keys",
            page="mask-polarity",
        )
    if case.is_cached:
        transposed_fix = "hide every key after the query, s > t: also in calls with a cache"
        yield bug(
            "causal-transposed",
            "each token attends to itself and later slots, also empty ones: the causal mask is "
            "transposed",
            {"is_later": instead(np.greater), "is_after_window": instead(_of_no_pair)},
            fix=transposed_fix,
        )
        yield bug(
            "causal-transposed",
            "each token attends to itself and later tokens: the causal mask is transposed",
            {"is_later": instead(_is_earlier_or_not_filled)},
            fix=transposed_fix,
        )
        yield bug(
            "causal-top-left",
            "the causal mask of new tokens is aligned to the first cached key instead of their "
            "own positions",
            {"is_later": instead(lambda t, s: s > t - t[:, :, :1])},
            fix=HIDES_CACHED,
        )
        if case.spec.window_size is not None or case.spec.chunk_size is not None:
            from_first_slot = before(_counting_from_first_slot)
            yield bug(
                "causal-top-left",
                "the whole mask of new tokens, also by their distance, is aligned to the first "
                "cached key instead of their own positions",
                {"is_later": from_first_slot, "is_out_of_reach": from_first_slot},
                fix=HIDES_CACHED,
            )
        if max(case.chunks) > 1:
            yield bug(
                "causal-top-left",
                "the causal mask of new tokens hides the first cached keys, and no others",
                {"is_later": instead(_is_hidden_on_the_left)},
                fix=HIDES_CACHED,
            )
    if case.is_causal and case.key_len != case.seq_len:
        yield bug(
            "causal-bottom-right",
            "the causal mask is aligned to the last key instead of the first",
            {"is_later": instead(lambda t, s: s > t + case.key_len - case.seq_len)},
            fix="count positions from the first key: query i attends to keys 0 … i",
        )
    reach = case.window_size or case.spec.window_size or case.spec.chunk_size
    is_beside = case.key_padding_lengths or case.has_own_mask or case.segment_ids
    if case.is_cached or (is_causal and reach) or (case.is_causal and is_beside):
        yield of_mask(
            "causal-ignored",
            "the causal mask is missing from the others",
            {"is_later": instead(_is_not_filled)},
            fix="hide a key if any of the masks hides it",
            page="mask-ignored",
        )
    if not (is_causal or case.has_own_mask) and case.seq_len > 1:
        yield bug(
            "causal-unasked",
            "the layer is causal, although the problem is not",
            _making(lambda masked: masked | ~np.tri(*masked.shape[2:], dtype=bool)),
            fix="remove the causal mask: every token attends to all tokens",
        )


HIDES_CACHED = "hide no cached key from a new token: it attends to all keys up to its own position"


def _counting_from_first_slot(t: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of queries among the new tokens, instead of their positions."""
    return t - t[:, :, :1], s


def _is_hidden_on_the_left(t: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Return whether a key is hidden by a triangle in the first slots, or its slot is empty."""
    first, count = t[:, :, :1], t.shape[2]
    is_in_triangle = (s < count) & (s > t - first)
    return is_in_triangle | (s >= first + count)


def _is_not_filled(t: np.ndarray, s: np.ndarray) -> np.ndarray:
    """In a call with a cache, hide the slots after all of its tokens; otherwise nothing."""
    return s > (t.max(axis=2, keepdims=True) if t.ndim == 4 else np.full_like(t, s.max()))


def _is_earlier_or_not_filled(t: np.ndarray, s: np.ndarray) -> np.ndarray:
    """In a call with a cache, hide the keys before each query, and the slots after all of them."""
    return (t > s) | _is_not_filled(t, s)


# ---- Padding and windows -------------------------------------------------------------------------


def padding(case: Case) -> Iterator[Edit]:
    lengths, key_len = case.key_padding_lengths, case.key_len
    if lengths is None:
        return
    bug = PADDING.shown_in("mask")
    # A causal mask hides right padding from every real token: to show it changes nothing.
    may_show = not (case.is_causal and case.seq_len_k is None and min(lengths) > 0)
    has_other_mask = (
        case.is_causal or case.has_own_mask or case.window_size is not None or case.segment_ids
    )
    if has_other_mask and may_show:
        yield bug("padding-ignored", "padding is not hidden", {"is_padding": instead(_of_no_pair)})
    yield bug(
        "padding-on-the-left",
        "padding is hidden on the left, but is on the right",
        {"is_padding": instead(lambda s, lengths: s < key_len - lengths)},
        fix="hide the keys from each sequence's own length, or move the padding to the left",
    )
    if may_show:
        yield bug(
            "padding-off-by-one",
            "the padding mask shows one padding key",
            {"is_padding": before(lambda s, lengths: (s, lengths + 1))},
        )
    yield bug(
        "padding-off-by-minus-one",
        "the padding mask hides one real key",
        {"is_padding": before(lambda s, lengths: (s, lengths - 1))},
    )
    count = len(lengths)
    known_lengths = {lengths, (key_len,) * count}  # the second is padding-ignored
    for name, words, wrong, change in (
        (
            "the-longest",
            "the longest one",
            (max(lengths),) * count,
            lambda x: np.full_like(x, x.max()),
        ),
        (
            "the-shortest",
            "the shortest one",
            (min(lengths),) * count,
            lambda x: np.full_like(x, x.min()),
        ),
        (
            "the-other",
            "the one before it",
            (*lengths[-1:], *lengths[:-1]),
            lambda x: np.roll(x, 1, axis=0),
        ),
        (
            "the-first",
            "the first one",
            lengths[:1] * count,
            lambda x: np.repeat(x[:1], len(x), axis=0),
        ),
    ):
        hides = any(other < own for other, own in zip(wrong, lengths, strict=True))
        if wrong not in known_lengths and (hides or may_show):
            known_lengths.add(wrong)
            yield bug(
                f"padding-of-{name}",
                f"each sequence has the padding of {words}",
                {"is_padding": before(lambda s, x, change=change: (s, change(x)))},
                fix=(
                    "hide the keys from each sequence's own length: use row b of the mask for "
                    "sequence b"
                ),
            )
    if key_len == case.seq_len and may_show:
        yield bug(
            "padding-of-queries",
            "the mask hides the queries of padding instead of its keys",
            {"is_padding": lambda _, original, s, lengths: original(s, lengths).swapaxes(2, 3)},
            fix="hide the keys of padding from every query: (B, 1, 1, S)",
        )


def window(case: Case) -> Iterator[Edit]:
    if case.window_size is not None:
        yield from _windows(WINDOW.fix, "is_before_window")
        yield WINDOW.shown_in("mask")(
            "window-ignored",
            "the window is ignored: only later keys are hidden",
            {"is_before_window": instead(_of_no_pair)},
        )


def _windows(fix: str, *methods: str) -> Iterator[Edit]:
    for word, step in (("wide", 1), ("narrow", -1)):
        yield of_mask(
            f"window-one-too-{word}",
            f"the sliding window is one key too {word}",
            dict.fromkeys(methods, before(lambda t, s, size, step=step: (t, s, size + step))),
            fix=fix,
            page=WINDOW.page,
        )


def reach(case: Case) -> Iterator[Edit]:
    """A layer's own window, or its chunks."""
    window_size = case.spec.window_size
    if window_size is not None:
        fix = "hide the keys s <= t - window_size and s >= t + window_size"
        sizes = {"window-one-too-wide": window_size + 1, "window-one-too-narrow": window_size - 1}
        for edit in _windows(fix, "is_before_window", "is_after_window"):
            wrong_field = WrongField("window_size", sizes[edit.name], window_size)
            yield replace(edit, wrong_fields=(wrong_field,))
        ignored = of_mask(
            "window-ignored",
            "the window is ignored",
            {"is_before_window": instead(_of_no_pair), "is_after_window": instead(_of_no_pair)},
            fix=fix,
            page=WINDOW.page,
        )
        wrong_field = WrongField("window_size", None, window_size)
        yield replace(ignored, wrong_fields=(wrong_field,))
    size = case.spec.chunk_size
    if size is None:
        return
    for name, about, hides in (
        ("ignored", "the chunks are ignored", _of_no_pair),
        (
            "as-window",
            "each token attends to a sliding window as long as a chunk instead of its own chunk",
            lambda t, s, _: (s <= t - size) | (s >= t + size),
        ),
        (
            "one-late",
            "the chunks are counted from the second token",
            lambda t, s, _: (t - 1) // size != (s - 1) // size,
        ),
    ):
        yield CHUNK.shown_in("mask")(
            f"chunk-{name}", about, {"is_in_another_chunk": instead(hides)}
        )
