"""Windows and chunks, a block of queries at a time over the keys of its span."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from mha_jax.compiled import compiled
from mha_jax.kernels import blockwise, whole
from mha_jax.kernels.blocks import BlockSizes, place_in
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
    parts = _Parts.of(query, key, mask, scores, sizes=sizes, tiles_heads=platform == "cpu" and not is_automatic(query))
    nonfinite_rows, nonfinite_keys = nonfinite_tokens(query), nonfinite_tokens(key) | nonfinite_tokens(value)
    divisors = whole.divisors_of(query), whole.divisors_of(key)
    is_stored = parts.num_scores <= (4 if platform == "cpu" else 1) * sizes.stored(platform)

    def attend_part(number: Array) -> Array:
        part = parts.part(number)
        rows = zero_where(part.rows_of(query), part.rows_of(nonfinite_rows))
        are_nonfinite = part.keys_of(nonfinite_keys)
        keys, values = (zero_where(part.keys_of(x), are_nonfinite) for x in (key, value))
        mask, scores = parts.mask_of(part), parts.scores_of(part)
        if is_stored:
            of_part = part.rows_of(divisors[0]), part.keys_of(divisors[1])
            return whole.attend_finite(rows, keys, values, mask, scores, divisors=of_part)
        return blockwise.attend(rows, keys, values, mask, scores, sizes=sizes, platform=platform)

    # Recompute instead of storing residuals of each block.
    numbers = jnp.arange(parts.num_parts, dtype=jnp.int32)
    contexts = lax.map(jax.checkpoint(attend_part), numbers)
    checks_first = platform == "cpu" and not is_automatic(query)  # devices, or a host, would have to agree on whether
    wrong = _wrong_in_parts(parts, numbers, nonfinite_rows, nonfinite_keys, checks_first=checks_first)
    return parts.joined(nan_where(contexts, wrong))


def _num_together(span: Span) -> int:
    """Return the number of queries in a block: a chunk, or few enough that their windows mostly overlap."""
    return span.chunk_size or max(128, (span.window_size or 0) // 4)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


class _Part(NamedTuple):
    """Part of the work: a block of queries of some heads, and the keys of their spans.

    Attributes:
        sequence, head, row: the first of each; the head is a key/value head.
        key: the first key; below 0 or too far back for the last blocks
    """

    sequence: Array | int
    head: Array | int
    row: Array
    key: Array
    shape: tuple[int, int, int, int, int]  # numbers of sequences, key/value heads, query heads of each, queries, keys

    def rows_of(self, x: Array) -> Array:
        """Return the queries of a block, from (B or 1, N or 1, T or 1, ·)."""
        return self._block_of(x, (self.row, 0), (self.shape[3], x.shape[3]))

    def keys_of(self, x: Array) -> Array:
        """Return the keys of a block, from (B, K, S, ·)."""
        starts, sizes = (self.sequence, self.head, self.key, 0), (*self.shape[:2], self.shape[4], x.shape[3])
        return lax.dynamic_slice(x, starts, sizes)

    def scores_of(self, x: Array | None) -> Array | None:
        """Return the scores of a block, from (B or 1, N or 1, T or 1, S or 1)."""
        return None if x is None else self._block_of(to_scores_rank(x), (self.row, self.key), self.shape[3:])

    def _block_of(self, x: Array, starts: tuple[Any, ...], sizes: tuple[int, ...]) -> Array:
        sequences, num_kv_heads, group_size = self.shape[:3]
        starts, sizes = (self.sequence, self.head * group_size, *starts), (sequences, num_kv_heads * group_size, *sizes)
        return lax.dynamic_slice(x, *place_in(x, starts, sizes))


class _Parts(NamedTuple):
    """All parts of the work: tiles of heads, and blocks of the queries of each, the last of which may overlap another.

    Attributes:
        before: keys of a block before its first query.
        shape: numbers of sequences, key/value heads, query heads of each, queries, and keys in a part.
        of: these numbers of all parts together.
        between: first visible key of each query, and the one after the last, (B or 1, 1, T, 1); others are hidden.
        mask: boolean mask of all queries and keys, or None.
        scores: scores of all queries and keys.
    """

    before: int
    shape: tuple[int, int, int, int, int]
    whole: tuple[int, int, int, int, int]
    between: tuple[Array, ...]
    mask: Array | None
    scores: Scores

    @classmethod
    def of(
        cls, query: Array, key: Array, mask: Mask, scores: Scores, *, sizes: BlockSizes, tiles_heads: bool
    ) -> "_Parts":
        """Return the parts of a call; with `tiles_heads` those of a sequence, with few enough heads for the caches."""
        span: Any = mask.span
        (batch_size, num_heads, seq_len_q, _), (_, num_kv_heads, seq_len_k, _) = query.shape, key.shape
        size, before, group_size = _num_together(span), _aligned(-span.first(0)), num_heads // num_kv_heads
        num_keys = min(before + (size if mask.is_causal else _aligned(span.stop(size - 1))), seq_len_k)
        tile = (batch_size, num_kv_heads)
        num_scores = group_size * size * num_keys
        if tiles_heads and not scores.has_distances and num_scores <= 4 * sizes.few_scores:
            fitting = max(LIM // num_scores, 1)
            tile = (1, max(n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n <= fitting))
        between = tuple(x[:, None, :, None] for x in mask.key_range(seq_len_q, seq_len_k))
        whole = (batch_size, num_kv_heads, group_size, seq_len_q, seq_len_k)
        return cls(before, (*tile, group_size, size, num_keys), whole, between, mask.mask, scores)

    @property
    def num_scores(self) -> int:
        """Number of scores in a part."""
        return math.prod(self.shape)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of queries."""
        return -(-self.whole[3] // self.shape[3])

    @property
    def num_parts(self) -> int:
        """Number of all parts."""
        return self.whole[0] // self.shape[0] * self.whole[1] // self.shape[1] * self.num_blocks

    def part(self, number: Array) -> _Part:
        """Return a part."""
        sequences, num_kv_heads, _, size, num_keys = self.shape
        tiles_of_sequence = self.whole[1] // num_kv_heads
        sequence, head, block = 0, 0, number
        if self.num_parts > self.num_blocks:
            tile, block = jnp.divmod(number, self.num_blocks)
            sequence, head = tile // tiles_of_sequence, tile % tiles_of_sequence * num_kv_heads
        row = jnp.minimum(block * size, self.whole[3] - size)
        key = jnp.clip(block * size - self.before, 0, self.whole[4] - num_keys)
        return _Part(sequence, head, row, key, self.shape)

    def mask_of(self, part: _Part) -> Mask:
        """Return the mask of a part."""
        first, stop = (part.rows_of(x) for x in self.between)
        keys = part.key + jnp.arange(self.shape[4], dtype=jnp.int32)
        hidden, others = (keys < first) | (keys >= stop), part.scores_of(self.mask)
        return Mask(hidden if others is None else hidden | others, q_offset=(part.row - part.key).reshape(1))

    def scores_of(self, part: _Part) -> Scores:
        """Return the scores of a part."""
        sinks = self.scores.sinks
        sinks = None if sinks is None else part.scores_of(sinks[None, :, None, None]).ravel()
        return replace(self.scores, bias=part.scores_of(self.scores.bias), sinks=sinks)

    def joined(self, x: Array) -> Array:
        """Return (B, N, T, ·) from results of all parts (parts, …), each of the last rows once."""
        sequences, num_kv_heads, group_size, size, _ = self.shape
        num_heads = num_kv_heads * group_size
        x = x.reshape(self.whole[0] // sequences, -1, self.num_blocks, sequences, num_heads, size, x.shape[-1])
        x = jnp.transpose(x, (0, 3, 1, 4, 2, 5, 6)).reshape(self.whole[0], self.whole[1] * group_size, -1, x.shape[-1])
        twice = x.shape[2] - self.whole[3]
        if not twice:
            return x
        last = x.shape[2] - size
        return jnp.concatenate([x[:, :, :last], x[:, :, last + twice :]], axis=2)


LIM = 2**20


def _wrong_in_parts(
    parts: _Parts, numbers: Array, nonfinite_rows: Array, nonfinite_keys: Array, *, checks_first: bool
) -> Bool[Array, "parts B N T 1"]:
    """Return the rows to set to NaN: not finite without being fully masked, or attending to a non-finite key."""

    def look_in(number: Array) -> Array:
        part = parts.part(number)
        hidden: Any = parts.mask_of(part).with_bias(parts.scores_of(part).bias).mask
        is_wrong = part.rows_of(nonfinite_rows) & ~hidden.all(axis=-1, keepdims=True)
        marked = jnp.repeat(part.keys_of(nonfinite_keys)[..., 0], parts.shape[2], axis=1)
        return is_wrong | attends_to_any(marked, parts.shape[3], Mask(hidden), checks_first=checks_first)

    def look() -> Array:
        return lax.map(look_in, numbers)

    if not checks_first:
        return look()
    is_any = nonfinite_rows.any() | nonfinite_keys.any()
    # All False, but derived from the same arrays: in `shard_map` both branches must vary over the same devices.
    return lax.cond(is_any, look, lambda: lax.map(lambda i: parts.part(i).rows_of(nonfinite_rows), numbers) & is_any)
