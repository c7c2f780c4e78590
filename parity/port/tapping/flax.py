"""Record attention layers of a Flax model by intercepting calls of nnx and linen modules.

Under `jax.grad` the values of a layer are tracers. A function with a backward pass of its own,
which JAX calls with their values, shows these and their gradients.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from jax.core import Tracer

from mha_spec import InputError, InputTypeError
from parity.measure.core.arrays import to_numpy
from parity.port.tapping.arguments import arguments_of
from parity.port.tapping.record import Tapped, TappedCall, TappedLayer, chosen, fits

HEADS = {"query": "q", "key": "k", "value": "v", "query_ln": "q", "key_ln": "k"}
"""Submodules of Flax's own attention layers that return heads (B, T, N, H), by name.

The last call counts. In other libraries, submodules of these names may return heads before norms
and RoPE, so they are ignored there.
"""

ATTENTION = "Attention"
"""Part of the name of attention classes."""

KEY_INPUTS = ("inputs_k", "inputs_kv", "key")
"""Names of the parameters of attention layers that receive the input of keys."""

VALUE_INPUTS = ("inputs_v", "value")
"""Names of the parameters of attention layers that receive the input of values."""

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


def _is_attention_of_flax(kind: type) -> bool:
    """Return whether a class is one of Flax's attention modules, or derived from one."""
    for base in kind.__mro__:
        if base.__module__.startswith("flax.") and ATTENTION in base.__name__:
            return True
    return False


