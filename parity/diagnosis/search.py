"""The search for the mistakes that explain stages: one alone first, then two at once, until its work is done."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from parity.core.compare import Judgement, norms_of
from parity.core.stages import stage_named
from parity.core.work import Work
from parity.diagnosis.assumptions import assumption
from parity.diagnosis.laws import Findings
from parity.diagnosis.mistakes import Mistake
from parity.diagnosis.replay import Mistakes, Replay, Scope
from parity.diagnosis.verdicts import EVERYWHERE, Explanation, Unknown

PARTS = {
    "": "",
    "module": "in the module's plain path: ",
    "fused": "in the fused path: ",
    "blocks": "in the fused path, block by block: ",
}
"""The parts of a trace, which may each have mistakes of their own: "", the stage functions, and each path of a module;
and what to say of it."""

MOST_MISTAKES = 4  # that are looked for at the same time
MOST_BRANCHES = 6  # ways to explain a stage that are followed
NEARLY = 10.0  # what one mistake leaves of the error, over what is allowed, beside which another is but noise
CHANCE = 0.5  # the share of an error that a mistake leaves, above which it does not explain it
SMALL = 0.25  # the share of a stage up to which its error may be lost precision
CHEAP = 0.1  # the share of the work that a mistake may do before it is put off until the others were tried
FOR_LOSSES = 0.6  # of the work in a sample, with what others did before: other samples may show more
FOR_MISTAKES = 0.7  # of the work; the rest is for what can be said of stages that none explains


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        explanations: the mistakes, in the order of the stages that they explain.
        unknowns: the stages that differ by themselves all the same.
        count: how many mistakes there are.
    """

    explanations: list[Explanation]
    unknowns: list[Unknown]
    count: int

    @property
    def cost(self) -> tuple[int, int]:
        """How good it is: the fewer stages are left, and the fewer mistakes it needs, the better."""
        return len(self.unknowns), self.count


def search(replay: Replay, work: Work, begin: Mistakes = ()) -> SearchResult:
    """The mistakes that explain all stages that differ, as far as there are some.

    Args:
        replay: the reference, and what was observed.
        work: how much it may do.
        begin: mistakes that are there, whatever else is.
    """
    explanations: list[Explanation] = []
    unknowns: list[Unknown] = []
    of_stages, made = begin, list[Mistake]()
    count = len(begin)
    for part, words in PARTS.items():
        of_part = [stage for stage in replay.stages if stage_named(stage).path == part]
        # A path of the module has those mistakes of the stages that lie in what they share.
        counts = range(len(of_stages), -1, -1)
        shared: list[Mistakes] = [some for number in counts for some in itertools.combinations(of_stages, number)]
        found: Mistakes = min(shared, key=lambda mistakes: len(replay.wrong(of_part, mistakes)))
        while True:
            path = _path(replay, of_part, found, work)
            for choice in path.choices:
                explanations.append(_explanation(replay, of_part, found, choice, words))
                found = (*found, *choice.mistakes)
                made += [mistake for mistake in choice.mistakes if mistake not in made]
                count += len(choice.mistakes)
            if not path.unexplained:
                break
            unknown = _unknown(replay, path.unexplained, found, work)
            assumed = assumption(replay, unknown, found)
            unknowns.append(
                unknown.explaining(replay.explained(of_part, found, assumed), [law.about for law in assumed])
            )
            found = (*found, *assumed)
            of_part = of_part[of_part.index(path.unexplained) + 1 :]
        of_stages = found if part == "" else of_stages
        if unknowns:  # the paths of a module have the same in them
            break
    found_all = SearchResult(explanations, unknowns, count)
    return _with_begin(replay, found_all, begin, tuple(made)) if begin else found_all


def _with_begin(replay: Replay, found: SearchResult, begin: Mistakes, others: Mistakes) -> SearchResult:
    """What was found, with what the mistakes that it began with explain beside the others; without, if nothing."""
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
    """What explains a stage, and what does so as well."""

    stage: str
    mistakes: Mistakes
    others: tuple[Mistakes, ...] = ()


@dataclass(frozen=True)
class _Path:
    """Choices one after the other, and the first stage that they do not explain, or nothing."""

    choices: tuple[_Choice, ...] = ()
    unexplained: str = ""

    @property
    def length(self) -> int:
        return sum(len(choice.mistakes) for choice in self.choices)


