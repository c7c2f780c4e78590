"""Golden functions of operations for which ttnn has none, or a wrong one.

They accept the operations' arguments, with torch tensors instead of ttnn's, and raise errors for
invalid arguments that the operations accept silently. `ttnn_mock` calls them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import ttnn

if TYPE_CHECKING:
    import torch

TILE = ttnn.TILE_SIZE

Golden = Callable[..., Any]

GOLDENS: dict[str, Golden] = {}


def golden(operation: str) -> Callable[[Golden], Golden]:
    """Register a golden function for an operation for which ttnn has none or a wrong one.

    Args:
        operation: full name, such as `ttnn.experimental.dropout`.

    Returns:
        Decorator for a function that accepts the operation's arguments, with torch tensors instead
        of ttnn's, and returns its results.
    """

    def register(function: Golden) -> Golden:
        GOLDENS[operation] = function
        return function

    return register


@golden("ttnn.linear")
def _linear(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, **keywords: Any
) -> torch.Tensor:
    """ttnn's raises for a bias of two elements, which it treats as a matrix."""
    if bias is not None:
        bias = bias.reshape(1, -1)
    return ttnn.get_golden_function(ttnn.linear)(a, b, bias=bias, **keywords)


@golden("ttnn.transformer.scaled_dot_product_attention")
def _scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, *others: torch.Tensor, **keywords: Any
) -> torch.Tensor:
    """ttnn's is PyTorch's, whose CPU kernels return 0 for a non-finite query.

    With float32 sums and exact exponentials the operation returns 0 for some rows: see
    `_lost_rows`.
    """
    is_causal = keywords.get("is_causal", True)
    if keywords.get("sliding_window_size") and not is_causal and key.shape[2] % TILE:
        # The operation accepts them, and attends to the padding of the last tiles.
        raise AssertionError(
            f"keys must be whole tiles with a window that is not causal, got "
            f"key.shape={tuple(key.shape)}"
        )
    context = _attend_unswallowed(
        ttnn.transformer.scaled_dot_product_attention, query, key, *others, **keywords
    )
    config = keywords.get("compute_kernel_config")
    program_config = keywords.get("program_config")
    has_exact_exponentials = program_config is not None and program_config.exp_approx_mode is False
    if has_exact_exponentials and config is not None and config.fp32_dest_acc_en:
        context = context.masked_fill(_lost_rows(query, key, **keywords), 0.0)
    return context


