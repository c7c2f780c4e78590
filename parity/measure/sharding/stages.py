"""Stages of a layer: division over ranks by heads or tokens, and the inverse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mha_spec import AttentionSpec, InputError
from mha_spec.shares import LocalHeads
from parity.measure.core.arrays import to_numpy
from parity.measure.core.stages import STAGES, stage_named
from parity.measure.sharding.shard import ShardPlan, local_heads

QUERIES = ("mask", "q", "scores", "attn_weights", "context")
KEYS = ("k", "v", "cache.keys", "cache.values")
"""Stages whose second axis is the axis of query heads, or of key/value heads."""


def unshard_stages(
    shards: Sequence[Mapping[str, Any]],
    spec: AttentionSpec,
    plan: ShardPlan,
    *,
    summed: bool = False,
) -> dict[str, np.ndarray]:
    """Return the stages of a layer from the stages of all ranks, to compare runs of any framework.

    Args:
        shards: stages of each rank, in order, by the names in `STAGES`, as arrays of any framework:
            the stages of local heads and, if tokens are also divided (only without a cache), of
            local queries, keys and values; `output` is its part of the sum, or the sum.
        spec: whole layer.
        plan: division of the layer.
        summed: outputs are already summed over ranks.

    Returns:
        Stages that all ranks have, for `parity.diagnose` and `assert_parity`.

    Raises:
        ValueError: if a rank is missing, replicated stages differ between ranks, a stage is a
            gradient, or its shape does not fit the rank's heads.

    Example:
        >>> import mha_torch
        >>> problem = parity.make_problem("causal", "float32")
        >>> query = parity.to_torch(problem.inputs["query"])
        >>> plan = parity.ShardPlan(tensor=2)
        >>> ranks = []
        >>> for rank in range(2):
        ...     weights, spec = parity.shard(problem.weights, problem.spec, plan, rank)
        ...     layer = parity.load_into(mha_torch.MultiHeadAttention(spec), weights, spec)
        ...     output, _ = layer(query, is_causal=True)
        ...     ranks.append({"output": output})
        >>> parity.unshard_stages(ranks, problem.spec, plan)["output"].shape
        (2, 5, 32)
    """
    if len(shards) != plan.num_ranks:
        raise InputError("shards", "have one entry per rank", f"{len(shards)} of them and {plan}")
    heads_by_rank = [local_heads(spec, plan, rank) for rank in range(plan.tensor)]
    names = list(shards[0])
    for shard in shards:
        names = [name for name in names if name in shard]
    if plan.context > 1:
        for name in names:
            if "cache." in name:
                raise InputError("stages", "have no cache if tokens are divided", stages=name)
    stages = {}
    for name in names:
        parts = [to_numpy(shard[name]) for shard in shards]
        stages[name] = _joined_over_tokens(name, parts, spec, heads_by_rank, summed)
    return stages


def part_of(name: str, stage: np.ndarray, spec: AttentionSpec, heads: LocalHeads) -> np.ndarray:
    """Return a rank's part of a stage of the whole layer: its heads, or all of a stage without
    heads.
    """
    of_heads = _axis_of_heads(name, spec)
    if of_heads is None:
        return stage
    own_heads = of_heads.heads_in(heads)
    if of_heads.axis == stage.ndim - 1:  # concatenated features of heads
        by_heads = stage.reshape(*stage.shape[:-1], of_heads.num_heads, -1)
        return by_heads[..., own_heads, :].reshape(*stage.shape[:-1], -1)
    return stage[:, own_heads]


class _AxisOfHeads(NamedTuple):
    """Where a stage has heads.

    Attributes:
        axis: axis of heads, 1, or of their concatenated features, 2.
        num_heads: number of heads of the whole layer.
        is_of_keys: they are key/value heads.
    """

    axis: int
    num_heads: int
    is_of_keys: bool

    def heads_in(self, heads: LocalHeads) -> list[int]:
        """Return those heads of a rank that the stage has."""
        return heads.keys if self.is_of_keys else list(heads.queries)


def _axis_of_heads(name: str, spec: AttentionSpec) -> _AxisOfHeads | None:
    """Return where a stage has heads, or None if it has none."""
    stage = stage_named(name)
    if stage.is_gradient or stage.kind not in STAGES:
        raise InputError(
            "stages", "come from a forward pass, by the names of the stages", stages=name
        )
    quantity = stage.quantity
    if quantity in KEYS and spec.latent is None:
        return _AxisOfHeads(1, spec.num_kv_heads, is_of_keys=True)
    if quantity in QUERIES or quantity in KEYS:  # with latents, each query head has its own keys
        return _AxisOfHeads(1, spec.num_heads, is_of_keys=False)
    if quantity == "gate" or (quantity == "output" and not spec.out_proj):
        return _AxisOfHeads(2, spec.num_heads, is_of_keys=False)
    return None


def _joined_over_tokens(
    name: str,
    parts: list[np.ndarray],
    spec: AttentionSpec,
    heads_by_rank: list[LocalHeads],
    summed: bool,
) -> np.ndarray:
    """Return a stage from the parts of all ranks, which divide tokens, and then heads."""
    size = len(heads_by_rank)
    by_tokens = []
    for begin in range(0, len(parts), size):
        by_tokens.append(
            _joined_over_heads(name, parts[begin : begin + size], spec, heads_by_rank, summed)
        )
    if len(by_tokens) == 1:
        return by_tokens[0]
    return np.concatenate(by_tokens, axis=by_tokens[0].ndim - 2)


def _joined_over_heads(
    name: str,
    parts: list[np.ndarray],
    spec: AttentionSpec,
    heads_by_rank: list[LocalHeads],
    summed: bool,
) -> np.ndarray:
    """Return a stage of the same tokens from the parts of ranks that divide heads."""
    of_heads = _axis_of_heads(name, spec)
    if of_heads is not None:
        whole = _with_all_heads(name, parts, of_heads, heads_by_rank)
    elif stage_named(name).quantity == "output" and not summed:
        # Rounded once, however many ranks there are.
        total = np.sum([part.astype(np.float64) for part in parts], axis=0)
        return total.astype(parts[0].dtype)
    else:
        whole = parts[0]
    for rank, (part, heads) in enumerate(zip(parts, heads_by_rank, strict=True)):
        expected = part_of(name, whole, spec, heads)
        if not np.array_equal(part, expected, equal_nan=part.dtype.kind == "f"):
            raise InputError(
                name, "be equal on all ranks that share it", f"different values on rank {rank}"
            )
    return whole


def _with_all_heads(
    name: str, parts: list[np.ndarray], of_heads: _AxisOfHeads, heads_by_rank: list[LocalHeads]
) -> np.ndarray:
    """Return a stage with the heads of all ranks; of heads that ranks share, the last one's."""
    numbers_by_rank = [of_heads.heads_in(heads) for heads in heads_by_rank]
    split = []
    for part, own_heads in zip(parts, numbers_by_rank, strict=True):
        split.append(_by_heads(name, part, of_heads.axis, len(own_heads)))
    shape = list(split[0].shape)
    shape[of_heads.axis] = of_heads.num_heads
    whole = np.empty(shape, split[0].dtype)
    before = (slice(None),) * of_heads.axis
    for part, own_heads in zip(split, numbers_by_rank, strict=True):
        whole[(*before, own_heads)] = part
    # Axis 2 has the features of all heads, which `_by_heads` splits: (B, T, N * H).
    if of_heads.axis == 2:
        return whole.reshape(*shape[:2], -1)
    return whole


def _by_heads(name: str, part: np.ndarray, axis: int, count: int) -> np.ndarray:
    """Return a part with an axis of only its heads."""
    if axis == 2 and part.ndim == 3 and part.shape[2] % count == 0:
        return part.reshape(*part.shape[:2], count, -1)
    if axis == 1 and part.ndim == 4 and part.shape[1] == count:
        return part
    raise InputError(name, f"have the {count} heads of its rank", {f"{name}.shape": part.shape})
