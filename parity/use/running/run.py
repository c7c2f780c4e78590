"""Cases x backends -> report: the stages of each backend are compared with the reference."""

from __future__ import annotations

import json
import math
import os
import shlex
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
from parity.measure.core.cases import CASES, find_case
from parity.measure.core.compare import Comparison, first_difference
from parity.measure.core.problem import make_problem
from parity.measure.core.stages import stage_named
from parity.measure.core.trace import Reference, Trace, compare_trace
from parity.measure.core.weights import Weights, weight_shapes
from parity.measure.text import counted, printable, some_of
from parity.port.conversion.not_compared import NotCompared
from parity.use.running.elsewhere import Elsewhere
from parity.use.running.jobs import by_processes
from parity.use.running.report import Report, SkippedCase
from parity.use.running.traces import load_traces, save_trace

OnCompared = Callable[[Trace, Reference, list[Comparison]], None]
"""Called with each compared trace, its reference and its comparisons, while the arrays exist."""


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
    on_compared: OnCompared = lambda trace, reference, comparisons: None,
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
        join: folders of saved traces, with subfolders; traces of the same cases and dtypes are also
            compared. Or an `Elsewhere`, whose run is awaited.
        jobs: number of processes that run cases; 1 is this process.
        device: device of torch, `cpu`, `cuda` or `cuda:1`; JAX uses its default device.
        on_case: called with the case, the dtype and the backend before each case runs, or before
            its comparison if another process ran it.
        on_compared: called with each compared trace, its reference and the comparisons.

    Returns:
        The report. A backend that raises an error in a case fails that case.

    Raises:
        ModuleNotFoundError: if a named backend can neither run here nor is joined.
        OSError: if a trace cannot be read or saved.
        ValueError: if a backend or dtype does not exist, there is nothing to run, also on a
            single named backend, a file to join is not a trace of a known case, or `jobs` does not
            fit.

    Example:
        >>> report = parity.run_cases([parity.CASES["textbook"]], ["torch"])
        >>> report.status
        0
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
        compared_traces = _compare_all(
            _record_all(plan, joined, attempts, traces, on_case), on_compared
        )
    pythons = {
        source.folder.name: source.python for source in join if isinstance(source, Elsewhere)
    }
    has_own_arrays = weights is not None or bool(received)
    report = _report_of(compared_traces, joined, pythons, has_own_arrays=has_own_arrays)
    if with_gradients:
        report.left_out.extend(_without_gradients(cases))
    where = dict(plan.where)
    if joined:
        where["joined"] = {trace.folder: trace.environment for trace in joined}
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
        num_calls = len(self.case.chunks) + 1
        return num_calls * sum(map(math.prod, weight_shapes(self.case.spec).values()))


@dataclass(frozen=True)
class _RunPlan:
    """Checked plan of a run.

    Attributes:
        tasks: its cases.
        here: the backends that run here.
        missing: by name, the reason why another backend does not.
        are_named: the backends were named: then none may be skipped.
        where: environment of the run.
    """

    tasks: list[_Task]
    here: list[str]
    missing: dict[str, str]
    are_named: bool
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
    requested = BACKENDS if backends is None else backends
    missing: dict[str, str] = {}
    here = []
    for name in requested:
        reason = why_missing(name)
        if reason:
            missing[name] = reason
        else:
            here.append(name)
    if backends and missing and not are_joined:
        raise ModuleNotFoundError("; ".join(missing.values()))
    chosen = []
    for case in cases:
        for dtype in [case.dtype] if case.dtype else dtypes:
            chosen.append((case, dtype))
    if not chosen or not dtypes or not (here or are_joined):
        counts = f"{len(cases)} cases on {here} in {list(dtypes)}"
        raise InputError("there", "be something to run", counts)
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
    with_own_device = [name for name in backends if BACKENDS[name].has_own_device]
    if jobs > 1 and with_own_device:
        names = ", ".join(with_own_device)
        raise InputError("jobs", f"be 1 with {names}, whose device is one process's", jobs=jobs)
    if device != "cpu" and "torch" not in backends:
        raise InputError("device", "be cpu without the backend torch", device=device)


