"""Attention block by block: the kernel of `fused` on CPUs, and on accelerators if no other avoids
storing the scores.

For each block of queries it accumulates softmax(scores) · value over blocks of keys and stores the
log-sum-exp, from which the gradient recomputes the scores. No T x S array is stored.

A CPU works on a few heads at a time and skips fully masked blocks, whatever the mask comes from. An
accelerator works on all sequences and heads at once, and skips only blocks that causality hides: no
value decides what runs next.

Axes: see `blocks`.

Source: FlashAttention, arXiv:2205.14135 and arXiv:2307.08691.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from mha_jax.arrays import Array, at_least_float32, zero_where
from mha_jax.compiled import compiled
from mha_jax.features.relative_bias import relative_position_bias
from mha_jax.kernels.cpu.blocks import (
    Blocks,
    BlockSizes,
    Hidden,
    Keys,
    Options,
    Rows,
    Scoring,
    Sums,
    Tile,
    place_in,
)
from mha_jax.masks import Mask, to_scores_rank
from mha_jax.scores import Scores
from mha_jax.sharding import is_automatic
from mha_spec import AttentionSpec
from mha_spec.heads import BareHeads
from mha_spec.span import Span


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
    """Return the context block by block. Shapes are checked."""
    scores = with_relative_bias(mask, scores, query, key)
    return attend_by_block(query, key, value, mask, scores, sizes=sizes, platform=platform)


def with_relative_bias(mask: Mask, scores: Scores, query: Array, key: Array) -> Scores:
    """Return the scores with the relative bias of the layer, if any, folded into their bias."""
    relative_bias = scores.spec.relative_bias
    if relative_bias is None:
        return scores
    learned = dict(scores.learned)
    table = learned.pop("relative_bias")
    seq_lens = (query.shape[2], key.shape[2])
    dtype = at_least_float32(query).dtype
    bias = relative_position_bias(
        table, relative_bias, *seq_lens, mask.q_offset, scores_dtype=dtype
    )
    if scores.bias is not None:
        bias = bias + to_scores_rank(at_least_float32(scores.bias))
    return replace(
        scores, spec=replace(scores.spec, relative_bias=None), bias=bias, learned=learned
    )


@compiled("sizes", "platform")
def attend_by_block(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    mask: Mask,
    scores: Scores,
    *,
    sizes: BlockSizes,
    platform: str,
) -> Float[Array, "B N T Hv"]:
    """Return the context, in the dtype of query, for scores without a relative bias.

    It has a derivative in reverse mode only; the plain path also has one in forward mode.
    """
    num_kv_heads = key.shape[1]

    def group(x: Array) -> Array:
        if x.shape[1] == 1:
            heads = (1, 1)
        else:
            heads = (num_kv_heads, x.shape[1] // num_kv_heads)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    as_bool, bias = (
        None if x is None else group(to_scores_rank(x)) for x in (mask.mask, scores.bias)
    )
    sinks = scores.learned.get("sinks")
    if sinks is not None:
        sinks = sinks.reshape(1, num_kv_heads, -1, 1, 1)
    lengths: Any = mask.key_padding_lengths
    hidden = Hidden(as_bool, bias, lengths, sinks, mask.q_offset, mask.segments)
    is_causal = mask.is_causal
    if mask.span is not None or (is_causal and mask.q_offset is not None):  # not from the first key
        between = mask.key_range(query.shape[2], key.shape[2])
        hidden = hidden._replace(lengths=None, between=between)
        is_causal = False
    is_divided = is_automatic(query)
    at_once = is_divided or platform != "cpu"
    options = Options(is_causal, Scoring.of_layer(scores.spec), sizes, at_once)
    attend: Any = _vmap_sequences if is_divided else _attend
    return attend(options, group(query), key, value, hidden).reshape(
        *query.shape[:3], value.shape[3]
    )


def _vmap_sequences(
    options: Options, query: Array, key: Array, value: Array, hidden: Hidden
) -> Array:
    """Process all sequences and heads at once: XLA partitions products along these axes, but not
    loops over them.
    """
    batch_size = query.shape[0]
    axes = jax.tree.map(lambda x: 0 if x.shape[0] == batch_size else None, hidden)
    query, key, value, hidden = jax.tree.map(
        lambda x: x[:, None] if x.shape[0] == batch_size else x, (query, key, value, hidden)
    )
    return jax.vmap(partial(_attend, options), in_axes=(0, 0, 0, axes))(query, key, value, hidden)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, query: Array, key: Array, value: Array, hidden: Hidden) -> Array:
    return _forward(options, query, key, value, hidden)[0]


def _forward(
    options: Options, query: Array, key: Array, value: Array, hidden: Hidden
) -> tuple[Array, tuple[Any, ...]]:
    context, lse = sums_of_part(options, query, key, value, hidden)
    return context.astype(query.dtype), (query, key, value, hidden, context, lse)


class PartSums(NamedTuple):
    """Partial attention of queries over some keys, in at least float32.

    Attributes:
        context: softmax(scores) · value over these keys, (B, K, G, T, Hv).
        lse: log-sum-exp, infinity if all scores are -inf, (B, K, G, T, 1).
    """

    context: Array
    lse: Array


def sums_of_part(
    options: Options, query: Array, key: Array, value: Array, hidden: Hidden
) -> PartSums:
    """Return the attention of queries, (B, K, G, T, H), over some keys, (B, K, S, H), with sinks,
    if any.
    """
    blocks = Blocks(query.shape, key.shape, hidden, options)

    def attend_in_tile(tile: Tile, carry: None) -> tuple[Any, None]:
        q, k, v = (at_least_float32(tile.of(x)) for x in (query, key, value))

        def attend_rows(rows: Rows, carry: None) -> tuple[Any, None]:
            def add(sums: Sums | None, keys: Keys) -> Sums:
                scores, _, _ = blocks.scores(rows.of(q), keys.of(k), tile, rows, keys)
                block_sums = Sums.of(scores, keys.of(v), may_be_empty=blocks.may_hide_all(keys))
                if sums is None:
                    return block_sums
                return sums.join(block_sums)

            sums = blocks.over_keys(add, None, Sums.empty(rows.of(q), v.shape[-1]), tile, rows)
            sums = blocks.with_sinks(sums, tile, rows)
            return tuple(rows.split(x, blocks.group_size) for x in sums.result()), carry

        return blocks.over_rows(attend_rows, carry)

    (context, lse), _ = blocks.over_tiles(attend_in_tile, None)
    return PartSums(*(x.reshape(*query.shape[:-1], x.shape[-1]) for x in (context, lse)))


def gradients_of_part(
    options: Options, residuals: tuple[Any, ...], cotangent: Array
) -> tuple[Any, ...]:
    """Return gradients of the queries, and of some keys, values, masks and biases.

    Args:
        options: settings of the part.
        residuals: queries, keys, values, masks and biases, and the context and `lse` over all keys.
        cotangent: cotangent of the context, (B, K, G, T, Hv).
    """
    query, key, value, hidden, context, lse = residuals
    blocks = Blocks(query.shape, key.shape, hidden, options)

    def differentiate_tile(tile: Tile, grad_bias: Array | None) -> tuple[Any, Array | None]:
        q, k, v, *by_row = (
            at_least_float32(tile.of(x)) for x in (query, key, value, cotangent, context, lse)
        )
        by_row = [q, *by_row]

        def differentiate_rows(rows: Rows, grads: tuple[Any, ...]) -> tuple[Array, tuple[Any, ...]]:
            q_rows, cotangents, contexts, logs = (rows.of(x) for x in by_row)
            logs = logs.swapaxes(1, 2)  # (P, 1, G t)
            row_sums = (cotangents * contexts).sum(axis=-1)[:, None]

            def add(grads: tuple[Any, ...], keys: Keys) -> tuple[Any, ...]:
                grad_rows, grad_k, grad_v, grad_bias = grads
                # Keys before queries: then one instead of two of the next products needs a
                # transposed array.
                scores, derivative, is_hidden = blocks.scores(
                    q_rows, keys.of(k), tile, rows, keys, by_key=True
                )
                attn_weights = jnp.exp(scores - logs)
                grad_scores = attn_weights * (
                    jnp.einsum("psh,pth->pst", keys.of(v), cotangents) - row_sums
                )
                if is_hidden is not None:  # products with hidden values may overflow
                    grad_scores = zero_where(grad_scores, is_hidden)
                grad_products = grad_scores * derivative
                grad_block = jnp.einsum("psh,pst->pht", keys.of(k), grad_products).swapaxes(1, 2)
                return (
                    grad_block if grad_rows is None else grad_rows + grad_block,
                    keys.add_to(grad_k, jnp.einsum("pst,pth->psh", grad_products, q_rows)),
                    keys.add_to(grad_v, jnp.einsum("pst,pth->psh", attn_weights, cotangents)),
                    None
                    if grad_bias is None
                    else blocks.add_to_bias(grad_bias, grad_scores, tile, rows, keys),
                )

            grad_rows, *sums = blocks.over_keys(
                add, (None, *grads), (jnp.zeros_like(q_rows), *grads), tile, rows
            )
            return rows.split(grad_rows, blocks.group_size), tuple(sums)

        grads = (jnp.zeros_like(k), jnp.zeros_like(v), grad_bias)
        grad_q, (grad_k, grad_v, grad_bias) = blocks.over_rows(differentiate_rows, grads)
        scale = blocks.scoring.scale
        return (grad_q * scale, grad_k * scale, grad_v), grad_bias

    if hidden.bias is None:
        grad_bias = None
    else:
        grad_bias = jnp.zeros_like(at_least_float32(hidden.bias))
    grads, grad_bias = blocks.over_tiles(differentiate_tile, grad_bias)
    grads = (
        grad.reshape(x.shape).astype(x.dtype)
        for grad, x in zip(grads, (query, key, value), strict=True)
    )
    if hidden.bias is not None:
        grad_bias = grad_bias.astype(hidden.bias.dtype)
    return *grads, Hidden(
        None, grad_bias, None, gradient_of_sinks(hidden.sinks, lse, context, cotangent), None
    )


def gradient_of_sinks(
    sinks: Array | None, lse: Array, context: Array, cotangent: Array
) -> Array | None:
    """Return the gradient of sinks (1, K, G, 1, 1), which only reduce the weights of keys."""
    if sinks is None:
        return None
    row_sums = (at_least_float32(cotangent) * context).sum(axis=-1, keepdims=True)
    grads = jnp.exp(at_least_float32(sinks) - lse) * row_sums
    return -grads.sum(axis=(0, 3, 4)).reshape(sinks.shape).astype(sinks.dtype)


_attend.defvjp(_forward, gradients_of_part)


@compiled("sizes", "platform")
def attend_to_cache(
    query: Float[Array, "B N 1 H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S Hv"],
    mask: Mask,
    scores: Scores,
    *,
    sizes: BlockSizes,
    platform: str,
) -> Float[Array, "B N 1 Hv"]:
    """Return the context of one token of each sequence over the keys up to its position,
    `mask.q_offset`.

    Scores are stored for the whole capacity. A CPU reads only filled keys and values. Heads run in
    parallel there, each with its own product: XLA copies slices of a cache for a batched product,
    and does not parallelize the product of one row.
    """
    scores = with_relative_bias(mask, scores, query, keys)
    options = (scores.spec, mask.span, sizes, platform)
    return _attend_to_cache(
        options, query, keys, values, mask.q_offset, scores.learned, scores.bias
    )


_OfCache = tuple[AttentionSpec | BareHeads, Span | None, BlockSizes, str]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_to_cache(options: _OfCache, query: Array, keys: Array, *arguments: Any) -> Array:
    *_, platform = options
    reads_all = is_automatic(keys) or platform != "cpu"
    if reads_all:
        attend = _attend_to_every_slot
    else:
        attend = _attend_to_filled_slots
    return attend(options, query, keys, *arguments)


def _attend_to_filled_slots(
    options: _OfCache,
    query: Array,
    keys: Array,
    values: Array,
    last_positions: Array,
    learned: Mapping[str, Array],
    bias: Array | None,
) -> Array:
    """Attend a few heads at a time, with loops over the blocks of slots that any of them sees."""
    spec, span, sizes, _ = options
    scoring = Scoring.of_layer(spec)
    batch_size, num_kv_heads, capacity, _ = keys.shape
    num_heads = batch_size * num_kv_heads
    group_size = query.shape[1] // num_kv_heads
    queries = at_least_float32(query.reshape(num_heads, group_size, -1)) * scoring.scale
    sinks = learned.get("sinks")
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, group_size, 1)
    if bias is not None:
        bias = bias.reshape(num_heads, group_size, capacity)
    filled = _FilledSlots(queries, keys, values, last_positions, sinks, bias, scoring, span, sizes)
    # Heads of one sequence, which see the same slots; with one head each, several sequences.
    if num_kv_heads > 1:
        num_together = num_kv_heads
    else:
        num_together = batch_size
    together = math.gcd(num_together, sizes.heads_side_by_side)
    heads = jnp.arange(num_heads, dtype=jnp.int32).reshape(-1, together)
    contexts = lax.map(filled.attend, heads)
    return contexts.reshape(*query.shape[:3], values.shape[3]).astype(query.dtype)


class _FilledSlots(NamedTuple):
    """The work of a step with a cache of which only filled slots are read.

    Attributes:
        queries: scaled queries of all key/value heads, (B K, G, H).
        keys, values: the cache, (B, K, S, ·).
        last_positions: last visible slot of each sequence, (B,).
        sinks: (K, G, 1), or None.
        bias: (B K, G, S), or None.
    """

    queries: Array
    keys: Array
    values: Array
    last_positions: Array
    sinks: Array | None
    bias: Array | None
    scoring: Scoring
    span: Span | None
    sizes: BlockSizes

    def attend(self, heads: Array) -> Array:
        """Return the contexts of some of the B K heads, (heads, G, Hv)."""
        _, num_kv_heads, capacity, _ = self.keys.shape
        shape = (len(heads), self.queries.shape[1])
        last_visible = self.last_positions[heads // num_kv_heads]
        if self.span is None:
            first_visible = jnp.zeros_like(last_visible)
        else:
            first_visible = self.span.first(last_visible)
        blocks = _SlotBlocks.between(first_visible, last_visible, self.sizes, capacity)

        def put_scores(scores: Array, _: Array, begin: Array, size: int) -> Array:
            # Slots of two blocks get the same scores twice.
            products = [
                jnp.einsum(
                    "gh,sh->gs", self.queries[head], self._block(self.keys, head, begin, size)
                )
                for head in heads
            ]
            return lax.dynamic_update_slice_in_dim(scores, jnp.stack(products), begin, axis=2)

        scores = blocks.over(put_scores, jnp.zeros_like(self.queries, shape=(*shape, capacity)))
        attn_weights = self._weights(scores, heads, first_visible[:, None], last_visible[:, None])

        def add_values(context: Array, first: Array, begin: Array, size: int) -> Array:
            slots = begin + jnp.arange(size, dtype=jnp.int32)[None]
            contexts = []
            for number, head in enumerate(heads):
                weights = lax.dynamic_slice_in_dim(attn_weights[number], begin, size, axis=1)
                # Slots before `first` were added with the block before.
                weights = jnp.where(slots >= first, weights, 0.0)
                contexts.append(
                    jnp.einsum("gs,sh->gh", weights, self._block(self.values, head, begin, size))
                )
            return context + jnp.stack(contexts)

        width = self.values.shape[3]
        return blocks.over(add_values, jnp.zeros_like(self.queries, shape=(*shape, width)))

    def _weights(
        self, scores: Array, heads: Array, first_visible: Array, last_visible: Array
    ) -> Array:
        """Return the attention weights of scaled products of some heads, (heads, G, S)."""
        _, num_kv_heads, capacity, _ = self.keys.shape
        slots = jnp.arange(capacity, dtype=jnp.int32)[None]
        scores = self.scoring.minus_alibi(
            self.scoring.capped(scores), heads % num_kv_heads, num_kv_heads, last_visible - slots
        )
        if self.bias is not None:
            scores = scores + self.bias[heads]
        is_visible = (slots >= first_visible) & (slots <= last_visible)
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks[heads % num_kv_heads]
        return _softmax_of_visible(scores, is_visible, sinks)

    def _block(self, x: Array, head: Array, begin: Array, size: int) -> Array:
        """Return a block of slots of one of the B K heads, (size, ·)."""
        num_kv_heads = x.shape[1]
        # Slice the cache without reshaping: XLA would copy all of a reshaped one.
        starts = (head // num_kv_heads, head % num_kv_heads, begin, 0)
        part = lax.dynamic_slice(x, *place_in(x, starts, (1, 1, size, x.shape[3])))
        return at_least_float32(part[0, 0])


class _SlotBlocks(NamedTuple):
    """Blocks of slots that any of some heads sees: large ones, then small ones, which read few
    empty slots.
    """

    first_large: Array
    stop_large: Array
    first_small: Array
    stop_small: Array
    sizes: BlockSizes
    capacity: int

    @classmethod
    def between(
        cls, first_visible: Array, last_visible: Array, sizes: BlockSizes, capacity: int
    ) -> "_SlotBlocks":
        """Return the blocks between the first and last visible slots of some heads, (heads,)."""
        first_slot = jnp.maximum(first_visible.min(), 0)
        stop_slot = last_visible.max() + 1
        small = _small_block(sizes)
        stop_large = stop_slot // sizes.keys
        slots_of_large = stop_large * sizes.keys
        stop_small = -(-(stop_slot - slots_of_large) // small)
        first_large = jnp.minimum(first_slot // sizes.keys, stop_large)
        first_small = jnp.maximum(first_slot - slots_of_large, 0) // small
        return cls(first_large, stop_large, first_small, stop_small, sizes, capacity)

    def over(self, add: Callable[[Array, Array, Array, int], Array], carry: Array) -> Array:
        """Accumulate a function of a carry, the first slot of a block, where to begin to read, and
        its size.
        """
        large = self.sizes.keys
        small = _small_block(self.sizes)
        slots_of_large = self.stop_large * large

        def step(i: Array, carry: Array, *, after: Array | int, size: int) -> Array:
            first = after + i * size
            # The last may overlap another. `FusedAttention` attends to a cache of fewer slots than
            # a block differently.
            return add(carry, first, jnp.minimum(first, self.capacity - size), size)

        carry = lax.fori_loop(
            self.first_large, self.stop_large, partial(step, after=0, size=large), carry
        )
        return lax.fori_loop(
            self.first_small,
            self.stop_small,
            partial(step, after=slots_of_large, size=small),
            carry,
        )


def _small_block(sizes: BlockSizes) -> int:
    return min(sizes.last_keys, sizes.keys)


def _attend_to_every_slot(
    options: _OfCache,
    query: Array,
    keys: Array,
    values: Array,
    last_positions: Array,
    learned: Mapping[str, Array],
    bias: Array | None,
) -> Array:
    """Attend with products over all sequences, heads and slots, which XLA partitions like the
    cache.
    """
    spec, span, *_ = options
    scoring = Scoring.of_layer(spec)
    sinks = learned.get("sinks")
    batch_size, num_kv_heads, capacity, _ = keys.shape
    heads, slots = (jnp.arange(size, dtype=jnp.int32) for size in (num_kv_heads, capacity))
    if sinks is None:
        sinks_by_head = None
    else:
        sinks_by_head = sinks.reshape(num_kv_heads, -1, 1)

    def attend_sequence(
        query: Array, keys: Array, values: Array, last: Array, bias: Array | None
    ) -> Array:
        scores = scoring.capped(jnp.einsum("kgh,ksh->kgs", query, at_least_float32(keys)))
        scores = scoring.minus_alibi(scores, heads, num_kv_heads, (last - slots)[None])
        if bias is not None:
            scores = scores + bias.reshape(scores.shape)
        if span is None:
            is_visible = slots <= last
        else:
            is_visible = (slots <= last) & (slots >= span.first(last))
        attn_weights = _softmax_of_visible(scores, is_visible[None], sinks_by_head)[..., :capacity]
        return jnp.einsum("kgs,ksh->kgh", attn_weights, at_least_float32(values))

    # (B, K, G, H).
    queries = query.reshape(batch_size, num_kv_heads, -1, query.shape[3])
    queries = at_least_float32(queries) * scoring.scale
    contexts = jax.vmap(attend_sequence)(queries, keys, values, last_positions, bias)
    return contexts.reshape(*query.shape[:3], values.shape[3]).astype(query.dtype)


def _softmax_of_visible(scores: Array, is_visible: Array, sinks: Array | None) -> Array:
    """Return attention weights of slots, (heads, G, S), 0 for sequences without a key; the weights
    of sinks come last.
    """
    if sinks is not None:  # one more slot, which is never masked
        scores = jnp.concatenate([scores, sinks.astype(scores.dtype)], axis=2)
        is_visible = jnp.pad(is_visible, [(0, 0), (0, 1)], constant_values=True)
    return jax.nn.softmax(scores, axis=-1, where=is_visible[:, None])


def _attend_to_cache_forward(options: _OfCache, *inputs: Any) -> tuple[Array, tuple[Any, ...]]:
    return _attend_to_cache(options, *inputs), inputs


def _attend_to_cache_backward(
    options: _OfCache, residuals: tuple[Any, ...], cotangent: Array
) -> tuple[Any, ...]:
    spec, span, sizes, platform = options
    query, keys, values, last_positions, learned, bias = residuals
    mask = Mask(is_causal=True, span=span, q_offset=last_positions)

    def attend_to_filled(
        query: Array, keys: Array, values: Array, learned: Mapping[str, Array], bias: Array | None
    ) -> Array:
        scores = Scores(spec, bias, learned)
        return attend_by_block(query, keys, values, mask, scores, sizes=sizes, platform=platform)

    _, differentiate = jax.vjp(attend_to_filled, query, keys, values, learned, bias)
    *grads, grad_learned, grad_bias = differentiate(cotangent)
    return *grads, None, grad_learned, grad_bias


_attend_to_cache.defvjp(_attend_to_cache_forward, _attend_to_cache_backward)
