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
        output: number of the product.
        input: number of its input.
        matrix: number of its matrix.
        axes: contracted axes of the input and of the matrix.
        is_input_first: whether the input is the first operand of the product.
        leaves: names of the parameters that the matrix is computed from.
    """

    output: int
    input: int
    matrix: int
    axes: tuple[tuple[int, ...], tuple[int, ...]]
    is_input_first: bool
    leaves: tuple[str, ...]

    def input_of(self, values: Values) -> np.ndarray:
        """Return the input as (tokens, features)."""
        return _with_axes_last(np.asarray(values[self.input]), self.axes[0])

    def weight_of(self, values: Values) -> np.ndarray:
        """Return the matrix, (out, in)."""
        return _with_axes_last(np.asarray(values[self.matrix]), self.axes[1])

    def indices_of(self, values: Values) -> np.ndarray:
        """Return the index of each number of the product in an array (tokens, features)."""
        tokens = _other_sizes(values[self.input], self.axes[0])
        features = _other_sizes(values[self.matrix], self.axes[1])
        count = np.prod(tokens) * np.prod(features)
        indices = np.arange(count, dtype=np.int32).reshape(*tokens, *features)
        if self.is_input_first:
            return indices
        return np.moveaxis(indices, range(len(tokens)), range(-len(tokens), 0))


def _other_sizes(x: np.ndarray, contracted: Sequence[int]) -> list[int]:
    """Return the sizes of the axes that are not contracted."""
    return [size for axis, size in enumerate(np.shape(x)) if axis not in contracted]


def _with_axes_last(x: np.ndarray, last: Sequence[int]) -> np.ndarray:
    """Return an array (others, last): some axes flattened into the last one, all others into the
    first one.
    """
    others = [axis for axis in range(x.ndim) if axis not in last]
    width = int(np.prod([x.shape[axis] for axis in last]))
    return x.transpose([*others, *last]).reshape(-1, width)


@dataclass(frozen=True)
class BiasedProduct:
    """A product, or some features of it, with a bias.

    Attributes:
        output: number of the sum.
        indices: index of each of its elements in an array (tokens, features) of the product.
        bias: number of the bias; None if there is none.
        leaves: names of the parameters that the bias is computed from.
    """

    output: int
    indices: np.ndarray = field(repr=False)
    bias: int | None = None
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attention:
    """Attention in a program; its values are numbers of the program.

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
        projections = [*self.projections.values(), *self.gates]
        if self.out is not None:
            projections.append(self.out)
        return list({linear.output: linear for linear in projections}.values())

    @property
    def numbers(self) -> dict[str, int]:
        """Return its values by stage name; q, k and v are the operands."""
        return {
            **self.operands,
            "scores": self.scores,
            "logits": self.logits,
            "attn_weights": self.weights,
            "context": self.context,
        }

    @property
    def leaves(self) -> list[str]:
        """Return the parameters of its projections."""
        leaves: list[str] = []
        for linear in self.linears:
            leaves += linear.leaves
        return leaves

    def exchanged(self) -> Attention:
        """Return the attention with queries and keys exchanged."""
        operands, projections = self.operands, self.projections
        return replace(
            self,
            operands={"q": operands["k"], "k": operands["q"], "v": operands["v"]},
            projections={"q": projections["k"], "k": projections["q"], "v": projections["v"]},
        )


@dataclass(frozen=True)
class NotAttention:
    """A softmax that is not understood as attention.

    Attributes:
        leaves: the parameters near it.
        reason: why it is not understood.
    """

    leaves: list[str]
    reason: str


