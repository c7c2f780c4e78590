"""NaN and infinity, contained: `contained` makes them reach exactly the rows that attend to them.

By default a NaN does what it does in JAX. The weight of a masked key is 0, and 0 * NaN is NaN, so
it may reach rows that mask it. In a contained kernel non-finite tokens are set to 0 before the
products, forward and backward, and the rows that attend to them become NaN afterwards. Finite
inputs give the same values, bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float

from mha_jax.arrays import Array, nan_where, zero_where
from mha_jax.checks import check_kernel
from mha_jax.compiled import compiled
from mha_jax.kernels import Kernel, step_of
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.padding import find_padding
from mha_jax.scores import Scores
from mha_jax.sharding import head_sharding, is_automatic, with_auto_axes


def contained(kernel: Kernel) -> Kernel:
    """Return a kernel in which NaN and infinity reach exactly the rows that attend to them, forward
    and backward.

    For a layer: `layer.kernel = contained(fused.attend)`. It covers calls without attention
    weights.

    - A row is NaN if its query is not finite, or a key, value or bias that it attends to, or if all
      its scores overflow to -inf.
    - All other rows have the values that they would have without the NaN, bit for bit.
    - Tokens that no row attends to affect no gradient, and have a gradient of 0.

    No value is read: a call follows the rules even if all values are finite, and a step over a
    cache looks at all of its slots.

    Args:
        kernel: computes the context, (B, N, T, Hv), of finite inputs.

    Raises:
        TypeError: if the kernel cannot be called.
    """
    check_kernel(kernel)
    return Contained(kernel)


@dataclass(frozen=True)
class Contained:
    """A kernel as `contained` returns it. Unlike a closure it can be pickled.

    Attributes:
        kernel: computes the context of finite inputs.
    """

    kernel: Kernel

    def __call__(self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        """Return the context, (B, N, T, Hv)."""
        return _contain(self.kernel, query, key, value, mask, scores)

    def step(self, query: Array, key: Array, value: Array, mask: Mask, scores: Scores) -> Array:
        """Return the context of one new token of each sequence over a cache."""
        return _contain(step_of(self.kernel), query, key, value, mask, scores)

    def find_padding(
        self, mask: Mask, batch_size: int, seq_len: int
    ) -> tuple[Mask, Bool[Array, "B S"] | None]:
        """Return the mask, and which tokens are padding, as the kernel finds them."""
        find = getattr(self.kernel, "find_padding", find_padding)
        return find(mask, batch_size, seq_len)


def _contain(
    kernel: Kernel, query: Array, key: Array, value: Array, mask: Mask, scores: Scores
) -> Array:
    """Call a kernel with non-finite tokens as 0, and set rows that attend to one to NaN."""
    if not query.size or not key.size:
        return kernel(query, key, value, mask, scores)
    contain = with_auto_axes(head_sharding)(partial(_contain_local, kernel))
    return contain(query, key, value, mask, scores)


def _contain_local(
    kernel: Kernel, query: Array, key: Array, value: Array, mask: Mask, scores: Scores
) -> Array:
    """Do so for arrays without explicit axes."""
    finite, rows = _set_aside(query, key, value, mask, scores)
    context = kernel(
        finite.query, finite.key, finite.value, mask, replace(scores, bias=finite.bias)
    )
    return _with_nan(context, rows)


class _Finite(NamedTuple):
    """Finite inputs of a kernel.

    Attributes:
        query, key, value: heads with 0 for tokens that are not finite.
        bias: bias of the scores with 0 for NaN and +infinity, or None.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None


class _NanRows(NamedTuple):
    """Rows that become NaN, (B, N, T, 1).

    Attributes:
        always: rows with a query that is not finite, or that attend to something not finite.
        if_zero: rows whose scores may all have overflowed to -inf, for which a kernel may return 0.
    """

    always: Array
    if_zero: Array


@compiled()
def _set_aside(
    query: Array, key: Array, value: Array, mask: Mask, scores: Scores
) -> tuple[_Finite, _NanRows]:
    """Return the inputs with 0 for everything that is not finite, and the rows that depend on
    it.
    """
    num_groups = query.shape[1] // key.shape[1]
    seq_len_q = query.shape[2]
    seq_len_k = key.shape[2]
    nan_rows = nonfinite_tokens(query)
    nonfinite_keys = nonfinite_tokens(key) | nonfinite_tokens(value)
    query = zero_where(query, nan_rows)
    key = zero_where(key, nonfinite_keys)
    value = zero_where(value, nonfinite_keys)
    nonfinite_keys = jnp.repeat(nonfinite_keys[..., 0], num_groups, axis=1)
    full_mask = mask.with_bias(scores.bias)
    nan_rows = nan_rows | attends_to_any(nonfinite_keys, seq_len_q, full_mask)
    bias = scores.bias
    if bias is not None:
        nonfinite_bias = jnp.isnan(bias) | jnp.isposinf(bias)
        bias = zero_where(bias, nonfinite_bias)
        hidden: Any = full_mask.to_bool(seq_len_q, seq_len_k)
        nonfinite_bias = to_scores_rank(nonfinite_bias) & ~to_scores_rank(hidden)
        nan_rows = nan_rows | nonfinite_bias.any(axis=-1, keepdims=True)
    has_key = attends_to_any(jnp.ones_like(nonfinite_keys), seq_len_q, full_mask)
    if "sinks" not in scores.learned:
        factor = query.shape[3] * max(scores.spec.score_scale, 1.0)
        may_be_lost = _may_overflow(_largest_features(query), _largest_features(key), factor)
    else:  # sinks take the whole weight of a row whose scores are all -inf
        may_be_lost = jnp.zeros_like(has_key)
    return _Finite(query, key, value, bias), _NanRows(nan_rows & has_key, may_be_lost & has_key)


