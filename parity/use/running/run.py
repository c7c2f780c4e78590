"""Cases x backends -> report: record the stages of a backend as a trace, and compare it with the
reference.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from mha_spec import InputError
from parity.explain.diagnosis.diagnose import Diagnosis, diagnose_trace
from parity.measure.backends import BACKENDS, load_backend, why_missing
from parity.measure.backends.numerics import environment, on_device
from parity.measure.backends.record import record
from parity.measure.core.case import DTYPES, Case
from parity.measure.core.cases import CASES
from parity.measure.core.compare import Comparison
from parity.measure.core.problem import make_problem
from parity.measure.core.trace import Reference, Trace, judge
from parity.measure.core.weights import Weights, weight_shapes
from parity.measure.text import printable, some_of
from parity.port.conversion.not_compared import NotCompared
from parity.use.running.elsewhere import Elsewhere
from parity.use.running.jobs import by_processes
from parity.use.running.report import Report, SkippedCase
from parity.use.running.traces import load_traces, save_trace

OnJudged = Callable[[Trace, Reference, list[Comparison]], None]
"""Called with each compared trace, its reference and the comparisons, before the arrays are
freed.
"""


def run_cases(
    cases: Iterable[Case] | None = None,
    backends: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("float32",),
    *,
    with_gradients: bool = False,
    weights: Weights | None = None,
    received: Mapping[str, Mapping[str, np.ndarray]] | None = None,
    traces: str | os.PathLike[str] | None = None,
    join: Sequence[str | os.PathLike[str] | Elsewhere] = (),
    jobs: int = 1,
    device: str = "cpu",
    on_case: Callable[[str, str, str], None] = lambda case, dtype, backend: None,
    on_judged: OnJudged = lambda trace, reference, comparisons: None,
) -> Report:
    """Run cases on backends and compare every stage with the float64 reference.

    Args:
        cases: default: all of `CASES`.
        backends: names; by default all that can run here, and the report lists the others as
            skipped.
        dtypes: names of floating-point dtypes.
        with_gradients: also compare the gradients of inputs and weights, for cases without a cache.
        weights: canonical weights for all cases; by default each case has its own.
        received: keys and values of another layer, by case, see `make_problem`.
        traces: folder to save the traces in.
        join: folders of saved traces, with subfolders; those of the same cases and dtypes are also
            compared. Or an `Elsewhere`, which is awaited.
        jobs: number of processes that run cases; 1 is this process.
        device: device of torch, `cpu`, `cuda` or `cuda:1`; JAX uses its default device.
        on_case: called with the case, the dtype and the backend before each case runs, or before
            its comparison if another process ran it.
        on_judged: called with each compared trace, its reference and the comparisons.

    Returns:
        The report. A backend that raises an error in a case fails that case.

    Raises:
        ModuleNotFoundError: if a named backend can neither run here nor is joined.
        OSError: if a trace cannot be read or saved.
        ValueError: if a backend or dtype does not exist, there is nothing to run, also on a
            single named backend, a file to join is not a trace of a known case, or `jobs` does not
            fit.
    """
    cases = list(CASES.values() if cases is None else cases)
    about: dict[str, Any] = {
        "with_gradients": with_gradients,
        "weights": weights,
        "device": device,
    }
    about["received"] = received or {}
    plan = _plan_of(cases, backends, dtypes, are_joined=bool(join), jobs=jobs, **about)
    with on_device(device), _sources(plan, join, jobs) as (joined, attempts):
        judged = _judge_all(_record_all(plan, joined, attempts, traces, on_case), on_judged)
    report = _report_of(judged, joined)
    if with_gradients:
        report.left_out.extend(_without_gradients(cases))
    where = plan.where | (
        {"joined": {trace.folder: trace.environment for trace in joined}} if joined else {}
    )
    return replace(report, skipped=plan.skipped(joined), environment=where)


# ---- Plan ----------------------------------------------------------------------------------------


class _Task(NamedTuple):
    """A case in a dtype, and the backends that run it."""

    case: Case
    dtype: str
    backends: tuple[str, ...]
    weights: Weights | None
    received: Mapping[str, Mapping[str, np.ndarray]]
    with_gradients: bool
    device: str

    def expected(self) -> Reference:
        """Return the reference of the case."""
        problem = make_problem(
            self.case, self.dtype, self.weights, self.received.get(self.case.name)
        )
        return Reference(problem, self.with_gradients and self.case.has_gradients)

    def attempts(self, expected: Reference) -> Iterator[Trace]:
        """Run the case on each backend in turn."""
        return (_attempt(name, expected) for name in self.backends)

    def cost(self) -> float:
        """Return the rough relative cost of the case: its calls times the size of its weights."""
        return (len(self.case.chunks) + 1) * sum(
            map(math.prod, weight_shapes(self.case.spec).values())
        )


@dataclass(frozen=True)
class _RunPlan:
    """Checked plan of a run: its cases, the backends that run here, and by name the reasons why
    others do not.
    """

    tasks: list[_Task]
    here: list[str]
    missing: dict[str, str]
    are_named: bool  # named backends must not be skipped
    where: dict[str, Any]

    def skipped(self, joined: Iterable[Trace]) -> dict[str, str]:
        """Return the reasons why backends neither run here nor are joined, by name."""
        titles = {trace.backend for trace in joined}
        return {name: reason for name, reason in self.missing.items() if name not in titles}


def _plan_of(
    cases: Sequence[Case],
    backends: Sequence[str] | None,
    dtypes: Sequence[str],
    *,
    are_joined: bool,
    jobs: int,
    weights: Weights | None,
    device: str,
    **about: Any,
) -> _RunPlan:
    """Check the arguments of `run_cases`, and return the plan."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise InputError("dtype", f"be one of {', '.join(DTYPES)}", dtype=dtype)
    if are_joined and weights is not None:
        raise InputError("traces to join", "be of the cases' own weights", "weights")
    asked = BACKENDS if backends is None else backends
    missing = {name: reason for name in asked if (reason := why_missing(name))}
    here = [name for name in asked if name not in missing]
    if backends and missing and not are_joined:
        raise ModuleNotFoundError("; ".join(missing.values()))
    chosen = [
        (case, dtype) for case in cases for dtype in ((case.dtype,) if case.dtype else dtypes)
    ]
    if not (chosen and dtypes and (here or are_joined)):
        raise InputError(
            "there", "be something to run", f"{len(cases)} cases on {here} in {list(dtypes)}"
        )
    for name in here if backends else ():
        reasons = dict.fromkeys(_why_skipped(name, case, dtype) for case, dtype in chosen)
        if None not in reasons:
            raise InputError(name, "be able to run one of the cases", some_of(map(str, reasons)))
    _check_device(here, jobs, device)
    more: dict[str, Any] = {**about, "weights": weights, "device": device}
    tasks = [_Task(case, dtype, tuple(here), **more) for case, dtype in chosen]
    with on_device(device):
        return _RunPlan(tasks, here, missing, bool(backends), environment(here))


