"""A program with the values of one call: what is constant in it, and which axes depend on which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parity.explain.identification.attention_finder import AttentionFinder
from parity.explain.identification.program import Operation, Program, Values


class ScalarProduct(NamedTuple):
    """A multiplication by a scalar.

    Attributes:
        source: number of the value that is multiplied.
        factor: the scalar.
    """

    source: int
    factor: float


@dataclass(frozen=True)
class EvaluatedProgram:
    """A program with the values of one call.

    Attributes:
        finder: the finder of attention in the program.
        values: all values of the call.
    """

    finder: AttentionFinder
    values: Values = field(repr=False)

    @property
    def program(self) -> Program:
        """Return the program."""
        return self.finder.program

    def array(self, number: int) -> np.ndarray:
        """Return a value."""
        return np.asarray(self.values[number])

    def shape(self, number: int) -> tuple[int, ...]:
        """Return the shape of a value."""
        return np.shape(self.values[number])

    # ---- Constants -------------------------------------------------------------------------------

    def is_constant(self, number: int) -> bool:
        """Return whether a value depends on no argument, and all its elements are equal."""
        if number in self.finder.varying or self.finder.leaves_of(number):
            return False
        return bool(np.ptp(self.array(number)) == 0)

    def constant(self, number: int) -> float:
        """Return the number of a constant value."""
        return float(self.array(number).flat[0])

    def scalar_product(self, operation: Operation) -> ScalarProduct | None:
        """Return an operation as a multiplication by a scalar; None if it is something else."""
        if operation.name not in ("mul", "div") or len(operation.inputs) != 2:
            return None
        left, right = operation.inputs
        if self.is_constant(right):
            if operation.name == "div":
                return ScalarProduct(left, self.constant(right) ** -1.0)
            return ScalarProduct(left, self.constant(right))
        # A product may have its constant on either side.
        if operation.name == "mul" and self.is_constant(left):
            return ScalarProduct(right, self.constant(left))
        return None

    def scalars_between(self, stop: int, target: int, low: float, high: float) -> list[float]:
        """Return the constant scalars between two bounds that a value is computed from, after a
        given value.
        """
        before = self.program.ancestors([target], [stop])
        scalars = set()
        for number in before & self.program.constants.keys():
            constant = np.asarray(self.program.constants[number])
            if constant.size != 1 or constant.dtype.kind not in "fiu":
                continue
            if low < constant.flat[0] < high:
                scalars.add(shortest_decimal(constant.flat[0]))
        return sorted(scalars)

    # ---- Axes ------------------------------------------------------------------------------------

    def follow_to_each(
        self, source: int, axis: int, targets: Sequence[int], fixed: Iterable[int]
    ) -> list[int | None]:
        """Return the axis of each target that belongs to an axis of the source.

        One index of the axis is changed. An axis of a target belongs to it if only the same index
        of that axis changes.

        Args:
            source: number of the changed value.
            axis: its axis.
            targets: numbers of other values.
            fixed: numbers of values that stay as they are, although they depend on the source.

        Returns:
            None for a target without such an axis, or with several.
        """
        index = self.shape(source)[axis] // 2
        changed_source = np.array(self.values[source])
        cell = (slice(None),) * axis + (index,)
        changed_source[cell] = 0.5 * changed_source[cell] + 0.25
        replaced = {number: self.values[number] for number in fixed}
        replaced[source] = changed_source
        after = self.program.recompute(self.values, replaced, targets)
        axes = []
        for target in targets:
            is_changed = np.asarray(after[target]) != self.array(target)
            axes.append(_only_axis(is_changed, index))
        return axes


def _only_axis(is_changed: np.ndarray, index: int) -> int | None:
    """Return the only axis on which just one index has changed."""
    axes = []
    for axis in range(is_changed.ndim):
        if is_changed.shape[axis] == 1:
            continue
        other_axes = tuple(other for other in range(is_changed.ndim) if other != axis)
        changed_indices = np.flatnonzero(is_changed.any(axis=other_axes))
        if changed_indices.tolist() == [index]:
            axes.append(axis)
    if len(axes) == 1:
        return axes[0]
    return None


@dataclass(frozen=True)
class AxisProbe:
    """Follows axes through a call while the inputs of an attention stay as they are.

    Heads may also depend on positions, and these on the inputs.

    Attributes:
        evaluated: the program with the values of the call.
        inputs: numbers of the inputs.
    """

    evaluated: EvaluatedProgram
    inputs: frozenset[int]

    def follow_to_each(self, source: int, axis: int, targets: Sequence[int]) -> list[int | None]:
        """Return the axis of each target that belongs to an axis of the source; None for none."""
        return self.evaluated.follow_to_each(source, axis, targets, self.inputs)

    def follow(self, source: int, axis: int, target: int) -> int | None:
        """Return the axis of a value that belongs to an axis of the source; None for none."""
        return self.follow_to_each(source, axis, [target])[0]

    def follow_if_wide(self, source: int, axis: int, target: int) -> int | None:
        """Return the same, and None for an axis with a single index, which leaves no trace."""
        if self.evaluated.shape(source)[axis] == 1:
            return None
        return self.follow(source, axis, target)


def shortest_decimal(x: Any) -> float:
    """Return a float32 number with the fewest digits that identify it."""
    return float(str(np.float32(x)))


def rounded_to_float32(x: float) -> float:
    """Return a number rounded to the digits that float32 can hold."""
    for rounded in _roundings(x):
        if abs(rounded - x) <= 3e-7 * abs(x):
            return rounded
    return x


def _roundings(x: float) -> Iterator[float]:
    for digits in range(1, 18):
        yield float(f"{x:.{digits}g}")