class _FlaxListener:
    """Record inputs and outputs of one layer during a call."""

    def __init__(self, layer: TappedLayer, module: Any, kind: type) -> None:
        self.layer = layer
        self.module = module
        self.is_flaxs = _is_attention_of_flax(kind)
        self.values: dict[str, np.ndarray] = {}
        self.past: int | None = 0
        # The running call is differentiated by its input; these values then have gradients.
        self.has_gradients = False
        self.watched: list[str] = []
        self.reached: set[str] = set()

    def around(
        self,
        module: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the layer, and record its inputs and outputs."""
        args, kwargs = self._called(module, function, args, kwargs)
        _OPEN.append(self)
        try:
            result = function(*args, **kwargs)
        finally:
            _OPEN.remove(self)
        results = list(result) if isinstance(result, tuple) else [result]
        indices = [index for index, x in enumerate(results) if _is_array(x)]
        if indices:
            # Some return their cache first.
            output = results[indices[0]]
            self.values["output"] = _values_of(output)
            results[indices[0]] = self._with_cotangent(output)
        if _is_ours(module) and indices[1:]:
            self.values["attn_weights"] = _values_of(results[indices[1]])
        self.layer.calls.append(TappedCall(self.values, self.past))
        return tuple(results) if isinstance(result, tuple) else results[0]

    def _with_cotangent(self, output: Any) -> Any:
        """Return the output of the layer, whose gradient is recorded when it is computed.

        The backward pass of the layer begins there. A gradient that it does not reach is 0.
        """
        if not _is_tracer(output):
            return output
        values = self.values
        watched = tuple(self.watched)

        def record(gradient: Any) -> None:
            values["grad.output"] = _values_of(gradient)
            for name in watched:
                values.setdefault(f"grad.{name}", np.zeros_like(values[name]))

        return _observed(_ignore, record, output)

    def _watched(self, name: str, x: Any, as_recorded: Callable[[Any], np.ndarray]) -> Any:
        """Return a value of this call, whose gradient is recorded when it is computed.

        Args:
            name: the name of the value.
            x: the value.
            as_recorded: how the value itself was recorded.
        """
        if self.has_gradients:
            self.watched.append(name)
        if not _is_tracer(x):
            return x
        values, reached = self.values, self.reached

        def record(gradient: Any) -> None:
            # Projections precede the norms of their heads, whose gradients are computed before.
            if name not in reached:
                reached.add(name)
                values[f"grad.{name}"] = as_recorded(gradient)

        return _observed(_ignore, record, x)

    def _called(
        self,
        module: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record what the layer receives, and return it."""
        arguments = arguments_of(function, args, kwargs)
        arrays = {name: x for name, x in arguments.items() if _is_array(x)}
        self.values, self.watched, self.reached, self.has_gradients = {}, [], set(), False
        if arrays:
            self._record_inputs(arrays)
        mask: Any = arguments.get("mask")
        if _is_array(mask) and mask.ndim == 4:
            if _is_ours(module):
                self.values["mask"] = _values_of(mask).astype(bool)
            elif type(module).__module__.startswith("flax."):
                # Flax's masks show keys, and may be floats.
                self.values["mask"] = ~_values_of(mask).astype(bool)
        self.past = _num_cached(module, arguments)
        if "key_input" in self.values or "value_input" in self.values or not arrays:
            return args, kwargs
        # The model may also add the input to the output, outside of the layer.
        layer_input = next(iter(arrays.values()))
        own_input = self._watched("input", layer_input, _values_of)
        own_args = tuple(own_input if x is layer_input else x for x in args)
        own_kwargs = {name: own_input if x is layer_input else x for name, x in kwargs.items()}
        return own_args, own_kwargs

    def _record_inputs(self, arrays: dict[str, Any]) -> None:
        """Record the inputs of queries, keys and values, and positions.

        Args:
            arrays: arguments of the call that are arrays, at least one.
        """
        other_arrays = dict(arrays)
        layer_input = other_arrays.pop(next(iter(arrays)))
        self.has_gradients = _is_tracer(layer_input)
        self.values["input"] = _values_of(layer_input)
        key_input = _first_of(other_arrays, KEY_INPUTS)
        if key_input is None:
            key_input = layer_input
        elif _differ(key_input, layer_input):
            self.values["key_input"] = _values_of(key_input)
        value_input = _first_of(other_arrays, VALUE_INPUTS)
        if value_input is not None and _differ(value_input, key_input):
            self.values["value_input"] = _values_of(value_input)
        positions = _first_of(other_arrays, POSITIONS)
        if positions is not None:
            self.values["positions"] = _values_of(positions)

    def part_called(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Record the input of the output projection, and return the arguments."""
        if self.is_flaxs and name == "out" and args and _is_array(args[0]) and args[0].ndim == 4:
            self.values["context"] = _heads_first(args[0])
            return (self._watched("context", args[0], _heads_first), *args[1:])
        return args

    def part_returned(self, name: str, result: Any) -> Any:
        """Record the output of a submodule, and return it."""
        if self.is_flaxs and name in HEADS and _is_array(result) and result.ndim == 4:
            head = HEADS[name]
            self.values[head] = _heads_first(result)
            return self._watched(head, result, _heads_first)
        return result

    def sown(self, name: str, value: Any) -> None:
        """Record a value that the layer sows."""
        if not _is_array(value):
            return
        name = "attn_weights" if name == "attention_weights" else f"sown.{name}"
        self.values[name] = _values_of(value)


_OPEN: list[_FlaxListener] = []
"""Listeners of the running layers, the innermost last."""


def _first_of(arrays: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first array among these names; None if there is none."""
    for name in names:
        if name in arrays:
            return arrays[name]
    return None


def _heads_first(x: Any) -> np.ndarray:
    """Return (B, N, T, H) from (B, T, N, H)."""
    return _values_of(x).swapaxes(1, 2)


def _differ(one: Any, other: Any) -> bool:
    """Return whether arrays hold different values."""
    if one is other:
        return False
    if one.shape != other.shape:
        return True
    return not np.array_equal(_values_of(one), _values_of(other))


def _is_tracer(x: Any) -> bool:
    return isinstance(x, Tracer)


def _values_of(x: Any) -> np.ndarray:
    """Return an array as NumPy's, including the value of a tracer of `jax.grad`."""
    numbers = [x]
    if _is_tracer(x):
        _observed(numbers.append, _ignore, x)
    if _is_tracer(numbers[-1]):
        raise InputTypeError(
            "model",
            "not be compiled while it is tapped",
            "a tracer: call it under jax.disable_jit()",
        )
    return to_numpy(numbers[-1]).copy()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _observed(record: Callable[[Any], None], record_gradient: Callable[[Any], None], x: Any) -> Any:
    """Return an array as it is.

    Args:
        record: called with the array.
        record_gradient: called with its gradient, in the backward pass.
        x: the array.
    """
    record(x)
    return x


def _observed_forward(
    record: Callable[[Any], None], record_gradient: Callable[[Any], None], x: Any
) -> tuple[Any, None]:
    record(x)
    return x, None


def _observed_backward(
    record: Callable[[Any], None], record_gradient: Callable[[Any], None], _: None, gradient: Any
) -> tuple[Any]:
    record_gradient(gradient)
    return (gradient,)


_observed.defvjp(_observed_forward, _observed_backward)


def _ignore(_: Any) -> None:
    """Record nothing."""


def _is_array(x: Any) -> bool:
    return hasattr(x, "ndim") and hasattr(x, "dtype") and hasattr(x, "shape")


def _is_ours(module: Any) -> bool:
    return type(module).__module__.startswith("mha_jax.")


def _num_cached(module: Any, arguments: dict[str, Any]) -> int | None:
    """Return the number of cached tokens before a call.

    None if it is unknown, or differs between sequences.
    """
    lengths = getattr(arguments.get("cache"), "lengths", None)
    if lengths is not None:
        different_lengths = set(_values_of(lengths).tolist())
        if len(different_lengths) != 1:
            return None
        return int(different_lengths.pop())
    if not arguments.get("decode") and not getattr(module, "decode", None):
        if arguments.get("cache") is not None:
            return None  # an unsupported kind of cache
        return 0
    if isinstance(module, nnx.Module):
        index = getattr(module, "cache_index", None)
        if index is None:
            return None
        return int(_values_of(index[...]))
    if not module.has_variable("cache", "cache_index"):
        return None
    return int(_values_of(module.get_variable("cache", "cache_index")))


def _listen_to_sow(stack: ExitStack) -> None:
    """Let the innermost running layer record what it sows; the stack restores `sow`."""
    owners: tuple[Any, ...] = (nnx.Module, linen.Module)
    for owner in owners:
        stack.callback(setattr, owner, "sow", owner.sow)
        owner.sow = _recording_sow(owner.sow)


def _recording_sow(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `Module.sow`."""

    def sow(self: Any, collection: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if _OPEN:
            # Listeners of nnx hold the module, and listeners of linen its path.
            layer = _OPEN[-1].module
            if layer is self or layer == getattr(self, "path", None):
                _OPEN[-1].sown(name, value)
        return original(self, collection, name, value, *args, **kwargs)

    return sow


# ---- nnx -----------------------------------------------------------------------------------------


def _tap_nnx(
    model: nnx.Module, patterns: tuple[str, ...] | None, tapped: Tapped, stack: ExitStack
) -> None:
    """Wrap the calls of the layers' classes and of their submodules' classes."""
    modules: dict[str, nnx.Module] = {}
    for path, module in nnx.iter_modules(model):
        modules[".".join(map(str, path))] = module
    names = sorted(chosen(modules, patterns), key=_in_order)
    listeners: dict[int | str, _FlaxListener] = {}
    parts: dict[int | str, tuple[_FlaxListener, str]] = {}
    for index, name in enumerate(names):
        module = modules[name]
        layer = TappedLayer(name, index, type(module).__name__)
        tapped.layers.append(layer)
        listener = _FlaxListener(layer, module, type(module))
        listeners[id(module)] = listeners[_marked(module, stack)] = listener
        for part in (*HEADS, "out"):
            child = getattr(module, part, None)
            if isinstance(child, nnx.Module):
                parts[id(child)] = parts[_marked(child, stack)] = (listener, part)
    recorded = listeners.keys() | parts.keys()
    # A call is looked up in the class, not in the instance.
    classes = {type(module) for module in modules.values() if id(module) in recorded}
    for owner in classes:
        _around_class(owner, listeners, parts, stack)


MARK = "tapped_by_parity"
"""Attribute of tapped modules: `nnx.grad` calls copies of them, which have it as well."""

_NUMBERS = itertools.count()


def _marked(module: Any, stack: ExitStack) -> str:
    """Return the mark of a module, which the stack removes."""
    mark = getattr(module, MARK, None)
    if mark is None:
        mark = f"module {next(_NUMBERS)}"
        setattr(module, MARK, mark)
        stack.callback(delattr, module, MARK)
    return mark


def _entry_of(table: Mapping[int | str, Any], module: Any) -> Any:
    """Return the entry of a module, or of its original if it is a copy; None if it has none."""
    if id(module) in table:
        return table[id(module)]
    return table.get(getattr(module, MARK, ""))


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders names by the numbers in them: layers.2 before layers.10."""
    key = []
    for part in re.split(r"(\d+)|\.", name):
        if not part:  # nothing between two separators, or a point
            continue
        if part.isdigit():
            key.append((int(part), ""))
        else:
            key.append((-1, part))
    return key


def _around_class(
    owner: Any,
    listeners: dict[int | str, _FlaxListener],
    parts: dict[int | str, tuple[_FlaxListener, str]],
    stack: ExitStack,
) -> None:
    """Wrap the calls of a class: layers are recorded, and their submodules by their layers."""
    original = owner.__call__
    is_inherited = "__call__" not in vars(owner)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = _entry_of(listeners, self)
        if layer is not None:
            layer.module = self
            return layer.around(self, functools.partial(original, self), args, kwargs)
        part = _entry_of(parts, self)
        if part is None:
            return original(self, *args, **kwargs)
        listener, name = part
        args = listener.part_called(name, args)
        return listener.part_returned(name, original(self, *args, **kwargs))

    owner.__call__ = call

    def restore() -> None:
        if is_inherited:
            del owner.__call__
        else:
            owner.__call__ = original

    stack.callback(restore)


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
        name, class_name = "/".join(path), type(module).__name__
        if self._is_chosen(name, class_name):
            if path not in self.listeners:
                layer = TappedLayer(name, len(self.listeners), class_name)
                self.listeners[path] = _FlaxListener(layer, path, type(module))
            # `call` takes any arguments; the names of the module's parameters are needed.
            function = functools.wraps(functools.partial(type(module).__call__, module))(call)
            return self.listeners[path].around(module, function, args, kwargs)
        if not path or not _OPEN or _OPEN[-1] is not self.listeners.get(path[:-1]):
            return call(*args, **kwargs)
        listener = _OPEN[-1]
        args = listener.part_called(path[-1], args)
        return listener.part_returned(path[-1], call(*args, **kwargs))

    def _is_chosen(self, name: str, class_name: str) -> bool:
        if self.patterns is None:
            return ATTENTION in class_name
        fitting = {pattern for pattern in self.patterns if fits(pattern, name, class_name)}
        self.fitting |= fitting
        return bool(fitting)

    def finish(self) -> None:
        """Keep the innermost layers, in the order of their first calls.

        Raises:
            ValueError: if a pattern matches no module that was called.
        """
        missing = [pattern for pattern in self.patterns or () if pattern not in self.fitting]
        if missing:
            raise InputError(
                "layers", "be names of modules or classes that are called", str(missing)
            )
        paths = list(self.listeners)
        if self.patterns is None:
            paths = [path for path in paths if not _contains_another(path, paths)]
        for index, path in enumerate(paths):
            layer = self.listeners[path].layer
            layer.index = index
            self.tapped.layers.append(layer)


def _contains_another(path: tuple[str, ...], paths: list[tuple[str, ...]]) -> bool:
    """Return whether one of the paths leads to a module inside this one."""
    for other in paths:
        beginning = other[: len(path)]
        if other != path and beginning == path:
            return True
    return False