def _check_device(backends: Sequence[str], jobs: int, device: str) -> None:
    """Reject jobs and a device of torch that do not fit the backends."""
    if jobs < 1:
        raise InputError("jobs", "be at least 1", jobs=jobs)
    if jobs > 1 and (alone := [name for name in backends if BACKENDS[name].has_own_device]):
        raise InputError(
            "jobs", f"be 1 with {', '.join(alone)}, whose device is one process's", jobs=jobs
        )
    if device != "cpu" and "torch" not in backends:
        raise InputError("device", "be cpu without the backend torch", device=device)


def _without_gradients(cases: Iterable[Case]) -> Iterator[NotCompared]:
    """Yield the cases whose gradients nothing could compare, and why."""
    without = [case for case in cases if not case.has_gradients]
    for reason, names in {
        "with a cache": [case.name for case in without if case.is_cached],
        "a visible NaN makes all of them NaN": [
            case.name for case in without if not case.is_cached
        ],
    }.items():
        if names:
            yield NotCompared("gradients", reason, names, is_open=False)


def _why_skipped(backend: str, case: Case, dtype: str) -> str | None:
    """Return why a backend cannot run a case in a dtype, or None."""
    return load_backend(backend).why_skipped(case, dtype)


# ---- Sources: here, other processes, joined traces -----------------------------------------------