def _without_gradients(cases: Iterable[Case]) -> Iterator[NotCompared]:
    """Yield the cases whose gradients nothing could compare, and why."""
    with_cache = []
    with_nan = []
    for case in cases:
        if not case.has_gradients:
            (with_cache if case.is_cached else with_nan).append(case.name)
    if with_cache:
        yield NotCompared("gradients", "with a cache", with_cache, is_open=False)
    if with_nan:
        reason = "a visible NaN makes all of them NaN"
        yield NotCompared("gradients", reason, with_nan, is_open=False)


def _why_skipped(backend: str, case: Case, dtype: str) -> str | None:
    """Return why a backend cannot run a case in a dtype, or None."""
    if case.cache_quantization is not None:
        return "no implementation has a quantized cache"
    if case.cache_slots is not None:
        return "no implementation has a cache with other slots"
    if case.is_cached and case.mask is not None:
        return "no implementation accepts a mask with its cache"
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
        if jobs > 1 and plan.here:
            # The processes begin before the wait for traces that are still in the making.
            results = by_processes(_attempts_of, plan.tasks, jobs, cost=_Task.cost)
            attempts = stack.enter_context(closing(results))
        joined = load_traces(_ready(join), plan.here)
        skipped = plan.skipped(joined)
        if plan.are_named and skipped:
            raise ModuleNotFoundError("; ".join(skipped.values()))
        yield joined, attempts


def _ready(
    join: Sequence[str | os.PathLike[str] | Elsewhere],
) -> Iterator[str | os.PathLike[str]]:
    """Yield the folders of traces, after waiting for those that another Python writes."""
    for source in join:
        yield source.wait() if isinstance(source, Elsewhere) else source


def _attempts_of(task: _Task) -> list[Trace]:
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
    # Without other processes, `attempts` repeats None forever.
    for task, finished in zip(plan.tasks, attempts, strict=False):
        case, dtype, expected = task.case, task.dtype, task.expected()
        traces = iter(task.attempts(expected) if finished is None else finished)
        for name in plan.here:
            # Before the trace is made, if this process makes it.
            on_case(case.name, dtype, name)
            trace = next(traces)
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
    settings = where["backends"][backend]
    if numerics:
        settings = {**settings, "numerics": numerics}
    return {**where, "backends": {**where["backends"], backend: settings}}


# ---- Comparison ----------------------------------------------------------------------------------

DIAGNOSED = 5
"""Number of failed cases that are diagnosed: a diagnosis takes seconds, and most failures of a run
have one cause.
"""


@dataclass(frozen=True)
class _ComparedTrace:
    """A trace without its arrays, with its comparisons and perhaps a diagnosis."""

    trace: Trace
    comparisons: list[Comparison]
    diagnosis: Diagnosis | None
    lacks_gradients: bool

    @property
    def key(self) -> tuple[str, str, str]:
        """The case, the dtype, and the name of the backend in reports."""
        return self.trace.problem.case.name, self.trace.problem.dtype, self.trace.title


def _compare_all(
    traces: Iterable[tuple[Trace, Reference]], on_compared: OnCompared
) -> list[_ComparedTrace]:
    """Compare each trace with its reference, and diagnose the first that differ."""
    compared_traces: list[_ComparedTrace] = []
    num_diagnosed = 0
    for trace, expected in traces:
        comparisons = []
        if not trace.skipped:
            comparisons = compare_trace(trace, expected)
            on_compared(trace, expected, comparisons)
        diagnosis = None
        is_wrong = not all(comparison.passed for comparison in comparisons)
        if is_wrong and trace.accumulated and num_diagnosed < DIAGNOSED:
            diagnosis = diagnose_trace(trace)
            if diagnosis.is_wrong:
                num_diagnosed += 1
            else:
                # Only a gradient differs, which no known bug explains.
                diagnosis = None
        lacks_gradients = expected.with_gradients and not (trace.with_gradients or trace.error)
        # All traces of a run would not fit into memory: their arrays are dropped.
        problem = replace(trace.problem, weights={}, inputs={})
        without_arrays = replace(trace, problem=problem, accumulated={}, local={})
        compared_traces.append(
            _ComparedTrace(without_arrays, comparisons, diagnosis, lacks_gradients)
        )
    return compared_traces


