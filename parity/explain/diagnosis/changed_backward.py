"""The backward pass of the reference with some of its methods replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from parity.explain.diagnosis.bugs import Edit, edited_layer
from parity.explain.diagnosis.bugs.record import Override
from parity.measure.core.problem import Problem
from parity.measure.core.reference import Backward, Layer


class ChangedBackward(Backward):
    """Backward pass of the reference whose methods may be replaced by functions."""

    def __init__(self, layer: Layer, *, fused: bool = False) -> None:
        super().__init__(layer, fused)
        self.changes: list[Mapping[str, Override]] = []

    def override(self, changes: Mapping[str, Override]) -> None:
        """Replace methods by overrides: `override(backward, original, *inputs)`."""
        self.changes.append(changes)
        for method, override in changes.items():
            original: Any = getattr(self, method)
            setattr(self, method, partial(override, self, original))

    def with_overrides(self, changes: Mapping[str, Override]) -> ChangedBackward:
        """Return the backward pass with the overrides of this one and others, except overrides of
        all gradients, which may call it.
        """
        other = ChangedBackward(self.layer, fused=self.fused)
        for earlier in self.changes:
            of_parts = {name: x for name, x in earlier.items() if name != "gradients"}
            other.override(of_parts)
        other.override(changes)
        return other


def edited_backward(
    problem: Problem, dtype: str, edits: Sequence[Edit], arithmetic: str, *, fused: bool
) -> ChangedBackward:
    """Return the backward pass of the reference with edits, the first of them outermost."""
    layer = edited_layer(problem, dtype, edits, arithmetic)
    backward = ChangedBackward(layer, fused=fused)
    for edit in reversed(edits):
        if edit.backward:
            backward.override(edit.backward)
    return backward
