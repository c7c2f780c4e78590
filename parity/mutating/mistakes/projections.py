"""Mistakes in the weights of projections: of a module, or given to a function, one by one or in a mapping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.conformance.discover import HEADS
from parity.mutating.calls import Call, Function, Planted, Run
from parity.mutating.view import BIASES, PROJECTIONS

LEAVES = {"weight": "weight", "kernel": "weight", "w": "weight", "bias": "bias", "b": "bias"}
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Held:
    """The projections of a call.

    Attributes:
        arrays: by `q_proj.weight`, `q_proj.bias` and so on; kernels in whatever order of their axes.
        run: calls with some of them changed.
    """

    arrays: Arrays
    run: Callable[[Function, Arrays], Any]


def _leaf(words: list[str]) -> str:
    """`q_proj.weight` for what a path of names calls so; empty if it is no projection's."""
    if not words:
        return ""
    last = words[-1]
    leaf = LEAVES.get(last, "")
    for projection, aliases in PROJECTIONS.items():
        if leaf and len(words) > 1 and words[-2] in aliases:
            return f"{projection}.{leaf}"
        if last in aliases:
            return f"{projection}.weight"
        if last in BIASES[projection]:
            return f"{projection}.bias"
    return ""


def _held(call: Call) -> Held | None:
    """Where a call has its projections: its module, a mapping of weights, or parameters."""
    if call.owner is not None:
        return _of_torch(call) if hasattr(call.owner, "named_parameters") else _of_nnx(call)
    mapping = call.get("weights")
    if isinstance(mapping, Mapping):
        return _of_mapping(call, mapping)
    data = {call.view.roles.get(role) for role in ("query", "key", "value")}
    names = [name for name in {*call.view.order, *call.kwargs} if name not in data]
    places = {leaf: name for name in names if (leaf := _leaf([name])) and call.named(name) is not None}
    return Held(
        {leaf: call.named(name) for leaf, name in places.items()},
        lambda function, changed: function(call.but_named({places[leaf]: x for leaf, x in changed.items()})),
    )


def _of_torch(call: Call) -> Held:
    from torch.func import functional_call

    named = dict(call.owner.named_parameters())
    places = {leaf: name for name in named if (leaf := _leaf(name.split(".")))}

    def run(function: Function, changed: Arrays) -> Any:
        other = {places[leaf]: x for leaf, x in changed.items()}
        return functional_call(call.owner, other, call.args, dict(call.kwargs))

    return Held({leaf: named[name] for leaf, name in places.items()}, run)


def _of_nnx(call: Call) -> Held:
    found = {}
    for projection, aliases in PROJECTIONS.items():
        module = next((m for alias in aliases if (m := getattr(call.owner, alias, None)) is not None), None)
        for leaf, name in (("weight", "kernel"), ("bias", "bias")):
            if getattr(module, name, None) is not None:
                found[f"{projection}.{leaf}"] = (module, name, getattr(module, name))

    def run(function: Function, changed: Arrays) -> Any:
        with _replaced([(*found[leaf], x) for leaf, x in changed.items()]):
            return function(call)

    return Held({leaf: parameter[...] for leaf, (_, _, parameter) in found.items()}, run)


@contextmanager
def _replaced(places: list[tuple[Any, str, Any, Any]]) -> Iterator[None]:
    """Parameters of modules with other values, for a while."""
    for module, name, parameter, x in places:
        setattr(module, name, type(parameter)(x))
    try:
        yield
    finally:
        for module, name, parameter, _ in places:
            setattr(module, name, parameter)


def _of_mapping(call: Call, mapping: Mapping[str, Any]) -> Held:
    """Of a flat mapping, its names with dots in them, or of one that holds others."""
    paths: dict[str, tuple[str, ...]] = {}
    for name, value in mapping.items():
        inner = [(name, key) for key in value] if isinstance(value, Mapping) else [(name,)]
        for path in inner:
            if leaf := _leaf(".".join(map(str, path)).split(".")):
                paths[leaf] = path

    def run(function: Function, changed: Arrays) -> Any:
        other = {name: dict(value) if isinstance(value, Mapping) else value for name, value in mapping.items()}
        for leaf, x in changed.items():
            *outer, last = paths[leaf]
            (other[outer[0]] if outer else other)[last] = x
        return function(call.but(weights=other))

    def at(path: tuple[str, ...]) -> Any:
        return mapping[path[0]] if len(path) == 1 else mapping[path[0]][path[1]]

    return Held({leaf: at(path) for leaf, path in paths.items()}, run)


