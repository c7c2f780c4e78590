"""Attention over all keys at once: the kernel of `fused` on CPUs for few scores, and for parts of a
window.

XLA fuses it into one kernel that stores no scores, because it has only what XLA's library for CPUs
supports: a minimum hides keys, and no operation between the products has less than 4096 elements.
The smallest maximum is therefore taken of each score, before the reduction, and sums are spread
over the features before anything is added.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from mha_jax.arrays import Array, at_least_float32, zero_where
from mha_jax.compiled import compiled
from mha_jax.features.alibi import alibi_bias
from mha_jax.kernels.cpu.blockwise import with_relative_bias
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.scores import Scores


@compiled("fits_cache")
def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    scores: Scores,
    *,
    fits_cache: bool = True,
) -> Array:
    """Return the context, in the dtype of query. Shapes are checked.

    Args:
        fits_cache: the scores of a head fit the cache of a core; otherwise several kernels are
            faster than one.
    """
    scores = with_relative_bias(mask, scores, query, key)
    hidden = mask.with_bias(scores.bias).to_bool(query.shape[2], key.shape[2])
    spec = scores.spec
    dtype = query.dtype
    shape = (*query.shape[:3], value.shape[3])
    group = partial(_group, num_kv_heads=key.shape[1], shape=shape)
    query = group(at_least_float32(query))
    key = at_least_float32(key)
    value = at_least_float32(value)
    if hidden is not None:
        hidden = group(to_scores_rank(hidden))
    logits = jnp.einsum("bkth,bksh->bkts", query * spec.score_scale, key)
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    if spec.alibi_slopes is not None:
        seq_lens = (shape[2], key.shape[2])
        bias = alibi_bias(spec.alibi_slopes, *seq_lens, mask.q_offset, scores_dtype=logits.dtype)
        logits += group(bias)
    if scores.bias is not None:
        bias = group(to_scores_rank(at_least_float32(scores.bias)))
        # A minimum does not hide NaN, which -inf + inf would be.
        logits += bias if hidden is None else zero_where(bias, hidden)
    if hidden is not None:
        infinity = logits.dtype.type(jnp.inf)
        logits = _hide(logits, jnp.where(hidden, -infinity, infinity))
    lowest = jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype)  # exp(-inf + inf) is NaN
    # As the initial value of the reduction, `lowest` would not reach a row of one score: XLA takes
    # an initial value for the identity, and leaves it out of a reduction over one element.
    if fits_cache:
        largest = jnp.maximum(lax.stop_gradient(logits), lowest).max(axis=-1, keepdims=True)
    else:
        largest = jnp.maximum(lax.stop_gradient(logits).max(axis=-1, keepdims=True), lowest)
    sinks = scores.learned.get("sinks")
    if sinks is not None:
        sinks = group(sinks.astype(logits.dtype)[None, :, None, None])
        largest = jnp.maximum(largest, lax.stop_gradient(sinks))
    exponentials = jnp.exp(logits - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - largest)
    context = jnp.einsum("bkts,bksh->bkth", exponentials, value)
    spread = partial(jnp.broadcast_to, shape=context.shape if fits_cache else total.shape)
    total = spread(total)
    # 0 / 1 for fully masked rows; 0 / 0 for others whose scores are all -inf.
    if hidden is not None:
        total += spread(hidden.all(axis=-1, keepdims=True)).astype(total.dtype)
    return (context / total).reshape(shape).astype(dtype)


def _group(x: Array, *, num_kv_heads: int, shape: tuple[int, ...]) -> Array:
    """Return the rows of each key/value head, (B, K or 1, G T or 1, ·), from (B, N or 1, T or 1,
    ·).
    """
    _, num_heads, seq_len, _ = shape
    if num_heads == num_kv_heads or x.shape[1:3] == (1, 1):
        return x
    if x.shape[1] == 1:
        return jnp.tile(x, (1, 1, num_heads // num_kv_heads, 1))
    x = jnp.broadcast_to(x, (*x.shape[:2], seq_len, x.shape[3]))
    return x.reshape(x.shape[0], num_kv_heads, -1, x.shape[3])


@jax.custom_jvp
def _hide(scores: Array, limit: Array) -> Array:
    """Return the scores, -inf where the limit is; their gradient there is 0, even of NaN."""
    return jnp.minimum(scores, limit)


@_hide.defjvp
def _hide_tangent(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return _hide(*primals), zero_where(tangents[0], jnp.isneginf(primals[1]))
