"""The search for bugs that explain stages: single bugs, then pairs, up to a limit of work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from parity.explain.diagnosis.assumptions import assumption
from parity.explain.diagnosis.bugs import Bug
from parity.explain.diagnosis.laws import Findings
from parity.explain.diagnosis.replay import Bugs, Replay, Scope
from parity.explain.diagnosis.sample import sample_of
from parity.explain.diagnosis.verdicts import EVERYWHERE, Explanation, Unknown
from parity.explain.diagnosis.work import Work
from parity.measure.core.compare import Judgement, norms_of
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

MOST_BUGS = 4  # searched at the same time
MOST_BRANCHES = 6  # ways to explain a stage that are followed
# the remaining error of one bug, over the tolerance, below which a second bug only fits noise
NEARLY = 10.0
# the share of an error that a bug may leave: a wrong one also moves rounded values, so a small gain
# is chance
CHANCE = 0.5
WIDE = ("float32", "float64")
LEFT_BY_LOSS = 0.1  # the share of the mean error that a loss of precision may leave in these dtypes
REPEATED = (
    2.0  # the largest error of a module's path, in multiples of the change by a loss of precision
)
SMALL = 0.25  # the largest share of a stage that lost precision may change
# the share of the work that a bug may take before it is postponed until the others were tried
CHEAP = 0.1
FOR_LOSSES = 0.6  # of the work in a sample, including earlier work: other samples may show more
# of the work in a sample, after which a bug that explains it is confirmed before others are tried
FOR_OTHERS = 0.3
FOR_BUGS = 0.7  # of the work; the rest describes stages that no bug explains


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        explanations: the bugs, in the order of the stages that they explain.
        unknowns: the stages that still differ by themselves.
        count: the number of bugs.
    """

    explanations: list[Explanation]
    unknowns: list[Unknown]
    count: int

    @property
    def cost(self) -> tuple[int, int]:
        """The cost of the result: fewer unexplained stages are better, then fewer bugs."""
        return len(self.unknowns), self.count


def search(replay: Replay, work: Work, begin: Bugs = ()) -> SearchResult:
    """Search for the bugs that explain all stages that differ, as far as possible.

    Args:
        replay: the reference, and the observed stages.
        work: the limit of the search.
        begin: bugs that are assumed from the start.
    """
    explanations: list[Explanation] = []
    unknowns: list[Unknown] = []
    of_stages, made = begin, list[Bug]()
    count = len(begin)
    for part, words in PARTS.items():
        of_part = [stage for stage in replay.stages if stage_named(stage).path == part]
        # A path of a module shares the bugs of the stage functions that both use.
        counts = range(len(of_stages), -1, -1)
        shared: list[Bugs] = [
            some for number in counts for some in itertools.combinations(of_stages, number)
        ]
        found: Bugs = min(shared, key=lambda bugs: len(replay.wrong(of_part, bugs)))
        while True:
            path = _path(replay, of_part, found, work)
            for choice in path.choices:
                explanations.append(_explanation(replay, of_part, found, choice, words))
                found = (*found, *choice.bugs)
                made += [bug for bug in choice.bugs if bug not in made]
                count += len(choice.bugs)
            if not path.unexplained:
                break
            rest = of_part[of_part.index(path.unexplained) + 1 :]
            if part and _repeats_a_loss(replay, path.unexplained, found):
                of_part = rest
                continue
            unknown = _unknown(replay, path.unexplained, found, work)
            assumed = assumption(replay, unknown, found)
            unknowns.append(
                unknown.explaining(
                    replay.explained(of_part, found, assumed), [law.about for law in assumed]
                )
            )
            found = (*found, *assumed)
            of_part = rest
        of_stages = found if part == "" else of_stages
        if unknowns:  # the paths of a module contain the same
            break
    found_all = SearchResult(explanations, unknowns, count)
    return _with_begin(replay, found_all, begin, tuple(made)) if begin else found_all


