"""Splitting, combining and repeating heads.

Axes: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head_dim.
"""

from jaxtyping import Float
from torch import Tensor

from mha_spec import InputError
from mha_spec.rules import check_head_groups
from mha_torch.checks import check_count


def split_heads(x: Float[Tensor, "B T NH"], num_heads: int) -> Float[Tensor, "B N T H"]:
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


def split_unchecked(x: Float[Tensor, "B T NH"], num_heads: int) -> Float[Tensor, "B N T H"]:
    """Split the last axis into heads, without checks."""
    batch_size, seq_len, width = x.shape
    return x.view(batch_size, seq_len, num_heads, width // num_heads).transpose(1, 2)


def combine_heads(x: Float[Tensor, "B N T H"]) -> Float[Tensor, "B T NH"]:
    """Concatenate heads: the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(-2)


def repeat_kv_heads(x: Float[Tensor, "B K S H"], num_heads: int) -> Float[Tensor, "B N S H"]:
    """Repeat each key/value head for its group: query head n uses key/value head n // (N // K).

    Raises:
        ValueError: if num_heads is not a multiple of the key/value heads.

    Source: grouped-query attention, arXiv:2305.13245, section 2.2.
    """
    check_head_groups(num_heads, x.shape[1])
    if num_heads == x.shape[1]:  # avoids a copy
        return x
    # Copies of a head are neighbors; `tile` would put all heads in order, again and again.
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)
