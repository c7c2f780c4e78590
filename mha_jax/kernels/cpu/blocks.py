"""Blocks of queries and keys: division of the work, scores of a block, and sums over blocks.

Axes: B batch, T query tokens, S key tokens, K key/value heads, G query heads of each, H head_dim,
Hv value_head_dim. Heads that are processed together are on one axis, P, and the queries of their
groups on the next, so that all products are matrix products.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_jax.arrays import Array, at_least_float32
from mha_spec import AttentionSpec
from mha_spec.heads import BareHeads
from mha_spec.rules import as_count


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of blocks. They affect only speed and rounding.

    Attributes:
        few_scores: scores of a key/value head, of up to `keys` keys, for which one kernel is faster
            on a CPU.
        most_scores: number of scores up to which an accelerator may store them, 128 MiB in float32.
        queries: queries per block; twice as many if all attend to the same keys.
        keys: keys per block; the scores of a block fit the caches of two cores.
        last_keys: keys of the last few blocks of a cache, small to read few empty slots; `keys` if
            that is smaller.
        heads_side_by_side: heads of a cache that are read in parallel, each by one core if there
            are enough.
    """

    few_scores: int = 2**16
    most_scores: int = 2**25
    queries: int = 256
    keys: int = 512
    last_keys: int = 128
    heads_side_by_side: int = 16

    def __post_init__(self) -> None:
        for name in ("few_scores", "most_scores"):
            as_count(name, getattr(self, name), minimum=0)
        for name in ("queries", "keys", "last_keys", "heads_side_by_side"):
            as_count(name, getattr(self, name))


FEW_BLOCKS, MOST_BLOCKS = 8, 16
"""Maximum number of blocks of queries that are compiled one by one, which bounds the time to
compile: on a CPU, where more are a loop, and elsewhere, where longer sequences have larger blocks.
"""


class Scoring(NamedTuple):
    """Changes to the dot products of queries and keys.

    Attributes:
        scale: factor of the products.
        soft_cap: soft cap of the scaled products, or None.
        slopes: ALiBi slope of each head, applied after the cap, or None.
    """

    scale: float
    soft_cap: float | None = None
    slopes: tuple[float, ...] | None = None

    @classmethod
    def of_layer(cls, spec: AttentionSpec | BareHeads) -> "Scoring":
        """Return the scoring of a layer."""
        return cls(spec.score_scale, spec.soft_cap, spec.alibi_slopes)

    def capped(self, scores: Array) -> Array:
        """Return the scaled products, capped."""
        if self.soft_cap is None:
            return scores
        return self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def derivative_of_cap(self, scores: Array) -> Array | float:
        """Return the derivative of the cap at capped values."""
        if self.soft_cap is None:
            return 1.0
        return 1.0 - jnp.square(scores / self.soft_cap)

    def minus_alibi(
        self, scores: Array, heads: Array, num_kv_heads: int, distances: Array
    ) -> Array:
        """Subtract slope * distance (heads, S) from scores (heads, G, S) of some key/value
        heads.
        """
        if self.slopes is None:
            return scores
        slopes = self.slopes_of(num_kv_heads, scores.dtype)[0, :, :, 0]  # (K, G, 1)
        return scores - slopes[heads] * jnp.abs(distances).astype(scores.dtype)[:, None]

    def slopes_of(self, num_kv_heads: int, dtype: jnp.dtype) -> Array:
        """Return the slopes by key/value head and group, (1, K, G, 1, 1)."""
        return jnp.asarray(self.slopes, dtype).reshape(1, num_kv_heads, -1, 1, 1)


