"""Helpers for sharded arrays. Sharding comes from their types: no function of this package has a
mesh argument.

A mesh axis is automatic (XLA partitions the work by itself), explicit (types contain the sharding;
the default of `jax.make_mesh`) or manual (inside `shard_map`, where arrays are local parts).
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mha_jax.arrays import Array
from mha_jax.masks import Mask
from mha_spec import InputError

Function = TypeVar("Function", bound=Callable[..., Any])


def is_automatic(x: Array) -> bool:
    """Return whether XLA partitions the work on an array by itself.

    It partitions products and elementwise operations, but gathers an axis before slicing it.
    """
    mesh = jax.typeof(x).sharding.mesh
    return any(mesh.shape[name] > 1 for name in _mesh_axes(mesh, AxisType.Auto))


def is_explicit(x: Array) -> bool:
    """Return whether the type of an array contains its sharding."""
    return bool(_mesh_axes(jax.typeof(x).sharding.mesh, AxisType.Explicit))


def is_on_one_device(x: Array) -> bool:
    """Return True if work on an array certainly stays on one device, without checks of varying
    axes.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:  # `jax.jit` may still be given a sharding of a traced array
        return jax.device_count() == 1 or not isinstance(x, Tracer)
    manual = _mesh_axes(mesh, AxisType.Manual)
    return len(manual) == len(mesh.axis_names) and not any(
        _varying_over(lax.axis_index(name)) for name in manual
    )


def _mesh_axes(mesh: AbstractMesh, kind: AxisType) -> tuple[str, ...]:
    return tuple(
        name
        for name, its_kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if its_kind == kind
    )


def spec_of(x: Array) -> PartitionSpec:
    """Return the partition of an array from its type: an entry for each of its axes."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))


def specs_of(arrays: Any) -> Any:
    """Return the partitions of all arrays in a container."""
    return jax.tree.map(spec_of, arrays)


def head_sharding(query: Array) -> PartitionSpec:
    """Return the sharding of sums over keys, (B, N, T, ·), from the type of their queries."""
    return PartitionSpec(*spec_of(query)[:3], None)


def sharding_on_mesh_of(like: Array, spec: PartitionSpec) -> NamedSharding:
    """Return the sharding of a partition on the mesh of an array."""
    return NamedSharding(jax.typeof(like).sharding.mesh, spec)


def reshard_like(x: Array, other: Array) -> Array:
    """Shard x, (B, N, T, ·), like another array, to concatenate both along the last axis."""
    if is_explicit(other):
        return jax.sharding.reshard(x, sharding_on_mesh_of(other, head_sharding(other)))
    return x


def varying(tree: Any, axis: str) -> Any:
    """Mark arrays as varying over the devices of an axis. If an array is equal on all of them, its
    gradient is then summed over them.
    """

    def vary(x: Array) -> Array:
        if axis in _varying_over(x):
            return x
        if hasattr(lax, "pcast"):
            return lax.pcast(x, axis, to="varying")
        return lax.pvary(x, axis)  # pyright: ignore[reportAttributeAccessIssue]

    return jax.tree.map(vary, tree)


def _varying_over(x: Array) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # before JAX 0.10


def broadcast_like(x: Array, other: Array) -> Array:
    """Broadcast x, (B, 1, T, ·), to the heads of another array, sharded like it; its gradient is
    summed locally.
    """
    shape = (*other.shape[:3], x.shape[3])
    if not is_explicit(other):
        return jnp.broadcast_to(x, shape)
    return lax.broadcast_in_dim(
        x, shape, (0, 1, 2, 3), out_sharding=sharding_on_mesh_of(other, head_sharding(other))
    )


def with_auto_axes(specs: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Decorate a function of arrays to run with automatic instead of explicit axes.

    Args:
        specs: maps the first argument to the partitions of the results, one for all or one each.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            like = next(filter(is_explicit, jax.tree.leaves(args)), None)
            if like is None:
                return function(*args, **keywords)
            shardings = jax.tree.map(partial(sharding_on_mesh_of, like), specs(args[0]))
            axes = _mesh_axes(jax.typeof(like).sharding.mesh, AxisType.Explicit)
            return jax.sharding.auto_axes(
                partial(function, **keywords), axes=axes, out_sharding=shardings
            )(*args)

        return call  # pyright: ignore[reportReturnType]

    return decorate


def token_axis(query: Array, key: Array, mask: Mask, axis: Any = None) -> str | None:
    """Return the mesh dimension that tokens, or cache slots, are divided along, or None.

    Args:
        axis: the dimension, for queries whose type does not contain their sharding.

    Raises:
        ValueError: if the mesh of the queries has no such dimension, tokens do not divide evenly,
            or there are several dimensions.
    """
    mesh = jax.typeof(query).sharding.mesh
    if is_explicit(query):
        # With a cache the keys are divided: queries are few.
        partition: Any = spec_of(query)[2] if mask.q_offset is None else spec_of(key)[2]
        if isinstance(partition, tuple) and len(partition) == 1:
            axis = partition[0]
        else:
            axis = partition
    if axis is None:
        return None
    if axis not in mesh.axis_names:
        raise InputError(
            "tokens",
            "be divided along one dimension of the mesh that queries lie on",
            {"axis": axis, "mesh.axis_names": mesh.axis_names},
        )
    size = mesh.shape[axis]
    is_local = is_manual(mesh, axis)
    divided = {"keys": key.shape[2]}
    if mask.q_offset is None:
        divided["queries"] = query.shape[2]
    for name, count in divided.items():
        if count % size and not is_local:
            raise InputError(
                name, f"be a multiple of the devices along {axis}", f"{count} and {size}"
            )
    if size > 1:
        return axis
    return None


def is_manual(mesh: Any, axis: Any) -> bool:
    """Return whether a dimension of a mesh is manual: arrays are then local parts."""
    return mesh.axis_types[mesh.axis_names.index(axis)] == AxisType.Manual
