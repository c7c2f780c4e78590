"""Array helpers."""

from __future__ import annotations

import ttnn
from jaxtyping import Float
from ttnn import Tensor


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x in at least float32."""
    return as_dtype(x, ttnn.float32)


def as_dtype(x: Float[Tensor, "..."], dtype: ttnn.DataType) -> Float[Tensor, "..."]:
    """Return x in a dtype, converted on the device if necessary."""
    if x.dtype == dtype:
        return x
    return ttnn.typecast(x, dtype)


def zero_where(x: Float[Tensor, "..."], where: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x with 0 where `where` is not 0."""
    return ttnn.where(as_dtype(where, x.dtype), 0.0, x)


def nan_where(x: Float[Tensor, "..."], where: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x with NaN where `where` is not 0."""
    return ttnn.where(as_dtype(where, x.dtype), float("nan"), x)
