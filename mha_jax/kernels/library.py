"""JAX's `dot_product_attention` with the cheapest form of the mask."""

from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.arrays import Array, zero_where
from mha_jax.compiled import compiled
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.padding import padding_after
from mha_jax.scores import Scores


def supports(query: Array, scores: Scores) -> bool:
    """Return whether the kernel supports these changes to the scores."""
    spec = scores.spec
    if spec.soft_cap is not None or spec.has_distance_bias or "sinks" in scores.learned:
        return False
    # A relative bias folded into the bias is float32; the kernel requires the dtype of query.
    return scores.bias is None or scores.bias.dtype == query.dtype


def is_flash(
    query: Array, key: Array, value: Array, mask: Mask, scores: Scores, *, platform: str
) -> bool:
    """Return whether cuDNN computes the call. It stores no scores, but copies a mask or a bias."""
    tokens = query.shape[2], key.shape[2]
    if not _fits_cudnn(query, value, platform):
        return False
    if _native_mask(mask, scores, *tokens, takes_cudnn=True) is not None:
        return True
    return mask.has_only("mask") and _cudnn_reads(mask, scores.bias, query.dtype, tokens)


@compiled("platform")
def attend(
    query: Array, key: Array, value: Array, mask: Mask, scores: Scores, *, platform: str
) -> Array:
    """Return the context on a platform, with the cheapest form of the mask."""
    seq_len_q = query.shape[2]
    seq_len_k = key.shape[2]
    width = value.shape[3]
    # The library requires equal widths: narrower arrays are padded.
    head_dim = max(query.shape[3], value.shape[3])
    dtype = query.dtype
    takes_cudnn = _fits_cudnn(query, value, platform)
    options = _native_mask(mask, scores, seq_len_q, seq_len_k, takes_cudnn=takes_cudnn)
    visible = None
    bias = scores.bias
    masked_rows = None
    lengths = mask.key_padding_lengths
    if options is None:
        hidden: Any = mask.with_bias(bias).to_bool(seq_len_q, seq_len_k)
        # Fully masked rows attend to all keys instead and are set to 0 afterwards, because kernels
        # disagree about them.
        hidden = to_scores_rank(hidden)
        masked_rows = hidden.all(axis=-1, keepdims=True)
        visible = ~(hidden & ~masked_rows)  # opposite polarity: True = attend
        if takes_cudnn and not _cudnn_reads(mask, bias, dtype, (seq_len_q, seq_len_k)):
            takes_cudnn = False
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    elif mask.span is not None or lengths is not None:
        first, stop = (x.clip(0, seq_len_k) for x in mask.key_range(seq_len_q, seq_len_k))
        masked_rows = (first >= stop)[:, None, :, None]
    if options is not None and lengths is not None:
        is_padding = padding_after(jnp.asarray(lengths), seq_len_k)[:, None, :, None]
        key = _without_gradient(key, is_padding)
        value = _without_gradient(value, is_padding)
    if bias is not None:
        bias = to_scores_rank(jnp.where(jnp.isneginf(bias), 0.0, bias))  # the mask hides these
    query, key, value = (
        jnp.pad(x, [(0, 0)] * 3 + [(0, head_dim - x.shape[3])]) for x in (query, key, value)
    )
    with jax.numpy_dtype_promotion("standard"):  # it needs this, while the caller may be strict
        context = jax.nn.dot_product_attention(
            query.swapaxes(1, 2),
            key.swapaxes(1, 2),
            value.swapaxes(1, 2),
            bias,
            visible,
            scale=scores.spec.score_scale,
            implementation="cudnn" if takes_cudnn else "xla",
            **(options or {}),
        )
    context = context.astype(dtype).swapaxes(1, 2)[..., :width]
    if masked_rows is None:
        return context
    return zero_where(context, masked_rows)


@jax.custom_jvp
def _without_gradient(x: Array, where: Array) -> Array:
    """Return x, with a gradient of 0 at `where`, because cuDNN's may be anything in padding."""
    return x


@_without_gradient.defjvp
def _without_gradient_tangent(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return primals[0], zero_where(tangents[0], primals[1])


def _fits_cudnn(query: Array, value: Array, platform: str) -> bool:
    """Return whether cuDNN supports the dtype and the widths."""
    is_half = query.dtype in (jnp.float16, jnp.bfloat16)
    head_dim = max(query.shape[3], value.shape[3])
    return platform == "gpu" and is_half and head_dim % 8 == 0 and head_dim <= 128


def _cudnn_reads(mask: Mask, bias: Array | None, dtype: jnp.dtype, tokens: tuple[int, int]) -> bool:
    """Return whether cuDNN reads a mask and a bias: for all pairs of even numbers of tokens, or it
    has no gradient.
    """
    is_whole = all(x is None or x.shape[-2:] == tokens for x in (mask.mask, bias))
    # In float16 hidden keys would have a score of only -32768.
    return dtype == jnp.bfloat16 and is_whole and not any(count % 2 for count in tokens)


def _native_mask(
    mask: Mask, scores: Scores, seq_len_q: int, seq_len_k: int, *, takes_cudnn: bool
) -> dict[str, Any] | None:
    """Return arguments of the library that replace the mask array, or None if they cannot express
    the mask.
    """
    span = mask.span
    lengths = mask.key_padding_lengths
    if scores.bias is not None or not mask.has_only("is_causal", "key_padding_lengths", "span"):
        return None
    options: dict[str, Any] = {"is_causal": mask.is_causal}
    if span is not None:
        # cuDNN supports windows only with causality, without lengths, and not with more queries
        # than keys.
        is_unsupported = takes_cudnn and (
            not mask.is_causal or lengths is not None or seq_len_q > seq_len_k
        )
        if span.window_size is None or is_unsupported:
            return None
        before = span.window_size - 1
        options["local_window_size"] = (before, 0 if mask.is_causal else before)
    if lengths is not None:  # kernels may return anything for a row without keys
        options["key_value_seq_lengths"] = jnp.maximum(jnp.asarray(lengths), 1)
    return options
