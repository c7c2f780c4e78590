"""Attention in parts where a window or a chunk hides most keys: on a CPU, a few queries at a time."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from mha_jax import stages
from mha_jax.compiled import compiled
from mha_jax.kernels import blockwise
from mha_jax.kernels.blocks import BlockSizes
from mha_jax.kernels.nonfinite import emptied, not_finite, sees_any, spoilt
from mha_jax.masks import Masking, to_scores_rank
from mha_jax.parallel.sharding import is_automatic
from mha_spec import AttentionSpec
from mha_spec.reach import Reach


def num_together(reach: Reach) -> int:
    """Number of queries in a part: those of a chunk, or so many that they share most keys of a window."""
    return reach.chunk_size or max(128, (reach.window_size or 0) // 4)


class _Parts(NamedTuple):
    """A few queries at a time, and the keys in their reach.

    Attributes:
        size: queries of a part.
        before: keys of a part before its first query.
        num_keys: keys of a part.
        masking: what hides keys and is added to scores, padded to whole parts, so that the keys of part i begin where
            its queries do.
    """

    size: int
    before: int
    num_keys: int
    masking: Masking

    def rows_of(self, x: Array, begin: Array) -> Array:
        """The queries of a part, of (B, N, T, ·)."""
        return lax.dynamic_slice_in_dim(x, begin, self.size, 2)

    def keys_of(self, x: Array, begin: Array) -> Array:
        """The keys of a part, of (B, K, S, ·)."""
        return lax.dynamic_slice_in_dim(x, begin, self.num_keys, 2)

    def masking_of(self, begin: Array) -> Masking:
        """What hides keys from a part, and is added to its scores."""
        whole, first = self.masking, self.before - begin  # the first key that there is
        reach, lengths = whole.reach, jnp.asarray(whole.key_padding_lengths)
        mask, bias = (None if x is None else self._scores_of(x, begin) for x in (whole.mask, whole.bias))
        if self.before:
            is_before = jnp.arange(self.num_keys, dtype=jnp.int32)[None, None, None] < first
            mask = is_before if mask is None else mask | is_before
        part = replace(whole, mask=mask, bias=bias, key_padding_lengths=jnp.maximum(lengths + first, 0), reach=None)
        if reach is None or reach.chunk_size is not None:  # of its own chunk a query sees all, or all up to itself
            return part
        return replace(part, reach=reach, offsets=jnp.full((1,), self.before, jnp.int32))

    def hidden_in(self, part: Masking) -> Any:
        """What the masking of a part hides; there are lengths."""
        return part.with_infinite_bias().joined(self.size, self.num_keys)

    def _scores_of(self, x: Array, begin: Array) -> Array:
        x = x if x.shape[2] == 1 else self.rows_of(x, begin)
        return x if x.shape[3] == 1 else lax.dynamic_slice_in_dim(x, begin, self.num_keys, 3)


@compiled("spec", "block_sizes")
def attend_in_reach(
    query: Array, key: Array, value: Array, masking: Masking, *, spec: AttentionSpec | None, block_sizes: BlockSizes
) -> Array:
    """A few queries at a time over the keys that they reach: the work grows with the length, not with its square."""
    (batch_size, num_heads, seq_len_q, _), seq_len_k = query.shape, key.shape[2]
    reach: Any = masking.reach
    size = num_together(reach)
    num_parts = -(-seq_len_q // size)
    before = -reach.first(0)  # keys that a part sees before its first query, and after its last
    after = 0 if masking.is_causal else reach.stop(size - 1) - size
    more_rows = (0, num_parts * size - seq_len_q)
    more_keys = (before, max(num_parts * size + after - seq_len_k, 0))

    def padded(x: Array | None, *paddings: tuple[int, int]) -> Array | None:
        if x is None:
            return None
        x = to_scores_rank(x)
        paddings = tuple((0, 0) if of == 1 else pad for of, pad in zip(x.shape[2:], paddings, strict=True))
        return jnp.pad(x, [(0, 0), (0, 0), *paddings])

    # What is not finite is looked for once, for keys are in the reach of several parts.
    wrong_rows, wrong_keys = not_finite(query), not_finite(key) | not_finite(value)
    query, key, value = emptied(query, wrong_rows), emptied(key, wrong_keys), emptied(value, wrong_keys)
    query, wrong_rows = (jnp.pad(x, [(0, 0), (0, 0), more_rows, (0, 0)]) for x in (query, wrong_rows))
    key, value, wrong_keys = (jnp.pad(x, [(0, 0), (0, 0), more_keys, (0, 0)]) for x in (key, value, wrong_keys))
    mask, bias = (padded(x, more_rows, more_keys) for x in (masking.mask, masking.bias))
    lengths: Any = masking.key_padding_lengths
    lengths = jnp.full((batch_size,), seq_len_k, jnp.int32) if lengths is None else lengths
    masking = replace(masking, mask=mask, bias=bias, key_padding_lengths=lengths)
    parts = _Parts(size, before, before + size + after, masking)

    def attend_part(begin: Array) -> tuple[Array, Array]:
        part, rows = parts.masking_of(begin), parts.rows_of(query, begin)
        keys, values = (parts.keys_of(x, begin) for x in (key, value))
        if batch_size * num_heads * size * parts.num_keys > block_sizes.few_scores:
            context = blockwise.attend_in_layer(rows, keys, values, part, spec=spec, block_sizes=block_sizes)
            return context, jnp.zeros((*rows.shape[:3], 1), bool)
        scores = stages.attention_scores(rows, keys, part.bias, spec, part.offsets, part.relative_bias)
        scores = jnp.where(parts.hidden_in(part), -jnp.inf, scores)
        context, log_sums = blockwise.weighed_sum(scores, values, part.sinks)
        return context.astype(query.dtype), jnp.isposinf(log_sums)

    # What a part stores for its gradient it computes again.
    begins = jnp.arange(num_parts, dtype=jnp.int32) * size
    contexts, gave_nothing = lax.map(jax.checkpoint(attend_part), begins)
    contexts = spoilt(contexts, _wrong_in_parts(parts, begins, wrong_rows, wrong_keys, gave_nothing))
    contexts = jnp.moveaxis(contexts, 0, 2)  # (B, N, parts, size, H)
    return contexts.reshape(batch_size, num_heads, num_parts * size, contexts.shape[4])[:, :, :seq_len_q]


def _wrong_in_parts(
    parts: _Parts, begins: Array, wrong_rows: Array, wrong_keys: Array, gave_nothing: Array
) -> Bool[Array, "parts B N T 1"]:
    """The rows of each part that see something, and are not finite, see what is not, or were given nothing by it."""
    marked = jnp.repeat(wrong_keys, wrong_rows.shape[1] // wrong_keys.shape[1], axis=1)

    def look_in(part: tuple[Array, Array]) -> Array:
        begin, gave_nothing = part
        hidden = parts.hidden_in(parts.masking_of(begin))
        is_wrong = (parts.rows_of(wrong_rows, begin) | gave_nothing) & ~hidden.all(axis=-1, keepdims=True)
        return is_wrong | sees_any(parts.keys_of(marked, begin)[..., 0], parts.size, Masking(hidden))

    def look() -> Array:
        return lax.map(look_in, (begins, gave_nothing))

    if is_automatic(wrong_rows):  # devices would have to agree on whether to look
        return look()
    is_any = wrong_rows.any() | wrong_keys.any() | gave_nothing.any()
    # All False, but made of the same arrays: in a `shard_map` both branches must vary over the same devices.
    return lax.cond(is_any, look, lambda: gave_nothing & is_any)
