"""Whether a mistake changed what a call gave: outputs that are equal within rounding were not changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from parity.conformance.examination import tolerance


class Unfit(Exception):
    """A mistake cannot be planted in this call, for a reason that only the call shows."""


def is_traced(x: Any) -> bool:
    """Whether an array has no values yet, because JAX traces."""
    kinds = {kind.__name__ for kind in type(x).__mro__}
    return "Tracer" in kinds


def arrays_in(result: Any) -> Iterator[Any]:
    """The arrays of floating-point numbers in what a call gave, in order."""
    if isinstance(result, (tuple, list)):
        for each in result:
            yield from arrays_in(each)
    elif isinstance(result, dict):
        yield from arrays_in(list(result.values()))
    elif hasattr(result, "shape") and any(kind in str(getattr(result, "dtype", "")) for kind in ("float", "complex")):
        yield result


def same(before: Any, after: Any) -> bool:
    """Whether two arrays of any framework are equal within rounding; NaN is equal to NaN."""
    if tuple(before.shape) != tuple(after.shape):
        return False
    x, y = (_numpy(each) for each in (before, after))
    if not x.size:
        return True
    allowed = tolerance(x, str(before.dtype).split(".")[-1])
    with np.errstate(invalid="ignore"):
        return bool(np.all((x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) <= allowed)))


def _numpy(x: Any) -> np.ndarray:
    x = x.detach().cpu().double().numpy() if hasattr(x, "detach") else np.asarray(x)
    return x.astype(np.float64)


def copied(x: Any) -> Any:
    """A copy of what a call was given, for a call beside it that must leave nothing behind.

    Raises:
        Exception: whatever something raises that cannot be copied.
    """
    import copy

    if type(x) in (tuple, list):
        return type(x)(copied(each) for each in x)
    if type(x) is dict:
        return {name: copied(each) for name, each in x.items()}
    if hasattr(type(x), "detach"):
        return x.detach().clone()
    if is_traced(x) or type(x).__module__.startswith("jax"):
        return x
    if type(x).__module__.split(".")[0] != "torch" and any("flax.nnx" in kind.__module__ for kind in type(x).__mro__):
        from flax import nnx

        return nnx.clone(x)
    return copy.deepcopy(x)
