"""Results of a run: the comparison of every stage, what was not compared, and the environment."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from parity.explain.diagnosis.diagnose import Diagnosis
from parity.measure.backends import FRAMEWORKS
from parity.measure.backends.numerics import environment
from parity.measure.core.compare import Comparison, Label, first_difference
from parity.measure.core.problem import Problem
from parity.measure.core.records import JsonRecord, as_html
from parity.measure.core.trace import Reference
from parity.measure.text import counted, printable
from parity.port.conversion.not_compared import NotCompared
from parity.use.running.lengths import NotExercised

MOST_SHOWN = 3
"""Failed cases in the text of a report."""


@dataclass(frozen=True)
class SkippedCase:
    """A case that a backend did not run in a dtype, or some of whose stages it did not compute,
    with the reason.

    Attributes:
        case, dtype, backend: which case; the dtype is empty if it is unknown.
        reason: why.
        stage: `gradients` if only these were not computed; None for the whole case.
    """

    case: str
    dtype: str
    backend: str
    reason: str
    stage: str | None = None


@dataclass(frozen=True)
class Report:
    """The results of a run: one comparison for each stage of each case, dtype and backend.

    Attributes:
        comparisons: comparisons in the order of the run.
        skipped: by name, the reason why a backend that no one named did not run at all.
        environment: environment of the run.
        warnings: circumstances that make results less comparable than they look.
        skipped_cases: cases that a backend did not run, or whose gradients it did not compute.
        diagnoses: diagnoses of the first failed cases, by case, dtype and backend.
        missing: traces that another backend has and this one lacks, among those that were read.
        layers: names of the cases that are layers of a model, in its order.
        left_out: parts of a model or of all cases that no backend computed.
        exercised: the cases that were chosen to exercise features of layers, a line each.
        not_exercised: features of layers that no case could show.
        allow_skipped: something that was not compared does not make the status 2.
        commands: the command that repeats a case, by case, dtype and backend; those that no command
            can repeat are missing.
    """

    comparisons: list[Comparison]
    skipped: dict[str, str]
    environment: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    skipped_cases: list[SkippedCase] = field(default_factory=list)
    diagnoses: dict[tuple[str, str, str], Diagnosis] = field(default_factory=dict)
    missing: list[SkippedCase] = field(default_factory=list)
    layers: tuple[str, ...] = ()
    left_out: list[NotCompared] = field(default_factory=list)
    exercised: list[str] = field(default_factory=list)
    not_exercised: list[NotExercised] = field(default_factory=list)
    allow_skipped: bool = False
    commands: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {what}" for what, number in self.summary.items())
        lines = [f"{counted(len(self.groups()), 'case')}, stages: {counts}"]
        for difference in self.first_differences()[:MOST_SHOWN]:
            lines.append(str(difference))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return as_html(self)

    @property
    def failed(self) -> list[Comparison]:
        """The comparisons that failed."""
        return [comparison for comparison in self.comparisons if not comparison.passed]

    @property
    def summary(self) -> dict[str, int]:
        """Count the comparisons that passed and failed, skipped backends and cases, and missing
        traces.
        """
        num_failed = len(self.failed)
        return {
            "passed": len(self.comparisons) - num_failed,
            "failed": num_failed,
            "skipped": len(self.skipped) + len(self.skipped_cases),
            "missing": len(self.missing),
        }

    @property
    def not_compared(self) -> list[NotCompared]:
        """Gaps in the comparison, one entry per reason; an open one was requested."""
        backends = {comparison.backend for comparison in self.comparisons}
        reason = "no trace of it, though others have one"
        missing = [replace(case, reason=reason) for case in self.missing]
        entries = _by_reason([*self.skipped_cases, *missing], backends)
        for part in self.left_out:
            what = part.what
            if part.labels:
                what = f"{what} of {counted(len(part.labels), 'case')}"
            entries.append(replace(part, what=what))
        return entries

    @property
    def status(self) -> int:
        """The exit status of commands.

        1 if a comparison failed. 2 if nothing was compared, or, unless
        that is allowed, less than was requested. Backends that no one named do not count.
        """
        if self.failed:
            return 1
        if not self.comparisons:
            return 2
        is_incomplete = any(part.is_open for part in self.not_compared)
        return 2 if is_incomplete and not self.allow_skipped else 0

    def groups(self) -> dict[tuple[str, str, str], list[Comparison]]:
        """The comparisons by case, dtype and backend."""
        groups: dict[tuple[str, str, str], list[Comparison]] = {}
        for comparison in self.comparisons:
            groups.setdefault(comparison.key, []).append(comparison)
        return groups

    def first_differences(self) -> list[Comparison]:
        """Return the first difference of each case, dtype and backend that failed."""
        differences = []
        for comparisons in self.groups().values():
            difference = first_difference(comparisons)
            if difference is not None:
                differences.append(difference)
        return differences

    def add(self, other: Report) -> None:
        """Add the results of another run in the same environment."""
        self.comparisons.extend(other.comparisons)
        for warning in other.warnings:
            if warning not in self.warnings:
                self.warnings.append(warning)
        self.skipped_cases.extend(other.skipped_cases)
        self.missing.extend(other.missing)
        self.diagnoses.update(other.diagnoses)
        self.commands.update(other.commands)
        for part in other.left_out:
            # Parts are equal whatever their labels, which belong to both runs then.
            if part in self.left_out:
                index = self.left_out.index(part)
                self.left_out[index].labels.extend(part.labels)
            else:
                self.left_out.append(part)

    def settings(self) -> dict[str, str]:
        """Return the environment as one list of text: `packages.numpy`,
        `backends.torch.numerics.threads`, …
        """
        return flattened(self.environment)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        results = _as_dicts(self.comparisons)
        for backend, reason in self.skipped.items():
            of_no_case = {"case": None, "backend": backend, "dtype": None, "stage": None}
            results.append({**of_no_case, "status": "skipped", "reason": reason})
        for case in self.skipped_cases:
            results.append({**asdict(case), "status": "skipped"})
        for case in self.missing:
            results.append({**asdict(case), "status": "missing"})
        diagnoses = []
        for (case, dtype, backend), diagnosis in self.diagnoses.items():
            about = {"case": case, "dtype": dtype, "backend": backend}
            diagnoses.append({**about, **diagnosis.to_dict()})
        return {
            "environment": self.environment,
            "warnings": self.warnings,
            "summary": self.summary,
            "results": results,
            "not_compared": _as_dicts(self.not_compared),
            "exercised": self.exercised,
            "not_exercised": _as_dicts(self.not_exercised),
            "diagnoses": diagnoses,
        }


def _as_dicts(records: Iterable[JsonRecord]) -> list[dict[str, Any]]:
    return [record.to_dict() for record in records]


def _by_reason(cases: Sequence[SkippedCase], backends: Collection[str]) -> list[NotCompared]:
    """Return what backends did not compute, one entry per backend, dtype and reason.

    Args:
        cases: the cases.
        backends: the backends that computed something.
    """
    names: dict[tuple[str, str, str | None, str], list[str]] = {}
    for case in cases:
        key = (case.backend, case.dtype, case.stage, case.reason)
        names.setdefault(key, []).append(case.case)
    entries = []
    for (backend, dtype, stage, reason), labels in names.items():
        what = counted(len(labels), "case")
        if backend not in backends:
            what = f"all {what}"
        if stage is not None:
            what = f"{stage} of {what}"
        if dtype:
            what = f"{what} in {dtype}"
        what = f"{backend}, {what}"
        entries.append(NotCompared(what, reason, labels))
    return entries


def report_of_stages(
    name: str,
    backend: str,
    stages: Mapping[str, np.ndarray],
    problem: Problem,
    arithmetic: str,
    diagnosis: Diagnosis,
) -> Report:
    """Return the report of the stages of one function.

    Args:
        name: what the report calls the function.
        backend: framework of the function.
        stages: the stages by name. Those that the diagnosis found in a different convention are
            left out.
        problem: the inputs and weights.
        arithmetic: one of `reference.ARITHMETICS`.
        diagnosis: the diagnosis of the stages.
    """
    reference = Reference(problem, stages=frozenset(stages))
    comparisons = []
    for stage in reference.accumulated:
        if stage in stages and stage not in diagnosis.conventions:
            label = Label(name, backend, problem.dtype, stage)
            comparisons.append(reference.compare(stages[stage], label, arithmetic))
    diagnoses = {(name, problem.dtype, backend): diagnosis} if diagnosis.is_wrong else {}
    return Report(comparisons, {}, environment([FRAMEWORKS[backend]]), diagnoses=diagnoses)


def flattened(values: Mapping[str, Any], prefix: str = "", depth: int = 6) -> dict[str, str]:
    """Return nested settings under joined names, as text.

    A trace comes from a file and may contain anything, so `depth` bounds the recursion: 6 levels
    are more than the settings of any backend have.
    """
    flat: dict[str, str] = {}
    for name, value in values.items():
        path = f"{prefix}{printable(str(name))}"
        if isinstance(value, Mapping) and value and depth:
            flat |= flattened(value, f"{path}.", depth - 1)
        else:
            is_list = isinstance(value, (list, tuple))
            text = ", ".join(map(str, value)) if is_list else str(value)
            flat[path] = printable(text)
    return flat
