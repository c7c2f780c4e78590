"""Does a key/value cache reproduce one full pass, and is overflow detected?"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from parity.explain.conformance.answers import Answer, Kind, PathAnswer, Question, asks, worst
from parity.explain.conformance.examination import FUTURE_KEYS, Examination, change, numbers
from parity.explain.conformance.subjects import SEED, TOKENS, Decode, Path


@asks("cache", "does decoding token by token equal one pass, and is overflow rejected?")
def cache(exam: Examination, question: Question) -> Answer:
    decode = exam.subject.decode
    if decode is None:
        return question.not_offered
    x, *_ = exam.inputs()
    hidden = None
    if not exam.is_causal_itself:
        hidden = FUTURE_KEYS
    whole = exam.run(exam.base, (x, x, x), hidden).output

    findings = [_compared(decode, exam.base, x, whole, is_causal=False)]
    if "is_causal" in exam.subject.takes:
        with_flag = _compared(decode, exam.base, x, whole, is_causal=True)
        if with_flag.kind is Kind.BROKEN:
            findings.append(replace(with_flag, words=f"with is_causal {with_flag.words}"))
    findings.append(_overflowed(decode, x))

    words = "; ".join(finding.words for finding in findings)
    kind = worst(finding.kind for finding in findings)
    evidence = "; ".join(finding.evidence for finding in findings if finding.evidence)
    return exam.only(question, PathAnswer(words, kind, evidence))


def _outputs(decode: Decode, x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
    """Return the outputs of decoding token by token."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(decode(x, capacity, is_causal), np.float64)


def _compared(
    decode: Decode, path: Path, x: np.ndarray, whole: np.ndarray, is_causal: bool
) -> PathAnswer:
    """Compare decoding token by token with the outputs of one pass."""
    output = _outputs(decode, x, TOKENS, is_causal)
    differs, difference = change(whole, output, path, range(TOKENS))
    if not differs:
        return PathAnswer("equals one pass")

    # Does the last output depend on any token between the first and the last?
    others = x.copy()
    others[:, 1:-1] = np.random.default_rng(SEED + 1).standard_normal(others[:, 1:-1].shape)
    after = _outputs(decode, others, TOKENS, is_causal)
    feels_others, _ = change(output[:, [-1]], after[:, [-1]], path, [TOKENS - 1])

    how = "token by token"
    if is_causal:
        how += " with is_causal=True"
    evidence = f"{how}: {difference}"
    if feels_others:
        return PathAnswer("not one pass", Kind.BROKEN, evidence)
    return PathAnswer("sees only key 0", Kind.BROKEN, evidence)


def _overflowed(decode: Decode, x: np.ndarray) -> PathAnswer:
    """Decode more tokens than the cache has slots."""
    capacity = TOKENS - 2
    try:
        output = _outputs(decode, x, capacity, False)
    except Exception as error:  # other libraries may raise anything
        return PathAnswer("overflow rejected", Kind.OK, f"overflow: {error}", error)
    last = numbers(output[0, -1])
    evidence = f"{TOKENS} tokens into {capacity} slots: no error, the last output is {last}"
    return PathAnswer("overflow silent", Kind.BROKEN, evidence)
