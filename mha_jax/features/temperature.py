"""Position-dependent temperature of queries."""

import jax.numpy as jnp
from jaxtyping import Float, Int

from mha_jax.arrays import Array, at_least_float32
from mha_jax.checks import check_positions
from mha_spec import Temperature
from mha_spec.features.temperature import check_temperature


def apply_temperature(
    x: Float[Array, "B N T H"], positions: Int[Array, "#B T"], temperature: Temperature
) -> Float[Array, "B N T H"]:
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
    factors = 1.0 + temperature.scale * jnp.log1p(lengths.astype(wide.dtype))
    return (wide * factors[:, None, :, None]).astype(x.dtype)
