"""Bugs in projection weights: of a module, or passed to a function, separately or in a mapping."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mha_spec import Rope
from parity.explain.conformance.signatures import PROJECTIONS
from parity.explain.mutating.bugs.rope import has_rope
from parity.explain.mutating.calls import Call, Function, Injection
from parity.explain.mutating.compare import Unfit
from parity.explain.mutating.trials import with_order_tried
from parity.explain.mutating.weights import Arrays, Projections, projections_in
from parity.measure.core.divisors import WRONG_DIVISORS, wrong_divisors
from parity.measure.core.orders import (
    HEAD_ORDERS,
    WrongHeadOrder,
    of_whole_heads,
    reordered,
    tiled_heads,
    within_heads,
)
from parity.measure.text import counted

Change = Callable[[Projections], Arrays]
"""Returns the canonical weights that a bug changes."""


class WeightsChanged:
    """A call with a bug in its canonical weights.

    Args:
        call: the call.
        change: the bug.
        depends_on_heads: whether it needs to know which features belong to which head. Otherwise
            the axes of separate kernels do not matter: a transposed one is transposed either way.

    Raises:
        Unfit: if the call has no such weights, or they do not allow the bug.
    """

    def __init__(self, call: Call, change: Change, *, depends_on_heads: bool) -> None:
        self.change = change
        self.candidates = projections_in(call)
        first = self.candidates[0]
        # All candidates have the same heads. So whether the bug fits shows before any trial.
        change(first)
        self.depends_on_order = depends_on_heads or first.named.has_packed

    def run(self, function: Function) -> Any:
        """Call the attention with the changed weights, in the order with which it computes.

        Raises:
            Unfit: if trials do not show the order.
        """
        projections = self.candidates[0]
        if self.depends_on_order:
            projections = with_order_tried(function, self.candidates)
        return projections.run(function, self.change(projections))


# ---- Whole kernels -------------------------------------------------------------------------------


def _transposed(weights: Projections, *, projection: str) -> Arrays:
    """Transpose a square kernel."""
    kernel = _square_kernel(weights, projection)
    return {f"{projection}.weight": kernel.swapaxes(0, 1)}


def _square_kernel(weights: Projections, projection: str) -> Any:
    """Return a kernel.

    Raises:
        Unfit: if it is not square.
    """
    kernel = weights[f"{projection}.weight"]
    if kernel.shape[0] != kernel.shape[1]:
        raise Unfit(f"its {projection} is not square: {tuple(kernel.shape)}")
    return kernel


def _exchanged(weights: Projections, *, first: str, second: str) -> Arrays:
    """Exchange the weights and biases of two projections."""
    changed = {}
    for leaf in ("weight", "bias"):
        first_name = f"{first}.{leaf}"
        second_name = f"{second}.{leaf}"
        if leaf == "bias" and first_name not in weights and second_name not in weights:
            continue
        first_shape = tuple(weights[first_name].shape)
        second_shape = tuple(weights[second_name].shape)
        if first_shape != second_shape:
            raise Unfit(
                f"its {first} and {second} differ in shape: {first_shape} and {second_shape}"
            )
        changed[first_name] = weights[second_name]
        changed[second_name] = weights[first_name]
    return changed


def _without_bias(weights: Projections, *, projection: str) -> Arrays:
    name = f"{projection}.bias"
    return {name: weights[name] * 0}


def _without_out_proj(weights: Projections) -> Arrays:
    """Let the output projection be the identity."""
    kernel = _square_kernel(weights, "out_proj")
    identity = weights.call.array(np.eye(len(kernel), dtype=np.float32), like=kernel)
    # Plus zero times the kernel, so that it has the dtype and the gradients of the kernel.
    changed = {"out_proj.weight": identity + kernel * 0}
    if "out_proj.bias" in weights:
        changed["out_proj.bias"] = weights["out_proj.bias"] * 0
    return changed


# ---- Scale ---------------------------------------------------------------------------------------


def _times(weights: Projections, projection: str, factor: float) -> Arrays:
    """Return the weight of a projection, and its bias if it has one, times a factor."""
    changed = {f"{projection}.weight": weights[f"{projection}.weight"] * factor}
    bias = f"{projection}.bias"
    if bias in weights:
        changed[bias] = weights[bias] * factor
    return changed


def _scaled(weights: Projections, *, bug: str) -> Arrays:
    """Divide scores by the wrong number of a bug, by scaling the projection of queries."""
    spec = weights.spec
    right = math.sqrt(spec.head_dim)
    wrong = wrong_divisors(spec.head_dim, spec.q_width)[bug]
    if math.isclose(wrong, right):
        raise Unfit("the scale is 1 with and without it")
    return _times(weights, "q_proj", right / wrong)


def _scaled_after_softmax(weights: Projections) -> Arrays:
    """Apply the scale to values instead of scores."""
    divisor = math.sqrt(weights.spec.head_dim)
    return _times(weights, "q_proj", divisor) | _times(weights, "v_proj", 1.0 / divisor)


# ---- Orders of features --------------------------------------------------------------------------


def _with_features_reordered(weights: Projections, projection: str, order: np.ndarray) -> Arrays:
    """Return a projection with its output features in a different order; for `out_proj`, its input
    features.
    """
    kernel = weights[f"{projection}.weight"]
    if projection == "out_proj":
        return {"out_proj.weight": reordered(kernel, order, 1)}
    changed = {f"{projection}.weight": reordered(kernel, order, 0)}
    bias = f"{projection}.bias"
    if bias in weights:
        changed[bias] = reordered(weights[bias], order, 0)
    return changed


def _with_heads_reordered(
    weights: Projections, *, projection: str, wrong: WrongHeadOrder
) -> Arrays:
    spec = weights.spec
    num_heads, head_dim = {
        "q_proj": (spec.num_heads, spec.head_dim),
        "k_proj": (spec.num_kv_heads, spec.head_dim),
        "v_proj": (spec.num_kv_heads, spec.value_head_dim),
    }[projection]
    if num_heads < wrong.fewest:
        raise Unfit(f"it has {counted(num_heads, 'head')}, and {wrong.fewest} are needed")
    order = of_whole_heads(wrong.order(num_heads), head_dim)
    return _with_features_reordered(weights, projection, order)


def _with_heads_tiled(weights: Projections) -> Arrays:
    """Make query head n use key/value head n % K, by computing it as a head that uses that one."""
    spec = weights.spec
    if not 1 < spec.num_kv_heads < spec.num_heads:
        raise Unfit(f"it has {spec.num_heads} query heads and {spec.num_kv_heads} key/value heads")
    head_order = tiled_heads(spec.num_heads, spec.num_kv_heads)
    order_of_queries = of_whole_heads(head_order, spec.head_dim)
    order_of_context = of_whole_heads(head_order, spec.value_head_dim)
    changed = _with_features_reordered(weights, "q_proj", order_of_queries)
    return changed | _with_features_reordered(weights, "out_proj", order_of_context)


def _with_pairs_reordered(weights: Projections, *, order: Callable[[int], np.ndarray]) -> Arrays:
    """Reorder the features of each head of q and k, which has an effect only with RoPE.

    Args:
        weights: the projections.
        order: returns the order of features for H.
    """
    if not has_rope(weights.call):
        raise Unfit("it has no recognized RoPE")
    spec = weights.spec
    if spec.head_dim % 4:
        raise Unfit(f"its heads have {spec.head_dim} features")
    feature_order = order(spec.head_dim)
    order_of_queries = within_heads(feature_order, spec.num_heads)
    order_of_keys = within_heads(feature_order, spec.num_kv_heads)
    changed = _with_features_reordered(weights, "q_proj", order_of_queries)
    return changed | _with_features_reordered(weights, "k_proj", order_of_keys)


def _interleaved(head_dim: int) -> np.ndarray:
    """Return the order of features for pairs that are halves: 0, H/2, 1, H/2 + 1, …"""
    return Rope(pairs="half").pair_order(head_dim)


def _deinterleaved(head_dim: int) -> np.ndarray:
    return np.argsort(_interleaved(head_dim))


# ---- All -----------------------------------------------------------------------------------------


def _injection(name: str, change: Change, *needs: str, depends_on_heads: bool = False) -> Injection:
    make = partial(WeightsChanged, change=change, depends_on_heads=depends_on_heads)
    return Injection(name, ("layer", "projections", *needs), make)


def _injections_of_reordered_features() -> tuple[Injection, ...]:
    changes: dict[str, Change] = {}
    for letter in "qkv":
        for wrong_order in HEAD_ORDERS:
            changes[f"{letter}-heads-{wrong_order.word}"] = partial(
                _with_heads_reordered, projection=f"{letter}_proj", wrong=wrong_order
            )
    changes["kv-heads-tiled"] = _with_heads_tiled
    changes["scale-after-softmax"] = _scaled_after_softmax
    changes["rope-weights-interleaved"] = partial(_with_pairs_reordered, order=_interleaved)
    changes["rope-weights-deinterleaved"] = partial(_with_pairs_reordered, order=_deinterleaved)
    return tuple(
        _injection(name, change, depends_on_heads=True) for name, change in changes.items()
    )


HEADS_REORDERED = _injections_of_reordered_features()
"""Bugs in layers by reordered features of their projections."""

# A bias of keys shifts all scores of a query equally.
BIASES_THAT_MATTER = ("q_proj", "v_proj", "out_proj")


def _injections_of_weights() -> tuple[Injection, ...]:
    injections = []
    for projection in PROJECTIONS:
        change = partial(_transposed, projection=projection)
        injections.append(_injection(f"{projection}-transposed", change))
    for first, second in ("qk", "kv", "qv"):
        change = partial(_exchanged, first=f"{first}_proj", second=f"{second}_proj")
        injections.append(_injection(f"{first}-{second}-swapped", change))
    for projection in BIASES_THAT_MATTER:
        change = partial(_without_bias, projection=projection)
        injections.append(_injection(f"{projection}-bias-missing", change, "biases"))
    for bug in WRONG_DIVISORS:
        injections.append(_injection(bug, partial(_scaled, bug=bug)))
    injections.append(_injection("out-proj-missing", _without_out_proj))
    return tuple(injections)


PROJECTED = _injections_of_weights()
"""Bugs in weights."""
