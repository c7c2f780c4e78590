"""Compare the results of a call with and without a bug, up to rounding."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from parity.explain.conformance.examination import tolerance
from parity.explain.conformance.functional import arrays_in, with_leaves
from parity.measure.core.arrays import to_numpy


class Unfit(Exception):
    """A bug cannot be injected into this call, for a reason that only the call shows."""


def dtype_name(x: Any) -> str:
    """Return the dtype of an array of any framework, such as `float32`; empty if it has none."""
    return str(getattr(x, "dtype", "")).split(".")[-1]


def is_traced(x: Any) -> bool:
    """Return whether an array has no values yet, because JAX is tracing."""
    kinds = {kind.__name__ for kind in type(x).__mro__}
    return "Tracer" in kinds


def outputs_in(result: Any) -> list[Any]:
    """Return the floating-point arrays in the result of a call, in order."""
    outputs = []
    for x in arrays_in(result):
        if "float" in dtype_name(x) or "complex" in dtype_name(x):
            outputs.append(x)
    return outputs


def same(before: Any, after: Any) -> bool:
    """Return whether two arrays of any framework agree up to rounding; NaN equals NaN."""
    if tuple(before.shape) != tuple(after.shape):
        return False
    x = to_numpy(before).astype(np.float64)
    y = to_numpy(after).astype(np.float64)
    allowed = tolerance(x, dtype_name(before))
    with np.errstate(invalid="ignore"):
        are_equal = (x == y) | (np.isnan(x) & np.isnan(y))
        return bool(np.all(are_equal | (np.abs(x - y) <= allowed)))


def copied(tree: Any) -> Any:
    """Copy the arguments of a call that must have no side effects.

    Raises:
        Exception: any error of an object that cannot be copied.
    """
    return with_leaves(tree, _copied)


def _copied(_: tuple[Any, ...], x: Any) -> Any:
    """Copy a leaf of a tree."""
    if hasattr(type(x), "detach"):
        return x.detach().clone()
    if is_traced(x) or type(x).__module__.startswith("jax"):
        return x
    if _is_of_nnx(x):
        from flax import nnx

        return nnx.clone(x)
    return copy.deepcopy(x)


def _is_of_nnx(x: Any) -> bool:
    """Return whether an object is a module of Flax NNX, or a subclass of one."""
    if type(x).__module__.split(".")[0] == "torch":
        return False
    return any("flax.nnx" in kind.__module__ for kind in type(x).__mro__)
