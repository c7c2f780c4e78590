"""Find attention in a program: a softmax between two products, and the projections around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mha_spec import InputError
from parity.explain.identification.program import Operation, Program, Values


@dataclass(frozen=True)
class Linear:
    """A product of an input with parameters.

    Attributes:
        result: number of the product.
        given: number of its input.
        matrix: number of its matrix.
        axes: contracted axes of the input and of the matrix.
        is_input_first: whether the input is the first operand of the product.
        leaves: names of the parameters that the matrix is computed from.
    """

    result: int
    given: int
    matrix: int
    axes: tuple[tuple[int, ...], tuple[int, ...]]
    is_input_first: bool
    leaves: tuple[str, ...]

    def input(self, values: Values) -> np.ndarray:
        """Return the input as (tokens, features)."""
        return _last(np.asarray(values[self.given]), self.axes[0])

    def weight(self, values: Values) -> np.ndarray:
        """Return the matrix, (out, in)."""
        return _last(np.asarray(values[self.matrix]), self.axes[1])

    def places(self, values: Values) -> np.ndarray:
        """Return the index of each number of the product in an array (tokens, features)."""
        x, matrix = np.asarray(values[self.given]), np.asarray(values[self.matrix])
        tokens = [size for axis, size in enumerate(x.shape) if axis not in self.axes[0]]
        features = [size for axis, size in enumerate(matrix.shape) if axis not in self.axes[1]]
        places = np.arange(np.prod(tokens) * np.prod(features), dtype=np.int32).reshape(
            *tokens, *features
        )
        return (
            places
            if self.is_input_first
            else np.moveaxis(places, range(len(tokens)), range(-len(tokens), 0))
        )


@dataclass(frozen=True)
class Biased:
    """A product, or some features of it, with a bias.

    Attributes:
        result: number of the sum.
        places: index of each of its numbers in an array (tokens, features) of the product.
        bias: number of the bias; None if there is none.
        leaves: names of the parameters that the bias is computed from.
    """

    result: int
    places: np.ndarray = field(repr=False)
    bias: int | None = None
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attention:
    """Attention in a program; its values are given by number.

    Attributes:
        operands: queries, keys and values as the two products receive them.
        scores: product of queries and keys.
        logits: input of the softmax.
        weights: output of the softmax.
        context: product of the weights and values.
        projections: projections of queries, keys and values.
        out: projection of the context; None if there is none.
        gates: projections whose outputs multiply the context before `out`.
    """

    operands: Mapping[str, int]
    scores: int
    logits: int
    weights: int
    context: int
    projections: Mapping[str, Linear]
    out: Linear | None
    gates: tuple[Linear, ...]

    @property
    def linears(self) -> list[Linear]:
        """Return its projections, each once."""
        every = (*self.projections.values(), *self.gates, *([] if self.out is None else [self.out]))
        return list({each.result: each for each in every}.values())

    @property
    def numbers(self) -> dict[str, int]:
        """Return its values by stage name; q, k and v are the operands."""
        rest = {
            "scores": self.scores,
            "logits": self.logits,
            "attn_weights": self.weights,
            "context": self.context,
        }
        return {**self.operands, **rest}

    def exchanged(self) -> Attention:
        """Return the attention with queries and keys exchanged."""
        of = {"q": "k", "k": "q", "v": "v"}
        operands = {part: self.operands[of[part]] for part in of}
        return replace(
            self, operands=operands, projections={part: self.projections[of[part]] for part in of}
        )

    @property
    def leaves(self) -> list[str]:
        """Return the parameters of its projections."""
        return [leaf for each in self.linears for leaf in each.leaves]


class AttentionFinder:
    """Find attention in a program whose first arguments are parameters.

    Args:
        program: the program.
        names: names of the arguments that are parameters, by number.
    """

    def __init__(self, program: Program, names: Mapping[int, str]) -> None:
        self.program, self.names = program, names
        self.varying = program.after(number for number in program.arguments if number not in names)
        products = [each for each in program.operations if each.name == "dot_general"]
        self.linears = {
            each.made[0]: linear for each in products if (linear := self._linear(each)) is not None
        }
        self.products = {
            each.made[0]: each for each in products if self.varying.issuperset(each.given)
        }

    def leaves(self, number: int) -> tuple[str, ...]:
        """Return the names of the parameters that a value is computed from."""
        return tuple(
            sorted(self.names[each] for each in self.program.before([number]) if each in self.names)
        )

    def _linear(self, product: Operation) -> Linear | None:
        (left, right), batch = product.params["dimension_numbers"]
        first, second = product.given
        if any(map(len, batch)) or not left or (first in self.varying) == (second in self.varying):
            return None
        is_first = first in self.varying
        given, matrix = (first, second) if is_first else (second, first)
        leaves = self.leaves(matrix)
        axes = (tuple(left), tuple(right)) if is_first else (tuple(right), tuple(left))
        return Linear(product.made[0], given, matrix, axes, is_first, leaves) if leaves else None

    def attention(self) -> Iterator[Attention | tuple[list[str], str]]:
        """Yield each attention; or the parameters near a softmax, and the reason why it is not
        understood.
        """
        for operation in self.program.operations:
            logits = self._logits(operation)
            scores = set() if logits is None else self._nearest(logits)
            if logits is not None and not scores.isdisjoint(self.products):
                try:
                    yield self._whole(logits, operation.made[0], scores)
                except ValueError as error:
                    yield self._near(operation.made[0]), str(error)

    def _logits(self, quotient: Operation) -> int | None:
        """Return the input of the softmax that ends in an operation; None if no softmax does."""
        if quotient.name != "div":
            return None
        exponential = self.program.maker.get(self.program.origin(quotient.given[0]))
        if exponential is None or exponential.name != "exp":
            return None
        shifted = self.program.maker.get(exponential.given[0])
        return shifted.given[0] if shifted and shifted.name == "sub" else exponential.given[0]

    def _nearest(self, number: int) -> set[int]:
        """Return the nearest products that a value is computed from."""
        stops = self.products.keys() | self.linears.keys()
        return self.program.before([number], stops) & stops

    def _near(self, weights: int) -> list[str]:
        before = self.program.before([weights], self.linears) & self.linears.keys()
        return [leaf for number in before for leaf in self.linears[number].leaves]

    def _whole(self, logits: int, weights: int, scores: set[int]) -> Attention:
        if len(scores) > 1:
            raise InputError(
                "scores",
                "be one product of queries and keys, without parameters",
                f"{len(scores)} products",
            )
        moved = self._moved(weights)
        contexts = [
            each
            for number in moved
            for each in self.program.users.get(number, ())
            if each.made[0] in self.products
        ]
        if len(contexts) != 1:
            raise InputError(
                "context",
                "be one product of the softmax and values",
                f"{len(contexts)} such products",
            )
        (v,) = (number for number in contexts[0].given if number not in moved)
        (product,) = scores
        q, k = self.program.maker[product].given
        operands, context = {"q": q, "k": k, "v": v}, contexts[0].made[0]
        projections = {part: self._projection(part, number) for part, number in operands.items()}
        return Attention(
            operands, product, logits, weights, context, projections, *self._out(context)
        )

    def _moved(self, number: int) -> list[int]:
        """Return the values that hold the same numbers as a value, at other places."""
        found = [number]
        for each in found:
            found += [made for operation in self.program.moved(each) for made in operation.made]
        return found

    def _projection(self, part: str, number: int) -> Linear:
        nearest = self._nearest(number)
        if len(nearest) != 1 or not nearest <= self.linears.keys():
            raise InputError(part, "be made by one projection", f"{len(nearest)} products")
        return self.linears[nearest.pop()]

    def _out(self, context: int) -> tuple[Linear | None, tuple[Linear, ...]]:
        """Return the projection that receives a context, and those of gates; none if the context is
        a result.

        Raises:
            ValueError: if the context is used otherwise.
        """
        known = [context]
        for number in known:
            for each in self.program.users.get(number, ()):
                linear = self.linears.get(each.made[0])
                if linear is not None and linear.given == number:
                    gates = (
                        self.program.before([number], [*known[:1], *self.linears])
                        & self.linears.keys()
                    )
                    return linear, tuple(self.linears[gate] for gate in sorted(gates))
                if each.name == "mul" or self.program.moved_from(each) == number:
                    known += each.made
        if set(self._moved(context)).isdisjoint(self.program.results):
            raise InputError("context", "be the input of a projection", "another function of it")
        return None, ()

    def biased(self, linear: Linear, values: Values) -> list[Biased]:
        """Return a product with the biases that are added to all or some of its features."""
        places = linear.places(values)
        found: list[Biased] = []
        waiting = [(linear.result, places)]
        while waiting:
            number, places_of = waiting.pop()
            for each in self.program.users.get(number, ()):
                if each in list(self.program.moved(number)):
                    rest = [values[other] for other in each.given[1:]]
                    moved = (
                        [places_of]
                        if each.name == "convert_element_type"
                        else each.run(places_of, *rest)
                    )
                    waiting += [
                        (made, np.asarray(x)) for made, x in zip(each.made, moved, strict=True)
                    ]
                elif each.name == "add" and len(set(each.given)) == 2:
                    (other,) = set(each.given) - {number}
                    leaves = () if other in self.varying else self.leaves(other)
                    if leaves and np.shape(values[each.made[0]]) == places_of.shape:
                        found.append(Biased(each.made[0], places_of, other, leaves))
        covered = (
            np.unique(np.concatenate([each.places.ravel() for each in found]))
            if found
            else places[:0]
        )
        return found if covered.size == places.size else [Biased(linear.result, places), *found]


def _last(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Return an array (others, axes): some axes flattened into the last, all others into the
    first.
    """
    order = [axis for axis in range(x.ndim) if axis not in axes] + list(axes)
    return x.transpose(order).reshape(-1, int(np.prod([x.shape[axis] for axis in axes])))