def _lost_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    sliding_window_size: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the rows (B, N, T, 1) that the operation sets to 0, as measured on a simulator.

    It truncates the largest score of a row to 8 bits. If it cuts off more than the largest exponent
    of float32, the largest exponential of the row is infinite. Source:
    docs/evidence/upstream-ttnn.md.
    """
    import torch

    score_scale = scale if scale is not None else query.shape[3] ** -0.5
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ keys.transpose(2, 3)
    factor = score_scale  # by which the kernel multiplies within the exponential
    if attn_mask is not None:
        # A mask is added to scaled scores.
        scores = scores * score_scale + attn_mask
        factor = 1.0
    elif is_causal:
        every_pair = torch.ones(scores.shape[2:], dtype=torch.bool)
        window_size = sliding_window_size or scores.shape[3]
        hidden = every_pair.triu(1) | every_pair.tril(-window_size)
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
    largest = scores.float().amax(dim=3, keepdim=True)
    truncated = (largest.view(torch.int32) & -(2**16)).view(torch.float32)
    return (largest - truncated) * factor > math.log(torch.finfo(torch.float32).max)


@golden("ttnn.transformer.scaled_dot_product_attention_decode")
def _scaled_dot_product_attention_decode(
    query: torch.Tensor, *others: torch.Tensor, **keywords: Any
) -> torch.Tensor:
    """Golden function for one token."""
    config = keywords.get("compute_kernel_config")
    # Float32 sums take twice the room.
    has_float32_sums = config is not None and config.fp32_dest_acc_en
    most = 128 if has_float32_sums else 256
    if query.shape[3] > most and query.shape[3] % most:
        # The operation accepts them, and returns garbage.
        raise AssertionError(
            f"heads must have at most {most} features in a step, or a multiple of that, got "
            f"{tuple(query.shape)}"
        )
    return _attend_unswallowed(
        ttnn.transformer.scaled_dot_product_attention_decode, query, *others, **keywords
    )


@golden("ttnn.transformer.paged_scaled_dot_product_attention_decode")
def _paged_scaled_dot_product_attention_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_tensor: torch.Tensor,
    *,
    paged_cache_geometry: Any = None,
    cache_position_modulo: int | None = None,
    **keywords: Any,
) -> torch.Tensor:
    """Golden function over pages (pages, K, slots per page, H) of a table (B, P)."""
    geometry = {
        "paged_cache_geometry": paged_cache_geometry,
        "cache_position_modulo": cache_position_modulo,
    }
    _reject_views("paged_scaled_dot_product_attention_decode", geometry)
    table = page_table_tensor.long()
    if table.max() >= keys.shape[0]:
        # The operation accepts it, and reads outside the cache.
        raise AssertionError(
            f"a page table must contain pages below {keys.shape[0]}, got {int(table.max())}"
        )
    # (B, P, K, slots per page, H) -> (B, K, P * slots per page, H)
    table = table.clamp(min=0)
    keys_in_order = keys[table].transpose(1, 2).flatten(2, 3)
    values_in_order = values[table].transpose(1, 2).flatten(2, 3)
    return _scaled_dot_product_attention_decode(query, keys_in_order, values_in_order, **keywords)


def _attend_unswallowed(
    operation: Any, query: torch.Tensor, *others: torch.Tensor, **keywords: Any
) -> torch.Tensor:
    """Return ttnn's golden context, with NaN for a query that is not finite."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):  # its softmax still returns 0 for a row that is all -inf
        context = ttnn.get_golden_function(operation)(query, *others, **keywords)
    is_finite = torch.isfinite(query).all(-1, keepdim=True)
    return context.masked_fill(~is_finite, torch.nan)


@golden("ttnn.experimental.nlp_create_qkv_heads")
def _nlp_create_qkv_heads(
    packed: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    transpose_k_heads: bool = True,
    **_: Any,
) -> list[torch.Tensor]:
    """(B, 1, S, (N + 2 K) H) -> (B, N, S, H) and twice (B, K, S, H)."""
    batch_size, seq_len = packed.shape[0], packed.shape[2]
    head_dim = packed.shape[3] // (num_heads + 2 * num_kv_heads)
    if head_dim % TILE:  # accepted by the operation, which then returns heads of the wrong width
        raise AssertionError(
            f"head_dim must be a multiple of {TILE} for nlp_create_qkv_heads, got {head_dim}"
        )
    heads = packed.reshape(batch_size, seq_len, -1, head_dim).transpose(1, 2)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    if transpose_k_heads:
        k = k.transpose(2, 3)
    return [q, k, v]


@golden("ttnn.experimental.nlp_create_qkv_heads_decode")
def _nlp_create_qkv_heads_decode(
    packed: torch.Tensor, *, num_heads: int, num_kv_heads: int, **_: Any
) -> list[torch.Tensor]:
    """(1, 1, B, (N + 2 K) H) -> (1, B, N, H) and twice (1, B, K, H)."""
    heads = packed.reshape(1, packed.shape[2], num_heads + 2 * num_kv_heads, -1)
    return list(heads.split([num_heads, num_kv_heads, num_kv_heads], 2))


@golden("ttnn.experimental.nlp_concat_heads")
def _nlp_concat_heads(x: torch.Tensor, **_: Any) -> torch.Tensor:
    """(B, N, T, H) -> (B, 1, T, N * H)."""
    if x.shape[3] % TILE:  # accepted by the operation, which concatenates whole tiles
        raise AssertionError(
            f"head_dim must be a multiple of {TILE} for nlp_concat_heads, got {x.shape[3]}"
        )
    return x.transpose(1, 2).flatten(2)[:, None]


