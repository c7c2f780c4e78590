"""Why do two implementations differ? The reference is run again with named mistakes in it, until it differs no more.

The end comes first: where the output agrees, a stage that differs is recorded otherwise, most likely, and the ways in
which others do that are tried before any mistake (`parity.diagnosis.readings`). What others may choose to compute less
exactly is allowed as it is (`parity.diagnosis.choices`).

Then what was observed is taken stage by stage: each stage is computed again from the observed stages before it, so that
two mistakes in different places are found one after the other. A stage that is not there (of an implementation that
gives its output only) is computed with the mistakes found so far. A mistake explains a stage if what is left of the
error is within the budget of `parity.core.compare`, that is, if nothing but rounding is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mha_spec import Refusal
from parity.backends import FRAMEWORKS, load_backend
from parity.core.arrays import arithmetic_of, stages_of
from parity.core.blas import single_threaded
from parity.core.compare import NOT_MEASURED, Comparison, Judgement, Label
from parity.core.problem import Problem
from parity.core.reference import ARITHMETICS, UNFUSED
from parity.core.stages import STAGES, stage_named
from parity.core.trace import Reference, Trace
from parity.core.weights import is_floating
from parity.core.work import Work
from parity.diagnosis.at_size import diagnosed_by_first_call, diagnosed_by_samples
from parity.diagnosis.choices import choices_for
from parity.diagnosis.precision import lost_in_dtype, lost_in_products
from parity.diagnosis.readings import Read, read
from parity.diagnosis.replay import EVERYTHING, Replay, Scope, remembering
from parity.diagnosis.sampling import Part, Whole, first_call, in_order, is_large
from parity.diagnosis.search import SearchResult, search
from parity.diagnosis.verdicts import Diagnosis, Explanation, Unknown

__all__ = ["Diagnosis", "Explanation", "Unknown", "diagnose", "diagnose_trace", "observe"]

ALMOST = 3.0
"""A ratio up to which an error that nothing explains is called rounding."""

SECONDS = 5.0
"""Work of the search for mistakes, see `diagnose`."""

MOST_VIEWS = 3
"""Ways to take what was observed that are searched for mistakes."""


def diagnose(
    observed: Mapping[str, Any], problem: Problem, *, arithmetic: str | None = None, seconds: float = SECONDS
) -> Diagnosis:
    """Find the mistakes that explain what an implementation gave.

    Args:
        observed: its stages by name, as `STAGES` has them, in arrays of any framework; the output alone will do, but
            then two mistakes may be told for one, or not at all.
        problem: what it was given.
        arithmetic: of its hardware, one of `reference.ARITHMETICS`, or its rounding, one of `reference.UNFUSED`. When
            absent it is `tensix` if an array is TTNN's, and its device a card or a simulator, else `ieee`.
        seconds: work of the search, in seconds of one core of a usual machine. It is counted by the sizes of what is
            computed, so that no load changes the verdict. The search of a large layer does a quarter of the layer's own
            work besides. The report lists what was not tried. Infinity tries everything.

    Raises:
        ValueError: if there is no stage of the problem among the names, or no such arithmetic.
    """
    if arithmetic not in (None, *ARITHMETICS, *UNFUSED):
        known = [*ARITHMETICS, *UNFUSED]
        raise Refusal("arithmetic", f"be one of {known}", arithmetic=arithmetic)
    arithmetic = arithmetic or arithmetic_of(observed)
    stages = stages_of("observed", observed, "output")
    return diagnose_stages(stages, Reference(problem, stages=frozenset(stages)), arithmetic, seconds)


def diagnose_stages(
    stages: Mapping[str, np.ndarray],
    reference: Reference,
    arithmetic: str,
    seconds: float = SECONDS,
    difference: Comparison | None = None,
) -> Diagnosis:
    """Find the mistakes in stages that were compared already, or may be.

    Args:
        stages: the stages by name, in NumPy's arrays.
        reference: of their problem; what it computed is not computed again.
        arithmetic: of the hardware.
        seconds: work of the search, see `diagnose`.
        difference: the first stage that differs; found by comparing, if need be, when absent.

    Raises:
        ValueError: if no stage is one of the problem's.
    """
    problem = reference.problem

    def explained(stages: Mapping[str, np.ndarray], right: Replay, work: Work) -> Diagnosis:
        with work.counted():
            taken = _taken(stages, right)
            return taken if isinstance(taken, Diagnosis) else _explained(*taken, work.left)

    def judge(part: Part, scope: Scope, work: Work) -> Diagnosis:
        base = remembering(part.remembered)
        return explained(part.observed, Replay(part.problem, {}, arithmetic, base=base, scope=scope), work)

    def judge_all(scope: Scope, work: Work) -> Diagnosis:
        base = remembering(reference.remembered)
        right = Replay(problem, {}, arithmetic, base=base, scope=scope, reference=reference)
        return explained(stages, right, work)

    if not is_large(problem):
        with single_threaded():
            found = judge_all(EVERYTHING, Work(seconds))
    elif problem.case.is_cached:
        found = diagnosed_by_first_call(first_call(problem, stages), judge, judge_all, seconds)
    else:
        ordered = {name: in_order(problem, name, x) for name, x in stages.items()}

        def first(conventions: Mapping[str, str]) -> Comparison | None:
            if difference is not None and math.isfinite(difference.max_abs):
                return difference
            return _first_difference({**ordered, **dict.fromkeys(conventions)}, reference, arithmetic)

        found = diagnosed_by_samples(Whole(problem, stages, reference.remembered), judge, first, seconds)
        turned = {name: ordered[name] for name in found.taken if ordered[name].shape != stages[name].shape}
        found = replace(found, taken=turned)
    return replace(found.with_named_laws(), dtypes=_other_dtypes(stages, problem), dtype=problem.dtype)


def _first_difference(
    stages: Mapping[str, np.ndarray | None], reference: Reference, arithmetic: str
) -> Comparison | None:
    """The first stage that differs, of those that are recorded as the reference's are."""
    expected, dtype = reference.accumulated, reference.problem.dtype
    given = {name: x for name, x in stages.items() if x is not None and name in expected}
    given = {name: given[name] for name in expected if name in given and given[name].shape == expected[name].shape}
    with np.errstate(over="ignore", invalid="ignore"):
        found = (reference.compare(x, Label("", "", dtype, name), arithmetic) for name, x in given.items())
        return next((comparison for comparison in found if not comparison.passed), None)


