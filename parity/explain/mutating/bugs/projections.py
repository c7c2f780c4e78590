"""Bugs in projection weights: of a module, or passed to a function, separately or in a mapping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mha_spec import Rope
from parity.explain.conformance.signatures import PROJECTIONS
from parity.explain.mutating.bugs.inputs import ORDERS, SCALES, Divisor
from parity.explain.mutating.bugs.rope import has_rope
from parity.explain.mutating.calls import Call, Injection, Run, taken
from parity.explain.mutating.compare import Unfit
from parity.explain.mutating.trials import with_order_tried
from parity.explain.mutating.weights import Arrays, Projections, projections_in

HeadOrder = Callable[[np.ndarray], np.ndarray]
"""Returns indices of features, heads by H, in another order."""

Change = Callable[[Projections], Arrays]
"""Returns the canonical weights that a bug changes."""


def _with(change: Change, *, depends_on_heads: bool) -> Callable[[Call], Run]:
    """Make a bug in canonical weights.

    Args:
        change: the bug.
        depends_on_heads: whether it needs to know which features belong to which head. Otherwise
            the axes of separate kernels do not matter: a transposed one is transposed either way.
    """

    def make(call: Call) -> Run:
        candidates = projections_in(call)
        # All candidates have the same heads. So whether the bug fits shows before any trial.
        change(candidates[0])
        is_packed = candidates[0].named.has_packed

        def run(function: Callable[[Call], Any]) -> Any:
            if depends_on_heads or is_packed:
                projections = with_order_tried(function, candidates)
            else:
                projections = candidates[0]
            return projections.run(function, change(projections))

        return run

    return make


def _transposed(projection: str) -> Change:
    """Transpose a square kernel."""
    name = f"{projection}.weight"

    def change(weights: Projections) -> Arrays:
        kernel = weights[name]
        _check_square(projection, kernel)
        return {name: kernel.swapaxes(0, 1)}

    return change


def _check_square(projection: str, kernel: Any) -> None:
    """Raise `Unfit` if a kernel is not square."""
    if kernel.shape[0] != kernel.shape[1]:
        raise Unfit(f"its {projection} is not square: {tuple(kernel.shape)}")


def _swapped(first_letter: str, second_letter: str) -> Change:
    def change(weights: Projections) -> Arrays:
        changed = {}
        for leaf in ("weight", "bias"):
            first, second = f"{first_letter}_proj.{leaf}", f"{second_letter}_proj.{leaf}"
            if leaf == "bias" and first not in weights and second not in weights:
                continue
            shapes = tuple(weights[first].shape), tuple(weights[second].shape)
            if shapes[0] != shapes[1]:
                raise Unfit(
                    f"its {first_letter}_proj and {second_letter}_proj differ in shape: "
                    f"{shapes[0]} and {shapes[1]}"
                )
            changed[first] = weights[second]
            changed[second] = weights[first]
        return changed

    return change


def _without_bias(projection: str) -> Change:
    name = f"{projection}.bias"
    return lambda weights: {name: weights[name] * 0}


def _no_out_proj(weights: Projections) -> Arrays:
    kernel = weights["out_proj.weight"]
    _check_square("out_proj", kernel)
    # Plus zero times the kernel, so that it has the dtype and the gradients of the kernel.
    identity = weights.call.array(np.eye(len(kernel), dtype=np.float32), like=kernel) + kernel * 0
    changed = {"out_proj.weight": identity}
    if "out_proj.bias" in weights:
        changed["out_proj.bias"] = weights["out_proj.bias"] * 0
    return changed


def _scaled(divisor: Divisor) -> Change:
    """Scale queries in their projection."""

    def change(weights: Projections) -> Arrays:
        head_dim = weights.spec.head_dim
        right = math.sqrt(head_dim)
        wrong = divisor(right, head_dim, weights.spec.q_width)
        if math.isclose(wrong, right):
            raise Unfit("the scale is 1 with and without it")
        names = [name for name in ("q_proj.weight", "q_proj.bias") if name in weights]
        return {name: weights[name] * (right / wrong) for name in names}

    return change


# ---- Heads ---------------------------------------------------------------------------------------


def _reordered(weights: Projections, projection: str, order: HeadOrder) -> Arrays:
    """Return a projection with the features of its heads in another order; for `out_proj`, its
    input features.
    """
    spec = weights.spec
    size = spec.head_dim if projection in ("q_proj", "k_proj") else spec.value_head_dim
    kernel, axis = weights[f"{projection}.weight"], int(projection == "out_proj")
    places = order(np.arange(kernel.shape[axis]).reshape(-1, size)).ravel()
    changed = {f"{projection}.weight": taken(kernel, places, axis)}
    bias = f"{projection}.bias"
    if projection != "out_proj" and bias in weights:
        changed[bias] = taken(weights[bias], places, 0)
    return changed


def _heads(projection: str, order: HeadOrder, fewest: int) -> Change:
    def places(features: np.ndarray) -> np.ndarray:
        count = len(features)
        if count < fewest:
            raise Unfit(f"it has {count} head{'s' * (count != 1)}, and {fewest} are needed")
        return order(features)

    return lambda weights: _reordered(weights, projection, places)


def _tiled(weights: Projections) -> Arrays:
    """Make query head n use key/value head n % K, by computing it in the place of a head that uses
    that one.
    """
    num_heads, num_kv_heads = weights.spec.num_heads, weights.spec.num_kv_heads
    if not 1 < num_kv_heads < num_heads:
        raise Unfit(f"it has {num_heads} query heads and {num_kv_heads} key/value heads")

    def order(features: np.ndarray) -> np.ndarray:
        return features.reshape(-1, num_kv_heads, features.shape[-1]).swapaxes(0, 1)

    return _reordered(weights, "q_proj", order) | _reordered(weights, "out_proj", order)


def _after_softmax(weights: Projections) -> Arrays:
    """Apply the scale to values instead of scores."""
    changed = {}
    scale = weights.spec.head_dim**-0.5
    for projection, factor in (("q_proj", 1 / scale), ("v_proj", scale)):
        changed[f"{projection}.weight"] = weights[f"{projection}.weight"] * factor
        if f"{projection}.bias" in weights:
            changed[f"{projection}.bias"] = weights[f"{projection}.bias"] * factor
    return changed


def _pairs(order: HeadOrder) -> Change:
    """Reorder the features of each head of q and k, which has an effect only with RoPE."""

    def change(weights: Projections) -> Arrays:
        if not has_rope(weights.call):
            raise Unfit("it has no recognized RoPE")
        if weights.spec.head_dim % 4:
            raise Unfit(f"its heads have {weights.spec.head_dim} features")
        return _reordered(weights, "q_proj", order) | _reordered(weights, "k_proj", order)

    return change


def _interleaved(heads: np.ndarray) -> np.ndarray:
    return heads[:, Rope().pair_order(heads.shape[1])]


def _deinterleaved(heads: np.ndarray) -> np.ndarray:
    return heads[:, np.argsort(Rope().pair_order(heads.shape[1]))]


def _injection(name: str, change: Change, *needs: str, depends_on_heads: bool = False) -> Injection:
    made = _with(change, depends_on_heads=depends_on_heads)
    return Injection(name, ("layer", "projections", *needs), made)


def _head_injections() -> tuple[Injection, ...]:
    changes: dict[str, Change] = {}
    for letter in "qkv":
        for word, (order, fewest) in ORDERS.items():
            changes[f"{letter}-heads-{word}"] = _heads(f"{letter}_proj", order, fewest)
    changes["kv-heads-tiled"] = _tiled
    changes["scale-after-softmax"] = _after_softmax
    changes["rope-weights-interleaved"] = _pairs(_interleaved)
    changes["rope-weights-deinterleaved"] = _pairs(_deinterleaved)
    return tuple(
        _injection(name, change, depends_on_heads=True) for name, change in changes.items()
    )


HEADS_REORDERED = _head_injections()
"""Bugs in layers by reordered features of their projections."""

# A bias of keys shifts all scores of a query equally.
BIASES_THAT_MATTER = ("q_proj", "v_proj", "out_proj")

PROJECTED = (
    *(_injection(f"{name}-transposed", _transposed(name)) for name in PROJECTIONS),
    *(_injection(f"{a}-{b}-swapped", _swapped(a, b)) for a, b in ("qk", "kv", "qv")),
    *(
        _injection(f"{name}-bias-missing", _without_bias(name), "biases")
        for name in BIASES_THAT_MATTER
    ),
    *(_injection(name, _scaled(divisor)) for name, divisor in SCALES.items()),
    _injection("out-proj-missing", _no_out_proj),
)
"""Bugs in weights."""
