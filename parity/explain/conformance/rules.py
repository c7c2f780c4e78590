"""Combine the findings of all paths into one answer, and apply a subject's promises and
documentation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from parity.explain.conformance.answers import Answer, Kind, PathAnswer, Question, worst
from parity.explain.conformance.calls import Failed, RejectedCall
from parity.explain.conformance.subjects import BATCH, NUM_HEADS, SEED, TOKENS, Path, Subject


def apply_promises(answer: Answer, subject: Subject) -> Answer:
    """Return an answer adjusted for stronger promises of a subject, or for documented
    exceptions.
    """
    if answer.kind is Kind.NOTE and answer.question in subject.promises:
        answer = replace(answer, kind=Kind.BROKEN)
    if answer.is_broken and answer.question in subject.documented:
        words = subject.documented[answer.question]
        return Answer(answer.question, Kind.NOTE, words, findings=answer.findings)
    return answer


def of_error(error: RejectedCall | Failed) -> PathAnswer:
    """Return the finding of a path that raised an error."""
    if isinstance(error, RejectedCall):
        return PathAnswer("rejected", Kind.REJECTED, str(error), error.__cause__)
    return PathAnswer(error.words, Kind.BROKEN, str(error), error.__cause__)


def merge(
    subject: Subject,
    question: Question,
    findings: Mapping[Path, PathAnswer],
    about: str = "",
    also: PathAnswer | None = None,
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
    kind = _common_kind(findings)
    words = by_rule(findings)
    if also is not None:
        kind = worst((kind, also.kind))
        words = f"{words}; {also.words}"

    rejection, exception = "", None
    rejecting_path = _first_path(findings, Kind.REJECTED)
    if rejecting_path is not None:
        rejection = f"{rejecting_path}: {findings[rejecting_path].evidence}"
        exception = findings[rejecting_path].exception
    answer = Answer(question.name, kind, words, "", findings, rejection, exception)
    if not answer.is_broken:
        return answer

    path = _first_path(findings, Kind.BROKEN)
    if path is None:  # the paths differ, or only the additional finding is broken
        path = next(iter(findings))
    example = _example(subject, question, words, findings, path, about)
    error = ""
    if findings[path].exception is not None:
        error = findings[path].evidence
        exception = findings[path].exception
    return replace(answer, example=example, error=error, exception=exception)


def _common_kind(findings: Mapping[Path, PathAnswer]) -> Kind:
    """Return the kind of the answer to which findings lead: paths may reject a call, but otherwise
    must agree.
    """
    kind = worst(finding.kind for finding in findings.values())
    distinct = {finding for finding in findings.values() if finding.kind is not Kind.REJECTED}
    if len(distinct) > 1 and kind is not Kind.BROKEN:
        return Kind.DIFFERS
    return kind


def _first_path(findings: Mapping[Path, PathAnswer], kind: Kind) -> Path | None:
    """Return the first path whose finding is of a kind."""
    for path, finding in findings.items():
        if finding.kind is kind:
            return path
    return None


def _example(
    subject: Subject,
    question: Question,
    words: str,
    findings: Mapping[Path, PathAnswer],
    path: Path,
    about: str,
) -> str:
    """Describe a failing example: the question, the inputs, the values on a path, and on a
    differing path.
    """
    finding = findings[path]
    lines = [
        f"{subject.name}, {question.name}: {words}",
        f"  check   {question.asks}",
        f"  input   {about or _usual_inputs(subject)}",
        f"  path    {path}",
        f"  result  {finding.evidence or finding.words}",
    ]
    for other_path, other in findings.items():
        if other != finding and other.kind is not Kind.REJECTED:
            contrast = f"{other.words} ({other_path})"
            if other.evidence:
                contrast += f": {other.evidence}"
            lines.append(f"  except  {contrast}")
            break
    return "\n".join(lines)


def _usual_inputs(subject: Subject) -> str:
    """Describe the inputs of most questions, as code that creates them again."""
    if subject.is_layer:
        shape = f"({BATCH}, {TOKENS}, {subject.width})"
        return f"x = numpy.random.default_rng({SEED}).standard_normal({shape})"
    shape = f"({BATCH}, {NUM_HEADS}, {TOKENS}, {subject.head_dim})"
    return (
        f"query, key, value, each {shape} (B N T H), from "
        f"numpy.random.default_rng({SEED}).standard_normal"
    )


# ---- Answers by path -----------------------------------------------------------------------------

CONDITIONS = {
    "need_weights": ("with weights", "without weights"),
    "drops": ("while dropping", "while not dropping"),
    "dropout": ("with dropout", "without dropout"),
    "train": ("in train", "in eval"),
    "grad": ("with grad", "without grad"),
}
"""Attributes of paths, each with the words for a true and for a false value."""

ATTRIBUTES = (*CONDITIONS, "dtype")
"""Attributes that distinguish paths, in order of preference."""

MOST_CONDITIONS = 4
"""More conditions than that are harder to read than the number of paths for each answer."""

Rules = list[tuple[Hashable, str]]
"""Answers with their conditions; the first that holds applies, and the last condition is empty."""


def by_rule(answers: Mapping[Path, Hashable]) -> str:
    """Describe which path leads to which answer: 'NaN with weights, zeros in train or with grad,
    otherwise NaN'.
    """
    for num_conditions in range(MOST_CONDITIONS + 1):
        candidates = list(_rules(answers, num_conditions))
        if candidates:
            return _format(min(candidates, key=_num_changes))
    counts: dict[Hashable, int] = {}
    for answer in answers.values():
        counts[answer] = counts.get(answer, 0) + 1
    return " or ".join(f"{answer} ({count} paths)" for answer, count in counts.items())


def _num_changes(rules: Rules) -> int:
    """Return how often the answer changes from one rule to the next: fewer are easier to read."""
    return len(list(groupby(rules, key=itemgetter(0))))


def _rules(answers: Mapping[Path, Hashable], num_conditions: int) -> Iterator[Rules]:
    """Yield all lists of that many conditions that separate the answers."""
    distinct = set(answers.values())
    if len(distinct) == 1:
        yield [(distinct.pop(), "")]
        return
    if num_conditions == 0:
        return
    for attribute in ATTRIBUTES:
        for value in dict.fromkeys(getattr(path, attribute) for path in answers):
            chosen: set[Hashable] = set()
            others: dict[Path, Hashable] = {}
            for path, answer in answers.items():
                if getattr(path, attribute) == value:
                    chosen.add(answer)
                else:
                    others[path] = answer
            if not others or len(chosen) > 1:
                continue
            first_rule = (chosen.pop(), _condition(attribute, value))
            for other_rules in _rules(others, num_conditions - 1):
                yield [first_rule, *other_rules]


def _condition(attribute: str, value: Any) -> str:
    """Describe the paths whose attribute has a value."""
    if attribute == "dtype":
        return f"in {value}"
    if_true, if_false = CONDITIONS[attribute]
    return if_true if value else if_false


def _format(rules: Rules) -> str:
    """Describe rules, with the conditions of successive rules for the same answer together."""
    if len(rules) == 1:
        return str(rules[0][0])
    parts = []
    for answer, rules_of_answer in groupby(rules, key=itemgetter(0)):
        conditions = [condition for _, condition in rules_of_answer]
        if conditions[-1]:
            parts.append(f"{answer} {' or '.join(conditions)}")
        else:
            parts.append(f"otherwise {answer}")
    return ", ".join(parts)