def _path(replay: Replay, stages: Sequence[str], found: Mistakes, work: Work) -> _Path:
    """The shortest way to explain all stages, or one that goes far: single bugs first, then two at once, too."""
    best = _walk(replay, stages, found, work, most=1)
    if replay.scope.is_quick:
        return best
    if best.unexplained and not work.is_over("pairs of bugs", FOR_MISTAKES):
        other = _walk(replay, stages, found, work, most=2)
        if not other.unexplained or stages.index(other.unexplained) > stages.index(best.unexplained):
            return other
    return best


def _walk(replay: Replay, stages: Sequence[str], found: Mistakes, work: Work, *, most: int) -> _Path:
    left = replay.wrong(stages, found)
    if not left:
        return _Path()
    best = _Path(unexplained=left[0])
    for at_once in range(1, most + 1):
        if len(found) + at_once > MOST_MISTAKES:
            break
        ways = {
            added: _walk(replay, stages, (*found, *added), work, most=most)
            for added in _explain(replay, stages, left[0], found, work, at_once=at_once)[:MOST_BRANCHES]
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
    replay: Replay, stages: Sequence[str], stage: str, found: Mistakes, work: Work, *, at_once: int
) -> list[Mistakes]:
    """What explains a stage beside what was found, and spoils none that is right; the best first.

    What is made in every call, and not seen in an earlier or a later one, was not made; nor what gives another thing
    than is seen there. Of a stage without one number pairs of bugs are not told: NaN is what many give.

    Args:
        replay: the reference.
        stages: those to explain.
        stage: the first of them that differs.
        found: the mistakes before it.
        work: how much it may do.
        at_once: how many mistakes to add.
    """
    index = replay.step_of[stage]
    of_part = [each for each in replay.stages if stage_named(each).path == stage_named(stage).path]
    wrong = replay.wrong(of_part, found)
    right = [each for each in of_part if each not in wrong]
    earlier = [each for each in wrong if each not in stages and stage_named(each).kind == stage_named(stage).kind]
    if at_once > 1 and not np.isfinite(replay.observed[stage]).any():
        return []
    expected, before = replay.stage(stage, found), replay.judgement(stage, found)
    words = "pairs of bugs"
    most = 1.0 if replay.scope.is_quick else FOR_MISTAKES

    def changes(mistake: Mistake) -> bool:
        return not np.array_equal(expected, replay.stage(stage, (*found, mistake)), equal_nan=True)

    def explains(added: Mistakes) -> bool:
        mistakes = (*found, *added)
        # The budget of each wrong layer takes long; that of the right one is near it. Of lost precision it is not, but
        # what explains so much less than nearly all may be the loss of another part.
        if replay.judgement(stage, mistakes, quick=True).ratio > 100.0:
            return False
        if at_once > 1 and any(replay.judgement(stage, (*found, one)).ratio <= NEARLY for one in added):
            return False
        after = replay.judgement(stage, mistakes)
        if after.ratio > 1.0 or not _is_less(after, before, added) or replay.wrong(right, mistakes):
            return False
        return all(replay.is_same(replay.step_of[each], found, added, [each]) for each in earlier)

    may_lose = at_once == 1 and _is_small(replay, stage, found)
    known = [each for each in replay.known if each not in found and (may_lose or not each.is_loss)]
    fitting = list[Mistakes]()
    if at_once == 1:
        in_order = sorted(known, key=lambda each: replay.cost(index, each))
        fitting = _alone(in_order, work, lambda each: changes(each) and explains((each,)), most, replay.scope)
    else:
        with suppress(TimeoutError):
            with work.inside(words, most):
                known = [each for each in known if changes(each) or not each.shows_alone]
                known = [each for each in known if _is_made_in_sight(replay, index, found, each)]
            for added in _orders(known, at_once):
                with work.inside(words, most):
                    if explains(added):
                        fitting.append(added)
    place = {mistake: number for number, mistake in enumerate(known)}
    fitting = sorted(fitting, key=lambda added: place[added[0]]) if at_once == 1 else fitting
    fitting = list({frozenset(mistake.name for mistake in added): added for added in reversed(fitting)}.values())[::-1]
    return sorted(fitting, key=lambda added: len(replay.wrong(stages, (*found, *added)))) if fitting[1:] else fitting


def _alone(
    known: Sequence[Mistake], work: Work, fits: Callable[[Mistake], bool], most: float, scope: Scope
) -> list[Mistakes]:
    """The mistakes that fit, each alone, as far as a share of the work allows: those that lose precision last."""
    fitting = list[Mistakes]()
    for is_loss in (False, True):
        if is_loss and fitting and scope.is_quick:
            break  # what is explained in full is not lost precision
        tried = [mistake for mistake in known if mistake.is_loss == is_loss]
        share = most * FOR_LOSSES if is_loss and scope.is_quick else most
        for limit in (CHEAP * work.seconds, math.inf):  # what takes long is put off
            if limit == math.inf and fitting and scope.is_quick and scope.only is None:
                break  # another sample has to confirm what fits
            put_off = list[Mistake]()
            for mistake in tried:
                try:
                    with work.inside("single bugs", share, limit):
                        if fits(mistake):
                            fitting.append((mistake,))
                except TimeoutError:
                    put_off.append(mistake)
            tried = put_off
    return fitting


