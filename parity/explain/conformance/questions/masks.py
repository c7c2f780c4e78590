"""Masks, the causal flag and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parity.explain.conformance.answers import Answer, Finding, Kind, Question, asks
from parity.explain.conformance.calls import Refused, run
from parity.explain.conformance.examination import (
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


def _leak(
    exam: Examination,
    path: Path,
    inputs: Inputs,
    token: int,
    rows: Sequence[int],
    about: str,
    **options: Any,
) -> Finding | None:
    """Check whether rows change with a token that is hidden from them, completely or by a finite
    penalty.
    """
    leaks, seen = exam.moved(path, inputs, perturbed(inputs, token, path), rows, **options)
    if not leaks:
        return None
    is_open, _ = exam.moved(
        path, inputs, perturbed(inputs, token, path, scale=USUAL), rows, **options
    )
    return Finding(
        "leaks" if is_open else _penalty(exam, **options), Kind.BROKEN, f"{about}: {seen}"
    )


def _penalty(exam: Examination, **options: Any) -> str:
    """Describe the finite penalty of hidden keys; for split heads, with its size."""
    if exam.subject.is_layer:
        return "a finite penalty"
    query, key, value = exam.inputs()
    hidden = options.get("hidden")
    row, token = (
        (0, TOKENS - 1) if hidden is None or hidden[0, -1] else map(int, np.argwhere(hidden)[0])
    )
    before = exam.run(exam.base, (query, key, value), **options).output[..., row, :]

    def outweighs(score: float) -> bool:
        others, one = key.copy(), query[..., row, :]
        others[..., token, :] = (
            one * score * np.sqrt(one.shape[-1]) / np.sum(one**2, -1, keepdims=True)
        )
        after = exam.run(exam.base, (query, others, value), **options).output[..., row, :]
        return bool(np.abs(after - value[..., token, :]).max() < np.abs(after - before).max())

    least, most = 1.0, MOST_PENALTY
    if outweighs(least) or not outweighs(most):
        return "a finite penalty"
    while most / least > 1.1:
        middle = (least * most) ** 0.5
        least, most = (least, middle) if outweighs(middle) else (middle, most)
    return f"a finite penalty of about {-float(f'{most:.0e}'):g}"


@asks(
    "mask",
    "which keys does a boolean mask with one True hide?",
    lambda exam: "mask" in exam.subject.takes,
)
def mask(exam: Examination, question: Question) -> Answer:
    polarity, claimed = exam.polarity, exam.subject.mask_true
    if not exam.takes_mask:
        return exam.only(question, replace(polarity, words=f"mask {polarity.words}"))
    words = f"True {polarity.words}"
    if claimed is not None and claimed != polarity.words:
        return exam.only(
            question, replace(polarity, words=f"{words}, declared: {claimed}", kind=Kind.BROKEN)
        )
    floats = _floats(exam)
    return Answer(question.name, floats.kind, f"{words}; {floats}")


def _floats(exam: Examination) -> Finding:
    """Determine the effect of a floating-point mask: 1 for True, or large negative numbers."""
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[:, 2] = True
    inputs = exam.inputs()
    wanted = exam.run(exam.base, inputs, hidden).output
    additive = np.where(hidden, np.float32(-1e30), np.float32(0.0))[None, None]
    as_booleans, added = Finding("floats as booleans"), Finding("floats added", Kind.NOTE)
    for finding, mask in ((as_booleans, exam.mask(hidden).astype(np.float32)), (added, additive)):
        try:
            output = run(exam.subject, exam.base, inputs, mask=mask).output
        except Refused:
            return Finding("floats refused")
        if np.abs(output - wanted).max() <= tolerance(wanted, exam.base.dtype):
            return finding
    return Finding("floats taken for something else", Kind.NOTE)


@asks(
    "causal",
    f"which of {TOKENS} keys does each of {FEW_TOKENS} queries attend to with the causal flag?",
    lambda exam: "is_causal" in exam.subject.takes,
)
def causal(exam: Examination, question: Question) -> Answer:
    subject = exam.subject
    if "key" not in subject.takes:
        return Answer(question.name, Kind.KEPT, "T = S only")
    inputs = exam.inputs(TOKENS, FEW_TOKENS)

    def ask_with(path: Path, scale: float | None = None) -> tuple[str | None, np.ndarray]:
        before = exam.run(path, inputs, is_causal=True).output
        sees = np.zeros((FEW_TOKENS, TOKENS), bool)
        for s in range(TOKENS):
            after = exam.run(path, perturbed(inputs, s, path, "kv", scale), is_causal=True).output
            sees[:, s] = changed_rows(before, after, path)
        offset = TOKENS - FEW_TOKENS
        known = {
            "top-left": np.tri(FEW_TOKENS, TOKENS),
            "bottom-right": np.tri(FEW_TOKENS, TOKENS, offset),
        }
        return next(
            (words for words, triangle in known.items() if (sees == triangle.astype(bool)).all()),
            None,
        ), sees

    def ask(path: Path) -> Finding:
        found, sees = ask_with(path)
        rows = "; ".join(
            f"query {t} attends to {np.flatnonzero(sees[t]).tolist()}" for t in range(FEW_TOKENS)
        )
        if found is None and (small := ask_with(path, USUAL)[0]):
            return Finding(
                f"{small}, by {_penalty(exam, is_causal=True)}",
                Kind.BROKEN,
                f"for large keys {rows}",
            )
        if found is None:
            return Finding("all keys seen" if sees.all() else "neither triangle", Kind.BROKEN, rows)
        if subject.causal is not None and subject.causal != found:
            return Finding(f"{found}, declared: {subject.causal}", Kind.BROKEN, rows)
        return Finding(found, Kind.KEPT, rows)

    answer = exam.answer(
        question, ask, exam.plain_paths, f"{describe_shapes(inputs)}, is_causal=True"
    )
    return (
        replace(answer, words="refused without a mask") if answer.kind is Kind.REFUSED else answer
    )


@asks("causal and mask", "do the causal flag and a mask both hold?")
def causal_and_mask(exam: Examination, question: Question) -> Answer:
    takes_flag = "is_causal" in exam.subject.takes
    if "mask" not in exam.subject.takes or not (takes_flag or exam.is_causal_itself):
        return question.not_offered
    inputs = exam.inputs()
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[2:, 1] = True
    options: dict[str, Any] = {"hidden": hidden, "is_causal": takes_flag}

    def ask(path: Path) -> Finding:
        for token, rows, what, about in (
            (1, [2, 3, 4], "mask", "token 1, hidden by the mask, is changed"),
            (4, [0, 1, 2, 3], "causal", "token 4 is changed"),
        ):
            if leak := _leak(exam, path, inputs, token, rows, about, **options):
                return replace(
                    leak,
                    words=f"{what} dropped" if leak.words == "leaks" else f"{what} by {leak.words}",
                )
        return Finding("both")

    return exam.answer(question, ask)


@asks("future token", "does a later token change an earlier output, under causal attention?")
def future_token(exam: Examination, question: Question) -> Answer:
    takes = exam.subject.takes
    ways: dict[str, dict[str, Any]] = {}
    if exam.is_causal_itself:
        ways["no mask"] = {}
    if "is_causal" in takes:
        ways["is_causal=True"] = {"is_causal": True}
    if exam.takes_mask:
        ways["a causal mask"] = {"hidden": ~np.tri(TOKENS, dtype=bool)}
    if not ways:
        return question.not_offered
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        refusals = []
        for way, options in ways.items():
            try:
                about = f"token {TOKENS - 1} is changed, with {way}"
                if leak := _leak(
                    exam, path, inputs, TOKENS - 1, range(TOKENS - 1), about, **options
                ):
                    return leak
                if np.isnan(exam.run(path, inputs, **options).output[..., :-1, :]).any():
                    return Finding("NaN", Kind.BROKEN, f"the output is NaN, with {way}")
            except Refused as refused:
                refusals.append(refused)
        if len(refusals) == len(ways):
            raise refusals[0]
        return Finding("hidden")

    return exam.answer(question, ask)


@asks(
    "masked key",
    "does a token that the mask hides from all change another's output?",
    lambda exam: exam.takes_mask,
)
def masked_key(exam: Examination, question: Question) -> Answer:
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[:, 2] = True
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        about = "token 2, hidden from all, is changed"
        return _leak(exam, path, inputs, 2, [0, 1, 3, 4], about, hidden=hidden) or Finding("hidden")

    return exam.answer(question, ask)


@asks(
    "padding",
    "does a padded token change the output of a real one?",
    lambda exam: exam.subject.padding is not None,
)
def padding(exam: Examination, question: Question) -> Answer:
    kind = exam.subject.padding
    inputs = exam.inputs()
    lengths = np.full(BATCH, TOKENS, np.int32)
    lengths[0] = 3  # only the first sequence is padded
    hidden = np.arange(TOKENS) >= lengths[:, None]
    ways = (
        {"by lengths": lengths}
        if kind == "lengths"
        else {"True hides": hidden, "True shows": ~hidden}
    )
    real, last = range(3), TOKENS - 1

    def ask_with(path: Path, scale: float | None = None) -> tuple[str, str]:
        def with_other_keys(x: np.ndarray) -> np.ndarray:
            others = perturbed(perturbed((x, x, x), 3, path, scale=scale), last, path, scale=scale)[
                0
            ]
            others[1:, ..., last, :] = x[
                1:, ..., last, :
            ]  # the last output shows whether key 3 has an effect
            return others

        others = mapped(inputs, with_other_keys)
        seen = ""
        for words, padding in ways.items():
            before, after = (
                exam.run(path, given, padding=padding).output for given in (inputs, others)
            )
            leaks, seen = change(before[:1, ..., :3, :], after[:1, ..., :3, :], path, real)
            feels, _ = change(before[1:, ..., [last], :], after[1:, ..., [last], :], path, [last])
            if feels and not leaks and np.isfinite(before[:, ..., :3, :]).all():
                return words, seen
        return "", seen

    def ask(path: Path) -> Finding:
        words, seen = ask_with(path)
        if words:
            return Finding(words)
        seen = f"tokens 3 and 4, the padding of sequence 0, are changed: {seen}"
        if words := ask_with(path, USUAL)[0]:
            return Finding(f"{words}, by a finite penalty", Kind.BROKEN, seen)
        return Finding("leaks", Kind.BROKEN, seen)

    return exam.answer(question, ask)
