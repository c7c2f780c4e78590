"""Observe attention layers of a live torch model: what a tap records, and what their submodules receive and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.core.arrays import to_numpy
from parity.tapping import tap
from parity.tapping.record import TappedLayer

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Submodule:
    """A module inside an attention layer, and what it received and returned in one call.

    Attributes:
        name: after that of the layer.
        module: the module.
        given: its first input.
        result: its output.
    """

    name: str
    module: nn.Module
    given: np.ndarray = field(repr=False)
    result: np.ndarray = field(repr=False)


@dataclass(frozen=True)
class ObservedLayer:
    """An attention layer in one call of its model.

    Attributes:
        module: the layer.
        tapped: what the tap recorded of it.
        inside: its submodules in the order in which they ran.
    """

    module: nn.Module
    tapped: TappedLayer
    inside: list[Submodule] = field(repr=False)

    @property
    def values(self) -> dict[str, np.ndarray]:
        """Values that the tap recorded of its only call."""
        return self.tapped.calls[0].values

    @property
    def is_cross(self) -> bool:
        """Return whether its keys are made of another sequence."""
        return "key_input" in self.values

    def linears(self) -> list[Submodule]:
        """Its linear maps, with what they received and returned."""
        return [each for each in self.inside if is_linear(each.module)]

    def norms(self) -> list[Submodule]:
        """Its norms, with what they received and returned."""
        return [each for each in self.inside if not is_linear(each.module) and each.given.shape == each.result.shape]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module holds one matrix, as `nn.Linear` and the Conv1D of transformers do."""
    weight: Any = getattr(module, "weight", None)
    return getattr(weight, "ndim", 0) == 2 and not list(module.children())


def matrix_of(module: nn.Module) -> np.ndarray:
    """Return the matrix of a linear module, (out, in)."""
    weight = to_numpy(module.weight)
    return weight.T if type(module).__name__ == "Conv1D" else weight


def observe(
    model: nn.Module, inputs: Mapping[str, Any], layers: Any = None, *, factor: float = 1.0
) -> list[ObservedLayer]:
    """Call a model once, and return what its attention layers did.

    Args:
        model: the model.
        inputs: keywords of the call.
        layers: names of modules or classes, as `parity.tap` takes them.
        factor: of the input of each attention layer: large ones show caps and clips, small ones the eps of norms.

    Raises:
        ValueError: if there are no such layers.
    """
    import torch

    inside: dict[str, list[Submodule]] = {}
    modules = dict(model.named_modules())
    with ExitStack() as stack, torch.no_grad():
        tapped = stack.enter_context(tap(model, layers))
        for layer in tapped.layers:
            inside[layer.name] = []
            if factor != 1.0:  # before the tap's own hook, which records the input
                hook = modules[layer.name].register_forward_pre_hook(
                    _multiplier(factor), with_kwargs=True, prepend=True
                )
                stack.callback(hook.remove)
            for name, module in modules[layer.name].named_modules():
                if name and not list(module.children()):
                    recorder = _recorder(name, inside[layer.name])
                    stack.callback(module.register_forward_hook(recorder).remove)
        model(**inputs)
    return [ObservedLayer(modules[layer.name], layer, inside[layer.name]) for layer in tapped.layers if layer.calls]


def _multiplier(factor: float) -> Any:
    """Return a hook that multiplies the inputs of an attention layer: its own, and the sequence it attends to."""
    from parity.tapping.torch import KEY_INPUTS

    def multiply(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next((name for name, x in kwargs.items() if _is_floating(x)), "") if not args else ""
        names = {first, *KEY_INPUTS}
        given = {name: x * factor if name in names and _is_floating(x) else x for name, x in kwargs.items()}
        return tuple(x * factor if _is_floating(x) and x.ndim == 3 else x for x in args), given

    return multiply


def _is_floating(x: Any) -> bool:
    """Return whether x is a torch tensor of floating-point numbers."""
    return hasattr(x, "is_floating_point") and x.is_floating_point()


def _recorder(name: str, found: list[Submodule]) -> Any:
    def record(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if args and _is_floating(args[0]) and _is_floating(result):
            found.append(Submodule(name, module, to_numpy(args[0]), to_numpy(result)))

    return record


def features_of(heads: np.ndarray) -> np.ndarray:
    """Return heads (B, heads, T, H) as tokens (B * T, heads * H)."""
    return heads.transpose(0, 2, 1, 3).reshape(heads.shape[0] * heads.shape[2], -1)


def columns_of(features: np.ndarray) -> Iterator[bytes]:
    """Yield the bits of each feature over all tokens, which only the same numbers share."""
    return (column.tobytes() for column in np.ascontiguousarray(features.T))
