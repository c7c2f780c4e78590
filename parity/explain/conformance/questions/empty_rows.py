"""Outputs and gradients of fully masked rows."""

from __future__ import annotations

import numpy as np

from parity.explain.conformance.answers import Answer, Finding, Kind, Question, asks
from parity.explain.conformance.examination import Examination, change, mapped, numbers, tolerance
from parity.explain.conformance.subjects import SEED, TOKENS, Path

EMPTY_ROW = 1


def _hidden_row() -> np.ndarray:
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[EMPTY_ROW] = True
    return hidden


@asks("empty row", "what is the output of a fully masked row?", lambda exam: exam.takes_mask)
def empty_row(exam: Examination, question: Question) -> Answer:
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        hidden = _hidden_row()
        output = exam.run(path, inputs, hidden).output
        row = output[..., EMPTY_ROW, :]
        seen = (
            f"row {EMPTY_ROW} is fully masked; its output is "
            f"{numbers(row.reshape(-1, row.shape[-1])[0])}"
        )
        if np.isnan(row).any():
            everywhere = np.isnan(np.delete(output, EMPTY_ROW, axis=-2)).any()
            return Finding("NaN in all rows" if everywhere else "NaN", Kind.BROKEN, seen)

        others = exam.run(path, exam.inputs(seed=SEED + 2), hidden).output[..., [EMPTY_ROW], :]
        if not change(row[..., None, :], others, path, [EMPTY_ROW])[0]:
            if exam.subject.is_layer or not row.any():
                return Finding("zeros", Kind.KEPT, seen)
            return Finding("a constant", Kind.NOTE, seen)
        # Only the mean of the values is linear in the inputs, no other softmax. Scores stay so
        # small that a penalty of -1e9 rounds them away in float32.
        step = np.random.default_rng(SEED + 6).standard_normal(inputs[0].shape)
        up, down = (
            exam.run(path, mapped(inputs, lambda x, sign=sign: x + sign * step), hidden).output[
                ..., EMPTY_ROW, :
            ]
            for sign in (1.0, -1.0)
        )
        if np.abs(up + down - 2.0 * row).max() <= 4 * tolerance(up, path.dtype):
            return Finding("mean(V)", Kind.NOTE, seen)
        unmasked = exam.run(path, inputs).output[..., EMPTY_ROW, :]
        if (
            np.abs(unmasked - row).max() <= 0.01 * np.abs(row).max()
        ):  # the penalty costs scores their last digits
            return Finding("as if unmasked", Kind.BROKEN, seen)
        return Finding("something else", Kind.BROKEN, seen)

    return exam.answer(question, ask, exam.steady_paths)


@asks(
    "its gradient", "are the gradients of a fully masked row finite?", lambda exam: exam.takes_mask
)
def empty_row_gradient(exam: Examination, question: Question) -> Answer:
    if exam.subject.framework == "ttnn":
        return Answer(question.name, Kind.ABSENT, "no gradients")
    inputs = exam.inputs()

    def ask(path: Path) -> Finding:
        shape = exam.run(path, inputs, _hidden_row()).output.shape
        cotangent = np.random.default_rng(SEED + 3).standard_normal(shape)
        ignoring = cotangent.copy()
        ignoring[..., EMPTY_ROW, :] = 0.0
        for words, chosen in (("NaN even if the loss ignores it", ignoring), ("NaN", cotangent)):
            grads = exam.run(path, inputs, _hidden_row(), cotangent=chosen).grads
            counts = [int(np.count_nonzero(~np.isfinite(grad))) for grad in grads]
            if any(counts):
                total = sum(grad.size for grad in grads)
                return Finding(
                    words,
                    Kind.BROKEN,
                    f"{sum(counts)} of {total} gradients of the inputs are not finite",
                )
        return Finding("finite")

    return exam.answer(question, ask, [path for path in exam.steady_paths if path.grad])
