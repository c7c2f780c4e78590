"""The linear maps that a layer holds, and the shapes of their weights."""

from __future__ import annotations

from typing import NamedTuple


class Projection(NamedTuple):
    """A linear map that a layer holds.

    Attributes:
        widths: of the parts of its output: one, or those of q, k and v, which are drawn each on their own.
        d_in: width of its input.
        has_bias: whether a bias is added.
    """

    widths: tuple[int, ...]
    d_in: int
    has_bias: bool

    @property
    def d_out(self) -> int:
        """Width of its output."""
        return sum(self.widths)


def shapes_of(projections: dict[str, Projection]) -> dict[str, tuple[int, ...]]:
    """Weights (out, in) and biases (out,) of projections: the shapes by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, projection in projections.items():
        shapes[f"{name}.weight"] = (projection.d_out, projection.d_in)
        if projection.has_bias:
            shapes[f"{name}.bias"] = (projection.d_out,)
    return shapes
