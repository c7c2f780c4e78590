"""Mistakes in masks: how they are made, and how they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parity.core.case import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.families import WINDOW
from parity.diagnosis.mistakes.record import Mistake, Override, instead

# ---- Any mask --------------------------------------------------------------------------------------------------------


def used_or_made(case: Case) -> Iterator[Mistake]:
    """A mask that is made as it should be and used otherwise, which is the more usual, or made otherwise."""
    if case.has_mask or case.is_cached:
        yield _flipped("used", ("attn_weights",), _using(np.logical_not))
        yield _ignored("the mask is ignored", ("attn_weights",), _using(np.zeros_like))
        yield _flipped("made", ("mask",), _making(np.logical_not))
        yield _ignored("the mask is empty", ("mask",), _making(np.zeros_like))
    if case.segment_ids is not None:
        yield Mistake(
            "segment-ids-ignored",
            "sequences that are packed in a row attend to each other",
            "hide the keys of other segments: those whose id is not the query's",
            "mask-ignored",
            ("mask",),
            {"is_in_another_segment": instead(lambda ids: np.zeros((*ids.shape[:2], 1, 1), bool))},
        )


def _flipped(where: str, stages: tuple[str, ...], in_reference: dict[str, Override]) -> Mistake:
    return Mistake(
        "mask-flipped",
        f"the mask is {where} with the other polarity",
        "True hides a key here; PyTorch's SDPA, JAX and Flax show it: use ~mask at the one edge between them",
        "mask-polarity",
        stages,
        in_reference,
    )


def _ignored(about: str, stages: tuple[str, ...], in_reference: dict[str, Override]) -> Mistake:
    return Mistake(
        "mask-ignored",
        about,
        "pass the mask on, on every path (with weights, without, cached)",
        "mask-ignored",
        stages,
        in_reference,
    )


def _using(change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Override]:
    def attn_weights(_: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        return original({**values, "mask": change(values["mask"])})

    return {"attn_weights": attn_weights}


def _making(change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Override]:
    return {"hidden": lambda _, original, masked: change(original(masked))}


# ---- The causal mask -------------------------------------------------------------------------------------------------


def causal(case: Case) -> Iterator[Mistake]:
    is_causal = case.is_causal or case.is_cached or case.window_size is not None
    if is_causal:
        yield _off_by_one()
        yield _excludes_self()
    is_square = case.seq_len == case.key_len and not case.is_cached and case.seq_len > 1
    is_triangle = is_square and is_causal
    if is_triangle:
        yield _transposed()
    if (is_triangle and case.key_padding_lengths) or (is_square and case.random_mask):
        yield _all_transposed()
    if case.is_cached:
        yield _top_left()
    if case.is_causal and case.key_len != case.seq_len:
        yield _bottom_right(case)
    reach = case.window_size or case.spec.window_size or case.spec.chunk_size
    is_beside = case.key_padding_lengths or case.random_mask or case.segment_ids
    if case.is_cached or (is_causal and reach) or (case.is_causal and is_beside):
        yield _causal_ignored()
    if not (is_causal or case.random_mask) and case.seq_len > 1:
        yield _unasked()


def _off_by_one() -> Mistake:
    return Mistake(
        "causal-off-by-one",
        "each token sees the next one, too: the causal mask is one late",
        "hide every key whose position is greater than the query's: s > t",
        "causal-alignment",
        ("mask",),
        {"is_later": instead(lambda t, s: s > t + 1)},
    )


def _excludes_self() -> Mistake:
    return Mistake(
        "causal-excludes-self",
        "no token sees itself: the causal mask is one early",
        "hide every key whose position is greater than the query's: s > t, not s >= t",
        "causal-alignment",
        ("mask",),
        {"is_later": instead(lambda t, s: s >= t)},
    )


def _transposed() -> Mistake:
    return Mistake(
        "causal-transposed",
        "each token sees itself and those after it: the causal mask is transposed",
        "hide every key whose position is greater than the query's, s > t: the upper triangle, without the diagonal",
        "causal-alignment",
        ("mask",),
        {"is_later": instead(lambda t, s: s < t)},
    )


def _all_transposed() -> Mistake:
    return Mistake(
        "mask-transposed",
        "the whole mask is transposed, (B, N, S, T) for (B, N, T, S)",
        "let rows of a mask be queries, and columns keys",
        "mask-polarity",
        ("mask",),
        {"hidden": lambda _, original, masked: original(masked.swapaxes(2, 3))},
    )


def _top_left() -> Mistake:
    return Mistake(
        "causal-top-left",
        "the causal mask of new tokens is aligned to the first cached key, and not to their own positions",
        "let a new token see every key up to its own position: those cached before it, too",
        "causal-alignment",
        ("mask",),
        {"is_later": instead(lambda t, s: s > t - t[:, :, :1])},
    )


def _bottom_right(case: Case) -> Mistake:
    return Mistake(
        "causal-bottom-right",
        "the causal mask is aligned to the last key, and not to the first",
        "count positions from the first key: query i sees keys 0 … i",
        "causal-alignment",
        ("mask",),
        {"is_later": instead(lambda t, s: s > t + case.key_len - case.seq_len)},
    )


def _causal_ignored() -> Mistake:
    def is_later(t: np.ndarray, s: np.ndarray) -> np.ndarray:
        """In a call with a cache, what lies after all of its tokens: slots that are not filled."""
        return s > (t.max(axis=2, keepdims=True) if t.ndim == 4 else np.full_like(t, s.max()))

    return Mistake(
        "causal-ignored",
        "the causal mask is missing from the others",
        "hide what any of the masks hides",
        "mask-ignored",
        ("mask",),
        {"is_later": instead(is_later)},
    )


def _unasked() -> Mistake:
    def hidden(_: Layer, original: Any, masked: np.ndarray) -> np.ndarray:
        t, s = np.arange(masked.shape[2])[:, None], np.arange(masked.shape[3])
        return original(masked | (s > t))

    return Mistake(
        "causal-unasked",
        "a causal mask is used that nobody asked for",
        "leave out the causal mask: every token may see every other",
        "causal-alignment",
        ("mask",),
        {"hidden": hidden},
    )


# ---- Padding and windows ---------------------------------------------------------------------------------------------


def padding(case: Case) -> Iterator[Mistake]:
    if case.key_padding_lengths is None:
        return
    if case.is_causal or case.random_mask or case.window_size is not None or case.segment_ids:
        yield Mistake(
            "padding-ignored",
            "padding is not hidden",
            "hide the keys from each sequence's own length on",
            "padding",
            ("mask",),
            {"is_padding": instead(lambda s, lengths: np.zeros(np.broadcast_shapes(s.shape, lengths.shape), bool))},
        )
    yield Mistake(
        "padding-on-the-left",
        "padding is hidden on the left, and lies on the right",
        "hide the keys from each sequence's own length on, or move the tokens to the other end",
        "padding",
        ("mask",),
        {"is_padding": instead(lambda s, lengths: s < case.key_len - lengths)},
    )

    yield _padding_shifted("one", "shows one padding key", 1)
    yield _padding_shifted("minus-one", "hides one real key", -1)
    yield from _padding_of_others(case.key_padding_lengths, case.key_len)
    if case.key_len == case.seq_len:
        yield Mistake(
            "padding-of-queries",
            "the queries of padding are hidden from, and not its keys",
            "hide the keys of padding from every query: (B, 1, 1, S)",
            "padding",
            ("mask",),
            {"is_padding": lambda _, original, s, lengths: original(s, lengths).swapaxes(2, 3)},
        )


def _padding_of_others(lengths: tuple[int, ...], key_len: int) -> Iterator[Mistake]:
    """Every sequence with the length of another."""
    count = len(lengths)
    told = {lengths, (key_len,) * count}  # the second of them is padding-ignored
    for name, words, wrong, changed in (
        ("the-longest", "the longest one", (max(lengths),) * count, lambda x: np.full_like(x, x.max())),
        ("the-shortest", "the shortest one", (min(lengths),) * count, lambda x: np.full_like(x, x.min())),
        ("the-other", "the one before it", (*lengths[-1:], *lengths[:-1]), lambda x: np.roll(x, 1, axis=0)),
        ("the-first", "the first one", lengths[:1] * count, lambda x: np.repeat(x[:1], len(x), axis=0)),
    ):
        if wrong not in told:
            told.add(wrong)
            yield Mistake(
                f"padding-of-{name}",
                f"each sequence has the padding of {words}",
                "hide the keys from each sequence's own length on, row b of the mask for sequence b",
                "padding",
                ("mask",),
                {"is_padding": lambda _, original, s, x, changed=changed: original(s, changed(x))},
            )


def _padding_shifted(by: str, words: str, step: int) -> Mistake:
    return Mistake(
        f"padding-off-by-{by}",
        f"the padding mask {words}",
        "hide the keys from the length on: s >= length",
        "padding",
        ("mask",),
        {"is_padding": instead(lambda s, lengths: s >= lengths + step)},
    )


def window(case: Case) -> Iterator[Mistake]:
    if case.window_size is None:
        return
    for word, step in (("wide", 1), ("narrow", -1)):
        yield _window_shifted(word, step)
    yield Mistake(
        "window-ignored",
        "the window is ignored, only later keys are hidden",
        "hide the keys at t - window_size and before",
        "sliding-window",
        ("mask",),
        {"is_before_window": instead(lambda t, s, size: np.zeros(np.broadcast_shapes(t.shape, s.shape), bool))},
    )


def _window_shifted(word: str, step: int) -> Mistake:
    return Mistake(
        f"window-one-too-{word}",
        f"the sliding window is one too {word}",
        WINDOW.fix,
        "sliding-window",
        ("mask",),
        {"is_before_window": instead(lambda t, s, size: s <= t - size - step)},
    )


def reach(case: Case) -> Iterator[Mistake]:
    """A layer's own window, or its chunks."""
    size = case.spec.window_size
    if size is not None:
        hides = "hide the keys at t - window_size and before, and those at t + window_size and after"
        for word, step in (("wide", 1), ("narrow", -1)):
            yield Mistake(
                f"window-one-too-{word}",
                f"the sliding window is one too {word}",
                hides,
                "sliding-window",
                ("mask",),
                _of_window(size + step),
            )
        seen = instead(lambda t, s, size: np.zeros(np.broadcast_shapes(t.shape, s.shape), bool))
        yield Mistake(
            "window-ignored",
            "the window is ignored",
            hides,
            "sliding-window",
            ("mask",),
            {"is_before_window": seen, "is_after_window": seen},
        )
    if case.spec.chunk_size is not None:
        yield from _chunks(case.spec.chunk_size)


def _of_window(size: int) -> dict[str, Override]:
    """The reference with a window of another size."""
    return {
        "is_before_window": instead(lambda t, s, _: s <= t - size),
        "is_after_window": instead(lambda t, s, _: s >= t + size),
    }


def _chunks(size: int) -> Iterator[Mistake]:
    def mistake(name: str, about: str, in_reference: Any) -> Mistake:
        fix = "hide the keys of other chunks: those for which s // chunk_size is not t // chunk_size"
        overrides = {"is_in_another_chunk": instead(in_reference)}
        return Mistake(name, about, fix, "sliding-window", ("mask",), overrides)

    yield mistake(
        "chunk-ignored",
        "the chunks are ignored",
        lambda t, s, _: np.zeros(np.broadcast_shapes(t.shape, s.shape), bool),
    )
    yield mistake(
        "chunk-as-window",
        "each token sees a sliding window as long as a chunk, and not its own chunk",
        lambda t, s, _: (s <= t - size) | (s >= t + size),
    )
    yield mistake(
        "chunk-one-late",
        "the chunks are counted from the second token",
        lambda t, s, _: (t - 1) // size != (s - 1) // size,
    )
