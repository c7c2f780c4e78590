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


def is_traced(x: Any) -> bool:
    """Return whether an array has no values yet, because JAX is tracing."""
    kinds = {kind.__name__ for kind in type(x).__mro__}
    return "Tracer" in kinds


def outputs_in(result: Any) -> list[Any]:
    """Return the floating-point arrays in the result of a call, in order."""
    return [
        x
        for x in arrays_in(result)
        if any(kind in str(getattr(x, "dtype", "")) for kind in ("float", "complex"))
    ]


def same(before: Any, after: Any) -> bool:
    """Return whether two arrays of any framework agree up to rounding; NaN equals NaN."""
    if tuple(before.shape) != tuple(after.shape):
        return False
    x, y = (to_numpy(each).astype(np.float64) for each in (before, after))
    allowed = tolerance(x, str(before.dtype).split(".")[-1])
    with np.errstate(invalid="ignore"):
        return bool(np.all((x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) <= allowed)))


def copied(tree: Any) -> Any:
    """Copy the arguments of a call that must have no side effects.

    Raises:
        Exception: any error of an object that cannot be copied.
    """
    return with_leaves(tree, lambda _, x: _copied(x))


def _copied(x: Any) -> Any:
    if hasattr(type(x), "detach"):
        return x.detach().clone()
    if is_traced(x) or type(x).__module__.startswith("jax"):
        return x
    if type(x).__module__.split(".")[0] != "torch" and any(
        "flax.nnx" in kind.__module__ for kind in type(x).__mro__
    ):
        from flax import nnx

        return nnx.clone(x)
    return copy.deepcopy(x)
