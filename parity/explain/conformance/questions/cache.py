"""Does a key/value cache reproduce one full pass, and is overflow detected?"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from parity.explain.conformance.answers import Answer, Finding, Kind, Question, asks, worst
from parity.explain.conformance.examination import Examination, change, numbers
from parity.explain.conformance.subjects import SEED, TOKENS


@asks("cache", "does decoding token by token equal one pass, and is overflow refused?")
def cache(exam: Examination, question: Question) -> Answer:
    decode = exam.subject.decode
    if decode is None:
        return question.not_offered
    x, *_ = exam.inputs()
    whole = exam.run(
        exam.base, (x, x, x), None if exam.is_causal_itself else ~np.tri(TOKENS, dtype=bool)
    ).output

    def decoded(x: np.ndarray, capacity: int, is_causal: bool) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(decode(x, capacity, is_causal), np.float64)

    def compared(is_causal: bool) -> Finding:
        output = decoded(x, TOKENS, is_causal)
        differs, at = change(whole, output, exam.base, range(TOKENS))
        if not differs:
            return Finding("equals one pass")
        others = x.copy()
        others[:, 1:-1] = np.random.default_rng(SEED + 1).standard_normal(others[:, 1:-1].shape)
        after = decoded(others, TOKENS, is_causal)[:, [-1]]
        first_only = not change(output[:, [-1]], after, exam.base, [TOKENS - 1])[0]
        seen = f"token by token{' with is_causal=True' if is_causal else ''}: {at}"
        return Finding("sees only key 0" if first_only else "not one pass", Kind.BROKEN, seen)

    def overflowing() -> Finding:
        try:
            output = decoded(x, TOKENS - 2, False)
        except Exception as error:  # other libraries may raise anything
            return Finding("overflow refused", Kind.KEPT, f"overflow: {error}", error)
        last = numbers(output[0, -1])
        seen = f"{TOKENS} tokens into {TOKENS - 2} slots: no error, the last output is {last}"
        return Finding("overflow silent", Kind.BROKEN, seen)

    findings = [compared(False)]
    if "is_causal" in exam.subject.takes and (flagged := compared(True)).kind is Kind.BROKEN:
        findings.append(replace(flagged, words=f"with is_causal {flagged.words}"))
    findings.append(overflowing())
    words, kind = (
        "; ".join(finding.words for finding in findings),
        worst(finding.kind for finding in findings),
    )
    seen = "; ".join(finding.seen for finding in findings if finding.seen)
    return exam.only(question, Finding(words, kind, seen))
