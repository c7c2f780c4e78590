"""Buckets of a relative bias on a grid, the same in each framework."""

import jax.numpy as jnp
from jax import Array

from parity.explain.writing.templates.names import *

if grid is not None:

    def bucket_of(query_positions: Array, key_positions: Array) -> Array:
        """Return the bucket of each query and key, whose positions count the grid row by row."""
        if grid.class_token:
            query_positions = query_positions - 1  # the class token is at -1
            key_positions = key_positions - 1
        rows = query_positions // GRID_WIDTH - key_positions // GRID_WIDTH + GRID_HEIGHT - 1
        columns = query_positions % GRID_WIDTH - key_positions % GRID_WIDTH + GRID_WIDTH - 1
        buckets = rows * (2 * GRID_WIDTH - 1) + columns
        if grid.class_token:
            class_buckets = jnp.where(key_positions < 0, NUM_BUCKETS - 1, NUM_BUCKETS - 3)
            buckets = jnp.where(key_positions < 0, NUM_BUCKETS - 2, buckets)
            buckets = jnp.where(query_positions < 0, class_buckets, buckets)
        if call.cache is not None:
            buckets = jnp.clip(buckets, 0, NUM_BUCKETS - 1)  # for padding
        return buckets