@contextmanager
def _sources(
    plan: _RunPlan, join: Sequence[str | os.PathLike[str] | Elsewhere], jobs: int
) -> Iterator[tuple[list[Trace], Iterable[Iterable[Trace] | None]]]:
    """Yield the joined traces, and for each task the traces of other processes, or None if it runs
    here.
    """
    with ExitStack() as stack:
        attempts = repeat(None)
        if jobs > 1 and plan.here:  # begun first, because traces may still be in the making
            begun = by_processes(_attempts, plan.tasks, jobs, cost=_Task.cost)
            attempts = stack.enter_context(closing(begun))
        folders = (folder.wait() if isinstance(folder, Elsewhere) else folder for folder in join)
        joined = load_traces(folders, plan.here)
        if plan.are_named and (skipped := plan.skipped(joined)):
            raise ModuleNotFoundError("; ".join(skipped.values()))
        yield joined, attempts


def _attempts(task: _Task) -> list[Trace]:
    """Return the traces of each backend, from another process."""
    with on_device(task.device):
        return list(task.attempts(task.expected()))


def _record_all(
    plan: _RunPlan,
    joined: Sequence[Trace],
    attempts: Iterable[Iterable[Trace] | None],
    folder: str | os.PathLike[str] | None,
    on_case: Callable[[str, str, str], None],
) -> Iterator[tuple[Trace, Reference]]:
    """Yield each trace with its reference. Those made here, which are saved in the folder, precede
    joined ones.
    """
    for task, found in zip(plan.tasks, attempts, strict=False):
        case, dtype, expected = task.case, task.dtype, task.expected()
        made = iter(task.attempts(expected) if found is None else found)
        for name in plan.here:
            on_case(case.name, dtype, name)
            trace = next(made)
            trace = replace(trace, environment=_with_numerics(plan.where, name, trace.numerics))
            if folder is not None:
                save_trace(folder, trace)
            yield trace, expected
        for trace in joined:
            if (trace.problem.case, trace.problem.dtype) == (case, dtype):
                yield trace, expected


def _attempt(backend: str, reference: Reference) -> Trace:
    """Return a trace; it is empty if the backend does not support the case or raises an error."""
    nothing = Trace(reference.problem, backend, {}, {})
    if reason := _why_skipped(backend, reference.problem.case, reference.problem.dtype):
        return replace(nothing, skipped=reason)
    try:
        return record(backend, reference)
    except Exception as error:
        return replace(nothing, error=f"{type(error).__name__}: {error}")


def _with_numerics(where: dict[str, Any], backend: str, numerics: dict[str, Any]) -> dict[str, Any]:
    """Return the environment of a case, with its numerics lock if it ran."""
    known = where["backends"][backend]
    backends = {**where["backends"], backend: {**known, "numerics": numerics or known["numerics"]}}
    return {**where, "backends": backends}


# ---- Judged --------------------------------------------------------------------------------------

DIAGNOSED = 5  # cases, because most failures of a run have one cause


@dataclass(frozen=True)
class _Judged:
    """A trace without its arrays, with its comparisons and perhaps a diagnosis."""

    trace: Trace
    comparisons: list[Comparison]
    diagnosis: Diagnosis | None
    lacks_gradients: bool

    @property
    def place(self) -> tuple[str, str, str]:
        """The case, the dtype, and the name of the backend in reports."""
        return self.trace.problem.case.name, self.trace.problem.dtype, self.trace.title


def _judge_all(traces: Iterable[tuple[Trace, Reference]], on_judged: OnJudged) -> list[_Judged]:
    """Compare each trace with its reference, and diagnose the first that differ."""
    found: list[_Judged] = []
    for trace, expected in traces:
        diagnosis, comparisons = None, [] if trace.skipped else judge(trace, expected)
        if not trace.skipped:
            on_judged(trace, expected, comparisons)
        is_wrong = not all(comparison.passed for comparison in comparisons)
        if (
            is_wrong
            and trace.accumulated
            and sum(each.diagnosis is not None for each in found) < DIAGNOSED
        ):
            diagnosis = diagnose_trace(trace)
            if not diagnosis.is_wrong:  # only a gradient differs, which no known bug explains
                diagnosis = None
        lacks_gradients = expected.with_gradients and not (trace.with_gradients or trace.error)
        problem = replace(trace.problem, weights={}, inputs={})
        bare = replace(trace, problem=problem, accumulated={}, local={})
        found.append(_Judged(bare, comparisons, diagnosis, lacks_gradients))
    return found


# ---- Report --------------------------------------------------------------------------------------


