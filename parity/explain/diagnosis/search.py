"""The search for the edits that explain stages.

For each stage that differs, in the order of the data flow, candidates are tried in one order: known
bugs alone, cheap ones first; known bugs that only lose precision; pairs of known bugs; and
patterns, whose parameters are fitted to the stage. An edit explains a stage if the reference, which
is computed with it from the observed stages before, differs by rounding alone, and no other stage
becomes wrong.

A *part* of a trace is what is searched at once: the stage functions, then each path of a module. A
*chain* is the search's plan for a part: one cause after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from parity.explain.diagnosis.bugs.record import Edit, Edits
from parity.explain.diagnosis.findings import Finding, plain
from parity.explain.diagnosis.fits import EVERYWHERE, Description
from parity.explain.diagnosis.patterns import injected_pattern
from parity.explain.diagnosis.sample import sample_of
from parity.explain.diagnosis.trial import WIDE_ENOUGH, Trial
from parity.explain.diagnosis.work import Work
from parity.measure.core.case import Case
from parity.measure.core.compare import Deviation, dtype_of_stage, size_of
from parity.measure.core.stages import stage_named

PARTS = {
    "": "",
    "module": "in the module's plain path: ",
    "fused": "in the fused path: ",
    "blocks": "in the fused path, block by block: ",
    "plain": "in the tutorial, plain.py: ",
}
"""Parts of a trace that may have bugs of their own, with a description: "" is the stage functions,
the others are paths of a module.
"""

MOST_EDITS = 4
"""Edits that are searched at the same time."""

MOST_BRANCHES = 6
"""Ways to explain a stage that are followed."""

FAR_OFF = 100.0
"""The error with an edit, over its budget, above which no exact budget is needed to reject it."""

NEARLY = 10.0
"""The error with one bug, over its budget, below which a second bug only fits noise."""

CHANCE = 0.5
"""The share of an error that a bug may leave. A wrong one also moves rounded values: a small gain
is chance.
"""

LEFT_BY_LOSS = 0.1
"""The share of the mean error that a loss of precision may leave, in dtypes in which it shows; and
that a different rounding may leave."""

COMPUTED_ALIKE = ({"q", "k"}, {"k", "v"}, {"cache.keys", "cache.values"})
"""Stages that one line of code often computes, in a function or a loop."""

REPEATED = 2.0
"""The largest error of a module's path, in multiples of the change by a loss of precision."""

SMALL = 0.25
"""The largest share of a stage that lost precision may change."""

NEAREST = 3
"""The bugs that are reported as the nearest ones to an unexplained stage."""

CHEAP = 0.1
"""The share of the work that a bug may take before it is postponed until the others were tried."""

FOR_LOSSES = 0.6
"""The share of the work, including earlier work, for lost precision in a sample: other samples may
show more.
"""

FOR_OTHERS = 0.3
"""The share of the work in a sample after which a bug that explains it is confirmed before others
are tried.
"""

FOR_BUGS = 0.7
"""The share of the work for known bugs; the rest describes stages that none explains."""