class Hidden(NamedTuple):
    """Masks and biases of blocks.

    Attributes:
        mask: boolean, True = masked, (B or 1, K or 1, G or 1, T or 1, S or 1).
        bias: added to the scores, in the same form; keys with -inf are masked.
        lengths: number of real keys of each sequence, (B,).
        sinks: attention sinks, (1, K, G, 1, 1).
        q_offset: position of the first query among the keys, (B or 1,), for ALiBi; default: 0.
        segments: segments of the queries, (B, T), and of the keys, (B, S); keys of other segments
            are hidden.
        between: first visible key of each query, and the one after the last, (B or 1, T); others
            are hidden.
    """

    mask: Array | None
    bias: Array | None
    lengths: Array | None
    sinks: Array | None
    q_offset: Array | None
    segments: tuple[Array, Array] | None = None
    between: tuple[Array, Array] | None = None

    @property
    def hides(self) -> bool:
        """True if a key may be hidden from a query."""
        parts = (self.mask, self.bias, self.lengths, self.segments, self.between)
        return any(x is not None for x in parts)

    def masks(self, part: Callable[[Array], Array]) -> list[Array]:
        """Return a part of the mask, and of the bias as a mask."""
        if self.mask is None:
            masks = []
        else:
            masks = [part(self.mask)]
        if self.bias is None:
            return masks
        return [*masks, jnp.isneginf(part(self.bias))]


class Options(NamedTuple):
    """Static settings of a program, in addition to shapes."""

    is_causal: bool
    scoring: Scoring
    sizes: BlockSizes
    # All sequences and heads, without skipping blocks: on accelerators, and if XLA partitions the
    # work.
    at_once: bool


class Sums(NamedTuple):
    """Sums over blocks of keys, for each query."""

    largest: Array  # score, (P, G T, 1)
    exponentials: Array  # sum of exp(score - largest), (P, G T, 1)
    values: Array  # each times its exponential, (P, G T, Hv)

    @classmethod
    def empty(cls, q_rows: Array, width: int) -> "Sums":
        """Return the sums over no keys, for values of this width."""
        zeros = jnp.zeros_like(q_rows, shape=(*q_rows.shape[:2], width))
        return cls(zeros[..., :1] - jnp.inf, zeros[..., :1], zeros)

    @classmethod
    def of(cls, scores: Array, value: Array, *, may_be_empty: bool) -> "Sums":
        """Return the sums over one block; `may_be_empty` if a row may be fully masked in it."""
        # XLA has a kernel for these lines, if `largest` is not used elsewhere. In a row with a NaN
        # `largest` may still be -inf.
        largest = scores.max(axis=-1, keepdims=True)
        shift = largest
        if may_be_empty:
            shift = finite_shift(largest)
        exponentials = jnp.exp(scores - shift)
        return cls(
            largest,
            exponentials.sum(axis=-1, keepdims=True),
            jnp.einsum("pts,psh->pth", exponentials, value),
        )

    def join(self, other: "Sums") -> "Sums":
        """Return the sums over both."""
        largest = jnp.maximum(self.largest, other.largest)
        shift = finite_shift(largest)
        ours = jnp.exp(self.largest - shift)
        theirs = jnp.exp(other.largest - shift)
        return Sums(
            largest,
            self.exponentials * ours + other.exponentials * theirs,
            self.values * ours + other.values * theirs,
        )

    def with_sinks(self, sinks: Array) -> "Sums":
        """Return the sums with one more score per query, (P, G T, 1), whose value is 0."""
        return self.join(Sums(sinks, jnp.ones_like(sinks), jnp.zeros_like(self.values)))

    def result(self) -> tuple[Array, Array]:
        """Return the context and log-sum-exp: 0 and infinity for rows whose scores are all -inf."""
        is_empty = self.exponentials == 0.0
        exponentials = jnp.where(is_empty, 1.0, self.exponentials)
        return self.values / exponentials, jnp.where(
            is_empty, jnp.inf, self.largest + jnp.log(exponentials)
        )


def finite_shift(largest: Array) -> Array:
    """Return what to subtract from scores: the largest, or 0 if all are -inf."""
    # exp(-inf) is 0, but exp(-inf + inf) is NaN.
    return jnp.where(jnp.isneginf(largest), 0.0, largest)


