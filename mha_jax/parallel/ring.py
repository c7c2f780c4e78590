"""Ring attention: keys and values circulate among devices, queries stay.

Partial results are merged by their log-sum-exp, forward and backward as in `blockwise`. Parts
hidden by causality, a window or chunks are skipped. With causality alone each device works on one
half from the start and one from the end, so that all have equal work. For a cache with divided
slots, queries are replicated and the partial results of all slots are merged at once.

Axes: see `blocks`; t and s are the local tokens of T and S.

Source: Ring Attention, arXiv:2310.01889; zigzag order as in Llama 3, arXiv:2407.21783, section
3.3.2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_jax.arrays import Array, at_least_float32
from mha_jax.kernels.cpu.blocks import BlockSizes, Hidden, Options, Scoring, finite_shift
from mha_jax.kernels.cpu.blockwise import gradient_of_sinks, gradients_of_part, sums_of_part
from mha_jax.masks import Mask
from mha_jax.scores import Scores
from mha_jax.sharding import is_automatic, varying
from mha_spec.span import Span


class _Plan(NamedTuple):
    """Static settings of a ring, in addition to shapes.

    Attributes:
        axis, size: mesh dimension and its number of devices.
        is_causal, span: masks by position.
        is_halved: each device works on one half from the start and one from the end.
        is_cached: queries are replicated, and keys are slots.
        walks: number of steps of keys and values to a neighbor, forward and back.
        options: settings of each part.
    """

    axis: str
    size: int
    is_causal: bool
    span: Span | None
    is_halved: bool
    is_cached: bool
    walks: tuple[tuple[int, int], ...]
    options: Options


class _Terms(NamedTuple):
    """Masks and biases: rows of local queries, columns of all keys.

    Attributes:
        mask, bias: (B or 1, K or 1, G or 1, t or 1, S or 1); with a cache the columns are local
            slots.
        lengths: number of real keys, (B,).
        sinks: attention sinks, (1, K, G, 1, 1).
        q_offset: with a cache, position of the first query of each sequence, (B,) or (1,).
    """

    mask: Array | None
    bias: Array | None
    lengths: Array | None
    sinks: Array | None
    q_offset: Array | None


class _Chunk(NamedTuple):
    """Consecutive tokens.

    Attributes:
        begin: position of the first, (1,) or, for queries over a cache, (B,).
        size: number of tokens.
    """

    begin: Array
    size: int

    @property
    def positions(self) -> Array:
        """Positions, (B or 1, size)."""
        return self.begin[:, None] + jnp.arange(self.size, dtype=jnp.int32)[None]


def attend_to_visitors(
    axis: str,
    size: int,
    sizes: BlockSizes,
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    scores: Scores,
) -> Array:
    """Attend from local queries (B, N, t, H) to the keys and values (B, K, s, H) of all devices.

    Args:
        axis, size: mesh dimension and its number of devices.
        sizes: block sizes on a device.
        query, key, value: local; with a cache, whose mask has offsets, all queries and local slots.
        mask, scores: rows of local queries and columns of all keys; with a cache, columns of local
            slots.
    """
    num_kv_heads = key.shape[1]
    span = mask.span
    is_cached = mask.q_offset is not None

    def group(x: Array) -> Array:
        if x.shape[1] == 1:
            heads = (1, 1)
        else:
            heads = (num_kv_heads, x.shape[1] // num_kv_heads)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    as_bool, bias = (
        None if x is None else group(x) for x in (mask.with_bias(scores.bias).mask, scores.bias)
    )
    sinks = scores.learned.get("sinks")
    if sinks is not None:
        sinks = sinks.reshape(1, num_kv_heads, -1, 1, 1)
    terms = _Terms(as_bool, bias, mask.key_padding_lengths, sinks, mask.q_offset)  # pyright: ignore[reportArgumentType]
    same = query.shape[2] == key.shape[2] and span is None and as_bool is None and bias is None
    is_halved = mask.is_causal and not is_cached and same and query.shape[2] % 2 == 0
    # Accelerators also go from tile to tile: the ring leaves out tiles that no query sees. Each
    # pair of parts decides whether it is causal.
    options = Options(
        is_causal=False,
        scoring=Scoring.of_layer(scores.spec),
        sizes=sizes,
        at_once=is_automatic(query),
    )
    if is_cached:
        walks = ()
    else:
        walks = _walks(mask, query.shape[2], key.shape[2], size)
    plan = _Plan(axis, size, mask.is_causal, span, is_halved, is_cached, walks, options)
    arrays = varying((group(query), key, value, terms), axis)
    if is_halved:
        *tokens, terms = arrays
        arrays = (*(_to_halves(plan, x) for x in tokens), terms)
    attend: Any = _attend
    context = attend(plan, *arrays)
    if is_halved:
        context = _from_halves(plan, context)
    return context.reshape(*query.shape[:3], value.shape[3])


def _walks(mask: Mask, seq_len_q: int, seq_len_k: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the walks of keys and values: each a direction, 1 to the next device or -1, and a
    number of steps, to all devices or as far as spans reach.
    """
    span = mask.span
    if span is None or seq_len_q != seq_len_k:
        return ((1, size - 1),)
    if span.window_size is not None:
        reach = span.window_size - 1
    else:
        chunk_size = span.chunk_size or 1
        # Chunks that end where the tokens of a device end need no other device.
        reach = 0 if seq_len_q % chunk_size == 0 else chunk_size - 1
    count = -(-reach // seq_len_q)
    if mask.is_causal:
        return ((1, min(count, size - 1)),)
    # Both walks would meet: one in one direction passes all devices.
    if 2 * count >= size - 1:
        return ((1, size - 1),)
    return ((1, count), (-1, count))


# ---- Zigzag order --------------------------------------------------------------------------------


def _home(half: int, size: int) -> int:
    """Return the device that works on a half."""
    if half < size:
        return half
    return 2 * size - 1 - half


def _to_halves(plan: _Plan, x: Array) -> Array:
    """Exchange halves 2 i and 2 i + 1 of the tokens (second to last axis) for halves i and 2 n - 1
    - i.
    """
    first, second = jnp.split(x, 2, axis=-2)
    homes = [[(i, _home(2 * i + which, plan.size)) for i in range(plan.size)] for which in (0, 1)]
    even, odd = (
        lax.ppermute(half, plan.axis, to) for half, to in zip((first, second), homes, strict=True)
    )
    is_even = lax.axis_index(plan.axis) % 2 == 0
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=-2)