@golden("ttnn.experimental.nlp_concat_heads_decode")
def _nlp_concat_heads_decode(x: torch.Tensor, *, num_heads: int, **_: Any) -> torch.Tensor:
    """(1, B, N, H) -> (1, 1, 32, N * H); rows beyond the last sequence are not written."""
    combined = x.new_full((1, 1, TILE, num_heads * x.shape[3]), float("nan"))
    combined[0, 0, : x.shape[1]] = x[0, :, :num_heads].flatten(1)
    return combined


# ---- Rotary position embedding: the kernels round both products to bfloat16 ----------------------


@golden("ttnn.experimental.rotary_embedding_hf")
def _rotary_embedding_hf(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: Any
) -> torch.Tensor:
    """x * cos + (-second half, first half) * sin; uses the first rows of longer tables."""
    return _rotated(x, _half_a_head_away(x), cos[:, :, : x.shape[2]], sin[:, :, : x.shape[2]])


@golden("ttnn.experimental.rotary_embedding")
def _rotary_embedding(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, token_idx: int | None = None, **_: Any
) -> torch.Tensor:
    """Like `_rotary_embedding_hf`; with `token_idx` one row for all; the result has whole tiles of
    rows.
    """
    rows = slice(0, x.shape[2])
    if token_idx is not None:
        rows = slice(token_idx, token_idx + 1)
    rotated = _rotated(x, _half_a_head_away(x), cos[:, :, rows], sin[:, :, rows])
    missing = -rotated.shape[2] % TILE
    return _torch().nn.functional.pad(rotated, (0, 0, 0, missing))


@golden("ttnn.experimental.rotary_embedding_llama")
def _rotary_embedding_llama(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, trans_mat: torch.Tensor, **_: Any
) -> torch.Tensor:
    """x * cos + (x @ trans_mat, tile by tile) * sin; uses the first rows of longer tables."""
    width = x.shape[3]
    padded = _torch().nn.functional.pad(x, (0, -width % TILE)).unflatten(3, (-1, TILE))
    swapped = (padded @ trans_mat[0, 0, :TILE, :TILE]).flatten(3)[..., :width]
    return _rotated(x, swapped, cos[:, :, : x.shape[2]], sin[:, :, : x.shape[2]])


def _half_a_head_away(x: torch.Tensor) -> torch.Tensor:
    if x.shape[3] % TILE:  # accepted by the operations, which split whole tiles in halves
        raise AssertionError(
            f"heads must have whole tiles of {TILE} features to be rotated, got {tuple(x.shape)}"
        )
    first, second = x.chunk(2, dim=-1)
    return _torch().cat([-second, first], dim=-1)


