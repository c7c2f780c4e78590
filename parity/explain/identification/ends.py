"""Find the ends of attention in its module: the inputs of its projections, and the path of its
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

LONGEST = 4
"""Most steps of a module between the output of attention and its own output."""


class End(NamedTuple):
    """One call of a submodule of the layer that receives an input of attention or returns its
    output.
    """

    name: str
    call: int


Ends = Mapping[str, End]
"""Ends by name: `query`; `key` and `value` unless the layer shares them; `output` if a projection
returns it.
"""


def end_of(submodule: Submodule) -> End:
    """Return a submodule as an end."""
    return End(submodule.name, submodule.call)


def between(layer: ObservedLayer, ends: Ends) -> ObservedLayer:
    """Return a layer with the inputs and the output of its projections.

    Raises:
        ValueError: if a projection did not run.
    """
    batch_size, _, num_tokens, _ = layer.values["q"].shape
    num_keys = layer.values["k"].shape[2]
    given = {}
    for side in _sides(ends):
        x = tokens_of(
            layer.submodule(*ends[side]).given,
            batch_size,
            num_tokens if side == "query" else num_keys,
        )
        if x is None:
            raise InputError(ends[side].name, f"receive the tokens of the {side}", "others")
        given[side] = x
    values = {
        name: x
        for name, x in layer.values.items()
        if name not in ("input", "key_input", "value_input")
    }
    values["input"] = given["query"]
    if "key" in given:
        values |= (
            {} if np.array_equal(given["key"], given["query"]) else {"key_input": given["key"]}
        )
        values |= (
            {} if np.array_equal(given["value"], given["key"]) else {"value_input": given["value"]}
        )
    output, _ = _output_of(layer, ends)
    values["output"] = output.reshape(batch_size, num_tokens, -1)
    return layer.with_values(values)


def words_of(layer: ObservedLayer, ends: Ends, factor: float = 1.0) -> dict[str, str]:
    """Describe the place of each end in its module.

    Args:
        layer: the layer as observed, not the result of `between`.
        ends: the ends of its attention.
        factor: of the inputs of projections.

    Raises:
        ValueError: if the module changes the output in an unknown way.
    """
    found = {
        side: _words_of_input(layer, layer.submodule(*ends[side]).given, factor)
        for side in _sides(ends)
    }
    return {**found, "output": _words_of_output(layer, *_output_of(layer, ends))}


def _sides(ends: Ends) -> list[str]:
    """Return the inputs that a layer makes something of: the query alone if keys and values are
    another layer's.
    """
    return [side for side in ("query", "key", "value") if side in ends]


def _output_of(layer: ObservedLayer, ends: Ends) -> tuple[np.ndarray, str]:
    """Return the output of attention, and its name; the context if no projection receives it."""
    if "output" not in ends:
        return features_of(layer.values["context"]), "the context"
    end = ends["output"]
    return layer.submodule(*end).result, f"the output of {end.name}"


def _words_of_input(layer: ObservedLayer, x: np.ndarray, factor: float) -> str:
    known = dict(_known(layer))
    for name, each in known.items():
        if _is(factor * each, x):
            others = (
                (other, y)
                for other, y in layer.arguments.items()
                if other != name and _may_be_added(y, each, x)
            )
            zeros = [other for other, y in others if x.any() and not y.any()]
            return " + ".join([*zeros, name])  # terms of zeros may have been added
    for (name, one), (other_name, other) in combinations(known.items(), 2):
        if _may_be_added(one, other, x) and _is(factor * (one + other), x):
            return f"{name} + {other_name}"
    for name, one in known.items():
        for other_name, other in known.items():
            if _may_be_joined(one, other, x) and _is(
                factor * np.concatenate([one, other], axis=1), x
            ):
                return f"{name} followed by {other_name}"
    return UNKNOWN


def _known(layer: ObservedLayer) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arguments of the module and outputs of submodules, with their descriptions."""
    yield from layer.arguments.items()
    for each in layer.inside:
        if not np.array_equal(each.given, each.result):
            yield f"the output of {each.name}", each.result


def _words_of_output(layer: ObservedLayer, output: np.ndarray, name: str) -> str:
    """Describe how the module computes its output from that of attention."""
    target, ways = layer.values["output"], [(output, name)]
    for _ in range(LONGEST):
        for x, words in ways:
            if _is(x, target):
                return words
        ways = [further for way in ways for further in _further(layer, *way)]
    raise InputError("output", f"be {name}, changed by submodules and arguments alone", "another")


def _further(layer: ObservedLayer, x: np.ndarray, words: str) -> Iterator[tuple[np.ndarray, str]]:
    """Yield the outputs of submodules for x, and sums of x and an argument."""
    for each in layer.inside:
        if _is(each.given, x) and not np.array_equal(each.given, each.result):
            yield each.result, f"{words}, then {each.name}"
    for name, other in layer.arguments.items():
        if "plus" not in words and _may_be_added(x, other, x):
            yield x + other, f"{words}, plus {name}"


def _is(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays hold the same tokens."""
    return (
        one.size == other.size
        and one.shape[-1] == other.shape[-1]
        and bool((one.ravel() == other.ravel()).all())
    )


def _may_be_added(one: np.ndarray, other: np.ndarray, total: np.ndarray) -> bool:
    try:
        return np.broadcast_shapes(one.shape, other.shape) == total.shape
    except ValueError:
        return False


def _may_be_joined(one: np.ndarray, other: np.ndarray, total: np.ndarray) -> bool:
    if not one.ndim == other.ndim == total.ndim == 3:
        return False
    return (
        one.shape[0] == other.shape[0]
        and one.shape[2] == other.shape[2]
        and one.size + other.size == total.size
    )