def _from_halves(plan: _Plan, x: Array) -> Array:
    """Undo `_to_halves`."""
    front, back = jnp.split(x, 2, axis=-2)
    is_even = lax.axis_index(plan.axis) % 2 == 0
    homes = [[(_home(2 * i + which, plan.size), i) for i in range(plan.size)] for which in (0, 1)]
    halves = (jnp.where(is_even, front, back), jnp.where(is_even, back, front))
    return jnp.concatenate(
        [lax.ppermute(x, plan.axis, to) for x, to in zip(halves, homes, strict=True)], axis=-2
    )


# ---- Pairs of queries and keys -------------------------------------------------------------------


class _Pair(NamedTuple):
    """Consecutive queries, and keys that they may attend to.

    Attributes:
        rows, keys: their positions.
        rows_at, keys_at: index of the first among the local queries, and among the visiting keys.
        is_diagonal: both have the same positions, and the mask is causal.
        is_clear: nothing but padding is hidden.
    """

    rows: _Chunk
    keys: _Chunk
    rows_at: Array | int
    keys_at: Array | int
    is_diagonal: bool = False
    is_clear: bool = False


def _pairs(
    plan: _Plan, terms: _Terms, source: Array, seq_len_q: int, seq_len_k: int, *, is_local: bool
) -> list[_Pair]:
    """Return the pairs of local queries and of keys from a device that are not fully masked."""
    me = lax.axis_index(plan.axis)
    if not plan.is_halved:
        if plan.is_cached:
            begin = terms.q_offset
        else:
            begin = (me * seq_len_q)[None]
        rows = _Chunk(begin, seq_len_q)  # pyright: ignore[reportArgumentType]
        keys = _Chunk((source * seq_len_k)[None], seq_len_k)
        return [_Pair(rows, keys, 0, 0, is_clear=not plan.is_causal and plan.span is None)]
    half = seq_len_q // 2
    last = 2 * plan.size - 1

    def chunk(number: Array) -> _Chunk:
        return _Chunk((number * half)[None], half)

    front = chunk(me)
    back = chunk(last - me)
    keys_front = chunk(source)
    keys_back = chunk(last - source)
    behind = _Pair(back, keys_front, half, 0, is_clear=True)
    if is_local:
        return [
            _Pair(front, keys_front, 0, 0, is_diagonal=True),
            behind,
            _Pair(back, keys_back, half, half, is_diagonal=True),
        ]
    # Then the back half attends to their back half, else the front to their front.
    is_later = source > me
    rows, keys = (
        _Chunk(jnp.where(is_later, b.begin, f.begin), half)
        for f, b in ((front, back), (keys_front, keys_back))
    )
    at = jnp.where(is_later, half, 0)
    return [behind, _Pair(rows, keys, at, at, is_clear=True)]


