"""Position-dependent temperature of queries."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_spec import Temperature
from mha_spec.features.temperature import check_temperature
from mha_torch.arrays import at_least_float32
from mha_torch.checks import check_positions


def apply_temperature(
    x: Float[Tensor, "B N T H"], positions: Int[Tensor, "#B T"], temperature: Temperature
) -> Float[Tensor, "B N T H"]:
    """Multiply queries by 1 + scale * ln(1 + floor((position + first_position) / length)).

    Args:
        x: queries, split into heads, after RoPE; multiplied in at least float32, returned in their
            dtype.
        positions: position of each token in its sequence, from 0, (B or 1, T).
        temperature: length, scale and first position.

    Raises:
        TypeError: if x is not floating point, positions are not integers, or temperature is not a
            `Temperature`.
        ValueError: if the positions do not fit.

    Source: Scalable-Softmax, arXiv:2501.19399, in the form of Llama 4.
    """
    check_temperature(temperature)
    check_positions(positions, x.shape[0], x.shape[2], None)
    wide = at_least_float32(x)
    lengths = (positions + temperature.first_position) // temperature.length
    factors = 1.0 + temperature.scale * torch.log1p(lengths.to(wide.dtype))
    return (wide * factors[:, None, :, None]).to(x.dtype)
