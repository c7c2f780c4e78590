"""The diagnosis of a large layer in samples: each bug is tried in one sample, and confirmed in
another.

The samples, their order and the work in them depend on the problem and the observed stages alone,
and so does the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from parity.explain.diagnosis.bugs import bugs_for
from parity.explain.diagnosis.findings import Diagnosis, Finding, order_of
from parity.explain.diagnosis.fits import Description
from parity.explain.diagnosis.sample import sample_of
from parity.explain.diagnosis.sampling import (
    CONFIRMED,
    FIRST_CALL,
    MIXING,
    ROWS,
    Part,
    Whole,
    multiplications,
)
from parity.explain.diagnosis.trial import EVERYTHING, Scope
from parity.explain.diagnosis.work import PER_MULTIPLICATION, Work
from parity.measure.core.blas import single_threaded
from parity.measure.core.stages import stage_named

DiagnosePart = Callable[[Part, Scope, Work], Diagnosis]
"""Diagnose a problem or a sample, within a scope and a limit of work."""

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

    @property
    def mixing_bugs(self) -> frozenset[str]:
        """No names of bugs that mix rows, because these change other stages."""
        return frozenset()

    def mixing(self) -> Iterator[tuple[Part, frozenset[str]]]:
        """Yield no samples for bugs that mix rows."""
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
        compared_stages: the stages that are compared; None for all.
    """

    whole: Whole
    compared_stages: frozenset[str] | None

    def parts(self) -> Iterator[Part]:
        """Yield samples to search, the cheaper first."""
        if self.whole.begins_with_a_layer(self.whole.num_tokens):
            yield self.whole.of_first_tokens(self.whole.num_tokens, 0, self.compared_stages)
        yield self.whole.of_rows(0, ROWS, self.compared_stages)

    def confirming(self) -> Iterator[Part]:
        """Yield independent samples with other features, which may confirm a bug.

        They are rows from everywhere, and more of the first tokens of a causal layer.
        """
        yield self.whole.of_rows(1, ROWS, self.compared_stages)
        more_tokens = CONFIRMED * self.whole.num_tokens
        if self.whole.begins_with_a_layer(more_tokens):
            yield self.whole.of_first_tokens(more_tokens, 1, self.compared_stages)

    @property
    def mixing_bugs(self) -> frozenset[str]:
        """Names of the bugs that mix rows and that the layer could have."""
        return MIXING & {bug.name for bug in bugs_for(self.whole.problem.case)}

    def mixing(self) -> Iterator[tuple[Part, frozenset[str]]]:
        """Yield samples for bugs that mix rows, and the names of the bugs that each shows."""
        yield from self.whole.mixing()

    def complete(self) -> Part | None:
        """Return the first tokens as a small problem, with every row and feature; None if they are
        not a layer.
        """
        return self.whole.complete(self.compared_stages)


# ---- The search ----------------------------------------------------------------------------------


def diagnosed_by_samples(whole: Whole, diagnose_part: DiagnosePart, seconds: float) -> Diagnosis:
    """Diagnose the stages of a large problem.

    Args:
        whole: the problem, without a cache, and its stages in the reference's order of axes.
        diagnose_part: diagnoses a sample.
        seconds: work of the search, see `parity.explain.diagnosis.work`, in addition to `SPARED`.
    """
    if not whole.compared.first_wrong():
        has_stages = len(whole.observed) > 1
        return Diagnosis(has_stages=has_stages, output_agrees=_output_agrees(whole))
    seconds_of_layer = PER_MULTIPLICATION * multiplications(whole.problem)
    work = Work(seconds + SPARED * seconds_of_layer)
    diagnoses: list[Diagnosis] = []
    of_rows: frozenset[str] | None = None
    with work.counted():
        if whole.stages_of_tokens:
            # The other samples may use the work that these leave.
            share = 0.5 if whole.other_stages else 1.0
            of_tokens = _Search(
                TokenSamples(whole), diagnose_part, Work(share * work.left)
            ).diagnosis()
            diagnoses.append(of_tokens)
            of_rows = whole.other_stages
            if of_tokens.leftover:
                # Paths of a module contain the same unknown cause, so they are not searched.
                of_rows -= whole.stages_of_paths
        if of_rows is None or of_rows:
            search = _Search(RowSamples(whole, of_rows), diagnose_part, Work(work.left))
            diagnoses.append(search.diagnosis())
    return _joined(whole, diagnoses)


