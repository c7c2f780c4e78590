"""Attention by JAX's own `dot_product_attention`, behind the masks and the empty rows of this package."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from mha_jax.compiled import compiled
from mha_jax.kernels.nonfinite import emptied, not_finite, sees_any, spoilt
from mha_jax.masks import Masking, to_scores_rank


@compiled("scale", "platform")
def attend_by_library(
    query: Array, key: Array, value: Array, masking: Masking, *, scale: float, platform: str
) -> Array:
    """Attention of split heads by the library; arguments as those of `fused.attend`, and checked there."""
    seq_len_q, seq_len_k = query.shape[2], key.shape[2]
    width, head_dim = value.shape[3], max(query.shape[3], value.shape[3])  # it takes heads of one width
    is_half = query.dtype in (jnp.float16, jnp.bfloat16)
    takes_cudnn = platform == "gpu" and is_half and head_dim % 8 == 0 and head_dim <= 128
    told = _told(masking, seq_len_q, seq_len_k, takes_cudnn=takes_cudnn)
    mask, bias, empty_rows = None, masking.bias, None
    # What is not finite is handled here: kernels disagree about it, as they do about a row without a key.
    wrong_rows, wrong_keys = not_finite(query), not_finite(key) | not_finite(value)
    marked = jnp.repeat(wrong_keys[..., 0], query.shape[1] // key.shape[1], axis=1)
    query = emptied(query, wrong_rows)
    if told is None:
        hidden: Any = masking.with_infinite_bias().joined(seq_len_q, seq_len_k)
        wrong_rows |= sees_any(marked, seq_len_q, Masking(hidden))
        # A row without a key is shown every key instead, and emptied afterwards.
        mask = to_scores_rank(hidden)
        empty_rows = mask.all(axis=-1, keepdims=True)
        mask = mask & ~empty_rows
    else:
        lengths: Any = masking.key_padding_lengths
        first, stop = _seen_keys(masking, seq_len_q, seq_len_k)
        wrong_rows |= _sees_any_between(marked, first, stop)
        if masking.reach is not None or lengths is not None:
            empty_rows = (first == stop)[:, None, :, None]
        if lengths is not None:  # what a kernel writes as the gradient of padding is not read
            places = jnp.arange(seq_len_k, dtype=jnp.int32)[None, None, :, None]
            wrong_keys |= places >= lengths[:, None, None, None]
    key, value = emptied(key, wrong_keys), emptied(value, wrong_keys)
    if bias is not None:
        bias = jnp.where(jnp.isneginf(bias), 0.0, bias)  # the mask hides these
    query, key, value = (jnp.pad(x, [(0, 0)] * 3 + [(0, head_dim - x.shape[3])]) for x in (query, key, value))
    with jax.numpy_dtype_promotion("standard"):  # which it needs, where the caller may be strict
        context = jax.nn.dot_product_attention(
            query.swapaxes(1, 2),
            key.swapaxes(1, 2),
            value.swapaxes(1, 2),
            None if bias is None else to_scores_rank(bias),
            None if mask is None else ~mask,  # the other polarity: True = attend
            scale=scale,
            implementation="cudnn" if takes_cudnn else "xla",
            **(told or {}),
        ).swapaxes(1, 2)
    context = spoilt(context[..., :width], wrong_rows)
    return context if empty_rows is None else emptied(context, empty_rows)


def _told(masking: Masking, seq_len_q: int, seq_len_k: int, *, takes_cudnn: bool) -> dict[str, Any] | None:
    """What is hidden in the library's own words, with which it needs no mask; None where it has none."""
    reach, lengths = masking.reach, masking.key_padding_lengths
    if any(x is not None for x in (masking.mask, masking.bias, masking.offsets)):
        return None
    told: dict[str, Any] = {"is_causal": masking.is_causal}
    if reach is not None:
        # cuDNN takes a window with causality alone, and not more queries than keys.
        is_refused = takes_cudnn and (not masking.is_causal or lengths is not None or seq_len_q > seq_len_k)
        if reach.window_size is None or is_refused:
            return None
        before = reach.window_size - 1
        told["local_window_size"] = (before, 0 if masking.is_causal else before)
    if lengths is not None:  # a kernel without a key may give anything
        told["key_value_seq_lengths"] = jnp.maximum(jnp.asarray(lengths), 1)
    return told


def _seen_keys(masking: Masking, seq_len_q: int, seq_len_k: int) -> tuple[Int[Array, "#B T"], Int[Array, "#B T"]]:
    """The first of the keys that each query sees and the one after the last; the same where it sees none."""
    first, stop = (x.clip(0, seq_len_k) for x in masking.seen_keys(seq_len_q, seq_len_k))
    return jnp.minimum(first, stop), stop


def _sees_any_between(
    marked: Bool[Array, "B N S"], first: Int[Array, "#B T"], stop: Int[Array, "#B T"]
) -> Bool[Array, "B N T 1"]:
    """Whether any of the keys is marked that a query sees, from its first one to before where it stops."""
    counts = jnp.pad(lax.cumsum(marked.astype(jnp.int32), axis=2), [(0, 0), (0, 0), (1, 0)])  # before each key
    before, within = (jnp.take_along_axis(counts, places[:, None], axis=2) for places in (first, stop))
    return (within > before)[..., None]
