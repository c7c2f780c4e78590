"""Small functions of arrays that the others share."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def at_least_float32(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x in the dtype of sums: float64 stays, anything narrower becomes float32."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)
