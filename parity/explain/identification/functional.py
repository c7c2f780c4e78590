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


class Projected(NamedTuple):
    """A projection, with the fields of a submodule."""

    name: str
    call: int
    module: nn.Module
    given: np.ndarray
    result: np.ndarray
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
        self._names = {
            x.out_proj.weight: name
            for name, x in modules.items()
            if type(x) is nn.MultiheadAttention
        }
        self._factors = factors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        bound = SIGNATURE.bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        given = bound.arguments
        name = self._names.get(given["out_proj_weight"])
        if name is not None and given["query"].ndim == 3:
            projections = "q_proj" if given["use_separate_proj_weight"] else "in_proj"
            factor = self._factors.get(f"{name}.{projections}" if name else projections, 1.0)
            inputs = {
                x: x * factor for x in (given["query"], given["key"], given["value"])
            }  # shared ones stay so
            given |= {side: inputs[given[side]] for side in ("query", "key", "value")}
            self.inside.setdefault(name, []).extend(_projections(given))
        return func(**given)


def _projections(given: Mapping[str, Any]) -> list[Projected]:
    """Return the projections of one call of the function."""
    x = [given[side] for side in ("query", "key", "value")]
    bias, functions = (
        given["in_proj_bias"],
        cast(Any, F),
    )  # private functions, which compute the same bits
    biases = [None] * 3 if bias is None else bias.chunk(3)
    if given["use_separate_proj_weight"]:
        weights = [given[f"{part}_proj_weight"] for part in "qkv"]
        results, names = (
            functions._in_projection(*x, *weights, *biases),
            ["q_proj", "k_proj", "v_proj"],
        )
        leaves = [{"weight": f"{name}_weight", "bias": "in_proj_bias"} for name in names]
        parts = ["bias"]
    else:
        weights = given["in_proj_weight"].chunk(3)
        results, names = (
            functions._in_projection_packed(*x, given["in_proj_weight"], bias),
            ["in_proj"] * 3,
        )
        leaves = [{"weight": "in_proj_weight", "bias": "in_proj_bias"}] * 3
        parts = ["weight", "bias"]
    first_rows = [dict.fromkeys(parts, place * weights[0].shape[0]) for place in range(3)]
    modules = map(_linear, weights, biases)
    each = zip(names, modules, x, results, leaves, first_rows, strict=True)
    return [
        Projected(
            name,
            names[:place].count(name),
            module,
            _by_sequence(one),
            _by_sequence(other),
            of,
            first,
        )
        for place, (name, module, one, other, of, first) in enumerate(each)
    ]


def _by_sequence(x: Tensor) -> np.ndarray:
    """Return (T, B, features) as (B, T, features)."""
    return to_numpy(x.transpose(0, 1))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a module with these parameters."""
    module = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight.detach(), requires_grad=False)
    module.register_parameter(
        "bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    )
    return module
