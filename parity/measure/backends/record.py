"""Running of problems on backends, recorded as traces."""

from __future__ import annotations

from dataclasses import replace

from parity.measure.backends import BACKENDS, driver, load_backend
from parity.measure.backends.port import StagePort
from parity.measure.core.problem import Problem
from parity.measure.core.stages import TUTORIAL, run_steps
from parity.measure.core.trace import Reference, Trace


def record(backend: str, reference: Reference, problem_with_bug: Problem | None = None) -> Trace:
    """Run a problem on a backend, each stage twice: from its own values, and from the reference's.

    Args:
        backend: name of the backend.
        reference: reference of the problem.
        problem_with_bug: problem for the backend, if not the reference's.

    Raises:
        ModuleNotFoundError: if the backend needs a package that is not installed.
    """
    port = load_backend(backend)
    problem = problem_with_bug or reference.problem
    with port.replayed(problem) as replay:
        trace = trace_of(backend, port, reference, problem)
    if replay is not None and replay.differs:
        # Once more, now computed.
        trace = trace_of(backend, port, reference, problem)
        trace.numerics["not_as_recorded"] = replay.differs
    elif replay is not None:
        trace.numerics["values"] = f"a recording made on {replay.made_on}"
        trace.numerics["arithmetic"] = "tensix"
    if not problem.case.is_plain:
        return trace
    # The tutorial runs last and by itself, because recordings of a device do not have it.
    with port.lock(problem.dtype):
        outputs = driver.outputs_of_tutorial(port, problem)
    return replace(
        trace, accumulated={**trace.accumulated, **outputs}, paths=(*trace.paths, TUTORIAL)
    )


def trace_of(
    backend: str, port: StagePort, reference: Reference, problem: Problem | None = None
) -> Trace:
    """Run a problem with the port of a backend, but not its tutorial.

    Args:
        backend: name of the backend.
        port: its port, on one device or on a mesh.
        reference: reference of the problem.
        problem: problem for the backend, if not the reference's.
    """
    if problem is None:
        problem = reference.problem
    with_gradients = reference.with_gradients and bool(port.GRADIENT_PATHS)
    with port.lock(reference.problem.dtype) as numerics:
        steps = driver.steps(port, problem)
        accumulated = run_steps(steps)
        if with_gradients:
            accumulated |= driver.gradients(port, problem)
        local = run_steps(steps, reference.rounded)
    environment = {"backends": {backend: {"numerics": numerics}}}
    # The trace is of the reference's problem: a bug in the backend's is what it must show.
    return Trace(
        reference.problem,
        backend,
        accumulated,
        local,
        BACKENDS[backend].paths,
        environment,
        with_gradients,
    )
