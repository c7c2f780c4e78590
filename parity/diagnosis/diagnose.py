"""Why do two implementations differ? The reference is run again with named mistakes in it, until it differs no more.

What was observed is taken stage by stage: each stage is computed again from the observed stages before it, so that two
mistakes in different places are found one after the other. A stage that is not there (of an implementation that gives
its output only) is computed with the mistakes found so far. A mistake explains a stage if what is left of the error is
within the budget of `parity.core.compare`, that is, if nothing but rounding is left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from parity.backends import load_backend
from parity.core.arrays import stages_of
from parity.core.compare import FACTOR, finite
from parity.core.problem import Problem
from parity.core.stages import STAGES, stage_named
from parity.core.trace import Trace
from parity.diagnosis.mistakes import PRECISIONS, Mistake
from parity.diagnosis.replay import Mistakes, Replay, Verdict

PARTS = {
    "": "",
    "module": "in the module's plain path: ",
    "fused": "in the fused path: ",
    "blocks": "in the fused path, block by block: ",
}
"""The parts of a trace, which may each have mistakes of their own: "", the stage functions, and each path of a module;
and what to say of it."""

MULTIPLIED = {"q", "k", "v", "scores", "context", "output"}
"""The stages that are matrix products: all of them differ where products lose too much."""

LEAST = 0.02
"""The share of its budget that an arithmetic's loss takes at least: what is far smaller has another cause."""

ALMOST = 3.0
"""A ratio up to which an error that nothing explains is called rounding."""


