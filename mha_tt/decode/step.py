"""Decode step with positions on the device: one token per sequence, without upload or read-back.

Axes: B batch, N query heads, K key/value heads, P features of a head on the device, E d_model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ttnn
from jaxtyping import Float
from ttnn import Tensor

from mha_spec import AttentionSpec
from mha_tt.cache import Cache, CacheT, mark_written_over, write_rows
from mha_tt.decode.positions import SUBBLOCK, DecodePositions, PreparedWeights
from mha_tt.device import accurate_config
from mha_tt.features.latent import (
    HeadWeights,
    LatentCache,
    absorb_values,
    project_absorbed,
    project_latents,
)
from mha_tt.features.rope import Rotation
from mha_tt.kernels import fused
from mha_tt.layout import TILE, largest_divisor, padded_features, round_up
from mha_tt.mha import AttentionLayer, FunctionalLayer
from mha_tt.projections import project_output, project_qkv
from mha_tt.scores import Scores
from mha_tt.weights import Project

MOST_IN_OWN_TILES = 4
"""Up to this many sequences keep their own tiles until the end of a step, which saves an operation
but multiplies the output projection by the number of sequences, since each tile has a single row.
More sequences share tiles. An estimate: devices were not measured at other bounds.
"""

INPUT_BLOCK = 8
"""Maximum number of input tiles, along the features that a product sums, that a core reads at a
time. Each block is one broadcast to all cores, so larger ones are fewer, but a core keeps two of
them and of the weights in its memory; 8 tiles of bfloat16 are 16 KiB of about 1.5 MB. An estimate,
as the bound above.
"""


def decode_step(
    layer: AttentionLayer | FunctionalLayer,
    kernel: fused.FusedAttention,
    x: Float[Tensor, "B 1 d_in"],
    cache: CacheT,
    scores: Scores,
    get_kv_b: Callable[[], HeadWeights] | None,
) -> tuple[Float[Tensor, "B 1 E"], CacheT]:
    """Append one token per sequence to a cache; each attends to all tokens up to itself.

    Called after all checks, if the step form of the kernel supports the call. Only the first step
    after tokens from another path uploads positions. Constant tensors come from the layer, or from
    the last step by way of the cache.
    """
    spec = layer.spec
    batch_size, _, width = x.shape
    head_weights = None
    if get_kv_b is not None:
        head_weights = get_kv_b()
    prepared = _prepared_weights(layer, cache)
    is_packed = _is_packed(x, spec)
    positions = _next_positions(cache, spec, prepared, is_packed)
    rotation = positions.rotation()
    of_layer: Any = {"compute_kernel_config": layer.compute_kernel_config}
    if is_packed:
        tokens = ttnn.reshape(x, (1, 1, batch_size, width))
        packed, are_sharded = _packed(layer, tokens, prepared)
        q, new = _heads(packed, spec, rotation, are_sharded)
        _write(cache, new, positions, are_sharded)
    else:
        tokens = ttnn.reshape(x, (1, batch_size, width))
        if head_weights is None:
            q, new = project_new_tokens(layer.project, tokens, cache, spec, rotation)
        else:
            q, *new = project_absorbed(
                layer.project, tokens, spec, rotation, head_weights, **of_layer
            )
        q, *new = (ttnn.transpose(part, 1, 2) for part in (q, *new))
        write_rows(cache, new, positions.slots)
    slots = tuple(cache.slots.values())
    context = fused.attend_to_cache_unchecked(
        q,
        slots[0],
        slots[-1],
        positions.slots,
        scores.spec,
        page_table=cache.page_table,
        learned=_learned_of_step(kernel, scores, q, slots[0], prepared),
        compute_kernel_config=kernel.compute_kernel_config,
    )
    if is_packed:
        if batch_size <= MOST_IN_OWN_TILES:
            rows = (batch_size, 1)
        else:
            rows = (1, batch_size)
        output = ttnn.reshape(context, (*rows, context.shape[2] * context.shape[3]))
        if spec.out_proj:
            output = layer.project("out_proj", output)
    else:
        context = ttnn.transpose(context, 1, 2)
        if head_weights is not None:
            context = context[:, :, :, : padded_features("kv_a_norm", spec)]
            context = absorb_values(context, head_weights, spec, **of_layer)
        output = project_output(layer.project, context, tokens, spec)
    positions.advance()
    after = cache.with_slots(slots, cache.lengths + 1)
    object.__setattr__(after, "next_positions", positions)  # not part of its value
    mark_written_over(cache, after)
    if tuple(output.shape)[:2] != (batch_size, 1):
        output = ttnn.reshape(output, (batch_size, 1, output.shape[-1]))
    return output, after


def project_new_tokens(
    project: Project,
    x: Float[Tensor, "B T d_in"],
    cache: Cache,
    spec: AttentionSpec,
    positions: Any,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the queries of new tokens and their cache entries."""
    if isinstance(cache, LatentCache):
        q, latents = project_latents(project, x, spec, positions)
        return q, (latents,)
    if spec.shared_kv:
        keys, values = cache.slots.values()
        return project_qkv(project, x, keys, values, spec, positions)[0], ()
    q, k, v = project_qkv(project, x, x, x, spec, positions)
    return q, (k, v)


