"""ALiBi: biases that are linear in the distance of query and key."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_torch.arrays import constant


def alibi_bias(
    slopes: tuple[float, ...],
    seq_len_q: int,
    seq_len_k: int,
    q_offset: Int[Tensor, " #B"] | None = None,
    *,
    scores_dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Float[Tensor, "#B N T S"]:
    """Return -slope * distance for each query and key.

    Args:
        slopes: slope of each head, N.
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S.
        q_offset: position of the first query among the keys, for all sequences or each, (1,) or
            (B,); default: 0.
        scores_dtype: dtype of the scores and of the bias.
        device: device of the bias.

    Returns:
        Bias of the scores, (B or 1, N, T, S).

    Source: Train Short, Test Long, arXiv:2108.12409, section 3.
    """
    positions = torch.arange(seq_len_q, device=device)[None]
    if q_offset is not None:
        positions = q_offset.to(positions)[:, None] + positions
    distances = (positions[:, None, :, None] - torch.arange(seq_len_k, device=device)).abs()
    return -constant(np.array(slopes), distances, scores_dtype)[:, None, None] * distances
