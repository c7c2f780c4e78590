"""ALiBi: biases that are linear in the distance of query and key."""

import jax.numpy as jnp
from jaxtyping import Float, Int

from mha_jax.arrays import Array
from mha_jax.compiled import compiled


@compiled("slopes", "seq_len_q", "seq_len_k", "scores_dtype")
def alibi_bias(
    slopes: tuple[float, ...],
    seq_len_q: int,
    seq_len_k: int,
    q_offset: Int[Array, " #B"] | None = None,
    *,
    scores_dtype: jnp.dtype,
) -> Float[Array, "#B N T S"]:
    """Return -slope * distance for each query and key.

    Args:
        slopes: slope of each head, N.
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S.
        q_offset: position of the first query among the keys, for all sequences or each, (1,) or
            (B,); default: 0.
        scores_dtype: dtype of the scores and of the bias.

    Returns:
        Bias of the scores, (B or 1, N, T, S).

    Source: Train Short, Test Long, arXiv:2108.12409, section 3.
    """
    positions = jnp.arange(seq_len_q, dtype=jnp.int32)[None]
    if q_offset is not None:
        positions = q_offset[:, None] + positions
    distances = jnp.abs(
        positions[:, None, :, None] - jnp.arange(seq_len_k, dtype=jnp.int32)[None, None, None]
    )
    return -jnp.asarray(slopes, scores_dtype)[None, :, None, None] * distances.astype(scores_dtype)