def _other_dtypes(stages: Mapping[str, np.ndarray], problem: Problem) -> dict[str, str]:
    """The dtypes of stages that are not the problem's; scores and attention weights may be kept in a wider one."""
    wide = (np.float32, np.float64)
    found = {name: x.dtype for name, x in stages.items() if is_floating(x.dtype) and stage_named(name).kind in STAGES}
    may_differ = ("scores", "attn_weights")
    return {
        name: dtype.name
        for name, dtype in found.items()
        if dtype.name != problem.dtype and not (stage_named(name).quantity in may_differ and dtype in wide)
        if not stage_named(name).is_exact
    }


def _taken(stages: Mapping[str, np.ndarray], first: Replay) -> Diagnosis | tuple[list[_View], _View | None]:
    """Take stages in each way that they may be; where they agree in one, nothing is wrong."""
    views: list[_View] = []
    right, reference = None, None
    for choice in choices_for(first.problem.dtype, stages):
        reference = (reference or first).with_choice(choice)
        views += _views(stages, reference)
        right = right or next((view for view in views if not (view.wrong or view.malformed)), None)
        if right is not None and (not right.is_weak or right is views[0]):
            return right.diagnosis("convention" if right.conventions else "none")
    if not views:
        raise Refusal("observed", "have stages of the problem", str(sorted(stages)))
    lacking = next((view for view in views if not view.wrong), None)
    if right is None and lacking is not None:  # what is there agrees, and a stage cannot be taken at all
        return lacking.diagnosis("unknown")
    return views, right


def _explained(views: Sequence[_View], right: _View | None, seconds: float) -> Diagnosis:
    """What a search finds."""
    plain = views[0]
    others = sorted((view for view in views if len(view.wrong) < len(plain.wrong)), key=lambda view: len(view.wrong))
    searched = [plain, *([] if right is not None else others[: MOST_VIEWS - 1])]
    untried, found = "", []
    for view in searched:
        if not found or found[0].unknowns or found[0].count > 1:
            work = Work(seconds / len(searched))
            found.append(_searched(view.replay, work))
            untried = untried or work.untried
    if right is not None and found[0].unknowns:
        return right.diagnosis("convention")
    best = min(range(len(found)), key=lambda index: found[index].cost)
    return _told(searched[best], found[best], untried)


