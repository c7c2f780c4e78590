"""Find out why an implementation differs from the reference: the reference is computed again with
edits, known bugs and fitted patterns, until it differs no more.

Convention differences come first: if the output agrees, a stage that differs is probably only
recorded in a different convention (`parity.explain.diagnosis.readings`). Legitimate choices of
precision are allowed (`parity.explain.diagnosis.choices`).

Then each stage is computed again from the observed stages before it, so two bugs in different
stages are found one after the other. A stage that was not observed is computed with the edits found
so far. An edit explains a stage if the remaining error is within the budget of
`parity.measure.core.compare`, that is, if only rounding remains.

A large layer is searched in samples (`parity.explain.diagnosis.at_size`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.diagnosis.at_size import (
    DiagnosePart,
    diagnosed_by_first_call,
    diagnosed_by_samples,
)
from parity.explain.diagnosis.bugs.record import Edit, Edits
from parity.explain.diagnosis.bugs.serving import caching_padding, has_padding
from parity.explain.diagnosis.choices import choices_for
from parity.explain.diagnosis.findings import Diagnosis, Finding
from parity.explain.diagnosis.gradients import check_names, diagnose_gradients, unknown_names
from parity.explain.diagnosis.hidden import hidden_bugs
from parity.explain.diagnosis.precision import lost_in_dtype, lost_in_products
from parity.explain.diagnosis.remembered import RememberingReference, remembered_of
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
from parity.explain.diagnosis.trial import EVERYTHING, Scope, Trial, WholeTrial, remembering
from parity.explain.diagnosis.views import StageView, views_of, whole_views
from parity.explain.diagnosis.whole import WholeStages
from parity.explain.diagnosis.work import Work, uncounted
from parity.measure.backends import FRAMEWORKS, load_backend
from parity.measure.core.arrays import arithmetic_of, names_of, stages_of
from parity.measure.core.blas import single_threaded
from parity.measure.core.compare import Comparison
from parity.measure.core.exercise import not_exercised_by
from parity.measure.core.problem import Problem
from parity.measure.core.reference import ARITHMETICS, UNFUSED
from parity.measure.core.stages import STAGES, stage_named
from parity.measure.core.trace import Reference, Trace, with_absent_gradients
from parity.measure.core.user_code import EndedProgramError, line_of, user_code
from parity.measure.core.weights import is_floating

__all__ = ["Diagnosis", "Finding", "diagnose", "diagnose_trace", "observe"]

SECONDS = 5.0
"""Work of the search for bugs, see `diagnose`."""

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
        arithmetic: arithmetic of the hardware, one of `reference.ARITHMETICS`, or its rounding, one
            of `reference.UNFUSED`. The default is `tensix` for TTNN arrays on a card or a
            simulator, else `ieee`.
        seconds: work of the search, in seconds of one core of a typical machine. Work is counted
            from the sizes of the computation, so the load of the machine does not change the
            result. For a large layer, the search may do another quarter of the layer's own work.
            The report lists the parts that were not tried. Infinity tries everything.

    Raises:
        ValueError: if no name is a stage of the problem, or the arithmetic is unknown.

    Example:
        >>> from dataclasses import replace
        >>> import mha_torch
        >>> problem = parity.make_problem("causal", "float32")
        >>> wrong = replace(problem.spec, scale=1.0)
        >>> layer = parity.load_into(mha_torch.MultiHeadAttention(wrong), problem.weights, wrong)
        >>> query = parity.to_torch(problem.inputs["query"])
        >>> diagnosis = parity.diagnose({"output": layer(query, is_causal=True)[0]}, problem)
        >>> diagnosis.likely_bug
        'scale-missing'
        >>> diagnosis.wrong_fields[0].to_dict()
        {'field': 'scale', 'is': 1.0, 'should_be': 0.35...}
    """
    if arithmetic not in (None, *ARITHMETICS, *UNFUSED):
        known = [*ARITHMETICS, *UNFUSED]
        raise InputError("arithmetic", f"be one of {known}", arithmetic=arithmetic)
    arithmetic = arithmetic or arithmetic_of(observed)
    names = names_of(observed, "output")
    check_names("observed", names, problem)
    has_gradients = any(stage_named(name).is_gradient for name in names)
    reference = RememberingReference(problem, has_gradients, frozenset(names))
    stages = stages_of("observed", with_absent_gradients(observed, reference), "output")
    diagnosis = diagnose_stages(stages, reference, arithmetic, seconds)
    if diagnosis.is_wrong:
        return diagnosis
    features = not_exercised_by(problem.case, problem.dtype)
    return replace(
        diagnosis,
        hidden=_hidden_bugs(stages, reference, arithmetic),
        not_exercised=tuple(feature.words for feature in features),
    )


