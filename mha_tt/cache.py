"""Key/value cache of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim,
Hv value_head_dim, E d_model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import ttnn
from jaxtyping import Bool, Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.rules import check_holds_new, check_not_written_over
from mha_spec.span import span_of
from mha_tt.arrays import as_dtype
from mha_tt.checks import (
    check_count,
    check_dtype,
    check_is_cache,
    check_is_device,
    check_lengths,
    check_tiles,
    check_width,
)
from mha_tt.decode.positions import DecodePositions
from mha_tt.decode.slots import extended, one_core_each, sequences, write_tokens
from mha_tt.device import upload, upload_integers, zeros
from mha_tt.layout import TILE, TILE_NBYTES, round_up
from mha_tt.masks import Mask

MOST_KV_HEADS = TILE
"""Maximum of `paged_update_cache`: it reads one row of tiles per sequence, and accepts more heads
without an error.
"""


class Cache:
    """Base class of caches: a fixed number of slots per sequence, filled from the front.

    Attributes:
        lengths: number of cached tokens of each sequence, (B,), int32, on the host.
        capacity: number of slots per sequence; on the device they fill whole tiles.
    """

    lengths: Int[np.ndarray, " B"]

    # True if a step has returned a cache with the same storage, and more tokens in it; not part of
    # the value.
    is_written_over: bool = False

    @property
    def slots(self) -> dict[str, Float[Tensor, "B K S W"]]:
        """Cached arrays by name, without the lengths."""
        raise NotImplementedError

    capacity: int  # not in the shape of the slots, which fill whole tiles
    # Pages of each sequence, in order, (B, P), if paged: on the host and on the device.
    pages: Any = None
    page_table: Int[Tensor, "B P"] | None = None
    # Counted on the device from step to step; None after any other change.
    next_positions: DecodePositions | None = None

    def with_slots(
        self, slots: Iterable[Float[Tensor, "B K S W"]], lengths: Int[np.ndarray, " B"]
    ) -> Self:
        """Return a cache of the same type with other contents.

        Args:
            slots: cached arrays, in the order of `slots`.
            lengths: number of cached tokens of each sequence, (B,).
        """
        kind: Any = type(self)
        return kind(*slots, lengths, self.capacity)

    def copy(self) -> Self:
        """Return a cache of the same tokens with its own storage, for example to return to them
        after other steps.
        """
        check_not_written_over(self)
        return self.with_slots((ttnn.clone(x) for x in self.slots.values()), self.lengths.copy())

    def reorder(self, indices: Int[np.ndarray, " C"] | Sequence[int]) -> Self:
        """Return a cache of the sequences with these indices, in this order; indices may repeat.

        Args:
            indices: sequences, each in 0..B - 1, (B',).

        Returns:
            Cache of B' sequences, with its own storage.

        Raises:
            TypeError: if the indices are not integers.
            ValueError: if an index lies outside 0..B - 1.
        """
        check_not_written_over(self)
        check_lengths("indices", indices, None, len(self.lengths) - 1)
        indices = np.asarray(indices, int)
        slots = (sequences(x, indices.tolist()) for x in self.slots.values())
        return self.with_slots(slots, self.lengths[indices])

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
        check_not_written_over(self)
        check_count("repeats", repeats)
        return self.reorder(np.repeat(np.arange(len(self.lengths)), repeats))

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
        check_not_written_over(self)
        check_count("capacity", capacity, minimum=self.capacity)
        slots = (extended(x, round_up(capacity)) for x in self.slots.values())
        grown: Any = self.with_slots(slots, self.lengths.copy())
        return replace(grown, capacity=capacity)

    def crop(self, lengths: Int[np.ndarray, " B"] | Sequence[int] | int) -> Self:
        """Truncate each sequence to `lengths` and clear the freed slots.

        Args:
            lengths: number of tokens to keep, at most the cached ones, for all sequences or each,
                (B,).

        Returns:
            Cache of the same capacity, with its own storage.

        Raises:
            TypeError: if the lengths are not integers.
            ValueError: if a length is negative or above the length of its sequence.
        """
        check_not_written_over(self)
        if isinstance(lengths, (int, np.integer)):
            lengths = np.full(len(self.lengths), lengths)
        check_lengths("lengths", lengths, len(self.lengths), self.capacity)
        lengths = np.asarray(lengths, np.int32)
        if (lengths > self.lengths).any():
            raise InputError(
                "lengths",
                "not exceed the lengths of the cache",
                f"lengths={lengths.tolist()} and {self.lengths.tolist()}",
            )
        first = next(iter(self.slots.values()))
        is_kept = upload(
            self.is_within(lengths)[:, None, :, None], device=first.device(), dtype=first.dtype
        )
        return self.with_slots(
            (ttnn.where(is_kept, x, 0.0) for x in self.slots.values()), lengths.copy()
        )

    def is_within(self, lengths: Int[np.ndarray, " B"]) -> np.ndarray:
        """Return which slots contain the first tokens of each sequence, (B, S)."""
        return np.arange(next(iter(self.slots.values())).shape[2]) < lengths[:, None]


@dataclass(frozen=True, eq=False)  # comparing arrays yields no single truth value
class KVCache(Cache):
    """Keys and values of all tokens so far.

    Attributes:
        keys, values: (B, K, S, H) and (B, K, S, Hv) with capacity S, all in whole tiles; keys after
            RoPE. Slots at or beyond the length of their sequence are empty.
        lengths: number of cached tokens of each sequence, (B,), int32, on the host.
        capacity: number of slots per sequence.
    """

    keys: Float[Tensor, "B K S H"]
    values: Float[Tensor, "B K S Hv"]
    lengths: Int[np.ndarray, " B"]
    capacity: int

    @property
    def slots(self) -> dict[str, Float[Tensor, "B K S W"]]:
        """Cached arrays by name, without the lengths."""
        return {"keys": self.keys, "values": self.values}


CacheT = TypeVar("CacheT", bound="Cache")


def init_cache(
    batch_size: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: ttnn.DataType = ttnn.bfloat16,
    *,
    value_head_dim: int | None = None,
    device: ttnn.MeshDevice,
) -> KVCache:
    """Return an empty cache: all slots and lengths are 0.

    Args:
        batch_size: number of sequences, B.
        num_kv_heads: number of key/value heads, K, at most 32.
        capacity: number of slots per sequence.
        head_dim: features of a head, H, as in keys and values to append.
        dtype: dtype of keys and values: `ttnn.bfloat16`, `ttnn.bfloat8_b` or `ttnn.float32`.
        value_head_dim: value features per head, Hv; default: head_dim.
        device: device of the cache.

    Raises:
        TypeError: if a size is not an integer, the dtype not floating point, or device is something
            else.
        ValueError: if a size is below 1, or the batch size below 0, or there are more than 32
            heads.
    """
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    check_count("batch_size", batch_size, minimum=0)
    check_new_cache(num_kv_heads, capacity, head_dim, value_head_dim)
    check_is_device(device)
    check_dtype("dtype", dtype)
    shape = (batch_size, num_kv_heads, round_up(capacity))
    return KVCache(
        keys=zeros((*shape, round_up(head_dim)), dtype, device),
        values=zeros((*shape, round_up(value_head_dim)), dtype, device),
        lengths=np.zeros(batch_size, np.int32),
        capacity=capacity,
    )


def check_new_cache(num_kv_heads: int, capacity: int, head_dim: int, value_head_dim: int) -> None:
    """Reject sizes of a new cache that are not positive integers, and too many heads."""
    sizes = {
        "num_kv_heads": num_kv_heads,
        "capacity": capacity,
        "head_dim": head_dim,
        "value_head_dim": value_head_dim,
    }
    for name, size in sizes.items():
        check_count(name, size)
    if num_kv_heads > MOST_KV_HEADS:
        raise InputError(
            "num_kv_heads", f"be at most {MOST_KV_HEADS} for a cache", num_kv_heads=num_kv_heads
        )


def append_to_cache(
    cache: KVCache,
    key: Float[Tensor, "B K T H"],
    value: Float[Tensor, "B K T Hv"],
    *,
    new_lengths: Int[np.ndarray, " B"] | Sequence[int] | None = None,
) -> KVCache:
    """Append the keys and values of new tokens to the cache.

    Args:
        cache: contains `cache.lengths` tokens. Do not use it afterwards: its storage is reused, and
            its next use raises an error. To keep it, pass `cache.copy()`.
        key, value: (B, K, T, H) and (B, K, T, Hv), in the cache's dtype or, for a bfloat8_b cache,
            bfloat16.
        new_lengths: number of real tokens of each sequence, 0..T, (B,); the rest is right padding,
            which is not cached. Default: all.

    Returns:
        Cache with `cache.lengths + new_lengths` tokens.

    Raises:
        TypeError: if the dtypes differ or the lengths are not integers.
        ValueError: if shapes do not fit, the tokens exceed the capacity, or there are more
            sequences than cores; the cache is then unchanged.
    """
    check_appended(cache, key, value, new_lengths)
    after = append_unchecked(cache, (key, value), num_added(cache, key.shape[2], new_lengths))
    mark_written_over(cache, after)
    return after


def mark_written_over(before: Cache, after: Cache) -> None:
    """Mark a cache if the one after it has its storage, with more tokens in it: its next use raises
    an error.
    """
    is_shared = any(
        x is y for x, y in zip(before.slots.values(), after.slots.values(), strict=True)
    )
    if is_shared and not np.array_equal(before.lengths, after.lengths):
        # It is not a field, so that the value of the cache stays the same.
        object.__setattr__(before, "is_written_over", True)


def append_unchecked(cache: CacheT, new: tuple[Tensor, ...], added: np.ndarray) -> CacheT:
    """Append new tokens to each tensor of slots, without checks."""
    # The device writes a single row of all sequences at once, or whole blocks (tiles or pages) of
    # one sequence. Rows fill the block that each sequence has begun; blocks take the rest.
    if cache.pages is None:
        block_len = TILE
    else:
        block_len = next(iter(cache.slots.values())).shape[2]
    num_rows = added
    if new[0].shape[2] > 1:
        free_in_block = -cache.lengths % block_len
        num_rows = np.minimum(added, free_in_block)
    for token in range(num_rows.max(initial=0)):
        rows = [ttnn.permute(x[:, :, token : token + 1], (2, 0, 1, 3)) for x in new]
        write_rows(cache, rows, np.where(token < num_rows, cache.lengths + token, -1))
    for sequence in np.flatnonzero(added > num_rows).tolist():
        first = int(num_rows[sequence])
        last = int(added[sequence])
        for slots, x in zip(cache.slots.values(), new, strict=True):
            tokens = x[sequence : sequence + 1, :, first:last]
            write_tokens(slots, tokens, sequence, int(cache.lengths[sequence]) + first, cache.pages)
    return cache.with_slots(cache.slots.values(), cache.lengths + added)


def create_cache_mask(
    lengths: Int[np.ndarray, " B"] | Sequence[int],
    seq_len_q: int,
    capacity: int,
    *,
    window_size: int | None = None,
    chunk_size: int | None = None,
) -> Bool[np.ndarray, "B 1 T S"]:
    """Return a mask of the slots that each new token cannot attend to: slots after its own, or
    outside its window or chunk.

    Args:
        lengths: number of cached tokens of each sequence before the new ones, (B,).
        seq_len_q: number of new tokens, T.
        capacity: number of slots, S.
        window_size, chunk_size: see `create_attention_mask`.

    Returns:
        Mask that broadcasts to the scores (B, N, T, S), on the host.

    Example: create_cache_mask([1, 0], 1, 3)
        [[[[False, False, True ]]],
         [[[False, True,  True ]]]]
    """
    check_count("seq_len_q", seq_len_q)
    check_count("capacity", capacity)
    check_lengths("lengths", lengths, None, capacity)
    q_offset = np.asarray(lengths)
    span = span_of(window_size, chunk_size)
    return Mask(is_causal=True, span=span, q_offset=q_offset).implicit_bool(seq_len_q, capacity)


def num_added(
    cache: Cache, seq_len: int, new_lengths: np.ndarray | Sequence[int] | None
) -> np.ndarray:
    """Return the number of tokens to append to each sequence, (B,)."""
    if new_lengths is None:
        added = np.full(len(cache.lengths), seq_len)
    else:
        added = np.asarray(new_lengths)
    return added.astype(np.int32)


def write_rows(cache: Cache, new: Sequence[Tensor], slots: np.ndarray | Tensor) -> None:
    """Write one token of each sequence, (1, B, K, H) for each tensor of slots, into its slot; -1
    writes nothing.
    """
    device = new[0].device()
    batch_size = new[0].shape[1]
    grid = device.compute_with_storage_grid_size()
    if batch_size > grid.x * grid.y:
        raise InputError(
            "the batch",
            f"not exceed the {grid.x * grid.y} cores of the device",
            f"{batch_size} sequences",
        )
    if isinstance(slots, Tensor):
        slot_indices = slots
    else:
        slot_indices = upload_integers(slots, device=device)
    for stored, rows in zip(cache.slots.values(), new, strict=True):
        if rows.dtype == ttnn.bfloat8_b:
            rows = as_dtype(rows, ttnn.bfloat16)
        if not rows.is_sharded():
            sharded = one_core_each(batch_size, round_up(rows.shape[2]), rows.shape[3], device)
            rows = ttnn.to_memory_config(rows, sharded)
        ttnn.experimental.paged_update_cache(
            stored, rows, update_idxs_tensor=slot_indices, page_table=cache.page_table
        )


def without_new(
    cache: CacheT, seq_len: int, new_lengths: np.ndarray | Sequence[int] | None
) -> CacheT:
    """Return the cache of another layer with its lengths before the new tokens, which it has
    already appended.
    """
    if new_lengths is not None:
        check_lengths("new_lengths", new_lengths, len(cache.lengths), seq_len)
    added = num_added(cache, seq_len, new_lengths)
    check_holds_new(cache.lengths.tolist(), added.tolist())
    return cache.with_slots(cache.slots.values(), cache.lengths - added)


def kv_cache_nbytes(
    batch_size: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    *,
    value_head_dim: int | None = None,
    num_layers: int = 1,
    dtype: ttnn.DataType,
) -> int:
    """Return the bytes of all layers' keys and values: batch * heads * slots * (H + Hv) * itemsize
    per layer.

    On the device slots and features fill whole tiles of 32; with RoPE pass
    `padded_head_dim(head_dim, rope=True)` as the features of a head.

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
        kv_cache_nbytes(1, 8, 8192, 128, num_layers=80, dtype=ttnn.bfloat16) == 2684354560
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
    check_dtype("dtype", dtype)
    tiles = round_up(capacity) // TILE * (round_up(head_dim) + round_up(value_head_dim)) // TILE
    return batch_size * num_kv_heads * tiles * num_layers * TILE_NBYTES[dtype]


def check_cache(
    cache_k: Tensor,
    cache_v: Tensor,
    key: Tensor,
    value: Tensor,
    names: tuple[str, str] = ("cache.keys", "cache.values"),
) -> None:
    """Reject cached keys and values (B, K, S, H) to which new ones (B, K, T, H) cannot be
    appended.
    """
    for name, x, new in zip(names, (cache_k, cache_v), (key, value), strict=True):
        check_tiles(name, x)
        expected = (key.shape[0], key.shape[1], cache_k.shape[2], new.shape[3])
        if tuple(x.shape) != expected:
            raise InputError(
                name, f"have shape (B, K, S, H) = {expected}", {f"{name}.shape": tuple(x.shape)}
            )
        if (x.dtype == ttnn.float32) != (key.dtype == ttnn.float32):
            raise InputTypeError(
                name,
                "be float32 if the new keys are",
                {f"{name}.dtype": x.dtype, "key.dtype": key.dtype},
            )


def check_cached_input(x: Tensor, cache: Cache, spec: AttentionSpec) -> None:
    """Reject new tokens (B, T, d_in) that do not fit the layer, or whose batch size differs from
    the cache's.
    """
    check_tiles("x", x)
    name, slots = next(iter(cache.slots.items()))
    if (x.dtype == ttnn.float32) != (slots.dtype == ttnn.float32):
        raise InputTypeError(
            "x",
            "be float32 if the cache is",
            {"x.dtype": x.dtype, f"cache.{name}.dtype": slots.dtype},
        )
    if x.shape[0] != cache.lengths.shape[0]:
        raise InputError(
            "x",
            "have the batch size of the cache",
            {"x.shape": tuple(x.shape), "cache.lengths.shape": cache.lengths.shape},
        )
    check_width("x", x, spec.d_in)


def check_appended(
    cache: KVCache, key: Tensor, value: Tensor, new_lengths: np.ndarray | Sequence[int] | None
) -> None:
    """Reject new keys and values (B, K, T, H) that do not fit the cache or its capacity."""
    check_is_cache(cache, KVCache)
    if cache.pages is not None:
        raise InputTypeError(
            "cache", "be a KVCache without pages", type(cache).__name__, hint="a module takes it"
        )
    check_tiles("key", key)
    check_tiles("value", value)
    check_cache(cache.keys, cache.values, key, value)
    if value.dtype != key.dtype:
        raise InputTypeError(
            "value", "have the dtype of key", {"value.dtype": value.dtype, "key.dtype": key.dtype}
        )
    check_room(cache, key.shape[2], new_lengths)


def check_room(cache: Cache, seq_len: int, new_lengths: np.ndarray | Sequence[int] | None) -> None:
    """Reject more new tokens than free slots: they would be written out of bounds."""
    if cache.pages is None:
        batch_size = next(iter(cache.slots.values())).shape[0]
    else:
        batch_size = len(cache.pages)
    check_lengths("cache.lengths", cache.lengths, batch_size, cache.capacity)
    added = np.full(batch_size, seq_len)
    if new_lengths is not None:
        check_lengths("new_lengths", new_lengths, batch_size, seq_len)
        added = np.asarray(new_lengths)
    if (cache.lengths + added > cache.capacity).any():
        rule = f"not exceed the {cache.capacity} slots of the cache"
        raise InputError(
            "lengths + new tokens", rule, lengths=cache.lengths.tolist(), new_lengths=added.tolist()
        )


def check_cache_holds(cache: Cache, num_heads: int, *features: int) -> None:
    """Reject a cache for other heads or features, or for latents of a different width."""
    first = next(iter(cache.slots.values()))
    for (name, x), width in zip(cache.slots.items(), features, strict=True):
        expected = (first.shape[0], num_heads, first.shape[2], width)
        if tuple(x.shape) != expected:
            raise InputError(
                f"cache.{name}", f"have shape {expected}", {f"cache.{name}.shape": tuple(x.shape)}
            )
