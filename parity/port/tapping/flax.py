"""Record attention layers of a Flax model by intercepting calls of nnx and linen modules."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from flax import linen, nnx

from mha_spec import InputError, InputTypeError
from parity.measure.core.arrays import to_numpy
from parity.port.tapping.record import Tapped, TappedCall, TappedLayer, chosen

HEADS = {"query": "q", "key": "k", "value": "v", "query_ln": "q", "key_ln": "k"}
"""Submodules of Flax's own attention layers that return heads (B, T, N, H), by name; the last call
counts.

In other libraries, submodules of these names may return heads before norms and RoPE, so they are
ignored there.
"""

ATTENTION = "Attention"

POSITIONS = ("positions", "inputs_positions", "segment_pos")
"""Names of the parameters of attention layers that receive positions."""


@contextmanager
def tap_flax(model: Any, patterns: tuple[str, ...] | None) -> Iterator[Tapped]:
    """Record the attention layers of a Flax model: see `parity.tap`."""
    tapped = Tapped([], {}, type(model).__name__)
    with ExitStack() as stack:
        _listen_to_sow(stack)
        if isinstance(model, nnx.Module):
            _tap_nnx(model, patterns, tapped, stack)
            yield tapped
            return
        tap = _LinenTap(patterns, tapped)
        stack.enter_context(linen.intercept_methods(tap.intercept))
        yield tapped
        tap.finish()


class _FlaxListener:
    """Record inputs and outputs of one layer during a call."""

    def __init__(self, layer: TappedLayer, module: Any, kind: type) -> None:
        self.layer, self.module = layer, module
        self.is_flaxs = any(
            each.__module__.startswith("flax.") and ATTENTION in each.__name__
            for each in kind.__mro__
        )
        self.values: dict[str, np.ndarray] = {}
        self.past: int | None = 0

    def around(
        self,
        module: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the layer, and record its inputs and outputs."""
        self._called(module, function, args, kwargs)
        _OPEN.append(self)
        try:
            result = function(*args, **kwargs)
        finally:
            _OPEN.remove(self)
        arrays = [
            each for each in (result if isinstance(result, tuple) else (result,)) if _is_array(each)
        ]
        if arrays:  # some return their cache first
            self.values["output"] = _values_of(arrays[0])
        if _is_ours(module) and arrays[1:]:
            self.values["attn_weights"] = _values_of(arrays[1])
        self.layer.calls.append(TappedCall(self.values, self.past))
        return result

    def _called(
        self,
        module: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        told = _arguments(function, args, kwargs)
        arrays = {name: x for name, x in told.items() if _is_array(x)}
        name, given = next(iter(arrays.items()), ("", None))
        self.values = {} if given is None else {"input": _values_of(given)}
        other = next(
            (arrays[each] for each in ("inputs_k", "inputs_kv", "key") if each in arrays), None
        )
        if other is not None and other is not given and _differ(other, given):
            self.values["key_input"] = _values_of(other)
        made_of = arrays.get("inputs_v", arrays.get("value"))
        if (
            made_of is not None
            and made_of is not other
            and _differ(made_of, given if other is None else other)
        ):
            self.values["value_input"] = _values_of(made_of)
        positions = next(
            (arrays[each] for each in POSITIONS if each in arrays and each != name), None
        )
        if positions is not None:
            self.values["positions"] = _values_of(positions)
        mask: Any = told.get("mask")
        if (
            _is_array(mask)
            and mask.ndim == 4
            and type(module).__module__.startswith(("mha_jax.", "flax."))
        ):
            shows = _values_of(mask).astype(bool)  # Flax masks may be numbers
            self.values["mask"] = shows if _is_ours(module) else ~shows
        self.past = _cached(module, told)

    def part_called(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Record the output of a submodule."""
        if not self.is_flaxs:
            return
        if name in HEADS and _is_array(result) and result.ndim == 4:
            self.values[HEADS[name]] = _values_of(result).swapaxes(1, 2)
        elif name == "out" and args and _is_array(args[0]) and args[0].ndim == 4:
            self.values["context"] = _values_of(args[0]).swapaxes(1, 2)

    def sown(self, name: str, value: Any) -> None:
        """Record a value that the layer sows."""
        if _is_array(value):
            self.values["attn_weights" if name == "attention_weights" else f"sown.{name}"] = (
                _values_of(value)
            )


_OPEN: list[_FlaxListener] = []
"""Listeners of the running layers, the innermost last."""


def _differ(one: Any, other: Any) -> bool:
    """Return whether arrays hold different values."""
    return one.shape != other.shape or not np.array_equal(_values_of(one), _values_of(other))


def _values_of(x: Any) -> np.ndarray:
    if any(kind.__name__ == "Tracer" for kind in type(x).__mro__):
        raise InputTypeError(
            "model",
            "not be compiled while it is tapped",
            "a tracer: call it under jax.disable_jit()",
        )
    return to_numpy(x).copy()


def _is_array(x: Any) -> bool:
    return hasattr(x, "ndim") and hasattr(x, "dtype") and hasattr(x, "shape")


def _is_ours(module: Any) -> bool:
    return type(module).__module__.startswith("mha_jax.")


def _arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(place): x for place, x in enumerate(args)}, **kwargs}
    return {**bound.arguments, **bound.arguments.get("kwargs", {})}


def _cached(module: Any, told: dict[str, Any]) -> int | None:
    """Return the number of cached tokens before a call; None if sequences differ, or it is
    unknown.
    """
    lengths = getattr(told.get("cache"), "lengths", None)
    if lengths is not None:
        found = set(_values_of(lengths).tolist())
        return int(found.pop()) if len(found) == 1 else None
    if not (told.get("decode") or getattr(module, "decode", None)):
        return 0 if told.get("cache") is None else None  # an unsupported kind of cache
    if isinstance(module, nnx.Module):
        index = getattr(module, "cache_index", None)
        return None if index is None else int(_values_of(index[...]))
    has_index = module.has_variable("cache", "cache_index")
    return int(_values_of(module.get_variable("cache", "cache_index"))) if has_index else None


def _listen_to_sow(stack: ExitStack) -> None:
    owners: tuple[Any, ...] = (nnx.Module, linen.Module)
    for owner in owners:
        original = owner.sow

        def sow(
            self: Any,
            collection: Any,
            name: str,
            value: Any,
            *args: Any,
            original: Any = original,
            **kw: Any,
        ) -> Any:
            if _OPEN and (
                _OPEN[-1].module is self or _OPEN[-1].module == getattr(self, "path", None)
            ):
                _OPEN[-1].sown(name, value)
            return original(self, collection, name, value, *args, **kw)

        owner.sow = sow
        stack.callback(setattr, owner, "sow", original)


# ---- nnx -----------------------------------------------------------------------------------------


def _tap_nnx(
    model: nnx.Module, patterns: tuple[str, ...] | None, tapped: Tapped, stack: ExitStack
) -> None:
    """Wrap the calls of the layers' classes and of their submodules' classes."""
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    names = sorted(chosen(modules, patterns), key=_in_order)
    listeners: dict[int, _FlaxListener] = {}
    parts: dict[int, tuple[_FlaxListener, str]] = {}
    for place, name in enumerate(names):
        module = modules[name]
        layer = TappedLayer(name, place, type(module).__name__)
        tapped.layers.append(layer)
        listener = listeners[id(module)] = _FlaxListener(layer, module, type(module))
        for part in (*HEADS, "out"):
            child = getattr(module, part, None)
            if isinstance(child, nnx.Module):
                parts[id(child)] = (listener, part)
    for owner in {
        type(module)
        for module in modules.values()
        if id(module) in (listeners.keys() | parts.keys())
    }:
        _around_class(owner, listeners, parts, stack)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders names by the numbers in them: layers.2 before layers.10."""
    parts = (part for part in re.split(r"(\d+)|\.", name) if part)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _around_class(
    owner: Any,
    listeners: dict[int, _FlaxListener],
    parts: dict[int, tuple[_FlaxListener, str]],
    stack: ExitStack,
) -> None:
    original, is_own = owner.__call__, "__call__" in vars(owner)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) in listeners:
            return listeners[id(self)].around(self, functools.partial(original, self), args, kwargs)
        result = original(self, *args, **kwargs)
        if id(self) in parts:
            listener, name = parts[id(self)]
            listener.part_called(name, args, result)
        return result

    owner.__call__ = call

    def put_back() -> None:
        if is_own:
            owner.__call__ = original
        else:
            del owner.__call__

    stack.callback(put_back)


# ---- linen ---------------------------------------------------------------------------------------


class _LinenTap:
    """Record layers of linen modules, which are discovered as they are called."""

    def __init__(self, patterns: tuple[str, ...] | None, tapped: Tapped) -> None:
        self.patterns, self.tapped = patterns, tapped
        self.listeners: dict[tuple[str, ...], _FlaxListener] = {}
        self.fitting: set[str] = set()

    def intercept(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any
    ) -> Any:
        """Intercept every method of a linen module."""
        module = context.module
        if context.method_name != "__call__" or module.is_initializing():
            return call(*args, **kwargs)
        path = tuple(module.path)
        if self._is_chosen("/".join(path), type(module).__name__):
            if path not in self.listeners:
                layer = TappedLayer("/".join(path), len(self.listeners), type(module).__name__)
                self.listeners[path] = _FlaxListener(layer, path, type(module))
            function = functools.wraps(functools.partial(type(module).__call__, module))(call)
            return self.listeners[path].around(module, function, args, kwargs)
        result = call(*args, **kwargs)
        if (
            path
            and path[:-1] in self.listeners
            and _OPEN
            and _OPEN[-1] is self.listeners[path[:-1]]
        ):
            _OPEN[-1].part_called(path[-1], args, result)
        return result

    def _is_chosen(self, name: str, kind: str) -> bool:
        if self.patterns is None:
            return ATTENTION in kind
        found = {
            each for each in self.patterns if fnmatchcase(name, each) or fnmatchcase(kind, each)
        }
        self.fitting |= found
        return bool(found)

    def finish(self) -> None:
        """Keep the innermost layers, in the order of their first calls.

        Raises:
            ValueError: if a pattern matches no module that was called.
        """
        if missing := [each for each in self.patterns or () if each not in self.fitting]:
            raise InputError(
                "layers", "be names of modules or classes that are called", str(missing)
            )
        paths = list(self.listeners)
        if self.patterns is None:
            paths = [
                path
                for path in paths
                if not any(each != path and each[: len(path)] == path for each in paths)
            ]
        for place, path in enumerate(paths):
            layer = self.listeners[path].layer
            layer.index = place
            self.tapped.layers.append(layer)
