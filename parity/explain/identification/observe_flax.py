"""Observe the attention layers of a live Flax model: its call as a program whose values are all
visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from mha_spec import InputError
from parity.explain.identification.arrangement import ArrangedAttention, arrange
from parity.explain.identification.attention_finder import (
    AttentionFinder,
    BiasedProduct,
    Linear,
    NotAttention,
)
from parity.explain.identification.call_masks import HIDES
from parity.explain.identification.flax_model import flax_model
from parity.explain.identification.from_call import (
    BIAS,
    MASK,
    POSITIONS,
    SCALE,
    SEGMENTS,
    are_segments,
)
from parity.explain.identification.observe import ObservedLayer, Submodule
from parity.explain.identification.program import Program, Values
from parity.explain.identification.program_norms import NormOfProgram
from parity.explain.identification.trace import columns_of, features_of
from parity.measure.core.arrays import to_jax
from parity.port.tapping.record import TappedCall, TappedLayer

RANDOM = ("random_bits", "threefry2x32")
"""Primitives that draw random numbers."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of a linear map or a norm in torch's form, which fits read: a weight (out, in)."""

    weight: np.ndarray | None = None
    bias: np.ndarray | None = None
    eps: float = 0.0

    def named_parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the existing parameters by name."""
        if self.weight is not None:
            yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias


@dataclass(frozen=True)
class ProgramPart:
    """A linear map or a norm of a program in a call, like a submodule.

    Attributes:
        leaves: names of the parameters that its weight and its bias are computed from.
        parameters: its parameters.
        input: its input, (B, T, …).
        output: its output, (B, T, …).
    """

    leaves: Mapping[str, Sequence[str]]
    parameters: Parameters
    input: np.ndarray
    output: np.ndarray


class FlaxObserver:
    """Call a Flax model, and observe its attention layers.

    Attributes:
        inputs: arrays by the first keyword that holds them.
        arrangements: attention by layer name.
        rejections: reason why attention could not be arranged as heads, by layer name.
        layers: names of the layers, in order.
        observed: the layers in the call with these inputs.

    Args:
        model: a module.
        inputs: keyword arguments of a call.
        layers: names of modules or classes, as in `parity.tap`.

    Raises:
        ValueError: if it cannot be traced, uses dropout, or has no attention.
    """

    def __init__(self, model: Any, inputs: Mapping[str, Any], layers: Any = None) -> None:
        self.model = flax_model(model)
        self._arguments = _Arguments(inputs)
        self.inputs = self._arguments.arrays
        self.program = self._trace()
        names = dict(zip(self.program.arguments, self.model.leaves, strict=False))
        self.finder = AttentionFinder(self.program, names)
        self.arrangements: dict[str, ArrangedAttention] = {}
        self.observed: list[ObservedLayer] = []
        self.rejections: dict[str, str] = {}
        self._leaves_of_layer: dict[str, Sequence[str]] = {}
        self._full_names: dict[tuple[str, str], str] = {}
        patterns = layers
        if isinstance(layers, str):
            patterns = (layers,)
        self._find_layers(patterns)
        self._reject_unobserved_modules(patterns)
        if not self._leaves_of_layer:
            got = "none"
            if patterns is not None:
                got = f"none in {list(patterns)}"
            raise InputError("model", "have attention: a softmax between two products", got)
        self.layers = list(self._leaves_of_layer)

    def _trace(self) -> Program:
        """Return the call of the model as a program.

        Raises:
            ValueError: if it cannot be traced, or draws random numbers.
        """

        def call(leaves: list[Any], arrays: dict[str, Any]) -> Any:
            return self.model.call(leaves, self._arguments.complete(arrays))

        try:
            program = Program(call, list(self.model.leaves.values()), self.inputs)
        except jax.errors.JAXTypeError as error:
            reason = str(error).partition("\n")[0]
            rule = "be a function that jax.make_jaxpr can trace"
            raise InputError("model", rule, reason) from error
        needed = program.ancestors(program.results)
        for operation in program.operations:
            if operation.name in RANDOM and not needed.isdisjoint(operation.outputs):
                rule = "be in evaluation: model.eval(), or deterministic=True"
                raise InputError("model", rule, "random numbers in its call")
        return program

    # ---- Layers ----------------------------------------------------------------------------------

    def _find_layers(self, patterns: Sequence[str] | None) -> None:
        """Find the layers that match patterns, and arrange their values."""
        values = self._evaluate(self.inputs)
        for attention in self.finder.find():
            name = self._name_of(attention.leaves)
            if not self._is_requested(name, patterns):
                continue
            self._leaves_of_layer[name] = attention.leaves
            if isinstance(attention, NotAttention):
                self.rejections[name] = attention.reason
                continue
            try:
                arrangement = arrange(self.finder, attention, values)
                index = len(self.observed)
                self.observed.append(self._layer(index, name, arrangement, values, self.inputs))
                self.arrangements[name] = arrangement
            except ValueError as error:
                self.rejections[name] = str(error)

    def _reject_unobserved_modules(self, patterns: Sequence[str] | None) -> None:
        """Reject requested modules of attention in which no softmax was observed."""
        leaves: list[str] = []
        for leaves_of_layer in self._leaves_of_layer.values():
            leaves += leaves_of_layer
        modules = [name for name, kind in self.model.classes.items() if "Attention" in kind]
        for module in modules:
            others = [name for name in modules if name != module]
            has_inner = any(self.model.is_inside(name, module) for name in others)
            has_softmax = any(self.model.is_inside(leaf, module) for leaf in leaves)
            if has_inner or has_softmax or not self._is_requested(module, patterns):
                continue
            self._leaves_of_layer[module] = []
            self.rejections[module] = "no softmax between two products was observed in its call"

    def _name_of(self, leaves: Sequence[str]) -> str:
        """Return a name for a layer with these parameters, unlike the names of earlier layers."""
        name = ""
        if leaves:
            name = self.model.owner(leaves)
        if not name:
            name = self.model.classes.get("", "model")
        earlier = [layer for layer in self._leaves_of_layer if layer.partition(":")[0] == name]
        if earlier:
            return f"{name}:{len(earlier)}"
        return name

    def _kind_of(self, name: str) -> str:
        return self.model.classes.get(name.partition(":")[0], name)

    def _is_requested(self, name: str, patterns: Sequence[str] | None) -> bool:
        if patterns is None:
            return True
        names = (name, self._kind_of(name))
        return any(fnmatchcase(own, pattern) for own, pattern in product(names, patterns))

    # ---- Calls -----------------------------------------------------------------------------------

    def _evaluate(
        self, inputs: Mapping[str, Any], changes: Mapping[int, Callable[[Any], Any]] | None = None
    ) -> Values:
        arrays = [inputs[name] for name in sorted(self.inputs)]
        return self.program.evaluate([*self.model.leaves.values(), *arrays], changes)

    def observe(self, inputs: Mapping[str, Any], factor: float = 1.0) -> list[ObservedLayer]:
        """Call the model with other inputs, and return its attention layers.

        Args:
            inputs: arrays by the names of `inputs`.
            factor: factor of the input of each attention layer.
        """
        changes: dict[int, Callable[[Any], Any]] = {}
        if factor != 1.0:
            for arrangement in self.arrangements.values():
                changes |= dict.fromkeys(arrangement.inputs.values(), _Multiplier(factor))
        return self._observed_layers(self._evaluate(inputs, changes), inputs)

    def observe_far(self, inputs: Mapping[str, Any], first: int) -> list[ObservedLayer]:
        """Call the model with tokens at positions from `first` on, and return some of its layers.

        Layers whose positions cannot be moved, or whose mask counts from the first token, are left
        out.
        """
        values = self._evaluate(inputs)
        layers = []
        for near in self._observed_layers(values, inputs):
            index, name = near.tapped.index, near.tapped.name
            arrangement = self.arrangements[name]
            if not arrangement.positions:
                continue
            far_values = arrangement.with_positions_from(values, first)
            far = self._layer(index, name, arrangement, far_values, inputs)
            if np.array_equal(far.values["mask"], near.values["mask"]):
                layers.append(far)
        return layers

    def _observed_layers(self, values: Values, inputs: Mapping[str, Any]) -> list[ObservedLayer]:
        """Return the layers in a call; for the others, record the reason."""
        layers = []
        for index, (name, arrangement) in enumerate(self.arrangements.items()):
            try:
                layers.append(self._layer(index, name, arrangement, values, inputs))
            except ValueError as error:
                self.rejections.setdefault(name, str(error))
        return layers

    def _layer(
        self,
        index: int,
        name: str,
        arrangement: ArrangedAttention,
        values: Values,
        inputs: Mapping[str, Any],
    ) -> ObservedLayer:
        """Return a layer in a call in the form of one of torch."""
        heads = arrangement.heads(values)
        record = self._record(arrangement, values, heads)
        inside: list[Submodule] = []
        for part in self._parts(arrangement, values, heads["context"]):
            names = {}
            for leaf, leaves in part.leaves.items():
                names[leaf] = self._relative_name(leaves, name)
            submodule_name = names.get("weight", "a norm")
            for leaf, parameter in names.items():
                self._full_names[name, f"{submodule_name}.{leaf}"] = parameter
            call = sum(submodule.name == submodule_name for submodule in inside)
            module: Any = part.parameters
            inside.append(Submodule(submodule_name, call, module, part.input, part.output))

        tapped = TappedLayer(
            name,
            index,
            self._kind_of(name),
            scale=arrangement.scale,
            soft_cap=arrangement.factors.soft_cap,
        )
        tapped.calls.append(TappedCall(record, 0))
        arguments, numbers = {}, {}
        for argument, x in inputs.items():
            array = np.asarray(x)
            if array.dtype.kind == "f":
                arguments[argument] = array
            elif array.dtype.kind in "iu":
                numbers[argument] = array
        model: Any = SimpleNamespace(named_parameters=self.model.leaves.items)
        module: Any = SimpleNamespace(named_parameters=_no_parameters)
        return ObservedLayer(model, module, tapped, arguments, inside, numbers)

    def _record(
        self, arrangement: ArrangedAttention, values: Values, heads: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the values of a layer in a call by the names of a tap."""
        x = np.asarray(values[arrangement.inputs["q"]])
        record = {part: heads[part] for part in ("q", "k", "v", "attn_weights", "context")}
        record["mask"] = arrangement.is_hidden(heads)
        record["scores"] = heads["logits"]
        for number in arrangement.positions:
            record["positions"] = np.broadcast_to(np.unique(values[number]), x.shape[:2])
        out = arrangement.attention.out
        if out is None:
            output = features_of(heads["context"])
        else:
            output = self._output_of(out, values)
        record["output"] = output.reshape(*x.shape[:2], -1)
        return record

    def _output_of(self, linear: Linear, values: Values) -> np.ndarray:
        """Return all features of a product, with the bias that is added to all of them, (tokens,
        features).

        Raises:
            ValueError: if there are several biases, or one is added to only some features.
        """
        sums = self.finder.with_biases(linear, values)
        if len(sums) != 1:
            rule = "be a product with one bias or none"
            raise InputError("output", rule, f"{len(sums)} with and without one")
        width = len(linear.weight_of(values))
        return _features(values[sums[0].output], sums[0].indices, width)

    # ---- Linear maps and norms -------------------------------------------------------------------

    def _parts(
        self, arrangement: ArrangedAttention, values: Values, context: np.ndarray
    ) -> Iterator[ProgramPart]:
        """Yield the linear maps and the norms of a layer in a call."""
        batch_size = context.shape[0]
        for linear in arrangement.attention.linears:
            x, weight = linear.input_of(values), linear.weight_of(values)
            if linear is arrangement.attention.out:
                # The context of a layer has its heads in the order of their key heads.
                order = _order_of(features_of(context), x)
                x, weight = x[:, order], weight[:, order]
            for biased in self.finder.with_biases(linear, values):
                yield _linear_part(linear, biased, x, weight, values, batch_size)
        for norm in arrangement.norms.values():
            yield self._norm_part(norm, values)

    def _norm_part(self, norm: NormOfProgram, values: Values) -> ProgramPart:
        leaves, arrays = {}, {}
        for leaf, number in norm.parameters.items():
            leaves[leaf] = (self.finder.names[number],)
            arrays[leaf] = np.ravel(np.asarray(values[number]))
        return ProgramPart(
            leaves,
            Parameters(**arrays, eps=norm.eps),
            _with_one_head_axis(norm.input_of(values)),
            _with_one_head_axis(norm.output_of(values)),
        )

    # ---- Names and arguments ---------------------------------------------------------------------

    def _relative_name(self, leaves: Sequence[str], name: str) -> str:
        """Return the names of parameters relative to the layer."""
        owner = self.model.owner(self._leaves_of_layer[name])
        prefix = f"{owner}{self.model.separator}"
        return " and ".join(leaf.removeprefix(prefix) for leaf in leaves)

    def parameter_names(self, name: str, names: Mapping[str, str]) -> dict[str, str]:
        """Return the names of parameters of a layer, by weight, as the model has them.

        Args:
            name: name of the layer.
            names: names of the parameters in fits, by weight.
        """
        own_names = {}
        for weight, parameter in names.items():
            own_names[weight] = self._full_names.get((name, parameter), parameter)
        return own_names

    def possible_bases(self, name: str) -> dict[str, Any]:
        """Return scalars that may be the RoPE base of a layer, in the form of configurations."""
        bases = {}
        for constant in self.arrangements[name].constants_of_queries():
            bases[str(constant)] = {"rope_theta": constant}
        return bases

    def from_call(self, name: str) -> dict[str, str]:
        """Return the arguments that the attention of a layer depends on apart from its inputs, by
        part of a call.
        """
        arrangement = self.arrangements[name]
        attention = arrangement.attention
        inputs, operands = set(arrangement.inputs.values()), set(attention.operands.values())
        before_heads = self.program.ancestors(operands, inputs)
        before_scores = self.program.ancestors([attention.logits], inputs | operands)
        (layer,) = (layer for layer in self.observed if layer.tapped.name == name)

        names_of_part: dict[str, list[str]] = {}
        numbers = self.program.arguments[len(self.model.leaves) :]
        for argument, number in zip(sorted(self.inputs), numbers, strict=True):
            if number in inputs:
                continue
            if number in before_heads:
                names_of_part.setdefault(POSITIONS, []).append(argument)
            if number in before_scores:
                value = np.asarray(self.inputs[argument])
                part = _part_of_scores(value, layer.values["mask"])
                names_of_part.setdefault(part, []).append(argument)
        return {part: " and ".join(names) for part, names in names_of_part.items()}


