"""Observe the attention layers of a live torch model: records of a tap, with inputs and outputs of
submodules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
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

LINEAR_TOLERANCE = 1e-3
"""Largest error of a module that counts as a product with its matrix, relative to the output."""


@dataclass(frozen=True)
class Submodule:
    """A module inside an attention layer, with its input and output in one call.

    Attributes:
        name: relative to the layer.
        call: number of its earlier runs in this call of the layer.
        module: the module.
        input: its first input.
        output: its output.
        leaves: full names of its parameters, if they differ from its own name plus theirs.
        first_rows: for each parameter that is a part of the one with its full name, the first row
            of that part.
    """

    name: str
    call: int
    module: nn.Module
    input: np.ndarray = field(repr=False)
    output: np.ndarray = field(repr=False)
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
        weight = getattr(self.module, "weight", None)
        if getattr(weight, "ndim", 0) < 2:
            return False
        matrix = matrix_of(self.module)
        x = self.input.reshape(-1, self.input.shape[-1])[0]
        output = self.output.reshape(-1, self.output.shape[-1])[0]
        if matrix.shape != (len(output), len(x)):  # a kernel may be larger
            return False
        expected = matrix @ x
        bias = getattr(self.module, "bias", None)
        if bias is not None:
            expected = expected + to_numpy(bias)
        error = np.abs(expected - output).max()
        return bool(error <= LINEAR_TOLERANCE * np.abs(output).max())


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

    @property
    def scale(self) -> float:
        """Return the factor of its scores; 1 if the tap recorded none."""
        if self.tapped.scale is None:
            return 1.0
        return self.tapped.scale

    def submodule(self, name: str, call: int) -> Submodule:
        """Return one call of one of its submodules.

        Raises:
            ValueError: if it did not run.
        """
        for submodule in self.inside:
            if (submodule.name, submodule.call) == (name, call):
                return submodule
        raise InputError(name, "run in each call", "it did not")

    def linears(self) -> list[Submodule]:
        """Return its linear maps, with inputs and outputs."""
        return [submodule for submodule in self.inside if submodule.is_linear]

    def norms(self) -> list[Submodule]:
        """Return the submodules that may be norms, with inputs and outputs: others that change
        their input, but not its shape.
        """
        norms = []
        for submodule in self.inside:
            if submodule.is_linear or submodule.input.shape != submodule.output.shape:
                continue
            if not np.array_equal(submodule.input, submodule.output):
                norms.append(submodule)
        return norms


def matrix_of(module: nn.Module) -> np.ndarray:
    """Return the matrix of a linear module, (out, in)."""
    weight = to_numpy(module.weight)
    if _is_convolution(module):
        return weight.reshape(len(weight), -1)
    if type(module).__name__ == "Conv1D":  # of transformers: (in, out)
        return weight.T
    return weight


def _is_convolution(module: nn.Module) -> bool:
    """Return whether features are on the axis after the axis of sequences."""
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

    modules = dict(model.named_modules())
    recorders: dict[str, LayerRecorder] = {}
    multipliers = _multipliers(factors or {}, recorders)
    with ExitStack() as stack, torch.no_grad():
        last_factors = {name: multiplier.last_factor for name, multiplier in multipliers.items()}
        projections = stack.enter_context(ProjectionMode(modules, last_factors))
        # Before the hooks that record, which then receive the multiplied inputs.
        for name in multipliers.keys() & modules.keys():
            hook = multipliers[name].multiply
            handle = modules[name].register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        tapped = stack.enter_context(tap_torch(model, patterns_of(layers), sees_functions=True))
        for layer in tapped.layers:
            recorders[layer.name] = LayerRecorder()
            for handle in recorders[layer.name].attach(modules[layer.name]):
                stack.callback(handle.remove)
        with user_code(model):
            model(**_without_cache(model, inputs))

    observed = []
    for layer in tapped.layers:
        for call, record in zip(layer.calls, recorders[layer.name].calls, strict=False):
            run = ObservedLayer(
                model,
                modules[layer.name],
                replace(layer, calls=[call]),
                arguments=record.arguments,
                inside=record.inside,
                numbers=record.numbers,
                call=record.call,
            )
            _add_projections(run, projections.inside.get(layer.name, []))
            observed.append(run)
    return observed


def _without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a call, which uses no cache unless they say so."""
    options = dict(inputs)
    if "use_cache" in inspect.signature(model.forward).parameters:
        options.setdefault("use_cache", False)
    return options


def _add_projections(layer: ObservedLayer, projections: Sequence[Any]) -> None:
    """Add the projections that a function computed to a layer, including the projection of the
    context.
    """
    context, output = layer.values.get("context"), layer.values.get("output")
    if not projections or context is None or output is None:
        return
    for projection in projections:
        layer.inside.append(Submodule(**projection._asdict()))
    features = context.transpose(0, 2, 1, 3).reshape(*output.shape[:2], -1)
    module: Any = layer.module
    layer.inside.append(Submodule("out_proj", 0, module.out_proj, features, output))