def _with(change: Callable[[Call, Arrays], Arrays | None]) -> Callable[[Call], Run | None]:
    """A mistake in the arrays; `change` gives those that are other, or None."""

    def make(call: Call) -> Run | None:
        held = _held(call)
        changed = None if held is None or not held.arrays else change(call, held.arrays)
        return None if held is None or not changed else lambda function: held.run(function, changed)

    return make


def _is_square(x: Any) -> bool:
    return x is not None and x.ndim == 2 and x.shape[0] == x.shape[1]


def _transposed(projection: str) -> Callable[[Call, Arrays], Arrays | None]:
    name = f"{projection}.weight"
    return lambda _, arrays: {name: arrays[name].swapaxes(0, 1)} if _is_square(arrays.get(name)) else None


def _swapped(one: str, other: str) -> Callable[[Call, Arrays], Arrays | None]:
    def change(_: Call, arrays: Arrays) -> Arrays | None:
        changed = {}
        for leaf in ("weight", "bias"):
            first, second = arrays.get(f"{one}_proj.{leaf}"), arrays.get(f"{other}_proj.{leaf}")
            if getattr(first, "shape", None) != getattr(second, "shape", None):
                return None
            if first is not None:
                changed |= {f"{one}_proj.{leaf}": second, f"{other}_proj.{leaf}": first}
        return changed

    return change


def _without_bias(projection: str) -> Callable[[Call, Arrays], Arrays | None]:
    name = f"{projection}.bias"
    return lambda _, arrays: {name: arrays[name] * 0} if name in arrays else None


def _no_out_proj(call: Call, arrays: Arrays) -> Arrays | None:
    kernel: Any = arrays.get("out_proj.weight")
    if not _is_square(kernel):
        return None
    identity = call.array(np.eye(kernel.shape[0], dtype=np.float32), like=kernel) + kernel * 0
    return {"out_proj.weight": identity} | (_without_bias("out_proj")(call, arrays) or {})


def _width(call: Call, kernel: Any) -> int:
    """N * H, by a kernel (in, N, H), torch's (out, in) or JAX's (in, out)."""
    if kernel.ndim == 3:
        return kernel.shape[-2] * kernel.shape[-1]
    return kernel.shape[0 if call.view.framework == "torch" else -1]


def _head_dim(call: Call, kernel: Any) -> int | None:
    """H, by the number of heads that the module or the call says; None where the width of q is not to be seen."""
    if kernel.ndim == 3:
        return kernel.shape[-1]
    told = [getattr(call.owner, name, None) if call.owner is not None else call.named(name) for name in HEADS]
    num_heads = next((number for number in told if isinstance(number, int) and number > 0), None)
    if num_heads is None or (call.owner is None and not _is_square(kernel)):
        return None
    return _width(call, kernel) // num_heads


def _scaled(power: Callable[[int, int], float]) -> Callable[[Call, Arrays], Arrays | None]:
    """Queries multiplied where they are projected; `power` takes H and the width of q."""

    def change(call: Call, arrays: Arrays) -> Arrays | None:
        kernel = arrays.get("q_proj.weight")
        size = None if kernel is None else _head_dim(call, kernel)
        if not size:
            return None
        factor = power(size, _width(call, kernel))
        return {name: x * factor for name, x in arrays.items() if name.startswith("q_proj.")}

    return change


PROJECTED = (
    *(
        Planted(
            f"{name}-transposed",
            f"{name}'s square kernel is transposed",
            ("layer", "projections"),
            _with(_transposed(name)),
        )
        for name in PROJECTIONS
    ),
    *(
        Planted(
            f"{one}-{other}-swapped",
            f"the projections of {one} and {other} are exchanged",
            ("layer", "projections"),
            _with(_swapped(one, other)),
        )
        for one, other in (("q", "k"), ("k", "v"), ("q", "v"))
    ),
    *(
        Planted(
            f"{name}-bias-missing",
            f"the bias of {name} is missing",
            ("layer", "projections", "biases"),
            _with(_without_bias(name)),
        )
        for name in ("q_proj", "v_proj", "out_proj")  # one of keys adds the same to every score of a query
    ),
    *(
        Planted(name, about, ("layer", "projections"), _with(_scaled(power)))
        for name, about, power in (
            ("scale-missing", "the scale of the scores is missing", lambda size, _: size**0.5),
            ("scale-squared", "the scale is applied twice", lambda size, _: size**-0.5),
            ("scale-by-d-model", "the scale is 1 / sqrt(d_model)", lambda size, width: (size / width) ** 0.5),
        )
    ),
    Planted("out-proj-missing", "the output is not projected", ("layer", "projections"), _with(_no_out_proj)),
)
"""What is planted in weights."""
