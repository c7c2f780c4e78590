"""Interface of a backend that runs cases on a mesh, and what its modules share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.measure.backends import BACKENDS, why_missing
from parity.measure.backends.port import FilledModule, Shapes, StagePort
from parity.measure.backends.record import trace_of
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference, Trace
from parity.measure.core.weights import Weights
from parity_lab.mesh.collectives import Counts
from parity_lab.mesh.plan import MeshPlan

BACKENDS_ON_MESH = ("jax", "torch", "tt")
"""Backends that run on a mesh: each has a module of this package."""


class MeshTrace(NamedTuple):
    """Stages of a case on a mesh, gathered, and the collectives of its programs.

    Attributes:
        trace: stages.
        counts: number of collectives by kind, by program.
    """

    trace: Trace
    counts: dict[str, Counts]


class MeshBackend(Protocol):
    """Module that runs cases on a mesh of devices: plain functions."""

    def make_devices(self, count: int) -> None:
        """Create virtual devices, before there are any."""
        ...

    def check_devices(self, plan: MeshPlan) -> None:
        """Reject a mesh of more devices than there are."""
        ...

    def why_skipped(self, case: Case, dtype: str, plan: MeshPlan) -> str | None:
        """Return why a case cannot run on the mesh in a dtype, or None."""
        ...

    def record(self, reference: Reference, plan: MeshPlan) -> MeshTrace:
        """Run a problem on the mesh, with gathered stages, and count its collectives."""
        ...


def load_mesh_backend(name: str) -> MeshBackend:
    """Import the module that runs cases of a backend on a mesh of devices.

    Raises:
        ValueError: if no backend has this name, or it supports only one device.
        ModuleNotFoundError: if it needs a package that is not installed.
    """
    reason = why_missing(name)
    if reason is not None:
        raise ModuleNotFoundError(reason)
    if name not in BACKENDS_ON_MESH:
        raise InputError("mesh", "be of a backend that runs on several devices", backend=name)
    return cast("MeshBackend", importlib.import_module(f"parity_lab.mesh.{name}"))


def can_make_devices(name: str) -> bool:
    """Return whether a backend can make virtual devices of the CPU."""
    return name in BACKENDS_ON_MESH and not BACKENDS[name].has_own_device


class MeshPort:
    """Port for the driver of a case, on a mesh.

    Here everything is as on one device; a subclass replaces what its mesh changes.

    Attributes:
        plan: mesh.
        counts: number of collectives by kind, by program; filled while a case runs.
    """

    def __init__(self, port: Any, plan: MeshPlan, shapes: type[Shapes] | None = None) -> None:
        self.port, self.plan = port, plan
        self.counts: dict[str, Counts] = {}
        self.SIBLING = port.SIBLING
        self.SHAPES: type[Shapes] = shapes if shapes is not None else port.SHAPES
        self.GRADIENT_PATHS: tuple[str, ...] = port.GRADIENT_PATHS

    def lock(self, dtype: str) -> AbstractContextManager[dict[str, Any]]:
        """Fix and report the settings that affect results."""
        return self.port.lock(dtype)

    def from_numpy(self, x: np.ndarray) -> Any:
        """Return an array of the framework on the mesh."""
        return self.port.from_numpy(x)

    def to_numpy(self, x: Any) -> np.ndarray:
        """Return an array gathered from the mesh."""
        return self.port.to_numpy(x)

    def argument(self, x: np.ndarray) -> Any:
        """Return an argument other than inputs: a mask, a bias, positions or lengths."""
        return self.port.argument(x)

    def whole_argument(self, x: np.ndarray) -> Any:
        """Return the whole argument, if `argument` returns the part of a process."""
        return self.port.whole_argument(x)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with the implementation and arguments."""
        return self.port.call(function, *arguments)

    def filled(self, problem: Problem) -> Any:
        """Return the module with the weights of a problem, divided over the mesh."""
        raise NotImplementedError

    def pull_back(
        self,
        path: str,
        filled: FilledModule,
        spec: AttentionSpec,
        inputs: dict[str, Any],
        hidden: dict[str, Any],
    ) -> tuple[dict[str, np.ndarray], Weights]:
        """Return gradients of the inputs and canonical weights, for the cotangent in `hidden`."""
        return self.port.pull_back(path, filled, spec, inputs, hidden)


def name_of_gradient(path: str) -> str:
    """Return the name of a path's gradient among programs; the plain path has none of its own."""
    return f"{path}.gradient" if path else "gradient"


def name_of_call(num_tokens: int) -> str:
    """Return the name of a call with a cache among programs."""
    return "step" if num_tokens == 1 else "prompt"


def record_with(backend: str, port: MeshPort, reference: Reference) -> MeshTrace:
    """Run a problem with the port of a backend to a mesh."""
    trace = trace_of(backend, cast("StagePort", port), reference)
    return MeshTrace(trace, port.counts)