# ---- Hooks ---------------------------------------------------------------------------------------


@dataclass
class RecordedCall:
    """A call of a layer.

    Attributes:
        arguments: floating-point arguments, by name.
        numbers: integer arguments, by name.
        call: all arguments, by position and by name.
        inside: submodules that ran so far.
    """

    arguments: dict[str, np.ndarray]
    numbers: dict[str, np.ndarray]
    call: tuple[tuple[Any, ...], dict[str, Any]]
    inside: list[Submodule] = field(default_factory=list)

    def count(self, name: str) -> int:
        """Return how many times a submodule ran."""
        return sum(submodule.name == name for submodule in self.inside)


class LayerRecorder:
    """Records the calls of a layer by hooks.

    Attributes:
        calls: the calls so far; the last one may still run.
    """

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []

    def attach(self, layer: nn.Module) -> Iterator[Any]:
        """Register the hooks of a layer and of its innermost submodules, and yield their
        handles.
        """
        yield layer.register_forward_pre_hook(self.begin, with_kwargs=True)
        for name, module in layer.named_modules():
            if name and not list(module.children()):
                hook = partial(self.record, name)
                yield module.register_forward_hook(hook, with_kwargs=True)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the record of a call of the layer, with its arguments."""
        from parity.port.tapping.arguments import arguments_of

        arguments, numbers = {}, {}
        for name, x in arguments_of(module.forward, args, kwargs).items():
            if _is_floating(x):
                arguments[name] = to_numpy(x)
            elif _are_integers(x):
                numbers[name] = _integers(x)
        # Copies, because a model may change its tensors in place after the call.
        copied_args = tuple(_copied(x) for x in args)
        copied_kwargs = {name: _copied(x) for name, x in kwargs.items()}
        self.calls.append(RecordedCall(arguments, numbers, (copied_args, copied_kwargs)))

    def record(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Record a call of a submodule."""
        first_input = next(filter(_is_floating, (*args, *kwargs.values())), None)
        if not self.calls or first_input is None or not _is_floating(result):
            return
        call = self.calls[-1]
        x, output = to_numpy(first_input), to_numpy(result)
        if _is_convolution(module):
            x, output = np.moveaxis(x, 1, -1), np.moveaxis(output, 1, -1)
        call.inside.append(Submodule(name, call.count(name), module, x, output))


@dataclass(frozen=True)
class InputMultiplier:
    """Multiplies the input of a projection, in some of its calls in a layer.

    Attributes:
        name: full name of the projection.
        factors: factor of each call, by its number.
        recorders: recorders of all layers, by name; filled later.
    """

    name: str
    factors: dict[int, float]
    recorders: Mapping[str, LayerRecorder]

    @property
    def last_factor(self) -> float:
        """Return the factor of the last of the calls."""
        return list(self.factors.values())[-1]

    def multiply(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the multiplied arguments of a call."""
        factor = self.factors.get(self._count_runs(), 1.0)
        multiplied_args = tuple(_times(x, factor) for x in args)
        return multiplied_args, {name: _times(x, factor) for name, x in kwargs.items()}

    def _count_runs(self) -> int:
        """Return how many times the projection ran in the current call of its layer."""
        layers = [""]
        for name in self.recorders:
            if not name or self.name.startswith(f"{name}."):
                layers.append(name)
        innermost = max(layers, key=len)
        recorder = self.recorders.get(innermost)
        if recorder is None or not recorder.calls:
            return 0
        return recorder.calls[-1].count(self.name[len(innermost) :].removeprefix("."))


def _multipliers(
    factors: Mapping[tuple[str, int], float], recorders: Mapping[str, LayerRecorder]
) -> dict[str, InputMultiplier]:
    """Return a multiplier for each projection, by its full name."""
    multipliers: dict[str, InputMultiplier] = {}
    for (name, call), factor in factors.items():
        multiplier = multipliers.setdefault(name, InputMultiplier(name, {}, recorders))
        multiplier.factors[call] = factor
    return multipliers


def _times(x: Any, factor: float) -> Any:
    if _is_floating(x):
        return x * factor
    return x


def _is_floating(x: Any) -> bool:
    """Return whether x is a torch tensor of floating-point numbers."""
    return hasattr(x, "is_floating_point") and x.is_floating_point()


def _are_integers(x: Any) -> bool:
    """Return whether x is a tensor, list or tuple of integers."""
    if isinstance(x, (list, tuple)):
        return bool(x) and all(type(number) is int for number in x)
    return hasattr(x, "is_floating_point") and str(x.dtype) in ("torch.int32", "torch.int64")


def _integers(x: Any) -> np.ndarray:
    if isinstance(x, (list, tuple)):
        return np.asarray(x)
    return to_numpy(x)


def _copied(x: Any) -> Any:
    """Return an argument with copies of its tensors."""
    if hasattr(x, "is_floating_point"):
        return x.detach().clone()
    if type(x) in (list, tuple):
        return type(x)(map(_copied, x))
    return x