def place_in(
    x: Array, starts: Sequence[Array | int], sizes: Sequence[int]
) -> tuple[list[Array], list[int]]:
    """Return the starts and sizes of a block of x, as for `lax.dynamic_slice`; axes of size 1 are
    broadcast.
    """
    starts_in_x = []
    sizes_in_x = []
    for start, size, size_of_x in zip(starts, sizes, x.shape, strict=True):
        first = 0 if size_of_x == 1 else start
        # `dynamic_slice` needs one dtype, and an integer of Python may be int64.
        starts_in_x.append(jnp.asarray(first, jnp.int32))
        sizes_in_x.append(min(size, size_of_x))
    return starts_in_x, sizes_in_x


class Tile(NamedTuple):
    """Heads that are processed together, of one sequence or of all."""

    sequence: Array
    head: Array  # the first key/value head
    shape: tuple[int, int]  # numbers of sequences and of key/value heads

    def part(self, x: Array) -> Array:
        """Return the tile's part of (B or 1, K or 1, …)."""
        for axis, (begin, size) in enumerate(
            zip((self.sequence, self.head), self.shape, strict=True)
        ):
            if x.shape[axis] != 1:
                x = lax.dynamic_slice_in_dim(x, begin, size, axis)
        return x

    def of(self, x: Array) -> Array:
        """Return the tile's part of (B, K, …), with its heads on one axis: (P, …)."""
        return self.part(x).reshape(-1, *x.shape[2:])


class Rows(NamedTuple):
    """A block of queries."""

    number: Array | int
    begin: Array | int
    size: int
    is_within: bool  # there are keys at all of its positions

    def of(self, x: Array) -> Array:
        """Return (P, G t, ·) from (P, G, T, ·)."""
        return lax.dynamic_slice_in_dim(x, self.begin, self.size, axis=2).reshape(
            x.shape[0], -1, x.shape[3]
        )

    def split(self, x: Array, group_size: int) -> Array:
        """Return (P, G, t, ·) from (P, G t, ·)."""
        return x.reshape(x.shape[0], group_size, -1, x.shape[2])


class Keys(NamedTuple):
    """Block of keys; if it was moved to end within the keys, its first ones belong to the previous
    block.
    """

    begin: Array | int
    size: int
    first: Array | int | None = None  # first new key, if the block may have been moved
    is_clear: bool = False  # causality hides none of them

    def of(self, x: Array) -> Array:
        """Return (P, s, ·) from (P, S, ·)."""
        return lax.dynamic_slice_in_dim(x, self.begin, self.size, axis=-2)

    def add_to(self, x: Array, block: Array) -> Array:
        """Return (P, S, ·) with (P, s, ·) added at the block."""
        return lax.dynamic_update_slice_in_dim(x, self.of(x) + block, self.begin, axis=-2)


