"""The fast path: the same function without attention weights.

On a CPU it goes block by block, as FlashAttention does, and skips blocks in which every key is masked; elsewhere it is
JAX's own dot_product_attention behind the masks and the empty rows of this package.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mha_jax import blockwise, mha
from mha_jax.checks import check_attention, check_rate
from mha_jax.masks import hide_infinite_bias


def scaled_dot_product_attention(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S H"],
    *,
    mask: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    is_causal: bool = False,
    key_padding_lengths: Int[Array, " B"] | Sequence[int] | None = None,
    need_weights: bool = False,
    dropout: float = 0.0,
    dropout_keep: Bool[Array, "B N T S"] | None = None,
    dropout_rng: jax.Array | None = None,
) -> tuple[Float[Array, "B N T H"], None]:
    """Attention of split heads without the attention weights: the function of `mha`, in the fastest form there is.

    Args:
        query: (B, N, T, H).
        key, value: (B, K, S, H); query head n uses key/value head n // (N // K).
        mask: boolean, True = masked; broadcasts to (B, N, T, S). A row in which every key is masked gives 0.
        bias: added to the scores, in the dtype of query; broadcasts to (B, N, T, S). -inf masks a key.
        is_causal: hide every key after the query's own position, as `create_causal_mask`.
        key_padding_lengths: number of real keys of each sequence, (B,), as `create_padding_mask`.
        need_weights: must be False, the weights are never stored here.
        dropout: rate at which attention weights are dropped; 0 outside training.
        dropout_keep: must be absent, a fused kernel draws its own.
        dropout_rng: random key to draw what is dropped from.

    Returns:
        The context (B, N, T, H), in the dtype of query, and None.

    Raises:
        TypeError: if an input is not floating point, the dtypes differ, or the mask is not boolean.
        ValueError: if the shapes do not fit, or the weights or a given dropout are asked for.
    """
    check_attention(query, key, value, mask, bias, key_padding_lengths)
    check_rate("dropout", dropout)
    if need_weights or dropout_keep is not None:
        raise ValueError("need_weights and dropout_keep must be left out on the fused path, which stores no weights")
    is_small = math.prod(query.shape[:3]) * key.shape[2] <= blockwise.FEW_SCORES
    if dropout or is_small:
        hidden = {"mask": mask, "is_causal": is_causal, "key_padding_lengths": key_padding_lengths}
        context, _ = mha.scaled_dot_product_attention(
            query, key, value, bias=bias, dropout=dropout, dropout_rng=dropout_rng, **hidden
        )
        return context, None
    mask = hide_infinite_bias(mask, bias)
    lengths = None if key_padding_lengths is None else jnp.asarray(key_padding_lengths, jnp.int32)
    return blockwise.attend(query, key, value, mask=mask, bias=bias, is_causal=is_causal, lengths=lengths), None
