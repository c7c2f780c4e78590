"""Dropout: what is dropped, and in which mode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from parity.explain.conformance.answers import Answer, Kind, PathAnswer, Question, asks
from parity.explain.conformance.examination import Examination, change, mapped
from parity.explain.conformance.subjects import TOKENS, Inputs, Path


@asks("dropout", "is anything dropped in training, and only there?")
def dropout(exam: Examination, question: Question) -> Answer:
    if "dropout" not in exam.subject.takes:  # a layer may have a hidden dropout rate
        return _hidden_dropout(exam, question)
    inputs = mapped(exam.inputs(), _same_sequence_twice)

    def ask(path: Path) -> PathAnswer:
        if path.drops:
            return _in_training(exam, path, inputs)
        return _in_evaluation(exam, path, inputs)

    answer = exam.answer(question, ask, [path for path in exam.paths if path.dropout])
    is_shared = any(finding.kind is Kind.NOTE for finding in answer.findings.values())
    if answer.kind is Kind.DIFFERS and is_shared:  # training differs from evaluation, as expected
        words = "train only, one mask for the batch"
        return Answer(question.name, Kind.NOTE, words, findings=answer.findings)
    return answer


def _same_sequence_twice(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x[:1], x[:1]])


def _without_dropout(exam: Examination, path: Path, inputs: Inputs) -> np.ndarray:
    return exam.run(replace(path, train=False, dropout=0.0), inputs).output


def _in_training(exam: Examination, path: Path, inputs: Inputs) -> PathAnswer:
    """Check that something is dropped, by a mask for each sequence."""
    output = exam.run(path, inputs).output
    drops, _ = change(_without_dropout(exam, path, inputs), output, path, range(TOKENS))
    if not drops:
        return PathAnswer("never", Kind.BROKEN, "the output in training is that without dropout")
    differ, _ = change(output[:1], output[1:], path, range(TOKENS))
    if not differ:
        return PathAnswer("one mask for the batch", Kind.NOTE)
    return PathAnswer("train only")


def _in_evaluation(exam: Examination, path: Path, inputs: Inputs) -> PathAnswer:
    """Check that nothing is dropped."""
    output = exam.run(path, inputs).output
    expected = _without_dropout(exam, path, inputs)
    drops, difference = change(expected, output, path, range(TOKENS))
    if drops:
        return PathAnswer("dropped in eval", Kind.BROKEN, difference)
    return PathAnswer("train only")


def _hidden_dropout(exam: Examination, question: Question) -> Answer:
    """Check that two calls in evaluation agree, for a subject without a dropout rate; random states
    advance.
    """

    def ask(path: Path) -> PathAnswer:
        randomness = exam.hidden_randomness(path)
        if not randomness:
            return PathAnswer("—", Kind.ABSENT)
        if path.train:
            return PathAnswer("train only")
        return PathAnswer("random", Kind.BROKEN, f"from one call to the next {randomness}")

    answer = exam.answer(question, ask, exam.paths_of_base_dtype)
    if answer.kind is Kind.BROKEN:
        return answer
    if any(finding.kind is Kind.OK for finding in answer.findings.values()):
        return Answer(question.name, Kind.OK, "train only", findings=answer.findings)
    return Answer(question.name, Kind.ABSENT, "—", findings=answer.findings)