def _learned_of_step(
    kernel: fused.FusedAttention, scores: Scores, q: Tensor, keys: Tensor, prepared: PreparedWeights
) -> dict[str, Any]:
    """Return the weights that change scores, with sinks as they are prepared once for many
    steps.
    """
    learned: dict[str, Any] = dict(scores.learned)
    sinks = learned.get("sinks")
    if sinks is None:
        return learned
    config = kernel.compute_kernel_config
    is_approximate = config is not None and config.math_approx_mode
    make = partial(fused.sinks_of_step, sinks, q, keys, scores.spec, compute_kernel_config=config)
    learned["sinks"] = prepared.get_or_make(("sinks", scores.spec, is_approximate), (sinks,), make)
    return learned


def _prepared_weights(layer: AttentionLayer | FunctionalLayer, cache: Cache) -> PreparedWeights:
    """Return the constant tensors of the layer, or from the last step, or an empty record."""
    if layer.prepared is not None:
        return layer.prepared
    if cache.next_positions is not None:
        return cache.next_positions.prepared
    return PreparedWeights()


def _next_positions(
    cache: Cache, spec: AttentionSpec, prepared: PreparedWeights, is_packed: bool
) -> DecodePositions:
    """Return the positions from the last step, if they still match the cache, or new ones."""
    device = next(iter(cache.slots.values())).device()
    table = None
    if spec.rope is not None:
        if cache.next_positions is not None:
            table = cache.next_positions.table
        if table is None or not table.is_for(spec, cache.capacity):
            table = prepared.rotary_table(spec, cache.capacity, device)
    if cache.next_positions is not None and cache.next_positions.matches(
        cache.lengths, table, is_row_each=is_packed
    ):
        return cache.next_positions
    return DecodePositions(cache.lengths, table, prepared, is_row_each=is_packed, device=device)


# ---- Packed projections --------------------------------------------------------------------------


def _is_packed(x: Tensor, spec: AttentionSpec) -> bool:
    """Return whether the framework's operation may split queries, keys and values at once.

    It supports up to a tile of sequences, in bfloat16, and heads of one width. Norms and gates need
    heads before tokens. Beyond a tile of heads the operation is not known to be correct.
    """
    have_one_width = spec.latent is None and padded_features("q_proj", spec) == padded_features(
        "v_proj", spec
    )
    is_small = max(x.shape[0], spec.num_heads) <= TILE and x.dtype == ttnn.bfloat16
    return have_one_width and is_small and not spec.norms and spec.gate is None


