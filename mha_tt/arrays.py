"""Array helpers."""

from __future__ import annotations

import ttnn
from jaxtyping import Float
from ttnn import Tensor


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x in float32, or unchanged if it is float64."""
    return as_dtype(x, ttnn.float32)


def as_dtype(x: Float[Tensor, "..."], dtype: ttnn.DataType) -> Float[Tensor, "..."]:
    """Return x in a dtype, converted on the device if necessary."""
    return x if x.dtype == dtype else ttnn.typecast(x, dtype)