def _cut(x: Array, begin: Array | int, size: int) -> Array:
    """Return some of the tokens (second to last axis)."""
    if size == x.shape[-2]:
        return x
    return lax.dynamic_slice_in_dim(x, begin, size, axis=-2)


def _put(x: Array, part: Array, begin: Array | int) -> Array:
    if part.shape == x.shape:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, begin, axis=-2)


def _hidden_of(plan: _Plan, terms: _Terms, pair: _Pair) -> Hidden:
    """Return the masks and biases of a pair."""
    rows = pair.rows
    keys = pair.keys

    def columns(x: Array | None) -> Array | None:
        if x is None or x.shape[-1] in (1, keys.size):
            return x
        return lax.dynamic_slice_in_dim(x, keys.begin[0], keys.size, axis=-1)

    mask = columns(terms.mask)
    bias = columns(terms.bias)
    if terms.lengths is None:
        lengths = None
    else:
        lengths = jnp.clip(terms.lengths - keys.begin, 0, keys.size)
    if not (pair.is_clear or pair.is_diagonal):
        # (B or 1, t) and (1, 1, 1, 1, s).
        row_positions = rows.positions
        key_positions = keys.positions[:, None, None, None]
        if plan.is_causal:
            stop = row_positions + 1
        else:
            stop = jnp.full_like(row_positions, jnp.iinfo(jnp.int32).max)
        first = jnp.zeros_like(row_positions)
        if plan.span is not None:
            first = plan.span.first(row_positions)
            stop = jnp.minimum(stop, plan.span.stop(row_positions))
        first, stop = (x[:, None, None, :, None] for x in (first, stop))
        is_outside = (key_positions < first) | (key_positions >= stop)
        if mask is None:
            mask = is_outside
        else:
            mask = mask | is_outside
    q_offset = None
    if plan.options.scoring.slopes is not None:
        q_offset = rows.begin - keys.begin
    return Hidden(mask, bias, lengths, None, q_offset)


def _sees(plan: _Plan, pair: _Pair) -> Array | None:
    """Return whether positions allow any query of a pair to attend to a key; None if one surely
    does.
    """
    if pair.is_clear or pair.is_diagonal or plan.is_cached:
        return None
    first = pair.rows.begin[0]
    last = pair.rows.begin[0] + pair.rows.size - 1
    begin = pair.keys.begin[0]
    end = pair.keys.begin[0] + pair.keys.size
    if plan.is_causal:
        sees = begin <= last
    else:
        sees = begin <= jnp.iinfo(jnp.int32).max
    if plan.span is not None:
        sees &= (end > plan.span.first(first)) & (begin < plan.span.stop(last))
    return sees


