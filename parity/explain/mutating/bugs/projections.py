"""Bugs in projection weights: of a module, or passed to a function, separately or in a mapping."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.explain.conformance.signatures import HEAD_DIMS, HEADS, KV_HEADS, PROJECTIONS
from parity.explain.mutating.bugs.inputs import ORDERS, SCALES, Divisor
from parity.explain.mutating.bugs.rope import has_rope
from parity.explain.mutating.calls import Call, Injection, Run, taken
from parity.explain.mutating.compare import Unfit
from parity.explain.mutating.held import PACKED_PROJECTION, Arrays, Held, held_in
from parity.explain.mutating.packed import candidates, parts_of, unpacked

Order = Callable[[np.ndarray], np.ndarray]
"""Returns indices of features, heads by H, in another order."""


@dataclass(frozen=True)
class Weights:
    """The projections of a call, and what is known about its heads.

    Attributes:
        call: the call.
        held: its projections, unpacked.
    """

    call: Call
    held: Held

    def __contains__(self, leaf: str) -> bool:
        return leaf in self.held.arrays

    def __getitem__(self, leaf: str) -> Any:
        if leaf not in self.held.arrays:
            name = leaf.partition(".")[0]
            is_there = f"{name}.weight" in self.held.arrays
            raise Unfit(
                f"its {name} has no bias" if is_there else f"no {name} is known among its weights"
            )
        return self.held.arrays[leaf]

    @property
    def num_heads(self) -> int | None:
        """Return N, as specified by the module or the call."""
        return _told(self.call, self.held, HEADS)

    @property
    def width(self) -> int:
        """Return N * H."""
        kernel = self["q_proj.weight"]
        if kernel.ndim == 3:
            return kernel.shape[-2] * kernel.shape[-1]
        if "q_proj.weight" in self.held.in_first:
            return kernel.shape[1]
        if "q_proj.weight" in self.held.out_first or kernel.shape[0] == kernel.shape[1]:
            return kernel.shape[0]
        raise Unfit(f"the axis of heads in q_proj {tuple(kernel.shape)} is unknown")

    def reordered(self, projection: str, order: Order) -> Arrays:
        """Return a projection with reordered features; for `out_proj`, its input features."""
        name, bias = f"{projection}.weight", f"{projection}.bias"
        kernel, axis = self[name], self._axis_of_heads(projection)
        matrix = _matrix(projection, kernel)
        places = order(np.arange(matrix.shape[axis]).reshape(-1, self.head_dim)).ravel()
        changed = {name: taken(matrix, places, axis).reshape(kernel.shape)}
        if projection != "out_proj" and bias in self:
            changed[bias] = taken(self[bias].reshape(-1), places, 0).reshape(self[bias].shape)
        return changed

    def _axis_of_heads(self, projection: str) -> int:
        kernel, name = self[f"{projection}.weight"], f"{projection}.weight"
        is_last = projection == "out_proj"
        if kernel.ndim == 3:
            return 0 if is_last else 1
        if name in self.held.out_first or name in self.held.in_first:
            return int((name in self.held.in_first) != is_last)
        if not is_last and self.width in kernel.shape and kernel.shape[0] != kernel.shape[1]:
            return tuple(kernel.shape).index(self.width)
        raise Unfit(f"its kernels may be (in, out) or (out, in), got {tuple(kernel.shape)}")

    @property
    def head_dim(self) -> int:
        """Return H."""
        kernel = self["q_proj.weight"]
        if kernel.ndim == 3:
            return kernel.shape[-1]
        if size := _told(self.call, self.held, HEAD_DIMS):
            return size
        if not self.num_heads:
            raise Unfit(
                f"the number of heads is unknown: neither it nor its module has one of "
                f"{', '.join(HEADS)}"
            )
        return self.width // self.num_heads


def _told(call: Call, held: Held, names: tuple[str, ...]) -> int | None:
    """Return a number from attributes of the module, its configuration or the call, by one of some
    names.
    """
    holders = [each for owner in held.owners for each in (owner, getattr(owner, "config", None))]
    numbers = [getattr(holder, name, None) for holder in holders for name in names]
    numbers += [call.named(name) for name in names]
    return next((number for number in numbers if isinstance(number, int) and number > 0), None)


def _with(change: Callable[[Weights], Arrays]) -> Callable[[Call], Run | None]:
    """Make a bug in the arrays; `change` returns the changed ones."""

    def make(call: Call) -> Run:
        held = held_in(call)
        if f"{PACKED_PROJECTION}.weight" not in held.arrays:
            changed = change(Weights(call, held))
            return lambda function: held.run(function, changed)
        num_heads = _told(call, held, HEADS)
        heads = (num_heads, _told(call, held, KV_HEADS) or num_heads)
        for parts in candidates(held, heads):  # all have the same shapes
            change(Weights(call, unpacked(held, parts)))
            break

        def run(function: Callable[[Call], Any]) -> Any:
            apart = unpacked(held, parts_of(call, function, held, heads))
            return apart.run(function, change(Weights(call, apart)))

        return run

    return make


def _transposed(projection: str) -> Callable[[Weights], Arrays]:
    """Transpose a square kernel; one of three axes is first reshaped to two."""
    name = f"{projection}.weight"

    def change(weights: Weights) -> Arrays:
        return {
            name: _square(projection, weights[name]).swapaxes(0, 1).reshape(weights[name].shape)
        }

    return change


def _matrix(projection: str, kernel: Any) -> Any:
    """Return a kernel with two axes; in (in, N, H) or (N, H, out), heads and H are merged."""
    if kernel.ndim != 3:
        return kernel
    return kernel.reshape((-1, kernel.shape[-1]) if projection == "out_proj" else (len(kernel), -1))


def _square(projection: str, kernel: Any) -> Any:
    """Return a kernel as a square matrix.

    Raises:
        Unfit: if it is not square.
    """
    matrix = _matrix(projection, kernel)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise Unfit(f"its {projection} is not square: {tuple(kernel.shape)}")
    return matrix


def _swapped(one: str, other: str) -> Callable[[Weights], Arrays]:
    def change(weights: Weights) -> Arrays:
        changed = {}
        for leaf in ("weight", "bias"):
            first, second = f"{one}_proj.{leaf}", f"{other}_proj.{leaf}"
            if leaf == "bias" and first not in weights and second not in weights:
                continue
            if tuple(weights[first].shape) != tuple(weights[second].shape):
                shapes = " and ".join(str(tuple(weights[name].shape)) for name in (first, second))
                raise Unfit(f"its {one}_proj and {other}_proj differ in shape: {shapes}")
            changed |= {first: weights[second], second: weights[first]}
        return changed

    return change


def _without_bias(projection: str) -> Callable[[Weights], Arrays]:
    name = f"{projection}.bias"
    return lambda weights: {name: weights[name] * 0}


def _no_out_proj(weights: Weights) -> Arrays:
    kernel = weights["out_proj.weight"]
    size = _square("out_proj", kernel).shape[0]
    identity = (
        weights.call.array(np.eye(size, dtype=np.float32), like=kernel).reshape(kernel.shape)
        + kernel * 0
    )
    return {"out_proj.weight": identity} | (
        _without_bias("out_proj")(weights) if "out_proj.bias" in weights else {}
    )


def _scaled(divisor: Divisor) -> Callable[[Weights], Arrays]:
    """Scale queries in their projection."""

    def change(weights: Weights) -> Arrays:
        right = math.sqrt(weights.head_dim)
        wrong = divisor(right, weights.head_dim, weights.width)
        if math.isclose(wrong, right):
            raise Unfit("the scale is 1 with and without it")
        leaves = [leaf for leaf in ("q_proj.weight", "q_proj.bias") if leaf in weights]
        return {leaf: weights[leaf] * (right / wrong) for leaf in leaves}

    return change


# ---- Heads ---------------------------------------------------------------------------------------


def _heads(projection: str, order: Order, fewest: int) -> Callable[[Weights], Arrays]:
    def places(features: np.ndarray) -> np.ndarray:
        count = len(features)
        if count < fewest:
            raise Unfit(f"it has {count} head{'s' * (count != 1)}, and {fewest} are needed")
        return order(features)

    return lambda weights: weights.reordered(projection, places)


def _tiled(weights: Weights) -> Arrays:
    """Make query head n use key/value head n % K, by computing it in the place of a head that uses
    that one.
    """
    num_heads = weights.width // weights.head_dim
    num_kv_heads = (
        math.prod(weights["k_proj.weight"].shape)
        * num_heads
        // math.prod(weights["q_proj.weight"].shape)
    )
    if not 1 < num_kv_heads < num_heads:
        raise Unfit(f"it has {num_heads} query heads and {num_kv_heads} key/value heads")

    def order(features: np.ndarray) -> np.ndarray:
        return features.reshape(-1, num_kv_heads, weights.head_dim).swapaxes(0, 1)

    return weights.reordered("q_proj", order) | weights.reordered("out_proj", order)


def _after_softmax(weights: Weights) -> Arrays:
    """Apply the scale to values instead of scores."""
    factors = {"q_proj": weights.head_dim**0.5, "v_proj": weights.head_dim**-0.5}
    leaves = [
        (f"{name}.{leaf}", factor)
        for name, factor in factors.items()
        for leaf in ("weight", "bias")
    ]
    return {
        leaf: weights[leaf] * factor
        for leaf, factor in leaves
        if leaf.endswith(".weight") or leaf in weights
    }


def _pairs(order: Order) -> Callable[[Weights], Arrays]:
    """Reorder the features of each head of q and k, which has an effect only with RoPE."""

    def change(weights: Weights) -> Arrays:
        if not has_rope(weights.call):
            raise Unfit("it has no recognized RoPE")
        if weights.head_dim % 4:
            raise Unfit(f"its heads have {weights.head_dim} features")
        return weights.reordered("q_proj", order) | weights.reordered("k_proj", order)

    return change


def _injection(name: str, change: Callable[[Weights], Arrays], *needs: str) -> Injection:
    return Injection(name, ("layer", "projections", *needs), _with(change))


HEADS_REORDERED = (
    *(
        _injection(f"{name}-heads-{word}", _heads(f"{name}_proj", order, fewest))
        for name in "qkv"
        for word, (order, fewest) in ORDERS.items()
    ),
    _injection("kv-heads-tiled", _tiled),
    _injection("scale-after-softmax", _after_softmax),
    _injection(
        "rope-weights-interleaved", _pairs(lambda x: x.reshape(len(x), 2, -1).swapaxes(1, 2))
    ),
    _injection(
        "rope-weights-deinterleaved", _pairs(lambda x: x.reshape(len(x), -1, 2).swapaxes(1, 2))
    ),
)
"""Bugs in layers by reordered features of their projections."""

PROJECTED = (
    *(_injection(f"{name}-transposed", _transposed(name)) for name in PROJECTIONS),
    *(
        _injection(f"{a}-{b}-swapped", _swapped(a, b))
        for a, b in (("q", "k"), ("k", "v"), ("q", "v"))
    ),
    *(
        _injection(f"{name}-bias-missing", _without_bias(name), "biases")
        for name in (
            "q_proj",
            "v_proj",
            "out_proj",
        )  # a key bias shifts all scores of a query equally
    ),
    *(_injection(name, _scaled(divisor)) for name, divisor in SCALES.items()),
    _injection("out-proj-missing", _no_out_proj),
)
"""Bugs in weights."""
