"""Cases x backends -> results: record what a backend computes, as a trace, and judge it against the reference."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.backends import NEEDS, driver, load_backend, why_missing
from parity.core import reference
from parity.core.compare import SAME_PRECISION, Comparison, compare, failure, first_difference, kept_dtype
from parity.core.numerics import environment
from parity.core.problem import Problem, make_problem
from parity.core.reference import Step
from parity.core.spec import BACKENDS_OF, CASES, DTYPES, Case, find_case, stage_path
from parity.core.weights import FORMAT, Weights, load_tensors, save_tensors

if TYPE_CHECKING:
    from parity.diagnosis.diagnose import Diagnosis


@dataclass(frozen=True)
class Trace:
    """What one backend computed for one problem.

    Attributes:
        problem: what it was given.
        backend: its name.
        accumulated: every stage by name, computed from the backend's own stages before it.
        local: every stage by name, computed from the reference's stages before it.
        environment: where it was computed, with the numerics lock.
        with_gradients: whether it has gradients, for which there are no local ones.
        skipped: why the backend cannot run this case in this dtype; it then has no stages.
        error: what the backend raised; it then has no stages either.
        folder: where it was read from; empty if it was made here.
    """

    problem: Problem
    backend: str
    accumulated: dict[str, np.ndarray]
    local: dict[str, np.ndarray]
    environment: dict[str, Any] = field(default_factory=dict)
    with_gradients: bool = False
    skipped: str = ""
    error: str = ""
    folder: str = ""

    @property
    def library(self) -> str:
        """The backend without where its traces were read from: `torch` of `torch (folder)`."""
        return self.backend.split(" ")[0]

    @property
    def numerics(self) -> dict[str, Any]:
        """The numerics lock that it was computed under."""
        return self.environment.get("backends", {}).get(self.library, {}).get("numerics", {})

    @property
    def arithmetic(self) -> str:
        """How the hardware computes, one of `reference.ARITHMETICS`."""
        return self.numerics.get("arithmetic", "ieee")


@dataclass(frozen=True)
class Reference:
    """The reference's own stages for a problem, in float64 and in the same precision."""

    problem: Problem
    with_gradients: bool = False

    @cached_property
    def accumulated(self) -> dict[str, np.ndarray]:
        """Every stage in float64."""
        return self._stages("float64", None)

    @cached_property
    def given(self) -> dict[str, np.ndarray]:
        """The float64 stages, rounded as a backend keeps them: what its local stages start from."""
        return {name: value.astype(kept_dtype(name, self.problem.dtype)) for name, value in self.accumulated.items()}

    def expected(self, *, local: bool) -> dict[str, np.ndarray]:
        """Every stage in float64, from its own stages before or from the given ones."""
        return self._local if local else self.accumulated

    def same_precision(self, *, local: bool, arithmetic: str = "ieee") -> dict[str, np.ndarray]:
        """Every stage in the same precision and arithmetic, from its own stages before or from the given ones."""
        if (local, arithmetic) not in self._same:
            given = self.given if local else None
            self._same[local, arithmetic] = self._stages(SAME_PRECISION[self.problem.dtype], given, arithmetic)
        return self._same[local, arithmetic]

    @cached_property
    def magnitudes(self) -> dict[str, np.ndarray]:
        """Of each gradient, the size of the terms it is a sum of."""
        if not self.with_gradients:
            return {}
        magnitudes = reference.gradient_magnitudes(self.problem)
        return magnitudes | {f"{path}.{name}": of for path in ("fused", "blocks") for name, of in magnitudes.items()}

    @cached_property
    def _local(self) -> dict[str, np.ndarray]:
        return self._stages("float64", self.given)

    @cached_property
    def _same(self) -> dict[tuple[bool, str], dict[str, np.ndarray]]:
        return {}

    def _stages(
        self, dtype: str, given: Mapping[str, np.ndarray] | None, arithmetic: str = "ieee"
    ) -> dict[str, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore"):  # float16 may overflow; that is then part of the verdict
            values = run_steps(reference.steps(self.problem, dtype, arithmetic), given)
            if self.with_gradients and given is None:
                values |= reference.gradients(self.problem, dtype)
                fused = reference.gradients(self.problem, dtype, fused=True)
                values |= {f"{path}.{name}": of for path in ("fused", "blocks") for name, of in fused.items()}
        return values


OnJudged = Callable[[Trace, Reference, list[Comparison]], None]
"""Called with each trace that was judged, its reference and the comparisons, while the arrays are still there."""


def run_steps(steps: Iterable[Step], given: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """The values of all stages: each step from the values before it, or all from the values given."""
    values: dict[str, np.ndarray] = {}
    for step in steps:
        values |= step(values if given is None else given)
    return values


def record(backend: str, reference: Reference, given: Problem | None = None) -> Trace:
    """Run a problem on a backend, every stage twice: on its own values, and on the reference's.

    Args:
        backend: its name.
        reference: of the problem.
        given: what the backend is given, if it is not the reference's problem: one with a mistake in it.

    Raises:
        ModuleNotFoundError: if the backend needs a package that is not installed.
    """
    problem = reference.problem
    module = load_backend(backend)
    with_gradients = reference.with_gradients and module.HAS_GRADIENTS
    with module.lock(problem.dtype) as numerics:
        steps = driver.steps(module, given or problem)
        accumulated = run_steps(steps)
        if with_gradients:
            accumulated |= driver.gradients(module, given or problem)
        local = run_steps(steps, reference.given)
    where = {"backends": {backend: {"numerics": numerics}}}
    return Trace(problem, backend, accumulated, local, where, with_gradients)


def judge(trace: Trace, reference: Reference) -> list[Comparison]:
    """Compare every stage of a trace with the reference; a stage that the trace lacks is a failure."""
    about = {"case": trace.problem.case.name, "backend": trace.backend, "dtype": trace.problem.dtype}
    arithmetic = trace.arithmetic
    if trace.error:
        return [failure(np.empty(0), trace.error, **about, stage="run")]

    def verdict(stage: str, values: Mapping[str, np.ndarray], *, local: bool) -> Comparison:
        expected = reference.expected(local=local)[stage]
        if stage not in values:
            return failure(expected, "the trace lacks this stage", **about, stage=stage)
        same = reference.same_precision(local=local, arithmetic=arithmetic)[stage]
        terms = reference.magnitudes.get(stage)
        return compare(values[stage], expected, same, **about, stage=stage, terms=terms, arithmetic=arithmetic)

    comparisons = []
    for stage in reference.accumulated:
        if "grad." in stage and not trace.with_gradients:
            continue
        if trace.library not in BACKENDS_OF.get(stage_path(stage), (trace.library,)):
            continue
        comparison = verdict(stage, trace.accumulated, local=False)
        if "grad." not in stage:
            local = verdict(stage, trace.local, local=True)
            failed = not (comparison.passed and local.passed)
            reason = comparison.reason or (
                "" if local.passed else local.reason or "wrong on the reference's own inputs"
            )
            comparison = replace(
                comparison,
                status="failed" if failed else "passed",
                local_ratio=local.ratio,
                reason=reason if failed else "",
            )
        comparisons.append(comparison)
    return comparisons


@dataclass(frozen=True)
class SkippedCase:
    """A case that a backend cannot run in a dtype, and why."""

    case: str
    dtype: str
    backend: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The results of a run: one comparison for each stage of each case, dtype and backend.

    Attributes:
        comparisons: in the order of the run.
        skipped: why a backend did not run at all, by name.
        environment: where the run was made.
        warnings: what makes results less comparable than they look.
        skipped_cases: what a backend that did run cannot.
        diagnoses: what is wrong with those of the first cases that failed, by case, dtype and backend.
        missing: what a backend whose traces were read has no trace of, though another backend has.
    """

    comparisons: list[Comparison]
    skipped: dict[str, str]
    environment: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    skipped_cases: list[SkippedCase] = field(default_factory=list)
    diagnoses: dict[tuple[str, str, str], Diagnosis] = field(default_factory=dict)
    missing: list[SkippedCase] = field(default_factory=list)

    @property
    def failed(self) -> list[Comparison]:
        """The comparisons that failed."""
        return [comparison for comparison in self.comparisons if not comparison.passed]

    @property
    def summary(self) -> dict[str, int]:
        """How many comparisons passed and failed, how many backends, and cases of the others, were skipped, and how
        many traces are missing."""
        failed, skipped = len(self.failed), len(self.skipped) + len(self.skipped_cases)
        passed = len(self.comparisons) - failed
        return {"passed": passed, "failed": failed, "skipped": skipped, "missing": len(self.missing)}

    @property
    def status(self) -> int:
        """The exit status of the commands that make a report: 1 if a comparison failed, 2 if a trace is missing."""
        return 1 if self.failed else 2 if self.missing else 0

    def groups(self) -> dict[tuple[str, str, str], list[Comparison]]:
        """The comparisons by case, dtype and backend."""
        groups: dict[tuple[str, str, str], list[Comparison]] = {}
        for comparison in self.comparisons:
            groups.setdefault((comparison.case, comparison.dtype, comparison.backend), []).append(comparison)
        return groups

    def first_differences(self) -> list[Comparison]:
        """For each case, dtype and backend that failed, the stage to start looking at."""
        found = (first_difference(group) for group in self.groups().values())
        return [comparison for comparison in found if comparison is not None]

    def settings(self) -> dict[str, str]:
        """The environment as one list: `packages.numpy`, `backends.torch.numerics.threads` and so on, as text."""
        return flattened(self.environment)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        skipped = [
            {"case": None, "backend": backend, "dtype": None, "stage": None, "status": "skipped", "reason": reason}
            for backend, reason in self.skipped.items()
        ]
        skipped += [{**asdict(case), "stage": None, "status": "skipped"} for case in self.skipped_cases]
        skipped += [{**asdict(case), "stage": None, "status": "missing"} for case in self.missing]
        return {
            "format": 1,
            "environment": self.environment,
            "warnings": self.warnings,
            "summary": self.summary,
            "results": [*(comparison.to_dict() for comparison in self.comparisons), *skipped],
            "diagnoses": [
                {"case": case, "dtype": dtype, "backend": backend, **diagnosis.to_dict()}
                for (case, dtype, backend), diagnosis in self.diagnoses.items()
            ],
        }


def run_cases(
    cases: Iterable[Case] | None = None,
    backends: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("float32",),
    *,
    with_gradients: bool = False,
    weights: Weights | None = None,
    traces: str | os.PathLike[str] | None = None,
    join: Sequence[str | os.PathLike[str]] = (),
    on_case: Callable[[str, str, str], None] = lambda case, dtype, backend: None,
    on_judged: OnJudged = lambda trace, reference, comparisons: None,
) -> Report:
    """Run cases on backends and judge every stage against the float64 reference.

    Args:
        cases: all of `CASES` when absent.
        backends: names; when absent all that can run here, the others being reported as skipped.
        dtypes: names of floating-point dtypes.
        with_gradients: also compare the gradients of inputs and weights, for cases without a cache.
        weights: canonical weights to take instead of each case's own.
        traces: folder to save the traces in.
        join: folders of traces made elsewhere, their sub-folders among them; those of the same cases and dtypes are
            judged, too.
        on_case: called before each case, with its name, the dtype and the backend.
        on_judged: called with each trace that was judged, its reference and the comparisons.

    Returns:
        The report. A backend that raises an error in a case fails that case.

    Raises:
        ModuleNotFoundError: if a backend asked for by name can neither run here nor is joined.
        OSError: if a trace cannot be read or saved.
        ValueError: if there is no backend or dtype of a name, nothing to run, also on one backend asked for by name, or
            a file to join is no trace of a case known here.
    """
    cases = list(CASES.values() if cases is None else cases)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {list(DTYPES)}, got dtype={dtype!r}")
    if join and weights is not None:
        raise ValueError("traces to join must be of the cases' own weights, got weights")
    missing = {name: reason for name in backends or NEEDS if (reason := why_missing(name))}
    here = [name for name in backends or NEEDS if name not in missing]
    joined = _load_traces(join, here)
    skipped = {name: reason for name, reason in missing.items() if name not in {trace.backend for trace in joined}}
    if backends and skipped:
        raise ModuleNotFoundError("; ".join(skipped.values()))
    chosen = [(case, dtype) for case in cases for dtype in ((case.dtype,) if case.dtype else dtypes)]
    if not (chosen and dtypes and (here or joined)):
        raise ValueError(f"there must be something to run, got {len(cases)} cases on {here} in {list(dtypes)}")
    for name in here if backends else ():
        reasons = dict.fromkeys(load_backend(name).why_skipped(case, dtype) for case, dtype in chosen)
        if None not in reasons:
            raise ValueError(f"{name} must be able to run one of the cases, got {_listed(map(str, reasons))}")
    where = environment(here)

    def recorded() -> Iterator[tuple[Trace, Reference]]:
        for case, dtype in chosen:
            expected = Reference(make_problem(case, dtype, weights), with_gradients and case.has_gradients)
            for name in here:
                on_case(case.name, dtype, name)
                trace = replace(_attempt(name, expected), environment=where)
                if traces is not None:
                    save_trace(traces, trace)
                yield trace, expected
            for trace in joined:
                if (trace.problem.case, trace.problem.dtype) == (case, dtype):
                    yield trace, expected

    report = _judge_all(recorded(), joined, on_judged)
    without = [case for case in cases if with_gradients and not case.has_gradients]
    for why, names in {
        "with a cache": [case.name for case in without if case.is_cached],
        "where a query is NaN, which makes all of them NaN": [case.name for case in without if not case.is_cached],
    }.items():
        if names:
            report.warnings.append(f"gradients are not compared {why}: {', '.join(names)}")
    if joined:
        where["joined"] = {trace.folder: trace.environment for trace in joined}
    return replace(report, skipped=skipped, environment=where)


def _attempt(backend: str, reference: Reference) -> Trace:
    """A trace even where there is nothing to trace: of a case that the backend cannot run, or raises an error in."""
    nothing = Trace(reference.problem, backend, {}, {})
    if reason := load_backend(backend).why_skipped(reference.problem.case, reference.problem.dtype):
        return replace(nothing, skipped=reason)
    try:
        return record(backend, reference)
    except Exception as error:
        return replace(nothing, error=f"{type(error).__name__}: {error}")


DIAGNOSED = 5  # cases: what is wrong with the first is mostly wrong with all


def _judge_all(traces: Iterable[tuple[Trace, Reference]], joined: Iterable[Trace], on_judged: OnJudged) -> Report:
    """Judge traces, each by its reference, say what makes them less comparable than they look, and what is wrong.

    Args:
        traces: what to judge.
        joined: all traces that were read, whether or not they are judged: their backends must lack none.
        on_judged: called with each trace that was judged, its reference and the comparisons.

    Returns:
        A report that does not know where it was made yet.

    Raises:
        ValueError: if there is nothing but skipped cases.
    """
    from parity.diagnosis.diagnose import diagnose_trace

    diagnoses: dict[tuple[str, str, str], Diagnosis] = {}
    comparisons: list[Comparison] = []
    skipped: list[SkippedCase] = []
    had: dict[str, set[tuple[str, str]]] = {trace.backend: set() for trace in joined}
    locks: dict[str, dict[str, Any]] = {}
    without_hardware: dict[str, str] = {}
    without_gradients: dict[str, None] = {}  # in order
    for trace, expected in traces:
        case, dtype = trace.problem.case.name, trace.problem.dtype
        had.setdefault(trace.backend, set()).add((case, dtype))
        locks.setdefault(trace.backend.split(" ")[0], {})[trace.folder or "here"] = trace.numerics
        if trace.skipped:
            skipped.append(SkippedCase(case, dtype, trace.backend, trace.skipped))
            continue
        judged = judge(trace, expected)
        comparisons.extend(judged)
        on_judged(trace, expected, judged)
        is_wrong = any(not comparison.passed for comparison in judged)
        if is_wrong and trace.accumulated and len(diagnoses) < DIAGNOSED:
            diagnosis = diagnose_trace(trace)
            if diagnosis.kind != "none":  # a gradient alone is wrong, which no mistake known here explains
                diagnoses[case, dtype, trace.backend] = diagnosis
        if (values := trace.numerics.get("values", "device")) != "device":
            without_hardware[trace.backend] = _printable(str(values))
        if expected.with_gradients and not (trace.with_gradients or trace.error):
            without_gradients[trace.backend] = None
    if not comparisons:
        raise ValueError(f"there must be something to judge, got {len(skipped)} skipped cases and no other")
    warnings = [
        f"traces of {backend} were made under different numerics locks: {held}"
        for backend, held in locks.items()
        if len({json.dumps(settings, sort_keys=True) for settings in held.values()}) > 1
    ]
    every = set().union(*had.values())
    missing = [
        SkippedCase(case, dtype, backend, f"{backend} has no trace of {case} in {dtype}")
        for backend in sorted(had)
        for case, dtype in sorted(every - had[backend])
    ]
    for backend in dict.fromkeys(each.backend for each in missing):
        lacking = (f"{each.case} in {each.dtype}" for each in missing if each.backend == backend)
        warnings.append(f"{backend} has no trace of {_listed(lacking)}")
    for backend, values in without_hardware.items():
        warnings.append(f"{backend} ran without its hardware: its values are those of {values}")
    warnings.extend(f"{backend} has no gradients: its other stages are compared" for backend in without_gradients)
    return Report(comparisons, {}, {}, warnings, skipped, diagnoses, missing)


def flattened(values: Mapping[str, Any], prefix: str = "", depth: int = 6) -> dict[str, str]:
    """Nested settings under joined names, as text. Those of a trace come from a file, and may be anything."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        path = f"{prefix}{_printable(str(name))}"
        if isinstance(value, Mapping) and value and depth:
            flat |= flattened(value, f"{path}.", depth - 1)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            flat[path] = _printable(text)
    return flat


def _listed(names: Iterable[str], most: int = 8) -> str:
    """Names in a line, and how many there are beyond some."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# ---- Traces as files -------------------------------------------------------------------------------------------------


def save_trace(folder: str | os.PathLike[str], trace: Trace) -> Path:
    """Write a trace to `<folder>/<case>-<dtype>-<backend>.safetensors`, whole or not at all.

    Raises:
        OSError: if it cannot be written.
    """
    case, dtype = trace.problem.case, trace.problem.dtype
    path = Path(folder) / f"{case.name}-{dtype}-{trace.backend}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"accumulated/{name}": value for name, value in trace.accumulated.items()}
    tensors |= {f"local/{name}": value for name, value in trace.local.items()}
    metadata = {
        "format": FORMAT,
        "kind": "trace",
        "case": case.name,
        "spec": case.spec.to_json(),
        "dtype": dtype,
        "backend": trace.backend,
        "digest": trace.problem.digest,
        "environment": json.dumps(trace.environment, sort_keys=True),
        "skipped": trace.skipped,
        "error": trace.error,
    }
    save_tensors(path, tensors, metadata)
    return path


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace, and make its problem again.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no trace of a case known here, or was given other weights or inputs than made here.
    """
    tensors, metadata = load_tensors(path)
    wanted = {"format", "kind", "case", "dtype", "backend", "digest", "environment"}
    if metadata.get("kind") != "trace" or metadata.get("format") != FORMAT or not wanted <= metadata.keys():
        raise ValueError(f"{path} must be a trace in format {FORMAT}, got metadata {sorted(metadata)}")
    case = find_case(metadata["case"])
    if case is None or metadata["dtype"] not in DTYPES or metadata["backend"] not in NEEDS:
        got = {name: metadata[name] for name in ("case", "dtype", "backend")}
        raise ValueError(f"{path} must be of a known case, dtype and backend, got {got}")
    problem = make_problem(case, metadata["dtype"])
    if problem.digest != metadata["digest"]:
        raise ValueError(
            f"{path} must come from the weights and inputs of case {problem.case.name}, its digest differs"
        )
    parts: dict[str, dict[str, np.ndarray]] = {"accumulated": {}, "local": {}}
    for name, value in tensors.items():
        part, _, stage = name.partition("/")
        if part not in parts:
            raise ValueError(f"{path} must hold accumulated and local stages, got {name}")
        parts[part][stage] = value
    try:
        trace = Trace(
            problem,
            metadata["backend"],
            parts["accumulated"],
            parts["local"],
            json.loads(metadata["environment"]),
            with_gradients=any("grad." in stage for stage in parts["accumulated"]),
            skipped=_printable(metadata.get("skipped", "")),
            error=_printable(metadata.get("error", "")),
            folder=str(Path(path).parent),
        )
        arithmetic = trace.arithmetic
    except (ValueError, RecursionError, AttributeError):
        raise ValueError(f"{path} must tell its environment in JSON, got {metadata['environment'][:80]!r}") from None
    if arithmetic not in reference.ARITHMETICS:
        raise ValueError(f"{path} must tell one of {list(reference.ARITHMETICS)}, got arithmetic={arithmetic!r}")
    return trace


def compare_traces(
    folders: Iterable[str | os.PathLike[str]],
    *,
    on_judged: OnJudged = lambda trace, reference, comparisons: None,
) -> Report:
    """Judge saved traces, from any number of machines and environments, against the reference made here.

    Args:
        folders: folders of traces, their sub-folders among them, or single trace files.
        on_judged: called with each trace that was judged, its reference and the comparisons.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if there is no trace, or a file is no trace of a case known here.
    """
    traces = _load_traces(folders)
    order = {name: index for index, name in enumerate(CASES)}
    of_cases: dict[tuple[str, str], list[Trace]] = {}
    for trace in sorted(traces, key=lambda trace: order.get(trace.problem.case.name, len(order))):
        of_cases.setdefault((trace.problem.case.name, trace.problem.dtype), []).append(trace)

    def read() -> Iterator[tuple[Trace, Reference]]:
        for of_case in of_cases.values():
            expected = Reference(of_case[0].problem, any(trace.with_gradients for trace in of_case))
            for trace in of_case:
                yield trace, expected

    report = _judge_all(read(), traces, on_judged)
    return replace(report, environment={trace.folder: trace.environment for trace in traces})


def _load_traces(folders: Iterable[str | os.PathLike[str]], here: Sequence[str] = ()) -> list[Trace]:
    """All traces of folders. A backend that is here or in an earlier folder, too, is named together with its folder."""
    traces = []
    seen: dict[tuple[str, str, str], str] = {}
    for path in _trace_files(folders):
        trace = load_trace(path)
        key = (trace.problem.case.name, trace.problem.dtype, trace.backend)
        if trace.backend in here or seen.setdefault(key, trace.folder) != trace.folder:
            trace = replace(trace, backend=f"{trace.backend} ({trace.folder})")
        traces.append(trace)
    return traces


def _printable(text: str) -> str:
    """Text from a file, without what would command a terminal."""
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)


def _trace_files(folders: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for folder in folders:
        if not os.fspath(folder):  # which would be the current folder: an unset variable of a shell
            raise ValueError(f"a folder of traces must have a name, got {folder!r}")
        files = [Path(folder)] if Path(folder).is_file() else sorted(Path(folder).rglob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{folder} must be a trace or a folder of traces, got no *.safetensors there or in its sub-folders"
            )
        yield from files
