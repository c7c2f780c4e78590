"""Weights that change scores, by name, and their axes."""

from collections.abc import Mapping
from typing import TypeVar

from mha_spec.features.relative_products import RELATIVE_TABLES

Value = TypeVar("Value")

SCORE_WEIGHTS: dict[str, str] = {"sinks": "N", "relative_bias": "CN", **RELATIVE_TABLES}
"""Axes of each: N query heads, H features of a head, E features of the input, C buckets."""


def score_axes(name: str, shape: tuple[int, ...]) -> str:
    """Return the axes of such a weight in a layer, where heads may share it."""
    axes = SCORE_WEIGHTS[name]
    if len(shape) < len(axes):
        return axes.replace("N", "")
    return axes


def without_sinks(by_name: Mapping[str, Value]) -> dict[str, Value]:
    """Return weights, or their shapes, without the weights of the softmax: they change scores
    before it.
    """
    return {name: value for name, value in by_name.items() if name != "sinks"}
