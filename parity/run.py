"""Cases x backends -> results: record what a backend computes, as a trace, and judge it against the reference."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from parity import reference
from parity.backends import NEEDS, load_backend, why_missing
from parity.compare import SAME_PRECISION, Comparison, compare, failure, first_difference, kept_dtype
from parity.numerics import environment
from parity.problem import Problem, make_problem
from parity.reference import Step
from parity.spec import CASES, DTYPES, Case, find_case
from parity.weights import FORMAT, Weights, load_tensors, save_tensors


@dataclass(frozen=True)
class Trace:
    """What one backend computed for one problem.

    Attributes:
        problem: what it was given.
        backend: its name.
        accumulated: every stage by name, computed from the backend's own stages before it.
        local: every stage by name, computed from the reference's stages before it.
        environment: where it was computed, with the numerics lock.
    """

    problem: Problem
    backend: str
    accumulated: dict[str, np.ndarray]
    local: dict[str, np.ndarray]
    environment: dict[str, Any] = field(default_factory=dict)


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

    def same_precision(self, *, local: bool) -> dict[str, np.ndarray]:
        """Every stage in the same precision, from its own stages before or from the given ones."""
        return self._same_local if local else self._same

    @cached_property
    def magnitudes(self) -> dict[str, np.ndarray]:
        """Of each gradient, the size of the terms it is a sum of."""
        if not self.with_gradients:
            return {}
        magnitudes = reference.gradient_magnitudes(self.problem)
        return magnitudes | {f"fused.{name}": magnitude for name, magnitude in magnitudes.items()}

    @cached_property
    def _local(self) -> dict[str, np.ndarray]:
        return self._stages("float64", self.given)

    @cached_property
    def _same(self) -> dict[str, np.ndarray]:
        return self._stages(SAME_PRECISION[self.problem.dtype], None)

    @cached_property
    def _same_local(self) -> dict[str, np.ndarray]:
        return self._stages(SAME_PRECISION[self.problem.dtype], self.given)

    def _stages(self, dtype: str, given: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore"):  # float16 may overflow; that is then part of the verdict
            values = run_steps(reference.steps(self.problem, dtype), given)
            if self.with_gradients and given is None:
                values |= reference.gradients(self.problem, dtype)
                fused = reference.gradients(self.problem, dtype, fused=True)
                values |= {f"fused.{name}": gradient for name, gradient in fused.items()}
        return values


def run_steps(steps: Iterable[Step], given: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """The values of all stages: each step from the values before it, or all from the values given."""
    values: dict[str, np.ndarray] = {}
    for step in steps:
        values |= step(values if given is None else given)
    return values


def record(backend: str, reference: Reference) -> Trace:
    """Run a problem on a backend, every stage twice: on its own values, and on the reference's.

    Raises:
        ModuleNotFoundError: if the backend needs a package that is not installed.
    """
    problem = reference.problem
    module = load_backend(backend)
    with module.lock(problem.dtype):
        steps = module.steps(problem)
        accumulated = run_steps(steps)
        if reference.with_gradients:
            accumulated |= module.gradients(problem)
        local = run_steps(steps, reference.given)
    return Trace(problem, backend, accumulated, local)


def judge(trace: Trace, reference: Reference) -> list[Comparison]:
    """Compare every stage of a trace with the reference; a stage that the trace lacks is a failure."""
    about = {"case": trace.problem.case.name, "backend": trace.backend, "dtype": trace.problem.dtype}

    def verdict(stage: str, values: Mapping[str, np.ndarray], *, local: bool) -> Comparison:
        expected, same = reference.expected(local=local)[stage], reference.same_precision(local=local)[stage]
        if stage not in values:
            return failure(expected, "the trace lacks this stage", **about, stage=stage)
        return compare(values[stage], expected, same, **about, stage=stage, terms=reference.magnitudes.get(stage))

    comparisons = []
    for stage in reference.accumulated:
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
class Report:
    """The results of a run: one comparison for each stage of each case, dtype and backend.

    Attributes:
        comparisons: in the order of the run.
        skipped: why a backend did not run, by name.
        environment: where the run was made.
        warnings: what makes results less comparable than they look.
    """

    comparisons: list[Comparison]
    skipped: dict[str, str]
    environment: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[Comparison]:
        """The comparisons that failed."""
        return [comparison for comparison in self.comparisons if not comparison.passed]

    @property
    def summary(self) -> dict[str, int]:
        """How many comparisons passed and failed, and how many backends were skipped."""
        failed = len(self.failed)
        return {"passed": len(self.comparisons) - failed, "failed": failed, "skipped": len(self.skipped)}

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

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        skipped = [
            {"case": None, "backend": backend, "dtype": None, "stage": None, "status": "skipped", "reason": reason}
            for backend, reason in self.skipped.items()
        ]
        return {
            "format": 1,
            "environment": self.environment,
            "warnings": self.warnings,
            "summary": self.summary,
            "results": [*(comparison.to_dict() for comparison in self.comparisons), *skipped],
        }


def run_cases(
    cases: Iterable[Case] | None = None,
    backends: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("float32",),
    *,
    with_gradients: bool = False,
    weights: Weights | None = None,
    traces: str | os.PathLike[str] | None = None,
    on_case: Callable[[str, str, str], None] = lambda case, dtype, backend: None,
) -> Report:
    """Run cases on backends and judge every stage against the float64 reference.

    Args:
        cases: all of `CASES` when absent.
        backends: names; when absent all that can run here, the others being reported as skipped.
        dtypes: names of floating-point dtypes.
        with_gradients: also compare the gradients of inputs and weights, for cases without a cache.
        weights: canonical weights to take instead of each case's own.
        traces: folder to save the traces in.
        on_case: called before each case, with its name, the dtype and the backend.

    Returns:
        The report. A backend that raises an error in a case fails that case.

    Raises:
        ModuleNotFoundError: if a backend asked for by name cannot run here.
        OSError: if a trace cannot be saved.
        ValueError: if there is no backend or dtype of a name, or nothing to run.
    """
    cases = list(CASES.values() if cases is None else cases)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {list(DTYPES)}, got dtype={dtype!r}")
    skipped = {name: reason for name in backends or NEEDS if (reason := why_missing(name))}
    if backends and skipped:
        raise ModuleNotFoundError("; ".join(skipped.values()))
    runnable = [name for name in backends or NEEDS if name not in skipped]
    if not (cases and runnable and dtypes):
        raise ValueError(f"there must be something to run, got {len(cases)} cases on {runnable} in {list(dtypes)}")
    where = environment(runnable)
    comparisons = []
    for case in cases:
        for dtype in (case.dtype,) if case.dtype else dtypes:
            expected = Reference(make_problem(case, dtype, weights), with_gradients and not case.is_cached)
            for backend in runnable:
                on_case(case.name, dtype, backend)
                try:
                    trace = replace(record(backend, expected), environment=where)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    comparisons.append(
                        failure(np.empty(0), reason, case=case.name, backend=backend, dtype=dtype, stage="run")
                    )
                    continue
                comparisons.extend(judge(trace, expected))
                if traces is not None:
                    save_trace(traces, trace)
    cached = [case.name for case in cases if case.is_cached]
    warnings = [f"gradients are not compared with a cache: {', '.join(cached)}"] if with_gradients and cached else []
    return Report(comparisons, skipped, where, warnings)


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
        where = json.loads(metadata["environment"])
        _lock_of(where, metadata["backend"])
    except (ValueError, RecursionError, AttributeError):
        raise ValueError(f"{path} must tell its environment in JSON, got {metadata['environment'][:80]!r}") from None
    return Trace(problem, metadata["backend"], parts["accumulated"], parts["local"], where)


def compare_traces(folders: Iterable[str | os.PathLike[str]]) -> Report:
    """Judge saved traces, from any number of machines and environments, against the reference made here.

    Args:
        folders: folders of traces, or single trace files.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if there is no trace, or a file is no trace of a case known here.
    """
    comparisons: list[Comparison] = []
    seen: dict[tuple[str, str, str], str] = {}
    locks: dict[str, dict[str, Any]] = {}
    environments: dict[str, Any] = {}
    for path in _trace_files(folders):
        trace = load_trace(path)
        folder = str(path.parent)
        if seen.setdefault((trace.problem.case.name, trace.problem.dtype, trace.backend), folder) != folder:
            trace = replace(trace, backend=f"{trace.backend} ({folder})")  # the same backend from elsewhere
        with_gradients = any("grad." in stage for stage in trace.accumulated)
        comparisons.extend(judge(trace, Reference(trace.problem, with_gradients)))
        environments[folder] = trace.environment
        backend = trace.backend.split(" ")[0]
        locks.setdefault(backend, {})[folder] = _lock_of(trace.environment, backend)
    order = {name: index for index, name in enumerate(CASES)}
    comparisons.sort(key=lambda comparison: order.get(comparison.case, len(order)))
    warnings = [
        f"traces of {backend} were made under different numerics locks: {held}"
        for backend, held in locks.items()
        if len({json.dumps(settings, sort_keys=True) for settings in held.values()}) > 1
    ]
    ran = {(comparison.case, comparison.dtype, comparison.backend) for comparison in comparisons}
    for backend in sorted({backend for _, _, backend in ran}):
        lacking = sorted({(case, dtype) for case, dtype, _ in ran if (case, dtype, backend) not in ran})
        if lacking:
            warnings.append(f"{backend} has no trace of {', '.join(f'{case} in {dtype}' for case, dtype in lacking)}")
    return Report(comparisons, {}, environments, warnings)


def _lock_of(environment: dict[str, Any], backend: str) -> dict[str, Any]:
    return environment.get("backends", {}).get(backend, {}).get("numerics", {})


def _trace_files(folders: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for folder in map(Path, folders):
        files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder} must be a trace or a folder of traces, got no *.safetensors there")
        yield from files
