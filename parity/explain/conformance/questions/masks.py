"""Masks, the causal flag and padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parity.explain.conformance.answers import Answer, Kind, PathAnswer, Question, asks
from parity.explain.conformance.calls import RejectedCall, run
from parity.explain.conformance.examination import (
    FUTURE_KEYS,
    Examination,
    change,
    changed_rows,
    describe_shapes,
    mapped,
    perturbed,
    tolerance,
)
from parity.explain.conformance.subjects import BATCH, FEW_TOKENS, TOKENS, Inputs, Path

USUAL = 3.0
"""Size of a token that any usable finite penalty outweighs."""

MOST_PENALTY = 1e9
"""The largest penalty that is measured; the perturbations do not outweigh larger ones."""


def _hidden_key(token: int) -> np.ndarray:
    """Return a mask (T, S) that hides a key from all queries."""
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[:, token] = True
    return hidden


# ---- Leaks and penalties -------------------------------------------------------------------------


def _leak(
    exam: Examination,
    path: Path,
    inputs: Inputs,
    token: int,
    rows: Sequence[int],
    about: str,
    **options: Any,
) -> PathAnswer | None:
    """Check whether rows change with a token that is hidden from them, completely or by a finite
    penalty.
    """
    large = perturbed(inputs, token, path)
    leaks, difference = exam.moved(path, inputs, large, rows, **options)
    if not leaks:
        return None
    words = "leaks"
    usual = perturbed(inputs, token, path, scale=USUAL)
    is_open, _ = exam.moved(path, inputs, usual, rows, **options)
    if not is_open:
        words = _penalty(exam, **options)
    return PathAnswer(words, Kind.BROKEN, f"{about}: {difference}")


def _penalty(exam: Examination, **options: Any) -> str:
    """Describe the finite penalty of hidden keys; for split heads, with its size."""
    if exam.subject.is_layer:
        return "a finite penalty"
    row, token = _first_hidden(options.get("hidden"))
    before = exam.run(exam.base, exam.inputs(), **options).output[..., row, :]
    outweighs = partial(_outweighs, exam, row, token, before, options)
    lower, upper = 1.0, MOST_PENALTY
    if outweighs(lower) or not outweighs(upper):
        return "a finite penalty"
    while upper / lower > 1.1:
        middle = (lower * upper) ** 0.5
        if outweighs(middle):
            upper = middle
        else:
            lower = middle
    return f"a finite penalty of about {-float(f'{upper:.0e}'):g}"


def _first_hidden(hidden: np.ndarray | None) -> tuple[int, int]:
    """Return a query and a key that is hidden from it, the last key if possible; it is hidden from
    the first query under causal attention also.
    """
    if hidden is None or hidden[0, -1]:
        return 0, TOKENS - 1
    row, token = np.argwhere(hidden)[0]
    return int(row), int(token)


def _outweighs(
    exam: Examination,
    row: int,
    token: int,
    before: np.ndarray,
    options: Mapping[str, Any],
    score: float,
) -> bool:
    """Return whether a query attends to a hidden key if their score is that large."""
    query, key, value = exam.inputs()
    # A key parallel to the query, so that q . k / sqrt(H) is the score.
    one_query = query[..., row, :]
    squared_length = np.sum(one_query**2, -1, keepdims=True)
    other_key = key.copy()
    other_key[..., token, :] = one_query * score * np.sqrt(one_query.shape[-1]) / squared_length
    after = exam.run(exam.base, (query, other_key, value), **options).output[..., row, :]
    distance_to_value = np.abs(after - value[..., token, :]).max()
    return bool(distance_to_value < np.abs(after - before).max())


# ---- Masks ---------------------------------------------------------------------------------------


@asks("mask", "which keys does a boolean mask with one True hide?")
def mask(exam: Examination, question: Question) -> Answer:
    if "mask" not in exam.subject.takes:
        return question.not_offered
    polarity, claimed = exam.polarity, exam.subject.mask_true
    if not exam.takes_mask:
        return exam.only(question, replace(polarity, words=f"mask {polarity.words}"))
    words = f"True {polarity.words}"
    if claimed is not None and claimed != polarity.words:
        contradicted = f"{words}, declared: {claimed}"
        return exam.only(question, replace(polarity, words=contradicted, kind=Kind.BROKEN))
    floats = _floats(exam)
    return Answer(question.name, floats.kind, f"{words}; {floats}")


def _floats(exam: Examination) -> PathAnswer:
    """Determine the effect of a floating-point mask: 1 for True, or large negative values."""
    hidden = _hidden_key(2)
    inputs = exam.inputs()
    expected = exam.run(exam.base, inputs, hidden).output
    booleans = exam.mask(hidden).astype(np.float32)
    additive = np.where(hidden, np.float32(-1e30), np.float32(0.0))[None, None]
    for finding, float_mask in (
        (PathAnswer("floats as booleans"), booleans),
        (PathAnswer("floats added", Kind.NOTE), additive),
    ):
        try:
            output = run(exam.subject, exam.base, inputs, mask=float_mask).output
        except RejectedCall:
            return PathAnswer("floats rejected")
        if np.abs(output - expected).max() <= tolerance(expected, exam.base.dtype):
            return finding
    return PathAnswer("floats taken for something else", Kind.NOTE)


@asks("masked key", "does a token that the mask hides from all change another's output?")
def masked_key(exam: Examination, question: Question) -> Answer:
    if not exam.takes_mask:
        return question.not_offered
    inputs = exam.inputs()
    hidden = _hidden_key(2)

    def ask(path: Path) -> PathAnswer:
        about = "token 2, hidden from all, is changed"
        leak = _leak(exam, path, inputs, 2, [0, 1, 3, 4], about, hidden=hidden)
        return leak or PathAnswer("hidden")

    return exam.answer(question, ask)


# ---- Causal attention ----------------------------------------------------------------------------

TRIANGLES = {
    "top-left": np.tri(FEW_TOKENS, TOKENS, dtype=bool),
    "bottom-right": np.tri(FEW_TOKENS, TOKENS, TOKENS - FEW_TOKENS, dtype=bool),
}
"""The keys that each of few queries attends to, (T, S), by the alignment of the causal flag."""


@asks(
    "causal",
    f"which of {TOKENS} keys does each of {FEW_TOKENS} queries attend to with the causal flag?",
)
def causal(exam: Examination, question: Question) -> Answer:
    subject = exam.subject
    if "is_causal" not in subject.takes:
        return question.not_offered
    if "key" not in subject.takes:
        return Answer(question.name, Kind.OK, "T = S only")
    inputs = exam.inputs(TOKENS, FEW_TOKENS)

    def ask(path: Path) -> PathAnswer:
        visible = _visible_keys(exam, path, inputs)
        alignment = _alignment_of(visible)
        rows = []
        for t in range(FEW_TOKENS):
            rows.append(f"query {t} attends to {np.flatnonzero(visible[t]).tolist()}")
        evidence = "; ".join(rows)
        if alignment is None:
            usual_alignment = _alignment_of(_visible_keys(exam, path, inputs, USUAL))
            if usual_alignment is not None:
                words = f"{usual_alignment}, by {_penalty(exam, is_causal=True)}"
                return PathAnswer(words, Kind.BROKEN, f"for large keys {evidence}")
            if visible.all():
                return PathAnswer("all keys visible", Kind.BROKEN, evidence)
            return PathAnswer("neither triangle", Kind.BROKEN, evidence)
        if subject.causal is not None and subject.causal != alignment:
            return PathAnswer(f"{alignment}, declared: {subject.causal}", Kind.BROKEN, evidence)
        return PathAnswer(alignment, Kind.OK, evidence)

    about = f"{describe_shapes(inputs)}, is_causal=True"
    answer = exam.answer(question, ask, exam.plain_paths, about)
    if answer.kind is Kind.REJECTED:
        return replace(answer, words="rejected without a mask")
    return answer


def _visible_keys(
    exam: Examination, path: Path, inputs: Inputs, scale: float | None = None
) -> np.ndarray:
    """Return which outputs change with which key under the causal flag, (T, S)."""
    before = exam.run(path, inputs, is_causal=True).output
    visible = np.zeros((FEW_TOKENS, TOKENS), bool)
    for s in range(TOKENS):
        others = perturbed(inputs, s, path, "kv", scale)
        after = exam.run(path, others, is_causal=True).output
        visible[:, s] = changed_rows(before, after, path)
    return visible


def _alignment_of(visible: np.ndarray) -> str | None:
    """Return the alignment of a causal mask; None if it is not one."""
    for alignment, triangle in TRIANGLES.items():
        if (visible == triangle).all():
            return alignment
    return None


@asks("causal and mask", "do the causal flag and a mask both hold?")
def causal_and_mask(exam: Examination, question: Question) -> Answer:
    takes_flag = "is_causal" in exam.subject.takes
    if "mask" not in exam.subject.takes or not (takes_flag or exam.is_causal_itself):
        return question.not_offered
    inputs = exam.inputs()
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[2:, 1] = True
    options: dict[str, Any] = {"hidden": hidden, "is_causal": takes_flag}

    def ask(path: Path) -> PathAnswer:
        for name, token, rows, about in (
            ("mask", 1, [2, 3, 4], "token 1, hidden by the mask, is changed"),
            ("causal", 4, [0, 1, 2, 3], "token 4 is changed"),
        ):
            leak = _leak(exam, path, inputs, token, rows, about, **options)
            if leak is None:
                continue
            if leak.words == "leaks":
                return replace(leak, words=f"{name} dropped")
            return replace(leak, words=f"{name} by {leak.words}")
        return PathAnswer("both")

    return exam.answer(question, ask)


@asks("future token", "does a later token change an earlier output, under causal attention?")
def future_token(exam: Examination, question: Question) -> Answer:
    ways: dict[str, dict[str, Any]] = {}
    if exam.is_causal_itself:
        ways["no mask"] = {}
    if "is_causal" in exam.subject.takes:
        ways["is_causal=True"] = {"is_causal": True}
    if exam.takes_mask:
        ways["a causal mask"] = {"hidden": FUTURE_KEYS}
    if not ways:
        return question.not_offered
    inputs = exam.inputs()
    last = TOKENS - 1

    def ask(path: Path) -> PathAnswer:
        rejections = []
        for way, options in ways.items():
            about = f"token {last} is changed, with {way}"
            try:
                leak = _leak(exam, path, inputs, last, range(last), about, **options)
                if leak is not None:
                    return leak
                output = exam.run(path, inputs, **options).output
            except RejectedCall as rejected:
                rejections.append(rejected)
                continue
            if np.isnan(output[..., :-1, :]).any():
                return PathAnswer("NaN", Kind.BROKEN, f"the output is NaN, with {way}")
        if len(rejections) == len(ways):
            raise rejections[0]
        return PathAnswer("hidden")

    return exam.answer(question, ask)


# ---- Padding -------------------------------------------------------------------------------------

NUM_REAL = 3
"""Real tokens of sequence 0, the only one with padding."""


@asks("padding", "does a padded token change the output of a real one?")
def padding(exam: Examination, question: Question) -> Answer:
    if exam.subject.padding is None:
        return question.not_offered
    inputs = exam.inputs()

    def ask(path: Path) -> PathAnswer:
        words, difference = _working_padding(exam, path, inputs)
        if words:
            return PathAnswer(words)
        evidence = f"tokens 3 and 4, the padding of sequence 0, are changed: {difference}"
        words, _ = _working_padding(exam, path, inputs, USUAL)
        if words:
            return PathAnswer(f"{words}, by a finite penalty", Kind.BROKEN, evidence)
        return PathAnswer("leaks", Kind.BROKEN, evidence)

    return exam.answer(question, ask)


def _paddings(exam: Examination) -> dict[str, np.ndarray]:
    """Return the possible padding arguments, by how they are read."""
    lengths = np.full(BATCH, TOKENS, np.int32)
    lengths[0] = NUM_REAL
    if exam.subject.padding == "lengths":
        return {"by lengths": lengths}
    hidden = np.arange(TOKENS) >= lengths[:, None]
    return {"True hides": hidden, "True shows": ~hidden}


def _working_padding(
    exam: Examination, path: Path, inputs: Inputs, scale: float | None = None
) -> tuple[str, str]:
    """Return how a padding argument must be read so that it hides the padding and nothing else, or
    ""; and the largest change of a real token's output.
    """
    others = mapped(inputs, partial(_with_other_padding, path=path, scale=scale))
    last = TOKENS - 1
    difference = ""
    for words, argument in _paddings(exam).items():
        before = exam.run(path, inputs, padding=argument).output
        after = exam.run(path, others, padding=argument).output
        leaks, difference = change(
            before[:1, ..., :NUM_REAL, :], after[:1, ..., :NUM_REAL, :], path, range(NUM_REAL)
        )
        # In the other sequences key 3 is real, so that their last output must change.
        feels, _ = change(before[1:, ..., [last], :], after[1:, ..., [last], :], path, [last])
        if feels and not leaks and np.isfinite(before[:, ..., :NUM_REAL, :]).all():
            return words, difference
    return "", difference


def _with_other_padding(x: np.ndarray, path: Path, scale: float | None) -> np.ndarray:
    """Return an input with other tokens beyond the real ones of sequence 0, except for the last
    token of the other sequences.
    """
    last = TOKENS - 1
    other_inputs = (x, x, x)
    for token in (NUM_REAL, last):
        other_inputs = perturbed(other_inputs, token, path, scale=scale)
    other = other_inputs[0]
    other[1:, ..., last, :] = x[1:, ..., last, :]
    return other
