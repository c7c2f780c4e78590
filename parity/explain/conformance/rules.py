"""Combine the findings of all paths into one answer, and apply a subject's promises and
documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from parity.explain.conformance.answers import Answer, Finding, Kind, Question, worst
from parity.explain.conformance.calls import Failed, Refused
from parity.explain.conformance.subjects import BATCH, NUM_HEADS, SEED, TOKENS, Path, Subject


def apply_promises(answer: Answer, subject: Subject) -> Answer:
    """Return an answer adjusted for stronger promises of a subject, or for documented
    exceptions.
    """
    if answer.kind is Kind.NOTE and answer.question in subject.promises:
        answer = replace(answer, kind=Kind.BROKEN)
    if answer.is_broken and answer.question in subject.documented:
        return Answer(
            answer.question,
            Kind.NOTE,
            subject.documented[answer.question],
            findings=answer.findings,
        )
    return answer


def of_error(error: Refused | Failed) -> Finding:
    """Return the finding of a path that raised an error."""
    if isinstance(error, Refused):
        return Finding("refused", Kind.REFUSED, str(error), error.__cause__)
    return Finding(error.words, Kind.BROKEN, str(error), error.__cause__)


def merge(
    subject: Subject,
    question: Question,
    findings: Mapping[Path, Finding],
    about: str = "",
    also: Finding | None = None,
) -> Answer:
    """Merge the findings of paths: the common one, or rules that describe which path leads to
    which.

    Args:
        subject: the subject.
        question: the question.
        findings: findings by path.
        about: description of the inputs, unless they are the usual ones.
        also: an additional finding.
    """
    if not findings:
        return question.not_offered
    given = {finding for finding in findings.values() if finding.kind is not Kind.REFUSED}
    kind = worst(finding.kind for finding in findings.values())
    if len(given) > 1 and kind is not Kind.BROKEN:
        kind = Kind.DIFFERS
    words = by_rule(findings)
    if also is not None:
        words, kind = f"{words}; {also.words}", worst((kind, also.kind))
    first = next((path for path, finding in findings.items() if finding.kind is Kind.REFUSED), None)
    refusal = "" if first is None else f"{first}: {findings[first].seen}"
    exception = None if first is None else findings[first].exception
    answer = Answer(question.name, kind, words, "", findings, refusal, exception)
    if not answer.is_broken:
        return answer
    path = next(
        (path for path, finding in findings.items() if finding.kind is Kind.BROKEN),
        next(iter(findings)),
    )
    text = _example(subject, question, words, findings, path, about)
    broken = findings[path]
    error = "" if broken.exception is None else broken.seen
    return replace(answer, example=text, error=error, exception=broken.exception or exception)


def _example(
    subject: Subject,
    question: Question,
    words: str,
    findings: Mapping[Path, Finding],
    path: Path,
    about: str,
) -> str:
    """Describe a failing example: the question, the inputs, the numbers on a path, and those of a
    differing path.
    """
    if subject.is_layer:
        given = (
            f"x = numpy.random.default_rng({SEED}).standard_normal(({BATCH}, {TOKENS}, "
            f"{subject.width}))"
        )
    else:
        shape = f"({BATCH}, {NUM_HEADS}, {TOKENS}, {subject.head_dim})"
        given = (
            f"query, key, value, each {shape} (B N T H), from "
            f"numpy.random.default_rng({SEED}).standard_normal"
        )
    finding = findings[path]
    lines = {
        "asked": question.asks,
        "inputs": about or given,
        "path": path,
        "seen": finding.seen or finding.words,
    }
    differs = (
        other for other, but in findings.items() if but != finding and but.kind is not Kind.REFUSED
    )
    if other := next(differs, None):
        but = findings[other]
        lines["but"] = f"{but.words} ({other}){': ' if but.seen else ''}{but.seen}"
    return "\n".join(
        [
            f"{subject.name}, {question.name}: {words}",
            *(f"  {name:<7} {text}" for name, text in lines.items()),
        ]
    )


# ---- Answers by path -----------------------------------------------------------------------------

ATTRIBUTES: dict[str, Callable[[Any], str]] = {
    "need_weights": lambda value: "with weights" if value else "without weights",
    "drops": lambda value: "while dropping" if value else "while not dropping",
    "dropout": lambda value: "with dropout" if value else "without dropout",
    "train": lambda value: "in train" if value else "in eval",
    "grad": lambda value: "with grad" if value else "without grad",
    "dtype": lambda value: f"in {value}",
}
"""Attributes that distinguish paths, in order of preference, with their descriptions."""

Rules = list[tuple[Hashable, str]]
"""Answers with their conditions; the first that holds applies, and the last condition is empty."""


def by_rule(answers: Mapping[Path, Hashable]) -> str:
    """Describe which path leads to which answer: 'NaN with weights, zeros in train or with grad,
    otherwise NaN'.
    """
    for depth in range(5):
        if found := list(_rules(dict(answers), depth)):
            return _format(
                min(found, key=lambda rules: len(list(groupby(answer for answer, _ in rules))))
            )
    counts = {
        answer: list(answers.values()).count(answer) for answer in dict.fromkeys(answers.values())
    }
    return " or ".join(f"{answer} ({count} paths)" for answer, count in counts.items())


def _rules(answers: dict[Path, Hashable], depth: int) -> Iterator[Rules]:
    """Yield all lists of `depth` conditions that separate the answers."""
    if len(set(answers.values())) == 1:
        yield [(next(iter(answers.values())), "")]
    elif depth:
        for attribute, tell in ATTRIBUTES.items():
            for value in dict.fromkeys(getattr(path, attribute) for path in answers):
                rest = {
                    path: answer
                    for path, answer in answers.items()
                    if getattr(path, attribute) != value
                }
                chosen = list({answer for path, answer in answers.items() if path not in rest})
                if rest and len(chosen) == 1:
                    for rules in _rules(rest, depth - 1):
                        yield [(chosen[0], tell(value)), *rules]


def _format(rules: Rules) -> str:
    parts = []
    for answer, group in groupby(rules, key=lambda rule: rule[0]):
        conditions = [condition for _, condition in group]
        parts.append(
            f"{answer} {' or '.join(conditions)}" if conditions[-1] else f"otherwise {answer}"
        )
    return ", ".join(parts) if len(rules) > 1 else str(rules[0][0])
