"""Results of a run: the comparison of every stage, skipped and missing cases, and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from parity.core.compare import Comparison, Label, first_difference
from parity.core.problem import Problem
from parity.core.records import as_html
from parity.core.trace import Reference
from parity.diagnosis.diagnose import Diagnosis
from parity.sharding.mesh import Collectives
from parity.text import counted, printable

MOST_SHOWN = 3
"""Failed cases in the text of a report."""


@dataclass(frozen=True)
class SkippedCase:
    """A case that a backend cannot run in a dtype, with the reason."""

    case: str
    dtype: str
    backend: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The results of a run: one comparison for each stage of each case, dtype and backend.

    Attributes:
        comparisons: comparisons in the order of the run.
        skipped: by name, the reason why a backend did not run at all.
        environment: environment of the run.
        warnings: circumstances that make results less comparable than they look.
        skipped_cases: cases that a backend does not support.
        diagnoses: diagnoses of the first failed cases, by case, dtype and backend.
        missing: traces that another backend has and this one lacks, among those that were read.
        collectives: traffic between devices, for cases on a mesh.
        layers: names of the cases that are layers of a model, in its order.
    """

    comparisons: list[Comparison]
    skipped: dict[str, str]
    environment: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    skipped_cases: list[SkippedCase] = field(default_factory=list)
    diagnoses: dict[tuple[str, str, str], Diagnosis] = field(default_factory=dict)
    missing: list[SkippedCase] = field(default_factory=list)
    collectives: list[Collectives] = field(default_factory=list)
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {what}" for what, number in self.summary.items())
        first = self.first_differences()[:MOST_SHOWN]
        return "\n".join((f"{counted(len(self.groups()), 'case')}, stages: {counts}", *map(str, first)))

    def _repr_html_(self) -> str:
        return as_html(self)

    @property
    def failed(self) -> list[Comparison]:
        """The comparisons that failed."""
        return [comparison for comparison in self.comparisons if not comparison.passed]

    @property
    def needless(self) -> list[Collectives]:
        """The programs whose devices send more than they need."""
        return [collectives for collectives in self.collectives if not collectives.passed]

    @property
    def summary(self) -> dict[str, int]:
        """Count the comparisons that passed and failed, skipped backends and cases, and missing traces."""
        failed, skipped = len(self.failed), len(self.skipped) + len(self.skipped_cases)
        passed = len(self.comparisons) - failed
        return {"passed": passed, "failed": failed, "skipped": skipped, "missing": len(self.missing)}

    @property
    def status(self) -> int:
        """The exit status of commands: 1 if a comparison failed or a program sent too much, 2 if a trace is missing."""
        return 1 if self.failed or self.needless else 2 if self.missing else 0

    def groups(self) -> dict[tuple[str, str, str], list[Comparison]]:
        """The comparisons by case, dtype and backend."""
        groups: dict[tuple[str, str, str], list[Comparison]] = {}
        for comparison in self.comparisons:
            groups.setdefault((comparison.case, comparison.dtype, comparison.backend), []).append(comparison)
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
        self.diagnoses.update(other.diagnoses)
        self.collectives.extend(other.collectives)

    def settings(self) -> dict[str, str]:
        """Return the environment as one list of text: `packages.numpy`, `backends.torch.numerics.threads`, …"""
        return flattened(self.environment)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        skipped = [
            {"case": None, "backend": backend, "dtype": None, "stage": None, "status": "skipped", "reason": reason}
            for backend, reason in self.skipped.items()
        ]
        skipped += [{**asdict(case), "stage": None, "status": "skipped"} for case in self.skipped_cases]
        skipped += [{**asdict(case), "stage": None, "status": "missing"} for case in self.missing]
        return {
            "environment": self.environment,
            "warnings": self.warnings,
            "summary": self.summary,
            "results": [*(comparison.to_dict() for comparison in self.comparisons), *skipped],
            "collectives": [collectives.to_dict() for collectives in self.collectives],
            "diagnoses": [
                {"case": case, "dtype": dtype, "backend": backend, **diagnosis.to_dict()}
                for (case, dtype, backend), diagnosis in self.diagnoses.items()
            ],
        }


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
        stages: the stages by name. Those that the diagnosis found in another convention are left out.
        problem: the inputs and weights.
        arithmetic: one of `reference.ARITHMETICS`.
        diagnosis: the diagnosis of the stages.
    """
    reference = Reference(problem, stages=frozenset(stages))
    comparable = [stage for stage in reference.accumulated if stage in stages and stage not in diagnosis.conventions]
    labels = {stage: Label(name, backend, problem.dtype, stage) for stage in comparable}
    comparisons = [reference.compare(stages[stage], label, arithmetic) for stage, label in labels.items()]
    diagnoses = {(name, problem.dtype, backend): diagnosis} if diagnosis.is_wrong else {}
    return Report(comparisons, {}, {}, diagnoses=diagnoses)


def flattened(values: Mapping[str, Any], prefix: str = "", depth: int = 6) -> dict[str, str]:
    """Return nested settings under joined names, as text. A trace comes from a file and may contain anything."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        path = f"{prefix}{printable(str(name))}"
        if isinstance(value, Mapping) and value and depth:
            flat |= flattened(value, f"{path}.", depth - 1)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            flat[path] = printable(text)
    return flat
