"""Dropout: what is dropped, and in which mode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from parity.explain.conformance.answers import Answer, Finding, Kind, Question, asks
from parity.explain.conformance.examination import Examination, change, mapped
from parity.explain.conformance.subjects import TOKENS, Path


@asks("dropout", "is anything dropped in training, and only there?")
def dropout(exam: Examination, question: Question) -> Answer:
    inputs = mapped(
        exam.inputs(), lambda x: np.concatenate([x[:1], x[:1]])
    )  # the same sequence twice

    def ask(path: Path) -> Finding:
        result = exam.run(path, inputs).output
        if not path.drops:
            again = exam.run(replace(path, train=False, dropout=0.0), inputs).output
            random, seen = change(again, result, path, range(TOKENS))
            return (
                Finding("dropped in eval", Kind.BROKEN, seen) if random else Finding("train only")
            )
        plain = exam.run(replace(path, train=False, dropout=0.0), inputs).output
        if not change(plain, result, path, range(TOKENS))[0]:
            return Finding("never", Kind.BROKEN, "the output in training is that without dropout")
        shared = not change(result[:1], result[1:], path, range(TOKENS))[0]
        return Finding("one mask for the batch", Kind.NOTE) if shared else Finding("train only")

    if "dropout" not in exam.subject.takes:  # a layer may have a hidden dropout rate
        return _hidden_dropout(exam, question)
    answer = exam.answer(question, ask, [path for path in exam.paths if path.dropout])
    is_shared = any(finding.kind is Kind.NOTE for finding in answer.findings.values())
    if answer.kind is Kind.DIFFERS and is_shared:  # training differs from evaluation, as expected
        words = "train only, one mask for the batch"
        return Answer(question.name, Kind.NOTE, words, findings=answer.findings)
    return answer


def _hidden_dropout(exam: Examination, question: Question) -> Answer:
    """Check that two calls in evaluation agree, for a subject without a dropout rate; random states
    advance.
    """

    def ask(path: Path) -> Finding:
        randomness = exam.hidden_randomness(path)
        if not randomness:
            return Finding("—", Kind.ABSENT)
        if path.train:
            return Finding("train only")
        return Finding("random", Kind.BROKEN, f"from one call to the next {randomness}")

    answer = exam.answer(
        question, ask, [path for path in exam.paths if path.dtype == exam.base.dtype]
    )
    if answer.kind is Kind.BROKEN:
        return answer
    if any(finding.kind is Kind.KEPT for finding in answer.findings.values()):
        return Answer(question.name, Kind.KEPT, "train only", findings=answer.findings)
    return Answer(question.name, Kind.ABSENT, "—", findings=answer.findings)