class _Arguments:
    """Keyword arguments of a call, of which the arrays vary.

    Attributes:
        arrays: arrays by the first keyword that holds them.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.arrays: dict[str, Any] = {}
        self._first_keyword: dict[str, str] = {}
        self._others: dict[str, Any] = {}
        keyword_of_array: dict[int, str] = {}
        for name, x in inputs.items():
            if not (hasattr(x, "dtype") and hasattr(x, "shape")):
                self._others[name] = x
                continue
            first = keyword_of_array.setdefault(id(x), name)
            self._first_keyword[name] = first
            if first == name:
                self.arrays[name] = to_jax(x)

    def complete(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return all keyword arguments with these arrays."""
        arguments = dict(self._others)
        for name, first in self._first_keyword.items():
            arguments[name] = arrays[first]
        return arguments


@dataclass(frozen=True)
class _Multiplier:
    """Multiplies a value."""

    factor: float

    def __call__(self, x: Any) -> Any:
        return x * self.factor


def _no_parameters(recurse: bool = True) -> tuple[()]:
    """Return no parameters: biases are seen in the program."""
    return ()


def _part_of_scores(value: np.ndarray, hidden: np.ndarray) -> str:
    """Return the part of a call that an argument is on which scores depend."""
    if value.size == 1:
        return SCALE
    if are_segments(value, hidden):
        return SEGMENTS
    is_floating = value.dtype.kind not in "biu"
    if is_floating and not (value < HIDES).any():
        return BIAS
    return MASK


