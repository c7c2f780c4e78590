"""The diagnosis of a large layer, by samples: each mistake is tried in one, and what is found is confirmed in another.

The samples and their order follow from the problem alone, and so does the verdict, as long as there is time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from parity.core.compare import Comparison
from parity.core.problem import Problem
from parity.core.reference import Remembered
from parity.diagnosis.sampling import Part, complete, confirming, mixing, parts
from parity.diagnosis.scope import Scope
from parity.diagnosis.verdicts import Diagnosis, Explanation, Unknown

Judge = Callable[[Part, Scope, float], tuple[Diagnosis, float]]
"""Diagnose a sample, within a scope and some seconds; it says how many the search took."""

MIXING = frozenset({"softmax-over-queries", "heads-not-moved-back"})
"""Mistakes that take other rows into each, which no sample of some rows shows as the whole layer does."""

CONFIRMS = 0.5
"""The share of the time left that a confirmation may take."""

ALMOST = 3.0
"""A ratio up to which an error that no sample shows is called rounding."""


@dataclass
class _Search:
    """A search in samples: what is left of its time, and what was found so far."""

    judge: Judge
    left: float
    found: dict[str, Explanation]
    first: tuple[Part, Diagnosis] | None = None

    def judged(self, part: Part, scope: Scope, share: float = 1.0) -> Diagnosis:
        """A sample, diagnosed in the time that is left."""
        diagnosis, spent = self.judge(part, scope, share * self.left)
        self.left -= spent
        return diagnosis

    @property
    def names(self) -> frozenset[str]:
        """The mistakes found so far, and what explains as much, in words."""
        names = {name for each in self.found.values() for name in each.hypotheses}
        return frozenset(names | {words for each in self.found.values() for words in each.others})


def diagnosed_by_samples(
    problem: Problem,
    observed: Mapping[str, np.ndarray],
    remembered: Remembered,
    judge: Judge,
    difference: Callable[[Mapping[str, str]], Comparison | None],
    seconds: float,
) -> Diagnosis:
    """What explains the stages of a large problem.

    Args:
        problem: the problem, without a cache.
        observed: its stages, in any order of axes.
        remembered: projections of its inputs.
        judge: diagnoses a sample.
        difference: compares all of it but stages that are recorded otherwise, and finds the first that differs; called
            where no sample does.
        seconds: how long the search may take.
    """
    search, agreed = _Search(judge, seconds, {}), None
    for part in parts(problem, observed, remembered):
        diagnosis = search.judged(part, Scope(part.judged, is_quick=True))
        if not diagnosis.is_wrong:
            agreed = diagnosis
        elif confirmed := _confirmed(search, part, diagnosis, problem, observed, remembered):
            return confirmed
    if search.first is not None and (part := mixing(problem, observed, remembered)):
        diagnosis = search.judged(part, Scope(part.judged, MIXING, is_quick=True))
        if diagnosis.explanations and not diagnosis.unknowns:
            return replace(diagnosis, sample=part.words)
    if search.first is None:
        worst = difference({} if agreed is None else agreed.conventions)
        if worst is None and agreed is not None:
            return agreed
        return _of_worst(search, worst, problem, observed, remembered)
    return _thorough(search, problem, observed, remembered)


def _confirmed(
    search: _Search,
    part: Part,
    diagnosis: Diagnosis,
    problem: Problem,
    observed: Mapping[str, np.ndarray],
    remembered: Remembered,
) -> Diagnosis | None:
    """What a sample shows, if all that another one shows is explained by it, too."""
    search.first = search.first or (part, diagnosis)
    search.found |= {"\n".join(each.hypotheses): each for each in diagnosis.explanations}
    if not diagnosis.explanations:
        return None
    refused = []
    for other in confirming(problem, observed, remembered):
        again = search.judged(other, Scope(other.judged, search.names, is_quick=True), CONFIRMS)
        if again.untried:
            return _merged(search, diagnosis, diagnosis, "not confirmed for want of time")
        if not (again.unknowns or (again.is_wrong and not again.explanations)):
            words = ", ".join([f"confirmed by {other.words}", *(f"not by {words}" for words in refused)])
            return _merged(search, diagnosis, again, words)
        refused.append(other.words)
    return None


def _merged(search: _Search, diagnosis: Diagnosis, again: Diagnosis, words: str) -> Diagnosis:
    """What samples show together: of alternatives what the confirming one says, which is the larger."""
    by_name = search.found | {"\n".join(each.hypotheses): each for each in again.explanations}
    told = {each.hypotheses for each in again.explanations}
    explanations = [each for each in by_name.values() if each.hypotheses in told or not _is_other(each, again)]
    kind = "precision" if diagnosis.kind == again.kind == "precision" else "structure"
    first, shown = search.first if search.first is not None else (None, diagnosis)
    words = f"{first.words}, {words}" if first is not None else words
    return replace(shown, kind=kind, explanations=explanations, unknowns=[], untried="", sample=words)


def _is_other(explanation: Explanation, confirmed: Diagnosis) -> bool:
    """Whether a confirmed diagnosis explains the stages of an explanation by another mistake."""
    return any({*explanation.stages} & {*each.stages} for each in confirmed.explanations)


def _thorough(
    search: _Search, problem: Problem, observed: Mapping[str, np.ndarray], remembered: Remembered
) -> Diagnosis:
    """Pairs and laws in the first sample that is wrong, or in the one that did not confirm what was found there."""
    if search.first is None:
        return Diagnosis("none")
    part = search.first[0] if search.first[0].problem.case.seq_len == problem.case.seq_len else None
    part = part or complete(problem, observed, remembered) or search.first[0]
    if search.found:
        part = confirming(problem, observed, remembered)[0]
    diagnosis = search.judged(part, Scope(part.judged))
    if not diagnosis.unknowns and diagnosis.explanations and not search.found:
        search.first = None
        if confirmed := _confirmed(search, part, diagnosis, problem, observed, remembered):
            return confirmed
    return replace(diagnosis, sample=part.words)


def _of_worst(
    search: _Search,
    worst: Comparison | None,
    problem: Problem,
    observed: Mapping[str, np.ndarray],
    remembered: Remembered,
) -> Diagnosis:
    """What explains a difference that the samples do not show: samples with the worst place in them."""
    place = {} if worst is None else worst.worst_index
    for part in parts(problem, observed, remembered, place):
        diagnosis = search.judged(part, Scope(part.judged, is_quick=True))
        if diagnosis.is_wrong:
            if confirmed := _confirmed(search, part, diagnosis, problem, observed, remembered):
                return confirmed
            return replace(search.judged(part, Scope(part.judged)), sample=part.words)
    if worst is None:
        return Diagnosis("none")
    kind = "rounding" if worst.ratio <= ALMOST else "unknown"
    unknowns = [Unknown(worst.stage, worst.error, worst.ratio)]
    return Diagnosis(kind, worst.stage, worst.error, worst.ratio, unknowns=unknowns, has_stages=len(observed) > 1)
