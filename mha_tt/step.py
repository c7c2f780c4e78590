"""A step whose places the device knows by itself: one token of each sequence, nothing uploaded, nothing read back.

Axes: B batch, N query heads, K key/value heads, P features that a head has on the device, E d_model.
"""

from __future__ import annotations

from typing import Any

import ttnn
from jaxtyping import Float
from ttnn import Tensor

from mha_spec import AttentionSpec
from mha_tt import fused
from mha_tt.cache import CacheT, KVCache, LatentCache, write_rows
from mha_tt.device import TILE
from mha_tt.places import KERNEL_FEATURES, Places, RotaryTable
from mha_tt.projections import (
    HeadWeights,
    absorb_keys,
    absorb_values,
    project_latents,
    project_output,
    project_qkv,
)
from mha_tt.rope import Rotation
from mha_tt.weights import Project, padded_features


def advance(
    project: Project,
    x: Float[Tensor, "B 1 d_in"],
    cache: CacheT,
    spec: AttentionSpec,
    sinks: Float[Tensor, "1 N 1 1"] | None,
    *,
    table: RotaryTable | None,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None,
    kv_b: HeadWeights | None,
) -> tuple[Float[Tensor, "B 1 E"], CacheT]:
    """Append one token of each sequence to a cache, and attend to everything up to it.

    It is called after all checks, for what the kernel of a step takes. Only the first step behind tokens that came in
    another way uploads their places, and the table, unless the one that is given is for this cache.
    """
    batch_size, _, width = x.shape
    is_packed = _is_packed(x, spec)
    places = _places(cache, spec, table, is_packed, compute_kernel_config)
    rotation = places.rotation()
    tokens = ttnn.reshape(x, (1, *(1,) * is_packed, batch_size, width))
    if is_packed:
        q, new = _heads(project, tokens, spec, rotation)
    else:
        q, new = entering(project, tokens, cache, spec, rotation)
        q = q if kv_b is None else absorb_keys(q, kv_b, spec, compute_kernel_config=compute_kernel_config)
        q, *new = (ttnn.transpose(part, 1, 2) for part in (q, *new))
    write_rows(cache, new, places.slots)
    slots = tuple(cache.slots.values())
    of_scores: Any = {"spec": spec if kv_b is None else spec.absorbed, "sinks": sinks}
    arithmetic = {"compute_kernel_config": compute_kernel_config}
    context = fused.attend_to_cache(
        q, slots[0], slots[-1], places.slots, page_table=cache.page_table, **of_scores, **arithmetic
    )
    if is_packed:
        output = ttnn.reshape(context, (1, 1, batch_size, context.shape[2] * context.shape[3]))
        output = project("out_proj", output) if spec.out_proj else output
    else:
        context = ttnn.transpose(context, 1, 2)
        if kv_b is not None:
            context = context[:, :, :, : padded_features("kv_a_norm", spec)]
            context = absorb_values(context, kv_b, spec, compute_kernel_config=compute_kernel_config)
        output = project_output(project, context, tokens, spec)
    places.advance()
    cache = cache.with_slots(slots, cache.lengths + 1)
    object.__setattr__(cache, "places", places)  # no part of its value
    return ttnn.reshape(output, (batch_size, 1, output.shape[-1])), cache


def entering(
    project: Project,
    x: Float[Tensor, "B T d_in"],
    cache: KVCache | LatentCache,
    spec: AttentionSpec,
    positions: Any,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The queries of new tokens, and what the cache keeps of them."""
    if isinstance(cache, LatentCache):
        q, latents = project_latents(project, x, spec, positions)
        return q, (latents,)
    q, k, v = project_qkv(project, x, x, x, spec, positions)
    return q, (k, v)


def table_of(cache: KVCache | LatentCache) -> RotaryTable | None:
    """The table of RoPE that steps have left in a cache."""
    return None if cache.places is None else cache.places.table


def _is_packed(x: Tensor, spec: AttentionSpec) -> bool:
    """Whether the framework's operation may split queries, keys and values at once.

    It takes up to a tile of sequences, in bfloat16, and heads that are alike. A norm or a gate wants heads before
    tokens; beyond a tile of heads the operation is not known to be right.
    """
    are_alike = spec.latent is None and padded_features("q_proj", spec) == padded_features("v_proj", spec)
    is_small = max(x.shape[0], spec.num_heads) <= TILE and x.dtype == ttnn.bfloat16
    return are_alike and is_small and not spec.norms and spec.gate is None


def _places(
    cache: KVCache | LatentCache,
    spec: AttentionSpec,
    table: RotaryTable | None,
    is_packed: bool,
    compute_kernel_config: ttnn.DeviceComputeKernelConfig | None,
) -> Places:
    """Those that the last step left, if they are still those of the cache, or new ones."""
    device = next(iter(cache.slots.values())).device()
    if spec.rope is not None:
        is_fast = compute_kernel_config is not None and compute_kernel_config.math_approx_mode
        for_kernel = is_packed and is_fast and padded_features("q_proj", spec) <= KERNEL_FEATURES
        made_for = {"for_kernel": for_kernel}
        known = (each for each in (table_of(cache), table) if each and each.is_for(spec, cache.capacity, **made_for))
        table = next(known, None) or RotaryTable(spec, cache.capacity, **made_for, device=device)
    else:
        table = None
    if cache.places is not None and cache.places.are_behind(cache.lengths, table, is_row_each=is_packed):
        return cache.places
    return Places(cache.lengths, table, is_row_each=is_packed, device=device)


def _heads(
    project: Project, x: Float[Tensor, "1 1 B d_in"], spec: AttentionSpec, rotation: Rotation | None
) -> tuple[Float[Tensor, "1 B N P"], tuple[Float[Tensor, "1 B K P"], Float[Tensor, "1 B K P"]]]:
    """Queries, and keys and values, each sequence's on a core of its own; rotated."""
    if spec.fused_qkv:
        packed = project("qkv_proj", x)
    else:
        packed = ttnn.concat([project(f"{part}_proj", x) for part in "qkv"], dim=-1)
    packed = packed if spec.clip_qkv is None else ttnn.clamp(packed, -spec.clip_qkv, spec.clip_qkv)
    q, k, v = ttnn.experimental.nlp_create_qkv_heads_decode(
        packed, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads
    )
    return (q, (k, v)) if rotation is None else (rotation.rotate(q), (rotation.rotate(k), v))
