"""Layers with heads divided over ranks: weights and specification of each rank, and the inverse.

The division follows from the specification. Rows of input projections and columns of out_proj are
ordered by head; weights without heads are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError, shares
from mha_spec.attention import NORMS, check_spec
from mha_spec.rules import as_count
from mha_spec.shares import OF_KEYS, LocalHeads, axis_of_heads
from parity.measure.core.weights import Weights, check_weights


@dataclass(frozen=True)
class ShardPlan:
    """Division of a layer over ranks.

    Attributes:
        tensor: number of ranks that query heads are divided over, evenly: tensor parallelism.
        context: number of consecutive parts that tokens are divided into: context parallelism. Each
            part has `tensor` consecutive ranks, with the same weights as the ranks of other parts.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if one is below 1.

    Source: Megatron-LM, arXiv:1909.08053, section 3; Ring Attention, arXiv:2310.01889.

    Example:
        >>> parity.ShardPlan(tensor=4)
        ShardPlan(tensor=4, context=1)
    """

    tensor: int
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "context"):
            object.__setattr__(self, name, as_count(name, getattr(self, name)))

    def __str__(self) -> str:
        if self.context == 1:
            return f"tensor={self.tensor}"
        return f"tensor={self.tensor} and context={self.context}"

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.context


def local_heads(spec: AttentionSpec, plan: ShardPlan, rank: int) -> LocalHeads:
    """Return the heads of a rank, see `mha_spec.shares`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if the rank does not exist, or the ranks do not divide the query heads evenly.
    """
    _check(spec, plan, rank)
    return shares.local_heads(spec, plan.tensor, rank % plan.tensor)


def shard_spec(
    spec: AttentionSpec, plan: ShardPlan, rank: int, *, alone: bool = True
) -> AttentionSpec:
    """Return the specification of a rank; see `shard`, also for errors."""
    heads = local_heads(spec, plan, rank)
    if alone and plan.tensor > 1:
        _check_alone(spec)
    out_bias = spec.out_bias
    if spec.out_proj and rank % plan.tensor != 0:
        out_bias = False  # the first rank adds it, because outputs are summed
    return replace(
        spec, num_heads=len(heads.queries), num_kv_heads=len(heads.keys), out_bias=out_bias
    )


def shard(
    weights: Mapping[str, Any],
    spec: AttentionSpec,
    plan: ShardPlan,
    rank: int,
    *,
    alone: bool = True,
) -> tuple[Weights, AttentionSpec]:
    """Return the exact weights of a rank, and the specification of its layer.

    The outputs of all ranks that divide the heads, each for the whole input or its part of the
    tokens, add up to the output of the layer; without out_proj, they concatenate to it. Masks and
    biases with an axis of heads are divided like query heads.

    Each of R ranks has N / R consecutive query heads, with their rows of q_proj, gate_proj and,
    with latents, q_b_proj and kv_b_proj; their columns of out_proj and of a relative bias; and
    their sinks. It also has their key/value heads, with the rows of k_proj and v_proj: K / R of
    them, or one that it shares with other ranks. Norms with weights per head, or over the width of
    all heads, are divided in the same way. Other norms and projections to latents are replicated.

    Only the first rank has the bias of out_proj, so that it is added once, bit for bit. The
    specification of the others has none, so that they do not train a copy.

    Args:
        weights: canonical weights of the whole layer, as arrays of any framework.
        spec: whole layer.
        plan: division of the layer.
        rank: index of the rank, from 0.
        alone: the rank's layer can be computed independently. False is for ranks that exchange more
            than outputs: mean squares of norms over the width, slopes of ALiBi, or output dropout.
            The specification then describes the weights of the rank, not its whole computation.

    Returns:
        Canonical weights of the rank, NumPy arrays of the same dtype, and their specification.

    Raises:
        TypeError: if an argument has the wrong type, or the weights are not floating-point arrays
            of one dtype.
        ValueError: if the weights do not fit the spec, the rank does not exist, or the query
            heads do not divide evenly. With `alone`, also if no specification describes the rank's
            computation: norms over the width of all heads, which need a sum over ranks; ALiBi,
            whose slopes depend on the number of all heads; and dropout of summed outputs.

    Source: Megatron-LM, arXiv:1909.08053, section 3.

    Example:
        >>> spec = parity.AttentionSpec(64, 8)
        >>> plan = parity.ShardPlan(tensor=2)
        >>> weights, spec_of_rank = parity.shard(parity.random_weights(spec), spec, plan, rank=1)
        >>> weights["q_proj.weight"].shape, spec_of_rank.num_heads
        ((32, 64), 4)
    """
    own_spec = shard_spec(spec, plan, rank, alone=alone)
    heads = local_heads(spec, plan, rank)
    weights = check_weights(weights, spec)
    own_weights: Weights = {}
    for name, shape in own_spec.weight_shapes.items():
        own_weights[name] = np.empty(shape, weights[name].dtype)
        # Both are views with heads as the first axis, so that writing one fills the rank's weight.
        own_heads = _by_heads(name, own_weights[name], own_spec)
        all_heads = _by_heads(name, weights[name], spec)
        own_heads[...] = all_heads[_heads_in(name, spec, heads)]
    return own_weights, own_spec


def unshard(shards: Sequence[Mapping[str, Any]], spec: AttentionSpec, plan: ShardPlan) -> Weights:
    """Return the weights of a layer from the weights of all ranks.

    This is the exact inverse of `shard`, with or without `alone`.

    Args:
        shards: canonical weights of each rank, in order, as arrays of any framework.
        spec: whole layer.
        plan: division of the layer.

    Returns:
        Canonical weights of the whole layer, as NumPy arrays.

    Raises:
        TypeError, ValueError: see `shard` without `alone`; also if a rank is missing, or replicated
            weights differ between ranks.

    Example:
        >>> spec = parity.AttentionSpec(64, 8)
        >>> weights = parity.random_weights(spec)
        >>> plan = parity.ShardPlan(tensor=2)
        >>> shards = [parity.shard(weights, spec, plan, rank)[0] for rank in range(2)]
        >>> whole = parity.unshard(shards, spec, plan)
        >>> np.array_equal(whole["q_proj.weight"], weights["q_proj.weight"])
        True
    """
    _check(spec, plan, 0)
    if len(shards) != plan.num_ranks:
        raise InputError("shards", "have one entry per rank", f"{len(shards)} of them and {plan}")
    ranks = [_checked(weights, spec, plan, rank) for rank, weights in enumerate(shards)]
    dtype = _common_dtype([weights for weights, _ in ranks])
    whole = {name: np.empty(shape, dtype) for name, shape in spec.weight_shapes.items()}
    for name, weight in whole.items():
        _fill(name, _by_heads(name, weight, spec), ranks, spec, plan)
    return whole


def _common_dtype(shards: Sequence[Weights]) -> np.dtype:
    """Return the dtype of all weights, or raise an error if there are several."""
    dtypes: dict[np.dtype, None] = {}
    for weights in shards:
        for weight in weights.values():
            dtypes[weight.dtype] = None
    if len(dtypes) > 1:
        raise InputTypeError("shards", "have one dtype", str(sorted(map(str, dtypes))))
    return next(iter(dtypes))


def _fill(
    name: str,
    heads: np.ndarray,
    ranks: Sequence[tuple[Weights, AttentionSpec]],
    spec: AttentionSpec,
    plan: ShardPlan,
) -> None:
    """Fill the heads of a weight with the heads of all ranks, which must agree on shared ones."""
    parts = []
    for rank, (weights, own_spec) in enumerate(ranks):
        if name in weights:  # only the first rank has the bias of out_proj
            own_heads = _heads_in(name, spec, local_heads(spec, plan, rank))
            part = _by_heads(name, weights[name], own_spec)
            parts.append((rank, own_heads, part))
            heads[own_heads] = part
    # Only now, because each rank has overwritten what it shares with earlier ones. Bytes are
    # compared, so that a NaN equals itself and 0 differs from -0.
    for rank, own_heads, part in parts:
        if heads[own_heads].tobytes() != part.tobytes():
            raise InputError(
                name, "be equal on all ranks that share it", f"different values on rank {rank}"
            )


# ---- Validation ----------------------------------------------------------------------------------


def _check(spec: AttentionSpec, plan: ShardPlan, rank: int) -> None:
    """Reject a rank that does not exist, and heads that cannot be divided."""
    check_spec(spec)
    if not isinstance(plan, ShardPlan):
        raise InputTypeError("plan", "be a ShardPlan", plan=plan)
    if as_count("rank", rank, 0) >= plan.num_ranks:
        raise InputError("rank", "be below the number of ranks", rank=rank, plan=plan)
    if plan.tensor == 1:
        return
    if spec.num_heads % plan.tensor:
        raise InputError(
            "num_heads",
            "be a multiple of the number of ranks",
            num_heads=spec.num_heads,
            tensor=plan.tensor,
        )


def _check_alone(spec: AttentionSpec) -> None:
    """Reject a layer whose parts no specification describes."""
    for name in NORMS:
        norm = getattr(spec, name)
        if norm is not None and norm.over == "width":
            raise InputError(
                name,
                "be over='head' for a rank to compute its part alone, since a norm over the "
                "width of all heads needs a sum over ranks",
                {name: norm, "alone": True},
            )
    if spec.alibi is not None:
        raise InputError(
            "alibi",
            "be None for a rank to compute its part alone, since its slopes depend on the number "
            "of all heads",
            alibi=spec.alibi,
            alone=True,
        )
    if spec.output_dropout and spec.out_proj:
        raise InputError(
            "output_dropout",
            "be 0 for a rank to compute its part alone, since dropout follows the sum over ranks",
            output_dropout=spec.output_dropout,
            alone=True,
        )


def _checked(
    weights: Mapping[str, Any], spec: AttentionSpec, plan: ShardPlan, rank: int
) -> tuple[Weights, AttentionSpec]:
    """Return the weights of a rank, as NumPy arrays, and its specification."""
    own_spec = shard_spec(spec, plan, rank, alone=False)
    try:
        return check_weights(weights, own_spec), own_spec
    except InputError as error:
        raise error.within(f"rank {rank}") from None


# ---- Views ---------------------------------------------------------------------------------------


def _by_heads(name: str, weight: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """Return a view of a weight with its heads on the first axis.

    A weight without heads counts as one head.
    """
    axis = axis_of_heads(name, spec)
    if axis is None:
        return weight[None]
    count = spec.num_kv_heads if _is_of_keys(name) else spec.num_heads
    before, size, after = weight.shape[:axis], weight.shape[axis], weight.shape[axis + 1 :]
    heads = weight.reshape(*before, count, size // count, *after)
    return np.moveaxis(heads, axis, 0)


def _heads_in(name: str, spec: AttentionSpec, heads: LocalHeads) -> list[int]:
    """Return the heads of a weight that a rank has."""
    if axis_of_heads(name, spec) is None:
        return [0]
    return heads.keys if _is_of_keys(name) else list(heads.queries)


def _is_of_keys(name: str) -> bool:
    """Return whether the heads of a weight are key/value heads."""
    return name.partition(".")[0] in OF_KEYS
