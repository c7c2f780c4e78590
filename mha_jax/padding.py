"""Padding: what it contains reaches no real token, forward or backward.

A mask alone does not ensure this. A masked key has the weight 0, but 0 * NaN is NaN, in the
weighted sum of values and in the gradients of weights. Nothing here waits for values
on an accelerator.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from mha_jax.arrays import Array, zero_where
from mha_jax.checks import check_lengths
from mha_jax.compiled import compiled
from mha_jax.masks import Mask


def find_padding(
    mask: Mask, batch_size: int, seq_len: int
) -> tuple[Mask, Bool[Array, "B S"] | None]:
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
    return mask, padding_after(jnp.asarray(lengths, jnp.int32), seq_len)


@compiled("seq_len")
def padding_after(lengths: Int[Array, " B"], seq_len: int) -> Bool[Array, "B S"]:
    """Return True for tokens at or beyond the length of their sequence."""
    return jnp.arange(seq_len, dtype=jnp.int32)[None] >= lengths[:, None]


@compiled()
def finite_padding(
    x: Float[Array, "B S d_in"], is_padding: Bool[Array, "B S"]
) -> Float[Array, "B S d_in"]:
    """Return the input of a layer with 0 for each NaN and infinity in padding. Finite values
    stay.
    """
    return zero_where(x, is_padding[:, :, None] & ~jnp.isfinite(x))


def finite_inputs(
    query: Array, key: Array, value: Array, is_padding: Bool[Array, "B S"]
) -> tuple[Array, Array, Array]:
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


@compiled()
def zero_padding(
    x: Float[Array, "B K S H"], is_padding: Bool[Array, "B S"]
) -> Float[Array, "B K S H"]:
    """Return keys or values with 0 in padding: projections of finite inputs may overflow."""
    return zero_where(x, is_padding[:, None, :, None])


def zero_heads_in_padding(
    mask: Mask, key: Array, value: Array, find: Callable[..., Any] = find_padding
) -> tuple[Mask, Array, Array]:
    """Return split heads with keys and values of 0 in padding, and the mask as `find_padding`
    returns it.
    """
    mask, is_padding = find(mask, key.shape[0], key.shape[2])
    if is_padding is None:
        return mask, key, value
    return mask, zero_padding(key, is_padding), zero_padding(value, is_padding)
