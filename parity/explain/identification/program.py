"""A JAX function as a list of operations, whose values can be read and replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

INLINED = {
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "jit",
    "pjit",
    "remat",
    "remat2",
}
"""Primitives that only call a function."""

BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters of such a primitive that may hold the function."""

MOVING = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "dynamic_slice",
    "expand_dims",
    "gather",
    "reshape",
    "rev",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
}
"""Primitives that only move the values of their first operand to other positions."""

Values = Mapping[int, np.ndarray]
"""Values of a call, by number."""

Run = Callable[..., Sequence[Any]]
"""Computes the outputs of an operation from its inputs."""


@dataclass(frozen=True)
class Operation:
    """An operation of a program.

    Attributes:
        name: name of its primitive.
        inputs: numbers of its inputs.
        outputs: numbers of its outputs.
        params: parameters of its primitive.
        run: function that computes the outputs.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any] = field(repr=False)
    run: Run = field(repr=False)


class Program:
    """A function as operations, with calls inlined and loops over layers unrolled; each value has a
    number.

    Attributes:
        operations: the operations, in order.
        arguments: numbers of the flattened arguments of the function.
        results: numbers of its flattened outputs.
        constants: values that do not depend on the arguments.
        producer: the operation that returns each value.
        consumers: the operations that receive each value.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        closed = jax.make_jaxpr(function)(*arguments)
        self.operations: list[Operation] = []
        self.constants: dict[int, np.ndarray] = {}
        self.producer: dict[int, Operation] = {}
        self._count = 0
        self.arguments = [self._new_number() for _ in closed.jaxpr.invars]
        self.results = self._inline(closed, self.arguments)
        self.consumers: dict[int, list[Operation]] = {}
        for operation in self.operations:
            for number in operation.inputs:
                self.consumers.setdefault(number, []).append(operation)

    # ---- Translation of a jaxpr ------------------------------------------------------------------

    def _new_number(self) -> int:
        self._count += 1
        return self._count

    def _add_constant(self, value: Any) -> int:
        number = self._new_number()
        self.constants[number] = value
        return number

    def _add_operation(
        self,
        name: str,
        inputs: Sequence[int],
        num_outputs: int,
        params: Mapping[str, Any],
        run: Run,
    ) -> list[int]:
        """Append an operation, and return the numbers of its outputs."""
        outputs = [self._new_number() for _ in range(num_outputs)]
        operation = Operation(name, tuple(inputs), tuple(outputs), params, run)
        self.operations.append(operation)
        self.producer |= dict.fromkeys(outputs, operation)
        return outputs

    def _inline(self, body: Any, inputs: Sequence[int]) -> list[int]:
        """Append the operations of a jaxpr, closed or open, and return the numbers of its
        outputs.
        """
        jaxpr, constants = body, ()
        if hasattr(body, "consts"):
            jaxpr, constants = body.jaxpr, body.consts
        numbers = {}
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            numbers[variable] = self._add_constant(value)
        numbers |= dict(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            operands = [self._number_of(atom, numbers) for atom in equation.invars]
            outputs = self._add_equation(equation, operands)
            numbers |= dict(zip(equation.outvars, outputs, strict=True))
        return [self._number_of(atom, numbers) for atom in jaxpr.outvars]

    def _number_of(self, atom: Any, numbers: Mapping[Any, int]) -> int:
        if isinstance(atom, Literal):
            return self._add_constant(atom.val)
        return numbers[atom]

    def _add_equation(self, equation: Any, inputs: list[int]) -> list[int]:
        name, params = equation.primitive.name, equation.params
        if name in INLINED:
            body = next(params[parameter] for parameter in BODIES if parameter in params)
            return self._inline(body, inputs)
        if name == "scan":
            return self._unroll(params, inputs)
        run = _runner_of(equation.primitive, params)
        return self._add_operation(name, inputs, len(equation.outvars), params, run)

    def _unroll(self, params: Mapping[str, Any], inputs: list[int]) -> list[int]:
        """Append the steps of a scan one by one, and return the numbers of its outputs."""
        first_carry = params["num_consts"]
        first_stacked = first_carry + params["num_carry"]
        constants = inputs[:first_carry]
        carry = inputs[first_carry:first_stacked]
        stacked = inputs[first_stacked:]
        steps = list(range(params["length"]))
        order = steps
        if params["reverse"]:
            order = steps[::-1]
        results_of_step: dict[int, list[int]] = {}
        for step in order:
            slices = []
            for number in stacked:
                slices += self._add_operation("slice", [number], 1, {"step": step}, _taker_of(step))
            results = self._inline(params["jaxpr"], [*constants, *carry, *slices])
            carry = results[: params["num_carry"]]
            results_of_step[step] = results[params["num_carry"] :]
        outputs = list(carry)
        for numbers in zip(*(results_of_step[step] for step in steps), strict=True):
            outputs += self._add_operation("stack", numbers, 1, {}, _stack)
        return outputs

    # ---- Values of a call ------------------------------------------------------------------------

    def evaluate(
        self, arguments: Sequence[Any], changes: Mapping[int, Callable[[Any], Any]] | None = None
    ) -> Values:
        """Return every value of a call.

        Args:
            arguments: the flattened arguments.
            changes: functions that replace some values, by number.
        """
        if changes is None:
            changes = {}
        values: dict[int, Any] = dict(self.constants)
        values |= dict(zip(self.arguments, arguments, strict=True))
        for number in changes.keys() & values.keys():
            values[number] = changes[number](values[number])
        for operation in self.operations:
            results = operation.run(*(values[number] for number in operation.inputs))
            for number, result in zip(operation.outputs, results, strict=True):
                if number in changes:
                    result = changes[number](result)
                values[number] = result
        return values

    def recompute(
        self, values: Values, replaced: Values, targets: Iterable[int]
    ) -> dict[int, np.ndarray]:
        """Return some values of an evaluated call, recomputed after others are replaced.

        Args:
            values: all values of the call.
            replaced: the new values, by number; they stay as they are.
            targets: numbers of the values to return.
        """
        targets = list(targets)
        changed: dict[int, Any] = dict(replaced)
        needed = self.ancestors(targets)
        for operation in self.operations:
            if needed.isdisjoint(operation.outputs):
                continue
            if changed.keys().isdisjoint(operation.inputs):
                continue
            operands = [changed.get(number, values.get(number)) for number in operation.inputs]
            results = operation.run(*operands)
            for number, result in zip(operation.outputs, results, strict=True):
                if number not in replaced:
                    changed[number] = result
        return {number: changed.get(number, values[number]) for number in targets}

    # ---- Dependencies ----------------------------------------------------------------------------

    def ancestors(self, numbers: Iterable[int], stop: Iterable[int] = ()) -> set[int]:
        """Return the values that some are computed from, including these, no further than
        `stop`.
        """
        reached: set[int] = set()
        waiting, stops = list(numbers), set(stop)
        while waiting:
            number = waiting.pop()
            if number in reached:
                continue
            reached.add(number)
            if number in self.producer and number not in stops:
                waiting += self.producer[number].inputs
        return reached

    def descendants(self, numbers: Iterable[int]) -> set[int]:
        """Return the values that depend on some, including these."""
        reached = set(numbers)
        for operation in self.operations:
            if not reached.isdisjoint(operation.inputs):
                reached.update(operation.outputs)
        return reached

    def origin(self, number: int) -> int:
        """Return the first value that holds the same elements as a value, at other positions."""
        while number in self.producer:
            source = self.moved_from(self.producer[number])
            if source is None:
                break
            number = source
        return number

    def moved_from(self, operation: Operation) -> int | None:
        """Return the value whose elements an operation only moves; None if it does more."""
        if operation.name in MOVING:
            return operation.inputs[0]
        return None

    def moves_of(self, number: int) -> Iterator[Operation]:
        """Yield the operations that only move the elements of a value."""
        for operation in self.consumers.get(number, ()):
            if self.moved_from(operation) == number:
                yield operation

    def copies_of(self, number: int) -> list[int]:
        """Return the values that hold the same elements as a value, which is the first of them."""
        copies = [number]
        for copy in copies:  # grows during the loop
            for operation in self.moves_of(copy):
                copies += operation.outputs
        return copies


def _runner_of(primitive: Any, params: Mapping[str, Any]) -> Run:
    """Return a function that computes a primitive."""

    def run(*values: Any) -> Sequence[Any]:
        # TF32 or bfloat16 passes would hide equality.
        with jax.default_matmul_precision("highest"):
            result = primitive.bind(*values, **params)
        if primitive.multiple_results:
            return result
        return [result]

    return run


def _taker_of(step: int) -> Run:
    """Return a function that takes one step of a stacked value."""

    def take(stacked: Any) -> Sequence[Any]:
        return [stacked[step]]

    return take


def _stack(*values: Any) -> Sequence[Any]:
    return [jax.numpy.stack(values)]
