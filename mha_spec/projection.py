"""Linear projections of a layer and the shapes of their weights."""

from __future__ import annotations

from typing import NamedTuple


class Projection(NamedTuple):
    """Linear projection of a layer.

    Attributes:
        widths: width of each part of the output: one part, or q, k and v, which are initialized
            separately.
        d_in: width of its input.
        has_bias: True if a bias is added.
    """

    widths: tuple[int, ...]
    d_in: int
    has_bias: bool

    @property
    def d_out(self) -> int:
        """Width of its output."""
        return sum(self.widths)


def shapes_of(projections: dict[str, Projection]) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name of weights (out, in) and biases (out,)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, projection in projections.items():
        shapes[f"{name}.weight"] = (projection.d_out, projection.d_in)
        if projection.has_bias:
            shapes[f"{name}.bias"] = (projection.d_out,)
    return shapes
