"""Boolean masks as arrays: True = masked; broadcast to the scores (B, N, T, S)."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Bool, Int

from mha_jax.arrays import Array
from mha_jax.checks import check_count, check_lengths
from mha_jax.compiled import compiled
from mha_spec import InputError


def create_causal_mask(seq_len_q: int, seq_len_k: int | None = None) -> Bool[Array, "T S"]:
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
    return _hides_later(seq_len_q, seq_len_k)


def create_padding_mask(
    lengths: Int[Array, " B"] | Sequence[int], seq_len_k: int
) -> Bool[Array, "B 1 1 S"]:
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
    return _hides_padding(jnp.asarray(lengths, jnp.int32), seq_len_k)


def create_causal_mask_with_cache(
    seq_len_q: int, seq_len_k: int, cache_len: int
) -> Bool[Array, "T S"]:
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
    return _hides_later(seq_len_q, seq_len_k, q_offset=cache_len)


def create_sliding_window_mask(
    seq_len_q: int, seq_len_k: int | None = None, *, window_size: int
) -> Bool[Array, "T S"]:
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
    return _hides_later(seq_len_q, seq_len_k, window_size=window_size)


# Compiled, so that only the mask is stored, which may be large, without intermediate results.
@compiled("seq_len_q", "seq_len_k", "q_offset", "window_size")
def _hides_later(
    seq_len_q: int, seq_len_k: int, *, q_offset: int = 0, window_size: int | None = None
) -> Array:
    distance = (
        q_offset
        + jnp.arange(seq_len_q, dtype=jnp.int32)[:, None]
        - jnp.arange(seq_len_k, dtype=jnp.int32)[None, :]
    )
    if window_size is None:
        return distance < 0
    return (distance < 0) | (distance >= window_size)


@compiled("seq_len_k")
def _hides_padding(lengths: Array, seq_len_k: int) -> Array:
    return (jnp.arange(seq_len_k, dtype=jnp.int32)[None, :] >= lengths[:, None])[:, None, None, :]
