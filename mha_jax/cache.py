"""Key/value cache of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim,
Hv value_head_dim, E d_model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Float, Int

from mha_jax.arrays import Array, zero_where
from mha_jax.checks import check_count, check_is_cache, check_lengths, check_width
from mha_jax.compiled import compiled
from mha_jax.masks import Mask
from mha_jax.sharding import specs_of, with_auto_axes
from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.rules import check_holds_new
from mha_spec.span import span_of


class Cache:
    """Base class of caches: a fixed number of slots per sequence, filled from the front.

    Attributes:
        lengths: number of cached tokens of each sequence, (B,), int32.
    """

    lengths: Int[Array, " B"]

    @property
    def slots(self) -> dict[str, Float[Array, "B K S W"]]:
        """Cached arrays by name, without the lengths."""
        raise NotImplementedError

    @property
    def capacity(self) -> int:
        """Number of slots per sequence."""
        first, *_ = self.slots.values()
        return first.shape[2]

    def with_slots(
        self, slots: Iterable[Float[Array, "B K S W"]], lengths: Int[Array, " B"]
    ) -> Self:
        """Return a cache of the same type with other contents.

        Args:
            slots: cached arrays, in the order of `slots`.
            lengths: number of cached tokens of each sequence, (B,).
        """
        kind: Any = type(self)
        return kind(*slots, lengths)

    def copy(self) -> Self:
        """Return a cache of the same tokens with its own storage, for example to return to them
        after other steps.
        """
        slots = (jnp.array(x, copy=True) for x in self.slots.values())
        return self.with_slots(slots, jnp.array(self.lengths, copy=True))

    def reorder(self, indices: Int[Array, " C"] | Sequence[int]) -> Self:
        """Return a cache of the sequences with these indices, in this order; indices may repeat.

        Args:
            indices: sequences, each in 0..B - 1, (B',).

        Returns:
            Cache of B' sequences, with its own storage.

        Raises:
            TypeError: if the indices are not integers.
            ValueError: if an index is known and lies outside 0..B - 1.
        """
        check_lengths("indices", _on_host(indices), None, self.lengths.shape[0] - 1)
        indices = jnp.asarray(indices, jnp.int32)
        slots = (jnp.asarray(x)[indices] for x in self.slots.values())
        return self.with_slots(slots, jnp.asarray(self.lengths)[indices])

    def repeat(self, repeats: int) -> Self:
        """Return a cache with each sequence `repeats` times in a row, for example for beam search.

        Args:
            repeats: number of copies, at least 1.

        Returns:
            Cache of B * repeats sequences, with its own storage.

        Raises:
            TypeError: if `repeats` is not an integer.
            ValueError: if `repeats` is below 1.
        """
        check_count("repeats", repeats)
        indices = np.repeat(np.arange(self.lengths.shape[0]), repeats)
        return self.reorder(indices.tolist())

    def grow(self, capacity: int) -> Self:
        """Return a cache of the same tokens with more slots.

        Args:
            capacity: new number of slots per sequence, at least the current one.

        Returns:
            Cache of that capacity, with its own storage.

        Raises:
            TypeError: if the capacity is not an integer.
            ValueError: if the capacity is below this cache's.
        """
        check_count("capacity", capacity, minimum=self.capacity)
        added = [(0, 0), (0, 0), (0, capacity - self.capacity), (0, 0)]
        # Copied, because without new slots `pad` returns the same array.
        slots = (jnp.array(jnp.pad(x, added), copy=True) for x in self.slots.values())
        return self.with_slots(slots, jnp.array(self.lengths, copy=True))

    def crop(self, lengths: Int[Array, " B"] | Sequence[int] | int) -> Self:
        """Truncate each sequence to `lengths` and clear the freed slots.

        Args:
            lengths: number of tokens to keep, at most the cached ones, for all sequences or each,
                (B,).

        Returns:
            Cache of the same capacity, with its own storage.

        Raises:
            TypeError: if the lengths are not integers.
            ValueError: if a length is negative or above the length of its sequence, and both are
                known.
        """
        if isinstance(lengths, (int, np.integer)):
            lengths = [lengths] * self.lengths.shape[0]
        check_lengths("lengths", _on_host(lengths), self.lengths.shape[0], self.capacity)
        if not isinstance(lengths, Tracer) and not isinstance(self.lengths, Tracer):
            requested_lengths = np.asarray(lengths)
            cached_lengths = np.asarray(self.lengths)
            if bool((requested_lengths > cached_lengths).any()):
                raise InputError(
                    "lengths",
                    "not exceed the lengths of the cache",
                    f"lengths={requested_lengths.tolist()} and {cached_lengths.tolist()}",
                )
        lengths = jnp.minimum(jnp.asarray(lengths, jnp.int32), self.lengths)
        is_free = jnp.arange(self.capacity, dtype=jnp.int32)[None] >= lengths[:, None]  # (B, S)
        return self.with_slots(
            (zero_where(x, is_free[:, None, :, None]) for x in self.slots.values()), lengths
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # comparing arrays yields no single truth value
class KVCache(Cache):
    """Keys and values of all tokens so far.

    Attributes:
        keys, values: (B, K, capacity, H) and (B, K, capacity, Hv); keys after RoPE. Slots at or
            beyond the length of their sequence are empty.
        lengths: number of cached tokens of each sequence, (B,), int32.
    """

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S Hv"]
    lengths: Int[Array, " B"]

    @property
    def slots(self) -> dict[str, Float[Array, "B K S W"]]:
        """Cached arrays by name, without the lengths."""
        return {"keys": self.keys, "values": self.values}


CacheT = TypeVar("CacheT", bound="Cache")


def init_cache(
    batch_size: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: jnp.dtype = jnp.float32,
    *,
    value_head_dim: int | None = None,
) -> KVCache:
    """Return an empty cache: all slots and lengths are 0.

    Args:
        batch_size: number of sequences, B.
        num_kv_heads: number of key/value heads, K.
        capacity: number of slots per sequence.
        head_dim: features of a head, H.
        dtype: floating-point dtype of keys and values.
        value_head_dim: value features per head, Hv; default: head_dim.

    Raises:
        TypeError: if a size is not an integer or the dtype not floating point.
        ValueError: if a size is below 1, or the batch size below 0.
    """
    check_count("batch_size", batch_size, minimum=0)
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    sizes = {"num_kv_heads": num_kv_heads, "capacity": capacity, "head_dim": head_dim}
    for name, size in {**sizes, "value_head_dim": value_head_dim}.items():
        check_count(name, size)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InputTypeError("dtype", "be floating point", dtype=jnp.dtype(dtype))
    shape = (batch_size, num_kv_heads, capacity)
    return KVCache(
        keys=jnp.zeros((*shape, head_dim), dtype),
        values=jnp.zeros((*shape, value_head_dim), dtype),
        lengths=jnp.zeros(batch_size, jnp.int32),
    )


def append_to_cache(
    cache: KVCache,
    key: Float[Array, "B K T H"],
    value: Float[Array, "B K T Hv"],
    *,
    new_lengths: Int[Array, " B"] | Sequence[int] | None = None,
) -> KVCache:
    """Append the keys and values of new tokens to the cache.

    Args:
        cache: contains `cache.lengths` tokens. Do not use it afterwards: its storage may be reused.
            To keep it, pass `cache.copy()`.
        key, value: (B, K, T, H) and (B, K, T, Hv), in the cache's dtype.
        new_lengths: number of real tokens of each sequence, 0..T, (B,); the rest is right padding,
            which is not cached. Default: all.

    Returns:
        Cache with `cache.lengths + new_lengths` tokens.

    Raises:
        TypeError: if the dtypes differ or the lengths are not integers.
        ValueError: if shapes do not fit, or the tokens exceed the capacity; the cache is then
            unchanged. (Under jit lengths are unknown; there a sequence that does not fit keeps its
            old tokens.)
    """
    check_appended(cache, key, value, new_lengths)
    return append_unchecked(cache, (key, value), num_added(cache, key.shape[2], new_lengths))


@compiled()
@with_auto_axes(specs_of)
def append_unchecked(cache: CacheT, new: tuple[Array, ...], added: Array) -> CacheT:
    """Append new tokens to each array of slots, without checks."""
    seq_len = new[0].shape[2]
    # A cache may consist of NumPy arrays.
    arrays = map(jnp.asarray, cache.slots.values())
    lengths = jnp.asarray(cache.lengths)
    added = jnp.where(has_room(cache, seq_len, added), added, 0)
    is_real = jnp.arange(seq_len, dtype=jnp.int32)[None] < added[:, None]
    # (B, T). Padding gets a slot beyond the capacity, and is dropped.
    slots = jnp.where(is_real, token_positions(lengths, seq_len), cache.capacity)
    # Sequence by sequence, so that devices need no data of others.
    put = jax.vmap(lambda old, slots, new: old.at[:, slots].set(new, mode="drop"))
    return cache.with_slots(
        (put(x, slots, y) for x, y in zip(arrays, new, strict=True)), lengths + added
    )


def create_cache_mask(
    lengths: Int[Array, " B"] | Sequence[int],
    seq_len_q: int,
    capacity: int,
    *,
    window_size: int | None = None,
    chunk_size: int | None = None,
) -> Bool[Array, "B 1 T S"]:
    """Return a mask of the slots that each new token cannot attend to: slots after its own, or
    outside its window or chunk.

    Args:
        lengths: number of cached tokens of each sequence before the new ones, (B,).
        seq_len_q: number of new tokens, T.
        capacity: number of slots, S.
        window_size, chunk_size: see `create_attention_mask`.

    Returns:
        Mask that broadcasts to the scores (B, N, T, S).

    Example: create_cache_mask([1, 0], 1, 3)
        [[[[False, False, True ]]],
         [[[False, True,  True ]]]]
    """
    check_count("seq_len_q", seq_len_q)
    check_count("capacity", capacity)
    check_lengths("lengths", lengths, None, capacity)
    q_offset = jnp.asarray(lengths, jnp.int32)
    span = span_of(window_size, chunk_size)
    return Mask(is_causal=True, span=span, q_offset=q_offset).implicit_bool(seq_len_q, capacity)


def num_added(cache: Cache, seq_len: int, new_lengths: Array | Sequence[int] | None) -> Array:
    """Return the number of tokens to append to each sequence, (B,)."""
    if new_lengths is None:
        return jnp.full(cache.lengths.shape, seq_len, jnp.int32)
    return jnp.asarray(new_lengths, jnp.int32)


def token_positions(lengths: Array, seq_len: int) -> Array:
    """Return the slots of new tokens, (B, T)."""
    return lengths[:, None] + jnp.arange(seq_len, dtype=jnp.int32)[None]


def has_room(cache: Cache, seq_len: int, added: Array) -> Array:
    """Return whether each sequence has free slots for its new tokens, of at most T, (B,)."""
    # With `shared_kv` lengths are negative if the other layer has not appended the new tokens.
    fits = (cache.lengths >= 0) & (cache.lengths + added <= cache.capacity)
    return fits & (added >= 0) & (added <= seq_len)


def without_new(cache: CacheT, seq_len: int, new_lengths: Array | Sequence[int] | None) -> CacheT:
    """Return the cache of another layer with its lengths before the new tokens, which it has
    already appended.
    """
    if new_lengths is not None:
        check_lengths("new_lengths", _on_host(new_lengths), cache.lengths.shape[0], seq_len)
    added = num_added(cache, seq_len, new_lengths)
    if not isinstance(cache.lengths, Tracer) and not isinstance(added, Tracer):
        check_holds_new(np.asarray(cache.lengths).tolist(), np.asarray(added).tolist())
    return cache.with_slots(cache.slots.values(), cache.lengths - added)


def kv_cache_nbytes(
    batch_size: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    *,
    value_head_dim: int | None = None,
    num_layers: int = 1,
    dtype: jnp.dtype,
) -> int:
    """Return the bytes of all layers' keys and values: batch * heads * slots * (H + Hv) * itemsize
    per layer.

    Args:
        batch_size: number of sequences, B.
        num_kv_heads: number of key/value heads, K.
        capacity: number of slots (tokens) per sequence.
        head_dim: features of a head, H.
        value_head_dim: value features per head, Hv; default: head_dim.
        num_layers: number of layers.
        dtype: dtype of the cache.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1.

    Example, 2.5 GiB:
        kv_cache_nbytes(1, 8, 8192, 128, num_layers=80, dtype=jnp.float16) == 2684354560
    """
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    sizes = {
        "batch_size": batch_size,
        "num_kv_heads": num_kv_heads,
        "capacity": capacity,
        "head_dim": head_dim,
    }
    for name, size in {**sizes, "value_head_dim": value_head_dim, "num_layers": num_layers}.items():
        check_count(name, size)
    features = head_dim + value_head_dim
    return batch_size * num_kv_heads * capacity * features * num_layers * jnp.dtype(dtype).itemsize


def check_cache(
    cache_k: Array,
    cache_v: Array,
    key: Array,
    value: Array,
    names: tuple[str, str] = ("cache.keys", "cache.values"),
) -> None:
    """Reject cached keys and values (B, K, S, H) to which new ones (B, K, T, H) cannot be
    appended.
    """
    for name, x, new in zip(names, (cache_k, cache_v), (key, value), strict=True):
        expected = (*key.shape[:2], cache_k.shape[2], new.shape[3])
        if x.shape != expected:
            raise InputError(
                name, f"have shape (B, K, S, H) = {expected}", {f"{name}.shape": x.shape}
            )
        if x.dtype != key.dtype:
            raise InputTypeError(
                name,
                "have the dtype of the new keys",
                {f"{name}.dtype": x.dtype, "key.dtype": key.dtype},
            )


def check_cached_input(x: Array, cache: Cache, spec: AttentionSpec) -> None:
    """Reject new tokens (B, T, d_in) that do not fit the layer, or whose batch size differs from
    the cache's.
    """
    if x.shape[0] != cache.lengths.shape[0]:
        raise InputError(
            "x",
            "have the batch size of the cache",
            {"x.shape": x.shape, "cache.lengths.shape": cache.lengths.shape},
        )
    check_width("x", x, spec.d_in)


def check_appended(
    cache: KVCache, key: Array, value: Array, new_lengths: Array | Sequence[int] | None
) -> None:
    """Reject new keys and values (B, K, T, H) that do not fit the cache or its capacity."""
    check_is_cache(cache, KVCache)
    check_cache(cache.keys, cache.values, key, value)
    if value.dtype != key.dtype:
        raise InputTypeError(
            "value", "have the dtype of key", {"value.dtype": value.dtype, "key.dtype": key.dtype}
        )
    check_room(cache, key.shape[2], new_lengths)


def check_room(cache: Cache, seq_len: int, new_lengths: Array | Sequence[int] | None) -> None:
    """Reject more new tokens than free slots: they would be written out of bounds."""
    batch_size = cache.lengths.shape[0]
    capacity = cache.capacity
    lengths = _on_host(cache.lengths)
    check_lengths("cache.lengths", lengths, batch_size, capacity)
    added = np.full(batch_size, seq_len)
    if new_lengths is not None:
        added = _on_host(new_lengths)
        check_lengths("new_lengths", added, batch_size, seq_len)
    # Under jit values may be unknown, and count as 0, the least that they can be.
    if isinstance(lengths, Tracer):
        lengths = np.zeros(1, np.int64)
    if isinstance(added, Tracer):
        added = np.zeros(1, np.int64)
    # In a narrow dtype of lengths, such as uint8, the sum could overflow.
    if bool((lengths.astype(np.int64) + added > capacity).any()):
        rule = f"not exceed the {capacity} slots of the cache"
        raise InputError(
            "lengths + new tokens", rule, lengths=lengths.tolist(), new_lengths=added.tolist()
        )


def _on_host(lengths: Any) -> Any:
    """Return lengths as a NumPy array, and tracers unchanged.

    On an accelerator this waits for the device: a length beyond the capacity must raise an error.
    """
    if isinstance(lengths, Tracer):
        return lengths
    return np.asarray(lengths)
