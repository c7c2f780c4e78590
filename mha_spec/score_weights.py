"""Weights that change scores, by name, and their axes."""

from mha_spec.features.relative_products import RELATIVE_TABLES

SCORE_WEIGHTS: dict[str, str] = {"sinks": "N", "relative_bias": "CN", **RELATIVE_TABLES}
"""Axes of each: N query heads, H features of a head, E features of the input, C buckets."""


def score_axes(name: str, shape: tuple[int, ...]) -> str:
    """Return the axes of such a weight in a layer, where heads may share it."""
    axes = SCORE_WEIGHTS[name]
    if len(shape) < len(axes):
        return axes.replace("N", "")
    return axes