def _repeats_a_loss(replay: Replay, stage: str, found: Bugs) -> bool:
    """Return True if a module's own path only repeats a loss of precision that explains the stage
    functions.

    Its steps are not observed, so a number in the middle between two narrower ones may be rounded
    either way, and all that follows differs. The values cannot be reproduced then. They differ as
    much as the loss changes them.
    """
    if not found or not all(getattr(bug, "is_loss", False) for bug in found):
        return False
    change = replay.stage(stage, found).astype(np.float64) - replay.stage(stage)
    return (
        replay.judgement(stage, ()).error <= REPEATED * norms_of(change, np.isfinite(change))["rms"]
    )


def _with_begin(replay: Replay, found: SearchResult, begin: Bugs, others: Bugs) -> SearchResult:
    """Return a result with the assumed bugs and the stages that they explain; without them if there
    are none.
    """
    wrong = replay.wrong(replay.stages, others)
    still = replay.wrong(wrong, (*begin, *others))
    explained = next((stage for stage in wrong if stage not in still), "")
    if not explained:
        return SearchResult(found.explanations, found.unknowns, found.count - len(begin))
    explanation = _explanation(replay, replay.stages, others, _Choice(explained, begin), "")
    order = replay.stages.index
    explanations = sorted([*found.explanations, explanation], key=lambda each: order(each.stage))
    return SearchResult(explanations, found.unknowns, found.count)


@dataclass(frozen=True)
class _Choice:
    """Bugs that explain a stage, and alternatives."""

    stage: str
    bugs: Bugs
    others: tuple[Bugs, ...] = ()


@dataclass(frozen=True)
class _Path:
    """Choices one after the other, and the first stage that they do not explain; empty if there is
    none.
    """

    choices: tuple[_Choice, ...] = ()
    unexplained: str = ""

    @property
    def length(self) -> int:
        return sum(len(choice.bugs) for choice in self.choices)


def _path(replay: Replay, stages: Sequence[str], found: Bugs, work: Work) -> _Path:
    """Return the shortest way to explain all stages, or one that reaches far: single bugs first,
    then also pairs.
    """
    best = _walk(replay, stages, found, work, most=1)
    if replay.scope.is_quick or not best.unexplained:
        return best
    if stage_named(best.unexplained).path and _repeats_a_loss(replay, best.unexplained, found):
        return best
    if not work.is_over("pairs of bugs", FOR_BUGS):
        other = _walk(replay, stages, found, work, most=2)
        if not other.unexplained or stages.index(other.unexplained) > stages.index(
            best.unexplained
        ):
            return other
    return best


def _walk(replay: Replay, stages: Sequence[str], found: Bugs, work: Work, *, most: int) -> _Path:
    left = replay.wrong(stages, found)
    if not left:
        return _Path()
    best = _Path(unexplained=left[0])
    for at_once in range(1, most + 1):
        if len(found) + at_once > MOST_BUGS:
            break
        ways = {
            added: _walk(replay, stages, (*found, *added), work, most=most)
            for added in _explain(replay, stages, left[0], found, work, at_once=at_once)[
                :MOST_BRANCHES
            ]
        }
        whole = {added: way for added, way in ways.items() if not way.unexplained}
        if whole:
            shortest = min(way.length for way in whole.values())
            added, *others = (added for added, way in whole.items() if way.length == shortest)
            return _Path((_Choice(left[0], added, tuple(others)), *whole[added].choices))
        for added, way in ways.items():
            if stages.index(way.unexplained) > stages.index(best.unexplained):
                best = _Path((_Choice(left[0], added), *way.choices), way.unexplained)
    return best