def _rotated(
    x: torch.Tensor, swapped: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    narrow = _torch().bfloat16
    return (x * cos).to(narrow).float() + (swapped * sin).to(narrow).float()


def _torch() -> Any:
    import torch

    return torch


# ---- Caches --------------------------------------------------------------------------------------


@golden("ttnn.fill_cache")
def _fill_cache(
    cache: torch.Tensor, tokens: torch.Tensor, batch_idx: int, *, update_idx: int = 0, **_: Any
) -> torch.Tensor:
    """Write tokens (1, K, T, H) into the slots of one sequence of (B, K, S, H)."""
    if update_idx + tokens.shape[2] > cache.shape[2]:
        raise AssertionError(
            f"fill_cache must stay within {cache.shape[2]} slots, got {tokens.shape[2]} at "
            f"{update_idx}"
        )
    cache = cache.clone()
    cache[batch_idx, :, update_idx : update_idx + tokens.shape[2]] = tokens[0]
    return cache


@golden("ttnn.update_cache")
def _update_cache(
    cache: torch.Tensor, tokens: torch.Tensor, update_idx: int, **others: Any
) -> torch.Tensor:
    """Write one token of each sequence, (1, K, B, H), into one slot of (B, K, S, H). ttnn's
    requires all sequences.
    """
    _reject_views("update_cache", others)
    if update_idx >= cache.shape[2]:
        # The operation accepts it, and writes outside the cache.
        raise AssertionError(
            f"update_cache must stay within {cache.shape[2]} slots, got {update_idx}"
        )
    cache = cache.clone()
    for sequence in range(min(cache.shape[0], tokens.shape[2])):
        cache[sequence, :, update_idx] = tokens[0, :, sequence]
    return cache


@golden("ttnn.experimental.paged_update_cache")
def _paged_update_cache(
    cache: torch.Tensor,
    tokens: torch.Tensor,
    *,
    update_idxs: Any = (),
    update_idxs_tensor: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Write one token of each sequence, (1, B, K, H), into its slot of (B, K, S, H); -1 skips a
    sequence.

    With a page table (B, pages) the cache is (pages, K, slots per page, H).
    """
    _reject_views("paged_update_cache", others)
    if cache.shape[1] > TILE:
        # The operation accepts them, and reads one row of tiles per sequence.
        raise AssertionError(
            f"paged_update_cache must have at most {TILE} heads, got {cache.shape[1]}"
        )
    cache = cache.clone()
    slots = update_idxs
    if update_idxs_tensor is not None:
        slots = update_idxs_tensor.tolist()
    for sequence, slot in enumerate(slots):
        if slot < 0:
            continue
        page, slot_of_page = _page_and_slot(
            "paged_update_cache", cache, page_table, sequence, int(slot)
        )
        # A sequence that is skipped in the table has page -1.
        if page >= 0:
            cache[page, :, slot_of_page] = tokens[0, sequence, : cache.shape[1]]
    return cache


@golden("ttnn.experimental.paged_fused_update_cache")
def _paged_fused_update_cache(
    keys: torch.Tensor,
    new_keys: torch.Tensor,
    values: torch.Tensor,
    new_values: torch.Tensor,
    **keywords: Any,
) -> list[torch.Tensor]:
    """Update two caches at once."""
    return [
        _paged_update_cache(keys, new_keys, **keywords),
        _paged_update_cache(values, new_values, **keywords),
    ]


@golden("ttnn.experimental.paged_fill_cache")
def _paged_fill_cache(
    cache: torch.Tensor,
    tokens: torch.Tensor,
    page_table: torch.Tensor,
    *,
    batch_idx: int = 0,
    batch_idx_tensor: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Write tokens (B, K, T, H) into the first slots of sequences, in pages (pages, K, slots per
    page, H).
    """
    _reject_views("paged_fill_cache", others)
    sequences = [batch_idx]
    if batch_idx_tensor is not None:
        sequences = batch_idx_tensor.flatten().tolist()
    cache = cache.clone()
    page_size = cache.shape[2]
    for tokens_of_sequence, sequence in zip(tokens, sequences, strict=True):
        for first in range(0, tokens_of_sequence.shape[1], page_size):
            part = tokens_of_sequence[:, first : first + page_size]
            page, _ = _page_and_slot("paged_fill_cache", cache, page_table, int(sequence), first)
            if page >= 0:
                cache[page, :, : part.shape[1]] = part
    return cache


def _page_and_slot(
    name: str, cache: torch.Tensor, page_table: torch.Tensor | None, sequence: int, slot: int
) -> tuple[int, int]:
    """Return the page, and the slot in it, of a sequence's slot. (The operations silently write
    outside a cache.)
    """
    page_size = cache.shape[2]
    num_slots = page_size
    if page_table is not None:
        num_slots = page_table.shape[1] * page_size
    if slot >= num_slots:
        raise AssertionError(f"{name} must stay within {num_slots} slots, got {slot}")
    if page_table is None:
        return sequence, slot
    page = int(page_table[sequence, slot // page_size])
    if page >= cache.shape[0]:
        raise AssertionError(
            f"{name} must stay within {cache.shape[0]} pages, got {page} for sequence {sequence}"
        )
    return page, slot % page_size


def _reject_views(name: str, others: dict[str, Any]) -> None:
    """Reject options that change the layout of a cache, which are not modeled here."""
    views = (
        "block_size",
        "num_kv_heads",
        "cache_position_modulo",
        "valid_seq_len_tensor",
        "share_cache",
        "batch_offset",
        "paged_cache_geometry",
    )
    requested = [option for option in views if others.get(option)]
    if requested:
        raise NotImplementedError(f"{name} with {', '.join(requested)} has no golden function")


# ---- Dropout -------------------------------------------------------------------------------------


@golden("ttnn.experimental.dropout")
def _dropout(
    x: torch.Tensor, *, probability: float, scale: float, seed: int, **_: Any
) -> torch.Tensor:
    """Drop as many elements as the device, though different ones."""
    torch = _torch()
    generator = torch.Generator().manual_seed(seed)
    is_kept = torch.rand(x.shape, generator=generator) >= probability
    return x * is_kept * scale


# ---- Collectives ---------------------------------------------------------------------------------


def collective(
    name: str,
    parts: list[torch.Tensor],
    mesh: tuple[int, ...],
    *arguments: Any,
    cluster_axis: int | None = None,
    **keywords: Any,
) -> list[torch.Tensor]:
    """Return the result of a collective on each chip of a mesh, along one axis or among all chips.

    Args:
        name: name of the operation, one of `COLLECTIVES`.
        parts: input of each chip, in row-major order.
        mesh: shape of the mesh.
        arguments, keywords: arguments of the operation, without the tensor.
        cluster_axis: axis of the mesh; default: all chips.
    """
    results = list(parts)
    for chips in _groups_of_chips(mesh, cluster_axis):
        inputs = [parts[chip] for chip in chips]
        outputs = COLLECTIVES[name](inputs, *arguments, **keywords)
        for chip, output in zip(chips, outputs, strict=True):
            results[chip] = output
    return results


def _groups_of_chips(mesh: tuple[int, ...], axis: int | None) -> list[list[int]]:
    """Return the groups of chips of a collective: those along an axis, for each index of the
    others; or all.
    """
    chips = np.arange(math.prod(mesh)).reshape(mesh)
    if axis is None:
        return [chips.ravel().tolist()]
    return np.moveaxis(chips, axis, -1).reshape(-1, mesh[axis]).tolist()


def is_collective(name: str, golden_function: Golden) -> bool:
    """Return whether an operation is a collective, which a golden function of one chip cannot
    compute.
    """
    module = getattr(golden_function, "__module__", "")
    own_name = name.rpartition(".")[2]
    return module == "ttnn.operations.ccl" or "ring_" in own_name


def _all_reduce(parts: list[torch.Tensor], **_: Any) -> list[torch.Tensor]:
    """Return the sum, on all chips; in float32, although kernels round in transit."""
    return [_torch().stack(parts).sum(0)] * len(parts)


def _all_gather(parts: list[torch.Tensor], dim: int, **_: Any) -> list[torch.Tensor]:
    """Return all parts concatenated, on all chips."""
    return [_torch().cat(parts, dim)] * len(parts)


def _reduce_scatter(parts: list[torch.Tensor], dim: int, **_: Any) -> list[torch.Tensor]:
    """Return a part of the sum on each chip."""
    return list(_torch().stack(parts).sum(0).chunk(len(parts), dim))


def _mesh_partition(parts: list[torch.Tensor], dim: int, **_: Any) -> list[torch.Tensor]:
    """Return a part of its input on each chip."""
    return [part.chunk(len(parts), dim)[chip] for chip, part in enumerate(parts)]


COLLECTIVES: dict[str, Golden] = {
    "ttnn.all_reduce": _all_reduce,
    "ttnn.all_gather": _all_gather,
    "ttnn.reduce_scatter": _reduce_scatter,
    "ttnn.mesh_partition": _mesh_partition,
}
