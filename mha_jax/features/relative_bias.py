"""Learned relative position biases."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from mha_jax.arrays import Array
from mha_jax.compiled import compiled
from mha_spec import GridBias, RelativeBias


@compiled("relative_bias", "seq_len_q", "seq_len_k", "scores_dtype")
def relative_position_bias(
    table: Float[Array, "..."],
    relative_bias: RelativeBias | GridBias,
    seq_len_q: int,
    seq_len_k: int,
    q_offset: Int[Array, " #B"] | None = None,
    *,
    scores_dtype: jnp.dtype,
) -> Float[Array, "#B N T S"]:
    """Return the bias of each head, query and key from a table of buckets.

    Args:
        table: one number per bucket and head, (num_buckets, N).
        relative_bias: buckets of distances or of grid offsets.
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S.
        q_offset: position of the first query among the keys, for all sequences or each, (1,) or
            (B,); default: 0.
        scores_dtype: dtype of the scores and of the bias.

    Returns:
        Bias of the scores, (B or 1, N, T, S).

    Source: Exploring the Limits of Transfer Learning, arXiv:1910.10683, section 2.1; on a grid:
    Swin Transformer, arXiv:2103.14030, section 3.2.
    """
    if isinstance(relative_bias, GridBias):
        positions = jnp.arange(seq_len_q, dtype=jnp.int32)[None]
        if q_offset is not None:
            positions = positions + q_offset[:, None]
        # Padding, and tokens without room in a cache, may lie beyond the grid.
        positions = jnp.clip(positions, 0, relative_bias.num_tokens - 1)
        buckets = jnp.asarray(relative_bias.buckets()[:, :seq_len_k], jnp.int32)[positions]
        return jnp.moveaxis(table.astype(scores_dtype)[buckets], 3, 1)
    # From -T, not from 1 - T: without queries there is still a row to look up.
    distances = jnp.arange(-seq_len_q, seq_len_k, dtype=jnp.int32)[None]
    if q_offset is not None:
        distances = distances - q_offset[:, None]
    farthest = relative_bias.max_distance
    buckets = jnp.asarray(relative_bias.buckets(), jnp.int32)
    buckets = buckets[jnp.clip(distances, -farthest, farthest) + farthest]
    by_distance = table.astype(scores_dtype)[buckets].swapaxes(1, 2)  # (B or 1, N, T + S)
    # Each row is the previous one shifted by one key, so only T + S values per head are looked up.
    # Row i begins at the distance -i, which has the index T - i.
    firsts = seq_len_q - jnp.arange(seq_len_q, dtype=jnp.int32)
    return jax.vmap(
        lambda first: lax.dynamic_slice_in_dim(by_distance, first, seq_len_k, axis=2), out_axes=2
    )(firsts)
