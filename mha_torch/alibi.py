"""ALiBi: what is taken from scores for the distance of their keys."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mha_torch.arrays import constant


def alibi_bias(
    slopes: tuple[float, ...],
    seq_len_q: int,
    seq_len_k: int,
    q_offset: Int[Tensor, " B"] | None = None,
    *,
    scores_dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Float[Tensor, "#B N T S"]:
    """-slope * distance of each query and key.

    Args:
        slopes: of the heads, N.
        seq_len_q: number of queries, T.
        seq_len_k: number of keys, S.
        q_offset: place of the first query among the keys, of every sequence or of each, (1,) or (B,); 0 when absent.
        scores_dtype: of the scores, and of the bias.
        device: where the bias lies.

    Returns:
        The bias of the scores, (B or 1, N, T, S).

    Source: Train Short, Test Long, arXiv:2108.12409, section 3.
    """
    places = torch.arange(seq_len_q, device=device)[None]
    if q_offset is not None:
        places = q_offset.to(places)[:, None] + places
    distances = (places[:, None, :, None] - torch.arange(seq_len_k, device=device)).abs()
    return -constant(np.array(slopes), distances, scores_dtype)[:, None, None] * distances