def diagnosed_by_first_call(
    first: Whole | None, every_call: Part, diagnose_part: DiagnosePart, seconds: float
) -> Diagnosis:
    """Diagnose the calls of a large layer with a cache: by the first call, or else by all calls.

    Args:
        first: the first call, if it is a layer by itself.
        every_call: all calls.
        diagnose_part: diagnoses all calls, or a sample of the first.
        seconds: work of the search, see `parity.explain.diagnosis.work`.
    """
    work = Work(seconds)
    with work.counted(), single_threaded():
        if first is None:
            return diagnose_part(every_call, EVERYTHING, Work(work.left))
        by_first = diagnosed_by_samples(first, diagnose_part, CONFIRMS * seconds)
        if not by_first.known:
            return diagnose_part(every_call, EVERYTHING, Work(work.left))
        names = _names_in(by_first.known)
        by_all = diagnose_part(every_call, Scope(only=names, is_quick=True), Work(work.left))
        if by_all.known and not by_all.leftover:
            words = f"the first call ({by_first.sample}), confirmed by all calls"
            return replace(by_all, sample=words)
        if by_all.untried:
            return _of_first_call(by_first)
        return diagnose_part(every_call, EVERYTHING, Work(work.left))


def _names_in(findings: Iterable[Finding]) -> frozenset[str]:
    """Return the names of the bugs, and descriptions of their alternatives."""
    names: set[str] = set()
    for finding in findings:
        names.update(finding.bugs)
        names.update(finding.others)
    return frozenset(names)


