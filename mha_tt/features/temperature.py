"""Position-dependent temperature of queries."""

from __future__ import annotations

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import Temperature
from mha_spec.features.temperature import check_temperature
from mha_tt.arrays import as_dtype, at_least_float32
from mha_tt.checks import check_positions, check_tiles
from mha_tt.device import upload


def apply_temperature(
    x: Float[Tensor, "B N T H"], positions: Int[np.ndarray, "#B T"], temperature: Temperature
) -> Float[Tensor, "B N T H"]:
    """Multiply queries by 1 + scale * ln(1 + floor((position + first_position) / length)).

    Args:
        x: queries, split into heads, after RoPE; multiplied in at least float32, returned in their
            dtype.
        positions: position of each token in its sequence, from 0, (B or 1, T), on the host.
        temperature: length, scale and first position.

    Raises:
        TypeError: if x is not floating point, positions are not integers, or temperature is not a
            `Temperature`.
        ValueError: if the positions do not fit.

    Source: Scalable-Softmax, arXiv:2501.19399, in the form of Llama 4.
    """
    check_tiles("x", x)
    check_temperature(temperature)
    check_positions(positions, x.shape[0], x.shape[2], None)
    lengths = (positions + temperature.first_position) // temperature.length
    if 0 in (x.shape[0], x.shape[2]) or not lengths.any():  # all factors are 1
        return x
    factors = 1.0 + temperature.scale * np.log1p(lengths)
    factors = upload(factors[:, None, :, None], device=x.device(), dtype=ttnn.float32)
    return as_dtype(ttnn.multiply(at_least_float32(x), factors), x.dtype)