def _searched(replay: Replay, work: Work) -> SearchResult:
    """What a search finds; where a stage has NaN of its own, that of rows without a key is a mistake beside others."""
    with work.counted():
        found = search(replay, work)
    begin = tuple(mistake for mistake in replay.known if mistake.name == "empty-row-nan")
    if not found.unknowns or not begin or not any(_has_nan_of_its_own(replay, stage) for stage in replay.stages):
        return found
    again = Work(work.seconds / 2)
    with again.counted():
        return min(found, search(replay, again, begin), key=lambda found: found.cost)


def _has_nan_of_its_own(replay: Replay, stage: str) -> bool:
    """Whether a stage is NaN where the reference is not, and a number elsewhere: NaN alone says nothing of rows."""
    expected, actual = replay.stage(stage), replay.observed[stage]
    if expected.shape != actual.shape or stage_named(stage).is_exact or np.isnan(actual).all():
        return False
    return bool((np.isnan(actual) & ~np.isnan(expected)).any())


def _told(view: _View, found: SearchResult, untried: str) -> Diagnosis:
    """What a search says."""
    explanations, unknowns = found.explanations, found.unknowns
    losses = {mistake.name for mistake in view.replay.known if mistake.is_loss}
    are_losses = all({*explanation.hypotheses} <= losses for explanation in explanations)
    is_short = not unknowns and len(explanations) == 1
    if are_losses and not is_short and (whole := lost_in_dtype(view.replay, view.before, view.wrong)):
        return view.diagnosis("precision", explanations=[whole])
    if unknowns and are_losses and (explanation := lost_in_products(view.replay, view.before, view.wrong)):
        return view.diagnosis("precision", explanations=[explanation])
    if unknowns and not explanations:
        has_wrong_zeros = any(view.replay.has_wrong_zeros(unknown.stage) for unknown in unknowns)
        if view.agrees_in_the_end and not (has_wrong_zeros or any(_is_serious(unknown) for unknown in unknowns)):
            words = {each.stage: _in_a_way(each) for each in unknowns}
            conventions = {**view.conventions, **words}
            return replace(view.diagnosis("convention"), conventions=conventions, unknowns=unknowns)
        has_laws = any(unknown.laws for unknown in unknowns)
        if not has_laws and max(view.before[stage].ratio for stage in view.wrong) <= ALMOST:
            return view.diagnosis("rounding", unknowns=unknowns)
    kind = "precision" if are_losses else "structure"
    if unknowns:
        kind = "law" if all(unknown.law is not None for unknown in unknowns) else "unknown"
    return view.diagnosis(
        kind,
        explanations=explanations,
        unknowns=unknowns,
        untried=untried if unknowns else "",
        agrees=view.agrees_in_the_end,
    )


def _in_a_way(unknown: Unknown) -> str:
    """How a stage differs that the output does not depend on."""
    how = f"by a law: {unknown.law.words}" if unknown.law else "in a way that is not known here"
    return f"differs from the reference, {how}"


def _is_serious(unknown: Unknown) -> bool:
    """Whether a stage is wrong, although the output agrees: it is not finite, or it is rotated in another way."""
    found = () if unknown.findings is None else unknown.findings.found
    return not math.isfinite(unknown.error) or any(law.name.startswith("rope") for law in found)