def _of_first_call(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of the first call, with the names of its stages in the whole."""
    findings = []
    for finding in diagnosis.findings:
        stages = tuple([FIRST_CALL + stage for stage in finding.stages])
        follows = tuple([FIRST_CALL + stage for stage in finding.follows])
        findings.append(
            replace(finding, stage=FIRST_CALL + finding.stage, stages=stages, follows=follows)
        )
    return replace(
        diagnosis,
        stage=FIRST_CALL + diagnosis.stage,
        findings=findings,
        sample=f"the first call ({diagnosis.sample}), {UNCONFIRMED}",
        taken={},
        output_agrees=None,
    )


@dataclass
class _Search:
    """A search in samples of one kind.

    Attributes:
        samples: the samples.
        diagnose_part: diagnoses a sample.
        work: the limit of the search.
        by_bugs: known bugs in samples, by the names of their bugs.
        first: the first sample that differs, and its diagnosis.
        agreed: the diagnosis of the last sample that agrees.
        untried: parts of the search that were cut short, or that no sample could show.
    """

    samples: TokenSamples | RowSamples
    diagnose_part: DiagnosePart
    work: Work
    by_bugs: dict[tuple[str, ...], Finding] = field(default_factory=dict)
    first: tuple[Part, Diagnosis] | None = None
    agreed: Diagnosis | None = None
    untried: list[str] = field(default_factory=list)

    def diagnosis(self) -> Diagnosis:
        """Return the diagnosis of the first sample that another one confirms, or what else samples
        show.
        """
        for part in self.samples.parts():
            diagnosis = self.diagnosis_of(
                part, Scope(part.compared_stages, is_quick=True), SEARCHES
            )
            if not diagnosis.is_wrong:
                self.agreed = diagnosis
                continue
            if self.first is None:
                self.first = (part, diagnosis)
            confirmed = self.confirmed(diagnosis)
            if confirmed is not None:
                return confirmed
        if self.first is None:
            return self.agreed or Diagnosis()
        by_mixing = self.explained_by_mixing()
        if by_mixing is not None:
            return by_mixing
        by_thorough = self.thorough(self.first[0])
        return replace(by_thorough, untried=_listed([by_thorough.untried, *self.untried]))

    def diagnosis_of(self, part: Part, scope: Scope, share: float = 1.0) -> Diagnosis:
        """Diagnose a sample with a share of the remaining work."""
        if not part.observed:
            return Diagnosis()
        with self.work.counted(), single_threaded():
            return self.diagnose_part(part, scope, Work(share * self.work.left))

    def confirmed(self, diagnosis: Diagnosis) -> Diagnosis | None:
        """Return the diagnosis of a sample if it also explains another one."""
        for finding in diagnosis.known:
            self.by_bugs[finding.bugs] = finding
        if not diagnosis.known:
            return None
        names = _names_in(self.by_bugs.values())
        contradicting: list[str] = []
        agreeing: list[str] = []
        for other in self.samples.confirming():
            again = self.diagnosis_of(
                other, Scope(other.compared_stages, names, is_quick=True), CONFIRMS
            )
            if again.untried:
                return self._merged(diagnosis, diagnosis, UNCONFIRMED)
            if not again.is_wrong:
                agreeing.append(other.words)
            elif again.leftover or not again.known:
                contradicting.append(f"not by {other.words}")
            else:
                words = ", ".join([f"confirmed by {other.words}", *contradicting])
                return self._merged(diagnosis, again, words)
        if agreeing and not contradicting:
            # The bug shows only where the first sample is.
            return self._merged(diagnosis, diagnosis, f"and {', and '.join(agreeing)} agree")
        return None

    def _merged(self, diagnosis: Diagnosis, again: Diagnosis, words: str) -> Diagnosis:
        """Return the joint diagnosis of samples; among alternatives the confirming sample, which is
        larger, decides.
        """
        by_bugs = dict(self.by_bugs)
        confirmed_stages: set[str] = set()
        for finding in again.known:
            by_bugs[finding.bugs] = finding
            confirmed_stages.update(finding.stages)
        confirmed_bugs = {finding.bugs for finding in again.known}
        findings = []
        for bugs, finding in by_bugs.items():
            # Another bug may explain the same stages in the confirming sample.
            if bugs in confirmed_bugs or confirmed_stages.isdisjoint(finding.stages):
                findings.append(finding)
        shown = diagnosis
        if self.first is not None:
            part, shown = self.first
            words = f"{part.words}, {words}"
        return replace(shown, findings=findings, untried="", sample=words)

    def explained_by_mixing(self) -> Diagnosis | None:
        """Return the diagnosis by bugs that mix rows; None if none of them explains a sample."""
        names_left = set(self.samples.mixing_bugs)
        try:
            with self.work.counted(), self.work.inside("bugs that mix rows"):
                for part, names in self.samples.mixing():
                    diagnosis = self.diagnosis_of(
                        part, Scope(part.compared_stages, names, is_quick=True)
                    )
                    if diagnosis.known and not diagnosis.leftover:
                        return replace(diagnosis, sample=part.words)
                    if not diagnosis.untried:
                        names_left -= names
        except TimeoutError:
            pass  # the limit of the search; the names that are left say so
        self.untried += sorted(names_left)
        return None

    def thorough(self, first_part: Part) -> Diagnosis:
        """Search for pairs and patterns in the first wrong sample, or in the one that did not
        confirm a bug.
        """
        part = self._to_search_thoroughly(first_part)
        diagnosis = self.diagnosis_of(part, Scope(part.compared_stages))
        if not diagnosis.is_wrong:
            # The larger sample does not show what the first one does.
            part = first_part
            diagnosis = self.diagnosis_of(part, Scope(part.compared_stages))
        if diagnosis.known and not diagnosis.leftover and not self.by_bugs:
            self.first = (part, diagnosis)
            confirmed = self.confirmed(diagnosis)
            if confirmed is not None:
                return confirmed
        is_by_patterns = bool(diagnosis.leftover) and not diagnosis.unexplained
        if is_by_patterns and sample_of(part.problem) is not None:
            return self._pattern(part, diagnosis)
        return replace(diagnosis, sample=part.words)

    def _to_search_thoroughly(self, first_part: Part) -> Part:
        """Return a sample that shows as much as possible."""
        if self.by_bugs:
            return next(self.samples.confirming(), first_part)
        sample, num_tokens = sample_of(first_part.problem), first_part.problem.case.seq_len
        is_of_rows = sample is not None and sample.tokens is None
        if is_of_rows and num_tokens == self.samples.whole.problem.case.seq_len:
            return first_part
        return self.samples.complete() or first_part

    def _pattern(self, part: Part, diagnosis: Diagnosis) -> Diagnosis:
        """Return the pattern of a sample if another one shows the same; else the sample is
        unexplained.
        """
        other = next(self.samples.confirming())
        no_bugs = frozenset[str]()
        again = self.diagnosis_of(other, Scope(other.compared_stages, no_bugs))
        if _patterns_in(diagnosis) == _patterns_in(again):
            return replace(diagnosis, sample=f"{part.words}, confirmed by {other.words}")
        unexplained = [replace(finding, description=None) for finding in diagnosis.leftover]
        untried = [diagnosis.untried]
        if again.untried:
            untried.append(f"the pattern in {other.words}")
        return replace(
            diagnosis,
            findings=[*diagnosis.known, *unexplained],
            untried=_listed(untried),
            sample=part.words,
        )


def _patterns_in(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return each unexplained stage with the name of its pattern, if any."""
    patterns = []
    for finding in diagnosis.leftover:
        name = ""
        if finding.pattern is not None:
            name = finding.pattern.name
        patterns.append((finding.stage, name))
    return patterns


# ---- The verdict on the whole --------------------------------------------------------------------


def _joined(whole: Whole, diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Return the diagnosis of a layer by the diagnoses of its samples, and by the comparison of its
    whole stages.
    """
    known: list[Finding] = []
    leftover: list[Finding] = []
    conventions: dict[str, str] = {}
    malformed: dict[str, str] = {}
    taken: dict[str, np.ndarray] = {}
    for diagnosis in diagnoses:
        known += diagnosis.known
        leftover += diagnosis.leftover
        conventions.update(diagnosis.conventions)
        malformed.update(diagnosis.malformed)
        taken.update(diagnosis.taken)
    known = _distinct(known)
    first_wrong = whole.compared.first_wrong(conventions)
    explained = [finding.stage for finding in (*known, *leftover)]
    if first_wrong and not _has_one_up_to(first_wrong, explained):
        # The samples agree, but the whole stage does not, or only stages after it were found to
        # differ.
        comparison = whole.compared[first_wrong]
        leftover.insert(0, Finding(first_wrong, comparison.error, comparison.ratio))
    leftover = [_with_location(finding, whole) for finding in leftover]
    leftover = _followed_by_paths(leftover, known, whole)
    findings = sorted([*known, *leftover], key=_position)
    stages = [finding.stage for finding in findings]
    untried = ""
    if leftover:
        untried = _listed([diagnosis.untried for diagnosis in diagnoses])
    wrong = [diagnosis for diagnosis in diagnoses if diagnosis.is_wrong]
    first_diagnosis = next(iter([*wrong, *diagnoses]))
    joined = replace(
        first_diagnosis,
        stage=first_wrong or next(iter([*stages, *malformed]), ""),
        findings=findings,
        has_stages=len(whole.observed) > 1,
        malformed=malformed,
        conventions=conventions,
        choice=next((diagnosis.choice for diagnosis in diagnoses if diagnosis.choice), ""),
        untried=untried,
        taken=taken,
        sample=_listed([diagnosis.sample for diagnosis in diagnoses], "; "),
    )
    return replace(joined, output_agrees=_output_agrees(whole))


def _output_agrees(whole: Whole) -> bool | None:
    """Return whether the whole output agrees; None if it was not compared."""
    output = whole.compared.get("output")
    if output is None:
        return None
    return output.passed


def _followed_by_paths(
    leftover: list[Finding], known: Sequence[Finding], whole: Whole
) -> list[Finding]:
    """Return findings without a known bug, the last of them with the wrong stages of a module's own
    paths: these were not searched, or follow from the same cause.
    """
    of_functions = [finding for finding in leftover if not stage_named(finding.stage).path]
    if not of_functions:
        return leftover
    last = max(of_functions, key=_position)
    reported: set[str] = set()
    for finding in (*known, *leftover):
        reported.update((finding.stage, *finding.stages, *finding.follows))
    follows = list(last.follows)
    for stage in whole.compared:
        is_of_path = stage in whole.stages_of_paths
        if is_of_path and stage not in reported and not whole.compared[stage].passed:
            follows.append(stage)
    index = leftover.index(last)
    followed = replace(last, follows=tuple(follows))
    return [*leftover[:index], followed, *leftover[index + 1 :]]


def _has_one_up_to(last: str, stages: Iterable[str]) -> bool:
    """Return whether one of some stages is a given stage, or comes before it."""
    return any(order_of(stage) <= order_of(last) for stage in stages)


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings, each bug once, with all stages that it explains."""
    by_bugs: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        bugs = finding.bugs
        if bugs in by_bugs:
            stages = dict.fromkeys([*by_bugs[bugs].stages, *finding.stages])
            by_bugs[bugs] = replace(by_bugs[bugs], stages=tuple(stages))
        else:
            by_bugs[bugs] = finding
    return list(by_bugs.values())


def _with_location(finding: Finding, whole: Whole) -> Finding:
    """Return an unexplained stage with its location in the whole stage."""
    of_whole = whole.compared.description(finding.stage)
    if of_whole is None:
        return finding
    if finding.description is None:
        return replace(finding, description=of_whole)
    patterns = finding.description.patterns
    return replace(finding, description=Description(of_whole.location, patterns, of_whole.signs))


def _position(finding: Finding) -> tuple[int, int]:
    """Return the position of a finding's stage in the data flow."""
    return order_of(finding.stage)


def _listed(texts: Iterable[str], between: str = ", ") -> str:
    """Return different texts in a line."""
    return between.join(dict.fromkeys([text for text in texts if text]))
