"""The diagnosis of a large layer in samples: each bug is tried in one sample, and confirmed in
another.

The samples, their order and the work in them depend on the problem and the observed stages alone,
and so does the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from parity.explain.diagnosis.findings import Diagnosis, Finding, order_of
from parity.explain.diagnosis.laws import Description
from parity.explain.diagnosis.sample import sample_of
from parity.explain.diagnosis.sampling import (
    CONFIRMED,
    FIRST_CALL,
    ROWS,
    Part,
    Whole,
    is_by_length,
    is_causal,
    multiplications,
)
from parity.explain.diagnosis.trial import EVERYTHING, Scope
from parity.explain.diagnosis.work import PER_MULTIPLICATION, Work
from parity.measure.core.blas import single_threaded

Judge = Callable[[Part, Scope, Work], Diagnosis]
"""Diagnose a sample, within a scope and a limit of work."""

JudgeAll = Callable[[Scope, Work], Diagnosis]
"""Diagnose the whole problem, within a scope and a limit of work."""

MIXING = frozenset({"softmax-over-queries", "heads-not-moved-back"})
"""Bugs that mix rows, so a sample of some rows does not show them."""

SEARCHES = 0.8
"""The share of the remaining work for the search in a sample; the rest is for confirmation, or
other bugs.
"""

CONFIRMS = 0.5
"""The share of the remaining work for a confirmation."""

SPARED = 0.25
"""The share of a layer's own time that the search may use in addition: the reference computes three
of its four projections.
"""

UNCONFIRMED = "not confirmed because of the time limit"


# ---- Kinds of samples ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenSamples:
    """Samples of the stages in which tokens do not depend on each other.

    Attributes:
        whole: the problem.
    """

    whole: Whole

    def parts(self) -> Iterator[Part]:
        """Yield samples to search, the cheaper first: single tokens, then rows, in which bugs may
        mix tokens.
        """
        yield self.whole.of_tokens(0)
        yield self.whole.of_rows(0, ROWS, self.whole.stages_of_tokens)

    def confirming(self) -> Iterator[Part]:
        """Yield independent samples, which may confirm a bug."""
        yield self.whole.of_tokens(1)
        yield self.whole.of_rows(1, ROWS, self.whole.stages_of_tokens)

    def mixing(self) -> Iterator[Part]:
        """Yield no samples for bugs that mix rows, because these change other stages."""
        return iter(())

    def complete(self) -> Part | None:
        """Return the first tokens with every feature, which show more patterns; None if they are
        not a layer.
        """
        return self.whole.complete(self.whole.stages_of_tokens)


@dataclass(frozen=True)
class RowSamples:
    """Samples of the other stages, or of all if samples of tokens cannot show any.

    Attributes:
        whole: the problem.
    """

    whole: Whole

    @property
    def judged(self) -> frozenset[str] | None:
        """The stages that are compared; None for all."""
        return self.whole.other_stages if self.whole.stages_of_tokens else None

    def parts(self) -> Iterator[Part]:
        """Yield samples to search, the cheaper first."""
        if self._is_alone(self.whole.num_tokens):
            yield self.whole.of_first_tokens(self.whole.num_tokens, 0, self.judged)
        yield self.whole.of_rows(0, ROWS, self.judged)

    def confirming(self) -> Iterator[Part]:
        """Yield independent samples with other features, which may confirm a bug.

        They are rows from everywhere, and more of the first tokens of a causal layer.
        """
        yield self.whole.of_rows(1, ROWS, self.judged)
        more_tokens = CONFIRMED * self.whole.num_tokens
        if self._is_alone(more_tokens):
            yield self.whole.of_first_tokens(more_tokens, 1, self.judged)

    def mixing(self) -> Iterator[Part]:
        """Yield samples for bugs that mix rows."""
        yield from self.whole.mixing()

    def complete(self) -> Part | None:
        """Return the first tokens as a small problem, with every row and feature; None if they are
        not a layer.
        """
        return self.whole.complete(self.judged)

    def _is_alone(self, tokens: int) -> bool:
        """Return True if a number of first tokens are a layer by themselves, instead of the whole
        one.
        """
        problem = self.whole.problem
        return is_causal(problem) and not is_by_length(problem) and tokens < problem.case.seq_len


# ---- The search ----------------------------------------------------------------------------------


def diagnosed_by_samples(whole: Whole, judge: Judge, seconds: float) -> Diagnosis:
    """Diagnose the stages of a large problem.

    Args:
        whole: the problem, without a cache, and its stages in any order of axes.
        judge: diagnoses a sample.
        seconds: work of the search, see `parity.explain.diagnosis.work`, in addition to `SPARED`.
    """
    if not whole.compared.first_wrong():
        return Diagnosis(has_stages=len(whole.observed) > 1)
    kinds: list[TokenSamples | RowSamples] = []
    if whole.stages_of_tokens:
        kinds.append(TokenSamples(whole))
    if whole.other_stages:
        kinds.append(RowSamples(whole))
    own = PER_MULTIPLICATION * multiplications(whole.problem)
    work, diagnoses = Work(seconds + SPARED * own), list[Diagnosis]()
    with work.counted():
        for number, samples in enumerate(kinds):
            share = 1.0 / (len(kinds) - number)
            diagnoses.append(_Search(samples, judge, Work(share * work.left)).diagnosis())
    return _joined(whole, diagnoses)


def diagnosed_by_first_call(
    first: Whole | None, judge: Judge, judge_all: JudgeAll, seconds: float
) -> Diagnosis:
    """Diagnose the calls of a large layer with a cache: by the first call, or else by all calls.

    Args:
        first: the first call, if it is a layer by itself.
        judge: diagnoses a sample of it.
        judge_all: diagnoses all calls.
        seconds: work of the search, see `parity.explain.diagnosis.work`.
    """
    work = Work(seconds)
    with work.counted(), single_threaded():
        if first is not None:
            found = diagnosed_by_samples(first, judge, CONFIRMS * seconds)
            if found.known:
                names = {name for each in found.known for name in (*each.bugs, *each.others)}
                again = judge_all(Scope(only=frozenset(names), is_quick=True), Work(work.left))
                if again.known and not again.leftover:
                    return replace(
                        again, sample=f"the first call ({found.sample}), confirmed by all calls"
                    )
                if again.untried:
                    return _of_first_call(found)
        return judge_all(EVERYTHING, Work(work.left))


def _of_first_call(found: Diagnosis) -> Diagnosis:
    """Return the diagnosis of the first call, with the names of its stages in the whole."""
    findings = [
        replace(
            finding,
            stage=FIRST_CALL + finding.stage,
            stages=tuple(FIRST_CALL + stage for stage in finding.stages),
            follows=tuple(FIRST_CALL + stage for stage in finding.follows),
        )
        for finding in found.findings
    ]
    return replace(
        found,
        stage=FIRST_CALL + found.stage,
        findings=findings,
        sample=f"the first call ({found.sample}), {UNCONFIRMED}",
        taken={},
        agrees=False,
    )


@dataclass
class _Search:
    """A search in samples of one kind.

    Attributes:
        samples: the samples.
        judge: diagnoses a sample.
        work: the limit of the search.
        found: explanations of samples, by the names of their bugs.
        first: the first sample that differs, and its diagnosis.
        agreed: the diagnosis of the last sample that agrees.
    """

    samples: TokenSamples | RowSamples
    judge: Judge
    work: Work
    found: dict[str, Finding] = field(default_factory=dict)
    first: tuple[Part, Diagnosis] | None = None
    agreed: Diagnosis | None = None

    def diagnosis(self) -> Diagnosis:
        """Return the diagnosis of the first sample that another one confirms, or what else samples
        show.
        """
        for part in self.samples.parts():
            diagnosis = self.judged(part, Scope(part.judged, is_quick=True), SEARCHES)
            if not diagnosis.is_wrong:
                self.agreed = diagnosis
                continue
            self.first = self.first or (part, diagnosis)
            confirmed = self.confirmed(diagnosis)
            if confirmed is not None:
                return confirmed
        if self.first is not None:
            return self.mixed() or self.thorough()
        return self.agreed or Diagnosis()

    def judged(self, part: Part, scope: Scope, share: float = 1.0) -> Diagnosis:
        """Diagnose a sample with a share of the remaining work."""
        if not part.observed:
            return Diagnosis()
        with self.work.counted(), single_threaded():
            return self.judge(part, scope, Work(share * self.work.left))

    def confirmed(self, diagnosis: Diagnosis) -> Diagnosis | None:
        """Return the diagnosis of a sample if it also explains another one."""
        self.found |= {"\n".join(each.bugs): each for each in diagnosis.known}
        if not diagnosis.known:
            return None
        contradicting, agreeing = list[str](), list[str]()
        for other in self.samples.confirming():
            again = self.judged(other, Scope(other.judged, self._names, is_quick=True), CONFIRMS)
            if again.untried:
                return self._merged(diagnosis, diagnosis, UNCONFIRMED)
            if not again.is_wrong:
                agreeing.append(other.words)
            elif again.leftover or not again.known:
                contradicting.append(other.words)
            else:
                words = ", ".join(
                    [f"confirmed by {other.words}", *(f"not by {words}" for words in contradicting)]
                )
                return self._merged(diagnosis, again, words)
        if agreeing and not contradicting:  # the bug is where the sample is
            return self._merged(diagnosis, diagnosis, f"and {', and '.join(agreeing)} agree")
        return None

    @property
    def _names(self) -> frozenset[str]:
        """The names of the bugs found so far, and descriptions of their alternatives."""
        names = {name for each in self.found.values() for name in each.bugs}
        return frozenset(names | {words for each in self.found.values() for words in each.others})

    def _merged(self, diagnosis: Diagnosis, again: Diagnosis, words: str) -> Diagnosis:
        """Return the joint diagnosis of samples; among alternatives the confirming sample, which is
        larger, decides.
        """
        by_name = self.found | {"\n".join(each.bugs): each for each in again.known}
        confirmed_names = {each.bugs for each in again.known}
        findings = [
            each
            for each in by_name.values()
            if each.bugs in confirmed_names or not _is_other(each, again)
        ]
        first, shown = self.first if self.first is not None else (None, diagnosis)
        words = f"{first.words}, {words}" if first is not None else words
        return replace(shown, findings=findings, untried="", sample=words)

    def mixed(self) -> Diagnosis | None:
        """Return an explanation by a bug that mixes rows."""
        with suppress(TimeoutError), self.work.counted(), self.work.inside("bugs that mix rows"):
            for part in self.samples.mixing():
                diagnosis = self.judged(part, Scope(part.judged, MIXING, is_quick=True))
                if diagnosis.known and not diagnosis.leftover:
                    return replace(diagnosis, sample=part.words)
        return None

    def thorough(self) -> Diagnosis:
        """Search for pairs and patterns in the first wrong sample, or in the one that did not
        confirm a bug.
        """
        if self.first is None:
            return Diagnosis()
        part = self._to_search_thoroughly(self.first[0])
        diagnosis = self.judged(part, Scope(part.judged))
        if not diagnosis.is_wrong:  # the first tokens do not show it
            part = self.first[0]
            diagnosis = self.judged(part, Scope(part.judged))
        if not diagnosis.leftover and diagnosis.known and not self.found:
            self.first = (part, diagnosis)
            confirmed = self.confirmed(diagnosis)
            if confirmed is not None:
                return confirmed
        is_law = diagnosis.kind == "pattern" and sample_of(part.problem) is not None
        return self._law(part, diagnosis) if is_law else replace(diagnosis, sample=part.words)

    def _to_search_thoroughly(self, first: Part) -> Part:
        """Return a sample that shows as much as possible."""
        if self.found:
            return next(self.samples.confirming(), first)
        sample = sample_of(first.problem)
        is_of_rows = sample is not None and sample.tokens is None
        if is_of_rows and first.problem.case.seq_len == self.samples.whole.problem.case.seq_len:
            return first
        return self.samples.complete() or first

    def _law(self, part: Part, diagnosis: Diagnosis) -> Diagnosis:
        """Return the pattern of a sample if another one shows the same; else the sample is
        unexplained.
        """
        other = next(self.samples.confirming())
        again = self.judged(other, Scope(other.judged, frozenset()))
        laws = [
            [(each.stage, each.pattern and each.pattern.name) for each in found.leftover]
            for found in (diagnosis, again)
        ]
        if laws[0] == laws[1]:
            return replace(diagnosis, sample=f"{part.words}, confirmed by {other.words}")
        unexplained = [replace(each, description=None) for each in diagnosis.leftover]
        return replace(diagnosis, findings=[*diagnosis.known, *unexplained], sample=part.words)


def _is_other(finding: Finding, confirmed: Diagnosis) -> bool:
    """Return True if a confirmed diagnosis explains the stages of an explanation by another bug."""
    return any({*finding.stages} & {*each.stages} for each in confirmed.known)


# ---- The verdict on the whole --------------------------------------------------------------------


def _joined(whole: Whole, diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Return the diagnosis of a layer by those of its samples, and by the comparison of its whole
    stages.
    """
    known = _distinct([finding for diagnosis in diagnoses for finding in diagnosis.known])
    leftover = [finding for diagnosis in diagnoses for finding in diagnosis.leftover]
    conventions: dict[str, str] = {}
    malformed: dict[str, str] = {}
    for diagnosis in diagnoses:
        conventions |= diagnosis.conventions
        malformed |= diagnosis.malformed
    first_wrong = whole.compared.first_wrong(conventions)
    explained = [finding.stage for finding in (*known, *leftover)]
    if first_wrong and not any(order_of(stage) <= order_of(first_wrong) for stage in explained):
        # The samples agree, but the whole stage does not, or only stages after it were found to
        # differ.
        comparison = whole.compared[first_wrong].comparison
        leftover = [Finding(first_wrong, comparison.error, comparison.ratio), *leftover]
    leftover = [_with_place(finding, whole) for finding in leftover]
    findings = sorted([*known, *leftover], key=lambda finding: order_of(finding.stage))
    wrong = [diagnosis for diagnosis in diagnoses if diagnosis.is_wrong]
    base = next(iter([*wrong, *diagnoses]))
    first = next(iter([*(finding.stage for finding in findings), *malformed]), "")
    joined = replace(
        base,
        stage=first_wrong or first,
        findings=findings,
        has_stages=len(whole.observed) > 1,
        malformed=malformed,
        conventions=conventions,
        choice=next((diagnosis.choice for diagnosis in diagnoses if diagnosis.choice), ""),
        untried=_listed(diagnosis.untried for diagnosis in diagnoses) if leftover else "",
        taken={name: x for diagnosis in diagnoses for name, x in diagnosis.taken.items()},
        sample=_listed((diagnosis.sample for diagnosis in diagnoses), "; "),
    )
    output = whole.compared.get("output")
    return replace(joined, agrees=joined.is_wrong and output is not None and output.passed)


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings, each bug once, with all stages that it explains."""
    by_bugs: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        same = by_bugs.get(finding.bugs)
        if same is None:
            by_bugs[finding.bugs] = finding
        else:
            stages = tuple(dict.fromkeys([*same.stages, *finding.stages]))
            by_bugs[finding.bugs] = replace(same, stages=stages)
    return list(by_bugs.values())


def _with_place(finding: Finding, whole: Whole) -> Finding:
    """Return an unexplained stage with the place in the whole stage, where it differs."""
    place = whole.compared.description(finding.stage)
    if place is None:
        return finding
    if finding.description is None:
        return replace(finding, description=place)
    return replace(
        finding,
        description=Description(place.place, finding.description.patterns, place.signs),
    )


def _listed(texts: Iterator[str], between: str = ", ") -> str:
    """Return different texts in a line."""
    return between.join(dict.fromkeys(text for text in texts if text))