def _explain(
    replay: Replay, stages: Sequence[str], stage: str, found: Bugs, work: Work, *, at_once: int
) -> list[Bugs]:
    """Return the bugs that explain a stage in addition to those found, the best first; no correct
    stage gets worse.

    A bug that affects every call must also show in earlier and later calls, with the observed
    values. Pairs are not tried if a stage has no finite number, because many bugs cause NaN.

    Args:
        replay: the reference, and the observed stages.
        stages: the stages to explain.
        stage: the first of them that differs.
        found: the bugs before it.
        work: the limit of the search.
        at_once: number of bugs to add.
    """
    index = replay.step_of[stage]
    of_part = [each for each in replay.stages if stage_named(each).path == stage_named(stage).path]
    wrong = replay.wrong(of_part, found)
    right = [each for each in of_part if each not in wrong]
    earlier = [
        each
        for each in wrong
        if each not in stages and stage_named(each).kind == stage_named(stage).kind
    ]
    if at_once > 1 and not np.isfinite(replay.observed[stage]).any():
        return []
    expected, before = replay.stage(stage, found), replay.judgement(stage, found)
    words = "pairs of bugs"
    most = 1.0 if replay.scope.is_quick else FOR_BUGS

    def changes(bug: Bug) -> bool:
        return not np.array_equal(expected, replay.stage(stage, (*found, bug)), equal_nan=True)

    def explains(added: Bugs) -> bool:
        bugs = (*found, *added)
        # The budget of each wrong layer is expensive; that of the right layer is close to it. Not
        # so for lost precision, but a bug that explains much less than nearly all may be the loss
        # in another part.
        if replay.judgement(stage, bugs, quick=True).ratio > 100.0:
            return False
        if at_once > 1 and any(
            replay.judgement(stage, (*found, one)).ratio <= NEARLY for one in added
        ):
            return False
        after = replay.judgement(stage, bugs)
        if after.ratio > 1.0 or not _falls(before, after):
            return False
        if added[0].is_loss and not _reproduces(replay, stage, found, bugs):
            return False
        if replay.wrong(right, bugs):
            return False
        return all(replay.is_same(replay.step_of[each], found, added, [each]) for each in earlier)

    may_lose = at_once == 1 and _is_small(replay, stage, found)
    known = [each for each in replay.known if each not in found and (may_lose or not each.is_loss)]
    fitting = list[Bugs]()
    if at_once == 1:
        in_order = sorted(known, key=lambda each: replay.cost(index, each))
        fitting = _alone(
            in_order, work, lambda each: changes(each) and explains((each,)), most, replay.scope
        )
    else:
        with suppress(TimeoutError):
            with work.inside(words, most):
                known = [each for each in known if changes(each) or not each.shows_alone]
                known = [each for each in known if _is_made_in_sight(replay, index, found, each)]
            for added in _orders(known, at_once):
                with work.inside(words, most):
                    if explains(added):
                        fitting.append(added)
    if at_once == 1:
        place = {bug: number for number, bug in enumerate(known)}
        fitting = sorted(fitting, key=lambda added: place[added[0]])
    if len(fitting) > 1:
        fitting = sorted(fitting, key=lambda added: len(replay.wrong(stages, (*found, *added))))
    # Keep the form of each bug that explains the most.
    best = dict[frozenset[str], Bugs]()
    for added in fitting:
        best.setdefault(frozenset(bug.name for bug in added), added)
    return list(best.values())


def _alone(
    known: Sequence[Bug], work: Work, fits: Callable[[Bug], bool], most: float, scope: Scope
) -> list[Bugs]:
    """Return the bugs that fit, each alone, within a share of the work; bugs that only lose
    precision come last.
    """
    fitting = list[Bugs]()
    for is_loss in (False, True):
        if is_loss and fitting and scope.is_quick:
            break  # a full explanation is not lost precision
        tried = [bug for bug in known if bug.is_loss == is_loss]
        share = most * FOR_LOSSES if is_loss and scope.is_quick else most
        for limit in (CHEAP * work.seconds, math.inf):  # expensive bugs are postponed
            if limit == math.inf and fitting and scope.is_quick and scope.only is None:
                break  # another sample has to confirm the result
            put_off = list[Bug]()
            for bug in tried:
                if (
                    fitting
                    and scope.is_quick
                    and scope.only is None
                    and work.spent > FOR_OTHERS * work.seconds
                ):
                    return fitting
                try:
                    with work.inside("single bugs", share, limit):
                        if fits(bug):
                            fitting.append((bug,))
                except TimeoutError:
                    put_off.append(bug)
            tried = put_off
    return fitting


def _orders(known: Sequence[Bug], at_once: int) -> Iterator[Bugs]:
    """Yield combinations of bugs, usual ones first; in every order if they override the same
    method.
    """
    for places in sorted(
        itertools.combinations(range(len(known)), at_once), key=lambda places: places[::-1]
    ):
        some = tuple(known[place] for place in places)
        overridden = [method for bug in some for method in bug.in_reference]
        yield from itertools.permutations(some) if len({*overridden}) < len(overridden) else [some]