def diagnose_trace(trace: Trace, seconds: float = SECONDS) -> Diagnosis:
    """Find the bugs in the trace of a backend, except its stages that the reference lacks.

    Args:
        trace: the trace.
        seconds: work of the search, see `diagnose`.

    Raises:
        ValueError: if it has no stages.
    """
    # The comparison of traces reports those.
    stages = stages_to_diagnose(trace.accumulated, trace.problem)
    return diagnose(stages, trace.problem, arithmetic=trace.arithmetic, seconds=seconds)


def stages_to_diagnose(stages: Mapping[str, np.ndarray], problem: Problem) -> dict[str, np.ndarray]:
    """Return the stages and gradients of a problem among arrays by name."""
    unknown = unknown_names([*stages], problem)
    return {name: x for name, x in stages.items() if name not in unknown}


def diagnose_stages(
    stages: Mapping[str, np.ndarray],
    reference: Reference,
    arithmetic: str,
    seconds: float = SECONDS,
    comparisons: Iterable[Comparison] = (),
    candidates: Edits = (),
) -> Diagnosis:
    """Find the bugs in stages that may already be compared.

    Args:
        stages: the stages by name, in NumPy arrays.
        reference: reference of their problem; its stages are not computed again.
        arithmetic: arithmetic of the hardware.
        seconds: work of the search, see `diagnose`.
        comparisons: known comparisons of the stages with the reference.
        candidates: edits to try after the known bugs.

    Raises:
        ValueError: if no stage is one of the problem's.
    """
    problem = reference.problem
    gradients: dict[str, np.ndarray] = {}
    of_forward: dict[str, np.ndarray] = {}
    for name, x in stages.items():
        if stage_named(name).is_gradient:
            gradients[name] = x
        else:
            of_forward[name] = x
    diagnosis = Diagnosis()
    if of_forward or not gradients:
        diagnosis = _diagnosed_forward(
            of_forward, reference, arithmetic, seconds, comparisons, candidates
        )
    if gradients:
        diagnosis = diagnose_gradients(
            diagnosis, of_forward, gradients, reference, arithmetic, seconds
        )
    return replace(diagnosis, dtypes=_other_dtypes(stages, problem), dtype=problem.dtype)


def _diagnosed_forward(
    stages: Mapping[str, np.ndarray],
    reference: Reference,
    arithmetic: str,
    seconds: float,
    comparisons: Iterable[Comparison],
    candidates: Edits,
) -> Diagnosis:
    """Find the bugs in stages of the forward pass: see `diagnose_stages`."""
    problem = reference.problem
    known = {comparison.stage: comparison for comparison in comparisons}
    diagnose_part = partial(_diagnosed, arithmetic, candidates)
    if not is_large(problem):
        compared = WholeStages(stages, reference, arithmetic, known)
        with single_threaded():
            diagnosis = diagnose_part(Part.of_all(stages, reference), EVERYTHING, Work(seconds))
    elif problem.case.is_cached:
        diagnosis, compared = _diagnosed_by_calls(
            stages, reference, arithmetic, known, diagnose_part, seconds
        )
    else:
        diagnosis, compared = _diagnosed_at_size(
            stages, reference, arithmetic, diagnose_part, seconds
        )
    return _measured_as_a_whole(diagnosis, compared)


# ---- A layer -------------------------------------------------------------------------------------