class Blocks:
    """Division of the work into tiles of heads, and of each tile into blocks of queries and
    keys.
    """

    def __init__(
        self,
        query_shape: tuple[int, ...],
        key_shape: tuple[int, ...],
        hidden: Hidden,
        options: Options,
    ) -> None:
        is_causal, scoring, sizes, at_once = options
        self.batch_size, self.num_kv_heads, self.group_size, self.seq_len_q, _ = query_shape
        self.seq_len_k = key_shape[2]
        # XLA would need minutes to evaluate a constant mask.
        hidden = hidden._replace(
            **lax.optimization_barrier({"mask": hidden.mask, "bias": hidden.bias})
        )
        self.hidden = hidden
        self.is_causal = is_causal
        self.scoring = scoring
        # Two matrix products at a time use two cores better than one.
        self.tile_shape = (1, 2 if self.group_size == 1 and self.num_kv_heads % 2 == 0 else 1)
        self.at_once = at_once
        # XLA gathers slices of a partitioned axis, and accelerators work best on large products.
        if at_once:
            self.tile_shape = (self.batch_size, self.num_kv_heads)
        # If all queries attend to the same keys, larger matrices are faster; otherwise smaller ones
        # skip more. (Groups of heads also make them larger.)
        sees_alike = not (is_causal or hidden._replace(lengths=None).hides) and self.group_size == 1
        self.block_queries = sizes.queries * (2 if sees_alike else 1)
        if at_once:
            self.block_queries = max(self.block_queries, -(-self.seq_len_q // MOST_BLOCKS))
        self.block_keys = min(sizes.keys, self.seq_len_k)
        if at_once:
            masks = []
        else:
            masks = hidden.masks(lambda x: x)
        if masks:
            self.visible_by_mask = self.blocks_of_mask(reduce(jnp.logical_or, masks))
        else:
            self.visible_by_mask = None
        if hidden.between is None:
            self.between = None
        else:
            self.between = [x[:, None, None, :, None] for x in hidden.between]
        if hidden.between is None or at_once:
            self.visible_between = None
        else:
            self.visible_between = self.blocks_between(*hidden.between)
        self.segments, self.visible_by_segment = None, None
        if hidden.segments is not None:
            query_ids, key_ids = hidden.segments
            self.segments = (
                query_ids.reshape(-1, 1, 1, self.seq_len_q, 1),
                key_ids.reshape(-1, 1, 1, 1, self.seq_len_k),
            )
            if at_once:
                self.visible_by_segment = None
            else:
                self.visible_by_segment = self.blocks_of_segments(query_ids, key_ids)

    def over_tiles(
        self, function: Callable[[Tile, Any], tuple[Any, Any]], carry: Any
    ) -> tuple[Any, Any]:
        """Return the results of a function for each tile, and the final carry."""
        sequences, heads = self.tile_shape
        tiles_of_sequence = self.num_kv_heads // heads

        def step(carry: Any, i: Array) -> tuple[Any, Any]:
            tile = Tile(i // tiles_of_sequence, i % tiles_of_sequence * heads, self.tile_shape)
            results, carry = function(tile, carry)
            return carry, results

        tiles = jnp.arange(self.batch_size // sequences * tiles_of_sequence, dtype=jnp.int32)
        carry, results = lax.scan(step, carry, tiles)
        return results, carry

    def over_rows(
        self, function: Callable[[Rows, Any], tuple[Any, Any]], carry: Any
    ) -> tuple[Any, Any]:
        """Return the results of a function for each block of queries, (P, G, T, ·), and the final
        carry.
        """
        size = self.block_queries
        num_blocks = self.seq_len_q // size
        num_within = min(num_blocks, self.seq_len_k // size)
        parts = []
        # XLA compiles each of a few blocks, and may compute two at a time. Accelerators always have
        # few: their host would wait for loops over keys whose number of rounds depends on the
        # block.
        if self.at_once or num_blocks <= FEW_BLOCKS:
            for i in range(num_blocks):
                results, carry = function(Rows(i, i * size, size, i < num_within), carry)
                parts.append(results)
        else:
            for first, stop in ((0, num_within), (num_within, num_blocks)):
                if stop > first:
                    is_within = stop <= num_within
                    results, carry = self._loop_over_rows(function, first, stop, is_within, carry)
                    parts.append(results)
        if self.seq_len_q % size:
            rows = Rows(
                num_blocks,
                num_blocks * size,
                self.seq_len_q % size,
                self.seq_len_q <= self.seq_len_k,
            )
            results, carry = function(rows, carry)
            parts.append(results)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *parts), carry

    def _loop_over_rows(
        self,
        function: Callable[[Rows, Any], tuple[Any, Any]],
        first: int,
        stop: int,
        is_within: bool,
        carry: Any,
    ) -> tuple[Any, Any]:
        """Return the results of a function for a range of blocks of queries, (P, G, t, ·), and the
        final carry, by a loop, which compiles once.
        """
        size = self.block_queries

        def step(carry: Any, i: Array) -> tuple[Any, Any]:
            results, carry = function(Rows(i, i * size, size, is_within), carry)
            return carry, results

        blocks = jnp.arange(first, stop, dtype=jnp.int32)
        # Two at a time, because some steps use one core.
        carry, results = lax.scan(step, carry, blocks, unroll=2)
        # (blocks, P, G, size, ·) to (P, G, blocks * size, ·).
        joined = jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[4]), results
        )
        return joined, carry

    def over_keys(
        self, add: Callable[[Any, Keys], Any], nothing: Any, zeros: Any, tile: Tile, rows: Rows
    ) -> Any:
        """Accumulate a function over the keys that a block of queries may attend to, from None or,
        in a loop, zeros.
        """
        size = self.block_keys

        def add_block(i: Array, sums: Any) -> Any:
            first = i * size
            return add(sums, Keys(jnp.minimum(first, self.seq_len_k - size), size, first))

        def add_clear(sums: Any, begin: Array | int, stop: Array | int, size: int) -> Any:
            first = begin // size
            last = stop // size
            return lax.fori_loop(
                first, last, lambda i, sums: add(sums, Keys(i * size, size, is_clear=True)), sums
            )

        is_static = isinstance(rows.begin, int)
        stop: Any = self.seq_len_k
        if self.is_causal:
            stop = (min if is_static else jnp.minimum)(rows.begin + rows.size, self.seq_len_k)
        # In a loop, because XLA would store the scores of all blocks at the same time.
        is_beyond = self.is_causal and not (is_static or rows.is_within)
        if self.at_once or is_beyond or self.may_hide_all(Keys(0, size)):
            return lax.fori_loop(*self.visible_of(-(-stop // size), tile, rows), add_block, zeros)
        if self.is_causal and not is_static:
            sums = add(nothing, Keys(rows.begin, rows.size))
            begin = 0
            for width in (size - size % self.block_queries, self.block_queries):
                # XLA would compute the only block of a loop even without an iteration.
                if 0 < width < self.seq_len_k:
                    sums = add_clear(sums, begin, rows.begin, width)
                    begin = rows.begin - rows.begin % width
            return sums
        # First the blocks without hidden keys, then the rest: at once, if it is at most one block.
        if self.is_causal:
            clear = min(rows.begin, stop)
        else:
            clear = stop
        num_clear = clear // size
        sums = nothing
        if num_clear == 1:
            sums = add(nothing, Keys(0, size, is_clear=True))
        elif num_clear:
            sums = add_clear(zeros, 0, clear, size)
        rest = stop - num_clear * size
        if rest > size:
            return lax.fori_loop(
                num_clear, -(-stop // size), add_block, sums if num_clear else zeros
            )
        if rest:
            return add(sums, Keys(num_clear * size, rest, is_clear=clear == stop))
        return sums

    def visible_of(
        self, num_blocks: Array | int, tile: Tile, rows: Rows
    ) -> tuple[Array | int, Array | int]:
        """Return the range of key blocks that a block of queries may attend to, without
        causality.
        """
        first = 0
        stop = num_blocks
        # Devices would have to agree on the blocks to skip, and a host to wait for them.
        if self.at_once:
            return first, stop
        if self.visible_by_mask is not None:
            first_visible, stop_visible = (
                tile.part(x)[..., rows.number] for x in self.visible_by_mask
            )
            first = first_visible.min()
            stop = jnp.minimum(stop, stop_visible.max())
        for visible in (self.visible_by_segment, self.visible_between):
            if visible is not None:
                first_visible, stop_visible = (
                    x[0 if x.shape[0] == 1 else tile.sequence, rows.number] for x in visible
                )
                first = jnp.maximum(first, first_visible)
                stop = jnp.minimum(stop, stop_visible)
        if self.hidden.lengths is not None:
            stop = jnp.minimum(stop, -(-self.hidden.lengths[tile.sequence] // self.block_keys))
        return first, stop

    def blocks_of_mask(self, mask: Array) -> tuple[Array, Array]:
        """Return the range of key blocks that the mask leaves each block of queries, (B or 1, K or
        1, blocks).
        """
        is_visible = (~mask).any(axis=2)  # (B, K, T, S), any of these axes may be 1
        if is_visible.shape[2] > 1:
            is_visible = self._in_blocks(is_visible, 2, self.block_queries).any(axis=3)
        num_blocks = -(-self.seq_len_q // self.block_queries)
        is_visible = jnp.broadcast_to(
            is_visible, (*is_visible.shape[:2], num_blocks, self.seq_len_k)
        )
        return self._ends(self._in_blocks(is_visible, 3, self.block_keys).any(axis=4))

    def blocks_between(self, first: Array, stop: Array) -> tuple[Array, Array]:
        """Return the range of key blocks, (B or 1, blocks), between the `first` and `stop` keys of
        the queries of each block, (B or 1, T).
        """
        first, stop = (self._in_blocks(x, 1, self.block_queries) for x in (first, stop))
        first_block = jnp.maximum(first.min(axis=2), 0) // self.block_keys
        stop_block = -(-stop.max(axis=2) // self.block_keys)
        return first_block, stop_block

    def blocks_of_segments(self, query_ids: Array, key_ids: Array) -> tuple[Array, Array]:
        """Return the range of key blocks whose ids may equal some of each query block, (B, blocks).

        Only the smallest and largest ids are compared; `scores` hides the other keys.
        """
        ids_of_queries = self._in_blocks(query_ids, 1, self.block_queries)[:, :, None]
        ids_of_keys = self._in_blocks(key_ids, 1, self.block_keys)[:, None]
        begins_before_end = ids_of_keys.min(axis=-1) <= ids_of_queries.max(axis=-1)
        ends_after_begin = ids_of_keys.max(axis=-1) >= ids_of_queries.min(axis=-1)
        return self._ends(begins_before_end & ends_after_begin)

    def _in_blocks(self, x: Array, axis: int, size: int) -> Array:
        """Return x with an axis divided into blocks and positions within them; its last value fills
        the last block.
        """
        x = jnp.pad(
            x,
            [(0, -length % size if i == axis else 0) for i, length in enumerate(x.shape)],
            mode="edge",
        )
        return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])

    def _ends(self, is_visible: Array) -> tuple[Array, Array]:
        """Return the first visible block of (…, blocks), and the one after the last."""
        number = jnp.arange(is_visible.shape[-1], dtype=jnp.int32).reshape(
            (1,) * (is_visible.ndim - 1) + (-1,)
        )
        # Without a visible block the range is empty: no block has the number seq_len_k.
        first = jnp.where(is_visible, number, self.seq_len_k).min(axis=-1)
        stop = jnp.where(is_visible, number + 1, 0).max(axis=-1)
        return first, stop

    def with_sinks(self, sums: Sums, tile: Tile, rows: Rows) -> Sums:
        """Return the sums of a block of queries with the sinks, whose values are 0."""
        if self.hidden.sinks is None:
            return sums
        sinks = at_least_float32(tile.part(self.hidden.sinks))  # (1, K of the tile, G, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*tile.shape, self.group_size, rows.size, 1))
        return sums.with_sinks(sinks.reshape(sums.largest.shape))

    def may_hide_all(self, keys: Keys) -> bool:
        """Return whether a row may be fully masked in a block, by a mask or by causality."""
        return self.hidden.hides or keys.first is not None

    def scores(
        self,
        q_rows: Array,
        k_block: Array,
        tile: Tile,
        rows: Rows,
        keys: Keys,
        *,
        by_key: bool = False,
    ) -> tuple[Array, Array | float, Array | None]:
        """Scores of a block, -inf where a key is hidden, (P, G t, s) or (P, s, G t).

        Also return the derivative of the scores with respect to the scaled products, and the hidden
        keys, if any.
        """
        if by_key:
            axes = "psh,pth->pst"
        else:
            axes = "pth,psh->pts"
        q_rows = q_rows * self.scoring.scale
        scores = self.scoring.capped(
            jnp.einsum(axes, *((k_block, q_rows) if by_key else (q_rows, k_block)))
        )
        derivative = self.scoring.derivative_of_cap(scores)

        def arrange(x: Array) -> Array:  # of (b or 1, k or 1, G or 1, t or 1, s or 1)
            x = jnp.broadcast_to(x, (*tile.shape, self.group_size, rows.size, keys.size))
            return (jnp.moveaxis(x, -1, 2) if by_key else x).reshape(scores.shape)

        if self.hidden.bias is not None:
            scores += arrange(at_least_float32(self._block(self.hidden.bias, tile, rows, keys)))
        key_positions = keys.begin + jnp.arange(keys.size, dtype=jnp.int32)
        key_positions = key_positions.reshape(1, 1, 1, 1, -1)
        query_positions = rows.begin + jnp.arange(rows.size, dtype=jnp.int32)
        query_positions = query_positions.reshape(1, 1, 1, -1, 1)
        if self.scoring.slopes is not None:
            if self.hidden.q_offset is None:
                q_offset = 0
            else:
                q_offset = tile.part(self.hidden.q_offset.reshape(-1, 1, 1, 1, 1))
            slopes = tile.part(self.scoring.slopes_of(self.num_kv_heads, scores.dtype))
            distances = jnp.abs(query_positions + q_offset - key_positions)
            scores -= arrange(slopes * distances.astype(scores.dtype))
        parts = self.hidden.masks(lambda x: self._block(x, tile, rows, keys))
        if self.between is not None:
            first, stop = (self._block(x, tile, rows, keys) for x in self.between)
            parts.append((key_positions < first) | (key_positions >= stop))
        if self.is_causal and not keys.is_clear:
            # On the diagonal all blocks have the same mask, which compiles to a constant.
            # `over_keys` then passes the same object; traced positions cannot be compared.
            if keys.begin is rows.begin:
                of_keys, of_rows = (jnp.arange(x.size, dtype=jnp.int32) for x in (keys, rows))
                parts.append(of_keys.reshape(1, 1, 1, 1, -1) > of_rows.reshape(1, 1, 1, -1, 1))
            else:
                parts.append(key_positions > query_positions)
        if self.hidden.lengths is not None:
            lengths = tile.part(self.hidden.lengths.reshape(-1, 1, 1, 1, 1))
            parts.append(key_positions >= lengths)
        if self.segments is not None:
            of_queries, of_keys = (self._block(x, tile, rows, keys) for x in self.segments)
            parts.append(of_queries != of_keys)
        if keys.first is not None and self.seq_len_k % self.block_keys:
            parts.append(key_positions < keys.first)
        if not parts:
            return scores, derivative, None
        is_hidden = arrange(reduce(jnp.logical_or, parts))
        return jnp.where(is_hidden, -jnp.inf, scores), derivative, is_hidden

    def add_to_bias(
        self, grad: Array, grad_scores: Array, tile: Tile, rows: Rows, keys: Keys
    ) -> Array:
        """Add the gradient of a block of scores, (P, s, G t), to the gradient of the bias."""
        start, sizes = self._place(grad, tile, rows, keys)
        grad_scores = grad_scores.reshape(*tile.shape, keys.size, self.group_size, -1)
        summed = [axis for axis, size in enumerate(sizes) if size == 1]
        block = jnp.moveaxis(grad_scores, 2, -1).sum(axis=summed, keepdims=True)
        return lax.dynamic_update_slice(grad, lax.dynamic_slice(grad, start, sizes) + block, start)

    def _block(self, x: Array, tile: Tile, rows: Rows, keys: Keys) -> Array:
        return lax.dynamic_slice(x, *self._place(x, tile, rows, keys))

    def _place(self, x: Array, tile: Tile, rows: Rows, keys: Keys) -> tuple[list[Array], list[int]]:
        """Return the start and size of a block in (B or 1, K or 1, G or 1, T or 1, S or 1)."""
        starts = (tile.sequence, tile.head, 0, rows.begin, keys.begin)
        return place_in(x, starts, (*tile.shape, self.group_size, rows.size, keys.size))