def _by_sequence(plan: _Plan, function: Callable[..., Any], hidden: Hidden, *arrays: Array) -> Any:
    """Call a function of masks and arrays; under vmap over sequences if XLA partitions them,
    because it does not partition loops.
    """
    if not plan.options.at_once:
        return function(hidden, *arrays)
    batch_size = arrays[0].shape[0]
    axes = jax.tree.map(lambda x: 0 if x.shape[0] == batch_size else None, hidden)
    hidden, arrays = jax.tree.map(
        lambda x: x[:, None] if x.shape[0] == batch_size else x, (hidden, arrays)
    )
    results = jax.vmap(function, in_axes=(axes, *(0 for _ in arrays)))(hidden, *arrays)
    return jax.tree.map(lambda x: x[:, 0], results)


# ---- Partial results -----------------------------------------------------------------------------


class _Sums(NamedTuple):
    """Partial attention of queries over some keys: see `PartSums`, but with an lse of -inf if all
    scores are -inf.
    """

    context: Array
    lse: Array


def _nothing(query: Array, width: int) -> _Sums:
    """Return the identity element of `_joined`."""
    row = at_least_float32(query[..., :1])
    # Like the queries, so that they vary over the same devices.
    zeros = jnp.zeros_like(row)
    context = jnp.broadcast_to(zeros, (*row.shape[:-1], width))
    return _Sums(context, jnp.full_like(row, -jnp.inf))


def _joined(ours: _Sums, theirs: _Sums) -> _Sums:
    """Merge two partial results by their log-sum-exp."""
    largest = jnp.maximum(ours.lse, theirs.lse)
    shift = finite_shift(largest)
    weights = [jnp.exp(x.lse - shift) for x in (ours, theirs)]
    total = sum(weights)
    is_empty = total == 0.0  # neither has a visible key
    total = jnp.where(is_empty, 1.0, total)
    context = (ours.context * weights[0] + theirs.context * weights[1]) / total
    lse = jnp.where(is_empty, -jnp.inf, shift + jnp.log(total))
    return _Sums(context, lse)


def _sums_of(
    plan: _Plan, terms: _Terms, pair: _Pair, query: Array, key: Array, value: Array
) -> _Sums:
    """Return the attention of a pair's queries over its keys."""
    rows = _cut(query, pair.rows_at, pair.rows.size)
    keys, values = (_cut(x, pair.keys_at, pair.keys.size) for x in (key, value))
    options = plan.options._replace(is_causal=pair.is_diagonal)

    def look() -> _Sums:
        def of_sequence(hidden: Hidden, query: Array, key: Array, value: Array) -> _Sums:
            part_sums = sums_of_part(options, query, key, value, hidden)
            lse = jnp.where(jnp.isposinf(part_sums.lse), -jnp.inf, part_sums.lse)
            return varying(_Sums(part_sums.context, lse), plan.axis)

        return _by_sequence(plan, of_sequence, _hidden_of(plan, terms, pair), rows, keys, values)

    sees = _sees(plan, pair)
    if sees is None:
        return look()
    return lax.cond(sees, look, lambda: _nothing(rows, value.shape[3]))


def _added(plan: _Plan, terms: _Terms, pairs: list[_Pair], sums: _Sums, *arrays: Array) -> _Sums:
    """Return partial results, joined with the results of some pairs."""
    for pair in pairs:
        old_sums = _Sums(*(_cut(x, pair.rows_at, pair.rows.size) for x in sums))
        joined = _joined(old_sums, _sums_of(plan, terms, pair, *arrays))
        sums = _Sums(*(_put(x, part, pair.rows_at) for x, part in zip(sums, joined, strict=True)))
    return sums


