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
from parity.measure.backends import jax as one_device
from parity.measure.core.case import Case
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference
from parity.measure.core.weights import Weights
from parity_lab.mesh.backend import MeshPort, MeshTrace, name_of_call, name_of_gradient, record_with
from parity_lab.mesh.hlo import collectives_in, counts_of
from parity_lab.mesh.plan import MeshPlan, advice_on_devices, why_not_divided

AXIS_TYPES = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}

DIMENSIONS_OF_RANK = {1: ("data",), 3: ("data", "sequence"), 4: ("data", "tensor")}
"""Mesh dimensions that divide the first axes of an array, by its number of axes: lengths (B,),
tokens (B, T, ·) and heads (B, N, T, ·). Others are replicated.
"""


def make_devices(count: int) -> None:
    """Create virtual CPU devices, before JAX has created any.

    Raises:
        RuntimeError: if JAX already has a different number of devices.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def check_devices(plan: MeshPlan) -> None:
    """Reject a mesh of more devices than there are."""
    count = jax.device_count()
    if plan.size > count:
        raise InputError(
            "mesh",
            "have no more devices than JAX",
            f"{plan} and {count}",
            hint=advice_on_devices(plan, "makes"),
        )


def why_skipped(case: Case, dtype: str, plan: MeshPlan) -> str | None:
    """Return why a case cannot run on a mesh, or None."""
    return why_not_divided(case, plan)


def record(reference: Reference, plan: MeshPlan) -> MeshTrace:
    """Run a problem on a mesh, with all stages gathered."""
    return record_with("jax", _JaxOnMesh(plan), reference)


class _JaxOnMesh(MeshPort):
    """Port of JAX with arrays on a mesh."""

    def __init__(self, plan: MeshPlan) -> None:
        super().__init__(one_device, plan)
        sizes = plan.shape
        self.mesh = jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            axis_types=(AXIS_TYPES[plan.axes],) * len(sizes),
            devices=jax.devices()[: plan.size],
        )

    @contextmanager
    def lock(self, dtype: str) -> Iterator[dict[str, Any]]:
        with super().lock(dtype) as numerics, jax.set_mesh(self.mesh):
            yield numerics

    def sharded(self, x: Any, *dimensions: str) -> Array:
        """Divide the first axes of an array over dimensions of the mesh that it has, and that
        divide them evenly.
        """
        divided: list[str | None] = []
        for dimension, size in zip(dimensions, np.shape(x), strict=False):
            is_divided = dimension in self.mesh.shape and size % self.mesh.shape[dimension] == 0
            divided.append(dimension if is_divided else None)
        return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec(*divided)))

    def from_numpy(self, x: np.ndarray) -> Array:
        return self.sharded(np.asarray(x), *DIMENSIONS_OF_RANK.get(np.ndim(x), ()))

    argument = from_numpy

    def filled(self, problem: Problem) -> _JaxModuleOnMesh:
        return _JaxModuleOnMesh(problem, self)

    def pull_back(
        self,
        path: str,
        filled: Any,
        spec: AttentionSpec,
        inputs: dict[str, Array],
        hidden: dict[str, Any],
    ) -> tuple[dict[str, np.ndarray], Weights]:
        if not spec.out_proj:
            # The output, and so its cotangent, is divided by heads.
            cotangent = self.sharded(hidden["cotangent"], "data", "sequence", "tensor")
            hidden = hidden | {"cotangent": cotangent}
        filled.program = name_of_gradient(path)
        return super().pull_back(path, filled, spec, inputs, hidden)


class _JaxModuleOnMesh(one_device.JaxModule):
    """Module with the weights of a problem, divided by heads.

    Each call compiles its program, and counts the collectives in it.

    Attributes:
        program: name of the next program to compile.
    """

    def __init__(self, problem: Problem, port: _JaxOnMesh) -> None:
        super().__init__(problem)
        self.program = ""
        self.counts, self.mesh = port.counts, port.mesh
        heads = "tensor" if "tensor" in self.mesh.shape else None
        tokens = "sequence" if "sequence" in self.mesh.shape else None
        for module in (self.module, self.in_blocks):
            parallel.shard(module, self.mesh, heads=heads, tokens=tokens)
        self.weights = nnx.to_pure_dict(nnx.state(self.module, nnx.Param))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        program = one_device.compiled(function, *arguments).lower(*arguments).compile()
        self.counts[self.program] = counts_of(collectives_in(program.as_text()))
        return program(*arguments)

    def outputs(self, query: Array, **inputs: Array | None) -> tuple[Array, dict[str, Array]]:
        # One program for each path, whereas on one device all paths are one program: their
        # collectives are counted separately.
        self.program = "forward"
        output, attn_weights = self.call(_with_weights, self.module, query, inputs)
        self.program = "fused.forward"
        fused = self.call(_without_weights, self.module, query, inputs)
        self.program = "blocks.forward"
        in_blocks = self.call(_without_weights, self.in_blocks, query, inputs)
        return attn_weights, {"module": output, "fused": fused, "blocks": in_blocks}

    def step(
        self, x: Array, cache: Any, new_lengths: Array | None, positions: Array | None
    ) -> tuple[dict[str, Array], Any]:
        divided_axes = {}
        if "data" in self.mesh.shape:
            divided_axes["batch"] = "data"
        if "tensor" in self.mesh.shape:
            divided_axes["heads"] = "tensor"
        cache = parallel.shard_cache(cache, self.mesh, **divided_axes)
        kind = name_of_call(x.shape[1])
        arguments = (x, cache, new_lengths, positions)
        self.program = f"blocks.{kind}"
        in_blocks, _ = self.call(one_device.call_cached, self.in_blocks, *arguments)
        self.program = f"fused.{kind}"
        output, grown = self.call(one_device.call_cached, self.module, *arguments)
        return {"module": output, "blocks": in_blocks}, grown


def _with_weights(_: Any, module: Any, query: Array, inputs: dict[str, Array | None]) -> Any:
    return module(query, **inputs, need_weights=True)


def _without_weights(_: Any, module: Any, query: Array, inputs: dict[str, Array | None]) -> Array:
    return module(query, **inputs)[0]