def _orders(known: Sequence[Mistake], at_once: int) -> Iterator[Mistakes]:
    """So many mistakes at once, all of them usual ones first; in every order if they override the same, else in one."""
    for places in sorted(itertools.combinations(range(len(known)), at_once), key=lambda places: places[::-1]):
        some = tuple(known[place] for place in places)
        overridden = [method for mistake in some for method in mistake.in_reference]
        yield from itertools.permutations(some) if len({*overridden}) < len(overridden) else [some]


def _is_less(after: Judgement, before: Judgement, added: Mistakes) -> bool:
    """Whether an error is less by far, and not by chance: a mistake that is none here moves what is rounded, too.

    What loses precision leaves errors of the size that they had; that they are allowed is what explains them.
    """
    return any(mistake.is_loss for mistake in added) or not after.error > CHANCE * before.error


def _is_made_in_sight(replay: Replay, index: int, found: Mistakes, mistake: Mistake) -> bool:
    """Whether a mistake changes no step before one of which nothing was observed: of what is made there, two at once
    explain too much, and what nobody knows looks like two that are known."""
    unseen = (i for i in range(index) if not any(name in replay.observed for name in replay.steps[i]))
    return all(replay.is_same(i, found, (mistake,)) for i in unseen)


def _is_small(replay: Replay, stage: str, found: Mistakes) -> bool:
    """Whether so little of a stage is wrong that lost precision may be why."""
    expected = replay.stage(stage, found)
    if stage_named(stage).is_exact:
        return False
    return replay.judgement(stage, found).error <= SMALL * norms_of(expected, np.isfinite(expected))["rms"]


def _unknown(replay: Replay, stage: str, found: Mistakes, work: Work) -> Unknown:
    """A stage that nothing explains: where it differs and by what law, and what lessens its error most."""
    verdict, may_lose = replay.judgement(stage, found), _is_small(replay, stage, found)
    if replay.scope.is_quick:
        return Unknown(stage, verdict.error, verdict.ratio)
    findings = replay.findings(stage, found, lambda: work.inside("numbers and parts of the layer"))
    if replay.problem.sample is not None and findings is not None:
        findings = _of_sample(findings)
    nearest = []
    with suppress(TimeoutError):
        for mistake in replay.known:
            if mistake not in found and (may_lose or not mistake.is_loss):
                with work.inside("the nearest bugs"):
                    nearest.append((mistake.about, replay.judgement(stage, (*found, mistake), quick=True).error))
    nearest = sorted((each for each in nearest if each[1] < 0.5 * verdict.error), key=lambda each: each[1])
    return Unknown(stage, verdict.error, verdict.ratio, findings, tuple(nearest[:3]))


def _of_sample(findings: Findings) -> Findings | None:
    """Laws of the whole sample, of one number at most: those of places, rows and columns need all of the layer."""
    laws = tuple(law for law in findings.found if law.parameters <= 1)
    return Findings(findings.place, laws) if laws and findings.place.words == EVERYWHERE else None


def _explanation(replay: Replay, stages: Sequence[str], found: Mistakes, choice: _Choice, words: str) -> Explanation:
    def made_in(mistake: Mistake) -> int:
        """The first step that a mistake changes."""
        steps = range(len(replay.steps))
        return next((step for step in steps if not replay.is_same(step, found, (mistake,))), len(steps))

    added = tuple(sorted(choice.mistakes, key=made_in)) if len(choice.mistakes) > 1 else choice.mistakes
    before, after = replay.judgement(choice.stage, found), replay.judgement(choice.stage, (*found, *choice.mistakes))
    still = replay.wrong(stages, (*found, *choice.mistakes))
    return Explanation(
        choice.stage,
        tuple(stage for stage in replay.wrong(stages, found) if stage not in still),
        tuple(mistake.name for mistake in added),
        words + _words(added),
        tuple(dict.fromkeys(mistake.fix for mistake in added)),
        tuple(dict.fromkeys(mistake.page for mistake in added)),
        before.error,
        after.error,
        after.ratio,
        before.ratio,
        tuple(map(_words, choice.others)),
    )


def _words(mistakes: Mistakes) -> str:
    return " and ".join(mistake.about for mistake in mistakes)
