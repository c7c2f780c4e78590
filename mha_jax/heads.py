"""Splitting, combining and repeating heads.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim.
"""

import jax.numpy as jnp
from jaxtyping import Float

from mha_jax.arrays import Array
from mha_jax.checks import check_count
from mha_jax.sharding import is_explicit, sharding_on_mesh_of, spec_of
from mha_spec import InputError
from mha_spec.rules import check_head_groups


def split_heads(x: Float[Array, "B T NH"], num_heads: int) -> Float[Array, "B N T H"]:
    """Split the last axis into heads and move them before the tokens.

    Raises:
        ValueError: if the width is not a multiple of num_heads.
    """
    check_count("num_heads", num_heads)
    if x.shape[-1] % num_heads:
        raise InputError(
            "the width", "be a multiple of num_heads", width=x.shape[-1], num_heads=num_heads
        )
    return split_unchecked(x, num_heads)


def split_unchecked(x: Float[Array, "B T NH"], num_heads: int) -> Float[Array, "B N T H"]:
    """Split the last axis into heads, without checks."""
    return x.reshape(*x.shape[:2], num_heads, x.shape[-1] // num_heads).swapaxes(1, 2)


def combine_heads(x: Float[Array, "B N T H"]) -> Float[Array, "B T NH"]:
    """Concatenate heads: the inverse of `split_heads`."""
    batch_size, num_heads, seq_len, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(batch_size, seq_len, num_heads * head_dim)


def repeat_kv_heads(x: Float[Array, "B K S H"], num_heads: int) -> Float[Array, "B N S H"]:
    """Repeat each key/value head for its group: query head n uses key/value head n // (N // K).

    Raises:
        ValueError: if num_heads is not a multiple of the key/value heads.

    Source: grouped-query attention, arXiv:2305.13245, section 2.2.
    """
    check_head_groups(num_heads, x.shape[1])
    if num_heads == x.shape[1]:  # avoids a copy
        return x
    if is_explicit(x):
        placement = sharding_on_mesh_of(x, spec_of(x))
    else:
        placement = None
    # Copies of a head are neighbors; `tile` would put all heads in order, again and again.
    return jnp.repeat(x, num_heads // x.shape[1], axis=1, out_sharding=placement)
