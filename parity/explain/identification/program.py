"""A JAX function as a list of operations, whose values can be read and replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

INLINED = {
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
"""Primitives that only call a function."""

MOVING = {
    *(
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "slice",
        "split",
        "rev",
        "copy",
        "copy_p",
    ),
    *("convert_element_type", "stop_gradient", "sharding_constraint", "gather", "dynamic_slice"),
}
"""Primitives that only move the numbers of their first operand to other places."""

Values = Mapping[int, np.ndarray]


@dataclass(frozen=True)
class Operation:
    """An operation of a program.

    Attributes:
        name: name of its primitive.
        given: numbers of its inputs.
        made: numbers of its outputs.
        params: parameters of its primitive.
        run: function that computes the outputs.
    """

    name: str
    given: tuple[int, ...]
    made: tuple[int, ...]
    params: Mapping[str, Any] = field(repr=False)
    run: Callable[..., Sequence[Any]] = field(repr=False)


class Program:
    """A function as operations, with calls inlined and loops over layers unrolled; each value has a
    number.

    Attributes:
        operations: the operations, in order.
        arguments: numbers of the flattened arguments of the function.
        results: numbers of its flattened outputs.
        constants: values that do not depend on the arguments.
        maker: the operation that returns each value.
        users: the operations that receive each value.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        closed = jax.make_jaxpr(function)(*arguments)
        self.operations: list[Operation] = []
        self.constants: dict[int, np.ndarray] = {}
        self.maker: dict[int, Operation] = {}
        self._count = 0
        self.arguments = [self._new() for _ in closed.jaxpr.invars]
        self.results = self._inline(closed, self.arguments)
        self.users: dict[int, list[Operation]] = {}
        for operation in self.operations:
            for number in operation.given:
                self.users.setdefault(number, []).append(operation)

    def _new(self) -> int:
        self._count += 1
        return self._count

    def _constant(self, value: Any) -> int:
        number = self._new()
        self.constants[number] = value
        return number

    def _add(
        self, name: str, given: Sequence[int], count: int, params: Mapping[str, Any], run: Any
    ) -> list[int]:
        made = [self._new() for _ in range(count)]
        operation = Operation(name, tuple(given), tuple(made), params, run)
        self.operations.append(operation)
        self.maker |= dict.fromkeys(made, operation)
        return made

    def _inline(self, inner: Any, given: Sequence[int]) -> list[int]:
        jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        numbers = dict(zip(jaxpr.constvars, map(self._constant, consts), strict=True))
        numbers |= dict(zip(jaxpr.invars, given, strict=True))

        def number(atom: Any) -> int:
            return self._constant(atom.val) if isinstance(atom, Literal) else numbers[atom]

        for equation in jaxpr.eqns:
            made = self._equation(equation, [number(atom) for atom in equation.invars])
            numbers |= dict(zip(equation.outvars, made, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, given: list[int]) -> list[int]:
        primitive, params = equation.primitive, equation.params
        if primitive.name in INLINED:
            inner = next(
                params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in params
            )
            return self._inline(inner, given)
        if primitive.name == "scan":
            return self._scan(params, given)

        def run(*values: Any) -> Sequence[Any]:
            with jax.default_matmul_precision(
                "highest"
            ):  # so that TF32 or bfloat16 passes don't hide equality
                result = primitive.bind(*values, **params)
            return result if primitive.multiple_results else [result]

        return self._add(primitive.name, given, len(equation.outvars), params, run)

    def _scan(self, params: Mapping[str, Any], given: list[int]) -> list[int]:
        begin = params["num_consts"] + params["num_carry"]
        fixed, carry, rest = (
            given[: params["num_consts"]],
            given[params["num_consts"] : begin],
            given[begin:],
        )
        steps = range(params["length"])
        stacked: dict[int, list[int]] = {}
        for step in reversed(steps) if params["reverse"] else steps:
            parts = [
                self._add("slice", [x], 1, {"step": step}, lambda x, step=step: [x[step]])[0]
                for x in rest
            ]
            made = self._inline(params["jaxpr"], [*fixed, *carry, *parts])
            carry, stacked[step] = made[: params["num_carry"]], made[params["num_carry"] :]
        columns = zip(*(stacked[step] for step in steps), strict=True)
        return [
            *carry,
            *(
                self._add("stack", each, 1, {}, lambda *x: [jax.numpy.stack(x)])[0]
                for each in columns
            ),
        ]

    def evaluate(
        self, arguments: Sequence[Any], change: Mapping[int, Callable[[Any], Any]] | None = None
    ) -> Values:
        """Return every value of a call, after applying `change` to some of them."""
        changes = change or {}
        values: dict[int, Any] = {
            **self.constants,
            **dict(zip(self.arguments, arguments, strict=True)),
        }
        values |= {number: changes[number](x) for number, x in values.items() if number in changes}
        for operation in self.operations:
            for number, x in zip(
                operation.made,
                operation.run(*(values[each] for each in operation.given)),
                strict=True,
            ):
                values[number] = changes[number](x) if number in changes else x
        return values

    def again(
        self, values: Values, replaced: Values, wanted: Iterable[int]
    ) -> dict[int, np.ndarray]:
        """Return some values of an evaluated call, recomputed after replacing others."""
        wanted = list(wanted)
        changed: dict[int, Any] = dict(replaced)
        within = self.before(wanted)
        for operation in self.operations:
            if not within.isdisjoint(operation.made) and not changed.keys().isdisjoint(
                operation.given
            ):
                made = operation.run(
                    *(changed.get(number, values.get(number)) for number in operation.given)
                )
                changed |= {
                    n: x for n, x in zip(operation.made, made, strict=True) if n not in replaced
                }
        return {number: changed.get(number, values[number]) for number in wanted}

    def before(self, numbers: Iterable[int], stop: Iterable[int] = ()) -> set[int]:
        """Return the values that some are computed from, including these, up to `stop`."""
        found: set[int] = set()
        waiting, stops = list(numbers), set(stop)
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                if number in self.maker and number not in stops:
                    waiting += self.maker[number].given
        return found

    def after(self, numbers: Iterable[int]) -> set[int]:
        """Return the values that depend on some, including these."""
        found = set(numbers)
        for operation in self.operations:
            if not found.isdisjoint(operation.given):
                found.update(operation.made)
        return found

    def origin(self, number: int) -> int:
        """Return the first value that holds the same numbers as a value, at other places."""
        while number in self.maker and (before := self.moved_from(self.maker[number])) is not None:
            number = before
        return number

    def moved_from(self, operation: Operation) -> int | None:
        """Return the value whose numbers an operation only moves; None if it does more."""
        return operation.given[0] if operation.name in MOVING else None

    def moved(self, number: int) -> Iterator[Operation]:
        """Yield the operations that only move the numbers of a value."""
        yield from (each for each in self.users.get(number, ()) if self.moved_from(each) == number)
