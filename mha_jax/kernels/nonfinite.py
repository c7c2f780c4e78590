"""Containment of NaN and infinity: rows that mask a non-finite token stay finite, rows that attend to it become NaN.

0 * NaN is NaN. Non-finite tokens are therefore set to 0 before each product, forward and backward, and dependent
outputs to NaN afterwards. Finite inputs are unaffected.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from mha_jax.compiled import compiled
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.parallel.sharding import is_automatic
from mha_jax.scores import Scores

_RANGES = ("is_causal", "key_padding_lengths", "span", "q_offset")  # these hide only keys outside `key_range`


def nonfinite_tokens(x: Float[Array, "*tokens H"]) -> Bool[Array, "*tokens 1"]:
    """Return True for each token that contains a NaN or an infinity."""
    return ~jnp.isfinite(x).all(axis=-1, keepdims=True)


def zero_where(x: Float[Array, "..."], where: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Return x with 0 at `where`, which blocks the gradient."""
    return jnp.where(where, 0.0, x)


def nan_where(x: Float[Array, "..."], where: Bool[Array, "..."]) -> Float[Array, "..."]:
    """Return x with NaN at `where`; the gradient is that of the identity, NaN only if the incoming one is NaN."""
    return x + jnp.where(where, jnp.nan, 0.0)


def attends_to_any(
    marked: Bool[Array, "B N S"], seq_len_q: int, mask: Mask, *, checks_first: bool = True
) -> Bool[Array, "B N T 1"]:
    """Return whether each query attends to any of the marked keys; T and S are not 0.

    Without `checks_first` no value decides what runs next.
    """
    seq_len_k = marked.shape[2]
    if mask.has_only(*_RANGES):
        first, stop = (x.clip(0, seq_len_k) for x in mask.key_range(seq_len_q, seq_len_k))
        counts = jnp.pad(lax.cumsum(marked.astype(jnp.int32), axis=2), [(0, 0), (0, 0), (1, 0)])  # up to each key
        before, within = (jnp.take_along_axis(counts, places[:, None], axis=2) for places in (first, stop))
        return (within > before)[..., None]
    seen = _seen_keys(mask, seq_len_q, seq_len_k)
    shape = (*marked.shape[:2], seq_len_q, 1)

    def among(begin: Array | int, size: int) -> Array:
        keys = lax.dynamic_slice_in_dim(marked, begin, size, axis=2)
        return jnp.broadcast_to((seen(begin, size) & keys[:, :, None]).any(axis=-1, keepdims=True), shape)

    if is_automatic(marked):  # devices would have to agree on whether to check, and XLA gathers what it slices
        return among(0, seq_len_k)
    if not checks_first:
        return _in_any_block(among, seq_len_k)
    # Scores are checked only if needed. Without keys the result is False, of the type that `shard_map` expects.
    return lax.cond(marked.any(), lambda: _in_any_block(among, seq_len_k), lambda: among(0, 0))


def _seen_keys(mask: Mask, seq_len_q: int, seq_len_k: int) -> Callable[[Array | int, int], Array]:
    """Return a function of the first key and the number of some: those that queries attend to, (B, N or 1, T, s)."""
    first, stop = (x[:, None, :, None] for x in mask.key_range(seq_len_q, seq_len_k))

    def seen(begin: Array | int, size: int) -> Array:
        keys = (begin + jnp.arange(size, dtype=jnp.int32))[None, None, None]
        found = (keys >= first) & (keys < stop)
        if mask.mask is not None:
            hidden = to_scores_rank(mask.mask)
            found &= ~(hidden if hidden.shape[3] == 1 else lax.dynamic_slice_in_dim(hidden, begin, size, axis=3))
        if mask.segments is not None:
            of_queries, of_keys = mask.segments
            of_keys = lax.dynamic_slice_in_dim(of_keys, begin, size, axis=1)
            found &= of_queries[:, None, :, None] == of_keys[:, None, None]
        return found

    return seen


