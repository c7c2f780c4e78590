"""Attention block by block: the kernel that `fused` takes on a CPU, where JAX brings none.

For each block of queries it adds up softmax(scores) · value over blocks of keys, and keeps the logarithm of each sum of
exponentials; the gradient makes the scores again from it. So no N x T x S array is stored. Blocks in which every key is
masked are skipped, wherever the mask came from.

Axes: B batch, T query tokens, S key tokens, K key/value heads, G query heads of each, H head_dim, Hv
value_head_dim. Heads that are worked on at a time lie on one axis, P, and the queries of their groups on the next, so
that every product is one of matrices.

Source: FlashAttention, arXiv:2205.14135 and arXiv:2307.08691.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mha_jax.compiled import compiled
from mha_jax.kernels.nonfinite import emptied, not_finite, spoilt
from mha_jax.masks import Masking, to_scores_rank
from mha_jax.parallel.sharding import is_automatic
from mha_jax.rope import at_least_float32
from mha_spec.reach import Reach
from mha_spec.rules import as_count


@dataclass(frozen=True)
class BlockSizes:
    """How the work is divided: it changes the speed and the rounding, and nothing else.

    Attributes:
        few_scores: scores, 4 MiB in float32, up to which the plain path takes less time.
        queries: of a block; twice as many where all see the same keys, and more where there would be too many blocks.
        keys: of a block: its scores with a block of queries stay in the caches of two cores.
        last_keys: keys of the last few blocks of a cache, so that little is read that is not filled; at most `keys`.
        heads_side_by_side: heads of a cache that are read at the same time, each by a core if there are as many.
        most_blocks: of queries; each is compiled on its own, so that it ends with the last key that it may see.
        token_axis: the dimension of a mesh that tokens are divided along, where types do not say it: see `parallel`.
        passes_keys: whether devices then pass keys and values on, also where they could share the heads instead.
    """

    few_scores: int = 2**20
    queries: int = 256
    keys: int = 512
    last_keys: int = 128
    heads_side_by_side: int = 16
    most_blocks: int = 16
    token_axis: str | None = None
    passes_keys: bool = False

    def __post_init__(self) -> None:
        as_count("few_scores", self.few_scores, minimum=0)
        for name in ("queries", "keys", "last_keys", "heads_side_by_side", "most_blocks"):
            as_count(name, getattr(self, name))


BLOCK_SIZES = BlockSizes()
"""The sizes that are taken where none are passed."""


class Scoring(NamedTuple):
    """What becomes of the products of queries and keys.

    Attributes:
        scale: what they are multiplied by.
        soft_cap: what caps them softly after that, or None.
        slopes: what each head takes from them for each token of distance after that, or None.
    """

    scale: float
    soft_cap: float | None = None
    slopes: tuple[float, ...] | None = None

    def capped(self, scores: Array) -> Array:
        """The scaled products, capped."""
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def slope(self, scores: Array) -> Array | float:
        """The derivative of the cap, by what it gave."""
        return 1.0 if self.soft_cap is None else 1.0 - jnp.square(scores / self.soft_cap)

    def lessened(self, scores: Array, heads: Array, num_kv_heads: int, distances: Array) -> Array:
        """Scores (heads, G, S) of some key/value heads, less what slots at distances (heads, S) cost."""
        if self.slopes is None:
            return scores
        slopes = self.slopes_of(num_kv_heads, scores.dtype)[0, :, :, 0]  # (K, G, 1)
        return scores - slopes[heads] * jnp.abs(distances).astype(scores.dtype)[:, None]

    def slopes_of(self, num_kv_heads: int, dtype: jnp.dtype) -> Array:
        """The slopes by the heads that they are of, (1, K, G, 1, 1)."""
        return jnp.asarray(self.slopes, dtype).reshape(1, num_kv_heads, -1, 1, 1)


class Hidden(NamedTuple):
    """What hides keys, and what is added to scores.

    Attributes:
        mask: boolean, True = masked, (B or 1, K or 1, G or 1, T or 1, S or 1).
        bias: added to the scores, of such a shape too; what is -inf in it is also masked.
        lengths: number of real keys of each sequence, (B,).
        sinks: a logit of each head beside those of its keys, (1, K, G, 1, 1).
        offsets: place of the first query among the keys, (B or 1,), for ALiBi; 0 when absent.
    """

    mask: Array | None
    bias: Array | None
    lengths: Array | None
    sinks: Array | None
    offsets: Array | None


@compiled("scoring", "block_sizes")
def attend_by_block(
    query: Float[Array, "B N T H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S Hv"],
    masking: Masking,
    *,
    scoring: Scoring,
    block_sizes: BlockSizes,
) -> Float[Array, "B N T Hv"]:
    """Attention of split heads, in the dtype of query; arguments as those of `fused.attend`, and checked there.

    It has a derivative in reverse mode only; the plain path has one in forward mode too.
    """
    num_kv_heads = key.shape[1]

    def group(x: Array) -> Array:
        heads = (1, 1) if x.shape[1] == 1 != query.shape[1] else (num_kv_heads, x.shape[1] // num_kv_heads)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    mask, bias = (
        None if x is None else group(to_scores_rank(x)) for x in (masking.with_infinite_bias().mask, masking.bias)
    )
    lengths: Any = masking.key_padding_lengths  # an array: see `Masking.as_arrays`
    sinks = None if masking.sinks is None else masking.sinks.reshape(1, num_kv_heads, -1, 1, 1)
    hidden = Hidden(mask, bias, lengths, sinks, masking.offsets)
    options = Options(masking.is_causal, scoring, block_sizes, is_automatic(query))
    attend: Any = _attend_at_once if options.is_automatic else _attend
    return attend(options, group(query), key, value, hidden).reshape(*query.shape[:3], value.shape[3])


class Options(NamedTuple):
    """What a program is made for, beside the shapes."""

    is_causal: bool
    scoring: Scoring
    block_sizes: BlockSizes
    is_automatic: bool  # XLA divides the work among devices
    is_part: bool = False  # of keys, some of which are hidden elsewhere

    def hides(self, hidden: Hidden) -> bool:
        """Whether a key may be hidden from a query."""
        return self.is_causal or self.is_part or hidden.mask is not None or hidden.lengths is not None


def _attend_at_once(options: Options, query: Array, key: Array, value: Array, hidden: Hidden) -> Array:
    """All sequences at a time, and all heads of each: XLA divides products along these, and no loop over them."""
    batch_size = query.shape[0]
    axes = jax.tree.map(lambda x: 0 if x.shape[0] == batch_size else None, hidden)
    query, key, value, hidden = jax.tree.map(
        lambda x: x[:, None] if x.shape[0] == batch_size else x, (query, key, value, hidden)
    )
    return jax.vmap(partial(_attend, options), in_axes=(0, 0, 0, axes))(query, key, value, hidden)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, query: Array, key: Array, value: Array, hidden: Hidden) -> Array:
    return _forward(options, query, key, value, hidden)[0]


class PartSums(NamedTuple):
    """What some keys give to queries, in at least float32.

    Attributes:
        context: softmax(scores) · value over these keys, (B, K, G, T, Hv).
        log_sums: the logarithms of the sums of exponentials, infinity where no key gave anything, (B, K, G, T, 1).
        gave_nothing: where no key gave anything, (B, K, G, T, 1).
        is_empty: where every key is hidden, (B or 1, K or 1, G or 1, T or 1, 1).
    """

    context: Array
    log_sums: Array
    gave_nothing: Array
    is_empty: Array


def _forward(options: Options, query: Array, key: Array, value: Array, hidden: Hidden) -> tuple[Array, tuple[Any, ...]]:
    context, log_sums, gave_nothing, is_empty = sums_of_part(options, query, key, value, hidden)
    # A row to which no key gave anything may see some: if all of its scores are -inf.
    if hidden.sinks is None:  # which have all the weight of such a row
        context, log_sums = (spoilt(x, gave_nothing & ~is_empty) for x in (context, log_sums))
    residuals = (query, key, value, hidden, context, log_sums)
    if options.hides(hidden):
        context = spoilt(context, not_finite(query) & ~is_empty)
    return context.astype(query.dtype), residuals


def sums_of_part(options: Options, query: Array, key: Array, value: Array, hidden: Hidden) -> PartSums:
    """What some keys, (B, K, S, H), give to queries, (B, K, G, T, H), with their sinks, if any."""
    blocks = _Blocks(query.shape, key.shape, hidden, options)

    def attend_in_tile(tile: _Tile, carry: None) -> tuple[Any, None]:
        q, k, v = (at_least_float32(tile.of(x)) for x in (query, key, value))
        q, k, v = blocks.set_aside(q, k, v)
        results = []
        for rows in blocks.rows:

            def add(sums: _Sums | None, keys: _Keys, rows: _Rows = rows) -> _Sums:
                scores, _, _ = blocks.scores(rows.of(q), keys.of(k), tile, rows, keys)
                found = _Sums.of(scores, keys.of(v), may_be_empty=blocks.may_hide_all(keys))
                return found if sums is None else sums.join(found)

            sums = blocks.over_keys(add, None, _Sums.empty(rows.of(q), v.shape[-1]), tile, rows)
            sums = blocks.with_sinks(sums, tile, rows)
            results.append([rows.split(x, blocks.group_size) for x in sums.result()])
        return tuple(jnp.concatenate(parts, axis=-2) for parts in zip(*results, strict=True)), carry

    (context, log_sums), _ = blocks.over_tiles(attend_in_tile, None)
    context, log_sums = (x.reshape(*query.shape[:-1], x.shape[-1]) for x in (context, log_sums))
    has_sinks = hidden.sinks is not None
    gave_nothing = (context == 0.0).all(axis=-1, keepdims=True) if has_sinks else jnp.isposinf(log_sums)
    return PartSums(context, log_sums, gave_nothing, blocks.empty_rows(gave_nothing))


def gradients_of_part(options: Options, residuals: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    """Gradients of the queries, and of some keys, values and what hides these.

    Args:
        options: of the part.
        residuals: queries, keys, values, what hides, and of all keys the context and `log_sums`.
        cotangent: of the context, (B, K, G, T, Hv).
    """
    query, key, value, hidden, context, log_sums = residuals
    blocks = _Blocks(query.shape, key.shape, hidden, options)

    def differentiate_tile(tile: _Tile, grad_bias: Array | None) -> tuple[Any, Array | None]:
        q, k, v, *by_row = (at_least_float32(tile.of(x)) for x in (query, key, value, cotangent, context, log_sums))
        q, k, v = blocks.set_aside(q, k, v)
        finite_k = emptied(k, not_finite(k)) if blocks.hides else k
        by_row = [q, *by_row]
        grads_q, grad_k, grad_v = [], jnp.zeros_like(k), jnp.zeros_like(v)
        for rows in blocks.rows:
            q_rows, given, found, logs = (rows.of(x) for x in by_row)
            logs, given_sums = logs.swapaxes(1, 2), (given * found).sum(axis=-1)[:, None]  # (P, 1, G t)

            def add(
                grads: tuple[Any, ...],
                keys: _Keys,
                rows: _Rows = rows,
                parts: tuple[Array, ...] = (q_rows, given, logs, given_sums),
            ) -> tuple[Any, ...]:
                q_rows, given, logs, given_sums = parts
                grad_rows, grad_k, grad_v, grad_bias = grads
                # Keys before queries: of the products that follow, one instead of two has to be of a transposed array.
                scores, slope, is_hidden = blocks.scores(q_rows, keys.of(k), tile, rows, keys, by_key=True)
                attn_weights = jnp.exp(scores - logs)
                grad_scores = attn_weights * (jnp.einsum("psh,pth->pst", keys.of(v), given) - given_sums)
                grad_products = grad_scores * slope
                if is_hidden is not None:  # a masked value may be beyond multiplying, as a row that is NaN is
                    attn_weights, grad_scores, grad_products = (
                        jnp.where(is_hidden, 0.0, x) for x in (attn_weights, grad_scores, grad_products)
                    )
                found = jnp.einsum("psh,pst->pht", keys.of(finite_k), grad_products).swapaxes(1, 2)
                return (
                    found if grad_rows is None else grad_rows + found,
                    keys.add_to(grad_k, jnp.einsum("pst,pth->psh", grad_products, q_rows)),
                    keys.add_to(grad_v, jnp.einsum("pst,pth->psh", attn_weights, given)),
                    None if grad_bias is None else blocks.add_to_bias(grad_bias, grad_scores, tile, rows, keys),
                )

            sums = (grad_k, grad_v, grad_bias)
            sums = blocks.over_keys(add, (None, *sums), (jnp.zeros_like(q_rows), *sums), tile, rows)
            grad_rows, grad_k, grad_v, grad_bias = sums
            grads_q.append(rows.split(grad_rows, blocks.group_size))
        scale = blocks.scoring.scale
        return (jnp.concatenate(grads_q, axis=-2) * scale, grad_k * scale, grad_v), grad_bias

    grad_bias = None if hidden.bias is None else jnp.zeros_like(at_least_float32(hidden.bias))
    grads, grad_bias = blocks.over_tiles(differentiate_tile, grad_bias)
    grads = (grad.reshape(x.shape).astype(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True))
    if hidden.bias is not None:
        grad_bias = grad_bias.astype(hidden.bias.dtype)
    return *grads, Hidden(None, grad_bias, None, gradient_of_sinks(hidden.sinks, log_sums, context, cotangent), None)


def gradient_of_sinks(sinks: Array | None, log_sums: Array, context: Array, cotangent: Array) -> Array | None:
    """The gradient of sinks (1, K, G, 1, 1): each takes weight from the keys, and gives nothing."""
    if sinks is None:
        return None
    given_sums = (at_least_float32(cotangent) * context).sum(axis=-1, keepdims=True)
    grads = jnp.exp(at_least_float32(sinks) - log_sums) * given_sums
    return -grads.sum(axis=(0, 3, 4)).reshape(sinks.shape).astype(sinks.dtype)


_attend.defvjp(_forward, gradients_of_part)


def weighed_sum(
    scores: Float[Array, "B N T S"], value: Float[Array, "B K S Hv"], sinks: Float[Array, " N"] | None = None
) -> tuple[Float[Array, "B N T Hv"], Float[Array, "B N T 1"]]:
    """softmax(scores) · value, divided last, of scores that are -inf where a key is hidden; in at least float32.

    With it the logarithm of each sum of exponentials; 0 and infinity for a row to which no key gave anything.
    """
    batch_size, num_kv_heads, seq_len_k, width = value.shape
    of_heads = scores.reshape(batch_size * num_kv_heads, -1, seq_len_k)
    values = at_least_float32(value).reshape(batch_size * num_kv_heads, seq_len_k, width)
    sums = _Sums.of(of_heads, values, may_be_empty=True)
    if sinks is not None:
        sinks = jnp.broadcast_to(at_least_float32(sinks)[None, :, None, None], (*scores.shape[:3], 1))
        sums = sums.with_sinks(sinks.reshape(sums.largest.shape).astype(scores.dtype))
    context, log_sums = (x.reshape(*scores.shape[:3], x.shape[2]) for x in sums.result())
    return context, log_sums


@compiled("scoring", "reach", "block_sizes")
def attend_to_cache(
    query: Float[Array, "B N 1 H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S Hv"],
    last_positions: Int[Array, " B"],
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B N 1 S"] | None = None,
    *,
    scoring: Scoring,
    reach: Reach | None = None,
    block_sizes: BlockSizes,
) -> Float[Array, "B N 1 Hv"]:
    """Attention of one token of each sequence up to a position of its own; arguments as those of `fused`.

    Keys and values are read where they are filled only; of scores, a row of the whole capacity is held for each query.
    Heads go side by side, each with a product of its own: XLA copies what it takes from a cache to a product of many,
    and divides the product of one row among no cores.
    """
    return _attend_to_cache((scoring, reach, block_sizes), query, keys, values, last_positions, sinks, bias)


_OfCache = tuple[Scoring, Reach | None, BlockSizes]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_to_cache(options: _OfCache, query: Array, keys: Array, *others: Any) -> Array:
    attend = _attend_to_every_slot if is_automatic(keys) else _attend_to_filled_slots
    return attend(options, query, keys, *others)


def _attend_to_filled_slots(
    options: _OfCache,
    query: Array,
    keys: Array,
    values: Array,
    last_positions: Array,
    sinks: Array | None,
    bias: Array | None,
) -> Array:
    scoring, reach, block_sizes = options
    last_keys = min(block_sizes.last_keys, block_sizes.keys)
    batch_size, num_kv_heads, capacity, _ = keys.shape
    num_heads = batch_size * num_kv_heads
    group_size = query.shape[1] // num_kv_heads
    queries = at_least_float32(query.reshape(num_heads, group_size, -1)) * scoring.scale  # (B K, G, H)

    def block(x: Array, head: Array, begin: Array, size: int) -> Array:
        # Of the cache as it is: XLA would copy all of a reshaped one.
        place = (head // num_kv_heads, head % num_kv_heads, begin, 0)
        x = lax.dynamic_slice(x, [jnp.asarray(i, jnp.int32) for i in place], (1, 1, size, x.shape[3]))
        return at_least_float32(x[0, 0])

    def attend_side_by_side(heads: Array) -> Array:
        last_of_heads = last_positions[heads // num_kv_heads]
        first_of_heads = jnp.zeros_like(last_of_heads) if reach is None else reach.first(last_of_heads)
        first_seen, last_seen = first_of_heads[:, None], last_of_heads[:, None]
        seen, filled = jnp.maximum(first_of_heads.min(), 0), last_of_heads.max() + 1  # from, and up to
        num_large = filled // block_sizes.keys
        filled_large = num_large * block_sizes.keys
        num_small = -((filled_large - filled) // last_keys)
        first_large = jnp.minimum(seen // block_sizes.keys, num_large)
        first_small = jnp.maximum(seen - filled_large, 0) // last_keys

        def over_blocks(add: Callable[[Array, Array, Array, int], Array], carry: Array) -> Array:
            def step(i: Array, carry: Array, *, after: Array | int, size: int) -> Array:
                first = after + i * size
                return add(carry, first, jnp.minimum(first, capacity - size), size)  # the last may lie over another

            carry = lax.fori_loop(first_large, num_large, partial(step, after=0, size=block_sizes.keys), carry)
            return lax.fori_loop(first_small, num_small, partial(step, after=filled_large, size=last_keys), carry)

        def put_scores(scores: Array, _: Array, begin: Array, size: int) -> Array:
            found = [jnp.einsum("gh,sh->gs", queries[head], block(keys, head, begin, size)) for head in heads]
            return lax.dynamic_update_slice_in_dim(scores, jnp.stack(found), begin, axis=2)

        def add_values(context: Array, first: Array, begin: Array, size: int) -> Array:
            slots = begin + jnp.arange(size, dtype=jnp.int32)[None]
            weights = [
                jnp.where(slots >= first, lax.dynamic_slice_in_dim(x, begin, size, axis=1), 0.0) for x in attn_weights
            ]
            found = [
                jnp.einsum("gs,sh->gh", x, emptied(block(values, head, begin, size), unseen[:, None]))
                for x, head, unseen in zip(weights, heads, (slots < first_seen) | (slots > last_seen), strict=True)
            ]
            return context + jnp.stack(found)

        scores = over_blocks(put_scores, jnp.zeros_like(queries, shape=(len(heads), group_size, capacity)))
        slots = jnp.arange(capacity, dtype=jnp.int32)[None]
        scores = scoring.lessened(scoring.capped(scores), heads % num_kv_heads, num_kv_heads, last_seen - slots)
        scores = scores if bias is None else scores + bias.reshape(num_heads, group_size, capacity)[heads]
        is_seen = (slots >= first_seen) & (slots <= last_seen)
        of_heads = None if sinks is None else sinks.reshape(num_kv_heads, group_size, 1)[heads % num_kv_heads]
        attn_weights = _softmax_of_seen(scores, is_seen, of_heads)
        return over_blocks(add_values, jnp.zeros_like(queries, shape=(len(heads), group_size, values.shape[3])))

    together = math.gcd(num_kv_heads if num_kv_heads > 1 else batch_size, block_sizes.heads_side_by_side)
    contexts = lax.map(attend_side_by_side, jnp.arange(num_heads, dtype=jnp.int32).reshape(-1, together))
    return contexts.reshape(*query.shape[:3], values.shape[3]).astype(query.dtype)


def _attend_to_every_slot(
    options: _OfCache,
    query: Array,
    keys: Array,
    values: Array,
    last_positions: Array,
    sinks: Array | None,
    bias: Array | None,
) -> Array:
    """Products of all sequences, heads and slots, which XLA divides among devices as the cache is."""
    scoring, reach, _ = options
    batch_size, num_kv_heads, capacity, _ = keys.shape
    heads, slots = (jnp.arange(size, dtype=jnp.int32) for size in (num_kv_heads, capacity))
    of_heads = None if sinks is None else sinks.reshape(num_kv_heads, -1, 1)

    def attend_sequence(query: Array, keys: Array, values: Array, last: Array, bias: Array | None) -> Array:
        scores = scoring.capped(jnp.einsum("kgh,ksh->kgs", query, at_least_float32(keys)))
        scores = scoring.lessened(scores, heads, num_kv_heads, (last - slots)[None])
        scores = scores if bias is None else scores + bias.reshape(scores.shape)
        is_seen = slots <= last if reach is None else (slots <= last) & (slots >= reach.first(last))
        attn_weights = _softmax_of_seen(scores, is_seen[None], of_heads)[..., :capacity]
        return jnp.einsum("kgs,ksh->kgh", attn_weights, emptied(at_least_float32(values), ~is_seen[:, None]))

    query = at_least_float32(query.reshape(batch_size, num_kv_heads, -1, query.shape[3])) * scoring.scale
    contexts = jax.vmap(attend_sequence)(query, keys, values, last_positions, bias)
    return contexts.reshape(batch_size, -1, 1, values.shape[3]).astype(keys.dtype)


def _softmax_of_seen(scores: Array, is_seen: Array, sinks: Array | None) -> Array:
    """Attention weights of slots, (heads, G, S), 0 for a sequence without a key; those of sinks follow."""
    if sinks is not None:  # one more slot, which is always seen
        scores = jnp.concatenate([scores, sinks.astype(scores.dtype)], axis=2)
        is_seen = jnp.pad(is_seen, [(0, 0), (0, 1)], constant_values=True)
    return jax.nn.softmax(scores, axis=-1, where=is_seen[:, None])


def _attend_to_cache_forward(options: _OfCache, *inputs: Any) -> tuple[Array, tuple[Any, ...]]:
    return _attend_to_cache(options, *inputs), inputs


def _attend_to_cache_backward(
    options: _OfCache, residuals: tuple[Any, ...], cotangent: Array
) -> tuple[Array | None, ...]:
    scoring, reach, block_sizes = options
    query, keys, values, last_positions, sinks, bias = residuals
    masking = Masking(key_padding_lengths=last_positions + 1, offsets=last_positions)
    if reach is not None:
        mask = Masking(is_causal=True, reach=reach, offsets=last_positions).joined(1, keys.shape[2])
        masking = Masking(mask, offsets=last_positions)

    def attend_to_filled(query: Array, keys: Array, values: Array, sinks: Array | None, bias: Array | None) -> Array:
        hidden = replace(masking, sinks=sinks, bias=bias)
        return attend_by_block(query, keys, values, hidden, scoring=scoring, block_sizes=block_sizes)

    _, differentiate = jax.vjp(attend_to_filled, query, keys, values, sinks, bias)
    *grads, grad_sinks, grad_bias = differentiate(cotangent)
    return *grads, None, grad_sinks, grad_bias


_attend_to_cache.defvjp(_attend_to_cache_forward, _attend_to_cache_backward)


class _Sums(NamedTuple):
    """What blocks of keys add up to, for each query."""

    largest: Array  # score, (P, G T, 1)
    exponentials: Array  # sum of exp(score - largest), (P, G T, 1)
    values: Array  # each times its exponential, (P, G T, Hv)

    @classmethod
    def empty(cls, q_rows: Array, width: int) -> "_Sums":
        """Those of no keys, whose values are so wide."""
        zeros = jnp.zeros_like(q_rows, shape=(*q_rows.shape[:2], width))
        return cls(zeros[..., :1] - jnp.inf, zeros[..., :1], zeros)

    @classmethod
    def of(cls, scores: Array, value: Array, *, may_be_empty: bool) -> "_Sums":
        """Those of one block; `may_be_empty` if a query may see no key of it."""
        # XLA has a kernel for these lines, if nothing else needs the largest. It may be -inf beside a NaN, too.
        largest = scores.max(axis=-1, keepdims=True)
        exponentials = jnp.exp(scores - (_finite_shift(largest) if may_be_empty else largest))
        return cls(largest, exponentials.sum(axis=-1, keepdims=True), jnp.einsum("pts,psh->pth", exponentials, value))

    def join(self, other: "_Sums") -> "_Sums":
        """Those of both."""
        largest = jnp.maximum(self.largest, other.largest)
        shift = _finite_shift(largest)
        ours, theirs = jnp.exp(self.largest - shift), jnp.exp(other.largest - shift)
        return _Sums(
            largest,
            self.exponentials * ours + other.exponentials * theirs,
            self.values * ours + other.values * theirs,
        )

    def with_sinks(self, sinks: Array) -> "_Sums":
        """Those with one more score of each query, (P, G T, 1), whose value is 0."""
        return self.join(_Sums(sinks, jnp.ones_like(sinks), jnp.zeros_like(self.values)))

    def result(self) -> tuple[Array, Array]:
        """The context, and the logarithm of the sum of exponentials: 0 and infinity for a row to which no key gave."""
        gave_nothing = self.exponentials == 0.0
        exponentials = jnp.where(gave_nothing, 1.0, self.exponentials)
        return self.values / exponentials, jnp.where(gave_nothing, jnp.inf, self.largest + jnp.log(exponentials))


def _finite_shift(largest: Array) -> Array:
    return jnp.where(jnp.isneginf(largest), 0.0, largest)  # exp(-inf) is 0, and exp(-inf + inf) is not


class _Tile(NamedTuple):
    """Heads that are worked on at a time, all of one sequence."""

    sequence: Array
    head: Array  # the first key/value head
    shape: tuple[int, int]  # one sequence, key/value heads

    def part(self, x: Array) -> Array:
        """What the tile holds of (B or 1, K or 1, …)."""
        for axis, (begin, size) in enumerate(zip((self.sequence, self.head), self.shape, strict=True)):
            x = x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, begin, size, axis)
        return x

    def of(self, x: Array) -> Array:
        """What the tile holds of (B, K, …), its heads on one axis: (P, …)."""
        return self.part(x).reshape(-1, *x.shape[2:])


class _Rows(NamedTuple):
    """A block of queries."""

    number: int
    begin: int
    stop: int

    def of(self, x: Array) -> Array:
        """(P, G t, ·) of (P, G, T, ·)."""
        return x[:, :, self.begin : self.stop].reshape(x.shape[0], -1, x.shape[3])

    def split(self, x: Array, group_size: int) -> Array:
        """(P, G, t, ·) of (P, G t, ·)."""
        return x.reshape(x.shape[0], group_size, -1, x.shape[2])


class _Keys(NamedTuple):
    """A block of keys; where it had to be moved to lie within all of them, its first few were in the block before."""

    begin: Array | int
    size: int
    first: Array | int | None = None  # that is new, where the block may have been moved
    is_clear: bool = False  # of causality: every query of the block sees all of them

    def of(self, x: Array) -> Array:
        """(P, s, ·) of (P, S, ·)."""
        return lax.dynamic_slice_in_dim(x, self.begin, self.size, axis=-2)

    def add_to(self, x: Array, block: Array) -> Array:
        """(P, S, ·) with (P, s, ·) added in its place."""
        return lax.dynamic_update_slice_in_dim(x, self.of(x) + block, self.begin, axis=-2)


class _Blocks:
    """How the work is divided: into tiles of heads, and each of these into blocks of queries and of keys."""

    def __init__(
        self,
        query_shape: tuple[int, ...],
        key_shape: tuple[int, ...],
        hidden: Hidden,
        options: Options,
    ) -> None:
        is_causal, scoring, block_sizes, is_automatic, _ = options
        self.batch_size, self.num_kv_heads, self.group_size, self.seq_len_q, _ = query_shape
        self.seq_len_k = key_shape[2]
        if hidden.mask is not None:  # XLA would take minutes to find out by itself what a constant mask shows
            hidden = hidden._replace(mask=lax.optimization_barrier(hidden.mask))
        self.hidden = hidden
        self.is_causal = is_causal
        self.hides = options.hides(hidden)
        self.scoring = scoring
        # Two products of matrices at a time keep two cores busier than one.
        self.tile_shape = (1, 2 if self.group_size == 1 and self.num_kv_heads % 2 == 0 else 1)
        self.is_automatic = is_automatic
        if is_automatic:  # it gathers what is cut out of a divided axis
            self.tile_shape = (1, self.num_kv_heads)
        # Where every query sees the same, larger matrices are faster; elsewhere smaller ones leave out more. (A group
        # of heads makes them larger, too.)
        sees_alike = not is_causal and hidden.mask is None and self.group_size == 1
        block_queries = max(
            block_sizes.queries * (2 if sees_alike else 1), -(-self.seq_len_q // block_sizes.most_blocks)
        )
        self.rows = [
            _Rows(number, begin, min(begin + block_queries, self.seq_len_q))
            for number, begin in enumerate(range(0, self.seq_len_q, block_queries))
        ]
        self.block_keys = min(block_sizes.keys, self.seq_len_k)
        self.seen_blocks = None if hidden.mask is None or is_automatic else self.seen(hidden.mask)

    def over_tiles(self, function: Callable[[_Tile, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
        """The results of a function for each tile, and what it hands on from one tile to the next."""
        tiles_of_sequence = self.num_kv_heads // self.tile_shape[1]

        def step(carry: Any, i: Array) -> tuple[Any, Any]:
            tile = _Tile(i // tiles_of_sequence, i % tiles_of_sequence * self.tile_shape[1], self.tile_shape)
            results, carry = function(tile, carry)
            return carry, results

        tiles = jnp.arange(self.batch_size * tiles_of_sequence, dtype=jnp.int32)
        carry, results = lax.scan(step, carry, tiles)
        return results, carry

    def over_keys(self, add: Callable[[Any, _Keys], Any], nothing: Any, zeros: Any, tile: _Tile, rows: _Rows) -> Any:
        """What a function adds up over the keys that a block of queries may see, from nothing or, in a loop, zeros."""
        stop = min(rows.stop, self.seq_len_k) if self.is_causal else self.seq_len_k
        size, num_blocks = self.block_keys, -(-stop // self.block_keys)

        def add_block(i: Array, sums: Any) -> Any:
            first = i * size
            return add(sums, _Keys(jnp.minimum(first, self.seq_len_k - size), size, first))

        is_loop = self.is_automatic  # or else XLA holds the scores of all blocks at the same time
        if is_loop or self.hidden.mask is not None or self.hidden.lengths is not None:
            return lax.fori_loop(*self.seen_of(num_blocks, tile, rows), add_block, zeros)
        # First the blocks of which every query sees all, then the rest: at once, if it is a block at most.
        clear = min(rows.begin, stop) if self.is_causal else stop
        num_clear, sums = clear // size, nothing
        if num_clear == 1:
            sums = add(nothing, _Keys(0, size, is_clear=True))
        elif num_clear:
            sums = lax.fori_loop(0, num_clear, lambda i, sums: add(sums, _Keys(i * size, size, is_clear=True)), zeros)
        rest = stop - num_clear * size
        if rest > size:
            return lax.fori_loop(num_clear, num_blocks, add_block, sums if num_clear else zeros)
        return add(sums, _Keys(num_clear * size, rest, is_clear=clear == stop)) if rest else sums

    def seen_of(self, num_blocks: int, tile: _Tile, rows: _Rows) -> tuple[Array | int, Array | int]:
        """Of so many blocks of keys, those that mask and lengths show a block of queries: the first, where to stop."""
        first, last = 0, num_blocks
        if self.is_automatic:  # devices would have to agree on what all of them may leave out
            return first, last
        if self.seen_blocks is not None:
            first_seen, last_seen = (tile.part(x)[..., rows.number] for x in self.seen_blocks)
            first, last = first_seen.min(), jnp.minimum(last, last_seen.max())
        if self.hidden.lengths is not None:
            last = jnp.minimum(last, -(-self.hidden.lengths[tile.sequence] // self.block_keys))
        return first, last

    def seen(self, mask: Array) -> tuple[Array, Array]:
        """The blocks of keys that each block of queries sees by the mask: the first, and the one after the last."""
        seen = (~mask).any(axis=2)  # (B, K, T, S), each of these axes perhaps of length 1
        if seen.shape[2] > 1:
            seen = jnp.stack([seen[:, :, rows.begin : rows.stop].any(axis=2) for rows in self.rows], axis=2)
        seen = jnp.broadcast_to(seen, (*seen.shape[:2], len(self.rows), self.seq_len_k))
        seen = jnp.pad(seen, [(0, 0)] * 3 + [(0, -self.seq_len_k % self.block_keys)])
        seen = seen.reshape(*seen.shape[:3], -1, self.block_keys).any(axis=-1)
        number = jnp.arange(seen.shape[-1], dtype=jnp.int32)[None, None, None]
        return jnp.where(seen, number, self.seq_len_k).min(axis=-1), jnp.where(seen, number + 1, 0).max(axis=-1)

    def set_aside(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """The same where all is finite; else queries and values emptied, and NaN as the keys of those values.

        So whoever sees a key that is not finite, or a value, has a score of NaN, and nobody else has.
        """
        if not self.hides:
            return q, k, v
        wrong = not_finite(v)
        return emptied(q, not_finite(q)), jnp.where(wrong, jnp.nan, k), emptied(v, wrong)

    def empty_rows(self, gave_nothing: Array) -> Array:
        """Those of the rows to which no key gave anything that may see none, (B or 1, K or 1, G or 1, T or 1, 1)."""
        mask, lengths = self.hidden.mask, self.hidden.lengths
        lengths = None if lengths is None else lengths.reshape(-1, 1, 1, 1, 1)
        if mask is None:
            return jnp.zeros((1,) * 5, bool) if lengths is None else lengths == 0

        def look() -> Array:
            positions = jnp.arange(self.seq_len_k, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
            hidden = mask
            if self.is_causal:
                hidden |= positions > jnp.arange(self.seq_len_q, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
            if lengths is not None:
                hidden |= positions >= lengths
            return gave_nothing & hidden.all(axis=-1, keepdims=True)

        # Several devices would have to agree on whether to look.
        return look() if self.is_automatic else lax.cond(gave_nothing.any(), look, lambda: gave_nothing)

    def with_sinks(self, sums: _Sums, tile: _Tile, rows: _Rows) -> _Sums:
        """What the keys of a block of queries add up to, with the sinks, whose values are 0."""
        if self.hidden.sinks is None:
            return sums
        sinks = at_least_float32(tile.of(self.hidden.sinks))  # (P, G, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*sinks.shape[:2], rows.stop - rows.begin, 1)).reshape(sums.largest.shape)
        return sums.with_sinks(sinks)

    def may_hide_all(self, keys: _Keys) -> bool:
        """Whether a query may see no key of a block: by a mask, or as causality cuts up what is not clear."""
        return self.hidden.mask is not None or self.hidden.lengths is not None or keys.first is not None

    def scores(
        self, q_rows: Array, k_block: Array, tile: _Tile, rows: _Rows, keys: _Keys, *, by_key: bool = False
    ) -> tuple[Array, Array | float, Array | None]:
        """Scores of a block, -inf where a key is hidden, (P, G t, s) or (P, s, G t).

        With them their derivative by what they are made of, and where a key is hidden, if anywhere.
        """
        axes = "psh,pth->pst" if by_key else "pth,psh->pts"
        q_rows = q_rows * self.scoring.scale
        scores = self.scoring.capped(jnp.einsum(axes, *((k_block, q_rows) if by_key else (q_rows, k_block))))
        slope = self.scoring.slope(scores)

        def arrange(x: Array) -> Array:  # of (b or 1, k or 1, G or 1, t or 1, s or 1)
            x = jnp.broadcast_to(x, (*tile.shape, self.group_size, rows.stop - rows.begin, keys.size))
            return (jnp.moveaxis(x, -1, 2) if by_key else x).reshape(scores.shape)

        if self.hidden.bias is not None:
            scores += arrange(at_least_float32(self._block(self.hidden.bias, tile, rows, keys)))
        positions = (keys.begin + jnp.arange(keys.size, dtype=jnp.int32)).reshape(1, 1, 1, 1, -1)
        places = jnp.arange(rows.begin, rows.stop, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
        if self.scoring.slopes is not None:
            offsets = 0 if self.hidden.offsets is None else tile.part(self.hidden.offsets.reshape(-1, 1, 1, 1, 1))
            slopes = tile.part(self.scoring.slopes_of(self.num_kv_heads, scores.dtype))
            scores -= arrange(slopes * jnp.abs(places + offsets - positions).astype(scores.dtype))
        parts = []
        if self.hidden.mask is not None:
            parts.append(self._block(self.hidden.mask, tile, rows, keys))
        if self.is_causal and not keys.is_clear:
            parts.append(positions > places)
        if self.hidden.lengths is not None:
            parts.append(positions >= tile.part(self.hidden.lengths.reshape(-1, 1, 1, 1, 1)))
        if keys.first is not None and self.seq_len_k % self.block_keys:
            parts.append(positions < keys.first)
        if not parts:
            return scores, slope, None
        is_hidden = arrange(reduce(jnp.logical_or, parts))
        return jnp.where(is_hidden, -jnp.inf, scores), slope, is_hidden

    def add_to_bias(self, grad: Array, grad_scores: Array, tile: _Tile, rows: _Rows, keys: _Keys) -> Array:
        """The gradient of the bias with that of a block of scores, (P, s, G t)."""
        start, sizes = self._place(grad, tile, rows, keys)
        grad_scores = grad_scores.reshape(*tile.shape, keys.size, self.group_size, -1)
        summed = [axis for axis, size in enumerate(sizes) if size == 1]
        block = jnp.moveaxis(grad_scores, 2, -1).sum(axis=summed, keepdims=True)
        return lax.dynamic_update_slice(grad, lax.dynamic_slice(grad, start, sizes) + block, start)

    def _block(self, x: Array, tile: _Tile, rows: _Rows, keys: _Keys) -> Array:
        return lax.dynamic_slice(x, *self._place(x, tile, rows, keys))

    def _place(self, x: Array, tile: _Tile, rows: _Rows, keys: _Keys) -> tuple[list[Array], list[int]]:
        """Where a block lies in (B or 1, K or 1, G or 1, T or 1, S or 1), and its size there."""
        starts = (tile.sequence, tile.head, 0, rows.begin, keys.begin)
        sizes = (*tile.shape, self.group_size, rows.stop - rows.begin, keys.size)
        return (
            [jnp.asarray(0 if of == 1 else start, jnp.int32) for start, of in zip(starts, x.shape, strict=True)],
            [min(size, of) for size, of in zip(sizes, x.shape, strict=True)],
        )
