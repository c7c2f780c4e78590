"""What a run gives: the verdict on every stage, what was skipped, what is missing, and where it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from parity.core.compare import Comparison, first_difference
from parity.core.records import as_html
from parity.diagnosis.diagnose import Diagnosis
from parity.sharding.mesh import Collectives
from parity.text import counted, printable

MOST_SHOWN = 3
"""Cases that failed, in the text of a report."""


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
        collectives: what devices sent each other, where cases ran on a mesh.
        layers: the names of cases that are the layers of a model, in its order.
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
        """The programs whose devices send each other more than they need."""
        return [collectives for collectives in self.collectives if not collectives.passed]

    @property
    def summary(self) -> dict[str, int]:
        """How many comparisons passed and failed, how many backends, and cases of the others, were skipped, and how
        many traces are missing."""
        failed, skipped = len(self.failed), len(self.skipped) + len(self.skipped_cases)
        passed = len(self.comparisons) - failed
        return {"passed": passed, "failed": failed, "skipped": skipped, "missing": len(self.missing)}

    @property
    def status(self) -> int:
        """The exit status of the commands that make a report: 1 if a comparison failed or more was sent than need be,
        2 if a trace is missing."""
        return 1 if self.failed or self.needless else 2 if self.missing else 0

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

    def add(self, other: Report) -> None:
        """Add the results of another run in the same environment."""
        self.comparisons.extend(other.comparisons)
        self.warnings.extend(each for each in other.warnings if each not in self.warnings)
        self.skipped_cases.extend(other.skipped_cases)
        self.diagnoses.update(other.diagnoses)
        self.collectives.extend(other.collectives)

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
            "collectives": [collectives.to_dict() for collectives in self.collectives],
            "diagnoses": [
                {"case": case, "dtype": dtype, "backend": backend, **diagnosis.to_dict()}
                for (case, dtype, backend), diagnosis in self.diagnoses.items()
            ],
        }


def flattened(values: Mapping[str, Any], prefix: str = "", depth: int = 6) -> dict[str, str]:
    """Nested settings under joined names, as text. Those of a trace come from a file, and may be anything."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        path = f"{prefix}{printable(str(name))}"
        if isinstance(value, Mapping) and value and depth:
            flat |= flattened(value, f"{path}.", depth - 1)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            flat[path] = printable(text)
    return flat
