"""Mistakes in masks: how they are made, and how they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parity.core.cases import Case
from parity.core.reference import Layer
from parity.core.stages import Values
from parity.diagnosis.mistakes.families import WINDOW
from parity.diagnosis.mistakes.record import Mistake, Override, Plan, breaking, instead

# ---- Any mask --------------------------------------------------------------------------------------------------------


def used_or_made(case: Case) -> Iterator[Mistake]:
    """A mask that is made as it should be and used otherwise, which is the more usual, or made otherwise."""
    if case.has_mask or case.is_cached:
        yield _flipped("used", ("attn_weights",), _using(np.logical_not), breaking(masked_softmax=_softmax_flipped))
        yield _ignored(
            "the mask is ignored", ("attn_weights",), _using(np.zeros_like), breaking(masked_softmax=_softmax_unmasked)
        )
        # What is made otherwise is planted mask by mask, below.
        yield _flipped("made", ("mask",), _making(np.logical_not), None)
        yield _ignored("the mask is empty", ("mask",), _making(np.zeros_like), None)
    if case.segment_ids is not None:
        yield Mistake(
            "segment-ids-ignored",
            "sequences that are packed in a row attend to each other",
            "hide the keys of other segments: those whose id is not the query's",
            "mask-ignored",
            ("mask",),
            {"is_in_another_segment": instead(lambda ids: np.zeros((*ids.shape[:2], 1, 1), bool))},
            breaking(create_attention_mask=lambda _, f, t, s, **options: f(t, s, **{**options, "segment_ids": None})),
        )


def _flipped(where: str, stages: tuple[str, ...], in_reference: dict[str, Override], in_sibling: Any) -> Mistake:
    return Mistake(
        "mask-flipped",
        f"the mask is {where} with the other polarity",
        "True hides a key here; PyTorch's SDPA, JAX and Flax show it: use ~mask at the one edge between them",
        "mask-polarity",
        stages,
        in_reference,
        in_sibling,
    )


def _ignored(about: str, stages: tuple[str, ...], in_reference: dict[str, Override], in_sibling: Any) -> Mistake:
    return Mistake(
        "mask-ignored",
        about,
        "pass the mask on, on every path (with weights, without, cached)",
        "mask-ignored",
        stages,
        in_reference,
        in_sibling,
    )


def _using(change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Override]:
    def attn_weights(_: Layer, original: Any, values: Values) -> dict[str, np.ndarray]:
        return original({**values, "mask": change(values["mask"])})

    return {"attn_weights": attn_weights}


def _making(change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Override]:
    return {"hidden": lambda _, original, masked: change(original(masked))}


def _softmax_flipped(_: Plan, masked_softmax: Any, scores: Any, mask: Any = None, *sinks: Any) -> Any:
    return masked_softmax(scores, None if mask is None else ~mask, *sinks)


def _softmax_unmasked(_: Plan, masked_softmax: Any, scores: Any, mask: Any = None, *sinks: Any, **options: Any) -> Any:
    return masked_softmax(scores, None, *sinks, **options)


# ---- The causal mask -------------------------------------------------------------------------------------------------


def causal(case: Case) -> Iterator[Mistake]:
    is_causal = case.is_causal or case.is_cached or case.window_size is not None
    if is_causal:
        yield _off_by_one(case)
        yield _excludes_self(case)
    is_square = case.seq_len == case.key_len and not case.is_cached and case.seq_len > 1
    if is_square and (case.is_causal or case.window_size is not None):
        yield _transposed(case)
        if case.key_padding_lengths or case.random_mask:
            yield _all_transposed()
    elif is_square and case.random_mask:
        yield _all_transposed(is_planted=False)
    if case.is_cached:
        yield _top_left()
    if case.is_causal and case.key_len != case.seq_len:
        yield _bottom_right(case)
    reach = case.window_size or case.spec.window_size or case.spec.chunk_size
    if case.is_causal and (case.key_padding_lengths or case.random_mask or case.segment_ids):
        yield _causal_ignored()
    elif case.is_cached or (is_causal and reach):
        yield _causal_ignored(is_planted=False)
    if not (is_causal or case.random_mask) and case.seq_len > 1:
        yield _unasked()


def _off_by_one(case: Case) -> Mistake:
    return Mistake(
        "causal-off-by-one",
        "each token sees the next one, too: the causal mask is one late",
        "hide every key whose position is greater than the query's: s > t",
        "causal-alignment",
        ("mask",),
        {"is_later": instead(lambda t, s: s > t + 1)},
        _where_it_is_made(
            case,
            cached=lambda _, f, lengths, t, s, **options: f(lengths, t + 1, s, **options)[:, :, 1:],
            window=lambda distance, size: (distance < -1) | (distance >= size),
            causal=lambda _, f, t, s: f(t + 1, s)[1:],
        ),
    )


def _excludes_self(case: Case) -> Mistake:
    def one_early(plan: Plan, original: Any, *inputs: Any, **options: Any) -> Any:
        """A mask that hides one key more in each row."""
        mask = original(*inputs, **options)
        return plan.xp.concatenate([mask[..., 1:], mask[..., :1] | True], axis=-1)

    return Mistake(
        "causal-excludes-self",
        "no token sees itself: the causal mask is one early",
        "hide every key whose position is greater than the query's: s > t, not s >= t",
        "causal-alignment",
        ("mask",),
        {"is_later": instead(lambda t, s: s >= t)},
        _where_it_is_made(
            case,
            cached=one_early,
            window=lambda distance, size: (distance <= 0) | (distance >= size),
            causal=one_early,
        ),
    )


def _transposed(case: Case) -> Mistake:
    return Mistake(
        "causal-transposed",
        "each token sees itself and those after it: the causal mask is transposed",
        "hide every key whose position is greater than the query's, s > t: the upper triangle, without the diagonal",
        "causal-alignment",
        ("mask",),
        {"is_later": instead(lambda t, s: s < t)},
        _where_it_is_made(
            case,
            cached=lambda _, f, *inputs, **options: f(*inputs, **options),
            window=lambda distance, size: (distance > 0) | (distance >= size),
            causal=lambda _, f, t, s: f(t, s).T,
        ),
    )


def _all_transposed(*, is_planted: bool = True) -> Mistake:
    def create_attention_mask(_: Plan, original: Any, *inputs: Any, **options: Any) -> Any:
        return original(*inputs, **options).swapaxes(-1, -2)

    return Mistake(
        "mask-transposed",
        "the whole mask is transposed, (B, N, S, T) for (B, N, T, S)",
        "let rows of a mask be queries, and columns keys",
        "mask-polarity",
        ("mask",),
        {"hidden": lambda _, original, masked: original(masked.swapaxes(2, 3))},
        breaking(create_attention_mask=create_attention_mask) if is_planted else None,
    )


def _top_left() -> Mistake:
    return Mistake(
        "causal-top-left",
        "the causal mask of new tokens is aligned to the first cached key, and not to their own positions",
        "let a new token see every key up to its own position: those cached before it, too",
        "causal-alignment",
        ("mask",),
        {"is_later": instead(lambda t, s: s > t - t[:, :, :1])},
        breaking(create_cache_mask=lambda _, f, lengths, t, s, **options: f(lengths * 0, t, s, **options)),
    )


def _bottom_right(case: Case) -> Mistake:
    return Mistake(
        "causal-bottom-right",
        "the causal mask is aligned to the last key, and not to the first",
        "count positions from the first key: query i sees keys 0 … i",
        "causal-alignment",
        ("mask",),
        {"is_later": instead(lambda t, s: s > t + case.key_len - case.seq_len)},
        _joining(causal=lambda _, f, t, s: f(s, s)[s - t :]),
    )


def _causal_ignored(*, is_planted: bool = True) -> Mistake:
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
        _joining(causal=lambda _, f, t, s: f(t, s) & False) if is_planted else None,
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
        breaking(create_attention_mask=lambda _, f, t, s=None, **options: f(t, s, **{**options, "is_causal": True})),
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
            _joining(padding=lambda _, f, lengths, s: f(lengths, s) & False),
        )
    yield Mistake(
        "padding-on-the-left",
        "padding is hidden on the left, and lies on the right",
        "hide the keys from each sequence's own length on, or move the tokens to the other end",
        "padding",
        ("mask",),
        {"is_padding": instead(lambda s, lengths: s < case.key_len - lengths)},
        _joining(padding=lambda _, f, lengths, s: f(lengths, s)[..., np.arange(s)[::-1].copy()]),
    )

    def one_later(plan: Plan, original: Any, lengths: Any, s: int) -> Any:
        mask = original(lengths, s)
        return plan.xp.concatenate([mask[..., -1:] & False, mask[..., :-1]], axis=-1)

    def one_earlier(plan: Plan, original: Any, lengths: Any, s: int) -> Any:
        mask = original(lengths, s)
        return plan.xp.concatenate([mask[..., 1:], mask[..., -1:] | True], axis=-1)

    yield _padding_shifted("one", "shows one padding key", 1, one_later)
    yield _padding_shifted("minus-one", "hides one real key", -1, one_earlier)
    yield from _padding_of_others(case.key_padding_lengths, case.key_len)
    if case.key_len == case.seq_len:
        yield Mistake(
            "padding-of-queries",
            "the queries of padding are hidden from, and not its keys",
            "hide the keys of padding from every query: (B, 1, 1, S)",
            "padding",
            ("mask",),
            {"is_padding": lambda _, original, s, lengths: original(s, lengths).swapaxes(2, 3)},
            _joining(padding=lambda _, f, lengths, s: f(lengths, s)[:, :, 0, :, None]),
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
                _joining(padding=lambda _, f, x, s, wrong=wrong: f(wrong, s)),
            )


def _padding_shifted(by: str, words: str, step: int, planted: Override) -> Mistake:
    return Mistake(
        f"padding-off-by-{by}",
        f"the padding mask {words}",
        "hide the keys from the length on: s >= length",
        "padding",
        ("mask",),
        {"is_padding": instead(lambda s, lengths: s >= lengths + step)},
        _joining(padding=planted),
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
        _hiding(lambda distance, size: distance < 0),
    )


def _window_shifted(word: str, step: int) -> Mistake:
    return Mistake(
        f"window-one-too-{word}",
        f"the sliding window is one too {word}",
        WINDOW.fix,
        "sliding-window",
        ("mask",),
        {"is_before_window": instead(lambda t, s, size: s <= t - size - step)},
        _hiding(lambda distance, size: (distance < 0) | (distance >= size + step)),
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
                _with_reach(window_size=size + step),
            )
        seen = instead(lambda t, s, size: np.zeros(np.broadcast_shapes(t.shape, s.shape), bool))
        yield Mistake(
            "window-ignored",
            "the window is ignored",
            hides,
            "sliding-window",
            ("mask",),
            {"is_before_window": seen, "is_after_window": seen},
            _with_reach(),
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
    def mistake(name: str, about: str, in_reference: Any, in_sibling: Callable[[Plan], None]) -> Mistake:
        fix = "hide the keys of other chunks: those for which s // chunk_size is not t // chunk_size"
        overrides = {"is_in_another_chunk": instead(in_reference)}
        return Mistake(name, about, fix, "sliding-window", ("mask",), overrides, in_sibling)

    yield mistake(
        "chunk-ignored",
        "the chunks are ignored",
        lambda t, s, _: np.zeros(np.broadcast_shapes(t.shape, s.shape), bool),
        _with_reach(),
    )
    yield mistake(
        "chunk-as-window",
        "each token sees a sliding window as long as a chunk, and not its own chunk",
        lambda t, s, _: (s <= t - size) | (s >= t + size),
        _with_reach(window_size=size),
    )
    yield mistake(
        "chunk-one-late",
        "the chunks are counted from the second token",
        lambda t, s, _: (t - 1) // size != (s - 1) // size,
        _with_reach(lambda t, s: (t - 1) // size != (s - 1) // size),
    )


# ---- Masks of siblings -----------------------------------------------------------------------------------------------


def _where_it_is_made(
    case: Case, *, cached: Override, window: Callable[[Any, int], Any], causal: Override
) -> Callable[[Plan], None]:
    """Plants a wrong causal mask in the function that makes it in a case."""
    if case.is_cached:
        return breaking(create_cache_mask=cached)
    return _joining(causal=causal) if case.window_size is None else _hiding(window)


def _joining(**overrides: Override) -> Callable[[Plan], None]:
    """Plants a mask for causality and padding, made of one for each of them; `causal`, `padding`: how it is made."""

    def create_attention_mask(
        plan: Plan,
        whole: Any,
        t: int,
        s: int,
        *,
        is_causal: bool = False,
        key_padding_lengths: Any = None,
        **reach: int,
    ) -> Any:
        def made(name: str, original: Any, *inputs: Any) -> Any:
            return overrides[name](plan, original, *inputs) if name in overrides else original(*inputs)

        mask = whole(t, s, **reach)
        if is_causal:
            mask = mask | made("causal", plan.sibling.create_causal_mask, t, s)[None, None]
        if key_padding_lengths is not None:
            mask = mask | made("padding", plan.sibling.create_padding_mask, key_padding_lengths, s)
        return mask

    return breaking(create_attention_mask=create_attention_mask)


def _with_reach(hides: Callable[[Any, Any], Any] | None = None, **reach: int) -> Callable[[Plan], None]:
    """Plants another reach of the layer, by the sibling's own words or by what is hidden of places and keys."""

    def create_attention_mask(plan: Plan, original: Any, t: int, s: int, **options: Any) -> Any:
        mask = original(t, s, **{**options, "window_size": None, "chunk_size": None, **reach})
        return mask if hides is None else mask | hides(plan.xp.arange(t)[:, None], plan.xp.arange(s)[None])[None, None]

    def create_cache_mask(plan: Plan, original: Any, lengths: Any, t: int, s: int, **_: Any) -> Any:
        mask = original(lengths, t, s, **reach)
        if hides is None:
            return mask
        places = lengths[:, None, None, None] + plan.xp.arange(t)[None, None, :, None]
        return mask | hides(places, plan.xp.arange(s)[None, None, None])

    return breaking(create_attention_mask=create_attention_mask, create_cache_mask=create_cache_mask)


def _hiding(hides: Callable[[Any, int], Any]) -> Callable[[Plan], None]:
    """Plants a window that hides the keys at some distances before a query."""

    def create_sliding_window_mask(
        plan: Plan, _: Any, t: int, s: int | None = None, *, window_size: int, **__: Any
    ) -> Any:
        distance = plan.xp.arange(t)[:, None] - plan.xp.arange(t if s is None else s)[None, :]
        return hides(distance, window_size)

    return breaking(create_sliding_window_mask=create_sliding_window_mask)
