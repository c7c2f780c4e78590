"""Stages of a layer: division over ranks by heads or tokens, and the inverse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError
from mha_spec.shares import LocalHeads
from parity.measure.core.arrays import to_numpy
from parity.measure.core.stages import STAGES, stage_named
from parity.measure.sharding.shard import ShardPlan, local_heads

QUERIES = ("mask", "q", "scores", "attn_weights", "context")
KEYS = ("k", "v", "cache.keys", "cache.values")
"""Stages whose second axis is that of query heads, or of key/value heads."""


def unshard_stages(
    shards: Sequence[Mapping[str, Any]],
    spec: AttentionSpec,
    plan: ShardPlan,
    *,
    summed: bool = False,
) -> dict[str, np.ndarray]:
    """Return the stages of a layer from those of all ranks, to compare runs of any framework.

    Args:
        shards: stages of each rank, in order, by the names in `STAGES`, as arrays of any framework:
            those of local heads and, if tokens are also divided (only without a cache), of local
            queries, keys and values; `output` is its part of the sum, or the sum.
        spec: whole layer.
        plan: division of the layer.
        summed: outputs are already summed over ranks.

    Returns:
        Stages that all ranks have, for `parity.diagnose` and `assert_parity`.

    Raises:
        ValueError: if a rank is missing, replicated stages differ between ranks, a stage is a
            gradient, or its shape does not fit the rank's heads.
    """
    if len(shards) != plan.num_ranks:
        raise InputError("shards", "have one entry per rank", f"{len(shards)} of them and {plan}")
    held = [local_heads(spec, plan, rank) for rank in range(plan.tensor)]
    names = [name for name in shards[0] if all(name in shard for shard in shards)]
    if plan.context > 1 and (cached := [name for name in names if "cache." in name]):
        raise InputError("stages", "have no cache if tokens are divided", stages=cached[0])

    def joined(name: str) -> np.ndarray:
        parts = [to_numpy(shard[name]) for shard in shards]
        by_tokens = [
            parts[begin : begin + plan.tensor] for begin in range(0, plan.num_ranks, plan.tensor)
        ]
        found = [_joined(name, part, spec, held, summed) for part in by_tokens]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=found[0].ndim - 2)

    return {name: joined(name) for name in names}


def part_of(name: str, stage: np.ndarray, spec: AttentionSpec, held: LocalHeads) -> np.ndarray:
    """Return a rank's part of a stage of the whole layer: its heads; all of stages without
    heads.
    """
    axis, heads, count = _place(name, spec, held)
    if axis is None:
        return stage
    if axis == stage.ndim - 1:  # concatenated features of heads
        by_heads = stage.reshape(*stage.shape[:-1], count, -1)
        return by_heads[..., heads, :].reshape(*stage.shape[:-1], -1)
    return stage[:, heads]


def _place(name: str, spec: AttentionSpec, held: LocalHeads) -> tuple[int | None, list[int], int]:
    """Return the axis of heads in a stage, the heads of a rank, and their number."""
    stage = stage_named(name)
    if stage.is_gradient or stage.kind not in STAGES:
        raise InputError(
            "stages", "be those of a forward pass, by the names of the stages", stages=name
        )
    quantity, queries = stage.quantity, list(held.queries)
    if quantity in KEYS and spec.latent is None:
        return 1, held.keys, spec.num_kv_heads
    if quantity in QUERIES or quantity in KEYS:
        return 1, queries, spec.num_heads
    is_wide = quantity == "gate" or (quantity == "output" and not spec.out_proj)
    return (2 if is_wide else None), queries, spec.num_heads


def _joined(
    name: str, parts: list[np.ndarray], spec: AttentionSpec, held: list[LocalHeads], summed: bool
) -> np.ndarray:
    axis, _, count = _place(name, spec, held[0])
    if axis is None:
        if stage_named(name).quantity == "output" and not summed:
            return np.sum([part.astype(np.float64) for part in parts], axis=0).astype(
                parts[0].dtype
            )
        whole = parts[0]
    else:
        heads = [_place(name, spec, each)[1] for each in held]
        split = [
            _by_heads(name, part, axis, len(own)) for part, own in zip(parts, heads, strict=True)
        ]
        shape = list(split[0].shape)
        shape[axis] = count
        by_heads = np.empty(shape, split[0].dtype)
        for part, own in zip(split, heads, strict=True):
            by_heads[(slice(None),) * axis + (own,)] = part
        whole = by_heads.reshape(*shape[:2], -1) if axis == 2 else by_heads
    for rank, (part, own) in enumerate(zip(parts, held, strict=True)):
        if not np.array_equal(
            part, part_of(name, whole, spec, own), equal_nan=part.dtype.kind == "f"
        ):
            raise InputError(
                name, "be equal on all ranks that share it", f"different values on rank {rank}"
            )
    return whole


def _by_heads(name: str, part: np.ndarray, axis: int, count: int) -> np.ndarray:
    """Return a part with an axis of only its heads."""
    if axis == 2 and part.ndim == 3 and part.shape[2] % count == 0:
        return part.reshape(*part.shape[:2], count, -1)
    if axis == 2 or part.ndim != 4 or part.shape[1] != count:
        raise InputError(name, f"have the {count} heads of its rank", {f"{name}.shape": part.shape})
    return part
