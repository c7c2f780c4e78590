"""Windows and chunks, a block of queries at a time over the keys of its span."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from mha_jax.compiled import compiled
from mha_jax.kernels import blockwise, whole
from mha_jax.kernels.blocks import BlockSizes
from mha_jax.kernels.nonfinite import attends_to_any, nan_where, nonfinite_tokens, zero_where
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.parallel.sharding import is_automatic
from mha_jax.scores import Scores
from mha_spec.span import Span


def supports(query: Array, mask: Mask) -> bool:
    """Return whether there is a span, and there are enough queries to share its keys."""
    is_known = mask.has_only("mask", "is_causal", "key_padding_lengths", "span")
    return is_known and mask.span is not None and query.shape[2] > _num_together(mask.span)


@compiled("sizes", "platform")
def attend(
    query: Array, key: Array, value: Array, mask: Mask, scores: Scores, *, sizes: BlockSizes, platform: str
) -> Array:
    """Return the context, a block of queries at a time over the keys of its span: work linear in the length.

    Non-finite tokens are searched for once here, because spans of blocks overlap.
    """
    (batch_size, num_heads, seq_len_q, _), seq_len_k = query.shape, key.shape[2]
    span: Any = mask.span
    size = _num_together(span)
    num_parts = -(-seq_len_q // size)
    before = -span.first(0)  # keys of a block before its first query, and after its last
    after = 0 if mask.is_causal else span.stop(size - 1) - size
    more_rows = (0, num_parts * size - seq_len_q)
    more_keys = (before, max(num_parts * size + after - seq_len_k, 0))

    def padded(x: Array | None, *paddings: tuple[int, int]) -> Array | None:
        if x is None:
            return None
        x = to_scores_rank(x)
        paddings = tuple((0, 0) if of == 1 else pad for of, pad in zip(x.shape[2:], paddings, strict=True))
        return jnp.pad(x, [(0, 0), (0, 0), *paddings])

    nonfinite_rows, nonfinite_keys = nonfinite_tokens(query), nonfinite_tokens(key) | nonfinite_tokens(value)
    query, key, value = (
        zero_where(query, nonfinite_rows),
        zero_where(key, nonfinite_keys),
        zero_where(value, nonfinite_keys),
    )
    query, nonfinite_rows = (jnp.pad(x, [(0, 0), (0, 0), more_rows, (0, 0)]) for x in (query, nonfinite_rows))
    key, value, nonfinite_keys = (jnp.pad(x, [(0, 0), (0, 0), more_keys, (0, 0)]) for x in (key, value, nonfinite_keys))
    lengths: Any = mask.key_padding_lengths
    lengths = jnp.full((batch_size,), seq_len_k, jnp.int32) if lengths is None else lengths
    mask = replace(mask, mask=padded(mask.mask, more_rows, more_keys), key_padding_lengths=lengths)
    scores = replace(scores, bias=padded(scores.bias, more_rows, more_keys))
    parts = _Parts(size, before, before + size + after, mask, scores)

    def attend_part(begin: Array) -> Array:
        rows, part, scores = parts.rows_of(query, begin), parts.mask_of(begin), parts.scores_of(begin)
        keys, values = (parts.keys_of(x, begin) for x in (key, value))
        if batch_size * num_heads * size * parts.num_keys > sizes.stored(platform):
            return blockwise.attend(rows, keys, values, part, scores, sizes=sizes, platform=platform)
        return whole.attend_finite(rows, keys, values, part, scores)

    # Recompute instead of storing residuals of each block.
    begins = jnp.arange(num_parts, dtype=jnp.int32) * size
    contexts = lax.map(jax.checkpoint(attend_part), begins)
    checks_first = platform == "cpu" and not is_automatic(query)  # devices, or a host, would have to agree on whether
    wrong = _wrong_in_parts(parts, begins, nonfinite_rows, nonfinite_keys, checks_first=checks_first)
    contexts = nan_where(contexts, wrong)
    contexts = jnp.moveaxis(contexts, 0, 2)  # (B, N, parts, size, H)
    return contexts.reshape(batch_size, num_heads, num_parts * size, contexts.shape[4])[:, :, :seq_len_q]


def _num_together(span: Span) -> int:
    """Return the number of queries in a block: a chunk, or few enough that their windows mostly overlap."""
    return span.chunk_size or max(128, (span.window_size or 0) // 4)


class _Parts(NamedTuple):
    """Blocks of queries, and the keys of their spans.

    Attributes:
        size: queries per block.
        before: keys of a block before its first query.
        num_keys: keys per block.
        mask, scores: for all queries and keys, padded to whole blocks, so that keys of block i start with its queries.
    """

    size: int
    before: int
    num_keys: int
    mask: Mask
    scores: Scores

    def rows_of(self, x: Array, begin: Array) -> Array:
        """Return the queries of a block, from (B, N, T, ·)."""
        return lax.dynamic_slice_in_dim(x, begin, self.size, 2)

    def keys_of(self, x: Array, begin: Array) -> Array:
        """Return the keys of a block, from (B, K, S, ·)."""
        return lax.dynamic_slice_in_dim(x, begin, self.num_keys, 2)

    def mask_of(self, begin: Array) -> Mask:
        """Return the mask of a block."""
        whole, first = self.mask, self.before - begin  # first existing key
        span, lengths, mask = whole.span, jnp.asarray(whole.key_padding_lengths), self._block_of(whole.mask, begin)
        if self.before:
            is_before = jnp.arange(self.num_keys, dtype=jnp.int32)[None, None, None] < first
            mask = is_before if mask is None else mask | is_before
        part = replace(whole, mask=mask, key_padding_lengths=jnp.maximum(lengths + first, 0), span=None)
        if span is None or span.chunk_size is not None:  # a query attends to its chunk, up to itself if causal
            return part
        return replace(part, span=span, q_offset=jnp.full((1,), self.before, jnp.int32))

    def scores_of(self, begin: Array) -> Scores:
        """Return the scores of a block."""
        return replace(self.scores, bias=self._block_of(self.scores.bias, begin))

    def hidden_from(self, begin: Array) -> Any:
        """Return the boolean mask of a block, if there are lengths."""
        hidden = self.mask_of(begin).with_bias(self.scores_of(begin).bias)
        return hidden.to_bool(self.size, self.num_keys)

    def _block_of(self, x: Array | None, begin: Array) -> Array | None:
        if x is None:
            return None
        x = x if x.shape[2] == 1 else self.rows_of(x, begin)
        return x if x.shape[3] == 1 else lax.dynamic_slice_in_dim(x, begin, self.num_keys, 3)


def _wrong_in_parts(
    parts: _Parts, begins: Array, nonfinite_rows: Array, nonfinite_keys: Array, *, checks_first: bool
) -> Bool[Array, "parts B N T 1"]:
    """Return the rows to set to NaN: not finite without being fully masked, or attending to a non-finite key."""
    marked = jnp.repeat(nonfinite_keys, nonfinite_rows.shape[1] // nonfinite_keys.shape[1], axis=1)

    def look_in(begin: Array) -> Array:
        hidden = parts.hidden_from(begin)
        is_wrong = parts.rows_of(nonfinite_rows, begin) & ~hidden.all(axis=-1, keepdims=True)
        keys = parts.keys_of(marked, begin)[..., 0]
        return is_wrong | attends_to_any(keys, parts.size, Mask(hidden), checks_first=checks_first)

    def look() -> Array:
        return lax.map(look_in, begins)

    if not checks_first:
        return look()
    is_any = nonfinite_rows.any() | nonfinite_keys.any()
    # All False, but derived from the same arrays: in `shard_map` both branches must vary over the same devices.
    rows = nonfinite_rows.reshape(*nonfinite_rows.shape[:2], len(begins), parts.size, 1)
    return lax.cond(is_any, look, lambda: jnp.moveaxis(rows, 2, 0) & is_any)
