"""Padding: what it contains reaches no real token, forward or backward.

A mask alone does not ensure this. A masked key has the weight 0, but 0 * NaN is NaN, in the
weighted sum of values and in the gradients of weights. Nothing here waits for values
on an accelerator.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_torch.arrays import replicate_like, zero_where
from mha_torch.checks import check_lengths
from mha_torch.masks import Mask, as_lengths


def find_padding(
    mask: Mask, batch_size: int, seq_len: int, device: torch.device
) -> tuple[Mask, Bool[Tensor, "B S"] | None]:
    """Check the lengths of sequences of S tokens, and return which tokens are padding.

    Returns:
        The mask, with lengths as numbers if they are known, so that they are read once in a call;
        and True for tokens at or beyond the length of their sequence, or None if there are none.
    """
    lengths = mask.key_padding_lengths
    if lengths is None:
        return mask, None
    known_lengths = check_lengths("key_padding_lengths", lengths, batch_size, seq_len)
    if known_lengths is not None:
        mask = replace(mask, key_padding_lengths=known_lengths)
        if all(length == seq_len for length in known_lengths):
            return mask, None
    return mask, padding_after(lengths, seq_len, device)


def padding_after(
    lengths: Int[Tensor, " B"] | Sequence[int], seq_len: int, device: torch.device
) -> Bool[Tensor, "B S"]:
    """Return True for tokens at or beyond the length of their sequence."""
    return torch.arange(seq_len, device=device) >= as_lengths(lengths, device)[:, None]


def finite_padding(
    x: Float[Tensor, "B S d_in"], is_padding: Bool[Tensor, "B S"]
) -> Float[Tensor, "B S d_in"]:
    """Return the input of a layer with 0 for each NaN and infinity in padding. Finite values
    stay.
    """
    return x.masked_fill(replicate_like(is_padding[:, :, None], x) & ~torch.isfinite(x), 0.0)


def finite_inputs(
    query: Tensor, key: Tensor, value: Tensor, is_padding: Bool[Tensor, "B S"]
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
    x: Float[Tensor, "B K S H"], is_padding: Bool[Tensor, "B S"]
) -> Float[Tensor, "B K S H"]:
    """Return keys or values with 0 in padding: projections of finite inputs may overflow."""
    return zero_where(x, is_padding[:, None, :, None])


def zero_heads_in_padding(
    mask: Mask, key: Tensor, value: Tensor, find: Callable[..., Any] = find_padding
) -> tuple[Mask, Tensor, Tensor]:
    """Return split heads with keys and values of 0 in padding, and the mask as `find_padding`
    returns it.
    """
    mask, is_padding = find(mask, key.shape[0], key.shape[2], key.device)
    if is_padding is None:
        return mask, key, value
    return mask, zero_padding(key, is_padding), zero_padding(value, is_padding)
