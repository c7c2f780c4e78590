"""Results of a run: the comparison of every stage, what was not compared, and the environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from parity.explain.diagnosis.diagnose import Diagnosis
from parity.measure.core.compare import Comparison, Label, first_difference
from parity.measure.core.problem import Problem
from parity.measure.core.records import as_html
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
        not_exercised: features of layers that sequences of this length cannot show.
        allow_skipped: something that was not compared does not make the status 2.
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
    not_exercised: list[NotExercised] = field(default_factory=list)
    allow_skipped: bool = False

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {what}" for what, number in self.summary.items())
        first = self.first_differences()[:MOST_SHOWN]
        return "\n".join(
            (f"{counted(len(self.groups()), 'case')}, stages: {counts}", *map(str, first))
        )

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
        failed, skipped = len(self.failed), len(self.skipped) + len(self.skipped_cases)
        passed = len(self.comparisons) - failed
        return {
            "passed": passed,
            "failed": failed,
            "skipped": skipped,
            "missing": len(self.missing),
        }

    @property
    def not_compared(self) -> list[NotCompared]:
        """Gaps in the comparison, one entry per reason; an open one was requested."""
        backends = {comparison.backend for comparison in self.comparisons}
        missing = [
            replace(each, reason="no trace of it, though others have one") for each in self.missing
        ]
        entries = _by_reason([*self.skipped_cases, *missing], backends)
        for each in self.left_out:
            what = (
                f"{each.what} of {counted(len(each.labels), 'case')}" if each.labels else each.what
            )
            entries.append(replace(each, what=what))
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
        is_less = any(each.is_open for each in self.not_compared)
        return 2 if is_less and not self.allow_skipped else 0

    def groups(self) -> dict[tuple[str, str, str], list[Comparison]]:
        """The comparisons by case, dtype and backend."""
        groups: dict[tuple[str, str, str], list[Comparison]] = {}
        for comparison in self.comparisons:
            groups.setdefault((comparison.case, comparison.dtype, comparison.backend), []).append(
                comparison
            )
        return groups

    def first_differences(self) -> list[Comparison]:
        """Return the first difference of each case, dtype and backend that failed."""
        found = (first_difference(group) for group in self.groups().values())
        return [comparison for comparison in found if comparison is not None]

    def add(self, other: Report) -> None:
        """Add the results of another run in the same environment."""
        self.comparisons.extend(other.comparisons)
        self.warnings.extend(each for each in other.warnings if each not in self.warnings)
        self.skipped_cases.extend(other.skipped_cases)
        self.missing.extend(other.missing)
        self.diagnoses.update(other.diagnoses)
        for each in other.left_out:
            if each in self.left_out:
                self.left_out[self.left_out.index(each)].labels.extend(each.labels)
            else:
                self.left_out.append(each)

    def settings(self) -> dict[str, str]:
        """Return the environment as one list of text: `packages.numpy`,
        `backends.torch.numerics.threads`, …
        """
        return flattened(self.environment)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        skipped = [
            {
                "case": None,
                "backend": backend,
                "dtype": None,
                "stage": None,
                "status": "skipped",
                "reason": reason,
            }
            for backend, reason in self.skipped.items()
        ]
        skipped += [{**asdict(case), "status": "skipped"} for case in self.skipped_cases]
        skipped += [{**asdict(case), "status": "missing"} for case in self.missing]
        return {
            "environment": self.environment,
            "warnings": self.warnings,
            "summary": self.summary,
            "results": [*(comparison.to_dict() for comparison in self.comparisons), *skipped],
            "not_compared": [each.to_dict() for each in self.not_compared],
            "not_exercised": [each.to_dict() for each in self.not_exercised],
            "diagnoses": [
                {"case": case, "dtype": dtype, "backend": backend, **diagnosis.to_dict()}
                for (case, dtype, backend), diagnosis in self.diagnoses.items()
            ],
        }


def _by_reason(cases: Sequence[SkippedCase], backends: Collection[str]) -> list[NotCompared]:
    """Return what backends did not compute, one entry per backend, dtype and reason.

    Args:
        cases: the cases.
        backends: the backends that computed something.
    """
    names: dict[tuple[str, str, str | None, str], list[str]] = {}
    for each in cases:
        names.setdefault((each.backend, each.dtype, each.stage, each.reason), []).append(each.case)
    entries = []
    for (backend, dtype, stage, reason), labels in names.items():
        every = "" if backend in backends else "all "
        of_stage = f"{stage} of " if stage is not None else ""
        in_dtype = f" in {dtype}" if dtype else ""
        what = f"{backend}, {of_stage}{every}{counted(len(labels), 'case')}{in_dtype}"
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
        stages: the stages by name. Those that the diagnosis found in another convention are left
            out.
        problem: the inputs and weights.
        arithmetic: one of `reference.ARITHMETICS`.
        diagnosis: the diagnosis of the stages.
    """
    reference = Reference(problem, stages=frozenset(stages))
    comparable = [
        stage
        for stage in reference.accumulated
        if stage in stages and stage not in diagnosis.conventions
    ]
    labels = {stage: Label(name, backend, problem.dtype, stage) for stage in comparable}
    comparisons = [
        reference.compare(stages[stage], label, arithmetic) for stage, label in labels.items()
    ]
    diagnoses = {(name, problem.dtype, backend): diagnosis} if diagnosis.is_wrong else {}
    return Report(comparisons, {}, {}, diagnoses=diagnoses)


def flattened(values: Mapping[str, Any], prefix: str = "", depth: int = 6) -> dict[str, str]:
    """Return nested settings under joined names, as text. A trace comes from a file and may contain
    anything.
    """
    flat: dict[str, str] = {}
    for name, value in values.items():
        path = f"{prefix}{printable(str(name))}"
        if isinstance(value, Mapping) and value and depth:
            flat |= flattened(value, f"{path}.", depth - 1)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            flat[path] = printable(text)
    return flat
