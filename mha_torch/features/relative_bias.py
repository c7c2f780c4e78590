"""Learned relative position biases."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_spec import GridBias, RelativeBias
from mha_torch.arrays import constant


def relative_position_bias(
    table: Float[Tensor, "..."],
    relative_bias: RelativeBias | GridBias,
    seq_len_q: int,
    seq_len_k: int,
    q_offset: Int[Tensor, " #B"] | None = None,
    *,
    scores_dtype: torch.dtype,
) -> Float[Tensor, "#B N T S"]:
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
        positions = torch.arange(seq_len_q, device=table.device)[None]
        if q_offset is not None:
            positions = positions + q_offset.to(positions)[:, None]
        # Padding, and tokens without room in a cache, may lie beyond the grid.
        positions = positions.clamp(0, relative_bias.num_tokens - 1)
        buckets = constant(relative_bias.buckets(), table)[positions, :seq_len_k]
        return table.to(scores_dtype)[buckets].movedim(3, 1)
    # From -T, not from 1 - T: without queries there is still a row to look up.
    distances = torch.arange(-seq_len_q, seq_len_k, device=table.device)[None]
    if q_offset is not None:
        distances = distances - q_offset.to(distances)[:, None]
    farthest = relative_bias.max_distance
    buckets = constant(relative_bias.buckets(), table)
    buckets = buckets[distances.clamp(-farthest, farthest) + farthest]
    by_distance = table.to(scores_dtype)[buckets].transpose(1, 2)  # (B or 1, N, T + S)
    # The number of keys may be symbolic, which `unfold` does not support.
    if torch.compiler.is_compiling():
        rows, keys = (torch.arange(size, device=table.device) for size in (seq_len_q, seq_len_k))
        return by_distance[:, :, seq_len_q - rows[:, None] + keys]
    # Each row is the previous one shifted by one key, so only T + S values per head are looked up.
    # The windows begin at the distances -T, …, 0, and row i at -i: without the first, in reverse.
    return by_distance.unfold(2, seq_len_k, 1)[:, :, 1:].flip(2)
