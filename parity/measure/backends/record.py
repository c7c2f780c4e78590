"""Running of problems on backends, recorded as traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from parity.measure.backends import BACKENDS, driver, load_backend
from parity.measure.backends.port import Port
from parity.measure.core.problem import Problem
from parity.measure.core.stages import TUTORIAL, run_steps
from parity.measure.core.trace import Reference, Trace
from parity.measure.sharding.mesh import Counts, MeshPlan


def record(backend: str, reference: Reference, given: Problem | None = None) -> Trace:
    """Run a problem on a backend, each stage twice: from its own values, and from the reference's.

    Args:
        backend: name of the backend.
        reference: reference of the problem.
        given: problem for the backend, if not the reference's: one with a bug in it.

    Raises:
        ModuleNotFoundError: if the backend needs a package that is not installed.
    """
    module, problem = load_backend(backend), given or reference.problem
    with module.replayed(problem) as replay:
        trace = trace_of(backend, module, reference, given)
    if replay is not None and replay.differs:
        trace = trace_of(backend, module, reference, given)
        trace.numerics["not_as_recorded"] = replay.differs
    elif replay is not None:
        trace.numerics.update(values=f"a recording made on {replay.made_on}", arithmetic="tensix")
    # The tutorial runs last and by itself: recordings of a device do not have it.
    if not problem.case.is_plain:
        return trace
    with module.lock(problem.dtype):
        outputs = driver.outputs_of_tutorial(module, problem)
    return replace(
        trace, accumulated={**trace.accumulated, **outputs}, paths=(*trace.paths, TUTORIAL)
    )


class OnMesh:
    """Port of a backend on a mesh; falls back to the port to one device.

    Attributes:
        plan: mesh.
        sent: collectives by program.
    """

    def __init__(self, port: Any, plan: MeshPlan) -> None:
        self._port, self.plan, self.sent = port, plan, dict[str, Counts]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    @contextmanager
    def lock(self, dtype: str) -> Iterator[dict[str, Any]]:
        """Fix and report the settings that affect results, including the mesh."""
        with self._port.lock(dtype) as numerics:
            yield numerics | {"mesh": str(self.plan)}


def trace_on_mesh(backend: str, on_mesh: OnMesh, reference: Reference) -> Trace:
    """Run a problem on a mesh, with all stages gathered."""
    return replace(trace_of(backend, cast(Port, on_mesh), reference), collectives=on_mesh.sent)


def trace_of(
    backend: str, module: Port, reference: Reference, given: Problem | None = None
) -> Trace:
    """Run a problem with a backend's module but not its tutorial, see `record`."""
    problem = reference.problem
    with_gradients = reference.with_gradients and bool(module.GRADIENT_PATHS)
    with module.lock(problem.dtype) as numerics:
        steps = driver.steps(module, given or problem)
        accumulated = run_steps(steps)
        if with_gradients:
            accumulated |= driver.gradients(module, given or problem)
        local = run_steps(steps, reference.rounded)
    where = {"backends": {backend: {"numerics": numerics}}}
    return Trace(
        problem, backend, accumulated, local, BACKENDS[backend].paths, where, with_gradients
    )
