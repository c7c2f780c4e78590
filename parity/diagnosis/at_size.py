"""The diagnosis of a large layer in samples: each bug is tried in one sample, and confirmed in another.

The samples, their order and the work in them depend on the problem alone, and so does the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from parity.core.blas import single_threaded
from parity.core.compare import Comparison
from parity.core.work import PER_MULTIPLICATION, Work
from parity.diagnosis.replay import EVERYTHING, Scope
from parity.diagnosis.sampling import FIRST_CALL, Part, Whole, multiplications
from parity.diagnosis.verdicts import Diagnosis, Explanation, Unknown

Judge = Callable[[Part, Scope, Work], Diagnosis]
"""Diagnose a sample, within a scope and a limit of work."""

JudgeAll = Callable[[Scope, Work], Diagnosis]
"""Diagnose the whole problem, within a scope and a limit of work."""

Difference = Callable[[Mapping[str, str]], Comparison | None]
"""Compare the whole problem except stages in another convention, and return the first that differs."""

MIXING = frozenset({"softmax-over-queries", "heads-not-moved-back"})
"""Bugs that mix rows, so a sample of some rows does not show them."""

SEARCHES = 0.8
"""The share of the remaining work for the search in a sample; the rest is for confirmation, or other bugs."""

CONFIRMS = 0.5
"""The share of the remaining work for a confirmation."""

SPARED = 0.25
"""The share of a layer's own time that the search may use in addition: the reference computes three of its four
projections."""

UNCONFIRMED = "not confirmed because of the time limit"

ALMOST = 3.0
"""The largest ratio of an error outside of all samples that is called rounding."""


def diagnosed_by_samples(whole: Whole, judge: Judge, difference: Difference, seconds: float) -> Diagnosis:
    """Diagnose the stages of a large problem.

    Args:
        whole: the problem, without a cache, and its stages in any order of axes.
        judge: diagnoses a sample.
        difference: compares the whole layer; called if no sample differs.
        seconds: work of the search, see `parity.core.work`, in addition to `SPARED`.
    """
    own = PER_MULTIPLICATION * multiplications(whole.problem)
    search = _Search(whole, judge, Work(seconds + SPARED * own))
    if confirmed := search.over(whole.parts()):
        return confirmed
    if search.first is not None:
        return search.mixed() or search.thorough()
    agreed = search.agreed
    worst = difference({} if agreed is None else agreed.conventions)
    if worst is None and agreed is not None:
        return agreed
    return search.of_worst(worst)


def diagnosed_by_first_call(first: Whole | None, judge: Judge, judge_all: JudgeAll, seconds: float) -> Diagnosis:
    """Diagnose the calls of a large layer with a cache: by the first call, or else by all calls.

    Args:
        first: the first call, if it is a layer by itself.
        judge: diagnoses a sample of it.
        judge_all: diagnoses all calls.
        seconds: work of the search, see `parity.core.work`.
    """
    work = Work(seconds)
    with work.counted(), single_threaded():
        if first is not None:
            search = _Search(first, judge, Work(CONFIRMS * seconds))
            found = search.over(first.parts()) or (search.mixed() if search.first is not None else None)
            if found is not None and found.explanations:
                names = {name for each in found.explanations for name in (*each.bugs, *each.others)}
                again = judge_all(Scope(only=frozenset(names), is_quick=True), Work(work.left))
                if again.explanations and not again.unknowns:
                    return replace(again, sample=f"the first call ({found.sample}), confirmed by all calls")
                if again.untried:
                    return _of_first_call(found)
        return judge_all(EVERYTHING, Work(work.left))


def _of_first_call(found: Diagnosis) -> Diagnosis:
    """Return the diagnosis of the first call, with the names of its stages in the whole."""
    explanations = [
        replace(each, stage=FIRST_CALL + each.stage, stages=tuple(FIRST_CALL + stage for stage in each.stages))
        for each in found.explanations
    ]
    sample = f"the first call ({found.sample}), {UNCONFIRMED}"
    return replace(found, stage=FIRST_CALL + found.stage, explanations=explanations, sample=sample, taken={})


@dataclass
class _Search:
    """A search in samples of a problem.

    Attributes:
        whole: the problem.
        judge: diagnoses a sample.
        work: the limit of the search.
        found: explanations of samples, by the names of their bugs.
        first: the first sample that differs, and its diagnosis.
        agreed: the diagnosis of the last sample that agrees.
    """

    whole: Whole
    judge: Judge
    work: Work
    found: dict[str, Explanation] = field(default_factory=dict)
    first: tuple[Part, Diagnosis] | None = None
    agreed: Diagnosis | None = None

    def judged(self, part: Part, scope: Scope, share: float = 1.0) -> Diagnosis:
        """Diagnose a sample with a share of the remaining work."""
        if not part.observed:
            return Diagnosis("none")
        with self.work.counted(), single_threaded():
            return self.judge(part, scope, Work(share * self.work.left))

    def over(self, parts: Iterable[Part]) -> Diagnosis | None:
        """Return the diagnosis of the first sample that another one confirms."""
        for part in parts:
            diagnosis = self.judged(part, Scope(part.judged, is_quick=True), SEARCHES)
            if not diagnosis.is_wrong:
                self.agreed = diagnosis
                continue
            self.first = self.first or (part, diagnosis)
            if confirmed := self.confirmed(diagnosis):
                return confirmed
        return None

    def confirmed(self, diagnosis: Diagnosis) -> Diagnosis | None:
        """Return the diagnosis of a sample if it also explains another one."""
        self.found |= {"\n".join(each.bugs): each for each in diagnosis.explanations}
        if not diagnosis.explanations:
            return None
        refused = []
        for other in self.whole.confirming():
            again = self.judged(other, Scope(other.judged, self._names, is_quick=True), CONFIRMS)
            if again.untried:
                return self._merged(diagnosis, diagnosis, UNCONFIRMED)
            if not (again.unknowns or (again.is_wrong and not again.explanations)):
                words = ", ".join([f"confirmed by {other.words}", *(f"not by {words}" for words in refused)])
                return self._merged(diagnosis, again, words)
            refused.append(other.words)
        return None

    @property
    def _names(self) -> frozenset[str]:
        """The names of the bugs found so far, and descriptions of their alternatives."""
        names = {name for each in self.found.values() for name in each.bugs}
        return frozenset(names | {words for each in self.found.values() for words in each.others})

    def _merged(self, diagnosis: Diagnosis, again: Diagnosis, words: str) -> Diagnosis:
        """Return the joint diagnosis of samples; among alternatives the confirming sample, which is larger, decides."""
        by_name = self.found | {"\n".join(each.bugs): each for each in again.explanations}
        confirmed_names = {each.bugs for each in again.explanations}
        explanations = [each for each in by_name.values() if each.bugs in confirmed_names or not _is_other(each, again)]
        kind = "precision" if diagnosis.kind == again.kind == "precision" else "structure"
        first, shown = self.first if self.first is not None else (None, diagnosis)
        words = f"{first.words}, {words}" if first is not None else words
        return replace(shown, kind=kind, explanations=explanations, unknowns=[], untried="", sample=words)

    def mixed(self) -> Diagnosis | None:
        """Return an explanation by a bug that mixes rows."""
        with suppress(TimeoutError), self.work.counted(), self.work.inside("bugs that mix rows"):
            for part in self.whole.mixing():
                diagnosis = self.judged(part, Scope(part.judged, MIXING, is_quick=True))
                if diagnosis.explanations and not diagnosis.unknowns:
                    return replace(diagnosis, sample=part.words)
        return None

    def thorough(self) -> Diagnosis:
        """Search for pairs and patterns in the first wrong sample, or in the one that did not confirm a bug."""
        if self.first is None:
            return Diagnosis("none")
        part = self.first[0] if self.first[0].problem.case.seq_len == self.whole.problem.case.seq_len else None
        part = part or self.whole.complete() or self.first[0]
        if self.found:
            part = self.whole.confirming()[0]
        diagnosis = self.judged(part, Scope(part.judged))
        if not diagnosis.unknowns and diagnosis.explanations and not self.found:
            self.first = (part, diagnosis)
            if confirmed := self.confirmed(diagnosis):
                return confirmed
        is_law = diagnosis.kind == "law" and part.problem.sample is not None
        return self._law(part, diagnosis) if is_law else replace(diagnosis, sample=part.words)

    def _law(self, part: Part, diagnosis: Diagnosis) -> Diagnosis:
        """Return the pattern of a sample if another one shows the same; else the sample is unexplained."""
        other = self.whole.confirming()[0]
        again = self.judged(other, Scope(other.judged, frozenset()))
        laws = [[(each.stage, each.law and each.law.name) for each in found.unknowns] for found in (diagnosis, again)]
        if laws[0] == laws[1]:
            return replace(diagnosis, sample=f"{part.words}, confirmed by {other.words}")
        unknowns = [replace(each, findings=None) for each in diagnosis.unknowns]
        return replace(diagnosis, kind="unknown", unknowns=unknowns, sample=part.words)

    def of_worst(self, worst: Comparison | None) -> Diagnosis:
        """Diagnose a difference outside of all samples, in samples that contain the largest error."""
        if confirmed := self.over(self.whole.parts({} if worst is None else worst.worst_index)):
            return confirmed
        if self.first is not None:
            part = self.first[0]
            return replace(self.judged(part, Scope(part.judged)), sample=part.words)
        if worst is None:
            return Diagnosis("none")
        kind = "rounding" if worst.ratio <= ALMOST else "unknown"
        unknowns = [Unknown(worst.stage, worst.error, worst.ratio)]
        has_stages = len(self.whole.observed) > 1
        return Diagnosis(kind, worst.stage, worst.error, worst.ratio, unknowns=unknowns, has_stages=has_stages)


def _is_other(explanation: Explanation, confirmed: Diagnosis) -> bool:
    """Return True if a confirmed diagnosis explains the stages of an explanation by another bug."""
    return any({*explanation.stages} & {*each.stages} for each in confirmed.explanations)