def _in_any_block(found_in: Callable[[Array | int, int], Array], seq_len_k: int) -> Array:
    """Return whether a function of some keys is True of any of them: block by block, not of all pairs at once."""
    size = min(seq_len_k, 128)

    def add(i: Array, found: Array) -> Array:
        return found | found_in(jnp.minimum(i * size, seq_len_k - size), size)

    return lax.fori_loop(1, -(-seq_len_k // max(size, 1)), add, found_in(0, size))


def contained_projection(project: Callable[[str, Array], Array]) -> Callable[[str, Array], Array]:
    """Wrap projections: non-finite tokens yield NaN, but none in weight gradients if no query attends to them."""

    def project_finite(name: str, x: Array) -> Array:
        x, wrong = _set_aside(x)
        return _nan_where(project(name, x), wrong)

    return project_finite


@compiled()
def _set_aside(x: Array) -> tuple[Array, Array]:
    wrong = nonfinite_tokens(x)
    return zero_where(x, wrong), wrong


_nan_where = compiled()(nan_where)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def contained(kernel: Callable[..., Array]) -> Callable[..., Array]:
    """Wrap a kernel for finite inputs so that it follows the rules for non-finite ones.

    Non-finite tokens are 0 to the kernel, and rows that attend to one are NaN afterwards.
    """

    @wraps(kernel)
    def attend(query: Array, key: Array, value: Array, mask: Mask, scores: Scores, **options: Any) -> Array:
        hidden = mask.with_bias(scores.bias)
        query, key, value, nonfinite_rows = _contained(query, key, value, hidden)
        return nan_where(kernel(query, key, value, mask, scores, **options), nonfinite_rows)

    return attend


def contained_with_weights(attend: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
    """Wrap `stages.attend` as `contained` wraps a kernel; hidden keys have weight 0 even in rows of NaN."""

    @wraps(attend)
    def contained(query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> tuple[Array, Array]:
        hidden = mask.with_bias(scores.bias).to_bool(query.shape[2], key.shape[2])
        if hidden is None:  # all rows attend to all keys: NaN spreads by itself
            return attend(query, key, value, mask, scores)
        query, key, value, nonfinite_rows = _contained(query, key, value, Mask(hidden))
        context, attn_weights = attend(query, key, value, mask, scores)
        return nan_where(context, nonfinite_rows), nan_where(attn_weights, nonfinite_rows & ~to_scores_rank(hidden))

    return contained


def _contained(query: Array, key: Array, value: Array, hidden: Mask) -> tuple[Array, Array, Array, Array]:
    """Return the inputs with non-finite tokens as 0, and the rows that become NaN, which excludes fully masked ones."""
    nonfinite_rows, nonfinite_keys = nonfinite_tokens(query), nonfinite_tokens(key) | nonfinite_tokens(value)
    query, key, value = (
        zero_where(query, nonfinite_rows),
        zero_where(key, nonfinite_keys),
        zero_where(value, nonfinite_keys),
    )
    nonfinite_rows &= _has_key(hidden, query.shape[2], key.shape[2])
    nonfinite_keys = jnp.repeat(nonfinite_keys[..., 0], query.shape[1] // key.shape[1], axis=1)
    return query, key, value, nonfinite_rows | attends_to_any(nonfinite_keys, query.shape[2], hidden)


def _has_key(hidden: Mask, seq_len_q: int, seq_len_k: int) -> Bool[Array, "#B #N #T 1"]:
    """Return whether a row attends to any key."""
    if hidden.has_only(*_RANGES):
        first, stop = (x.clip(0, seq_len_k) for x in hidden.key_range(seq_len_q, seq_len_k))
        return (first < stop)[:, None, :, None]
    if hidden.mask is not None and hidden.has_only("mask"):
        return ~to_scores_rank(hidden.mask).all(axis=-1, keepdims=True)
    seen = _seen_keys(hidden, seq_len_q, seq_len_k)
    return _in_any_block(lambda *keys: seen(*keys).any(axis=-1, keepdims=True), seq_len_k)
