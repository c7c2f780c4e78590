"""Find the endpoints of attention in its module: the inputs of its projections, and the path of its
output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np

from mha_spec import InputError
from parity.explain.identification.observe import ObservedLayer, Submodule
from parity.explain.identification.trace import features_of, tokens_of

UNKNOWN = "an intermediate of the module"
"""Description of an input that is neither an argument of the module nor the output of a
submodule.
"""

MOST_STEPS = 4
"""Most steps of a module between the output of attention and its own output."""

SIDES = ("query", "key", "value")


class Endpoint(NamedTuple):
    """One call of a submodule of the layer that receives an input of attention or returns its
    output.
    """

    name: str
    call: int


Endpoints = Mapping[str, Endpoint]
"""Endpoints by name: `query`; `key` and `value` unless another layer has them; `output` if a
projection returns it.
"""


class Described(NamedTuple):
    """An array with its description."""

    array: np.ndarray
    description: str


def endpoint_of(submodule: Submodule) -> Endpoint:
    """Return a submodule as an endpoint."""
    return Endpoint(submodule.name, submodule.call)


def between_endpoints(layer: ObservedLayer, endpoints: Endpoints) -> ObservedLayer:
    """Return a layer with the inputs and the output of its projections, instead of its own.

    Raises:
        ValueError: if a projection did not run.
    """
    batch_size, _, num_queries, _ = layer.values["q"].shape
    num_keys = layer.values["k"].shape[2]
    inputs = {}
    for side in SIDES:
        if side not in endpoints:
            continue
        num_tokens = num_keys
        if side == "query":
            num_tokens = num_queries
        x = tokens_of(layer.submodule(*endpoints[side]).input, batch_size, num_tokens)
        if x is None:
            raise InputError(endpoints[side].name, f"receive the tokens of the {side}", "others")
        inputs[side] = x

    values = dict(layer.values)
    for name in ("input", "key_input", "value_input"):
        values.pop(name, None)
    values["input"] = inputs["query"]
    if "key" in inputs:
        # A value input that is missing is the key input, and that the input.
        if not np.array_equal(inputs["key"], inputs["query"]):
            values["key_input"] = inputs["key"]
        if not np.array_equal(inputs["value"], inputs["key"]):
            values["value_input"] = inputs["value"]
    output = _output_of(layer, endpoints).array
    values["output"] = output.reshape(batch_size, num_queries, -1)
    return layer.with_values(values)


def describe_endpoints(
    layer: ObservedLayer, endpoints: Endpoints, factor: float = 1.0
) -> dict[str, str]:
    """Describe where each endpoint is in its module.

    Args:
        layer: the layer as observed, not the result of `between_endpoints`.
        endpoints: the endpoints of its attention.
        factor: factor of the inputs of projections.

    Raises:
        ValueError: if the module changes the output in an unknown way.
    """
    descriptions = {}
    for side in SIDES:
        if side in endpoints:
            x = layer.submodule(*endpoints[side]).input
            descriptions[side] = _describe_input(layer, x, factor)
    descriptions["output"] = _describe_output(layer, _output_of(layer, endpoints))
    return descriptions


def _output_of(layer: ObservedLayer, endpoints: Endpoints) -> Described:
    """Return the output of attention; the context if no projection receives it."""
    if "output" not in endpoints:
        return Described(features_of(layer.values["context"]), "the context")
    end = endpoints["output"]
    return Described(layer.submodule(*end).output, f"the output of {end.name}")


# ---- Inputs --------------------------------------------------------------------------------------


def _describe_input(layer: ObservedLayer, x: np.ndarray, factor: float) -> str:
    sources = dict(_sources(layer))
    for name, source in sources.items():
        if _are_same_tokens(factor * source, x):
            # Terms of zeros may have been added.
            zeros = _arguments_of_zeros(layer, name, source, x)
            return " + ".join([*zeros, name])
    for (name, source), (other_name, other) in combinations(sources.items(), 2):
        if _may_be_added(source, other, x) and _are_same_tokens(factor * (source + other), x):
            return f"{name} + {other_name}"
    for name, source in sources.items():
        for other_name, other in sources.items():
            if not _may_be_joined(source, other, x):
                continue
            joined = np.concatenate([source, other], axis=1)
            if _are_same_tokens(factor * joined, x):
                return f"{name} followed by {other_name}"
    return UNKNOWN


def _sources(layer: ObservedLayer) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arguments of the module and outputs of submodules, with their descriptions."""
    yield from layer.arguments.items()
    for submodule in layer.inside:
        if not np.array_equal(submodule.input, submodule.output):
            yield f"the output of {submodule.name}", submodule.output


def _arguments_of_zeros(
    layer: ObservedLayer, name: str, source: np.ndarray, x: np.ndarray
) -> list[str]:
    """Return other arguments that are zeros and can be added to an input; none if that is zero."""
    zeros = []
    for other_name, other in layer.arguments.items():
        if other_name == name or other.any() or not x.any():
            continue
        if _may_be_added(other, source, x):
            zeros.append(other_name)
    return zeros


# ---- Output --------------------------------------------------------------------------------------


def _describe_output(layer: ObservedLayer, attention_output: Described) -> str:
    """Describe how the module computes its output from the output of attention."""
    reached = [attention_output]
    for _ in range(MOST_STEPS):
        further: list[Described] = []
        for described in reached:
            if _are_same_tokens(described.array, layer.values["output"]):
                return described.description
            further += _one_step_further(layer, described)
        reached = further
    start = attention_output.description
    raise InputError(
        "output", f"be {start}, changed by submodules and arguments alone", "something else"
    )


def _one_step_further(layer: ObservedLayer, described: Described) -> Iterator[Described]:
    """Yield the outputs of submodules for an array, and sums of it and an argument."""
    x, description = described
    for submodule in layer.inside:
        if np.array_equal(submodule.input, submodule.output):
            continue
        if _are_same_tokens(submodule.input, x):
            yield Described(submodule.output, f"{description}, then {submodule.name}")
    if "plus" in description:
        return
    for name, argument in layer.arguments.items():
        if _may_be_added(x, argument, x):
            yield Described(x + argument, f"{description}, plus {name}")


# ---- Arrays --------------------------------------------------------------------------------------


def _are_same_tokens(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays hold the same tokens, whatever their other axes."""
    if one.size != other.size or one.shape[-1] != other.shape[-1]:
        return False
    return bool((one.ravel() == other.ravel()).all())


def _may_be_added(one: np.ndarray, other: np.ndarray, total: np.ndarray) -> bool:
    """Return whether the sum of two arrays has the shape of a third."""
    try:
        return np.broadcast_shapes(one.shape, other.shape) == total.shape
    except ValueError:
        return False


def _may_be_joined(one: np.ndarray, other: np.ndarray, total: np.ndarray) -> bool:
    """Return whether two sequences after each other have the size of a third."""
    if not one.ndim == other.ndim == total.ndim == 3:
        return False
    if one.shape[0] != other.shape[0] or one.shape[2] != other.shape[2]:
        return False
    return one.size + other.size == total.size