# ---- What was observed, in each way that it may be taken -------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """Observed stages, taken in one way.

    Attributes:
        replay: the reference, and the stages.
        before: how far each stage is from the reference's, computed from the stages before it.
        conventions: how stages are recorded, where not as ours.
        malformed: stages that cannot be taken, and why.
        is_weak: whether a mistake that explains all is to be preferred.
    """

    replay: Replay
    before: dict[str, Judgement]
    conventions: dict[str, str]
    malformed: dict[str, str]
    is_weak: bool = False

    @property
    def wrong(self) -> list[str]:
        """The stages that differ by themselves."""
        return [stage for stage, verdict in self.before.items() if verdict.ratio > 1.0]

    @property
    def agrees_in_the_end(self) -> bool:
        """Whether something was recorded at the end of every call, and agrees with all that led there.

        What a cache keeps shows in later calls only, and nothing follows the outputs of a module's own paths: they must
        agree, too.
        """
        replay = self.replay
        ends = [name for names in replay.steps for name in names if stage_named(name).kind == "output"]
        kept = [name for name in replay.stages if "cache" in name or name.endswith(".output")]
        is_given = all(name in replay.observed for name in ends)
        return is_given and all(replay.right.agrees(name, replay.observed[name]) for name in (*ends, *kept))

    def diagnosis(self, kind: str, **more: Any) -> Diagnosis:
        """What there is to say of it."""
        wrong = self.wrong
        first = wrong[0] if wrong else next(iter(self.malformed), "")
        verdict = self.before.get(first, NOT_MEASURED) if first else Judgement(0.0, 0.0)
        return Diagnosis(
            kind,
            first,
            verdict.error,
            verdict.ratio,
            has_stages=len(self.replay.stages) > 1,
            malformed=self.malformed,
            conventions=self.conventions,
            choice=self.replay.choice.about.format(dtype=self.replay.problem.dtype),
            taken={name: x for name, x in self.replay.observed.items() if name in self.conventions},
            **more,
        )


def _views(stages: Mapping[str, np.ndarray], right: Replay) -> list[_View]:
    """What was observed by its shapes alone, and in the ways in which it agrees with the reference, if that is more."""
    found = read(stages, right)
    if not found:
        return []
    plain = {name: each.plain for name, each in found.items() if each.plain is not None}
    ways = [plain]
    agreed = {
        name: each.agreed for name, each in found.items() if each.agreed is not None and _is_borne_out(name, found)
    }
    if any(reading is not plain.get(name) and reading.words for name, reading in agreed.items()):
        ways.append({**plain, **agreed})
    views = []
    for way in ways:
        values = {name: reading.values for name, reading in way.items() if reading.values is not None}
        masked = {name: reading.masked for name, reading in way.items() if reading.masked is not None}
        replay = right.observing(values, masked)
        before = {stage: replay.judgement(stage, ()) for stage in replay.stages}
        conventions = {name: reading.words for name, reading in way.items() if reading.words}
        is_weak = any(reading.is_weak for reading in way.values())
        malformed = {name: each.reason for name, each in found.items() if name not in way}
        views.append(_View(replay, before, conventions, malformed, is_weak))
    return views


def _is_borne_out(name: str, found: Mapping[str, Read]) -> bool:
    """Whether something that is made of a stage was recorded in its step, too, and can be judged."""
    reading = found[name].agreed
    if reading is None or reading.is_certain or not reading.words:
        return True
    order, stage = list(STAGES), stage_named(name)
    first = max(order.index("scores"), order.index(stage.kind) + 1)
    return any(
        order.index(stage_named(each).kind) >= first
        and stage_named(each).step == stage.step
        and (other.agreed is None or other.agreed.values is not None)
        for each, other in found.items()
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
        function: called with the query (B, T, d_in) and, for cross-attention, the key (B, S, d_kv), or with
            `shared_kv` the k and v of another layer (B, K, S, H); it has its own weights and masks. It gives the
            output, or (output, attention weights), or stages by name.
        problem: what it is given.
        framework: whose arrays it takes, `torch`, `jax` or `ttnn`.

    Raises:
        ValueError: if it gives something else.
    """
    backend = load_backend(FRAMEWORKS[framework])
    with backend.lock(problem.dtype):
        names = (name for name in ("query", "key", "k", "v") if name in problem.inputs)
        arrays = [backend.from_numpy(problem.inputs[name]) for name in names]
        try:
            given = function(*arrays)
        except Exception as error:  # whatever somebody's function raises
            raise Refusal("the function", "take the inputs", f"{type(error).__name__}: {error}") from error
        if isinstance(given, tuple) and len(given) == 2:
            given = {name: x for name, x in zip(("output", "attn_weights"), given, strict=True) if x is not None}
        elif not isinstance(given, Mapping):
            given = {"output": given}
        if not given or not all(map(_is_array, given.values())):
            kinds = ", ".join(f"{name}: {type(x).__name__}" for name, x in given.items()) or "nothing"
            raise Refusal("the function", "give an array, (output, attention weights), or arrays by stage", str(kinds))
        found = {name: np.array(x) for name, x in stages_of("the function's", given, "output").items()}
    if unknown := sorted(found.keys() - STAGES.keys()):
        names = ", ".join(name for name in STAGES if "." not in name)
        raise Refusal("stages", f"be named as in STAGES, {names}", str(unknown))
    return found


def _is_array(x: Any) -> bool:
    return hasattr(x, "__array__") or type(x).__module__.partition(".")[0] == "ttnn"
