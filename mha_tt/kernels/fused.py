"""Fast path: attention without attention weights.

Wraps ttnn's flash attention with this package's semantics of masks and fully masked rows, in
bfloat16 and bfloat8_b. A NaN outside of padding spreads as in ttnn; see `contained` for kernels in
which it reaches only the rows that attend to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import ttnn
from jaxtyping import Float, Int
from ttnn import Tensor

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.heads import BareHeads
from mha_spec.rules import check_head_groups, check_names
from mha_tt import stages
from mha_tt.arrays import as_dtype, at_least_float32
from mha_tt.checks import check_floating, check_heads_of_spec, check_lengths, check_weight
from mha_tt.device import accurate_config, upload_integers, with_bfloat16_sums, zeros
from mha_tt.layout import TILE, round_up
from mha_tt.masks import MASKED, DeviceMask, Mask, zero_masked_rows
from mha_tt.scores import Scores, bias_on_device

LARGEST_CHUNK = 128
"""Queries and keys per chunk of the kernel: fits a core in every arithmetic, up to `WIDE`
features.
"""

WIDE = 256
"""Wider heads, such as latents, fit a core with half as many queries and keys."""

WIDEST = 1024
"""Wider heads do not fit a core: the plain path computes them."""

HALF_TILE = TILE // 2
"""Up to this many heads are half a tile to the step kernel, which then only has approximate
exponentials. Errors on a simulator: 2.1 to 2.5% with 4 heads, 2.0 to 2.1% with 16 heads, 0.6% with
18 heads.
"""

STEP_FEATURES = 128
"""The step kernel is correct for heads up to this many features, and for multiples of it; else it
returns garbage.
"""

CHUNKS_OF_STEP = {384: 128, 512: 64, 640: 32}
"""Keys that a core of the step kernel reads at once, by the largest size of heads, which is their
number in tiles times their features: 64 heads of 256 features have a size of 512. More keys, or
larger heads, do not fit a core of an n150 or a p150 that also has the queries of a layer.
"""

SIZE_OF_CALL = 512
"""Heads that share one key are divided among calls of at most this size, or of one tile."""

SIZE_OF_FRAMEWORK = 256
"""Up to this size of heads, with at most STEP_FEATURES features, the operation chooses the number
of keys itself. Its choice, up to 512 keys, does not fit with larger ones.
"""

SIZE_IN_PAGES = 384
"""The same if the cache has pages."""


@dataclass(frozen=True, eq=False)
class FusedAttention:
    """Kernel of layers with an arithmetic of the device. Decoding steps use `attend_to_cache`.

    The plain path computes what the framework's kernel does not support: heads in float32 or not in
    whole tiles or of more than 1024 features, values with more or fewer tiles than keys, a soft
    cap, biases and products by distance, and dropout. Causal and sliding-window masks with T = S
    are free: they are never uploaded. Masks of chunks are. Scores of masked keys must be far below
    1e9 in size: the kernel masks by adding -1e9.

    Attributes:
        compute_kernel_config: arithmetic of the device; default: `accurate_config`.

    Source: ttnn.transformer.scaled_dot_product_attention.
    """

    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None

    def __call__(
        self,
        query: Float[Tensor, "B N T H"],
        key: Float[Tensor, "B K S H"],
        value: Float[Tensor, "B K S Hv"],
        mask: Mask,
        scores: Scores,
    ) -> Float[Tensor, "B N T Hv"]:
        """Return the context from the framework's prompt kernel, or from the plain path for
        unsupported calls.
        """
        num_features = query.shape[3]
        is_supported = (
            supports(query, scores)
            and num_features % TILE == 0
            and num_features <= WIDEST
            and value.shape[3] == key.shape[3]
        )
        if not is_supported:
            return stages.attend(query, key, value, mask, scores, self.compute_kernel_config)[0]
        device = query.device()
        batch_size, _, seq_len_q, _ = query.shape
        seq_len_k = key.shape[2]
        if 0 in (batch_size, seq_len_q, seq_len_k):
            return zeros(tuple(query.shape), query.dtype, device)
        hidden = mask.with_bias(scores.bias).to_bool(seq_len_q, seq_len_k, device)
        # A mask [[False]] is causal for one token, but may be broadcast to more.
        is_causal = (
            hidden is not None and hidden.is_causal and hidden.shape[2] == seq_len_q == seq_len_k
        )
        if is_causal and scores.bias is None:
            context = self._attend(query, key, value, scores, causal=hidden)
        else:
            attn_mask = _attn_mask(hidden, scores.bias, seq_len_q, seq_len_k, device)
            context = self._attend(query, key, value, scores, attn_mask=attn_mask)
        return zero_masked_rows(context, hidden)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Scores,
        *,
        attn_mask: Tensor | None = None,
        causal: DeviceMask | None = None,
    ) -> Tensor:
        """Call the framework's kernel with `attn_mask`, or with a causal mask that it builds
        itself.
        """
        device = query.device()
        seq_len_q = query.shape[2]
        seq_len_k = key.shape[2]
        config = self.compute_kernel_config or accurate_config(device)
        scale = scores.spec.score_scale
        window_size = None
        if causal is not None:
            window_size = causal.window_size
        sinks = scores.learned.get("sinks")
        if sinks is not None:
            sinks = _unscaled(sinks, scale)
        kernel = partial(
            ttnn.transformer.scaled_dot_product_attention,
            query,
            key,
            value,
            attn_mask=attn_mask,
            is_causal=causal is not None,
            sliding_window_size=window_size,
            scale=scale,
            attention_sink=sinks,
            program_config=_program_config(
                device, config, seq_len_q, seq_len_k, _largest_chunk(query)
            ),
        )
        context = kernel(compute_kernel_config=config)
        # Rows that this kernel may have lost: see `may_zero_rows`.
        if may_zero_rows(config):
            is_nonzero = ttnn.max(ttnn.abs(context), dim=3, keepdim=True)
            context = ttnn.where(
                is_nonzero,
                context,
                kernel(compute_kernel_config=with_bfloat16_sums(config, device)),
            )
        return context


attend = FusedAttention()
"""Default kernel: returns the context from the fastest kernel that supports the call."""


def attend_to_cache(
    query: Float[Tensor, "1 B N H"],
    keys: Float[Tensor, "B K S H"],
    values: Float[Tensor, "B K S Hv"],
    last_positions: Int[np.ndarray, " B"] | Int[Tensor, " B"],
    spec: AttentionSpec | BareHeads | None = None,
    *,
    page_table: Int[Tensor, "B P"] | None = None,
    learned: Mapping[str, Float[Tensor, "1 N 1 1"] | list[Tensor]] | None = None,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "1 B N H"]:
    """Attend from one new token of each sequence to its cached tokens; reads only the filled part
    of the cache.

    Slots beyond the last positions may contain anything, even NaN.

    Args:
        query: (1, B, N, H), bfloat16 or bfloat8_b, H whole tiles and, with N, accepted by
            `step_supports`.
        keys, values: cache, (B, K, S, H), bfloat16 or bfloat8_b, S whole tiles; or with a page
            table (pages, K, slots per page, H).
        last_positions: last slot that each sequence attends to, (B,), on the host; or on the
            device, int32, where their values are not checked.
        spec: layer of these heads: scale and sinks; default: the scale 1 / sqrt(H).
        page_table: pages of each sequence, in order, (B, P), int32, on the device.
        learned: weights of the layer that change scores, see `Scores`: `sinks` (1, N, 1, 1), or the
            result of `sinks_of_step`, for many steps.
        compute_kernel_config: arithmetic of the device; default: `accurate_config`.

    Raises:
        TypeError: if a tensor is float32 or not in tiles on the device, or positions are not
            integers.
        ValueError: if the shapes do not fit, a position lies outside the cache, or the layer has a
            soft cap, or biases or products by distance.

    Source: ttnn.transformer.scaled_dot_product_attention_decode,
    paged_scaled_dot_product_attention_decode.
    """
    check_floating("query", query, rank=4)
    _check_supported(query)
    check_cached_step(query, keys, values, last_positions, page_table)
    if not step_supports(query.shape[2], keys, is_paged=page_table is not None):
        raise InputError(
            "heads",
            f"have at most {STEP_FEATURES} features in a step, or a multiple of that, and fit the"
            " memory of a core",
            {"query.shape": tuple(query.shape), "keys.shape": tuple(keys.shape)},
        )
    rules = BareHeads(query.shape[3]) if spec is None else spec
    check_heads_of_spec(query, query.shape[2], rules)
    if not supports(query, Scores(rules)):
        raise InputError(
            "spec", "have no soft cap, and no biases or products by distance, in a step", spec=spec
        )
    learned = {} if learned is None else learned
    check_names("learned", learned, rules.score_shapes)
    sinks = learned.get("sinks")
    if sinks is not None and not isinstance(sinks, list):
        check_weight("sinks", sinks, (1, query.shape[2], 1, 1))
    options: Any = {
        "page_table": page_table,
        "learned": learned,
        "compute_kernel_config": compute_kernel_config,
    }
    return attend_to_cache_unchecked(query, keys, values, last_positions, rules, **options)


def attend_to_cache_unchecked(
    query: Float[Tensor, "1 B N H"],
    keys: Float[Tensor, "B K S H"],
    values: Float[Tensor, "B K S Hv"],
    last_positions: Int[np.ndarray, " B"] | Int[Tensor, " B"],
    spec: AttentionSpec | BareHeads,
    *,
    page_table: Int[Tensor, "B P"] | None = None,
    learned: Mapping[str, Float[Tensor, "1 N 1 1"] | list[Tensor]],
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> Float[Tensor, "1 B N H"]:
    """Return the context of `attend_to_cache`, without checks."""
    scale = spec.score_scale
    config = compute_kernel_config or accurate_config(query.device())
    parts = _parts(query.shape[2], query.shape[3], keys.shape[1], config)
    sinks = learned.get("sinks")
    if not isinstance(sinks, list):
        if sinks is None:
            sinks = [None] * len(parts)
        else:
            sinks = _sinks_of(parts, sinks, scale)
    device = query.device()
    if isinstance(last_positions, Tensor):
        positions = last_positions
    else:
        positions = upload_integers(last_positions, device=device)
    heads = as_dtype(query, ttnn.bfloat16)  # the only supported dtype with groups
    operation = ttnn.transformer.scaled_dot_product_attention_decode
    in_pages = {}
    contexts = []
    if page_table is not None:
        operation = ttnn.transformer.paged_scaled_dot_product_attention_decode
        in_pages = {"page_table_tensor": page_table}
    for (part, copies), sinks_of_part in zip(parts, sinks, strict=True):
        # Without a configuration, the operation divides keys among more cores than its reduction
        # tree supports, on Blackhole with few heads.
        # Never None here: `step_supports` accepted these heads.
        chunk = _chunk_of_step(part.stop - part.start, keys, is_paged=page_table is not None) or 0
        context = operation(
            _some_heads(heads, part, copies, axis=2),
            keys,
            values,
            cur_pos_tensor=positions,
            scale=scale,
            attention_sink=sinks_of_part,
            program_config=_program_config(
                device, config, seq_len_q=0, seq_len_k=chunk, largest_chunk=chunk
            ),
            compute_kernel_config=config,
            **in_pages,
        )
        if copies > 1:
            context = context[:, :, ::copies]
        contexts.append(context)
    context = contexts[0]
    if len(contexts) > 1:
        context = ttnn.concat(contexts, dim=2)
    return as_dtype(context, query.dtype)


def sinks_of_step(
    sinks: Float[Tensor, "1 N 1 1"],
    query: Float[Tensor, "1 B N H"],
    keys: Float[Tensor, "B K S H"],
    spec: AttentionSpec | BareHeads,
    *,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None = None,
) -> list[Tensor]:
    """Prepare sinks for `attend_to_cache`, once for many steps with such queries and keys."""
    check_weight("sinks", sinks, (1, query.shape[2], 1, 1))
    check_heads_of_spec(query, query.shape[2], spec)
    config = compute_kernel_config or accurate_config(query.device())
    return _sinks_of(
        _parts(query.shape[2], query.shape[3], keys.shape[1], config), sinks, spec.score_scale
    )


def _parts(
    num_heads: int, num_features: int, num_kv_heads: int, config: ttnn.DeviceComputeKernelConfig
) -> list[tuple[slice, int]]:
    """Return the heads per call of the step kernel, and the number of copies of each.

    Up to half a tile of heads always gets approximate exponentials, with errors of 2%. A few heads
    are therefore repeated within their group, and the first copy is used. If approximations are
    chosen, one copy suffices.
    """
    parts = []
    for part in _heads_of_calls(num_heads, num_features, num_kv_heads):
        count = part.stop - part.start
        if count > HALF_TILE or config.math_approx_mode:
            copies = 1
        else:
            copies = HALF_TILE // count + 1
        parts.append((part, copies))
    return parts


def _heads_of_calls(num_heads: int, num_features: int, num_kv_heads: int) -> list[slice]:
    """Return the heads per call of the step kernel: all, unless they share one key and are too many
    for a core.
    """
    at_once = num_heads
    if num_kv_heads == 1:
        num_tiles = 1
        while 2 * num_tiles * num_features <= SIZE_OF_CALL:
            num_tiles *= 2
        at_once = num_tiles * TILE
    return [slice(first, min(first + at_once, num_heads)) for first in range(0, num_heads, at_once)]


def _chunk_of_step(num_heads: int, keys: Tensor, *, is_paged: bool) -> int | None:
    """Return the number of keys that a core of the step kernel reads at once for this many heads of
    a call; 0 lets the operation choose, and None means that it supports no number.
    """
    num_slots, num_features = keys.shape[2], keys.shape[3]
    num_tiles = round_up(num_heads) // TILE
    size = num_tiles * num_features
    # With three tiles of heads, for example, the operation raises an error for smaller chunks.
    needs_large_chunk = num_tiles.bit_count() > 1
    has_large_chunks = num_slots % LARGEST_CHUNK == 0
    if num_features <= STEP_FEATURES:
        if is_paged and size <= SIZE_IN_PAGES:
            return 0
        if size <= SIZE_OF_FRAMEWORK and (has_large_chunks or not needs_large_chunk):
            return 0
    fitting = [chunk for largest, chunk in CHUNKS_OF_STEP.items() if size <= largest]
    if not fitting:
        return None
    chunk = math.gcd(max(fitting), num_slots)
    if needs_large_chunk and chunk < LARGEST_CHUNK:
        return None
    return chunk


def _sinks_of(parts: list[tuple[slice, int]], sinks: Tensor, scale: float) -> list[Tensor]:
    """Return the sinks of these heads for the step kernel."""
    column = ttnn.reshape(_unscaled(sinks, scale), (sinks.shape[1], 1))
    return [_some_heads(column, part, copies, axis=0) for part, copies in parts]


def supports(x: Tensor, scores: Scores) -> bool:
    """Return whether the framework's kernels support the dtype of x and these changes to the
    scores.
    """
    is_changed = scores.spec.soft_cap is not None or scores.spec.has_distance_bias
    has_dropout = scores.dropout or scores.dropout_keep is not None
    return x.dtype != ttnn.float32 and not is_changed and not has_dropout


def step_supports(num_heads: int, keys: Tensor, *, is_paged: bool) -> bool:
    """Return whether the framework's step kernel is correct for the width of these heads, and they
    fit the memory of a core (docs/reference/ttnn.md).

    Args:
        num_heads: number of query heads.
        keys: cache, (B, K, S, H), or with pages (pages, K, slots per page, H).
        is_paged: whether the cache has pages.
    """
    num_kv_heads, num_features = keys.shape[1], keys.shape[3]
    if num_features > STEP_FEATURES and num_features % STEP_FEATURES:
        return False
    for part in _heads_of_calls(num_heads, num_features, num_kv_heads):
        if _chunk_of_step(part.stop - part.start, keys, is_paged=is_paged) is None:
            return False
    return True


def may_zero_rows(config: ttnn.DeviceComputeKernelConfig) -> bool:
    """Return whether the prompt kernel may return 0 for a row whose largest score is at least
    11,264, 128 * 88.

    With float32 sums it subtracts only the first 8 bits of that score, which leaves up to 1/128 of
    it. The exponential of more than about 88 is infinite in float32, and the row becomes 0. With
    bfloat16 sums a score has only these bits, and approximate exponentials lose no rows either:
    measured on a simulator (docs/evidence/upstream-ttnn.md).

    A second run of the kernel is necessary: to skip it by a bound on the scores, the host would
    have to read the bound back in every call, which stalls the queue and is impossible in a trace.
    """
    return config.fp32_dest_acc_en and not config.math_approx_mode


def _check_supported(query: Tensor) -> None:
    if query.dtype == ttnn.float32:
        raise InputTypeError(
            "query", "be bfloat16 or bfloat8_b on the fused path", "query.dtype=float32"
        )
    if query.shape[3] % TILE:
        raise InputError(
            "heads", f"have whole tiles of {TILE} features", {"query.shape": tuple(query.shape)}
        )


def _attn_mask(
    mask: DeviceMask | None,
    bias: np.ndarray | Tensor | None,
    seq_len_q: int,
    seq_len_k: int,
    device: ttnn.MeshDevice,
) -> Tensor | None:
    """Return the mask that the kernel adds to the scores, (B or 1, N or 1, T, S), with `MASKED`
    beyond the last key.
    """
    if bias is None:
        if mask is None:
            return None
        return mask.additive(seq_len_q, seq_len_k)
    attn_mask = bias_on_device(bias, device, ttnn.bfloat16)
    # Broadcast to queries and keys.
    if mask is None and tuple(attn_mask.shape)[2:] != (seq_len_q, seq_len_k):
        mask = DeviceMask(np.zeros((1, 1, seq_len_q, seq_len_k), bool), device=device)
    if mask is not None:
        attn_mask = ttnn.add(attn_mask, mask.additive(seq_len_q, seq_len_k))
    return ttnn.fill_implicit_tile_padding(attn_mask, MASKED)


def _unscaled(sinks: Tensor, scale: float) -> Tensor:
    """Return sinks divided by the scale, because the kernels multiply them by it."""
    return as_dtype(ttnn.multiply(at_least_float32(sinks), 1.0 / scale), ttnn.bfloat16)


def _some_heads(x: Tensor, part: slice, copies: int, *, axis: int) -> Tensor:
    """Return some heads of x, each with this many copies in a row."""
    if part.stop - part.start == x.shape[axis]:
        some = x
    else:
        some = x[(slice(None),) * axis + (part,)]
    if copies == 1:
        return some
    return ttnn.repeat_interleave(some, copies, dim=axis)


def _largest_chunk(query: Tensor) -> int:
    if query.shape[3] <= WIDE:
        return LARGEST_CHUNK
    return LARGEST_CHUNK // 2


def _program_config(
    device: ttnn.MeshDevice,
    config: ttnn.DeviceComputeKernelConfig,
    seq_len_q: int,
    seq_len_k: int,
    largest_chunk: int,
) -> ttnn.SDPAProgramConfig:
    return ttnn.SDPAProgramConfig(
        compute_with_storage_grid_size=device.compute_with_storage_grid_size(),
        q_chunk_size=min(largest_chunk, round_up(seq_len_q)),
        k_chunk_size=min(largest_chunk, round_up(seq_len_k)),
        exp_approx_mode=config.math_approx_mode,
    )


# ---- Validation ----------------------------------------------------------------------------------


def check_cached_step(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    last_positions: np.ndarray | Tensor,
    page_table: Tensor | None = None,
) -> None:
    """Reject a query (1, B, N, H), a cache (B, K, S, H) or last positions (B,) that do not fit each
    other.
    """
    for name, x in (("keys", keys), ("values", values)):
        check_floating(name, x, rank=4)
        if x.dtype == ttnn.float32:
            raise InputTypeError(
                name, "be bfloat16 or bfloat8_b on the fused path", f"{name}.dtype=float32"
            )
    if tuple(values.shape) != tuple(keys.shape):
        raise InputError(
            "values",
            "have the shape of keys",
            {"values.shape": tuple(values.shape), "keys.shape": tuple(keys.shape)},
        )
    batch_size = keys.shape[0]
    capacity = keys.shape[2]
    shapes = {"query.shape": tuple(query.shape), "keys.shape": tuple(keys.shape)}
    if page_table is not None:
        batch_size = page_table.shape[0]
        capacity = page_table.shape[1] * keys.shape[2]
        shapes["page_table.shape"] = tuple(page_table.shape)
    if (query.shape[0], query.shape[1], query.shape[3]) != (1, batch_size, keys.shape[3]):
        raise InputError(
            "query",
            "have shape (1, B, N, H) with the batch size and features of the cache",
            shapes,
        )
    check_head_groups(query.shape[2], keys.shape[1])
    if keys.shape[2] % TILE:
        rule = f"have whole tiles of {TILE} slots"
        raise InputError("keys", rule, {"keys.shape": tuple(keys.shape)})
    if not isinstance(last_positions, Tensor):
        check_lengths("last_positions", last_positions, batch_size, capacity - 1)
    elif last_positions.dtype != ttnn.int32 or tuple(last_positions.shape) != (batch_size,):
        raise InputError(
            "last_positions",
            f"be int32 of shape (B,) = ({batch_size},) on the device",
            f"{last_positions.dtype} of shape {tuple(last_positions.shape)}",
        )