@dataclass(frozen=True)
class Explanation:
    """A mistake, or two at once, that explain a stage.

    Attributes:
        stage: the first that they explain.
        stages: all that they explain, in order.
        hypotheses: their names, in the order of the stages that they are made in.
        about: what they are, in words.
        fixes: what to do about each.
        docs: the pages of parity/bugs that say more.
        error_before: error of the stage without them (root mean square), from the observed stages before it.
        error: with them.
        ratio: what is left, over what is allowed; at most 1.
        others: what explains it as well and cannot be told from it here, in words.
    """

    stage: str
    stages: tuple[str, ...]
    hypotheses: tuple[str, ...]
    about: str
    fixes: tuple[str, ...]
    docs: tuple[str, ...]
    error_before: float
    error: float
    ratio: float
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        falls = f"error falls from {self.error_before:.2g} to {self.error:.2g}"
        same = f"error {self.error:.2g}, as much as that loses"
        lines = [
            f"{_listed(self.stages)} the reference if {self.about} "
            f"({falls if self.error < self.error_before else same})",
            *(f"  or if     {other}: they cannot be told apart here" for other in self.others),
            f"  mistake   {', '.join(self.hypotheses)}",
            *(f"  fix       {fix}" for fix in self.fixes),
            f"  see       mha-parity bugs {' '.join(self.docs)}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, as far as it was found.

    Attributes:
        kind: `none`, nothing differs; `rounding`, some errors are just beyond the budget; `precision`, all are small,
            and what matrix products lose explains them; `structure`, mistakes do; `unknown`, they do not.
        stage: the first that differs, or nothing.
        error: of that stage (root mean square).
        ratio: of that stage: error / budget.
        explanations: the mistakes, in the order of the stages that they explain.
        unexplained: the first stage that still differs, or nothing.
        nearest: what lessens its error most, without explaining it: in words, with the error that is left.
        has_stages: whether more was observed than the output.
        malformed: stages that cannot be compared, and why; the others are judged without them.
    """

    kind: str
    stage: str = ""
    error: float = 0.0
    ratio: float = 0.0
    explanations: list[Explanation] = field(default_factory=list)
    unexplained: str = ""
    nearest: list[tuple[str, float]] = field(default_factory=list)
    has_stages: bool = True
    malformed: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return {name: finite(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        if self.kind == "none":
            return "nothing differs by more than rounding"
        lines = [f"{self.kind}: {self.stage} is {self.ratio:.2g} times its budget"] if math.isfinite(self.ratio) else []
        lines += [f"{stage} {reason}" for stage, reason in self.malformed.items()]
        if self.kind == "rounding":
            lines.append("no mistake explains it: rounding, most likely")
        lines += map(str, self.explanations)
        if self.unexplained and self.kind == "unknown":
            still = "still " if self.explanations else ""
            lines.append(f"{self.unexplained} {still}differs, and no mistake known here explains it")
            lines += [f"  nearest   {words} (error {error:.2g})" for words, error in self.nearest]
            lines += (
                [] if self.has_stages else ["  next      pass its stages, too (q, k, v, scores, …): they show more"]
            )
        return "\n".join(lines)


def diagnose(observed: Mapping[str, np.ndarray], problem: Problem, *, arithmetic: str = "ieee") -> Diagnosis:
    """Find the mistakes that explain what an implementation gave.

    Args:
        observed: its stages by name, as `STAGES` has them; the output alone will do, but then two mistakes may be told
            for one, or not at all.
        problem: what it was given.
        arithmetic: of its hardware, one of `reference.ARITHMETICS`.

    Raises:
        ValueError: if there is no stage of the problem among the names.
    """
    replay = Replay(problem, stages_of("observed", observed, "output"), arithmetic)
    malformed = replay.malformed
    if not (replay.stages or malformed):
        raise ValueError(f"observed must have stages of the problem, got {sorted(observed)}")
    before = {stage: replay.verdict(stage, ()) for stage in replay.stages}
    wrong = [stage for stage, verdict in before.items() if verdict.ratio > 1.0]
    if not wrong and malformed:
        return Diagnosis("unknown", next(iter(malformed)), math.inf, math.inf, malformed=malformed)
    if not wrong:
        return Diagnosis("none")
    about = {
        "stage": wrong[0],
        "error": before[wrong[0]].error,
        "ratio": before[wrong[0]].ratio,
        "malformed": malformed,
    }
    explanations: list[Explanation] = []
    of_stages: Mistakes = ()
    unexplained, nearest = "", []
    for part, words in PARTS.items():
        of_part = [stage for stage in replay.stages if stage_named(stage).path == part]
        # A path of the module has those mistakes of the stages that lie in what they share.
        counts = range(len(of_stages), -1, -1)
        shared: list[Mistakes] = [some for count in counts for some in itertools.combinations(of_stages, count)]
        found: Mistakes = min(shared, key=lambda mistakes: len(replay.wrong(of_part, mistakes)))
        path = _search(replay, of_part, found)
        if path.unexplained and not explanations and (explanation := _precision(replay, before, wrong)):
            return Diagnosis("precision", **about, explanations=[explanation])
        for choice in path.choices:
            explanations.append(_explanation(replay, of_part, found, choice, words))
            found = (*found, *choice.mistakes)
        of_stages = found if part == "" else of_stages
        if path.unexplained:
            unexplained, nearest = path.unexplained, _nearest(replay, path.unexplained, found)
            break
    if unexplained and not explanations and max(before[stage].ratio for stage in wrong) <= ALMOST:
        return Diagnosis("rounding", **about, unexplained=unexplained)
    return Diagnosis(
        "unknown" if unexplained else "structure",
        **about,
        explanations=explanations,
        unexplained=unexplained,
        nearest=nearest,
        has_stages=len(replay.stages) > 1,
    )


def diagnose_trace(trace: Trace) -> Diagnosis:
    """Find the mistakes in what a backend computed.

    Raises:
        ValueError: if it has no stages.
    """
    return diagnose(trace.accumulated, trace.problem, arithmetic=trace.arithmetic)


def observe(function: Callable[..., Any], problem: Problem, framework: str) -> dict[str, np.ndarray]:
    """The stages that somebody's function gives for a problem.

    Args:
        function: called with the query (B, T, d_in) and, for cross-attention, the key (B, S, d_kv); it has its own
            weights and masks. It gives the output, or (output, attention weights), or stages by name.
        problem: what it is given.
        framework: whose arrays it takes, `torch` or `jax`.

    Raises:
        ValueError: if it gives something else.
    """
    backend = load_backend(framework)
    with backend.lock(problem.dtype):
        arrays = [backend.from_numpy(problem.inputs[name]) for name in ("query", "key") if name in problem.inputs]
        try:
            given = function(*arrays)
        except Exception as error:  # whatever somebody's function raises
            raise ValueError(f"the function must take the inputs, got {type(error).__name__}: {error}") from error
        if isinstance(given, tuple) and len(given) == 2:
            given = {name: x for name, x in zip(("output", "attn_weights"), given, strict=True) if x is not None}
        elif not isinstance(given, Mapping):
            given = {"output": given}
        if not given or not all(hasattr(x, "__array__") for x in given.values()):
            kinds = ", ".join(f"{name}: {type(x).__name__}" for name, x in given.items()) or "nothing"
            raise ValueError(
                f"the function must give an array, (output, attention weights), or arrays by stage, got {kinds}"
            )
        found = {name: np.array(x) for name, x in stages_of("the function's", given, "output").items()}
    if unknown := sorted(found.keys() - STAGES.keys()):
        raise ValueError(f"stages must be named as in STAGES, got {unknown}")
    return found


# ---- The search ------------------------------------------------------------------------------------------------------

MOST_MISTAKES = 4  # that are looked for at the same time
MOST_BRANCHES = 6  # ways to explain a stage that are followed


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


def _search(replay: Replay, stages: Sequence[str], found: Mistakes) -> _Path:
    """The shortest way to explain all stages, or one that goes far."""
    left = replay.wrong(stages, found)
    if not left:
        return _Path()
    best = _Path(unexplained=left[0])
    for at_once in (1, 2):
        if len(found) + at_once > MOST_MISTAKES:
            break
        ways = {
            added: _search(replay, stages, (*found, *added))
            for added in _explain(replay, stages, left[0], found, at_once=at_once)[:MOST_BRANCHES]
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


def _explain(replay: Replay, stages: Sequence[str], stage: str, found: Mistakes, *, at_once: int) -> list[Mistakes]:
    """What explains a stage beside what was found, and spoils none that its step gives; the best first.

    Args:
        replay: the reference.
        stages: those to explain.
        stage: the first of them that differs.
        found: the mistakes before it.
        at_once: how many mistakes to add.
    """
    index = replay.step_of[stage]
    wrong = replay.wrong(stages, found)
    right = [each for each in stages if replay.step_of[each] == index and each not in wrong]
    expected = replay.computed(index, found)[stage]

    def changes(mistake: Mistake) -> bool:
        return not np.array_equal(expected, replay.computed(index, (*found, mistake))[stage], equal_nan=True)

    def explains(added: Mistakes) -> bool:
        mistakes = (*found, *added)
        # The budget of each wrong layer takes long; that of the right one is near it.
        if replay.verdict(stage, mistakes, quick=True).ratio > 100.0:
            return False
        return replay.verdict(stage, mistakes).ratio <= 1.0 and not replay.wrong(right, mistakes)

    known = [mistake for mistake in replay.known if mistake not in found and changes(mistake)]
    fitting = list(filter(explains, itertools.permutations(known, at_once)))
    fitting = list({frozenset(mistake.name for mistake in added): added for added in reversed(fitting)}.values())[::-1]
    return sorted(fitting, key=lambda added: len(replay.wrong(stages, (*found, *added)))) if fitting[1:] else fitting


def _precision(replay: Replay, before: Mapping[str, Verdict], wrong: Sequence[str]) -> Explanation | None:
    """The arithmetic that explains all stages, if one does."""
    products = {stage_named(stage).kind for stage in replay.stages} & MULTIPLIED
    if len(products) < 2 or not products <= {stage_named(stage).kind for stage in wrong}:
        return None  # from one stage it cannot be told
    if replay.problem.dtype != "float32" or any(math.isinf(before[stage].ratio) for stage in wrong):
        return None
    own = [stage for stage in wrong if not stage_named(stage).path] or wrong  # a module adds up what its stages lose
    ratios = {kind: [replay.verdict(stage, (), kind=kind).ratio for stage in own] for kind in PRECISIONS}
    explaining = [kind for kind in PRECISIONS if max(ratios[kind]) <= 1.0 and ratios[kind][0] >= LEAST]
    if not explaining:
        return None
    kind = min(explaining, key=lambda kind: abs(math.log(FACTOR * ratios[kind][0])))  # whose noise is nearest in size
    mistake, error = PRECISIONS[kind], before[wrong[0]].error
    return Explanation(
        wrong[0],
        tuple(own),
        (mistake.name,),
        mistake.about,
        (mistake.fix,),
        (mistake.page,),
        error,
        error,
        max(ratios[kind]),
    )


def _nearest(replay: Replay, stage: str, found: Mistakes) -> list[tuple[str, float]]:
    """The single mistakes that lessen the error of a stage most."""
    before = replay.verdict(stage, found, quick=True).error
    errors = [
        (mistake.about, replay.verdict(stage, (*found, mistake), quick=True).error)
        for mistake in replay.known
        if mistake not in found
    ]
    return sorted(((words, error) for words, error in errors if error < 0.5 * before), key=lambda each: each[1])[:3]


def _explanation(replay: Replay, stages: Sequence[str], found: Mistakes, choice: _Choice, words: str) -> Explanation:
    def made_in(mistake: Mistake) -> int:
        """The first step that a mistake changes."""
        for index, names in enumerate(replay.steps):
            right, wrong = replay.computed(index, found), replay.computed(index, (*found, mistake))
            if not all(np.array_equal(right[name], wrong[name], equal_nan=True) for name in names):
                return index
        return len(replay.steps)

    added = tuple(sorted(choice.mistakes, key=made_in)) if len(choice.mistakes) > 1 else choice.mistakes
    before, after = replay.verdict(choice.stage, found), replay.verdict(choice.stage, (*found, *choice.mistakes))
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
        tuple(map(_words, choice.others)),
    )


def _listed(stages: Sequence[str]) -> str:
    """Some stages and how many more, with a verb."""
    shown = ", ".join(stages[:3])
    more = f" and {len(stages) - 3} more" if len(stages) > 3 else ""
    return f"{shown}{more} {'matches' if len(stages) == 1 else 'match'}"


def _words(mistakes: Mistakes) -> str:
    return " and ".join(mistake.about for mistake in mistakes)