@compiled()
def _with_nan(context: Array, rows: _NanRows) -> Array:
    """Return the context with NaN in these rows."""
    is_zero = (context == 0).all(axis=-1, keepdims=True)
    return nan_where(context, rows.always | (rows.if_zero & is_zero))


def nonfinite_tokens(x: Float[Array, "*tokens H"]) -> Bool[Array, "*tokens 1"]:
    """Return True for each token that contains a NaN or an infinity."""
    return ~jnp.isfinite(x).all(axis=-1, keepdims=True)


def _largest_features(x: Float[Array, "*tokens H"]) -> Float[Array, "*tokens 1"]:
    """Return the size of the largest feature of each token, which must be finite: XLA may lose a
    NaN.
    """
    return jnp.abs(lax.stop_gradient(x)).max(axis=-1, keepdims=True)


def attends_to_any(
    marked: Bool[Array, "B N S"], seq_len_q: int, mask: Mask
) -> Bool[Array, "B N T 1"]:
    """Return whether each query attends to any of the marked keys; T and S are not 0."""
    seq_len_k = marked.shape[2]
    if mask.has_only("is_causal", "key_padding_lengths", "span", "q_offset"):
        first, stop = (x.clip(0, seq_len_k) for x in mask.key_range(seq_len_q, seq_len_k))
        # Up to each key.
        counts = jnp.pad(lax.cumsum(marked.astype(jnp.int32), axis=2), [(0, 0), (0, 0), (1, 0)])
        before, within = (
            jnp.take_along_axis(counts, bound[:, None], axis=2) for bound in (first, stop)
        )
        return (within > before)[..., None]
    attended = _attended_keys(mask, seq_len_q, seq_len_k)
    shape = (*marked.shape[:2], seq_len_q, 1)

    def among(begin: Array | int, size: int) -> Array:
        keys = lax.dynamic_slice_in_dim(marked, begin, size, axis=2)
        return jnp.broadcast_to(
            (attended(begin, size) & keys[:, :, None]).any(axis=-1, keepdims=True), shape
        )

    # Devices would have to agree on whether to check, and XLA gathers what it slices.
    if is_automatic(marked):
        return among(0, seq_len_k)
    # Scores are checked only if needed. Without keys the result is False, of the type that
    # `shard_map` expects.
    return lax.cond(marked.any(), lambda: _in_any_block(among, seq_len_k), lambda: among(0, 0))


def _attended_keys(
    mask: Mask, seq_len_q: int, seq_len_k: int
) -> Callable[[Array | int, int], Array]:
    """Return a function of the first key and the number of some: those that queries attend to, (B,
    N or 1, T, s).
    """
    first, stop = (x[:, None, :, None] for x in mask.key_range(seq_len_q, seq_len_k))

    def attended(begin: Array | int, size: int) -> Array:
        keys = (begin + jnp.arange(size, dtype=jnp.int32))[None, None, None]
        is_attended = (keys >= first) & (keys < stop)
        if mask.mask is not None:
            hidden = to_scores_rank(mask.mask)
            if hidden.shape[3] > 1:
                hidden = lax.dynamic_slice_in_dim(hidden, begin, size, axis=3)
            is_attended &= ~hidden
        if mask.segments is not None:
            query_ids, key_ids = mask.segments
            key_ids = lax.dynamic_slice_in_dim(key_ids, begin, size, axis=1)
            is_attended &= query_ids[:, None, :, None] == key_ids[:, None, None]
        return is_attended

    return attended


def _in_any_block(is_any_of: Callable[[Array | int, int], Array], seq_len_k: int) -> Array:
    """Return whether a function of some keys is True of any of them: block by block, not of all
    pairs at once.
    """
    size = min(seq_len_k, 128)  # pairs of T queries and 128 keys in memory

    def add(i: Array, is_any: Array) -> Array:
        return is_any | is_any_of(jnp.minimum(i * size, seq_len_k - size), size)

    return lax.fori_loop(1, -(-seq_len_k // max(size, 1)), add, is_any_of(0, size))


def _may_overflow(
    of_query: Float[Array, "B N T 1"], of_key: Float[Array, "B K S 1"], factor: float
) -> Bool[Array, "B N T 1"]:
    """Return whether the largest feature of a row times the largest feature of any key times a
    factor exceeds float32.
    """
    # Each is scaled by 2**-64, because the product itself may overflow; float32 ends at 2**128, and
    # 0.99 instead of 1 allows for the rounding of these products.
    of_query, of_key = (x.astype(jnp.float32) * 2.0**-64 for x in (of_query, of_key))
    largest_key = jnp.repeat(
        of_key.max(axis=2, keepdims=True), of_query.shape[1] // of_key.shape[1], axis=1
    )
    return of_query * largest_key * factor >= 0.99
