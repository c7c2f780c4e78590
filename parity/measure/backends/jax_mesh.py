"""JAX backend on a mesh: the same modules, divided by `mha_jax.parallel`, and counts of their
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from mha_jax import parallel
from mha_spec import AttentionSpec, InputError
from parity.measure.backends import jax as port
from parity.measure.backends.record import OnMesh, trace_on_mesh
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference, Trace
from parity.measure.core.weights import Weights
from parity.measure.sharding.hlo import collectives_in, counts_of
from parity.measure.sharding.mesh import MeshPlan, why_not_divided

KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


def make_devices(count: int) -> None:
    """Create virtual CPU devices, before JAX has created any.

    Raises:
        RuntimeError: if JAX already has another number of devices.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def check_devices(plan: MeshPlan) -> None:
    """Refuse a mesh of more devices than there are."""
    if plan.size > (count := jax.device_count()):
        raise InputError(
            "mesh",
            "have no more devices than JAX",
            f"{plan} and {count}",
            hint=f"--virtual-devices {plan.size} makes them",
        )


def why_skipped(case: Case, dtype: str, plan: MeshPlan) -> str | None:
    """Return why a case cannot run on a mesh, or None."""
    return why_not_divided(case, plan)


def record(reference: Reference, plan: MeshPlan) -> Trace:
    """Run a problem on a mesh, with all stages gathered."""
    return trace_on_mesh("jax", _JaxOnMesh(plan), reference)


class _JaxOnMesh(OnMesh):
    """Port of JAX with arrays on a mesh."""

    def __init__(self, plan: MeshPlan) -> None:
        super().__init__(port, plan)
        shape = plan.shape
        kinds = (KINDS[plan.axes],) * len(shape)
        devices = jax.devices()[: plan.size]
        self.mesh = jax.make_mesh(
            tuple(shape.values()), tuple(shape), axis_types=kinds, devices=devices
        )

    @contextmanager
    def lock(self, dtype: str) -> Iterator[dict[str, Any]]:
        with super().lock(dtype) as numerics, jax.set_mesh(self.mesh):
            yield numerics | {"axes": self.plan.axes}

    def placed(self, x: Any, *axes: str | None) -> Array:
        """Shard an array along existing mesh dimensions that divide its axes evenly."""
        fits = [
            axis if axis in self.mesh.shape and size % self.mesh.shape[axis] == 0 else None
            for axis, size in zip(axes, np.shape(x), strict=False)
        ]
        return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec(*fits)))

    def from_numpy(self, x: np.ndarray) -> Array:
        """Shard lengths (B,) by sequences, (B, T, ·) also by tokens, and (B, N, T, ·) by heads."""
        axes = {1: ("data",), 3: ("data", "sequence"), 4: ("data", "tensor")}.get(np.ndim(x), ())
        return self.placed(np.asarray(x), *axes)

    beside = from_numpy

    def filled(self, problem: Problem) -> _JaxModuleOnMesh:
        return _JaxModuleOnMesh(problem, self)

    def pull_back(
        self,
        path: str,
        filled: _JaxModuleOnMesh,
        spec: AttentionSpec,
        inputs: dict[str, Array],
        hidden: dict[str, Any],
    ) -> tuple[dict[str, np.ndarray], Weights]:
        if not spec.out_proj:  # the output is divided by heads
            hidden = hidden | {
                "cotangent": self.placed(hidden["cotangent"], "data", "sequence", "tensor")
            }
        filled.program = f"{path}.gradient".removeprefix(".")
        return port.pull_back(path, filled, spec, inputs, hidden)


class _JaxModuleOnMesh(port.JaxModule):
    """Module with the weights of a problem, divided by heads; collectives of each program are
    counted.
    """

    def __init__(self, problem: Problem, on_mesh: _JaxOnMesh) -> None:
        super().__init__(problem)
        self.program, self.sent, self.mesh = "", on_mesh.sent, on_mesh.mesh
        mesh = on_mesh.mesh
        heads, tokens = (name if name in mesh.shape else None for name in ("tensor", "sequence"))
        for module in (self.module, self.in_blocks):
            parallel.shard(module, mesh, heads=heads, tokens=tokens)
        self.weights = nnx.to_pure_dict(nnx.state(self.module, nnx.Param))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        program = port.compiled(function, *arguments).lower(*arguments).compile()
        self.sent[self.program] = counts_of(collectives_in(program.as_text()))
        return program(*arguments)

    def outputs(self, query: Array, **inputs: Array | None) -> tuple[Array, dict[str, Array]]:
        self.program = "forward"
        output, attn_weights = self.call(_with_weights, self.module, query, inputs)
        outputs = {"module": output}
        for path, module in (("fused", self.module), ("blocks", self.in_blocks)):
            self.program = f"{path}.forward"
            outputs[path] = self.call(_without_weights, module, query, inputs)
        return attn_weights, outputs

    def step(
        self, x: Array, cache: Any, new_lengths: Array | None, positions: Array | None
    ) -> tuple[dict[str, Array], Any]:
        axes = {
            name: axis
            for name, axis in (("batch", "data"), ("heads", "tensor"))
            if axis in self.mesh.shape
        }
        cache = parallel.shard_cache(cache, self.mesh, **axes)
        kind = "step" if x.shape[1] == 1 else "prompt"
        self.program = f"blocks.{kind}"
        in_blocks, _ = self.call(port.call_cached, self.in_blocks, x, cache, new_lengths, positions)
        self.program = f"fused.{kind}"
        output, grown = self.call(port.call_cached, self.module, x, cache, new_lengths, positions)
        return {"module": output, "blocks": in_blocks}, grown


def _with_weights(_: Any, module: Any, query: Array, inputs: dict[str, Array | None]) -> Any:
    return module(query, **inputs, need_weights=True)


def _without_weights(_: Any, module: Any, query: Array, inputs: dict[str, Array | None]) -> Array:
    return module(query, **inputs)[0]