# ---- Report --------------------------------------------------------------------------------------


def _report_of(
    compared_traces: Sequence[_ComparedTrace],
    joined: Iterable[Trace],
    pythons: Mapping[str, str] | None = None,
    *,
    has_own_arrays: bool = False,
) -> Report:
    """Return the report, without the environment.

    All traces that were read count as expected, even if they are not compared.

    Args:
        compared_traces: traces with their comparisons.
        joined: the traces that were read.
        pythons: the interpreters that wrote traces for this run alone, by the folder of these.
        has_own_arrays: the cases have weights or inputs that no command can pass.
    """
    skipped = []
    gradients_skipped = []
    comparisons = []
    diagnoses = {}
    commands = {}
    computed = []
    for result in compared_traces:
        trace = result.trace
        if trace.skipped:
            skipped.append(SkippedCase(*result.key, trace.skipped))
            continue
        computed.append(trace)
        comparisons += result.comparisons
        command = command_for(trace, result.comparisons, pythons or {})
        if command and not has_own_arrays:
            commands[result.key] = command
        if result.diagnosis is not None:
            diagnoses[result.key] = result.diagnosis
        if result.lacks_gradients:
            reason = f"{trace.backend} has no gradients"
            if trace.folder:
                reason = "these traces have no gradients"
            gradients_skipped.append(SkippedCase(*result.key, reason, "gradients"))
    skipped += gradients_skipped
    if not comparisons:
        raise InputError(
            "there", "be something to compare", f"{len(skipped)} skipped cases and no other"
        )
    missing = _missing(compared_traces, joined)
    warnings = [*_warnings_of_locks(compared_traces)]
    warnings += _warnings_of_missing(missing)
    warnings += _warnings_of_values(computed)
    return Report(comparisons, {}, {}, warnings, skipped, diagnoses, missing, commands=commands)


def command_for(trace: Trace, comparisons: Iterable[Comparison], pythons: Mapping[str, str]) -> str:
    """Return the command that compares a trace again; empty if it is not of a named case.

    Args:
        trace: the trace, from a file or of this run.
        comparisons: its stages, which show whether gradients are necessary.
        pythons: interpreters that wrote traces for this run alone, by the folder of the traces.
    """
    if trace.path and trace.folder not in pythons:
        return shlex.join(["mha-parity", "compare", trace.path])
    case = trace.problem.case
    if find_case(case.name) != case:
        return ""
    words = ["mha-parity", "run", "--backends", trace.backend]
    if trace.folder in pythons:
        words += ["--python", f"{trace.backend}={pythons[trace.folder]}"]
    words += ["--cases", case.name, "--dtypes", trace.problem.dtype]
    settings = trace.environment.get("backends", {}).get(trace.backend, {})
    device = str(settings.get("device", "cpu"))
    if trace.backend == "torch" and device != "cpu":
        words += ["--device", device]
    difference = first_difference(comparisons)
    if difference is not None and stage_named(difference.stage).is_gradient:
        words.append("--grad")
    return shlex.join(words)


def _warnings_of_missing(missing: Sequence[SkippedCase]) -> Iterator[str]:
    """Yield a warning for each backend that lacks traces."""
    cases_by_backend: dict[str, list[str]] = {}
    for case in missing:
        cases_by_backend.setdefault(case.backend, []).append(f"{case.case} in {case.dtype}")
    for backend, cases in cases_by_backend.items():
        yield f"{backend} has no trace of {some_of(cases)}"


