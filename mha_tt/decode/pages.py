"""Paged key/value cache: a page table maps the slots of each sequence to pages.

Axes: B batch, P pages of a sequence, K key/value heads, H head_dim, Hv value_head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import InputError, InputTypeError
from mha_spec.rules import check_not_written_over
from mha_tt.cache import KVCache, check_new_cache
from mha_tt.checks import check_count, check_dtype, check_lengths
from mha_tt.device import upload_integers, zeros
from mha_tt.layout import TILE, round_up


@dataclass(frozen=True, eq=False)
class PagedKVCache(KVCache):
    """Keys and values of all tokens so far, in pages that each sequence fills in order.

    Attributes:
        keys, values: (pages, K, slots per page, H) and (pages, K, slots per page, Hv); otherwise
            see `KVCache`.
        lengths, capacity: see `KVCache`.
        pages: pages of each sequence, in order, (B, P), on the host; without duplicates.
        page_table: `pages` on the device, int32.
    """

    keys: Float[Tensor, "pages K slots H"]
    values: Float[Tensor, "pages K slots Hv"]
    lengths: Int[np.ndarray, " B"]
    capacity: int
    pages: Int[np.ndarray, "B P"]
    page_table: Int[Tensor, "B P"]

    def with_slots(self, slots: Iterable[Tensor], lengths: Int[np.ndarray, " B"]) -> Self:
        """Return a cache with the same pages and other contents."""
        keys, values = slots
        return replace(self, keys=keys, values=values, lengths=lengths)

    def reorder(self, indices: Int[np.ndarray, " B"] | Sequence[int]) -> Self:
        """Return a cache of the sequences with these indices, in this order. Only the table is
        copied, no slots.

        Args:
            indices: sequences, a permutation of 0..B - 1, (B,).

        Returns:
            Cache of B sequences. Do not use this one afterwards: they share storage.

        Raises:
            TypeError: if the indices are not integers.
            ValueError: if an index is missing or occurs twice: two sequences would write to one
                page.
        """
        check_not_written_over(self)
        check_lengths("indices", indices, None, len(self.lengths) - 1)
        indices = np.asarray(indices, int)
        if sorted(indices) != list(range(len(self.lengths))):
            raise InputError(
                "indices",
                f"name each of the {len(self.lengths)} sequences once, for a paged cache",
                indices=indices.tolist(),
            )
        reordered = self._with_pages(self.pages[indices], lengths=self.lengths[indices])
        # Steps of both would write into the same pages.
        object.__setattr__(self, "is_written_over", True)
        return reordered

    def grow(self, capacity: int) -> Self:
        """Return a cache of the same tokens with more slots, in additional pages; otherwise see
        `KVCache.grow`.
        """
        check_not_written_over(self)
        check_count("capacity", capacity, minimum=self.capacity)
        count, _, page_size, _ = self.keys.shape
        batch_size, num_pages = self.pages.shape
        added = in_order(batch_size, round_up(capacity, page_size) // page_size - num_pages)

        def extended(slots: Tensor) -> Tensor:
            if not added.size:
                return ttnn.clone(slots)
            new = zeros((added.size, *tuple(slots.shape)[1:]), slots.dtype, slots.device())
            return ttnn.typecast(ttnn.concat([slots, new], dim=0), slots.dtype)

        grown = self.with_slots([extended(x) for x in self.slots.values()], self.lengths.copy())
        return replace(
            grown._with_pages(np.concatenate([self.pages, count + added], axis=1)),
            capacity=capacity,
        )

    def is_within(self, lengths: Int[np.ndarray, " B"]) -> np.ndarray:
        """Return which slots contain the first tokens of each sequence, (pages, slots per page)."""
        page_size = self.keys.shape[2]
        is_filled = np.zeros((self.keys.shape[0], page_size), bool)
        slots = np.arange(self.pages.shape[1] * page_size).reshape(-1, page_size)
        is_filled[self.pages] = slots < lengths[:, None, None]
        return is_filled

    def _with_pages(self, pages: np.ndarray, **changes: np.ndarray) -> Self:
        return replace(
            self,
            pages=pages,
            page_table=upload_integers(pages, device=self.keys.device()),
            **changes,
        )


def init_paged_cache(
    batch_size: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: ttnn.DataType,
    *,
    value_head_dim: int,
    page_size: int,
    device: ttnn.MeshDevice,
) -> PagedKVCache:
    """Return an empty paged cache, with consecutive pages for each sequence.

    Args:
        batch_size: number of sequences, B, at least 1.
        num_kv_heads, capacity, head_dim, value_head_dim: see `init_cache`.
        dtype: dtype of keys and values: `ttnn.bfloat16` or `ttnn.bfloat8_b`.
        page_size: slots per page, whole tiles.
        device: device of the cache.

    Raises:
        TypeError: if a size is not an integer, or the dtype is one that paged kernels do not
            support.
        ValueError: if a size is below 1, the page is not whole tiles, or there are more than 32
            heads.
    """
    check_count("page_size", page_size)
    if page_size % TILE:
        raise InputError("page_size", f"be whole tiles of {TILE} slots", page_size=page_size)
    check_count("batch_size", batch_size)
    check_new_cache(num_kv_heads, capacity, head_dim, value_head_dim)
    check_dtype("dtype", dtype)
    if dtype == ttnn.float32:
        raise InputTypeError("dtype", "be bfloat16 or bfloat8_b for a paged cache", "dtype=float32")
    pages = in_order(batch_size, round_up(capacity, page_size) // page_size)
    shape = (pages.size, num_kv_heads, page_size)
    return PagedKVCache(
        keys=zeros((*shape, round_up(head_dim)), dtype, device),
        values=zeros((*shape, round_up(value_head_dim)), dtype, device),
        lengths=np.zeros(batch_size, np.int32),
        capacity=capacity,
        pages=pages,
        page_table=upload_integers(pages, device=device),
    )


def in_order(batch_size: int, num_pages: int) -> Int[np.ndarray, "B P"]:
    """Return `num_pages` consecutive pages for each sequence."""
    return np.arange(batch_size * num_pages).reshape(batch_size, num_pages)
