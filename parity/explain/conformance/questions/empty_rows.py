"""Outputs and gradients of fully masked rows."""

from __future__ import annotations

from functools import partial

import numpy as np

from parity.explain.conformance.answers import Answer, Kind, PathAnswer, Question, asks
from parity.explain.conformance.examination import Examination, change, mapped, numbers, tolerance
from parity.explain.conformance.subjects import SEED, TOKENS, Inputs, Path

EMPTY_ROW = 1


def _hidden_row() -> np.ndarray:
    hidden = np.zeros((TOKENS, TOKENS), bool)
    hidden[EMPTY_ROW] = True
    return hidden


def _row(exam: Examination, path: Path, inputs: Inputs) -> np.ndarray:
    """Return the output of the fully masked row, (…, width)."""
    return exam.run(path, inputs, _hidden_row()).output[..., EMPTY_ROW, :]


@asks("empty row", "what is the output of a fully masked row?")
def empty_row(exam: Examination, question: Question) -> Answer:
    if not exam.takes_mask:
        return question.not_offered
    inputs = exam.inputs()

    def ask(path: Path) -> PathAnswer:
        output = exam.run(path, inputs, _hidden_row()).output
        row = output[..., EMPTY_ROW, :]
        first_values = numbers(row.reshape(-1, row.shape[-1])[0])
        evidence = f"row {EMPTY_ROW} is fully masked; its output is {first_values}"
        if np.isnan(row).any():
            if np.isnan(np.delete(output, EMPTY_ROW, axis=-2)).any():
                return PathAnswer("NaN in all rows", Kind.BROKEN, evidence)
            return PathAnswer("NaN", Kind.BROKEN, evidence)
        if not _depends_on_inputs(exam, path, row):
            if exam.subject.is_layer or not row.any():
                return PathAnswer("zeros", Kind.OK, evidence)
            return PathAnswer("a constant", Kind.NOTE, evidence)
        if _is_mean_of_values(exam, path, inputs, row):
            return PathAnswer("mean(V)", Kind.NOTE, evidence)
        unmasked = exam.run(path, inputs).output[..., EMPTY_ROW, :]
        # The penalty costs scores their last digits, so that the row is not exactly the same.
        if np.abs(unmasked - row).max() <= 0.01 * np.abs(row).max():
            return PathAnswer("as if unmasked", Kind.BROKEN, evidence)
        return PathAnswer("something else", Kind.BROKEN, evidence)

    return exam.answer(question, ask, exam.steady_paths)


def _depends_on_inputs(exam: Examination, path: Path, row: np.ndarray) -> bool:
    """Return whether the output of the fully masked row differs for other inputs."""
    other_row = _row(exam, path, exam.inputs(seed=SEED + 2))
    is_changed, _ = change(row[..., None, :], other_row[..., None, :], path, [EMPTY_ROW])
    return is_changed


def _is_mean_of_values(exam: Examination, path: Path, inputs: Inputs, row: np.ndarray) -> bool:
    """Return whether the output of the fully masked row is linear in the inputs.

    Only the mean of the values is, no other softmax. Scores stay so small that a penalty of -1e9
    rounds them away in float32.
    """
    step = np.random.default_rng(SEED + 6).standard_normal(inputs[0].shape)
    up = _row(exam, path, mapped(inputs, partial(np.add, step)))
    down = _row(exam, path, mapped(inputs, partial(np.add, -step)))
    return bool(np.abs(up + down - 2.0 * row).max() <= 4 * tolerance(up, path.dtype))


@asks("empty row gradient", "are the gradients of a fully masked row finite?")
def empty_row_gradient(exam: Examination, question: Question) -> Answer:
    if not exam.takes_mask:
        return question.not_offered
    if exam.subject.framework == "ttnn":
        return Answer(question.name, Kind.ABSENT, "no gradients")
    inputs = exam.inputs()

    def ask(path: Path) -> PathAnswer:
        shape = exam.run(path, inputs, _hidden_row()).output.shape
        cotangent = np.random.default_rng(SEED + 3).standard_normal(shape)
        ignoring = cotangent.copy()
        ignoring[..., EMPTY_ROW, :] = 0.0
        evidence = _non_finite_gradients(exam, path, inputs, ignoring)
        if evidence:
            return PathAnswer("NaN even if the loss ignores it", Kind.BROKEN, evidence)
        evidence = _non_finite_gradients(exam, path, inputs, cotangent)
        if evidence:
            return PathAnswer("NaN", Kind.BROKEN, evidence)
        return PathAnswer("finite")

    return exam.answer(question, ask, [path for path in exam.steady_paths if path.grad])


def _non_finite_gradients(
    exam: Examination, path: Path, inputs: Inputs, cotangent: np.ndarray
) -> str:
    """Describe the gradients of the inputs that are not finite; empty if all are finite."""
    grads = exam.run(path, inputs, _hidden_row(), cotangent=cotangent).grads
    count = sum(int(np.count_nonzero(~np.isfinite(grad))) for grad in grads)
    if count == 0:
        return ""
    total = sum(grad.size for grad in grads)
    return f"{count} of {total} gradients of the inputs are not finite"
