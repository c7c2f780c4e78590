"""Observe the projections of `nn.MultiheadAttention`, which one function computes without calling
submodules.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parity.measure.core.arrays import to_numpy

SIGNATURE = inspect.signature(F.multi_head_attention_forward)

SIDES = ("query", "key", "value")


class Projected(NamedTuple):
    """A projection, with the fields of a submodule."""

    name: str
    call: int
    module: nn.Module
    input: np.ndarray
    output: np.ndarray
    leaves: Mapping[str, str]
    first_rows: Mapping[str, int]


class ProjectionMode(TorchFunctionMode):
    """Records inputs and outputs of the projections of layers, which it computes as the function
    itself does.

    Attributes:
        inside: records by layer name.
    """

    def __init__(self, modules: Mapping[str, nn.Module], factors: Mapping[str, float]) -> None:
        """Accept the layers by name, and factors of the inputs of their projections, by projection
        name.
        """
        super().__init__()
        self.inside: dict[str, list[Projected]] = {}
        self._factors = factors
        self._name_of_weight = {}
        for name, module in modules.items():
            if type(module) is nn.MultiheadAttention:
                self._name_of_weight[module.out_proj.weight] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        if func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        bound = SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        name = self._name_of_weight.get(arguments["out_proj_weight"])
        if name is not None and arguments["query"].ndim == 3:
            _multiply_inputs(arguments, self._factor_of(name, arguments))
            self.inside.setdefault(name, []).extend(_projections(arguments))
        return func(**arguments)

    def _factor_of(self, name: str, arguments: Mapping[str, Any]) -> float:
        """Return the factor of the inputs of a layer."""
        projection = "in_proj"
        if arguments["use_separate_proj_weight"]:
            projection = "q_proj"
        if name:
            projection = f"{name}.{projection}"
        return self._factors.get(projection, 1.0)


def _multiply_inputs(arguments: dict[str, Any], factor: float) -> None:
    """Multiply the inputs in place; inputs that are one tensor stay one."""
    multiplied = {}
    for side in SIDES:
        x = arguments[side]
        if x not in multiplied:  # a tensor is equal to itself alone
            multiplied[x] = x * factor
        arguments[side] = multiplied[x]


def _projections(arguments: Mapping[str, Any]) -> list[Projected]:
    """Return the projections of one call of the function."""
    inputs = [arguments[side] for side in SIDES]
    functions = cast(Any, F)  # private ones, which compute the same bits
    bias = arguments["in_proj_bias"]
    biases = [None] * 3
    if bias is not None:
        biases = bias.chunk(3)
    if arguments["use_separate_proj_weight"]:
        weights = [arguments[f"{part}_proj_weight"] for part in "qkv"]
        outputs = functions._in_projection(*inputs, *weights, *biases)
        names = ["q_proj", "k_proj", "v_proj"]
        calls = [0, 0, 0]
        parts = ["bias"]
    else:
        packed = arguments["in_proj_weight"]
        weights = packed.chunk(3)
        outputs = functions._in_projection_packed(*inputs, packed, bias)
        names = ["in_proj", "in_proj", "in_proj"]
        calls = [0, 1, 2]
        parts = ["weight", "bias"]

    projections = []
    for index, name in enumerate(names):
        leaves = {"weight": f"{name}_weight", "bias": "in_proj_bias"}
        first_row = index * len(weights[0])
        projection = Projected(
            name,
            calls[index],
            _linear(weights[index], biases[index]),
            _by_sequence(inputs[index]),
            _by_sequence(outputs[index]),
            leaves,
            dict.fromkeys(parts, first_row),
        )
        projections.append(projection)
    return projections


def _by_sequence(x: Tensor) -> np.ndarray:
    """Return (T, B, features) as (B, T, features)."""
    return to_numpy(x.transpose(0, 1))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a module with these parameters."""
    module = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight.detach(), requires_grad=False)
    parameter = None
    if bias is not None:
        parameter = nn.Parameter(bias.detach(), requires_grad=False)
    module.register_parameter("bias", parameter)
    return module
