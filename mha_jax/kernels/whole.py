"""Attention over all keys at once: the kernel of `fused` on CPUs for few scores, and that of parts of a window.

XLA fuses it into one kernel that stores no scores. This kernel has no selection, so a minimum hides keys; the
normalization comes last; and the largest scores are used for nothing else.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mha_jax.alibi import alibi_bias
from mha_jax.arrays import at_least_float32
from mha_jax.compiled import compiled
from mha_jax.heads import repeat_kv_heads
from mha_jax.kernels.blockwise import with_relative_bias
from mha_jax.kernels.nonfinite import contained, zero_where
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.scores import Scores
from mha_jax.stages import score_scale, soft_capped


@compiled()
def attend(query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
    """Return the context. Shapes are checked."""
    shows_all = mask.with_bias(scores.bias).is_trivial  # NaN spreads by itself
    kernel = attend_finite if shows_all else contained(attend_finite)
    return kernel(query, key, value, mask, scores)


def attend_finite(query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
    """Return the context of finite queries, keys and values, in the dtype of query."""
    scores = with_relative_bias(mask, scores, query, key)
    hidden = mask.with_bias(scores.bias).to_bool(query.shape[2], key.shape[2])
    scale, dtype = score_scale(query, scores.spec), query.dtype
    query = at_least_float32(query)
    key, value = (repeat_kv_heads(at_least_float32(x), query.shape[1]) for x in (key, value))
    if hidden is None:
        logits = jnp.einsum("bnth,bnsh->bnts", query * scale, key)
    else:
        hidden = to_scores_rank(hidden)
        logits = _products(query, key, scale)
    logits = soft_capped(logits, scores.spec)
    if scores.slopes is not None:
        logits += alibi_bias(scores.slopes, query.shape[2], key.shape[2], mask.q_offset, scores_dtype=logits.dtype)
    if scores.bias is not None:
        bias = to_scores_rank(at_least_float32(scores.bias))
        logits += bias if hidden is None else zero_where(bias, hidden)
    if hidden is not None:
        logits = _hide(logits, jnp.where(hidden, -jnp.inf, jnp.inf).astype(logits.dtype))
    largest, sinks = lax.stop_gradient(logits.max(axis=-1, keepdims=True)), None
    if scores.sinks is not None:
        sinks = scores.sinks.astype(logits.dtype)[None, :, None, None]
        largest = jnp.maximum(largest, lax.stop_gradient(sinks))
    if hidden is not None:  # exp(-inf + inf) is NaN
        largest = jnp.maximum(largest, jnp.finfo(logits.dtype).min)
    exponentials = jnp.exp(logits - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - largest)
    if hidden is not None:  # 0 / 1 for fully masked rows; 0 / 0 for others whose scores are all -inf
        total += hidden.all(axis=-1, keepdims=True).astype(logits.dtype)
    return (jnp.einsum("bnts,bnsh->bnth", exponentials, value) / total).astype(dtype)


def _products(query: Array, key: Array, scale: float) -> Array:
    """Return scaled dot products, infinite if they overflow but never NaN, which a minimum does not hide."""
    (query, of_query), (key, of_key) = (_in_range(x) for x in (query, key))
    return jnp.einsum("bnth,bnsh->bnts", query, key) * (of_query * scale) * of_key.swapaxes(2, 3)


def _in_range(x: Array) -> tuple[Array, Array]:
    """Return tokens whose products do not overflow, and the powers of 2 that they were divided by."""
    half = jnp.finfo(x.dtype).maxexp // 2  # 8 bits less leave room for 2^16 features
    largest = lax.stop_gradient(jnp.abs(x).max(axis=-1, keepdims=True))
    divisor = jnp.where(largest > 2.0 ** (half - 8), 2.0 ** (half + 8), 1.0).astype(x.dtype)
    return x / divisor, divisor


@jax.custom_jvp
def _hide(scores: Array, limit: Array) -> Array:
    """Return the scores, -inf where the limit is; their gradient there is 0, even of NaN."""
    return jnp.minimum(scores, limit)


@_hide.defjvp
def _hide_tangent(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _hide(*primals), zero_where(tangents[0], jnp.isneginf(primals[1]))
