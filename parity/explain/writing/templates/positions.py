"""Angles, buckets and rows of positions: JAX's on the device, and NumPy's on the host of TTNN."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from mha_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)
from parity.explain.writing.templates.names import *

if rope is not None:

    def frequencies(length: Array) -> Array:
        if rope.depends_on_length:
            """Return the angle of each pair of features per token, (B or 1, 1, 1, R/2)."""
        else:
            """Return the angle of each pair of features per token, (R/2,)."""
        if rope.section_frequencies != "shared":
            exponents = np.array(EXPONENTS, np.float32)
        else:
            exponents = np.arange(0, ROTARY_DIM, 2, dtype=np.float32) / np.float32(ROTARY_DIM)
        divisors = jnp.array(THETA ** exponents.astype(np.float64), jnp.float32)
        if isinstance(scaling, LinearScaling):
            return 1.0 / divisors / scaling.factor
        elif isinstance(scaling, ProportionalScaling):
            num_rotated = int(scaling.fraction * spec.head_dim // 2)
            is_rotated = jnp.arange(ROTARY_DIM // 2) < num_rotated
            return is_rotated / divisors / scaling.factor
        elif isinstance(scaling, Llama3Scaling):
            turns = scaling.original_length / (2 * math.pi * divisors)  # in the original context
            unscaled_share = jnp.clip((turns - low_turns) / (high_turns - low_turns), 0.0, 1.0)
            return (unscaled_share + (1.0 - unscaled_share) / scaling.factor) / divisors
        elif isinstance(scaling, YarnScaling):
            pairs = jnp.arange(ROTARY_DIM // 2)
            scaled_share = jnp.clip((pairs - RAMP_BEGIN) / (RAMP_END - RAMP_BEGIN), 0.0, 1.0)
            return (1.0 - scaled_share + scaled_share / scaling.factor) / divisors
        elif isinstance(scaling, DynamicScaling):
            added = length - scaling.original_length
            growth = scaling.factor * added / scaling.original_length + 1.0
            base = THETA * jnp.maximum(growth, 1.0) ** (ROTARY_DIM / (ROTARY_DIM - 2))
            return jnp.where(added > 0, 1.0 / base**exponents, 1.0 / divisors)
        elif isinstance(scaling, LongRopeScaling):
            short = jnp.array(SHORT_FACTORS, jnp.float32)
            long = jnp.array(LONG_FACTORS, jnp.float32)
            is_long = length > scaling.original_length
            return 1.0 / (jnp.where(is_long, long, short) * divisors)
        else:
            return 1.0 / divisors

    def longest(token_positions: Array) -> Array:
        """Return the tokens up to the last position of each sequence, (B or 1, 1, 1, 1)."""
        if rope.sections is not None and call.has_positions:
            token_positions = token_positions.max(axis=0)
        return token_positions.max(axis=-1)[:, None, None, None] + 1


if relative is not None and grid is None:

    def bucket_of(distances: Array) -> Array:
        """Return the bucket of each distance, key - query."""
        if relative.bidirectional:
            first = (distances > 0) * (NUM_BUCKETS // 2)
            away = jnp.abs(distances)
            last = NUM_BUCKETS // 2 - 1
            exact = NUM_BUCKETS // 4  # half of the buckets hold a single distance
        else:
            first = 0
            away = jnp.maximum(-distances, 0)
            last = NUM_BUCKETS - 1
            exact = NUM_BUCKETS // 2  # half of the buckets hold a single distance
        ratios = (jnp.maximum(away, exact) / exact).astype(jnp.float32)
        steps = jnp.log(ratios) / jnp.float32(math.log(MAX_DISTANCE / exact)) * (last + 1 - exact)
        shared = jnp.minimum(exact + steps.astype(jnp.int32), last)
        return first + jnp.where(away < exact, away, shared)


if products is not None:

    def row_of(distances: Array) -> Array:
        """Return the row of the vectors of each distance, key - query."""
        if products.num_exact is not None:
            away = jnp.abs(distances)
            farther = NUM_EXACT + jnp.searchsorted(jnp.array(STEPS), away, side="right")
            distances = jnp.sign(distances) * jnp.where(away <= NUM_EXACT, away, farther)
        return jnp.clip(distances, -NUM_BEFORE, NUM_AFTER) + NUM_BEFORE


if sinusoids is not None:

    def sinusoids_of(distances: Array) -> Array:
        """Return sines and cosines, in turn, of each distance, query - key."""
        exponents = jnp.arange(0, D_IN, 2) / D_IN
        angles = distances[:, None] / SINUSOID_THETA**exponents
        return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=2).reshape(len(distances), D_IN)
