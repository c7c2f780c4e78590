"""Find out why two implementations differ: the reference is computed again with known bugs until it
differs no more.

Convention differences come first: if the output agrees, a stage that differs is probably only
recorded in another convention (`parity.explain.diagnosis.readings`). Legitimate choices of
precision are allowed (`parity.explain.diagnosis.choices`).

Then each stage is computed again from the observed stages before it, so two bugs in different
places are found one after the other. A stage that was not observed is computed with the bugs found
so far. A bug explains a stage if the remaining error is within the budget of
`parity.measure.core.compare`, that is, if only rounding remains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.diagnosis.at_size import Judge, diagnosed_by_first_call, diagnosed_by_samples
from parity.explain.diagnosis.choices import Choice, choices_for
from parity.explain.diagnosis.hidden import hidden_bugs
from parity.explain.diagnosis.precision import lost_in_dtype, lost_in_products
from parity.explain.diagnosis.readings import Read, Reading, read
from parity.explain.diagnosis.remembered import Remembered, RememberingReference, remembered_of
from parity.explain.diagnosis.replay import EVERYTHING, Replay, Scope, WholeReplay, remembering
from parity.explain.diagnosis.sampling import (
    FIRST_CALL,
    ROWS,
    Part,
    Whole,
    first_call,
    in_order,
    is_large,
)
from parity.explain.diagnosis.search import SearchResult, search
from parity.explain.diagnosis.verdicts import Diagnosis, Explanation, Unknown
from parity.explain.diagnosis.whole import WholeStages
from parity.explain.diagnosis.work import Work, uncounted
from parity.measure.backends import FRAMEWORKS, load_backend
from parity.measure.core.arrays import arithmetic_of, stages_of
from parity.measure.core.blas import single_threaded
from parity.measure.core.compare import NOT_MEASURED, Comparison, Judgement, judged
from parity.measure.core.problem import Problem
from parity.measure.core.reference import ARITHMETICS, UNFUSED
from parity.measure.core.stages import STAGES, stage_named
from parity.measure.core.trace import Reference, Trace
from parity.measure.core.user_code import user_code
from parity.measure.core.weights import is_floating

__all__ = ["Diagnosis", "Explanation", "Unknown", "diagnose", "diagnose_trace", "observe"]

SECONDS = 5.0
"""Work of the search for bugs, see `diagnose`."""

FAR_FROM_CHOICE = 16.0
"""The ratio of a stage above which no other choice of precision is tried for a large layer."""

MOST_VIEWS = 3
"""Readings of the observed stages that are searched for bugs."""


def diagnose(
    observed: Mapping[str, Any],
    problem: Problem,
    *,
    arithmetic: str | None = None,
    seconds: float = SECONDS,
) -> Diagnosis:
    """Find the bugs that explain the difference between an implementation and the reference.

    Args:
        observed: stages by name, as in `STAGES`, in arrays of any framework. The output alone is
            enough, but then two bugs may look like one, or may not be found.
        problem: the case, weights and inputs.
        arithmetic: of the hardware, one of `reference.ARITHMETICS`, or its rounding, one of
            `reference.UNFUSED`. The default is `tensix` for TTNN arrays on a card or a simulator,
            else `ieee`.
        seconds: work of the search, in seconds of one core of a usual machine. Work is counted by
            the sizes of the computation, so the load of the machine does not change the result. For
            a large layer the search does a quarter of the layer's own work in addition. The report
            lists the parts that were not tried. Infinity tries everything.

    Raises:
        ValueError: if no name is a stage of the problem, or the arithmetic is unknown.
    """
    if arithmetic not in (None, *ARITHMETICS, *UNFUSED):
        known = [*ARITHMETICS, *UNFUSED]
        raise InputError("arithmetic", f"be one of {known}", arithmetic=arithmetic)
    arithmetic = arithmetic or arithmetic_of(observed)
    stages = stages_of("observed", observed, "output")
    reference = RememberingReference(problem, stages=frozenset(stages))
    found = diagnose_stages(stages, reference, arithmetic, seconds)
    return (
        found
        if found.is_wrong
        else replace(found, hidden=_hidden_bugs(stages, reference, arithmetic))
    )


def _hidden_bugs(
    stages: Mapping[str, np.ndarray], reference: Reference, arithmetic: str
) -> tuple[str, ...]:
    """Return the names of known bugs that the compared stages would not show in their dtype."""
    problem, remembered = reference.problem, remembered_of(reference)
    if not is_large(problem):
        base = remembering(remembered)
        return hidden_bugs(
            Replay(problem, {}, arithmetic, base=base, reference=reference), list(stages)
        )
    if problem.case.is_cached:
        return ()
    compared = WholeStages({}, reference, arithmetic)
    part = Whole(problem, _of_problem(stages), compared, remembered).of_rows(0, ROWS, None)
    right = Replay(part.problem, {}, arithmetic, base=remembering(part.remembered))
    return hidden_bugs(right, list(part.observed))


def diagnose_stages(
    stages: Mapping[str, np.ndarray],
    reference: Reference,
    arithmetic: str,
    seconds: float = SECONDS,
    comparisons: Iterable[Comparison] = (),
) -> Diagnosis:
    """Find the bugs in stages that may already be compared.

    Args:
        stages: the stages by name, in NumPy arrays.
        reference: of their problem; its stages are not computed again.
        arithmetic: of the hardware.
        seconds: work of the search, see `diagnose`.
        comparisons: known comparisons of the stages with the reference.

    Raises:
        ValueError: if no stage is one of the problem's.
    """
    problem, remembered = reference.problem, remembered_of(reference)

    def explained(stages: Mapping[str, np.ndarray], right: Replay, work: Work) -> Diagnosis:
        with work.counted():
            taken = _read_stages(stages, right)
            return taken if isinstance(taken, Diagnosis) else _explain(taken, work.left)

    def judge(part: Part, scope: Scope, work: Work) -> Diagnosis:
        base = remembering(part.remembered)
        return explained(
            part.observed, Replay(part.problem, {}, arithmetic, base=base, scope=scope), work
        )

    def judge_all(scope: Scope, work: Work) -> Diagnosis:
        base = remembering(remembered)
        right = Replay(problem, {}, arithmetic, base=base, scope=scope, reference=reference)
        return explained(stages, right, work)

    known = {each.stage: each for each in comparisons}
    if not is_large(problem):
        compared = WholeStages(stages, reference, arithmetic, known)
        with single_threaded():
            found = judge_all(EVERYTHING, Work(seconds))
    elif problem.case.is_cached:
        ordered = {name: in_order(problem, name, x) for name, x in stages.items()}
        compared = WholeStages(ordered, reference, arithmetic, known)
        of_first_call = {
            name.removeprefix(FIRST_CALL): x
            for name, x in ordered.items()
            if name.startswith(FIRST_CALL)
        }
        first_compared = WholeStages(of_first_call, reference, arithmetic, known, FIRST_CALL)
        found = diagnosed_by_first_call(
            first_call(problem, stages, first_compared), judge, judge_all, seconds
        )
    else:
        found, compared = _diagnosed_at_size(
            _of_problem(stages), reference, remembered, arithmetic, judge, seconds
        )
    found = _measured_as_a_whole(found.with_named_laws(), compared)
    return replace(found, dtypes=_other_dtypes(stages, problem), dtype=problem.dtype)


def _diagnosed_at_size(
    stages: Mapping[str, np.ndarray],
    reference: Reference,
    remembered: Remembered,
    arithmetic: str,
    judge: Judge,
    seconds: float,
) -> tuple[Diagnosis, WholeStages]:
    """Diagnose the stages of a large layer without a cache: read as a whole, and searched in
    samples.
    """
    right = WholeReplay(
        reference.problem,
        {},
        arithmetic,
        base=remembering(remembered),
        reference=reference,
    )
    with uncounted(), single_threaded():
        views = _whole_views(stages, right)
    found: list[tuple[Diagnosis, WholeStages]] = []
    for view in views:
        kind = view.choice.arithmetic or arithmetic
        compared = WholeStages(view.values, reference, kind, passed=view.agreed)
        whole = Whole(reference.problem, view.values, compared, remembered)
        diagnosis = view.completed(diagnosed_by_samples(whole, judge, seconds / len(views)))
        if not diagnosis.is_wrong:
            return diagnosis, compared
        found.append((diagnosis, compared))
    return min(found, key=lambda each: (len(each[0].unknowns), len(each[0].explanations)))


@dataclass(frozen=True)
class _WholeView:
    """The stages of a large layer in one reading.

    Attributes:
        values: stages in the reference's convention, without those that cannot be converted.
        agreed: the stages that are right as a whole, some of them in another convention.
        conventions: descriptions of how stages are recorded.
        malformed: stages that cannot be compared, and why.
        choice: how the layer computes differently.
    """

    values: dict[str, np.ndarray]
    agreed: frozenset[str]
    conventions: dict[str, str]
    malformed: dict[str, str]
    choice: Choice

    def completed(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return a diagnosis of the values with the conventions and faults of all stages."""
        malformed = {**diagnosis.malformed, **self.malformed}
        conventions = {**diagnosis.conventions, **self.conventions}
        kind, stage = diagnosis.kind, diagnosis.stage
        if not diagnosis.is_wrong:
            kind = "unknown" if malformed else "convention" if conventions else "none"
            stage = next(iter(malformed), "")
        dtype = next((x.dtype.name for x in self.values.values() if is_floating(x.dtype)), "")
        taken = {name: self.values[name] for name in conventions if name in self.values}
        return replace(
            diagnosis,
            kind=kind,
            stage=stage,
            conventions=conventions,
            malformed=malformed,
            choice=self.choice.about.format(dtype=dtype) or diagnosis.choice,
            taken=taken,
        )