def _walk(
    plan: _Plan, visit: Callable[..., Any], carry: Any, arrays: Any, gathered: Any
) -> tuple[Any, Any]:
    """Accumulate a function over visiting arrays; return the carry, and what the arrays gathered,
    back at their device.

    Args:
        plan: number of steps in each direction.
        visit: maps the carry, visiting arrays, gathered values and source device to the new carry
            and gathered values.
        carry: initial carry.
        arrays: local arrays, which visit other devices.
        gathered: initial value, to which values from other devices are added.
    """
    me = lax.axis_index(plan.axis)
    total = gathered
    for direction, steps in plan.walks:

        def shifted(tree: Any, by: int) -> Any:
            to = [(i, (i + by) % plan.size) for i in range(plan.size)]
            return jax.tree.map(lambda x: lax.ppermute(x, plan.axis, to), tree)

        def step(state: Any, i: Array, direction: int = direction) -> Any:
            carry, moving = state
            visitors, gathered = shifted(moving, direction)
            carry, gathered = visit(carry, visitors, gathered, (me - direction * i) % plan.size)
            return (carry, (visitors, gathered)), None

        if steps:
            numbers = jnp.arange(1, steps + 1, dtype=jnp.int32)
            (carry, (_, returned)), _ = lax.scan(step, (carry, (arrays, gathered)), numbers)
            total = jax.tree.map(jnp.add, total, shifted(returned, -direction * steps))
    return carry, total


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, query: Array, key: Array, value: Array, terms: _Terms) -> Array:
    return _forward(plan, query, key, value, terms)[0]


def _forward(
    plan: _Plan, query: Array, key: Array, value: Array, terms: _Terms
) -> tuple[Array, tuple[Any, ...]]:
    lengths = query.shape[3], key.shape[2]
    local_pairs = _pairs(plan, terms, lax.axis_index(plan.axis), *lengths, is_local=True)
    sums = _added(plan, terms, local_pairs, _nothing(query, value.shape[3]), query, key, value)

    def visit(
        sums: _Sums, visitors: tuple[Array, Array], gathered: Any, source: Array
    ) -> tuple[_Sums, Any]:
        pairs = _pairs(plan, terms, source, *lengths, is_local=False)
        return _added(plan, terms, pairs, sums, query, *visitors), gathered

    sums, _ = _walk(plan, visit, sums, (key, value), ())
    if terms.sinks is not None:
        sinks = jnp.broadcast_to(at_least_float32(terms.sinks), sums.lse.shape)
        if plan.is_cached:  # the results of all devices are joined: sinks must count once
            sinks = jnp.where(lax.axis_index(plan.axis) == 0, sinks, -jnp.inf)
        sums = _joined(sums, _Sums(jnp.zeros_like(sums.context), sinks))
    if plan.is_cached:
        context, lse = _joined_by_all(plan, sums)
    else:
        context, lse = sums
    # For the gradients: exp(-inf - inf) is 0, but exp(-inf + inf) is NaN.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)
    return context.astype(query.dtype), (query, key, value, terms, context, lse)


def _joined_by_all(plan: _Plan, sums: _Sums) -> _Sums:
    """Merge the results of all devices, each with its own keys for the same queries."""
    context, lse = sums
    largest = lax.pmax(lse, plan.axis)
    shift = finite_shift(largest)
    weights = jnp.exp(lse - shift)
    total = lax.psum(weights, plan.axis)
    is_empty = total == 0.0  # no device has a visible key
    total = jnp.where(is_empty, 1.0, total)
    context = lax.psum(context * weights, plan.axis) / total
    lse = jnp.where(is_empty, -jnp.inf, shift + jnp.log(total))
    return _Sums(context, lse)


# ---- Gradients -----------------------------------------------------------------------------------