def _report_of(judged: Sequence[_Judged], joined: Iterable[Trace]) -> Report:
    """Return the report, without the environment.

    All traces that were read count as expected, even if they are not compared.
    """
    skipped = [
        SkippedCase(*each.place, each.trace.skipped) for each in judged if each.trace.skipped
    ]
    ran = [each for each in judged if not each.trace.skipped]
    for each in ran:
        if each.lacks_gradients:
            reason = f"{each.trace.backend} has no gradients"
            if each.trace.folder:
                reason = "these traces have no gradients"
            skipped.append(SkippedCase(*each.place, reason, "gradients"))
    comparisons = [comparison for each in ran for comparison in each.comparisons]
    if not comparisons:
        raise InputError(
            "there", "be something to compare", f"{len(skipped)} skipped cases and no other"
        )
    missing = _missing(judged, joined)
    warnings = [*_different_locks(each.trace for each in judged)]
    for backend in dict.fromkeys(each.backend for each in missing):
        lacking = (f"{each.case} in {each.dtype}" for each in missing if each.backend == backend)
        warnings.append(f"{backend} has no trace of {some_of(lacking)}")
    warnings.extend(_told_of_values(each.trace for each in ran))
    diagnoses = {each.place: each.diagnosis for each in ran if each.diagnosis is not None}
    return Report(comparisons, {}, {}, warnings, skipped, diagnoses, missing)


def _different_locks(traces: Iterable[Trace]) -> Iterator[str]:
    """Yield warnings of backends whose traces were made under different numerics locks."""
    locks: dict[str, dict[str, Any]] = {}
    for trace in traces:
        locks.setdefault(trace.backend, {})[trace.folder or "here"] = trace.numerics
    for backend, held in locks.items():
        if len({json.dumps(settings, sort_keys=True) for settings in held.values()}) > 1:
            yield f"traces of {backend} were made under different numerics locks: {held}"


def _missing(judged: Iterable[_Judged], joined: Iterable[Trace]) -> list[SkippedCase]:
    """List the traces that a backend lacks though another has them."""
    had: dict[str, set[tuple[str, str]]] = {trace.title: set() for trace in joined}
    for each in judged:
        case, dtype, title = each.place
        had.setdefault(title, set()).add((case, dtype))
    every = set().union(*had.values())
    return [
        SkippedCase(case, dtype, backend, f"{backend} has no trace of {case} in {dtype}")
        for backend in sorted(had)
        for case, dtype in sorted(every - had[backend])
    ]


def _told_of_values(traces: Iterable[Trace]) -> Iterator[str]:
    """Yield warnings about values that were not computed by the hardware of their backend."""
    counts: Counter[tuple[str, str]] = Counter()
    others: dict[str, list[str]] = {}
    for trace in traces:
        backend, numerics = trace.title, trace.numerics
        if (values := numerics.get("values", "device")) != "device":
            counts[backend, printable(str(values))] += 1
        if differs := numerics.get("not_as_recorded"):
            others.setdefault(backend, []).append(
                f"{trace.problem.case.name} in {trace.problem.dtype}: {printable(str(differs))}"
            )
    for (backend, values), count in counts.items():
        cases = "1 case" if count == 1 else f"{count} cases"
        yield f"{backend} ran without its hardware: in {cases} its values come from {values}"
    for backend, told in others.items():
        yield (
            f"{backend} ran another program than the recorded one; golden functions decide: "
            f"{some_of(told, 3)}"
        )


def compare_traces(
    folders: Iterable[str | os.PathLike[str]],
    *,
    on_judged: OnJudged = lambda trace, reference, comparisons: None,
) -> Report:
    """Compare saved traces, from any number of machines and environments, with the reference
    computed here.

    Args:
        folders: folders of traces, with subfolders, or single trace files.
        on_judged: called with each compared trace, its reference and the comparisons.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if there is no trace, or a file is not a trace of a known case.
    """
    traces = load_traces(folders)
    order = {name: index for index, name in enumerate(CASES)}
    of_cases: dict[tuple[str, str], list[Trace]] = {}
    for trace in sorted(traces, key=lambda trace: order.get(trace.problem.case.name, len(order))):
        of_cases.setdefault((trace.problem.case.name, trace.problem.dtype), []).append(trace)

    def read() -> Iterator[tuple[Trace, Reference]]:
        for of_case in of_cases.values():
            expected = Reference(of_case[0].problem, any(trace.with_gradients for trace in of_case))
            for trace in of_case:
                yield trace, expected

    report = _report_of(_judge_all(read(), on_judged), traces)
    return replace(report, environment={trace.folder: trace.environment for trace in traces})
