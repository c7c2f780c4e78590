"""Observe the attention layers of a live torch model: records of a tap, with inputs and outputs of
submodules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_spec import InputError
from parity.measure.core.arrays import to_numpy
from parity.measure.core.user_code import user_code
from parity.port.tapping import patterns_of
from parity.port.tapping.record import TappedLayer

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Submodule:
    """A module inside an attention layer, with its input and output in one call.

    Attributes:
        name: relative to the layer.
        call: number of its earlier runs in this call of the layer.
        module: the module.
        given: its first input.
        result: its output.
        leaves: full names of its parameters, if they differ from its own name plus theirs.
        first_rows: for each parameter that is a part of the one with its full name, the first row
            of that part.
    """

    name: str
    call: int
    module: nn.Module
    given: np.ndarray = field(repr=False)
    result: np.ndarray = field(repr=False)
    leaves: Mapping[str, str] = field(default_factory=dict, repr=False)
    first_rows: Mapping[str, int] = field(default_factory=dict, repr=False)

    def parameter(self, leaf: str) -> str:
        """Return the name of a parameter relative to the layer."""
        return self.leaves.get(leaf, f"{self.name}.{leaf}")

    @cached_property
    def is_linear(self) -> bool:
        """Return whether it multiplies its input by one matrix, like `nn.Linear` and the Conv1D of
        transformers.
        """
        if getattr(getattr(self.module, "weight", None), "ndim", 0) < 2:
            return False
        matrix, bias = matrix_of(self.module), getattr(self.module, "bias", None)
        first, result = (x.reshape(-1, x.shape[-1])[0] for x in (self.given, self.result))
        if matrix.shape != (len(result), len(first)):  # a kernel may be larger
            return False
        made = matrix @ first + (0.0 if bias is None else to_numpy(bias))
        return bool(np.abs(made - result).max() <= 1e-3 * np.abs(result).max())


@dataclass(frozen=True)
class ObservedLayer:
    """An attention layer in one call of its model.

    Attributes:
        model: the model.
        module: the layer.
        tapped: the tap's record of this call.
        arguments: arguments of the layer, by name.
        inside: its submodules, in the order in which they ran.
        numbers: integer arguments, by name.
        call: all its arguments, by position and by name; None in a model that cannot call it by
            itself.
    """

    model: nn.Module
    module: nn.Module
    tapped: TappedLayer
    arguments: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    inside: list[Submodule] = field(default_factory=list, repr=False)
    numbers: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = field(default=None, repr=False)

    @property
    def values(self) -> dict[str, np.ndarray]:
        """Return the values that the tap recorded in its only call."""
        return self.tapped.calls[0].values

    def with_values(self, values: dict[str, np.ndarray]) -> ObservedLayer:
        """Return the layer with other values in its only call."""
        call = replace(self.tapped.calls[0], values=values)
        return replace(self, tapped=replace(self.tapped, calls=[call]))

    @property
    def is_cross(self) -> bool:
        """Return whether its keys come from another sequence."""
        return "key_input" in self.values

    def submodule(self, name: str, call: int) -> Submodule:
        """Return one call of one of its submodules.

        Raises:
            ValueError: if it did not run.
        """
        found = next((each for each in self.inside if (each.name, each.call) == (name, call)), None)
        if found is None:
            raise InputError(name, "run in each call", "it did not")
        return found

    def linears(self) -> list[Submodule]:
        """Return its linear maps, with inputs and outputs."""
        return [each for each in self.inside if each.is_linear]

    def norms(self) -> list[Submodule]:
        """Return its norms, with inputs and outputs."""
        others = (
            each
            for each in self.inside
            if not each.is_linear and each.given.shape == each.result.shape
        )
        return [each for each in others if not np.array_equal(each.given, each.result)]


def matrix_of(module: nn.Module) -> np.ndarray:
    """Return the matrix of a linear module, (out, in)."""
    weight = to_numpy(module.weight)
    if _is_convolution(module):
        return weight.reshape(len(weight), -1)
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _is_convolution(module: nn.Module) -> bool:
    """Return whether features are on the axis after that of sequences."""
    return hasattr(module, "kernel_size")


def observe_layers(
    model: nn.Module,
    inputs: Mapping[str, Any],
    layers: Any = None,
    *,
    factors: Mapping[tuple[str, int], float] | None = None,
) -> list[ObservedLayer]:
    """Call a model once, and return each call of its attention layers.

    Args:
        model: the model.
        inputs: keyword arguments of the call.
        layers: names of modules or classes, as in `parity.tap`.
        factors: factors of projection inputs, by name and call in their layer: large ones show caps
            and clips, small ones the eps of norms.

    Raises:
        ValueError: if there are no such layers.
    """
    import torch

    from parity.explain.identification.functional import ProjectionMode
    from parity.port.tapping.torch import tap_torch

    modules, calls = dict(model.named_modules()), dict[str, list[_Call]]()
    with ExitStack() as stack, torch.no_grad():
        by_name = {name: factor for (name, _), factor in (factors or {}).items()}
        functional = stack.enter_context(ProjectionMode(modules, by_name))
        for name in by_name.keys() & modules.keys():  # before hooks that record
            of_calls = {
                call: factor for (other, call), factor in (factors or {}).items() if other == name
            }
            hook = _multiplier(of_calls, partial(_count_runs, name, calls))
            stack.callback(modules[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
        tapped = stack.enter_context(tap_torch(model, patterns_of(layers), sees_functions=True))
        for layer in tapped.layers:
            of_layer = calls[layer.name] = []
            hook = modules[layer.name].register_forward_pre_hook(
                _beginner(of_layer), with_kwargs=True
            )
            stack.callback(hook.remove)
            for name, module in modules[layer.name].named_modules():
                if name and not list(module.children()):
                    hook = module.register_forward_hook(_recorder(name, of_layer), with_kwargs=True)
                    stack.callback(hook.remove)
        can_cache = "use_cache" in inspect.signature(model.forward).parameters
        with user_code(model):
            model(**{**({"use_cache": False} if can_cache else {}), **inputs})
    return [
        _completed(
            ObservedLayer(model, modules[layer.name], replace(layer, calls=[call]), *within),
            functional.inside.get(layer.name, []),
        )
        for layer in tapped.layers
        for call, within in zip(layer.calls, calls[layer.name], strict=False)
    ]


def _completed(layer: ObservedLayer, projections: Sequence[tuple[Any, ...]]) -> ObservedLayer:
    """Return a layer with the projections that a function computed, including that of the
    context.
    """
    context = layer.values.get("context")
    if projections and context is not None and "output" in layer.values:
        given = context.transpose(0, 2, 1, 3).reshape(*layer.values["output"].shape[:2], -1)
        layer.inside.extend(Submodule(*each) for each in projections)
        module: Any = layer.module
        layer.inside.append(
            Submodule("out_proj", 0, module.out_proj, given, layer.values["output"])
        )
    return layer


_Call = tuple[
    dict[str, np.ndarray],
    list[Submodule],
    dict[str, np.ndarray],
    tuple[tuple[Any, ...], dict[str, Any]],
]


def _count_runs(name: str, calls: Mapping[str, list[_Call]]) -> int:
    """Return how many times a submodule, by its full name, ran in the call of its layer that
    lasts.
    """
    layer = max(
        (each for each in calls if name.startswith(f"{each}." if each else "")), key=len, default=""
    )
    within = calls[layer][-1][1] if calls.get(layer) else []
    return sum(each.name == name[len(layer) :].removeprefix(".") for each in within)


def _multiplier(factors: Mapping[int, float], count: Callable[[], int]) -> Any:
    """Return a hook that multiplies the input of a projection, in some of its calls in a layer."""

    def multiply(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        factor = factors.get(count(), 1.0)
        given = {name: x * factor if _is_floating(x) else x for name, x in kwargs.items()}
        return tuple(x * factor if _is_floating(x) else x for x in args), given

    return multiply


def _beginner(calls: list[_Call]) -> Any:
    """Return a hook that begins the record of a call of a layer, with its arguments."""

    from parity.port.tapping.arguments import arguments_of

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = arguments_of(module.forward, args, kwargs)
        arguments = {name: to_numpy(x) for name, x in given.items() if _is_floating(x)}
        numbers = {name: _integers(x) for name, x in given.items() if _are_integers(x)}
        # Copies, because a model may change its tensors in place after the call.
        call = tuple(map(_copied, args)), {name: _copied(x) for name, x in kwargs.items()}
        calls.append((arguments, [], numbers, call))

    return begin


def _are_integers(x: Any) -> bool:
    """Return whether x is a tensor, list or tuple of integers."""
    if isinstance(x, (list, tuple)):
        return bool(x) and all(type(each) is int for each in x)
    return hasattr(x, "is_floating_point") and str(x.dtype) in ("torch.int32", "torch.int64")


def _integers(x: Any) -> np.ndarray:
    return np.asarray(x) if isinstance(x, (list, tuple)) else to_numpy(x)


def _copied(x: Any) -> Any:
    """Return an argument with copies of its tensors."""
    if hasattr(x, "is_floating_point"):
        return x.detach().clone()
    if type(x) in (list, tuple):
        return type(x)(map(_copied, x))
    return x


def _is_floating(x: Any) -> bool:
    """Return whether x is a torch tensor of floating-point numbers."""
    return hasattr(x, "is_floating_point") and x.is_floating_point()


def _recorder(name: str, calls: list[_Call]) -> Any:
    def record(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        given = next(filter(_is_floating, (*args, *kwargs.values())), None)
        if calls and given is not None and _is_floating(result):
            _, inside, *_ = calls[-1]
            before = sum(each.name == name for each in inside)
            entered, left = to_numpy(given), to_numpy(result)
            if _is_convolution(module):
                entered, left = np.moveaxis(entered, 1, -1), np.moveaxis(left, 1, -1)
            inside.append(Submodule(name, before, module, entered, left))

    return record
