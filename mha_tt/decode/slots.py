"""Operations on the slots of a cache, (B, K, S, H): select, extend, append, write.

Also the layout of new tokens before they are written. Slots in pages are (pages, K, slots per page,
H).
"""

from __future__ import annotations

import numpy as np
import ttnn
from jaxtyping import Int
from ttnn import Tensor

from mha_tt.arrays import as_dtype
from mha_tt.device import upload_rows, zeros
from mha_tt.layout import TILE, round_up


def sequences(slots: Tensor, indices: list[int]) -> Tensor:
    """Return a copy of the slots (B, K, S, H) of the sequences with these indices."""
    if not indices:
        return zeros((0, *tuple(slots.shape)[1:]), slots.dtype, slots.device())
    # A full slice, or a concatenation of one tensor, may return the tensor itself.
    if len(indices) == 1:
        return ttnn.clone(slots[indices[0] : indices[0] + 1])
    # Slice by slice: no operation of ttnn selects by index along an axis and supports bfloat8_b.
    return as_dtype(
        ttnn.concat([slots[index : index + 1] for index in indices], dim=0), slots.dtype
    )


def extended(slots: Tensor, count: int) -> Tensor:
    """Return a copy of slots (B, K, S, H), padded with zeros."""
    batch_size, num_kv_heads, old_count, head_dim = slots.shape
    if count == old_count:
        return ttnn.clone(slots)
    if not batch_size:  # concatenation rejects empty tensors
        return zeros((0, num_kv_heads, count, head_dim), slots.dtype, slots.device())
    added = zeros(
        (batch_size, num_kv_heads, count - old_count, head_dim), slots.dtype, slots.device()
    )
    # Concatenation may widen the dtype.
    return as_dtype(ttnn.concat([slots, added], dim=2), slots.dtype)


def as_cached(x: Tensor, slots: Tensor) -> Tensor:
    """Return tokens for `fill_cache`: in the dtype of the cache, with zeros after the last token of
    the last tile.
    """
    x = as_dtype(x, slots.dtype)
    if x.shape[2] % TILE:
        return ttnn.fill_implicit_tile_padding(x, 0.0)
    return x


def write_tokens(
    slots: Tensor, x: Tensor, sequence: int, first: int, pages: Int[np.ndarray, "B P"] | None
) -> None:
    """Write tokens (1, K, T, H) of a sequence, from the start of a tile or page."""
    x = as_cached(x, slots)
    if pages is None:
        ttnn.fill_cache(slots, x, sequence, update_idx=first)
        return
    table = upload_rows(
        pages[:, first // slots.shape[2] :], device=slots.device(), dtype=ttnn.int32
    )
    ttnn.experimental.paged_fill_cache(slots, x, table, batch_idx=sequence)


def first_slots(slots: Tensor, count: int, pages: Int[np.ndarray, "B P"] | None) -> Tensor:
    """Return the first slots of each sequence, (B, K, count, H); for a paged cache a copy, page by
    page.
    """
    if pages is not None:
        page_size = slots.shape[2]
        rows = [row[: round_up(count, page_size) // page_size].tolist() for row in pages]
        joined_pages = (
            ttnn.concat([slots[page : page + 1] for page in row], dim=2) for row in rows
        )
        slots = as_dtype(ttnn.concat(list(joined_pages), dim=0), slots.dtype)
    if slots.shape[2] == count:
        return slots
    return slots[:, :, :count]


def one_core_each(count: int, rows: int, width: int, device: ttnn.MeshDevice) -> ttnn.MemoryConfig:
    """Return the memory layout of `count` sequences that puts the rows of each, (rows, width), on
    its own core.
    """
    return ttnn.create_sharded_memory_config(
        (rows, width),
        core_grid=ttnn.num_cores_to_corerangeset(
            count, device.compute_with_storage_grid_size(), row_wise=True
        ),
        strategy=ttnn.ShardStrategy.HEIGHT,
        use_height_and_width_as_shard_shape=True,
    )
