"""ALiBi: biases that are linear in the distance of query and key."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def alibi_bias(
    slopes: tuple[float, ...],
    seq_len_q: int,
    seq_len_k: int,
    q_offset: Int[np.ndarray, " #B"] | None = None,
    *,
    scores_dtype: type[np.floating],
) -> Float[np.ndarray, "#B N T S"]:
    """Return -slope * distance for each query and key.

    Args:
        slopes: slope of each head, N.
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S.
        q_offset: position of the first query among the keys, for all sequences or each, (1,) or
            (B,); default: 0.
        scores_dtype: dtype of the scores and of the bias.

    Returns:
        Bias of the scores, (B or 1, N, T, S), on the host.

    Source: Train Short, Test Long, arXiv:2108.12409, section 3.
    """
    positions = np.arange(seq_len_q)[None]
    if q_offset is not None:
        positions = np.asarray(q_offset)[:, None] + positions
    distances = np.abs(positions[:, None, :, None] - np.arange(seq_len_k))
    return -np.array(slopes, scores_dtype)[:, None, None] * distances.astype(scores_dtype)
