"""Key/value cache of fixed capacity.

Axes: B batch, T new tokens, S keys or cache slots, N query heads, K key/value heads, H head_dim,
Hv value_head_dim, E d_model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.rules import check_holds_new, check_not_written_over
from mha_spec.span import span_of
from mha_torch.arrays import is_graph, is_transformed, values_at_hand
from mha_torch.checks import (
    check_count,
    check_device,
    check_is_cache,
    check_lengths,
    check_width,
)
from mha_torch.masks import Mask, as_lengths


class Cache:
    """Base class of caches: a fixed number of slots per sequence, filled from the front.

    Attributes:
        lengths: number of cached tokens of each sequence, (B,), int32.
    """

    lengths: Int[Tensor, " B"]

    # Version of the lengths when a step returned a cache with the same storage; not part of the
    # value. `dataclasses.replace` and `with_slots` return caches without it.
    _written_over_at: int | None = None

    @property
    def is_written_over(self) -> bool:
        """True if a step has returned a cache with the same storage, and more tokens in it.

        If the lengths have been written in place since then, the user fills one cache in all steps,
        which is allowed.
        """
        if self._written_over_at is None:
            return False
        if torch.compiler.is_compiling():  # which cannot trace versions
            return True
        return self._written_over_at == _version_of(self.lengths)

    @property
    def slots(self) -> dict[str, Float[Tensor, "B K S W"]]:
        """Cached arrays by name, without the lengths."""
        raise NotImplementedError

    @property
    def capacity(self) -> int:
        """Number of slots per sequence."""
        first, *_ = self.slots.values()
        return first.shape[2]

    def with_slots(
        self, slots: Iterable[Float[Tensor, "B K S W"]], lengths: Int[Tensor, " B"]
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
        check_not_written_over(self)
        return self.with_slots((x.clone() for x in self.slots.values()), self.lengths.clone())

    def reorder(self, indices: Int[Tensor, " C"] | Sequence[int]) -> Self:
        """Return a cache of the sequences with these indices, in this order; indices may repeat.

        Args:
            indices: sequences, each in 0..B - 1, (B',).

        Returns:
            Cache of B' sequences, with its own storage.

        Raises:
            TypeError: if the indices are not integers.
            ValueError: if an index is known and lies outside 0..B - 1.
        """
        check_not_written_over(self)
        check_lengths("indices", indices, None, self.lengths.shape[0] - 1)
        indices = as_lengths(indices, self.lengths.device)
        slots = (x.index_select(0, indices) for x in self.slots.values())
        return self.with_slots(slots, self.lengths.index_select(0, indices))

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
        slots = (x.repeat_interleave(repeats, dim=0) for x in self.slots.values())
        return self.with_slots(slots, self.lengths.repeat_interleave(repeats, dim=0))

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
        added = (0, 0, 0, capacity - self.capacity)
        return self.with_slots((F.pad(x, added) for x in self.slots.values()), self.lengths.clone())

    def crop(self, lengths: Int[Tensor, " B"] | Sequence[int] | int) -> Self:
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
        check_not_written_over(self)
        batch_size = self.lengths.shape[0]
        cached_lengths = values_at_hand(self.lengths)
        if isinstance(lengths, (int, np.integer)):
            lengths = [lengths] * batch_size
        check_lengths("lengths", lengths, batch_size, self.capacity)
        requested_lengths = values_at_hand(torch.as_tensor(lengths))
        if (
            cached_lengths is not None
            and requested_lengths is not None
            and any(new > old for new, old in zip(requested_lengths, cached_lengths, strict=True))
        ):
            rule = "not exceed the lengths of the cache"
            raise InputError("lengths", rule, f"lengths={requested_lengths} and {cached_lengths}")
        new_lengths = torch.minimum(
            as_lengths(lengths, self.lengths.device).to(self.lengths.dtype), self.lengths
        )
        slot = torch.arange(self.capacity, device=self.lengths.device)
        is_free = slot >= new_lengths[:, None]  # (B, S)
        return self.with_slots(
            (x.masked_fill(is_free[:, None, :, None], 0.0) for x in self.slots.values()),
            new_lengths,
        )


@dataclass(frozen=True, eq=False)  # comparing arrays yields no single truth value
class KVCache(Cache):
    """Keys and values of all tokens so far.

    Attributes:
        keys, values: (B, K, capacity, H) and (B, K, capacity, Hv); keys after RoPE. Slots at or
            beyond the length of their sequence are empty.
        lengths: number of cached tokens of each sequence, (B,), int32.
    """

    keys: Float[Tensor, "B K S H"]
    values: Float[Tensor, "B K S Hv"]
    lengths: Int[Tensor, " B"]

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
    dtype: torch.dtype = torch.float32,
    *,
    value_head_dim: int | None = None,
    device: torch.device | str | None = None,
) -> KVCache:
    """Return an empty cache: all slots and lengths are 0.

    Args:
        batch_size: number of sequences, B.
        num_kv_heads: number of key/value heads, K.
        capacity: number of slots per sequence.
        head_dim: features of a head, H.
        dtype: floating-point dtype of keys and values.
        value_head_dim: value features per head, Hv; default: head_dim.
        device: device of the cache.

    Raises:
        TypeError: if a size is not an integer or the dtype not floating point.
        ValueError: if a size is below 1, or the batch size below 0.
    """
    check_count("batch_size", batch_size, minimum=0)
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    sizes = {"num_kv_heads": num_kv_heads, "capacity": capacity, "head_dim": head_dim}
    for name, size in {**sizes, "value_head_dim": value_head_dim}.items():
        check_count(name, size)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputTypeError("dtype", "be floating point", dtype=dtype)
    shape = (batch_size, num_kv_heads, capacity)
    return KVCache(
        keys=torch.zeros((*shape, head_dim), dtype=dtype, device=device),
        values=torch.zeros((*shape, value_head_dim), dtype=dtype, device=device),
        lengths=torch.zeros(batch_size, dtype=torch.int32, device=device),
    )


def append_to_cache(
    cache: KVCache,
    key: Float[Tensor, "B K T H"],
    value: Float[Tensor, "B K T Hv"],
    *,
    new_lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
) -> KVCache:
    """Append the keys and values of new tokens to the cache.

    Args:
        cache: contains `cache.lengths` tokens. Do not use it afterwards: under `torch.no_grad()`
            its storage is reused, and its next use raises an error. To keep it, pass
            `cache.copy()`. It is copied if sequences share storage (`expand`), or if it was created
            in inference mode and this call is not.
        key, value: (B, K, T, H) and (B, K, T, Hv), in the cache's dtype.
        new_lengths: number of real tokens of each sequence, 0..T, (B,); the rest is right padding,
            which is not cached. Default: all.

    Returns:
        Cache with `cache.lengths + new_lengths` tokens.

    Raises:
        TypeError: if the dtypes differ or the lengths are not integers.
        ValueError: if shapes do not fit, or the tokens exceed the capacity; the cache is then
            unchanged. (If lengths are unknown, as in a compiled graph, a sequence whose tokens do
            not fit is left unchanged instead.)
    """
    lengths = check_appended(cache, key, value, new_lengths)
    after = append_unchecked(cache, (key, value), new_lengths, lengths)
    mark_written_over(cache, after)
    return after


def mark_written_over(before: Cache, after: Cache) -> None:
    """Mark a cache if the one after it has its storage, where it may have more tokens: its next use
    raises an error.
    """
    # Nothing is marked in a graph: a captured one is replayed on the same cache. Lengths are not
    # compared, because reading them would wait for a device.
    if before is after or is_graph():
        return
    for x, y in zip(before.slots.values(), after.slots.values(), strict=True):
        if x is y:
            # It is not a field, so that the value of the cache stays the same.
            object.__setattr__(before, "_written_over_at", _version_of(before.lengths))


def _version_of(lengths: Tensor) -> int:
    """Return how often lengths were written in place; inference tensors do not count it."""
    if lengths.is_inference():
        return 0
    return lengths._version


def append_unchecked(
    cache: CacheT,
    new: tuple[Tensor, ...],
    new_lengths: Tensor | Sequence[int] | None,
    lengths: list[int] | None,
) -> CacheT:
    """Append new tokens to each tensor of slots, without checks; `lengths` if all are known."""
    batch_size, _, seq_len, _ = new[0].shape
    device = new[0].device
    if seq_len == 0:
        return cache
    if new_lengths is not None:
        new_lengths = as_lengths(new_lengths, device).to(cache.lengths.dtype)
    added = seq_len if new_lengths is None else new_lengths
    # In a compiled graph, which cannot trace `is_transformed`, lengths are unknown.
    is_compiling = lengths is None and torch.compiler.is_compiling()
    # `torch.func` does not allow writing in place, and fake tensors have no storage.
    if not is_compiling and is_transformed():
        return _append_transformed(cache, new, added)
    if lengths is None:
        return _append_unknown(cache, new, added)
    written = [_writable(x) for x in cache.slots.values()]
    # Equal lengths are one slice, which is faster than indices.
    if lengths and new_lengths is None and min(lengths) == max(lengths):
        stop = lengths[0] + seq_len
        for x, y in zip(written, new, strict=True):
            x[:, :, lengths[0] : stop] = y
        return cache.with_slots(written, torch.full_like(cache.lengths, stop))
    token = torch.arange(seq_len, device=device)
    if new_lengths is None:
        # Both are (B, T).
        rows = torch.arange(batch_size, device=device)[:, None]
        slots = cache.lengths[:, None] + token
        for x, y in zip(written, new, strict=True):
            x[rows, :, slots] = y.transpose(1, 2)
    else:
        rows, real = torch.nonzero(token < new_lengths[:, None], as_tuple=True)
        slots = cache.lengths[rows] + real
        for x, y in zip(written, new, strict=True):
            x[rows, :, slots] = y[rows, :, real]
    return cache.with_slots(written, cache.lengths + added)


def _append_unknown(cache: CacheT, new: tuple[Tensor, ...], added: Tensor | int) -> CacheT:
    """Append without reading lengths; a sequence without enough free slots stays as it is."""
    device = new[0].device
    # More tokens than slots are padding, or do not fit.
    num_written = min(new[0].shape[2], cache.capacity)
    added = torch.where(has_room(cache, new[0].shape[2], added), added, 0).to(cache.lengths.dtype)
    token = torch.arange(num_written, device=device)
    is_new = (token < added[:, None])[:, :, None, None]  # (B, T, 1, 1)
    # Writing one slot twice is undefined. The indices wrap around, so that all differ; tokens that
    # are not appended write back what their slots contain.
    rows = torch.arange(new[0].shape[0], device=device)[:, None]
    slots = (cache.lengths[:, None] + token) % cache.capacity
    written = [_writable(x) for x in cache.slots.values()]
    for x, y in zip(written, new, strict=True):
        appended = y[:, :, :num_written].transpose(1, 2)
        x[rows, :, slots] = torch.where(is_new, appended, x[rows, :, slots])
    return cache.with_slots(written, cache.lengths + added)


def _append_transformed(cache: CacheT, new: tuple[Tensor, ...], added: Tensor | int) -> CacheT:
    """Append without reading lengths or writing in place, which `torch.func.vmap` does not allow:
    each slot keeps its token or gets a new one.
    """
    seq_len = new[0].shape[2]
    device = new[0].device
    added = torch.where(has_room(cache, seq_len, added), added, 0).to(cache.lengths.dtype)
    # The token that each slot would get, (B, S).
    token = torch.arange(cache.capacity, device=device) - cache.lengths[:, None]
    is_new = ((token >= 0) & (token < added[:, None]))[:, None, :, None]
    index = token.clamp(0, seq_len - 1)[:, None, :, None]
    slots = (
        torch.where(is_new, y.gather(2, index.expand(-1, y.shape[1], -1, y.shape[3])), x)
        for y, x in zip(new, cache.slots.values(), strict=True)
    )
    return cache.with_slots(slots, cache.lengths + added)


def has_room(cache: Cache, seq_len: int, added: Tensor | int) -> Tensor:
    """Return whether each sequence has free slots for its new tokens, of at most T, (B,)."""
    # With `shared_kv` lengths are negative if the other layer has not appended the new tokens.
    fits = (cache.lengths >= 0) & (cache.lengths + added <= cache.capacity)
    if isinstance(added, int):
        return fits
    return fits & (added >= 0) & (added <= seq_len)


def _writable(x: Tensor) -> Tensor:
    """Return x, or a copy if x must not be written to."""
    if torch.is_grad_enabled() or x.requires_grad:  # autograd may still need the old contents
        return x.clone()
    strides = x.stride()
    is_shared = 0 in strides and any(
        stride == 0 and size > 1 for stride, size in zip(strides, x.shape, strict=True)
    )
    is_frozen = (
        not torch.compiler.is_compiling()
        and x.is_inference()
        and not torch.is_inference_mode_enabled()
    )
    if is_shared or is_frozen:
        return x.clone()
    return x


def create_cache_mask(
    lengths: Int[Tensor, " B"] | Sequence[int],
    seq_len_q: int,
    capacity: int,
    *,
    window_size: int | None = None,
    chunk_size: int | None = None,
) -> Bool[Tensor, "B 1 T S"]:
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
    q_offset = torch.as_tensor(lengths)
    span = span_of(window_size, chunk_size)
    return Mask(is_causal=True, span=span, q_offset=q_offset).implicit_bool(
        seq_len_q, capacity, q_offset.device
    )


def without_new(cache: CacheT, seq_len: int, new_lengths: Tensor | Sequence[int] | None) -> CacheT:
    """Return the cache of another layer with its lengths before the new tokens, which it has
    already appended.
    """
    added = [seq_len] * cache.lengths.shape[0] if new_lengths is None else new_lengths
    known = check_lengths("new_lengths", added, cache.lengths.shape[0], seq_len)
    lengths = values_at_hand(cache.lengths)
    if known is not None and lengths is not None:
        check_holds_new(lengths, known)
    new = as_lengths(added, cache.lengths.device).to(cache.lengths.dtype)
    return cache.with_slots(cache.slots.values(), cache.lengths - new)


def kv_cache_nbytes(
    batch_size: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    *,
    value_head_dim: int | None = None,
    num_layers: int = 1,
    dtype: torch.dtype,
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
        kv_cache_nbytes(1, 8, 8192, 128, num_layers=80, dtype=torch.float16) == 2684354560
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
    return batch_size * num_kv_heads * capacity * features * num_layers * dtype.itemsize


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
    batch_size, num_kv_heads, _, _ = key.shape
    capacity = cache_k.shape[2]
    for name, x, new in zip(names, (cache_k, cache_v), (key, value), strict=True):
        expected = (batch_size, num_kv_heads, capacity, new.shape[3])
        # The usual case needs one comparison: checks must not slow a decoding step.
        if x.shape == expected and x.dtype == key.dtype and x.device == key.device:
            continue
        if x.shape != expected:
            raise InputError(
                name, f"have shape (B, K, S, H) = {expected}", {f"{name}.shape": tuple(x.shape)}
            )
        if x.dtype != key.dtype:
            raise InputTypeError(
                name,
                "have the dtype of the new keys",
                {f"{name}.dtype": x.dtype, "key.dtype": key.dtype},
            )
        check_device(name, x, key.device, "the new keys")


def check_cached_input(x: Tensor, cache: Cache, spec: AttentionSpec) -> None:
    """Reject new tokens (B, T, d_in) that do not fit the layer, or whose batch size differs from
    the cache's.
    """
    if x.shape[0] != cache.lengths.shape[0]:
        raise InputError(
            "x",
            "have the batch size of the cache",
            {"x.shape": tuple(x.shape), "cache.lengths.shape": tuple(cache.lengths.shape)},
        )
    check_width("x", x, spec.d_in)


def check_appended(
    cache: KVCache, key: Tensor, value: Tensor, new_lengths: Tensor | Sequence[int] | None
) -> list[int] | None:
    """Reject new keys and values (B, K, T, H) that do not fit the cache or its capacity.

    Returns:
        Lengths of the cache, if these and the lengths of the new tokens are known.
    """
    check_is_cache(cache, KVCache)
    check_cache(cache.keys, cache.values, key, value)
    if value.dtype != key.dtype:
        raise InputTypeError(
            "value", "have the dtype of key", {"value.dtype": value.dtype, "key.dtype": key.dtype}
        )
    return check_room(cache, key.shape[2], new_lengths)


def check_room(
    cache: Cache, seq_len: int, new_lengths: Tensor | Sequence[int] | None
) -> list[int] | None:
    """Reject more new tokens than free slots: they would be written out of bounds.

    Returns:
        Lengths of the cache, if these and the lengths of the new tokens are known.
    """
    batch_size = cache.lengths.shape[0]
    capacity = cache.capacity
    lengths = check_lengths("cache.lengths", cache.lengths, batch_size, capacity)
    added = [seq_len] * batch_size
    if new_lengths is not None:
        added = check_lengths("new_lengths", new_lengths, batch_size, seq_len)
    if lengths is None or added is None:
        return None
    for length, new in zip(lengths, added, strict=True):
        if length + new > capacity:
            rule = f"not exceed the {capacity} slots of the cache"
            raise InputError("lengths + new tokens", rule, lengths=lengths, new_lengths=added)
    return lengths