def _falls(before: Judgement, after: Judgement) -> bool:
    """Return True if an error falls by more than chance, in the norm in which it exceeds its
    budget.
    """
    return not after.error_in(before.norm) > CHANCE * before.error_in(
        before.norm
    )  # also if both are infinite


def _reproduces(replay: Replay, stage: str, found: Bugs, with_loss: Bugs) -> bool:
    """Return True if a loss of precision reproduces a stage, as far as numbers of the layer's dtype
    can show.
    """
    if replay.problem.dtype not in WIDE:
        return True
    before, after = (
        replay.distance(stage, replay.stage(stage, bugs)) for bugs in (found, with_loss)
    )
    return after <= LEFT_BY_LOSS * before


def _is_made_in_sight(replay: Replay, index: int, found: Bugs, bug: Bug) -> bool:
    """Return True if a bug changes no step before which nothing was observed. Two bugs in
    unobserved steps explain too much, and an unknown bug looks like two known ones.
    """
    unseen = (
        i for i in range(index) if not any(name in replay.observed for name in replay.steps[i])
    )
    return all(replay.is_same(i, found, (bug,)) for i in unseen)


def _is_small(replay: Replay, stage: str, found: Bugs) -> bool:
    """Return True if the error of a stage is so small that lost precision may cause it."""
    expected = replay.stage(stage, found)
    if stage_named(stage).is_exact:
        return False
    return (
        replay.judgement(stage, found).error
        <= SMALL * norms_of(expected, np.isfinite(expected))["rms"]
    )


def _unknown(replay: Replay, stage: str, found: Bugs, work: Work) -> Unknown:
    """Describe a stage that no bug explains: where it differs, by which pattern, and the bugs that
    reduce its error most.
    """
    verdict, may_lose = replay.judgement(stage, found), _is_small(replay, stage, found)
    if replay.scope.is_quick:
        return Unknown(stage, verdict.error, verdict.ratio)
    findings = replay.findings(stage, found, lambda: work.inside("numbers and parts of the layer"))
    if sample_of(replay.problem) is not None and findings is not None:
        findings = _of_sample(findings)
    nearest = []
    with suppress(TimeoutError):
        for bug in replay.known:
            if bug not in found and (may_lose or not bug.is_loss):
                with work.inside("the nearest bugs"):
                    nearest.append(
                        (bug.about, replay.judgement(stage, (*found, bug), quick=True).error)
                    )
    nearest = sorted(
        (each for each in nearest if each[1] < 0.5 * verdict.error), key=lambda each: each[1]
    )
    return Unknown(stage, verdict.error, verdict.ratio, findings, tuple(nearest[:3]))


def _of_sample(findings: Findings) -> Findings | None:
    """Return the patterns of a whole sample with at most one number; others need the whole
    layer.
    """
    laws = tuple(law for law in findings.found if law.parameters <= 1)
    return Findings(findings.place, laws) if laws and findings.place.words == EVERYWHERE else None


def _explanation(
    replay: Replay, stages: Sequence[str], found: Bugs, choice: _Choice, words: str
) -> Explanation:
    def made_in(bug: Bug) -> int:
        """Return the first step that a bug changes."""
        steps = range(len(replay.steps))
        return next((step for step in steps if not replay.is_same(step, found, (bug,))), len(steps))

    added = tuple(sorted(choice.bugs, key=made_in)) if len(choice.bugs) > 1 else choice.bugs
    before, after = (
        replay.judgement(choice.stage, found),
        replay.judgement(choice.stage, (*found, *choice.bugs)),
    )
    still = replay.wrong(stages, (*found, *choice.bugs))
    is_exact = stage_named(choice.stage).is_exact
    return Explanation(
        choice.stage,
        tuple(stage for stage in replay.wrong(stages, found) if stage not in still),
        tuple(bug.name for bug in added),
        words + _words(added),
        tuple(dict.fromkeys(bug.fix for bug in added)),
        tuple(dict.fromkeys(bug.page for bug in added)),
        before.error if is_exact else before.error_in(before.norm),
        after.error if is_exact else after.error_in(before.norm),
        after.ratio,
        before.ratio,
        tuple(map(_words, choice.others)),
    )


def _words(bugs: Bugs) -> str:
    return ", and ".join(bug.about for bug in bugs)