def _warnings_of_locks(compared_traces: Iterable[_ComparedTrace]) -> Iterator[str]:
    """Yield warnings of backends whose traces were made under different numerics locks."""
    locks: dict[str, dict[str, Any]] = {}
    for result in compared_traces:
        trace = result.trace
        locks.setdefault(trace.backend, {})[trace.folder or "here"] = trace.numerics
    for backend, locks_by_folder in locks.items():
        # Dictionaries cannot be in a set, their JSON can.
        different = {json.dumps(lock, sort_keys=True) for lock in locks_by_folder.values()}
        if len(different) > 1:
            text = f"traces of {backend} were made under different numerics locks"
            yield f"{text}: {locks_by_folder}"


def _missing(
    compared_traces: Iterable[_ComparedTrace], joined: Iterable[Trace]
) -> list[SkippedCase]:
    """List the traces that a backend lacks though another has them."""
    cases_by_backend: dict[str, set[tuple[str, str]]] = {}
    for trace in joined:
        cases_by_backend[trace.title] = set()
    for result in compared_traces:
        case, dtype, title = result.key
        cases_by_backend.setdefault(title, set()).add((case, dtype))
    all_cases = set().union(*cases_by_backend.values())
    missing = []
    for backend in sorted(cases_by_backend):
        for case, dtype in sorted(all_cases - cases_by_backend[backend]):
            reason = f"{backend} has no trace of {case} in {dtype}"
            missing.append(SkippedCase(case, dtype, backend, reason))
    return missing


def _warnings_of_values(traces: Iterable[Trace]) -> Iterator[str]:
    """Yield warnings about values that were not computed by the hardware of their backend."""
    counts: Counter[tuple[str, str]] = Counter()
    unlike_recorded: dict[str, list[str]] = {}
    for trace in traces:
        numerics = trace.numerics
        values = numerics.get("values", "device")
        if values != "device":
            counts[trace.title, printable(str(values))] += 1
        difference = numerics.get("not_as_recorded")
        if difference:
            case = f"{trace.problem.case.name} in {trace.problem.dtype}"
            text = f"{case}: {printable(str(difference))}"
            unlike_recorded.setdefault(trace.title, []).append(text)
    for (backend, values), count in counts.items():
        cases = counted(count, "case")
        yield f"{backend} ran without its hardware: in {cases} its values come from {values}"
    for backend, cases in unlike_recorded.items():
        yield (
            f"{backend} ran a different program than the recorded one; golden functions decide: "
            f"{some_of(cases, 3)}"
        )


def compare_traces(
    folders: Iterable[str | os.PathLike[str]],
    *,
    on_compared: OnCompared = lambda trace, reference, comparisons: None,
) -> Report:
    """Compare saved traces, from any machines and environments, with the reference computed here.

    Args:
        folders: folders of traces, with subfolders, or single trace files.
        on_compared: called with each compared trace, its reference and the comparisons.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if there is no trace, or a file is not a trace of a known case.
    """
    traces = load_traces(folders)
    # Cases are in the order of `CASES`, and random ones come last.
    order = {name: index for index, name in enumerate(CASES)}
    traces_by_case: dict[tuple[str, str], list[Trace]] = {}
    for trace in sorted(traces, key=lambda trace: order.get(trace.problem.case.name, len(order))):
        key = (trace.problem.case.name, trace.problem.dtype)
        traces_by_case.setdefault(key, []).append(trace)
    compared_traces = _compare_all(_with_references(traces_by_case.values()), on_compared)
    report = _report_of(compared_traces, traces)
    environments = {trace.folder: trace.environment for trace in traces}
    return replace(report, environment=environments)


def _with_references(groups: Iterable[list[Trace]]) -> Iterator[tuple[Trace, Reference]]:
    """Yield each trace with the reference that the traces of its case share."""
    for traces in groups:
        with_gradients = any(trace.with_gradients for trace in traces)
        expected = Reference(traces[0].problem, with_gradients)
        for trace in traces:
            yield trace, expected
