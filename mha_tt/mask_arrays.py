"""Boolean masks as arrays: True = masked; broadcast to the scores (B, N, T, S)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from mha_spec import InputError
from mha_tt.checks import check_count, check_lengths


def create_causal_mask(seq_len_q: int, seq_len_k: int | None = None) -> Bool[np.ndarray, "T S"]:
    """Return a causal mask, which hides all keys after the position of the query.

    Aligned top-left: query i attends to keys 0..i, regardless of the number of keys.

    Arguments are as in `create_attention_mask`.

    Example: create_causal_mask(2, 3)
        [[False, True,  True],
         [False, False, True]]
    """
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    check_count("seq_len_q", seq_len_q)
    check_count("seq_len_k", seq_len_k)
    return np.arange(seq_len_k)[None, :] > np.arange(seq_len_q)[:, None]


def create_padding_mask(
    lengths: Int[np.ndarray, " B"] | Sequence[int], seq_len_k: int
) -> Bool[np.ndarray, "B 1 1 S"]:
    """Return a padding mask, which hides keys at or after the length of their sequence.

    Other arguments are as in `create_attention_mask`.

    Args:
        lengths: number of real keys of each sequence, 0..S, (B,); padding is on the right.

    Raises:
        TypeError: if the lengths are not integers.
        ValueError: if a length lies outside 0..S.

    Example: create_padding_mask([1, 3], 3)
        [[[[False, True,  True ]]],
         [[[False, False, False]]]]
    """
    check_count("seq_len_k", seq_len_k)
    check_lengths("lengths", lengths, None, seq_len_k)
    return (np.arange(seq_len_k)[None, :] >= np.asarray(lengths)[:, None])[:, None, None, :]


def create_causal_mask_with_cache(
    seq_len_q: int, seq_len_k: int, cache_len: int
) -> Bool[np.ndarray, "T S"]:
    """Return a causal mask for new tokens after cached ones.

    Aligned to the end of the cache: the queries are the newest tokens, at positions cache_len,
    cache_len + 1, …. Query i attends to keys 0..cache_len + i.

    Other arguments are as in `create_attention_mask`.

    Args:
        seq_len_k: number of keys, S = cache_len + T.
        cache_len: number of tokens already in the cache.

    Raises:
        ValueError: if seq_len_k is not cache_len + seq_len_q.

    Example: create_causal_mask_with_cache(2, 3, 1)
        [[False, False, True ],
         [False, False, False]]
    """
    check_count("seq_len_q", seq_len_q)
    check_count("seq_len_k", seq_len_k)
    check_count("cache_len", cache_len, minimum=0)
    if seq_len_k != cache_len + seq_len_q:
        raise InputError(
            "seq_len_k",
            "be cache_len + seq_len_q",
            seq_len_k=seq_len_k,
            cache_len=cache_len,
            seq_len_q=seq_len_q,
        )
    return np.arange(seq_len_k)[None, :] > cache_len + np.arange(seq_len_q)[:, None]


def create_sliding_window_mask(
    seq_len_q: int, seq_len_k: int | None = None, *, window_size: int
) -> Bool[np.ndarray, "T S"]:
    """Return a causal sliding-window mask: a query attends to the last window_size keys up to its
    own position.

    Aligned top-left: query i attends to keys i - window_size + 1..i. With window_size >= S it is
    the causal mask.

    Other arguments are as in `create_attention_mask`.

    Args:
        window_size: maximum number of keys a query attends to, including its own position.

    Example: create_sliding_window_mask(3, window_size=2)
        [[False, True,  True ],
         [False, False, True ],
         [True,  False, False]]

    Source: Longformer, arXiv:2004.05150, section 3.1; causal as in Mistral 7B, arXiv:2310.06825,
    section 2.
    """
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    check_count("seq_len_q", seq_len_q)
    check_count("seq_len_k", seq_len_k)
    check_count("window_size", window_size)
    # Each row contains a part of these: a matrix of them would need 8 bytes for each entry of the
    # mask.
    key_minus_query = np.arange(1 - seq_len_q, seq_len_k)
    is_hidden = (key_minus_query > 0) | (key_minus_query <= -window_size)
    return np.ascontiguousarray(
        np.lib.stride_tricks.sliding_window_view(is_hidden, seq_len_k)[::-1]
    )
