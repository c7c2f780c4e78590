"""A layer whose heads are divided over ranks: the weights and the specification of each, and the way back.

What is divided follows from the specification alone. The rows of projections into attention lie head by head, the
columns of out_proj, too; what has no heads is copied to every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, Refusal, WrongType, shares
from mha_spec.attention import NORMS, check_spec
from mha_spec.rules import as_count
from mha_spec.shares import OF_KEYS, Held, axis_of_heads
from parity.core.weights import Weights, check_weights


@dataclass(frozen=True)
class ShardPlan:
    """How a layer is divided over ranks.

    Attributes:
        tensor: number of ranks that share the query heads, as many on each: tensor parallelism.
        context: number of parts, in order, that tokens are divided into: context parallelism. Each has `tensor` ranks,
            neighbours, which hold what those of any other part hold.

    Raises:
        TypeError: if one is not an integer.
        ValueError: if one is below 1.

    Source: Megatron-LM, arXiv:1909.08053, section 3; Ring Attention, arXiv:2310.01889.
    """

    tensor: int
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "context"):
            object.__setattr__(self, name, as_count(name, getattr(self, name)))

    def __str__(self) -> str:
        return f"tensor={self.tensor}" + (f" and context={self.context}" if self.context > 1 else "")

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.tensor * self.context


def local_heads(spec: AttentionSpec, plan: ShardPlan, rank: int) -> Held:
    """The heads of a rank, as `mha_spec.shares` has them.

    Raises:
        TypeError: if something is not of its kind.
        ValueError: if there is no such rank, or the ranks do not divide the query heads evenly.
    """
    _check(spec, plan, rank)
    return shares.local_heads(spec, plan.tensor, rank % plan.tensor)


def shard_spec(spec: AttentionSpec, plan: ShardPlan, rank: int, *, alone: bool = True) -> AttentionSpec:
    """The specification of what a rank computes, or holds: `shard` says what, and what it raises."""
    held = local_heads(spec, plan, rank)
    if alone and plan.tensor > 1:
        _check_alone(spec)
    has_bias = spec.out_bias and (rank % plan.tensor == 0 or not spec.out_proj)
    return replace(spec, num_heads=len(held.queries), num_kv_heads=len(held.keys), out_bias=has_bias)


def shard(
    weights: Mapping[str, Any], spec: AttentionSpec, plan: ShardPlan, rank: int, *, alone: bool = True
) -> tuple[Weights, AttentionSpec]:
    """What a rank must hold of a layer, bit for bit, and what it computes with it.

    The outputs of all ranks that share the heads, each for the whole input or for its part of the tokens, add up to
    that of the layer; without out_proj they are its parts, side by side. A mask or a bias with an axis of heads is
    divided as query heads are.

    Of N query heads each of R ranks has N / R neighbours, with their rows of q_proj, gate_proj and, of a layer with
    latents, q_b_proj and kv_b_proj, their columns of out_proj and of a relative bias, their sinks; of key/value heads
    those that they see, with the rows of k_proj and v_proj: K / R of them, or one that other ranks have, too. Norms
    with weights for each head, or over the width of all heads, are divided with them. Other norms, and what makes
    latents, are copied.

    The bias of out_proj is on the first of them alone, so that it is added once, bit for bit; the specification of the
    others has none, so that none of them trains a copy of it.

    Args:
        weights: canonical weights of the whole layer, as arrays of any framework.
        spec: the whole layer.
        plan: how it is divided.
        rank: which part, from 0.
        alone: whether the rank's layer is to be computed by itself. False is for ranks that join more than outputs:
            the mean squares of norms over the width, the slopes of ALiBi, which outputs are dropped. The specification
            then says what the rank holds, and not all that it computes.

    Returns:
        Canonical weights of the rank, NumPy arrays of the same dtype, and their specification.

    Raises:
        TypeError: if something is not of its kind, or the weights are not floating-point arrays of one dtype.
        ValueError: if the weights are not those of the spec, there is no such rank, or it does not divide the query
            heads evenly; and with `alone`, if no specification says what the rank computes: of a norm over the width of
            all heads, which needs a sum over ranks; of ALiBi, whose slopes follow from the number of all heads; of
            outputs that are dropped after they are added up.

    Source: Megatron-LM, arXiv:1909.08053, section 3.
    """
    own, held = shard_spec(spec, plan, rank, alone=alone), local_heads(spec, plan, rank)
    whole, part = check_weights(weights, spec), {}
    for name, shape in own.weight_shapes.items():
        part[name] = np.empty(shape, whole[name].dtype)
        _by_heads(name, part[name], own)[...] = _by_heads(name, whole[name], spec)[_heads_in(name, spec, held)]
    return part, own


def unshard(shards: Sequence[Mapping[str, Any]], spec: AttentionSpec, plan: ShardPlan) -> Weights:
    """The weights of a layer from those of all ranks: the inverse of `shard`, bit for bit, with `alone` or without.

    Args:
        shards: canonical weights of each rank, in order, as arrays of any framework.
        spec: the whole layer.
        plan: how it is divided.

    Returns:
        Canonical weights of the whole layer, as NumPy arrays.

    Raises:
        TypeError, ValueError: as `shard` without `alone`, or if a rank is missing, or two ranks hold something else
            where they should hold the same.
    """
    _check(spec, plan, 0)
    if len(shards) != plan.num_ranks:
        raise Refusal("shards", "be one of each rank", f"{len(shards)} of them and {plan}")
    ranks = [_checked(shard, spec, plan, rank) for rank, shard in enumerate(shards)]
    dtypes = list(dict.fromkeys(weight.dtype for held, _ in ranks for weight in held.values()))
    if len(dtypes) > 1:
        raise WrongType("shards", "have one dtype", str(sorted(map(str, dtypes))))
    whole = {name: np.empty(shape, dtypes[0]) for name, shape in spec.weight_shapes.items()}
    for name, weight in whole.items():
        heads = _by_heads(name, weight, spec)
        parts = [
            (rank, _heads_in(name, spec, local_heads(spec, plan, rank)), _by_heads(name, held[name], own))
            for rank, (held, own) in enumerate(ranks)
            if name in held
        ]
        for _, which, part in parts:
            heads[which] = part
        for rank, which, part in parts:
            if heads[which].tobytes() != part.tobytes():
                raise Refusal(name, "be the same on all ranks that share it", f"others on rank {rank}")
    return whole


# ---- What is refused -------------------------------------------------------------------------------------------------


def _check(spec: AttentionSpec, plan: ShardPlan, rank: int) -> None:
    """Refuse a rank that there is not, and heads that cannot be divided."""
    check_spec(spec)
    if not isinstance(plan, ShardPlan):
        raise WrongType("plan", "be a ShardPlan", plan=plan)
    if as_count("rank", rank, 0) >= plan.num_ranks:
        raise Refusal("rank", "be below the number of ranks", rank=rank, plan=plan)
    if plan.tensor == 1:
        return
    if spec.num_heads % plan.tensor:
        raise Refusal("num_heads", "be a multiple of the number of ranks", num_heads=spec.num_heads, tensor=plan.tensor)


def _check_alone(spec: AttentionSpec) -> None:
    """Refuse a layer of whose parts no specification says what they compute."""
    for name in NORMS:
        norm = getattr(spec, name)
        if norm is not None and norm.over == "width":
            raise Refusal(
                name,
                "be over='head' for a rank to compute its part alone, since that over the width of all heads "
                "needs a sum over ranks",
                {name: norm, "alone": True},
            )
    if spec.alibi is not None:
        raise Refusal(
            "alibi",
            "be None for a rank to compute its part alone, since its slopes follow from the number of all heads",
            alibi=spec.alibi,
            alone=True,
        )
    if spec.output_dropout and spec.out_proj:
        raise Refusal(
            "output_dropout",
            "be 0 for a rank to compute its part alone, since outputs are dropped after they are added up",
            output_dropout=spec.output_dropout,
            alone=True,
        )


def _checked(
    weights: Mapping[str, Any], spec: AttentionSpec, plan: ShardPlan, rank: int
) -> tuple[Weights, AttentionSpec]:
    """The weights of a rank, as NumPy arrays, and its specification."""
    own = shard_spec(spec, plan, rank, alone=False)
    try:
        return check_weights(weights, own), own
    except Refusal as refusal:
        raise refusal.within(f"rank {rank}") from None


# ---- Views -----------------------------------------------------------------------------------------------------------


def _by_heads(name: str, weight: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """A view of a weight with its heads on the first axis; one that has none is as of one head."""
    axis = axis_of_heads(name, spec)
    if axis is None:
        return weight[None]
    count = spec.num_kv_heads if name.partition(".")[0] in OF_KEYS else spec.num_heads
    heads = weight.reshape(*weight.shape[:axis], count, weight.shape[axis] // count, *weight.shape[axis + 1 :])
    return np.moveaxis(heads, axis, 0)


def _heads_in(name: str, spec: AttentionSpec, held: Held) -> list[int]:
    """Which heads of a weight a rank has."""
    if axis_of_heads(name, spec) is None:
        return [0]
    return held.keys if name.partition(".")[0] in OF_KEYS else list(held.queries)