def _packed(
    layer: AttentionLayer | FunctionalLayer,
    x: Float[Tensor, "1 1 B d_in"],
    prepared: PreparedWeights,
) -> tuple[Float[Tensor, "1 1 B (N+2K)P"], bool]:
    """Return concatenated queries, keys and values, and whether they are sharded, at most one head
    on a core.

    If so, keys can be moved to separate cores and written together with values.
    """
    spec = layer.spec
    weights = layer.plain_weights
    if weights is None:
        if spec.fused_qkv:
            return layer.project("qkv_proj", x), False
        return ttnn.concat([layer.project(f"{part}_proj", x) for part in "qkv"], dim=-1), False
    weight, bias = prepared.qkv(weights, spec)
    num_tiles = weight.shape[1] // TILE
    tiles_per_head = padded_features("q_proj", spec) // TILE
    grid = x.device().compute_with_storage_grid_size()
    num_cores = grid.x * grid.y
    options: dict[str, Any] = {}
    # Two cores per sequence: its keys then lie on a different one than its values.
    if 2 * x.shape[2] <= num_cores:
        # The fewest tiles per core, all of one head, for which there are enough cores.
        for tiles_per_core in range(1, tiles_per_head + 1):
            if tiles_per_head % tiles_per_core == 0 and num_tiles // tiles_per_core <= num_cores:
                options = _divided(x, num_tiles, tiles_per_core)
                break
    packed = ttnn.linear(
        x,
        weight,
        bias=bias,
        dtype=x.dtype,
        compute_kernel_config=layer.compute_kernel_config or accurate_config(x.device()),
        **options,
    )
    return packed, bool(options)


def _divided(x: Tensor, num_tiles: int, tiles_per_core: int) -> dict[str, Any]:
    """Return the configuration of a product with a width of this many tiles, of which each core
    computes and keeps some.
    """
    grid = x.device().compute_with_storage_grid_size()
    return {
        "memory_config": ttnn.create_sharded_memory_config(
            (TILE, tiles_per_core * TILE),
            core_grid=ttnn.num_cores_to_corerangeset(
                num_tiles // tiles_per_core, grid, row_wise=True
            ),
            strategy=ttnn.ShardStrategy.WIDTH,
            use_height_and_width_as_shard_shape=True,
        ),
        "program_config": ttnn.MatmulMultiCoreReuseMultiCast1DProgramConfig(
            compute_with_storage_grid_size=grid,
            in0_block_w=largest_divisor(round_up(x.shape[3]) // TILE, INPUT_BLOCK),
            # One row of tiles: at most a tile of sequences.
            out_subblock_h=1,
            out_subblock_w=largest_divisor(tiles_per_core, SUBBLOCK),
            per_core_M=1,
            per_core_N=tiles_per_core,
            fuse_batch=True,
            fused_activation=None,
            mcast_in0=True,
        ),
    }


def _heads(
    packed: Float[Tensor, "1 1 B (N+2K)P"],
    spec: AttentionSpec,
    rotation: Rotation | None,
    are_sharded: bool,
) -> tuple[Float[Tensor, "1 B N P"], tuple[Float[Tensor, "1 B K P"], Float[Tensor, "1 B K P"]]]:
    """Clip packed features and split them into heads, with one core per sequence; rotate queries
    and keys.
    """
    if spec.clip_qkv is not None:
        packed = ttnn.clamp(packed, -spec.clip_qkv, spec.clip_qkv)
    q, k, v = ttnn.experimental.nlp_create_qkv_heads_decode(
        packed,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        overlap_qk_coregrid=not are_sharded,
    )
    if rotation is None:
        return (q, (k, v))
    return (rotation.rotate(q), (rotation.rotate(k), v))


def _write(
    cache: Cache, new: tuple[Tensor, Tensor], positions: DecodePositions, are_sharded: bool
) -> None:
    """Write keys and values of new tokens into their slots; both at once if they are on separate
    cores.
    """
    if not (are_sharded and all(x.is_sharded() for x in new)):
        write_rows(cache, new, positions.slots)
        return
    (keys, values), (new_keys, new_values) = cache.slots.values(), new
    ttnn.experimental.paged_fused_update_cache(
        keys,
        new_keys,
        values,
        new_values,
        update_idxs_tensor=positions.slots,
        page_table=cache.page_table,
    )
