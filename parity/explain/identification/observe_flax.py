"""Observe the attention layers of a live Flax model: its call as a program whose values are all
visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from mha_spec import InputError
from parity.explain.identification.arranged import Arranged
from parity.explain.identification.call_masks import HIDES
from parity.explain.identification.from_call import (
    BIAS,
    MASK,
    POSITIONS,
    SCALE,
    SEGMENTS,
    are_segments,
)
from parity.explain.identification.heads import AttentionFinder, Linear
from parity.explain.identification.observe import ObservedLayer, Submodule
from parity.explain.identification.program import Program, Values
from parity.explain.identification.trace import columns_of, features_of
from parity.measure.core.arrays import to_jax
from parity.measure.core.user_code import user_code
from parity.port.tapping.record import TappedCall, TappedLayer

RANDOM = ("random_bits", "threefry2x32")
"""Primitives that draw numbers."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of a linear map or a norm in torch's form, which fits read: a weight (out, in)."""

    weight: np.ndarray | None = None
    bias: np.ndarray | None = None
    eps: float = 0.0

    def named_parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the existing parameters by name."""
        yield from (
            (name, x) for name, x in (("weight", self.weight), ("bias", self.bias)) if x is not None
        )


@dataclass(frozen=True)
class FlaxModel:
    """A Flax model as a function of its parameters and of arrays.

    Attributes:
        call: the function: leaves, then arrays, then other keyword arguments.
        leaves: its parameters by name.
        separator: separator of the parts of those names.
        classes: classes of its modules, by name; filled by a call.
    """

    call: Callable[[list[Any], dict[str, Any]], Any]
    leaves: dict[str, Any]
    separator: str
    classes: dict[str, str]

    def owner(self, leaves: Sequence[str]) -> str:
        """Return the name of the innermost module that holds all of some parameters."""
        parts = [leaf.split(self.separator)[:-1] for leaf in leaves]
        shared = parts[0]
        for each in parts[1:]:
            same = [x == y for x, y in zip(shared, each, strict=False)]
            shared = shared[: same.index(False) if False in same else len(same)]
        while shared and self.separator.join(shared) not in self.classes:
            shared = shared[:-1]
        return self.separator.join(shared)


def flax_model(model: Any) -> FlaxModel:
    """Return an nnx module, or a bound linen module, as a function.

    Raises:
        ValueError: if it is a linen module without variables.
    """
    classes: dict[str, str] = {}
    if isinstance(model, nnx.Module):
        classes.update(
            {
                ".".join(map(str, path)): type(each).__name__
                for path, each in nnx.iter_modules(model)
            }
        )
        graph, state = nnx.split(model)

        def call_nnx(leaves: list[Any], inputs: dict[str, Any]) -> Any:
            with user_code(model):
                return nnx.merge(graph, jax.tree.unflatten(structure, leaves))(**inputs)

        structure = jax.tree.structure(state)
        return FlaxModel(call_nnx, _named(state, "."), ".", classes)
    if model.scope is None:
        hint = "model.bind(variables) returns one"
        raise InputError(
            "model", "be bound to its variables", f"an unbound {type(model).__name__}", hint=hint
        )
    module, variables = model.unbind()

    def note(
        call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any
    ) -> Any:
        classes["/".join(context.module.path)] = type(context.module).__name__
        return call(*args, **kwargs)

    def call_linen(leaves: list[Any], inputs: dict[str, Any]) -> Any:
        with linen.intercept_methods(note), user_code(model):
            return module.apply(jax.tree.unflatten(jax.tree.structure(variables), leaves), **inputs)

    names = {
        name.partition("/")[2] if name.startswith("params/") else name: x
        for name, x in _named(variables, "/").items()
    }
    return FlaxModel(call_linen, names, "/", classes)


def _named(tree: Any, separator: str) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    keys = [
        [str(getattr(key, "key", getattr(key, "idx", ""))) for key in path] for path, _ in paths
    ]
    return {
        separator.join(key for key in path if key): x
        for path, (_, x) in zip(keys, paths, strict=True)
    }


class FlaxObserver:
    """Call a Flax model, and observe its attention layers.

    Attributes:
        inputs: arrays by the first keyword that holds them.
        arranged: attention by layer name.
        refusals: reason why attention could not be arranged as heads, by layer name.
        names: parameters of the layers; keys are the layer's name, a space, and the parameter's
            name in fits.
        layers: names of the layers, in order.
        seen: the layers in the call with these inputs.

    Args:
        model: a module.
        inputs: keyword arguments of a call.
        layers: names of modules or classes, as in `parity.tap`.

    Raises:
        ValueError: if it cannot be traced, uses dropout, or has no attention.
    """

    def __init__(self, model: Any, inputs: Mapping[str, Any], layers: Any = None) -> None:
        self.model = flax_model(model)
        arrays = {
            name: x for name, x in inputs.items() if hasattr(x, "dtype") and hasattr(x, "shape")
        }
        others = {name: x for name, x in inputs.items() if name not in arrays}
        self.same = {
            name: next(each for each, y in arrays.items() if y is x) for name, x in arrays.items()
        }
        self.inputs = {name: to_jax(x) for name, x in arrays.items() if self.same[name] == name}

        def call(leaves: list[Any], given: dict[str, Any]) -> Any:
            return self.model.call(
                leaves, others | {name: given[first] for name, first in self.same.items()}
            )

        try:
            self.program = Program(call, list(self.model.leaves.values()), self.inputs)
        except jax.errors.JAXTypeError as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                "model", "be a function that jax.make_jaxpr can trace", reason
            ) from error
        live = self.program.before(self.program.results)
        if any(each.name in RANDOM and live & set(each.made) for each in self.program.operations):
            raise InputError(
                "model",
                "be in evaluation: model.eval(), or deterministic=True",
                "random numbers in its call",
            )
        self.finder = AttentionFinder(
            self.program, dict(zip(self.program.arguments, self.model.leaves, strict=False))
        )
        self.arranged: dict[str, Arranged] = {}
        self.seen: list[ObservedLayer] = []
        self.refusals: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self._leaves: dict[str, Sequence[str]] = {}
        values = self._values(self.inputs)
        self._arrange(values, (layers,) if isinstance(layers, str) else layers)
        self.layers = list(self._leaves)

    def _arrange(self, values: Values, patterns: Sequence[str] | None) -> None:
        """Find the layers that match patterns, and arrange their values."""
        for found in self.finder.attention():
            leaves = found[0] if isinstance(found, tuple) else found.leaves
            name = self._name(leaves)
            if self._is_chosen(name, patterns):
                self._leaves[name] = leaves
                try:
                    if isinstance(found, tuple):
                        self.refusals[name] = found[1]
                    else:
                        arranged = Arranged(self.finder, found, values)
                        self.seen.append(
                            self._layer(len(self.seen), name, arranged, values, self.inputs)
                        )
                        self.arranged[name] = arranged
                except ValueError as error:
                    self.refusals[name] = str(error)
        seen = [leaf for leaves in self._leaves.values() for leaf in leaves]
        attention = [name for name, kind in self.model.classes.items() if "Attention" in kind]
        for name in attention:
            is_outer = any(self._is_in(each, name) for each in attention if each != name)
            if (
                not is_outer
                and not any(self._is_in(leaf, name) for leaf in seen)
                and self._is_chosen(name, patterns)
            ):
                self._leaves[name] = []
                self.refusals[name] = "no softmax between two products was seen in its call"
        if not self._leaves:
            known = "none" if patterns is None else f"none in {list(patterns)}"
            raise InputError("model", "have attention: a softmax between two products", known)

    def _is_in(self, name: str, module: str) -> bool:
        return not module or name.startswith(f"{module}{self.model.separator}")

    def _name(self, leaves: Sequence[str]) -> str:
        """Return a name for a layer with these parameters, unlike those of earlier layers."""
        owner = self.model.owner(leaves) if leaves else ""
        name = owner or self.model.classes.get("", "model")
        count = sum(each.partition(":")[0] == name for each in self._leaves)
        return f"{name}:{count}" if count else name

    def _is_chosen(self, name: str, patterns: Sequence[str] | None) -> bool:
        kind = self.model.classes.get(name.partition(":")[0], name)
        return patterns is None or any(
            fnmatchcase(name, each) or fnmatchcase(kind, each) for each in patterns
        )

    def _values(
        self, inputs: Mapping[str, Any], change: Mapping[int, Callable[[Any], Any]] | None = None
    ) -> Values:
        leaves = [*self.model.leaves.values(), *(inputs[name] for name in sorted(self.inputs))]
        return self.program.evaluate(leaves, change)

    def observe(self, inputs: Mapping[str, Any], factor: float = 1.0) -> list[ObservedLayer]:
        """Call the model with other inputs, and return its attention layers.

        Args:
            inputs: arrays by the names of `inputs`.
            factor: factor of the input of each attention layer.
        """
        numbers = {number for each in self.arranged.values() for number in each.inputs.values()}
        change = dict.fromkeys(numbers, lambda x: x * factor) if factor != 1.0 else None
        return self._layers(self._values(inputs, change), inputs)

    def observe_far(self, inputs: Mapping[str, Any], first: int) -> list[ObservedLayer]:
        """Call the model with tokens at positions from `first` on, and return some of its layers.

        Layers whose positions cannot be moved, or whose mask counts from the first token, are left
        out.
        """
        values, layers = self._values(inputs), list[ObservedLayer]()
        for layer in self._layers(values, inputs):
            arranged = self.arranged[layer.tapped.name]
            if arranged.places:
                far = self._layer(
                    layer.tapped.index,
                    layer.tapped.name,
                    arranged,
                    arranged.far(values, first),
                    inputs,
                )
                layers += [far] if np.array_equal(far.values["mask"], layer.values["mask"]) else []
        return layers

    def bases(self, name: str) -> dict[str, Any]:
        """Return scalars that may be the RoPE base of a layer, in the form of configurations."""
        return {
            str(each): {"rope_theta": each} for each in self.arranged[name].scalars_of_queries()
        }

    def from_call(self, name: str) -> dict[str, str]:
        """Return the arguments that the attention of a layer depends on apart from its inputs, by
        part of a call.
        """
        arranged = self.arranged[name]
        inputs, operands = set(arranged.inputs.values()), set(arranged.found.operands.values())
        before_heads = self.program.before(operands, inputs)
        before_scores = self.program.before([arranged.found.numbers["logits"]], inputs | operands)
        (layer,) = (each for each in self.seen if each.tapped.name == name)
        found: dict[str, list[str]] = {}
        arguments = self.program.arguments[len(self.model.leaves) :]
        for argument, number in zip(sorted(self.inputs), arguments, strict=True):
            if number in inputs:
                continue
            if number in before_heads:
                found.setdefault(POSITIONS, []).append(argument)
            if number in before_scores:
                part = self._part_of_scores(np.asarray(self.inputs[argument]), layer.values["mask"])
                found.setdefault(part, []).append(argument)
        return {part: " and ".join(names) for part, names in found.items()}

    @staticmethod
    def _part_of_scores(value: np.ndarray, hidden: np.ndarray) -> str:
        """Return what an argument is that scores depend on."""
        if value.size == 1:
            return SCALE
        if are_segments(value, hidden):
            return SEGMENTS
        is_floating = value.dtype.kind not in "biu"
        return BIAS if is_floating and not (value < HIDES).any() else MASK

    def _layers(self, values: Values, inputs: Mapping[str, Any]) -> list[ObservedLayer]:
        found = []
        for place, (name, each) in enumerate(self.arranged.items()):
            try:
                found.append(self._layer(place, name, each, values, inputs))
            except ValueError as error:
                self.refusals.setdefault(name, str(error))
        return found

    def _layer(
        self, place: int, name: str, arranged: Arranged, values: Values, inputs: Mapping[str, Any]
    ) -> ObservedLayer:
        heads, x = arranged.heads(values), np.asarray(values[arranged.inputs["q"]])
        seen = {part: heads[part] for part in ("q", "k", "v", "attn_weights", "context")}
        seen |= {"mask": arranged.is_hidden(heads), "scores": heads["logits"]}
        for number in arranged.places:
            seen["positions"] = np.broadcast_to(np.unique(values[number]), x.shape[:2])
        out = arranged.found.out
        output = features_of(heads["context"]) if out is None else self._whole(out, values)
        seen["output"] = output.reshape(*x.shape[:2], -1)
        inside: list[Submodule] = []
        for part, parameters, given, result in (
            *self._linears(arranged, values, heads["context"]),
            *self._norms(arranged, values),
        ):
            names = {leaf: self._relative(leaves, name) for leaf, leaves in part.items()}
            called = names.get("weight", "a norm")
            call = sum(each.name == called for each in inside)
            inside.append(Submodule(called, call, parameters, given, result))  # pyright: ignore[reportArgumentType]
            self.names |= {
                f"{name} {called}.{leaf}": parameter for leaf, parameter in names.items()
            }
        kind = self.model.classes.get(name.partition(":")[0], name)
        layer = TappedLayer(name, place, kind, scale=arranged.scale, soft_cap=arranged.soft_cap)
        layer.calls.append(TappedCall(seen, 0))
        arguments = {
            each: np.asarray(x) for each, x in inputs.items() if np.asarray(x).dtype.kind == "f"
        }
        model: Any = SimpleNamespace(named_parameters=self.model.leaves.items)
        module: Any = SimpleNamespace(
            named_parameters=lambda recurse: ()
        )  # biases are seen in the program
        numbers = {
            each: np.asarray(x) for each, x in inputs.items() if np.asarray(x).dtype.kind in "iu"
        }
        return ObservedLayer(model, module, layer, arguments, inside, numbers)

    def _whole(self, linear: Linear, values: Values) -> np.ndarray:
        """Return all features of a product, with the bias that is added to all of them, (tokens,
        features).

        Raises:
            ValueError: if there are several biases, or one is added to only some features.
        """
        found = self.finder.biased(linear, values)
        if len(found) != 1:
            raise InputError(
                "output", "be a product with one bias or none", f"{len(found)} with and without one"
            )
        return _features(values[found[0].result], found[0].places, len(linear.weight(values)))

    def _linears(self, arranged: Arranged, values: Values, context: np.ndarray) -> Iterator[Made]:
        found = arranged.found
        for linear in found.linears:
            x, weight = linear.input(values), linear.weight(values)
            if linear is found.out:
                order = _order_of(features_of(context), x)
                x, weight = x[:, order], weight[:, order]
            for each in self.finder.biased(linear, values):
                rows, leaves, bias = (
                    np.unique(each.places % len(weight)),
                    {"weight": linear.leaves},
                    None,
                )
                if each.bias is not None:
                    spread = np.broadcast_to(np.asarray(values[each.bias]), each.places.shape)
                    bias, leaves["bias"] = (
                        _features(spread, each.places, len(weight))[0],
                        each.leaves,
                    )
                result = _features(values[each.result], each.places, len(weight))
                given, made = (y.reshape(context.shape[0], -1, y.shape[-1]) for y in (x, result))
                yield leaves, Parameters(np.ascontiguousarray(weight[rows]), bias), given, made

    def _norms(self, arranged: Arranged, values: Values) -> Iterator[Made]:
        for part, norm in arranged.norms.items():
            seen = arranged.by_token([norm.given, norm.result], part, values)
            given, result = (
                x.reshape(*x.shape[:2], *((-1,) if x.ndim > 3 else ()), x.shape[-1])
                for x in seen.values()
            )
            parameters = {
                leaf: np.ravel(np.asarray(values[number]))
                for leaf, number in norm.parameters.items()
            }
            leaves = {
                leaf: (self.finder.names[number],) for leaf, number in norm.parameters.items()
            }
            yield leaves, Parameters(**parameters, eps=norm.eps), given, result

    def _relative(self, leaves: Sequence[str], name: str) -> str:
        """Return the names of parameters relative to the layer."""
        prefix = f"{self.model.owner(self._leaves[name])}{self.model.separator}"
        return " and ".join(leaf.removeprefix(prefix) for leaf in leaves)


Made = tuple[dict[str, tuple[str, ...]], Parameters, np.ndarray, np.ndarray]
"""Names of the parameters of a linear map or a norm, the parameters, its input and its output."""


def _features(x: Any, places: np.ndarray, width: int) -> np.ndarray:
    """Return numbers at some places of an array (tokens, width) as such an array, without empty
    features.
    """
    x = np.asarray(x)
    found = np.zeros((int(places.max()) // width + 1) * width, x.dtype)
    found[places] = x
    return found.reshape(-1, width)[:, np.unique(places % width)]


def _order_of(wanted: np.ndarray, features: np.ndarray) -> list[int]:
    """Return the index of each wanted column among the features, bit for bit; all in order if one
    is missing.
    """
    places = {bits: place for place, bits in enumerate(columns_of(features))}
    order = [places.get(bits, -1) for bits in columns_of(wanted)]
    return (
        order if sorted(order) == list(range(features.shape[1])) else list(range(features.shape[1]))
    )
