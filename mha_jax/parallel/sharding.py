"""Arrays that lie on several devices, as their types say: no function of this package takes a mesh.

An axis of a mesh is automatic (XLA divides the work among its devices by itself), explicit (types say how arrays are
divided along it; the default of `jax.make_mesh`) or manual (inside `shard_map`, where arrays are a device's own part).
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

Function = TypeVar("Function", bound=Callable[..., Any])


def is_automatic(x: Array) -> bool:
    """Whether XLA divides the work on an array among devices by itself.

    It divides products, and what goes number by number; what is cut out of a divided axis, it gathers first.
    """
    mesh = jax.typeof(x).sharding.mesh
    return any(mesh.shape[name] > 1 for name in _mesh_axes(mesh, AxisType.Auto))


def is_explicit(x: Array) -> bool:
    """Whether the type of an array says how it is divided."""
    return bool(_mesh_axes(jax.typeof(x).sharding.mesh, AxisType.Explicit))


def is_on_one_device(x: Array) -> bool:
    """Return True if work on an array surely is whole on a device, and nobody checks over which devices it varies."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:  # a traced array may still be divided, by a `jax.jit` that is told how
        return jax.device_count() == 1 or not isinstance(x, Tracer)
    manual = _mesh_axes(mesh, AxisType.Manual)
    return len(manual) == len(mesh.axis_names) and not any(_varying_over(lax.axis_index(name)) for name in manual)


def _mesh_axes(mesh: AbstractMesh, kind: AxisType) -> tuple[str, ...]:
    return tuple(name for name, its_kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if its_kind == kind)


def spec_of(x: Array) -> PartitionSpec:
    """How the type of an array says that it is divided: an entry for each of its axes."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))


def specs_of(arrays: Any) -> Any:
    """The same of each array in a container, in the form of that."""
    return jax.tree.map(spec_of, arrays)


def head_sharding(query: Array) -> PartitionSpec:
    """How sums over keys are divided, (B, N, T, ·), if their queries are as their type says."""
    return PartitionSpec(*spec_of(query)[:3], None)


def placed(like: Array, spec: PartitionSpec) -> NamedSharding:
    """The placement by a spec on the mesh of an array."""
    return NamedSharding(jax.typeof(like).sharding.mesh, spec)


def reshard_like(x: Array, other: Array) -> Array:
    """x, (B, N, T, ·), divided as another array, to whose last axis it is to be joined."""
    return jax.sharding.reshard(x, placed(other, head_sharding(other))) if is_explicit(other) else x


def varying(tree: Any, axis: str) -> Any:
    """Arrays that may differ from device to device; the gradient of one that is the same on all is summed over them."""

    def vary(x: Array) -> Array:
        if axis in _varying_over(x):
            return x
        return lax.pcast(x, axis, to="varying") if hasattr(lax, "pcast") else getattr(lax, "pvary")(x, axis)  # noqa: B009

    return jax.tree.map(vary, tree)


def _varying_over(x: Array) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # before JAX 0.10


def broadcast_like(x: Array, other: Array) -> Array:
    """x, (B, 1, T, ·), for every head of another array, divided as that; its gradient is summed where it lies."""
    shape = (*other.shape[:3], x.shape[3])
    if not is_explicit(other):
        return jnp.broadcast_to(x, shape)
    return lax.broadcast_in_dim(x, shape, (0, 1, 2, 3), out_sharding=placed(other, head_sharding(other)))


def with_auto_axes(specs: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Decorate a function of arrays: where types say how these are divided, XLA divides its work by itself instead.

    Args:
        specs: of the first argument, how the results are divided, all alike or each.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            like = next(filter(is_explicit, jax.tree.leaves(args)), None)
            if like is None:
                return function(*args, **keywords)
            shardings = jax.tree.map(partial(placed, like), specs(args[0]))
            axes = _mesh_axes(jax.typeof(like).sharding.mesh, AxisType.Explicit)
            return jax.sharding.auto_axes(partial(function, **keywords), axes=axes, out_sharding=shardings)(*args)

        return call  # pyright: ignore[reportReturnType]

    return decorate
