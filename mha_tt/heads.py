"""Splitting, combining and repeating heads.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim.
"""

from __future__ import annotations

import ttnn
from jaxtyping import Float
from ttnn import Tensor

from mha_spec import InputError
from mha_spec.rules import check_head_groups
from mha_tt.checks import check_count, check_tiles
from mha_tt.device import zeros
from mha_tt.layout import TILE, TILE_NBYTES, round_up

MOST_ROW_NBYTES = 2**19
"""Most bytes of a row of tiles (all heads of 32 tokens) for ttnn's `concatenate_heads`.

It holds two rows at once: 1 MiB of a core's 1464 KiB or more; the rest is for programs and for
tensors in L1. 64 heads of 128 features in float32 have twice as many bytes.
"""


def split_heads(x: Float[Tensor, "B T NH"], num_heads: int) -> Float[Tensor, "B N T H"]:
    """Split the last axis into heads and move them before the tokens.

    Raises:
        ValueError: if the width is not a multiple of num_heads.
    """
    check_tiles("x", x)
    check_count("num_heads", num_heads)
    width = x.shape[2]
    if width % num_heads:
        raise InputError(
            "the width", "be a multiple of num_heads", width=width, num_heads=num_heads
        )
    return split_unchecked(x, num_heads)


def split_unchecked(x: Float[Tensor, "B T NH"], num_heads: int) -> Float[Tensor, "B N T H"]:
    """Split the last axis into heads, without checks."""
    batch_size, seq_len, width = x.shape
    if 0 in (batch_size, seq_len):  # most operations reject empty tensors
        return zeros((batch_size, num_heads, seq_len, width // num_heads), x.dtype, x.device())
    # The operation below would accept this and return heads of the wrong width.
    if width // num_heads % TILE:
        return ttnn.transpose(
            ttnn.reshape(x, (batch_size, seq_len, num_heads, width // num_heads)), 1, 2
        )
    x = ttnn.reshape(x, (batch_size, 1, seq_len, width))
    heads, _, _ = ttnn.experimental.nlp_create_qkv_heads(
        x, num_heads=num_heads, num_kv_heads=0, transpose_k_heads=False
    )
    return heads


def combine_heads(x: Float[Tensor, "B N T H"]) -> Float[Tensor, "B T NH"]:
    """Concatenate heads: the inverse of `split_heads`."""
    check_tiles("x", x)
    return combine_unchecked(x)


def combine_unchecked(x: Float[Tensor, "B N T H"]) -> Float[Tensor, "B T NH"]:
    """Concatenate heads, without checks."""
    batch_size, num_heads, seq_len, head_dim = x.shape
    if 0 in (batch_size, seq_len):
        return zeros((batch_size, seq_len, num_heads * head_dim), x.dtype, x.device())
    # The operation needs whole tiles, and a core's memory for two rows of them.
    row_nbytes = num_heads * round_up(head_dim) // TILE * TILE_NBYTES[x.dtype]
    if head_dim % TILE or row_nbytes > MOST_ROW_NBYTES:
        return ttnn.reshape(ttnn.transpose(x, 1, 2), (batch_size, seq_len, num_heads * head_dim))
    return ttnn.transformer.concatenate_heads(x)


def repeat_kv_heads(x: Float[Tensor, "B K S H"], num_heads: int) -> Float[Tensor, "B N S H"]:
    """Repeat each key/value head for its group: query head n uses key/value head n // (N // K).

    Raises:
        ValueError: if num_heads is not a multiple of the key/value heads.

    Source: grouped-query attention, arXiv:2305.13245, section 2.2.
    """
    check_tiles("x", x)
    check_head_groups(num_heads, x.shape[1])
    if num_heads == x.shape[1]:  # avoids a copy
        return x
    # Copies of a head are neighbors; `repeat` would put all heads in order, again and again.
    return ttnn.repeat_interleave(x, num_heads // x.shape[1], dim=1)
