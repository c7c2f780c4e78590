"""Cases on meshes -> report: gathered stages are compared with the reference, and collectives of
programs with the necessary ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mha_spec import InputError
from parity.measure.backends import load_backend
from parity.measure.backends.numerics import environment
from parity.measure.core.case import DTYPES, Case
from parity.measure.core.compare import Comparison
from parity.measure.core.problem import make_problem
from parity.measure.core.trace import Reference, Trace, compare_trace
from parity.measure.text import some_of
from parity.use.running.report import Report, SkippedCase
from parity_lab.mesh.backend import MeshTrace, load_mesh_backend
from parity_lab.mesh.collectives import Collectives, collectives_of
from parity_lab.mesh.plan import MeshPlan


@dataclass(frozen=True)
class MeshReport(Report):
    """The results of a run on a mesh.

    Attributes:
        collectives: collectives of each program.
    """

    collectives: list[Collectives] = field(default_factory=list)

    @property
    def needless(self) -> list[Collectives]:
        """The programs whose devices send more than they need."""
        return [collectives for collectives in self.collectives if not collectives.passed]

    @property
    def status(self) -> int:
        """The exit status: the status of the stages, or 1 if a program sent too much."""
        return 1 if self.needless else super().status

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        collectives = [each.to_dict() for each in self.collectives]
        return {**super().to_dict(), "collectives": collectives}


def run_on_mesh(
    cases: Sequence[Case],
    backends: Sequence[str],
    plan: MeshPlan,
    dtypes: Sequence[str] = ("float32",),
    *,
    with_gradients: bool = False,
    on_case: Callable[[str, str, str], None] = lambda case, dtype, backend: None,
) -> MeshReport:
    """Run cases on a mesh, and compare every gathered stage with the float64 reference.

    Args:
        cases: those that the mesh cannot divide are skipped.
        backends: names.
        plan: mesh.
        dtypes: names of floating-point dtypes; cases with one of their own run only in that.
        with_gradients: also compare gradients, for cases and backends that have them.
        on_case: called with the case, the dtype and the backend before each case runs.

    Returns:
        The report. A backend that raises an error in a case fails that case.

    Raises:
        ModuleNotFoundError: if a backend cannot run here.
        ValueError: if a backend or dtype does not exist, a backend has no such mesh, or no case can
            run.
    """
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise InputError("dtype", f"be one of {', '.join(DTYPES)}", dtype=dtype)
    for name in backends:
        load_mesh_backend(name).check_devices(plan)
    comparisons: list[Comparison] = []
    skipped: list[SkippedCase] = []
    collectives: list[Collectives] = []
    for case in cases:
        own_dtypes = [case.dtype] if case.dtype else dtypes
        for dtype in own_dtypes:
            problem = make_problem(case, dtype)
            reference = Reference(problem, with_gradients and case.has_gradients)
            for name in backends:
                on_case(case.name, dtype, name)
                reason = _why_skipped(name, case, dtype, plan)
                if reason is not None:
                    skipped.append(SkippedCase(case.name, dtype, name, reason))
                    continue
                trace, counts = _attempt(name, reference, plan)
                comparisons += compare_trace(trace, reference)
                collectives += collectives_of(case, dtype, name, plan, counts)
                if reference.with_gradients and not (trace.with_gradients or trace.error):
                    reason = f"{name} has no gradients"
                    skipped.append(SkippedCase(case.name, dtype, name, reason, "gradients"))
    if not comparisons:
        reasons = dict.fromkeys(each.reason for each in skipped)
        raise InputError("mesh", "divide one of the cases", f"{plan}: {some_of(reasons)}")
    where = {**environment(backends), "mesh": str(plan), "axes": plan.axes}
    return MeshReport(comparisons, {}, where, skipped_cases=skipped, collectives=collectives)


def _why_skipped(backend: str, case: Case, dtype: str, plan: MeshPlan) -> str | None:
    """Return why a backend cannot run a case in a dtype on the mesh, or None."""
    reason = load_backend(backend).why_skipped(case, dtype)
    if reason is not None:
        return reason
    return load_mesh_backend(backend).why_skipped(case, dtype, plan)


def _attempt(backend: str, reference: Reference, plan: MeshPlan) -> MeshTrace:
    """Run a case; an error of the backend becomes a trace without stages, which fails."""
    try:
        return load_mesh_backend(backend).record(reference, plan)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        return MeshTrace(Trace(reference.problem, backend, {}, {}, error=message), {})