def _backward(plan: _Plan, residuals: tuple[Any, ...], cotangent: Array) -> tuple[Any, ...]:
    query, key, value, terms, context, lse = residuals
    bias: Any = terms.bias
    query, cotangent, context, lse = varying(
        (query, at_least_float32(cotangent), context, lse), plan.axis
    )
    by_row = (at_least_float32(query), cotangent, context, lse)
    lengths = query.shape[3], key.shape[2]
    me = lax.axis_index(plan.axis)

    def added(pairs: list[_Pair], grads: Any, visitors: Any, gathered: Any) -> Any:
        """Add the gradients of some pairs."""
        (grad_q, grad_bias), (grad_k, grad_v) = grads, gathered
        keys_and_values = tuple(map(at_least_float32, visitors))
        for pair in pairs:
            of_rows, of_keys, of_values, of_bias = _gradients_of(
                plan, terms, pair, by_row, keys_and_values
            )
            rows_sum = _cut(grad_q, pair.rows_at, pair.rows.size) + of_rows
            grad_q = _put(grad_q, rows_sum, pair.rows_at)
            keys_sum = _cut(grad_k, pair.keys_at, pair.keys.size) + of_keys
            grad_k = _put(grad_k, keys_sum, pair.keys_at)
            values_sum = _cut(grad_v, pair.keys_at, pair.keys.size) + of_values
            grad_v = _put(grad_v, values_sum, pair.keys_at)
            if grad_bias is not None:
                grad_bias = _add_columns(grad_bias, of_bias, pair)
        return (grad_q, grad_bias), (grad_k, grad_v)

    def visit(grads: Any, visitors: Any, gathered: Any, source: Array) -> Any:
        return added(
            _pairs(plan, terms, source, *lengths, is_local=False), grads, visitors, gathered
        )

    zero_grads: Any = tuple(jnp.zeros_like(at_least_float32(x)) for x in (key, value))
    grads: Any = (
        jnp.zeros_like(by_row[0]),
        None if terms.bias is None else jnp.zeros_like(terms.bias, jnp.float32),
    )
    grads, local_grads = added(
        _pairs(plan, terms, me, *lengths, is_local=True), grads, (key, value), zero_grads
    )
    (grad_q, grad_bias), gathered = _walk(plan, visit, grads, (key, value), zero_grads)
    grad_k, grad_v = jax.tree.map(jnp.add, local_grads, gathered)
    grad_sinks = gradient_of_sinks(terms.sinks, lse, context, cotangent)
    if grad_sinks is not None and plan.is_cached:  # the gradient of all keys, only once
        grad_sinks = jnp.where(me == 0, grad_sinks, 0.0).astype(grad_sinks.dtype)
    if grad_bias is not None:
        grad_bias = grad_bias.astype(bias.dtype)
    grads = (
        grad.astype(x.dtype)
        for grad, x in zip((grad_q, grad_k, grad_v), (query, key, value), strict=True)
    )
    return *grads, _Terms(None, grad_bias, None, grad_sinks, None)


def _gradients_of(
    plan: _Plan, terms: _Terms, pair: _Pair, by_row: tuple[Array, ...], arrays: tuple[Array, ...]
) -> tuple[Any, ...]:
    """Return gradients of the queries, keys, values and bias (if any) of a pair."""
    rows = tuple(_cut(x, pair.rows_at, pair.rows.size) for x in by_row)
    keys_and_values = tuple(_cut(x, pair.keys_at, pair.keys.size) for x in arrays)
    options = plan.options._replace(is_causal=pair.is_diagonal)
    hidden: Any = _hidden_of(plan, terms, pair)
    if hidden.bias is not None:
        hidden = hidden._replace(bias=at_least_float32(hidden.bias))

    def of_sequence(
        hidden: Hidden, query: Array, cotangent: Array, context: Array, logs: Array, *arrays: Array
    ) -> Any:
        residuals = (query, *arrays, hidden, context, logs)
        *grads, of_hidden = gradients_of_part(options, residuals, cotangent)
        return *grads, of_hidden.bias

    def look() -> Any:
        *grads, of_bias = _by_sequence(plan, of_sequence, hidden, *rows, *keys_and_values)
        if of_bias is not None and of_bias.shape[0] != hidden.bias.shape[0]:
            of_bias = of_bias.sum(axis=0, keepdims=True)
        return varying((*grads, of_bias), plan.axis)

    def nothing() -> Any:
        like = (rows[0], *keys_and_values, hidden.bias)
        return jax.tree.map(jnp.zeros_like, like)

    sees = _sees(plan, pair)
    if sees is None:
        return look()
    return lax.cond(sees, look, nothing)


def _add_columns(grad: Array, part: Array, pair: _Pair) -> Array:
    """Add the gradient of the columns of a pair to the gradient of a bias."""
    if part.shape == grad.shape:
        return grad + part
    begin = pair.keys.begin[0]
    columns = lax.dynamic_slice_in_dim(grad, begin, part.shape[-1], axis=-1)
    return lax.dynamic_update_slice_in_dim(grad, columns + part, begin, axis=-1)


_attend.defvjp(_forward, _backward)