def _diagnosed(
    arithmetic: str, candidates: Edits, part: Part, scope: Scope, work: Work
) -> Diagnosis:
    """Read stages in every possible way; if they agree in none, search for bugs.

    Args:
        arithmetic: arithmetic of the hardware.
        candidates: edits to try after the known bugs.
        part: the problem and its stages.
        scope: the stages to compare, and the bugs to try.
        work: the limit of the search.
    """
    right = Trial(
        part.problem,
        {},
        arithmetic,
        base=remembering(part.remembered),
        scope=scope,
        reference=part.reference,
        candidates=candidates,
    )
    with work.counted():
        views = _views(part.observed, right)
        for view in views:
            # If the comparable stages agree, one has an unexpected shape or dtype at most.
            if not view.wrong:
                return view.diagnosis()
        to_search = _views_to_search(views)
        seconds = work.left / len(to_search)
        results: list[tuple[StageView, SearchResult]] = []
        untried = ""
        for view in to_search:
            work_of_view = Work(seconds)
            result = _search_with_and_without_padding(view.trial, work_of_view)
            untried = untried or work_of_view.untried
            if view is views[0] and result.is_one_bug:
                return _concluded(view, result, untried)
            results.append((view, result))
        best_view, best_result = min(results, key=_cost_of_result)
        return _concluded(best_view, best_result, untried)


def _views(stages: Mapping[str, np.ndarray], right: Trial) -> list[StageView]:
    """Return the ways to read stages, in each choice that may make them right; only the one in
    which they are right, if there is one.

    Raises:
        ValueError: if no stage is one of the problem's.
    """
    views: list[StageView] = []
    trial = right
    for choice in choices_for(right.problem.dtype, stages):
        if views and not views[0].may_be_right_with(choice):
            continue
        trial = trial.with_choice(choice)
        for view in views_of(stages, trial):
            if not (view.wrong or view.malformed):
                return [view]
            views.append(view)
    if not views:
        raise InputError("observed", "have stages of the problem", str(sorted(stages)))
    return views


def _views_to_search(views: Sequence[StageView]) -> list[StageView]:
    """Return the plain reading, and those in which fewest stages are wrong, if they are fewer."""
    plain = views[0]
    fewer_wrong = [view for view in views if len(view.wrong) < len(plain.wrong)]
    fewer_wrong.sort(key=lambda view: len(view.wrong))
    return [plain, *fewer_wrong[: MOST_VIEWS - 1]]


def _cost_of_result(searched: tuple[StageView, SearchResult]) -> tuple[int, int]:
    _, result = searched
    return result.cost


def _search_with_and_without_padding(trial: Trial, work: Work) -> SearchResult:
    """Search for bugs; if a call has padding, with padding in the cache and without it.

    No right token depends on it, so the reference leaves its slots empty. Bugs may show it.
    """
    case = trial.problem.case
    if not has_padding(case, len(case.chunks)):
        return _search_with_and_without_nan(trial, work)
    caching = trial.computed_otherwise(Edit(overrides=caching_padding()))
    first_call = stage_named(trial.wrong(trial.stages, ())[0]).step
    ways = [trial, caching]
    if first_call is not None and has_padding(case, first_call):
        # The first wrong call may show the padding of an earlier one.
        ways = [caching, trial]
    first = _search_with_and_without_nan(ways[0], work)
    if first.is_one_bug:
        return first
    second = _search_with_and_without_nan(ways[1], Work(work.seconds / 4))
    return second if second.cost < first.cost else first


def _search_with_and_without_nan(trial: Trial, work: Work) -> SearchResult:
    """Search for bugs. If that explains not all, and a stage has NaN of its own, also search with
    NaN in rows without a key.
    """
    with work.counted():
        result = search(trial, work)
    if result.is_complete:
        return result
    begin = tuple(bug for bug in trial.known if bug.name == "empty-row-nan")
    if not begin or not any(_has_nan_of_its_own(trial, stage) for stage in trial.stages):
        return result
    more_work = Work(work.seconds / 2)
    with more_work.counted():
        with_nan = search(trial, more_work, begin)
    return with_nan if with_nan.cost < result.cost else result


def _has_nan_of_its_own(trial: Trial, stage: str) -> bool:
    """Return True if a stage is NaN where the reference is not, and finite elsewhere: NaN alone
    shows no rows.
    """
    expected = trial.stage(stage)
    if expected.shape != trial.observed[stage].shape or stage_named(stage).is_exact:
        return False
    actual, expected = trial.compared(stage, expected)
    if np.isnan(actual).all():
        return False
    return bool((np.isnan(actual) & ~np.isnan(expected)).any())