# ---- Arrays --------------------------------------------------------------------------------------


def _linear_part(
    linear: Linear,
    biased: BiasedProduct,
    x: np.ndarray,
    weight: np.ndarray,
    values: Values,
    batch_size: int,
) -> ProgramPart:
    """Return a product, or some of its features, with their bias.

    Args:
        linear: the product.
        biased: its features and their bias.
        x: input of the product, (tokens, in).
        weight: its matrix, (out, in).
        values: values of the call.
        batch_size: number of sequences.
    """
    width = len(weight)
    rows = np.unique(biased.indices % width)
    leaves = {"weight": linear.leaves}
    bias = None
    if biased.bias is not None:
        leaves["bias"] = biased.leaves
        of_sum = np.broadcast_to(np.asarray(values[biased.bias]), biased.indices.shape)
        bias = _features(of_sum, biased.indices, width)[0]
    output = _features(values[biased.output], biased.indices, width)
    return ProgramPart(
        leaves,
        Parameters(np.ascontiguousarray(weight[rows]), bias),
        x.reshape(batch_size, -1, x.shape[-1]),
        output.reshape(batch_size, -1, output.shape[-1]),
    )


def _with_one_head_axis(x: np.ndarray) -> np.ndarray:
    """Return (B, T, …, H) with all axes of heads in one."""
    if x.ndim <= 3:
        return x
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _features(x: Any, indices: np.ndarray, width: int) -> np.ndarray:
    """Return the values at some indices of an array (tokens, width) as such an array, without
    empty features.
    """
    x = np.asarray(x)
    num_tokens = int(indices.max()) // width + 1
    features = np.zeros(num_tokens * width, x.dtype)
    features[indices] = x
    return features.reshape(-1, width)[:, np.unique(indices % width)]


def _order_of(wanted: np.ndarray, features: np.ndarray) -> list[int]:
    """Return the index of each wanted column among the features, bit for bit; all in order if one
    is missing.
    """
    index_of_bits = {bits: index for index, bits in enumerate(columns_of(features))}
    order = [index_of_bits.get(bits, -1) for bits in columns_of(wanted)]
    in_order = list(range(features.shape[1]))
    if sorted(order) == in_order:
        return order
    return in_order