def _whole_views(stages: Mapping[str, np.ndarray], right: WholeReplay) -> list[_WholeView]:
    """Return the readings of whole stages: by their shapes alone, and in the conventions in which
    they agree.
    """
    # The others would need the scores of all rows.
    choice, *other_choices = (
        each for each in choices_for(right.problem.dtype, stages) if not each.in_reference
    )
    found = read(stages, right.with_choice(choice))
    if not found:
        raise InputError("observed", "have stages of the problem", str(sorted(stages)))
    agreed = _borne_out(found)
    for other in other_choices:
        if len(agreed) == len(found) or not _may_be_a_choice(
            found, agreed, right.with_choice(choice)
        ):
            break
        if _number_agreeing(found, right.with_choice(other)) > len(agreed):
            choice, found = other, read(stages, right.with_choice(other))
            agreed = _borne_out(found)
    plain = {name: each.plain for name, each in found.items() if each.plain is not None}
    as_recorded = {name: reading for name, reading in agreed.items() if not reading.words}
    views = [_whole_view(found, {**plain, **as_recorded}, frozenset(as_recorded), choice)]
    if len(as_recorded) < len(agreed):
        other = _whole_view(found, {**plain, **agreed}, frozenset(agreed), choice)
        views = [other] if len(agreed) == len(found) else [*views, other]
    return views


