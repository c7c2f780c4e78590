"""Learned relative position biases."""

from __future__ import annotations

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import GridBias, RelativeBias
from mha_tt.arrays import as_dtype
from mha_tt.device import upload_integers


def relative_position_bias(
    table: Float[Tensor, "..."],
    relative_bias: RelativeBias | GridBias,
    seq_len_q: int,
    seq_len_k: int,
    q_offset: Int[np.ndarray, " #B"] | None = None,
    *,
    scores_dtype: ttnn.DataType,
) -> Float[Tensor, "#B N T S"]:
    """Return the bias of each head, query and key from a table of buckets.

    Args:
        table: one number per head and bucket, (1, N, 1, num_buckets).
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
    positions = np.arange(seq_len_q)[None]
    if q_offset is not None:
        positions = np.asarray(q_offset)[:, None] + positions
    if isinstance(relative_bias, GridBias):
        # Padding may lie beyond the grid.
        positions = np.clip(positions, 0, relative_bias.num_tokens - 1)
        buckets = relative_bias.buckets()[positions, :seq_len_k]
    else:
        farthest = relative_bias.max_distance
        distances = np.clip(np.arange(seq_len_k) - positions[:, :, None], -farthest, farthest)
        buckets = relative_bias.buckets()[distances + farthest]
    buckets = buckets[:, None]  # (B or 1, 1, T, S)
    batch_size = len(buckets)
    num_heads = table.shape[1]
    index = np.broadcast_to(buckets, (batch_size, num_heads, seq_len_q, seq_len_k))
    rows = ttnn.repeat(as_dtype(table, scores_dtype), (batch_size, 1, seq_len_q, 1))
    return ttnn.gather(rows, 3, upload_integers(index, device=table.device(), is_index=True))