# ---- The whole search ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        findings: one for each cause, in the order of the stages.
    """

    findings: list[Finding]

    @property
    def count(self) -> int:
        """The number of known bugs."""
        return sum(len(finding.edits) for finding in self.findings)

    @property
    def is_complete(self) -> bool:
        """True if known bugs explain everything."""
        return all(finding.edits for finding in self.findings)

    @property
    def is_one_bug(self) -> bool:
        """True if one known bug explains everything."""
        return self.is_complete and self.count == 1

    @property
    def cost(self) -> tuple[int, int]:
        """The cost of the result: fewer unexplained stages are better, then fewer bugs."""
        return sum(not finding.edits for finding in self.findings), self.count


def search(trial: Trial, work: Work, begin: Edits = ()) -> SearchResult:
    """Search for the edits that explain all stages that differ, as far as possible.

    Args:
        trial: the reference, and the observed stages.
        work: the limit of the search.
        begin: bugs that are assumed from the start.
    """
    findings: list[Finding] = []
    bugs: list[Edit] = []
    edits_of_stages = begin
    for part in PARTS:
        edits = _shared_edits(trial, part, edits_of_stages)
        if part == "":
            edits_of_stages = edits
        if not trial.wrong(trial.of_path(part), edits):
            continue
        earlier_names = {bug.name for bug in bugs}
        part_search = _PartSearch(trial, work, part, edits, earlier_names)
        part_search.run()
        findings += part_search.findings
        bugs += [bug for bug in part_search.bugs if bug not in bugs]
        if part == "":
            edits_of_stages = part_search.edits
        if any(not finding.edits for finding in part_search.findings):
            # The paths of a module contain the same, so they are not searched.
            findings = _followed_by_other_paths(trial, findings, part, edits_of_stages)
            break
    assumed = _finding_of_begin(trial, begin, tuple(bugs))
    if assumed is not None:
        findings.append(assumed)
        findings.sort(key=lambda finding: trial.stages.index(finding.stage))
    return SearchResult(findings)


def _followed_by_other_paths(
    trial: Trial, findings: Sequence[Finding], part: str, edits: Edits
) -> list[Finding]:
    """Return findings with the wrong stages of the paths after a part: each follows the last
    unexplained finding of its call, or of a call before it.
    """
    followed = list(findings)
    paths = list(PARTS)
    for path in paths[paths.index(part) + 1 :]:
        shared = _shared_edits(trial, path, edits)
        for stage in trial.wrong(trial.of_path(path), shared):
            if _repeats_a_loss(trial, stage, shared):
                continue
            for number in range(len(followed) - 1, -1, -1):
                finding = followed[number]
                if not finding.edits and _call_of(finding.stage) <= _call_of(stage):
                    followed[number] = replace(finding, follows=(*finding.follows, stage))
                    break
    return followed


def _call_of(stage: str) -> int:
    """Return the call of a cache that a stage is of; 0 without a cache."""
    return stage_named(stage).step or 0


def _shared_edits(trial: Trial, part: str, edits: Edits) -> Edits:
    """Return the edits of the stage functions that a path of a module shares: those with which
    fewest of its stages are wrong, as many as possible.
    """
    stages = trial.of_path(part)
    best = edits
    fewest = len(trial.wrong(stages, edits))
    if not fewest:
        return edits
    for number in range(len(edits) - 1, -1, -1):
        for subset in itertools.combinations(edits, number):
            num_wrong = len(trial.wrong(stages, subset))
            if num_wrong < fewest:
                best, fewest = subset, num_wrong
    return best


def _finding_of_begin(trial: Trial, begin: Edits, others: Edits) -> Finding | None:
    """Return the finding of bugs that were assumed; None if there are none, or if they explain
    nothing.
    """
    if not begin:
        return None
    wrong = trial.wrong(trial.stages, others)
    still_wrong = trial.wrong(wrong, (*begin, *others))
    for stage in wrong:
        if stage not in still_wrong:
            return _finding(trial, trial.stages, others, _Cause(stage, begin), "")
    return None


# ---- The search in a part ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cause:
    """Edits that explain a stage, and alternatives."""

    stage: str
    edits: Edits
    others: tuple[Edits, ...] = ()


@dataclass(frozen=True)
class _Chain:
    """Causes one after the other, and the first stage that they do not explain; empty if there is
    none.
    """

    causes: tuple[_Cause, ...] = ()
    unexplained: str = ""

    @property
    def length(self) -> int:
        """The number of edits."""
        return sum(len(cause.edits) for cause in self.causes)


class _PartSearch:
    """The search in one part of a trace: the stage functions, or a path of a module.

    Attributes:
        findings: one for each cause so far.
        edits: everything that is injected so far: known bugs, and patterns.
        bugs: the known bugs that this part added.
        earlier_names: the names of known bugs in other parts, which this one probably has as well.
    """

    def __init__(
        self, trial: Trial, work: Work, part: str, edits: Edits, earlier_names: Collection[str]
    ) -> None:
        self.trial = trial
        self.work = work
        self.part = part
        self.findings: list[Finding] = []
        self.edits = edits
        self.bugs: list[Edit] = []
        self.earlier_names = earlier_names

    def run(self) -> None:
        """Explain one stage after the other, until none is left."""
        stages = self.trial.of_path(self.part)
        edits = self.edits
        bypassing = self._bypassing(stages)
        self._explain([stage for stage in stages if stage not in bypassing])
        for stage in bypassing:
            self._follow(stage, edits)
        self._join_alike()

    def _join_alike(self) -> None:
        """Join findings of the same pattern, such as of keys and values: they have one cause."""
        joined: list[Finding] = []
        for finding in self.findings:
            alike = [n for n, earlier in enumerate(joined) if _have_one_pattern(earlier, finding)]
            if alike:
                joined[alike[0]] = self._joined(joined[alike[0]], finding)
            else:
                joined.append(finding)
        self.findings = joined

    def _joined(self, one: Finding, other: Finding) -> Finding:
        """Return one finding with the stages of two."""
        index_of = self.trial.stages.index
        stages = sorted({*one.explained_stages, *other.explained_stages}, key=index_of)
        follows = sorted({*one.follows, *other.follows}, key=index_of)
        return replace(one, stages=tuple(stages), follows=tuple(follows))

    def _bypassing(self, stages: Sequence[str]) -> list[str]:
        """Return the stages that are right as a whole, and wrong only for the values recorded
        before them: these were recorded wrongly, and nothing was computed from them.
        """
        trial = self.trial
        bypassing: list[str] = []
        wrongly_recorded: list[str] = []
        for stage in trial.wrong(stages, self.edits):
            is_right = trial.is_right_as_a_whole(stage, self.edits)
            if is_right and trial.is_computed_from(stage, wrongly_recorded, self.edits):
                bypassing.append(stage)
            else:
                wrongly_recorded.append(stage)
        return bypassing

    def _follow(self, stage: str, edits: Edits) -> None:
        """Add a stage to the last finding before it whose stages it is computed from.

        If there is none, because all are NaN for example, it is added to the last before it.

        Args:
            stage: the stage, which is right as a whole.
            edits: those with which it is.
        """
        index_of = self.trial.stages.index
        before = [
            number
            for number, finding in enumerate(self.findings)
            if index_of(finding.stage) < index_of(stage)
        ]
        for number in reversed(before):
            finding = self.findings[number]
            wrong = {finding.stage, *finding.stages, *finding.follows}
            if self.trial.is_computed_from(stage, wrong, edits):
                self._add_following(number, stage)
                return
        if before:
            self._add_following(before[-1], stage)

    def _add_following(self, number: int, stage: str) -> None:
        """Add a stage to the finding that it follows from."""
        finding = self.findings[number]
        follows = sorted([*finding.follows, stage], key=self.trial.stages.index)
        self.findings[number] = replace(finding, follows=tuple(follows))

    def _explain(self, stages: list[str]) -> None:
        """Explain stages, one after the other."""
        while True:
            chain = self._chain(stages)
            for cause in chain.causes:
                self.findings.append(
                    _finding(self.trial, stages, self.edits, cause, PARTS[self.part])
                )
                self.edits = (*self.edits, *cause.edits)
                self.bugs += cause.edits
            unexplained = chain.unexplained
            if not unexplained:
                return
            if not (self.part and _repeats_a_loss(self.trial, unexplained, self.edits)):
                self._leave(unexplained, stages)
            # The next stages are computed from the observed values of this one.
            stages = stages[stages.index(unexplained) + 1 :]
            if self.trial.scope.is_one_by_one:
                for stage in self.trial.wrong(stages, self.edits):
                    self._add_following(len(self.findings) - 1, stage)
                return

    def _chain(self, stages: Sequence[str]) -> _Chain:
        """Return the shortest way to explain all stages, or one that reaches far: single bugs
        first, then also pairs.
        """
        trial = self.trial
        best = self._best_chain(stages, self.edits, most=1)
        if trial.scope.is_quick or trial.scope.is_one_by_one or not best.unexplained:
            return best
        is_of_module = bool(stage_named(best.unexplained).path)
        if is_of_module and _repeats_a_loss(trial, best.unexplained, self.edits):
            return best
        if self.work.is_over("pairs of bugs", FOR_BUGS):
            return best
        with_pairs = self._best_chain(stages, self.edits, most=2)
        if not with_pairs.unexplained:
            return with_pairs
        if stages.index(with_pairs.unexplained) > stages.index(best.unexplained):
            return with_pairs
        return best

    def _best_chain(self, stages: Sequence[str], edits: Edits, *, most: int) -> _Chain:
        """Return the best way to explain stages.

        Args:
            stages: the stages to explain.
            edits: those that are injected already.
            most: the largest number of edits to add for one stage.
        """
        wrong = self.trial.wrong(stages, edits)
        if not wrong:
            return _Chain()
        stage = wrong[0]
        best = _Chain(unexplained=stage)
        question = _Question(self.trial, stages, stage, edits)
        for at_once in range(1, most + 1):
            if len(edits) + at_once > MOST_EDITS:
                break
            if at_once == 1:
                explaining = _single_bugs(question, self.work)
            else:
                explaining = _pairs_of_bugs(question, self.work)
            candidates = _best_first(question, explaining)[:MOST_BRANCHES]
            chains: dict[Edits, _Chain] = {}
            for added in candidates:
                chains[added] = self._best_chain(stages, (*edits, *added), most=most)
            complete = {added: chain for added, chain in chains.items() if not chain.unexplained}
            if complete:
                shortest = min(chain.length for chain in complete.values())
                equal = [added for added, chain in complete.items() if chain.length == shortest]
                equal.sort(key=self._is_new)
                first, *others = _distinct(equal)
                cause = _Cause(stage, first, tuple(others))
                return _Chain((cause, *complete[first].causes))
            for added, chain in sorted(
                chains.items(), key=lambda tried: self._num_changed_in_vain(stages, edits, tried[0])
            ):
                if question.cancel_each_other(added):
                    continue
                if stages.index(chain.unexplained) > stages.index(best.unexplained):
                    best = _Chain((_Cause(stage, added), *chain.causes), chain.unexplained)
        return best

    def _num_changed_in_vain(self, stages: Sequence[str], edits: Edits, added: Edits) -> int:
        """Return the number of wrong stages that edits change and leave wrong: a bug in queries
        alone says less about the keys than one in both.
        """
        trial = self.trial
        with_added = (*edits, *added)
        still_wrong = trial.wrong(trial.wrong(stages, edits), with_added)
        return sum(
            not trial.leaves(trial.step_of[name], edits, added, [name]) for name in still_wrong
        )

    def _is_new(self, added: Edits) -> bool:
        """Return True if no other part has one of some bugs."""
        return all(edit.name not in self.earlier_names for edit in added)

    def _leave(self, stage: str, stages: Sequence[str]) -> None:
        """Report a stage that no known bug explains, unless it is wrong because of an earlier one;
        the search goes on with the pattern that explains it, if there is one.
        """
        trial = self.trial
        unexplained = self._unexplained_in_an_earlier_call(stage)
        if unexplained is not None:
            self._add_following(unexplained, stage)
            return
        finding = _unexplained(trial, stage, self.edits, self.work)
        same_cause = self._same_cause(finding)
        if same_cause is not None:
            self._add_following(same_cause, stage)
            return
        pattern: Edits = ()
        if finding.description is not None:
            pattern = injected_pattern(trial, stage, self.edits, finding.description.patterns)
        stages_explained = trial.explained(stages, self.edits, pattern)
        self.findings.append(_with_stages(finding, stages_explained, pattern))
        self.edits = (*self.edits, *pattern)

    def _unexplained_in_an_earlier_call(self, stage: str) -> int | None:
        """Return the number of the finding in which nothing explains the same stage of an earlier
        call; None if there is none.

        A stage that no known bug explains in one call and in a later one has one cause, unless a
        pattern explains the first and no pattern of its kind the second.
        """
        for number, earlier in self._of_the_same_quantity(stage):
            if earlier.pattern is None:
                return number
        return None

    def _same_cause(self, finding: Finding) -> int | None:
        """Return the number of the finding of an earlier call that a pattern of the same kind
        explains; None if there is none.
        """
        for number, earlier in self._of_the_same_quantity(finding.stage):
            if finding.pattern is None or earlier.pattern is None:
                continue
            if finding.pattern.name == earlier.pattern.name:
                return number
        return None

    def _of_the_same_quantity(self, stage: str) -> Iterator[tuple[int, Finding]]:
        """Yield the findings of the same stage in earlier calls that no known bug explains, with
        their numbers.
        """
        known = stage_named(stage)
        for number, earlier in enumerate(self.findings):
            other = stage_named(earlier.stage)
            if (other.quantity, other.path) == (known.quantity, known.path) and not earlier.edits:
                yield number, earlier


def _have_one_pattern(one: Finding, other: Finding) -> bool:
    """Return True if the same pattern explains two stages of a call that are computed alike."""
    if not (one.is_fitted and other.is_fitted) or one.about != other.about:
        return False
    first, second = stage_named(one.stage), stage_named(other.stage)
    if (first.step, first.path) != (second.step, second.path):
        return False
    return {first.quantity, second.quantity} in COMPUTED_ALIKE


def _repeats_a_loss(trial: Trial, stage: str, edits: Edits) -> bool:
    """Return True if a module's own path only repeats a loss of precision that explains the stage
    functions.

    Its steps are not observed, so a number in the middle between two narrower ones may be rounded
    either way, and all that follows differs. The values cannot be reproduced then. They differ as
    much as the loss changes them.
    """
    if not edits or not all(edit.is_loss for edit in edits):
        return False
    change = trial.stage(stage, edits).astype(np.float64) - trial.stage(stage)
    return trial.deviation(stage, ()).error <= REPEATED * size_of(change)


# ---- Known bugs that explain a stage -------------------------------------------------------------


@dataclass(frozen=True)
class _Question:
    """Which edits explain a stage, in addition to those before it?

    Attributes:
        trial: the reference, and the observed stages.
        stages: the stages to explain.
        stage: the stage, the first of them that differs.
        edits: those that are injected already.
    """

    trial: Trial
    stages: Sequence[str]
    stage: str
    edits: Edits

    @cached_property
    def index(self) -> int:
        """The step of the stage."""
        return self.trial.step_of[self.stage]

    @cached_property
    def call(self) -> int | None:
        """The call of a cache that the stage is of; None without a cache."""
        return stage_named(self.stage).step

    @cached_property
    def before(self) -> Deviation:
        """The comparison without more edits."""
        return self.trial.deviation(self.stage, self.edits)

    @cached_property
    def expected(self) -> np.ndarray:
        """The stage without more edits."""
        return self.trial.stage(self.stage, self.edits)

    @cached_property
    def wrong_sequences(self) -> frozenset[int]:
        """The sequences of a batch in which the stage is certainly wrong."""
        return self.trial.sequences_far_off(self.stage, self.edits)

    @cached_property
    def _of_same_part(self) -> list[str]:
        return self.trial.of_path(stage_named(self.stage).path)

    @cached_property
    def _wrong(self) -> list[str]:
        return self.trial.wrong(self._of_same_part, self.edits)

    @cached_property
    def right(self) -> list[str]:
        """The stages of the same part that are right, and must stay so."""
        return [stage for stage in self._of_same_part if stage not in self._wrong]

    @cached_property
    def given_up(self) -> list[str]:
        """The same stage in earlier calls, if it differs there and nothing explains it."""
        kind = stage_named(self.stage).kind
        before = self.trial.stages[: self.trial.stages.index(self.stage)]
        return [
            stage
            for stage in self._wrong
            if stage in before and stage not in self.stages and stage_named(stage).kind == kind
        ]

    @cached_property
    def in_other_calls(self) -> list[str]:
        """The same stage in other calls of a cache, where it differs as well."""
        kind = stage_named(self.stage).kind
        return [
            stage
            for stage in self._wrong
            if stage != self.stage and stage_named(stage).kind == kind
        ]

    @cached_property
    def is_small(self) -> bool:
        """True if the error is so small that lost precision may cause it."""
        if stage_named(self.stage).is_exact:
            return False
        return self.before.error <= SMALL * size_of(self.expected)

    def candidates(self, *, with_losses: bool) -> list[Edit]:
        """Return the known bugs that may be tried, usual ones first: those of some sequences alone
        only if no other sequence is wrong.
        """
        # By name and description: a bug has several records, one for each step, and one that is
        # limited to some calls.
        injected = {(edit.name, edit.about, edit.calls) for edit in self.edits}
        candidates: list[Edit] = []
        for bug in self.trial.known_at(self.index, with_losses=with_losses):
            may_explain = bug.sequences is None or self.wrong_sequences <= bug.sequences
            if may_explain and not _is_among(bug, injected):
                candidates.append(bug)
        return candidates

    def changes(self, edit: Edit) -> bool:
        """Return True if an edit changes the stage."""
        with_edit = self.trial.stage(self.stage, (*self.edits, edit))
        return not np.array_equal(self.expected, with_edit, equal_nan=True)

    def forms(self, added: Edits) -> list[Edits]:
        """Return edits in the calls in which they may be, the likeliest first, if they leave only
        rounding and spoil no right stage; an empty list if they do not.
        """
        bug, *others = added
        if self.call is None or others or bug.is_loss:
            if self._is_explained_by(added) and self._spoils_nothing(added):
                return [added]
            return []
        return self._forms_in_calls(bug)

    def _forms_in_calls(self, bug: Edit) -> list[Edits]:
        """Return a bug of a layer with a cache in the calls in which it may be.

        A bug that would spoil stages of other calls is returned for the calls that show it, if
        these have a name. One that does not explain the same stage in another call may be absent
        there, and another bug present; or a second one is present as well.
        """
        added = (bug,)
        if not self._is_explained_by(added):
            if not self._changes_the_cache(bug):
                return []
            return self._in_calls(bug, explains_all=True)
        if not self._spoils_nothing(added):
            return self._in_calls(bug)
        still_wrong = self.trial.wrong(self.in_other_calls, (*self.edits, *added))
        if not still_wrong:
            if self._is_hidden_in_other_calls():
                return self._in_calls(bug, explains_all=True) or [added]
            return [added]
        forms = [added, *self._in_calls(bug, explains_all=True)]
        forms.sort(key=lambda form: self._error_in(still_wrong[0], form))
        return forms

    def _changes_the_cache(self, bug: Edit) -> bool:
        """Return True if a bug in earlier calls changes what they cache, and it was not observed:
        the bug may explain the stage if only later calls have it.
        """
        trial = self.trial
        if not self.call or not trial.is_unobserved(self.index):
            return False
        for step, names in enumerate(trial.steps[: self.index]):
            cached = [name for name in names if _is_cached_before(name, self.call)]
            if cached and not trial.leaves(step, self.edits, (bug,), cached):
                return True
        return False

    def _is_hidden_in_other_calls(self) -> bool:
        """Return True if an edit explains other calls than this one: a bug that changes nothing
        there may be hidden by it, so nothing shows that these calls have the bug as well.
        """
        return any(edit.calls is not None and self.call not in edit.calls for edit in self.edits)

    def _error_in(self, stage: str, added: Edits) -> float:
        """Return the error of a stage with more edits."""
        return self.trial.deviation(stage, (*self.edits, *added)).error

    def _is_explained_by(self, added: Edits) -> bool:
        """Return True if more edits leave only rounding in the stage."""
        trial = self.trial
        edits = (*self.edits, *added)
        first, *others = added
        # The budget of each edited layer is expensive, and most edits are rejected without one.
        if not self._may_fall(edits):
            return False
        # The budget of the right layer is close to it. Not so for lost precision, but a bug that
        # explains much less than nearly all may be the loss in another part.
        is_noise_known = not any(edit.has_more_noise for edit in added)
        if is_noise_known and trial.deviation(self.stage, edits, quick=True).ratio > FAR_OFF:
            return False
        if others and any(self._is_nearly_explained_by(edit) for edit in added):
            return False
        after = trial.deviation(self.stage, edits)
        if after.ratio > 1.0 or not _falls(self.before, after):
            return False
        if first.is_loss and not self._is_reproduced_by(edits):
            return False
        is_rounding = any(edit.is_rounding for edit in added)
        return not is_rounding or self._is_rounded_alike(edits)

    def _may_fall(self, edits: Edits) -> bool:
        """Return False if the error with edits does not fall by more than chance, see `_falls`."""
        norm = self.before.norm
        errors = self.trial.errors(self.stage, edits)
        if norm not in errors:
            return True
        return not errors[norm] > CHANCE * self.before.error_in(norm)

    def _is_nearly_explained_by(self, edit: Edit) -> bool:
        return self.trial.deviation(self.stage, (*self.edits, edit)).ratio <= NEARLY

    def cancel_each_other(self, added: Edits) -> bool:
        """Return True if each of several bugs alone makes the stage worse.

        Their errors nearly cancel then, and what they leave may resemble any small error: they are
        believed only if they explain all stages.
        """
        if len(added) < 2:
            return False
        return all(
            self.trial.deviation(self.stage, (*self.edits, edit)).error > self.before.error
            for edit in added
        )

    def _is_reproduced_by(self, edits: Edits) -> bool:
        """Return True if a loss of precision reproduces the stage, as far as values of the layer's
        dtype can show.
        """
        trial = self.trial
        if trial.problem.dtype not in WIDE_ENOUGH:
            return True
        return self._leaves_little(self.expected, trial.stage(self.stage, edits))

    def _is_rounded_alike(self, edits: Edits) -> bool:
        """Return True if a different rounding reproduces the stage in its own dtype: budgets in 16
        bits are wider than a step between stored values.
        """
        trial = self.trial
        dtype = dtype_of_stage(self.stage, trial.problem.dtype)
        with_edits = trial.stage(self.stage, edits)
        return self._leaves_little(self.expected.astype(dtype), with_edits.astype(dtype))

    def _leaves_little(self, expected: np.ndarray, with_edits: np.ndarray) -> bool:
        """Return True if edits leave little of the mean error of the stage."""
        before = self.trial.distance(self.stage, expected)
        after = self.trial.distance(self.stage, with_edits)
        return after <= LEFT_BY_LOSS * before

    def _spoils_nothing(self, added: Edits) -> bool:
        """Return True if more edits leave every right stage right, and do not change an earlier
        one that they do not explain.
        """
        trial = self.trial
        if trial.wrong(self.right, (*self.edits, *added)):
            return False
        return all(
            trial.leaves(trial.step_of[stage], self.edits, added, [stage])
            for stage in self.given_up
        )

    def _in_calls(self, bug: Edit, *, explains_all: bool = False) -> list[Edits]:
        """Return a bug for those calls of a cache that show it, if they have a name.

        Args:
            bug: the bug.
            explains_all: whether it must explain the stage in all of these calls.
        """
        for when, calls in named_calls(self.trial.problem.case):
            if self.call not in calls:
                continue
            # A bug that begins in a call is a different one in other calls.
            if bug.calls is not None and not calls <= bug.calls:
                continue
            limited = (replace(bug, calls=calls, when=when),)
            if not self._is_explained_by(limited):
                continue
            of_calls = self.in_other_calls
            if len(calls) > 1 or 0 in calls:
                of_calls = [stage for stage in of_calls if stage_named(stage).step in calls]
                if not explains_all:
                    of_calls = []
            # One later call alone is a cause only if nothing is wrong in others.
            if self.trial.wrong(of_calls, (*self.edits, *limited)):
                continue
            if self._spoils_nothing(limited):
                return [limited]
        return []


def named_calls(case: Case) -> Iterator[tuple[str, frozenset[int]]]:
    """Yield the sets of calls of a cache in which a bug may show, with a description: the largest
    first, and single ones last.
    """
    if not case.is_cached:
        return
    calls = range(len(case.chunks))
    one_token = frozenset(call for call in calls if case.chunks[call] == 1)
    yield "in calls after the first", frozenset(calls[1:])
    if one_token and len(one_token) < len(calls):
        yield "in calls of one token", one_token
        yield "in calls of several tokens", frozenset(calls) - one_token
    yield "in the first call", frozenset([0])
    several = [frozenset(calls[1:]), one_token, frozenset(calls) - one_token]
    for call in calls[1:]:
        alone = frozenset([call])
        if alone not in several:
            yield f"in call {call} alone", alone


def _is_cached_before(name: str, call: int) -> bool:
    """Return True for the keys, values or latents that the call before another one caches."""
    stage = stage_named(name)
    return stage.step == call - 1 and stage.quantity.startswith("cache.")


def _falls(before: Deviation, after: Deviation) -> bool:
    """Return True if an error falls by more than chance, in the norm in which it exceeds its
    budget.
    """
    # Not "falls below": both may be infinite.
    return not after.error_in(before.norm) > CHANCE * before.error_in(before.norm)


def _best_first(question: _Question, explaining: list[Edits]) -> list[Edits]:
    """Return the bugs, or pairs of bugs, that explain a stage, the best first: those that leave
    the fewest stages wrong, and among them the usual ones.
    """
    if len(explaining) < 2:
        return explaining
    trial = question.trial
    if len(explaining[0]) == 1:
        explaining = _without_needless_limits(question, explaining)
        known = trial.known_at(question.index, with_losses=question.is_small)
        rank_by_about: dict[str, int] = {}
        for number, bug in enumerate(known):
            # A bug of every call comes before the same one in some calls.
            rank_by_about.setdefault(bug.about, number)
        explaining.sort(key=lambda added: rank_by_about[added[0].about])
    explaining.sort(key=lambda added: len(trial.wrong(question.stages, (*question.edits, *added))))
    # Keep the form of each bug that explains the most, for the same calls.
    best: dict[frozenset[tuple[str, str]], Edits] = {}
    for added in explaining:
        best.setdefault(frozenset((bug.name, bug.when) for bug in added), added)
    return list(best.values())


def _distinct(explaining: Iterable[Edits]) -> list[Edits]:
    """Return the first form of each bug, which may be the same one in fewer calls."""
    forms: dict[tuple[str, ...], Edits] = {}
    for added in explaining:
        forms.setdefault(tuple(edit.about for edit in added), added)
    return list(forms.values())


def _is_among(bug: Edit, injected: Collection[tuple[str, str, frozenset[int] | None]]) -> bool:
    """Return True if a bug is injected already, in a call that it has."""
    for name, about, calls in injected:
        if (name, about) == (bug.name, bug.about) and (
            calls is None or bug.calls is None or not calls.isdisjoint(bug.calls)
        ):
            return True
    return False


def _without_needless_limits(question: _Question, explaining: list[Edits]) -> list[Edits]:
    """Return the bugs that explain a stage without bugs of some calls alone that explain no more
    than a bug of every call, which is simpler.

    A bug of every call that leaves other calls wrong also has a form for some calls, which stays.
    """
    in_every_call = [added for added in explaining if added[0].calls is None]
    if not in_every_call or len(in_every_call) == len(explaining):
        return explaining
    unexplained = {
        added: len(question.trial.wrong(question.stages, (*question.edits, *added)))
        for added in explaining
    }
    fewest = min(unexplained[added] for added in in_every_call)
    with_forms = {added[0].about for added in in_every_call}
    return [
        added for added in explaining if added[0].about in with_forms or unexplained[added] < fewest
    ]


def _single_bugs(question: _Question, work: Work) -> list[Edits]:
    """Return the bugs that each explain a stage alone; those that only lose precision come last.

    Bugs that are expensive to compute are postponed until the cheap ones were tried.
    """
    trial = question.trial
    is_quick = trial.scope.is_quick
    is_open = is_quick and trial.scope.only is None
    known = question.candidates(with_losses=question.is_small)
    known.sort(key=lambda bug: trial.cost(question.index, bug))
    explaining: list[Edits] = []
    for is_loss in (False, True):
        if is_loss and explaining and is_quick:
            break  # what another bug explains is not lost precision
        share = 1.0 if is_quick else FOR_BUGS
        if is_loss and is_quick:
            share *= FOR_LOSSES
        untried = [bug for bug in known if bug.is_loss == is_loss]
        for limit in (CHEAP * work.seconds, math.inf):
            if limit == math.inf and explaining and is_open:
                break  # another sample has to confirm the result
            postponed: list[Edit] = []
            for bug in untried:
                if explaining and is_open and work.spent > FOR_OTHERS * work.seconds:
                    return explaining
                try:
                    with work.inside("single bugs", share, limit):
                        forms = question.forms((bug,)) if question.changes(bug) else []
                except TimeoutError:
                    postponed.append(bug)
                    continue
                explaining += forms
            untried = postponed
    return explaining


def _pairs_of_bugs(question: _Question, work: Work) -> list[Edits]:
    """Return the pairs of bugs that explain a stage together."""
    if not np.isfinite(question.trial.observed[question.stage]).any():
        return []  # many pairs cause NaN
    share = 1.0 if question.trial.scope.is_quick else FOR_BUGS
    explaining: list[Edits] = []
    with suppress(TimeoutError):
        known: list[Edit] = []
        with work.inside("pairs of bugs", share):
            for bug in question.candidates(with_losses=False):
                # The first call has hundreds of wrong block tables, and a second bug of it shows
                # in other stages.
                if question.call == 0 and bug.sequences is not None:
                    continue
                is_visible = question.changes(bug) or not bug.shows_alone
                if is_visible and _is_in_sight(question, bug):
                    known.append(bug)
        for pair in _pairs(known):
            with work.inside("pairs of bugs", share):
                explaining += question.forms(pair)
    return explaining


def _pairs(known: Sequence[Edit]) -> Iterator[Edits]:
    """Yield pairs of bugs, usual ones first; in both orders if they override the same method."""
    for second_index in range(len(known)):
        for first_index in range(second_index):
            first, second = known[first_index], known[second_index]
            yield first, second
            if first.overrides.keys() & second.overrides.keys():
                yield second, first


def _is_in_sight(question: _Question, bug: Edit) -> bool:
    """Return True if a bug changes no step before which nothing was observed. Two bugs in
    unobserved steps explain too much, and an unknown bug looks like two known ones.
    """
    trial = question.trial
    for step in range(question.index):
        is_observed = any(name in trial.observed for name in trial.steps[step])
        if not is_observed and not trial.leaves(step, question.edits, (bug,)):
            return False
    return True


# ---- Findings ------------------------------------------------------------------------------------


def _finding(
    trial: Trial, stages: Sequence[str], edits: Edits, cause: _Cause, part: str
) -> Finding:
    """Return the finding of known bugs, in addition to earlier edits."""
    added = cause.edits
    if len(added) > 1:
        added = tuple(sorted(added, key=lambda edit: _first_step(trial, edits, edit)))
    before = trial.deviation(cause.stage, edits)
    after = trial.deviation(cause.stage, (*edits, *cause.edits))
    error_before, error = before.error, after.error
    if not stage_named(cause.stage).is_exact:
        error_before, error = before.error_in(before.norm), after.error_in(before.norm)
    return Finding(
        cause.stage,
        error_before,
        before.ratio,
        tuple(plain(edit) for edit in added),
        error,
        after.ratio,
        stages=tuple(trial.explained(stages, edits, cause.edits)),
        others=tuple(about_of(other) for other in cause.others),
        part=part,
    )


def _first_step(trial: Trial, edits: Edits, edit: Edit) -> int:
    """Return the first step that an edit changes."""
    for step in range(len(trial.steps)):
        if not trial.leaves(step, edits, (edit,)):
            return step
    return len(trial.steps)


def about_of(edits: Edits) -> str:
    """Return the description of one or two bugs."""
    return ", and ".join(edit.sentence for edit in edits)


def _unexplained(trial: Trial, stage: str, edits: Edits, work: Work) -> Finding:
    """Describe a stage that no known bug explains: where it differs, by which pattern, and the bugs
    that reduce its error most.
    """
    before = trial.deviation(stage, edits)
    finding = Finding(stage, before.error, before.ratio)
    if trial.scope.is_quick:
        return finding
    description = trial.describe(
        stage, edits, partial(work.inside, "parameters and parts of the layer")
    )
    if sample_of(trial.problem) is not None and description is not None:
        description = _of_sample(description)
    question = _Question(trial, [stage], stage, edits)
    nearest: list[tuple[str, float]] = []
    num_tried = 0
    with suppress(TimeoutError):
        for bug in question.candidates(with_losses=question.is_small):
            with work.inside("the nearest bugs"):
                error = trial.deviation(stage, (*edits, bug), quick=True).error
            num_tried += 1
            if error < 0.5 * before.error:
                nearest.append((bug.about, error))
    nearest.sort(key=_remaining_error)
    return replace(
        finding,
        description=description,
        nearest=tuple(nearest[:NEAREST]),
        num_tried=num_tried,
    )


def _remaining_error(nearest: tuple[str, float]) -> float:
    _, error = nearest
    return error


def _of_sample(description: Description) -> Description | None:
    """Return the patterns of a whole sample with at most one number; others need the whole
    layer.
    """
    patterns = tuple(edit for edit in description.patterns if edit.parameters <= 1)
    if not patterns or description.location.words != EVERYWHERE:
        return None
    return Description(description.location, patterns)


def _with_stages(finding: Finding, stages: Sequence[str], pattern: Edits) -> Finding:
    """Return a finding as plain data, with the stages that its pattern explains; that pattern comes
    first.
    """
    description = finding.description
    if description is None:
        return finding
    abouts = [edit.about for edit in pattern]
    patterns: list[Edit] = []
    for edit in sorted(description.patterns, key=lambda edit: edit.about not in abouts):
        # The other stages show which order of a packed weight it is.
        if edit.name == "packing" and abouts and edit.about not in abouts:
            continue
        patterns.append(edit)
    plain_patterns = tuple(plain(edit) for edit in patterns)
    return replace(
        finding,
        description=replace(description, patterns=plain_patterns),
        stages=tuple(stages) or (finding.stage,),
    )