def _concluded(view: StageView, result: SearchResult, untried: str) -> Diagnosis:
    """Return the diagnosis that follows from a search.

    If all that was found is lost precision, one loss in the whole layer may explain more.
    """
    if result.is_complete and len(result.findings) == 1:
        return view.diagnosis(result, untried)
    if all(edit.is_loss for finding in result.findings for edit in finding.edits):
        # One loss in the whole layer is simpler than several in its parts.
        whole = lost_in_dtype(view.trial, view.before, view.wrong)
        if whole is None and not result.is_complete:
            whole = lost_in_products(view.trial, view.before, view.wrong)
        if whole is not None:
            return replace(view.diagnosis(), findings=[whole])
    return view.diagnosis(result, untried)


# ---- A large layer -------------------------------------------------------------------------------


def _diagnosed_by_calls(
    stages: Mapping[str, np.ndarray],
    reference: Reference,
    arithmetic: str,
    known: Mapping[str, Comparison],
    diagnose_part: DiagnosePart,
    seconds: float,
) -> tuple[Diagnosis, WholeStages]:
    """Diagnose the calls of a large layer with a cache, the first one alone if possible."""
    problem = reference.problem
    ordered = {name: in_order(problem, name, x) for name, x in stages.items()}
    of_first_call: dict[str, np.ndarray] = {}
    for name, x in ordered.items():
        if name.startswith(FIRST_CALL):
            of_first_call[name.removeprefix(FIRST_CALL)] = x
    first_compared = WholeStages(of_first_call, reference, arithmetic, known, FIRST_CALL)
    first = first_call(problem, stages, first_compared)
    every_call = Part.of_all(stages, reference)
    diagnosis = diagnosed_by_first_call(first, every_call, diagnose_part, seconds)
    return diagnosis, WholeStages(ordered, reference, arithmetic, known)


def _diagnosed_at_size(
    stages: Mapping[str, np.ndarray],
    reference: Reference,
    arithmetic: str,
    diagnose_part: DiagnosePart,
    seconds: float,
) -> tuple[Diagnosis, WholeStages]:
    """Diagnose the stages of a large layer without a cache: read as a whole, and searched in
    samples.
    """
    remembered = remembered_of(reference)
    base = remembering(remembered)
    right = WholeTrial(reference.problem, {}, arithmetic, base=base, reference=reference)
    with uncounted(), single_threaded():
        views = whole_views(_of_problem(stages), right)
    best: tuple[Diagnosis, WholeStages] | None = None
    for view in views:
        kind = view.choice.arithmetic or arithmetic
        compared = WholeStages(view.values, reference, kind, passed=view.agreed)
        whole = Whole(reference.problem, view.values, compared, remembered)
        diagnosis = diagnosed_by_samples(whole, diagnose_part, seconds / len(views))
        diagnosis = view.completed(diagnosis)
        if not diagnosis.is_wrong:
            return diagnosis, compared
        if best is None or _cost_of(diagnosis) < _cost_of(best[0]):
            best = (diagnosis, compared)
    if best is None:
        raise ValueError("there must be a way to read the stages")
    return best


def _cost_of(diagnosis: Diagnosis) -> tuple[int, int]:
    """Return the cost of a diagnosis: fewer unnamed stages are better, then fewer findings."""
    return len(diagnosis.unnamed), len(diagnosis.findings)