class AttentionFinder:
    """Find attention in a program whose first arguments are parameters.

    Attributes:
        program: the program.
        names: names of the arguments that are parameters, by number.
        varying: values that depend on other arguments than parameters.
        linears: products of such values with parameters, by number.
        products: products of two such values, by number.
    """

    def __init__(self, program: Program, names: Mapping[int, str]) -> None:
        self.program, self.names = program, names
        inputs = [number for number in program.arguments if number not in names]
        self.varying = program.descendants(inputs)
        self.linears: dict[int, Linear] = {}
        self.products: dict[int, Operation] = {}
        for operation in program.operations:
            if operation.name != "dot_general":
                continue
            linear = self._as_linear(operation)
            if linear is not None:
                self.linears[linear.output] = linear
            elif self.varying.issuperset(operation.inputs):
                self.products[operation.outputs[0]] = operation

    def leaves_of(self, number: int) -> tuple[str, ...]:
        """Return the names of the parameters that a value is computed from."""
        parameters = self.program.ancestors([number]) & self.names.keys()
        return tuple(sorted(self.names[parameter] for parameter in parameters))

    def _as_linear(self, product: Operation) -> Linear | None:
        """Return a product of an input with parameters; None for any other product."""
        (left_axes, right_axes), batch_axes = product.params["dimension_numbers"]
        left, right = product.inputs
        if any(map(len, batch_axes)) or not left_axes:
            return None
        if (left in self.varying) == (right in self.varying):
            return None
        is_input_first = left in self.varying
        number, matrix = left, right
        axes = tuple(left_axes), tuple(right_axes)
        if not is_input_first:
            number, matrix = right, left
            axes = tuple(right_axes), tuple(left_axes)
        leaves = self.leaves_of(matrix)
        if not leaves:
            return None
        return Linear(product.outputs[0], number, matrix, axes, is_input_first, leaves)

    # ---- Softmax ---------------------------------------------------------------------------------

    def find(self) -> Iterator[Attention | NotAttention]:
        """Yield each attention of the program, in order."""
        for operation in self.program.operations:
            logits = self._logits_of_softmax(operation)
            if logits is None:
                continue
            products = self._nearest_products(logits)
            if products.isdisjoint(self.products):
                continue
            weights = operation.outputs[0]
            try:
                yield self._attention(logits, weights, products)
            except ValueError as error:
                yield NotAttention(self._leaves_before(weights), str(error))

    def _logits_of_softmax(self, quotient: Operation) -> int | None:
        """Return the input of the softmax that ends in an operation; None if no softmax does."""
        if quotient.name != "div":
            return None
        exponential = self.program.producer.get(self.program.origin(quotient.inputs[0]))
        if exponential is None or exponential.name != "exp":
            return None
        shifted = self.program.producer.get(exponential.inputs[0])
        # A softmax may subtract the maximum first, which changes nothing.
        if shifted is not None and shifted.name == "sub":
            return shifted.inputs[0]
        return exponential.inputs[0]

    def _nearest_products(self, number: int) -> set[int]:
        """Return the nearest products that a value is computed from."""
        stops = self.products.keys() | self.linears.keys()
        return self.program.ancestors([number], stops) & stops

    def _leaves_before(self, weights: int) -> list[str]:
        nearest = self.program.ancestors([weights], self.linears) & self.linears.keys()
        leaves: list[str] = []
        for number in nearest:
            leaves += self.linears[number].leaves
        return leaves

    # ---- Products and projections ----------------------------------------------------------------

    def _attention(self, logits: int, weights: int, products: set[int]) -> Attention:
        """Return the attention around a softmax.

        Raises:
            ValueError: if it is not attention; the message names the stage.
        """
        if len(products) > 1:
            rule = "be one product of queries and keys, without parameters"
            raise InputError("scores", rule, f"{len(products)} products")
        (scores,) = products
        q, k = self.program.producer[scores].inputs
        v, context = self._product_with_values(weights)
        operands = {"q": q, "k": k, "v": v}
        projections = {part: self._projection(part, operands[part]) for part in operands}
        out, gates = self._output_projection(context)
        return Attention(operands, scores, logits, weights, context, projections, out, gates)

    def _product_with_values(self, weights: int) -> tuple[int, int]:
        """Return the values, and their product with attention weights."""
        copies = self.program.copies_of(weights)
        contexts = []
        for number in copies:
            for operation in self.program.consumers.get(number, ()):
                if operation.outputs[0] in self.products:
                    contexts.append(operation)
        if len(contexts) != 1:
            rule = "be one product of the softmax and values"
            raise InputError("context", rule, f"{len(contexts)} such products")
        (v,) = (number for number in contexts[0].inputs if number not in copies)
        return v, contexts[0].outputs[0]

    def _projection(self, part: str, operand: int) -> Linear:
        nearest = self._nearest_products(operand)
        if len(nearest) != 1 or not nearest <= self.linears.keys():
            raise InputError(part, "be made by one projection", f"{len(nearest)} products")
        return self.linears[nearest.pop()]

    def _output_projection(self, context: int) -> tuple[Linear | None, tuple[Linear, ...]]:
        """Return the projection that receives a context, and the projections of gates; none if the
        context is a result.

        Raises:
            ValueError: if the context is used otherwise.
        """
        reached = [context]
        for number in reached:  # grows during the loop
            for operation in self.program.consumers.get(number, ()):
                linear = self.linears.get(operation.outputs[0])
                if linear is not None and linear.input == number:
                    return linear, self._gates_between(context, number)
                if operation.name == "mul" or self.program.moved_from(operation) == number:
                    reached += operation.outputs
        if set(self.program.copies_of(context)).isdisjoint(self.program.results):
            raise InputError(
                "context", "be the input of a projection", "a different function of it"
            )
        return None, ()

    def _gates_between(self, context: int, projected: int) -> tuple[Linear, ...]:
        """Return the projections that a projected value depends on, apart from the context."""
        stops = [context, *self.linears]
        gates = self.program.ancestors([projected], stops) & self.linears.keys()
        return tuple(self.linears[gate] for gate in sorted(gates))

    # ---- Biases ----------------------------------------------------------------------------------

    def with_biases(self, linear: Linear, values: Values) -> list[BiasedProduct]:
        """Return a product with the biases that are added to all or some of its features."""
        all_indices = linear.indices_of(values)
        sums: list[BiasedProduct] = []
        waiting = [(linear.output, all_indices)]
        while waiting:
            number, indices = waiting.pop()
            for operation in self.program.consumers.get(number, ()):
                if self.program.moved_from(operation) == number:
                    waiting += _moved_indices(operation, indices, values)
                    continue
                biased = self._as_sum(operation, number, indices, values)
                if biased is not None:
                    sums.append(biased)
        if sums:
            covered = np.unique(np.concatenate([biased.indices.ravel() for biased in sums]))
            if covered.size == all_indices.size:
                return sums
        # Some features have no bias: the product itself holds them.
        return [BiasedProduct(linear.output, all_indices), *sums]

    def _as_sum(
        self, operation: Operation, number: int, indices: np.ndarray, values: Values
    ) -> BiasedProduct | None:
        """Return the sum of a value and parameters; None if an operation is something else."""
        if operation.name != "add" or len(set(operation.inputs)) != 2:
            return None
        (bias,) = set(operation.inputs) - {number}
        if bias in self.varying or np.shape(values[operation.outputs[0]]) != indices.shape:
            return None
        leaves = self.leaves_of(bias)
        if not leaves:
            return None
        return BiasedProduct(operation.outputs[0], indices, bias, leaves)


def _moved_indices(
    operation: Operation, indices: np.ndarray, values: Values
) -> list[tuple[int, np.ndarray]]:
    """Return the outputs of an operation that moves elements, with the moved indices."""
    if operation.name == "convert_element_type":  # indices stay integers
        return [(operation.outputs[0], indices)]
    others = [values[number] for number in operation.inputs[1:]]
    moved = operation.run(indices, *others)
    return [(out, np.asarray(x)) for out, x in zip(operation.outputs, moved, strict=True)]