def _borne_out(found: Mapping[str, Read]) -> dict[str, Reading]:
    """Return the readings in which stages agree, if a later stage confirms them where that is
    necessary.
    """
    return {
        name: each.agreed
        for name, each in found.items()
        if each.agreed is not None and _is_borne_out(name, found)
    }


def _may_be_a_choice(
    found: Mapping[str, Read], agreed: Mapping[str, Reading], right: Replay
) -> bool:
    """Return True if stages that differ may do so because the layer computes in another valid way.

    The noise of all stages but scores and attention weights grows by a small factor only.
    """
    for name, each in found.items():
        if name in agreed or each.plain is None or each.plain.values is None:
            continue
        if stage_named(name).quantity in ("scores", "attn_weights"):
            return True
        expected = right.stage(name)
        if (
            judged(each.plain.values, expected, right.allowed(name, ()), name).ratio
            > FAR_FROM_CHOICE
        ):
            return False
    return True


def _number_agreeing(found: Mapping[str, Read], right: Replay) -> int:
    """Return the number of stages that agree by their shapes alone."""
    plain = {name: each.plain for name, each in found.items() if each.plain is not None}
    return sum(
        reading.values is not None and right.agrees(name, reading.values, unused=reading.masked)
        for name, reading in plain.items()
    )


