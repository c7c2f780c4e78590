"""Padding: what it contains reaches no real token, forward or backward.

A mask alone does not ensure this. A masked key has the weight 0, but 0 * NaN is NaN in the weighted
sum of values. Lengths are on the host. Nothing here reads a value from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_tt.arrays import zero_where
from mha_tt.checks import check_lengths
from mha_tt.device import upload
from mha_tt.masks import Mask


def find_padding(mask: Mask, batch_size: int, seq_len: int) -> Bool[np.ndarray, "B S"] | None:
    """Check the lengths of sequences of S tokens, and return which tokens are padding.

    Returns:
        True for tokens at or beyond the length of their sequence, or None if there are none.
    """
    lengths = mask.key_padding_lengths
    if lengths is None:
        return None
    check_lengths("key_padding_lengths", lengths, batch_size, seq_len)
    is_padding = padding_after(lengths, seq_len)
    if not is_padding.any():
        return None
    return is_padding


def padding_after(
    lengths: Int[np.ndarray, " B"] | Sequence[int], seq_len: int
) -> Bool[np.ndarray, "B S"]:
    """Return True for tokens at or beyond the length of their sequence."""
    return np.arange(seq_len) >= np.asarray(lengths)[:, None]


def finite_padding(
    x: Float[Tensor, "B S d_in"], is_padding: Bool[np.ndarray, "B S"]
) -> Float[Tensor, "B S d_in"]:
    """Return the input of a layer with 0 for each NaN and infinity in padding. Finite values
    stay.
    """
    finite = ttnn.where(ttnn.isfinite(x), x, 0.0)
    return ttnn.where(upload(is_padding[:, :, None], device=x.device(), dtype=x.dtype), finite, x)


def finite_inputs(
    query: Tensor, key: Tensor, value: Tensor, is_padding: Bool[np.ndarray, "B S"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of a layer with finite padding; in self-attention the three are one, and
    stay one.
    """
    finite_key = finite_padding(key, is_padding)
    if value is key:
        finite_value = finite_key
    else:
        finite_value = finite_padding(value, is_padding)
    # Only in self-attention do queries have padding: the lengths are of keys.
    if query is key:
        query = finite_key
    return query, finite_key, finite_value


def zero_padding(
    x: Float[Tensor, "B K S H"], is_padding: Bool[np.ndarray, "B S"]
) -> Float[Tensor, "B K S H"]:
    """Return keys or values with 0 in padding: projections of finite inputs may overflow."""
    return zero_where(x, upload(is_padding[:, None, :, None], device=x.device(), dtype=x.dtype))


def zero_heads_in_padding(mask: Mask, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return split heads with keys and values of 0 in padding."""
    is_padding = find_padding(mask, key.shape[0], key.shape[2])
    if is_padding is None:
        return key, value
    return zero_padding(key, is_padding), zero_padding(value, is_padding)
