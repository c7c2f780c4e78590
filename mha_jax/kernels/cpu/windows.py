"""Windows and chunks, a block of queries at a time over the keys of its span."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_jax.arrays import Array
from mha_jax.compiled import compiled
from mha_jax.kernels.cpu import blockwise, whole
from mha_jax.kernels.cpu.blocks import BlockSizes, place_in
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.scores import Scores
from mha_jax.sharding import is_automatic
from mha_spec.span import Span

HEADS_FACTOR = 16
"""Multiple of `few_scores` up to which a CPU works on more than one key/value head at once."""

PART_FACTOR = 32
"""Multiple of `few_scores` up to which a CPU works on a block of one key/value head at once."""


def supports(query: Array, key: Array, mask: Mask, sizes: BlockSizes, platform: str) -> bool:
    """Return whether there is a span, there are enough queries to share its keys, and no block is
    large on a CPU.
    """
    is_known = mask.has_only("mask", "is_causal", "key_padding_lengths", "span")
    if not is_known or mask.span is None or query.shape[2] <= _num_together(mask.span):
        return False
    group_size = query.shape[1] // key.shape[1]
    _, num_keys = _keys_around(mask, key)
    num_scores = group_size * _num_together(mask.span) * num_keys
    return not _is_local(query, platform) or num_scores <= PART_FACTOR * sizes.few_scores


@compiled("sizes", "platform")
def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    scores: Scores,
    *,
    sizes: BlockSizes,
    platform: str,
) -> Array:
    """Return the context, a block of queries at a time over the keys of its span: work linear in
    the length.

    A CPU works on a few heads at a time.
    """
    is_local = _is_local(query, platform)
    parts = _Parts.of(query, key, mask, scores, few_scores=sizes.few_scores if is_local else None)
    fits_cache = math.prod(parts.per_part[2:]) <= sizes.few_scores
    has_few = is_local or math.prod(parts.per_part) <= sizes.most_scores

    def attend_part(number: Array) -> Array:
        part = parts.part(number)
        rows = part.rows_of(query)
        keys = part.keys_of(key)
        values = part.keys_of(value)
        mask = parts.mask_of(part)
        scores = parts.scores_of(part)
        if has_few:
            return whole.attend(rows, keys, values, mask, scores, fits_cache=fits_cache)
        return blockwise.attend(rows, keys, values, mask, scores, sizes=sizes, platform=platform)

    # Recompute instead of storing residuals of each block.
    numbers = jnp.arange(parts.num_parts, dtype=jnp.int32)
    return parts.joined(lax.map(jax.checkpoint(attend_part), numbers))


def _is_local(query: Array, platform: str) -> bool:
    """Return whether a CPU computes the call, and XLA does not partition it."""
    return platform == "cpu" and not is_automatic(query)


def _num_together(span: Span) -> int:
    """Return the number of queries in a block: a chunk, or few enough that their windows mostly
    overlap.
    """
    return span.chunk_size or max(128, (span.window_size or 0) // 4)


def _keys_around(mask: Mask, key: Array) -> tuple[int, int]:
    """Return the number of keys of a block before its first query, and of all its keys.

    Keys on either side are rounded up to multiples of 16, for which products are fast.
    """
    span: Any = mask.span
    size = _num_together(span)
    before, after = (
        -(-n // 16) * 16
        for n in (-span.first(0), 0 if mask.is_causal else span.stop(size - 1) - size)
    )
    return before, min(before + size + after, key.shape[2])


class _Sizes(NamedTuple):
    """Numbers of sequences, key/value heads, query heads of each, queries and keys."""

    sequences: int
    kv_heads: int
    group: int
    rows: int
    keys: int


class _Part(NamedTuple):
    """The first sequence, key/value head, query and key of a part of the work, and its sizes."""

    sequence: Array | int
    kv_head: Array | int
    row: Array
    key: Array
    sizes: _Sizes

    def rows_of(self, x: Array) -> Array:
        """Return the part of (B or 1, N or 1, T, ·)."""
        return self._slice(x, (self.row, 0), (self.sizes.rows, x.shape[3]))

    def keys_of(self, x: Array) -> Array:
        """Return the part of (B, K, S, ·)."""
        sizes = self.sizes
        starts = (self.sequence, self.kv_head, self.key, 0)
        return lax.dynamic_slice(
            x, *place_in(x, starts, (sizes.sequences, sizes.kv_heads, sizes.keys, x.shape[3]))
        )

    def block_of(self, x: Array) -> Array:
        """Return the part of (B or 1, N or 1, T or 1, S or 1)."""
        return self._slice(
            to_scores_rank(x), (self.row, self.key), (self.sizes.rows, self.sizes.keys)
        )

    def _slice(self, x: Array, starts: tuple[Array | int, ...], sizes: tuple[int, ...]) -> Array:
        group = self.sizes.group
        starts = (self.sequence, self.kv_head * group, *starts)
        return lax.dynamic_slice(
            x, *place_in(x, starts, (self.sizes.sequences, self.sizes.kv_heads * group, *sizes))
        )


class _Parts(NamedTuple):
    """All parts of the work: some heads, and a block of their queries. The last block may overlap
    another.

    Attributes:
        per_part: sizes of a part.
        total: sizes of all parts together.
        before: keys of a block before its first query.
        between: first visible key of each query, and the one after the last, (B or 1, 1, T, 1);
            others are hidden.
        mask: boolean mask of all queries and keys, or None.
        scores: scores of all queries and keys.
    """

    per_part: _Sizes
    total: _Sizes
    before: int
    between: tuple[Array, ...]
    mask: Array | None
    scores: Scores

    @classmethod
    def of(
        cls, query: Array, key: Array, mask: Mask, scores: Scores, *, few_scores: int | None
    ) -> "_Parts":
        """Return the parts of a call; with `few_scores`, of few enough heads for the caches of a
        CPU.
        """
        batch_size, num_heads, seq_len_q, _ = query.shape
        _, num_kv_heads, seq_len_k, _ = key.shape
        span: Any = mask.span
        size = _num_together(span)
        before, num_keys = _keys_around(mask, key)
        group_size = num_heads // num_kv_heads
        sequences = batch_size
        kv_heads = num_kv_heads
        # Biases by distance belong to all heads.
        if few_scores is not None and not scores.spec.has_distance_bias:
            most = max(HEADS_FACTOR * few_scores // (group_size * size * num_keys), 1)
            sequences = 1
            kv_heads = max(n for n in range(1, most + 1) if num_kv_heads % n == 0)
        first, stop = (x[:, None, :, None] for x in mask.key_range(seq_len_q, seq_len_k))
        return cls(
            _Sizes(sequences, kv_heads, group_size, size, num_keys),
            _Sizes(batch_size, num_kv_heads, group_size, seq_len_q, seq_len_k),
            before,
            (first, stop),
            mask.mask,
            scores,
        )

    @property
    def num_blocks(self) -> int:
        """Number of blocks of queries."""
        return -(-self.total.rows // self.per_part.rows)

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return (
            self.total.sequences
            // self.per_part.sequences
            * self.total.kv_heads
            // self.per_part.kv_heads
            * self.num_blocks
        )

    def part(self, number: Array) -> _Part:
        """Return a part."""
        per_part = self.per_part
        total = self.total
        sequence = 0
        kv_head = 0
        block = number
        if self.num_parts > self.num_blocks:
            tiles = total.kv_heads // per_part.kv_heads
            tile, block = jnp.divmod(number, self.num_blocks)
            sequence = tile // tiles
            kv_head = tile % tiles * per_part.kv_heads
        row = jnp.minimum(block * per_part.rows, total.rows - per_part.rows)
        key = jnp.clip(block * per_part.rows - self.before, 0, total.keys - per_part.keys)
        return _Part(sequence, kv_head, row, key, per_part)

    def mask_of(self, part: _Part) -> Mask:
        """Return the mask of a part."""
        first, stop = (part.rows_of(x) for x in self.between)
        keys = (part.key + jnp.arange(self.per_part.keys, dtype=jnp.int32))[None, None, None]
        hidden = (keys < first) | (keys >= stop)
        if self.mask is not None:
            hidden = hidden | part.block_of(self.mask)
        return Mask(hidden, q_offset=(part.row - part.key).reshape(1))

    def scores_of(self, part: _Part) -> Scores:
        """Return the scores of a part."""
        bias = self.scores.bias
        learned = dict(self.scores.learned)
        if bias is not None:
            bias = part.block_of(bias)
        if "sinks" in learned:
            learned["sinks"] = part.block_of(learned["sinks"][None, :, None, None]).ravel()
        return replace(self.scores, bias=bias, learned=learned)

    def joined(self, x: Array) -> Array:
        """Return (B, N, T, ·) from results of all parts, each row once."""
        per_part = self.per_part
        total = self.total
        x = x.reshape(
            total.sequences // per_part.sequences,
            -1,
            self.num_blocks,
            per_part.sequences,
            per_part.kv_heads * per_part.group,
            *x.shape[3:],
        )
        # Each axis of parts before the same axis within them.
        x = jnp.transpose(x, (0, 3, 1, 4, 2, 5, 6))
        x = x.reshape(total.sequences, total.kv_heads * total.group, -1, x.shape[6])
        # The last block may begin before its position.
        twice = x.shape[2] - total.rows
        last = x.shape[2] - per_part.rows
        if not twice:
            return x
        return jnp.concatenate([x[:, :, :last], x[:, :, last + twice :]], axis=2)