def _whole_view(
    found: Mapping[str, Read],
    readings: Mapping[str, Reading],
    agreed: frozenset[str],
    choice: Choice,
) -> _WholeView:
    return _WholeView(
        {name: reading.values for name, reading in readings.items() if reading.values is not None},
        agreed,
        {name: reading.words for name, reading in readings.items() if reading.words},
        {name: each.reason for name, each in found.items() if name not in readings},
        choice,
    )


def _of_problem(stages: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the stages that the diagnosis knows: not gradients, nor unknown names.

    Raises:
        ValueError: if there is none.
    """
    names = [
        name
        for name in stages
        if stage_named(name).kind in STAGES and not stage_named(name).is_gradient
    ]
    if not names:
        raise InputError("observed", "have stages of the problem", str(sorted(stages)))
    return {name: stages[name] for name in names}


def _measured_as_a_whole(diagnosis: Diagnosis, compared: WholeStages) -> Diagnosis:
    """Return a diagnosis with the errors of whole stages, as a comparison reports them.

    The search measures samples, and each stage from the observed stages before it.
    """
    if not diagnosis.is_wrong:
        return diagnosis

    def ratio_of(stage: str, ratio: float) -> float:
        if stage not in compared or compared[stage].passed:
            return ratio
        return compared[stage].comparison.ratio

    explanations = [
        replace(each, ratio_before=ratio_of(each.stage, each.ratio_before))
        for each in diagnosis.explanations
    ]
    unknowns = [
        replace(each, ratio=ratio_of(each.stage, each.ratio)) for each in diagnosis.unknowns
    ]
    ratio = ratio_of(diagnosis.stage, diagnosis.ratio)
    return replace(diagnosis, ratio=ratio, explanations=explanations, unknowns=unknowns)


def _other_dtypes(stages: Mapping[str, np.ndarray], problem: Problem) -> dict[str, str]:
    """Return the dtypes of stages that are not the problem's; scores and attention weights may have
    a wider one.
    """
    wide = (np.float32, np.float64)
    found = {
        name: x.dtype
        for name, x in stages.items()
        if is_floating(x.dtype) and stage_named(name).kind in STAGES
    }
    may_differ = ("scores", "attn_weights")
    return {
        name: dtype.name
        for name, dtype in found.items()
        if dtype.name != problem.dtype
        and not (stage_named(name).quantity in may_differ and dtype in wide)
        if not stage_named(name).is_exact
    }


def _read_stages(stages: Mapping[str, np.ndarray], first: Replay) -> Diagnosis | list[_View]:
    """Read stages in every possible way; if they agree in one, nothing is wrong."""
    views: list[_View] = []
    reference = None
    for choice in choices_for(first.problem.dtype, stages):
        reference = (reference or first).with_choice(choice)
        views += _views(stages, reference)
        right = next((view for view in views if not (view.wrong or view.malformed)), None)
        if right is not None:
            return right.diagnosis("convention" if right.conventions else "none")
    if not views:
        raise InputError("observed", "have stages of the problem", str(sorted(stages)))
    lacking = next((view for view in views if not view.wrong), None)
    if lacking is not None:  # the comparable stages agree, but one has an unexpected shape or dtype
        return lacking.diagnosis("unknown")
    return views


def _explain(views: Sequence[_View], seconds: float) -> Diagnosis:
    """Search each reading for bugs, and return the best diagnosis."""
    plain = views[0]
    others = sorted(
        (view for view in views if len(view.wrong) < len(plain.wrong)),
        key=lambda view: len(view.wrong),
    )
    searched = [plain, *others[: MOST_VIEWS - 1]]
    untried, results = "", list[SearchResult]()
    for view in searched:
        if not results or results[0].unknowns or results[0].count > 1:
            work = Work(seconds / len(searched))
            results.append(_search(view.replay, work))
            untried = untried or work.untried
    best = min(range(len(results)), key=lambda index: results[index].cost)
    return _conclude(searched[best], results[best], untried)


def _search(replay: Replay, work: Work) -> SearchResult:
    """Search for bugs. If a stage has NaN of its own, also search with NaN in rows without a
    key.
    """
    with work.counted():
        found = search(replay, work)
    begin = tuple(bug for bug in replay.known if bug.name == "empty-row-nan")
    if (
        not found.unknowns
        or not begin
        or not any(_has_nan_of_its_own(replay, stage) for stage in replay.stages)
    ):
        return found
    again = Work(work.seconds / 2)
    with again.counted():
        return min(found, search(replay, again, begin), key=lambda found: found.cost)


def _has_nan_of_its_own(replay: Replay, stage: str) -> bool:
    """Return True if a stage is NaN where the reference is not, and finite elsewhere: NaN alone
    shows no rows.
    """
    if replay.stage(stage).shape != replay.observed[stage].shape or stage_named(stage).is_exact:
        return False
    actual, expected = replay.compared(stage, replay.stage(stage))
    if np.isnan(actual).all():
        return False
    return bool((np.isnan(actual) & ~np.isnan(expected)).any())


def _conclude(view: _View, found: SearchResult, untried: str) -> Diagnosis:
    """Return the diagnosis that follows from a search.

    A stage over its budget is wrong, also if the output agrees: what differs and has no name is
    unknown.
    """
    explanations, unknowns = found.explanations, found.unknowns
    losses = {bug.name for bug in view.replay.known if bug.is_loss}
    are_losses = all({*explanation.bugs} <= losses for explanation in explanations)
    is_short = not unknowns and len(explanations) == 1
    if (
        are_losses
        and not is_short
        and (whole := lost_in_dtype(view.replay, view.before, view.wrong))
    ):
        return view.diagnosis("precision", explanations=[whole])
    if (
        unknowns
        and are_losses
        and (explanation := lost_in_products(view.replay, view.before, view.wrong))
    ):
        return view.diagnosis("precision", explanations=[explanation])
    kind = "precision" if are_losses else "structure"
    if unknowns:
        kind = "pattern" if all(unknown.law is not None for unknown in unknowns) else "unknown"
    return view.diagnosis(
        kind,
        explanations=explanations,
        unknowns=unknowns,
        untried=untried if unknowns else "",
        agrees=view.agrees_in_the_end,
    )


# ---- Readings of the observed stages -------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """Observed stages in one reading.

    Attributes:
        replay: the reference, and the stages.
        before: the error of each stage, computed from the stages before it.
        conventions: descriptions of stages that are recorded in another convention.
        malformed: stages that cannot be compared, and why.
    """

    replay: Replay
    before: dict[str, Judgement]
    conventions: dict[str, str]
    malformed: dict[str, str]

    @property
    def wrong(self) -> list[str]:
        """The stages that differ by themselves."""
        return [stage for stage, verdict in self.before.items() if verdict.ratio > 1.0]

    @property
    def agrees_in_the_end(self) -> bool:
        """True if the end of every call was recorded and agrees with the stages before it.

        A wrong cache shows in later calls only, and nothing follows the outputs of a module's own
        paths, so these must also agree.
        """
        replay = self.replay
        ends = [
            name for names in replay.steps for name in names if stage_named(name).kind == "output"
        ]
        kept = [name for name in replay.stages if "cache" in name or name.endswith(".output")]
        is_given = all(name in replay.observed for name in ends)
        return is_given and all(
            replay.right.agrees(name, replay.observed[name]) for name in (*ends, *kept)
        )

    def diagnosis(self, kind: str, **more: Any) -> Diagnosis:
        """Return a diagnosis of a kind with the data of this reading."""
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
    """Return the readings of observed stages: by their shapes alone, and in the conventions in
    which they agree.
    """
    found = read(stages, right)
    if not found:
        return []
    plain = {name: each.plain for name, each in found.items() if each.plain is not None}
    ways = [plain]
    agreed = _borne_out(found)
    if any(reading is not plain.get(name) and reading.words for name, reading in agreed.items()):
        ways.append({**plain, **agreed})
    views = []
    for way in ways:
        values = {
            name: reading.values for name, reading in way.items() if reading.values is not None
        }
        masked = {
            name: reading.masked for name, reading in way.items() if reading.masked is not None
        }
        replay = right.observing(values, masked)
        before = {stage: replay.judgement(stage, ()) for stage in replay.stages}
        conventions = {name: reading.words for name, reading in way.items() if reading.words}
        malformed = {name: each.reason for name, each in found.items() if name not in way}
        views.append(_View(replay, before, conventions, malformed))
    return views


def _is_borne_out(name: str, found: Mapping[str, Read]) -> bool:
    """Return True if a stage that depends on this one was also recorded in its step and can be
    compared.
    """
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
    """Find the bugs in the trace of a backend.

    Raises:
        ValueError: if it has no stages.
    """
    return diagnose(trace.accumulated, trace.problem, arithmetic=trace.arithmetic)


def observe(
    function: Callable[..., Any], problem: Problem, framework: str
) -> dict[str, np.ndarray]:
    """Return the stages that a function computes for a problem.

    Args:
        function: called with the query (B, T, d_in) and, for cross-attention, the key (B, S, d_kv),
            or with `shared_kv` the k and v of another layer, (B, K, S, H). It has its own weights
            and masks, and returns the output, or (output, attention weights), or stages by name.
        problem: the case and its inputs.
        framework: of the function's arrays, `torch`, `jax` or `ttnn`.

    Raises:
        ValueError: if it returns anything else, or raises an exception.
    """
    backend = load_backend(FRAMEWORKS[framework])
    with backend.lock(problem.dtype):
        names = (name for name in ("query", "key", "k", "v") if name in problem.inputs)
        arrays = [backend.from_numpy(problem.inputs[name]) for name in names]
        try:
            with user_code(function):
                given = function(*arrays)
        except Exception as error:  # any exception of the function
            raise InputError(
                "the function", "take the inputs", f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(given, tuple) and len(given) == 2:
            given = {
                name: x
                for name, x in zip(("output", "attn_weights"), given, strict=True)
                if x is not None
            }
        elif not isinstance(given, Mapping):
            given = {"output": given}
        if not given or not all(map(_is_array, given.values())):
            kinds = (
                ", ".join(f"{name}: {type(x).__name__}" for name, x in given.items()) or "nothing"
            )
            raise InputError(
                "the function",
                "give an array, (output, attention weights), or arrays by stage",
                str(kinds),
            )
        found = {
            name: np.array(x) for name, x in stages_of("the function's", given, "output").items()
        }
    if unknown := sorted(found.keys() - STAGES.keys()):
        names = ", ".join(name for name in STAGES if "." not in name)
        raise InputError("stages", f"be named as in STAGES, {names}", str(unknown))
    return found


def _is_array(x: Any) -> bool:
    return hasattr(x, "__array__") or type(x).__module__.partition(".")[0] == "ttnn"