def _of_problem(stages: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the stages that the diagnosis knows: not gradients, nor unknown names.

    Raises:
        ValueError: if there is none.
    """
    known: dict[str, np.ndarray] = {}
    for name, x in stages.items():
        stage = stage_named(name)
        if stage.kind in STAGES and not stage.is_gradient:
            known[name] = x
    if not known:
        raise InputError("observed", "have stages of the problem", str(sorted(stages)))
    return known


# ---- Facts about all stages ---------------------------------------------------------------------


def _measured_as_a_whole(diagnosis: Diagnosis, compared: WholeStages) -> Diagnosis:
    """Return a diagnosis with the errors of whole stages, as a comparison reports them.

    The search measures samples, and each stage from the observed stages before it.
    """
    if not diagnosis.is_wrong:
        return diagnosis
    findings = [
        replace(finding, ratio_before=_ratio_of(compared, finding.stage, finding.ratio_before))
        for finding in diagnosis.findings
    ]
    ratio = _ratio_of(compared, diagnosis.stage, diagnosis.ratio)
    return replace(diagnosis, ratio=ratio, findings=findings)


def _ratio_of(compared: WholeStages, stage: str, ratio: float) -> float:
    """Return the error of a whole stage over its budget; the given ratio if it is not over it."""
    if stage not in compared or compared[stage].passed:
        return ratio
    return compared[stage].ratio


def _other_dtypes(stages: Mapping[str, np.ndarray], problem: Problem) -> dict[str, str]:
    """Return the dtypes of stages that are not the problem's; scores and attention weights may have
    a wider one.
    """
    others: dict[str, str] = {}
    for name, x in stages.items():
        stage = stage_named(name)
        if stage.kind not in STAGES or stage.is_exact or not is_floating(x.dtype):
            continue
        may_be_wide = stage.quantity in ("scores", "attn_weights")
        is_wide = x.dtype in (np.float32, np.float64)
        if x.dtype.name != problem.dtype and not (may_be_wide and is_wide):
            others[name] = x.dtype.name
    return others


def _hidden_bugs(
    stages: Mapping[str, np.ndarray], reference: Reference, arithmetic: str
) -> tuple[str, ...]:
    """Return the names of known bugs that the compared stages would not show in their dtype."""
    if all(stage_named(name).is_gradient for name in stages):
        return ()
    problem, remembered = reference.problem, remembered_of(reference)
    if not is_large(problem):
        base = remembering(remembered)
        right = Trial(problem, {}, arithmetic, base=base, reference=reference)
        return hidden_bugs(right, list(stages))
    if problem.case.is_cached:
        return ()
    compared = WholeStages({}, reference, arithmetic)
    part = Whole(problem, _of_problem(stages), compared, remembered).of_rows(0, ROWS, None)
    right = Trial(part.problem, {}, arithmetic, base=remembering(part.remembered))
    return hidden_bugs(right, list(part.observed))


# ---- Functions -----------------------------------------------------------------------------------


def observe(
    function: Callable[..., Any], problem: Problem, framework: str
) -> dict[str, np.ndarray]:
    """Return the stages that a function computes for a problem.

    Args:
        function: called with the query (B, T, d_in) and, for cross-attention, the key (B, S, d_kv),
            or with `shared_kv` the k and v of another layer, (B, K, S, H). It has its own weights
            and masks, and returns the output, or (output, attention weights), or stages by name.
            A parameter `cotangent` receives the gradient of the output, (B, T, E), for the
            gradients of sum(output * cotangent) that it returns: `grad.query`,
            `grad.q_proj.weight`. If tokens arrive in chunks, it is called once for each chunk
            (B, chunk, d_in), with the cache that its previous call returned, see
            `parameter_of_cache`.
        problem: the case and its inputs.
        framework: framework of the function's arrays, `torch`, `jax` or `ttnn`.

    Raises:
        ValueError: if it returns anything else, or raises an exception.

    Example:
        >>> from dataclasses import replace
        >>> import mha_torch
        >>> problem = parity.make_problem("causal", "float32")
        >>> wrong = replace(problem.spec, scale=1.0)
        >>> layer = parity.load_into(mha_torch.MultiHeadAttention(wrong), problem.weights, wrong)
        >>> query = parity.to_torch(problem.inputs["query"])
        >>> stages = parity.observe(lambda x: layer(x, is_causal=True), problem, "torch")
        >>> stages["output"].shape
        (2, 5, 32)
    """
    backend = load_backend(FRAMEWORKS[framework])
    with backend.lock(problem.dtype):
        if problem.case.is_cached:
            stages = _stages_of_calls(function, problem, backend.from_numpy)
        else:
            names = [name for name in ("query", "key", "k", "v") if name in problem.inputs]
            arrays = [backend.from_numpy(problem.inputs[name]) for name in names]
            keywords = {}
            name_of_cotangent = parameter_of_cotangent(function)
            if name_of_cotangent:
                keywords[name_of_cotangent] = backend.from_numpy(problem.inputs["cotangent"])
            result = _called(function, arrays, keywords)
            stages = stages_of("the function's result", _stages_in(result), "output")
        stages = {name: np.array(x) for name, x in stages.items()}
    check_names("the function's result", [*stages], problem)
    return stages


def parameter_of_cache(function: Callable[..., Any]) -> str:
    """Return the parameter of a function that receives its cache: the first whose name contains
    `cache` or `past`.

    It is None in the first call, and then what the previous call returned as its second value. A
    function without such a parameter, for which this is empty, has its cache in itself.
    """
    return _parameter_with(function, ("cache", "past"))


def parameter_of_cotangent(function: Callable[..., Any]) -> str:
    """Return the parameter of a function that receives the gradient of its output: the first whose
    name contains `cotangent` or `grad_out`. A function without such a parameter, for which this is
    empty, computes no gradients.
    """
    return _parameter_with(function, ("cotangent", "grad_out"))


def _parameter_with(function: Callable[..., Any], parts: Sequence[str]) -> str:
    """Return the first parameter of a function whose name has one of some parts; else ""."""
    # The signature of a torch module's call is the same for any module.
    call = getattr(function, "forward", function)
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return ""
    for name in parameters:
        if any(part in name for part in parts):
            return name
    return ""


def _stages_of_calls(
    function: Callable[..., Any], problem: Problem, from_numpy: Callable[[np.ndarray], Any]
) -> dict[str, np.ndarray]:
    """Return the stages of all calls of a function that appends tokens to a cache."""
    if problem.spec.shared_kv:
        raise InputError("chunks", "be empty for a layer that shares keys and values")
    name_of_cache = parameter_of_cache(function)
    cache = None
    stages: dict[str, np.ndarray] = {}
    for step in range(len(problem.case.chunks)):
        keywords = {name_of_cache: cache} if name_of_cache else {}
        result = _called(function, [from_numpy(problem.step_input(step))], keywords)
        if name_of_cache:
            if not isinstance(result, tuple) or len(result) != 2:
                rule = f"return its result and its cache, because it receives {name_of_cache}"
                raise InputError("the function", rule, type(result).__name__)
            result, cache = result
        of_call = stages_of("the function's result", _stages_in(result), "output")
        for name, x in of_call.items():
            # A copy, because the function may write into its arrays again.
            stages[f"step{step}.{name}"] = np.array(x)
    return stages


def _called(function: Callable[..., Any], inputs: list[Any], keywords: Mapping[str, Any]) -> Any:
    """Return the result of a function of the user.

    Raises:
        ValueError: if it raises an exception.
    """
    try:
        with user_code("the function"):
            result = function(*inputs, **keywords)
    except EndedProgramError as error:  # whose text has the line
        raise InputError("the function", "take the inputs", str(error)) from error
    except Exception as error:  # any exception of the function
        raised = f"{type(error).__name__}: {error}, {line_of(error)}"
        raise InputError("the function", "take the inputs", raised) from error
    if inspect.iscoroutine(result):
        result.close()  # Python would warn that nothing awaited it
        raise InputError("the function", "return its result", "a coroutine of an async function")
    return result


def _stages_in(result: Any) -> Mapping[str, Any]:
    """Return what a function returned as arrays by stage.

    Raises:
        ValueError: if it is anything else.
    """
    stages = result
    if isinstance(result, tuple) and len(result) == 2:
        output, attn_weights = result
        stages = {"output": output}
        if attn_weights is not None:
            stages["attn_weights"] = attn_weights
    elif not isinstance(result, Mapping):
        stages = {"output": result}
    if stages and all(_is_array(x) for x in stages.values()):
        return stages
    types = ", ".join(f"{name}: {type(x).__name__}" for name, x in stages.items())
    raise InputError(
        "the function",
        "return an array, (output, attention weights), or arrays by stage",
        types or "nothing",
    )


def _is_array(x: Any) -> bool:
    return hasattr(x, "__array__") or type(x).__module__.partition(".")[0] == "ttnn"
