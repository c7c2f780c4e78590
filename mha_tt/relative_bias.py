"""Relative biases: what scores gain for the places of their keys, learned for buckets of places."""

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
    q_offset: Int[np.ndarray, " B"] | None = None,
    *,
    scores_dtype: ttnn.DataType,
) -> Float[Tensor, "#B N T S"]:
    """The number that a table has for the places of each query and key, and each head.

    Args:
        table: of the heads and buckets, (1, N, 1, num_buckets).
        relative_bias: which distances, or pairs of places on a grid, share a bucket.
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S.
        q_offset: place of the first query among the keys, of every sequence or of each, (1,) or (B,); 0 when absent.
        scores_dtype: of the scores, and of the bias.

    Returns:
        The bias of the scores, (B or 1, N, T, S).

    Source: Exploring the Limits of Transfer Learning, arXiv:1910.10683, section 2.1; on a grid: Swin Transformer,
    arXiv:2103.14030, section 3.2.
    """
    places = np.arange(seq_len_q)[None]
    if q_offset is not None:
        places = np.asarray(q_offset)[:, None] + places
    if isinstance(relative_bias, GridBias):
        buckets = relative_bias.buckets()[np.clip(places, 0, relative_bias.num_tokens - 1), :seq_len_k]
    else:
        farthest = relative_bias.max_distance
        distances = np.clip(np.arange(seq_len_k) - places[:, :, None], -farthest, farthest)
        buckets = relative_bias.buckets()[distances + farthest]
    buckets = buckets[:, None]  # (B or 1, 1, T, S)
    batch_size, num_heads = len(buckets), table.shape[1]
    index = np.broadcast_to(buckets, (batch_size, num_heads, seq_len_q, seq_len_k))
    rows = ttnn.repeat(as_dtype(table, scores_dtype), (batch_size, 1, seq_len_q, 1))
    return ttnn.gather(rows, 3, upload_integers(index, device=table.device(), is_index=True))
