"""Where a call has its weights, and the same call with some of them replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from parity.explain.conformance.functional import leaves_in, with_leaves
from parity.explain.conformance.signatures import library_of
from parity.explain.mutating.calls import Call, Function
from parity.explain.mutating.compare import Unfit

LeafPath = tuple[Any, ...]
"""The names that lead to an array, such as `("attn", "q_proj", "weight")`."""

Leaves = Mapping[LeafPath, Any]
"""Arrays by their paths."""


class Carrier(Protocol):
    """An object with weights."""

    @property
    def leaves(self) -> Leaves:
        """Return the arrays in it."""
        ...

    def run(self, function: Function, changed: Leaves) -> Any:
        """Call a function with some of the arrays replaced."""
        ...


def carrier_of(call: Call) -> Carrier:
    """Return what has the weights of a call: its module, else an argument with weights, else its
    parameters.

    Raises:
        Unfit: if weights of such a module cannot be replaced.
    """
    if call.owner is not None:
        return _carrier_of_module(call)
    weights = call.get("weights")
    if weights is None:
        return ParameterCarrier(call)
    if call.view.framework == "jax" and not hasattr(weights, "shape"):
        return TreeCarrier(call)
    return MappingCarrier(call)


def _carrier_of_module(call: Call) -> Carrier:
    library = library_of(call.owner)
    if library == "torch":
        return TorchCarrier(call)
    if library == "equinox":
        return TreeCarrier(call)
    if library == "linen":
        return LinenCarrier(call)
    if library == "nnx":
        return NnxCarrier(call)
    raise Unfit("weights of modules of its library cannot be changed here")


# ---- Arguments -----------------------------------------------------------------------------------


class ParameterCarrier:
    """The arrays among a function's parameters, except queries, keys and values."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.leaves: dict[LeafPath, Any] = {}
        inputs = {call.view.roles.get(role) for role in ("query", "key", "value")}
        for name in (*call.view.order, *call.kwargs):
            array = call.named(name)
            if name not in inputs and hasattr(array, "shape"):
                self.leaves[name,] = array

    def run(self, function: Function, changed: Leaves) -> Any:
        """Call a function with some of the arrays replaced."""
        return function(self.call.but_named({name: array for (name,), array in changed.items()}))


class MappingCarrier:
    """An argument with weights: a mapping, which may be nested or have dotted names.

    Raises:
        Unfit: if it is something else.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.mapping = call.get("weights")
        self.leaves: dict[LeafPath, Any] = {}
        for path, array in leaves_in(self.mapping):
            if path and hasattr(array, "shape"):
                self.leaves[path] = array
        if not self.leaves:
            kind = type(self.mapping).__name__
            raise Unfit(f"its weights are not a mapping of arrays by name, but {kind}")

    def run(self, function: Function, changed: Leaves) -> Any:
        """Call a function with some of the arrays replaced."""
        # `get` accepts the path of a leaf and, as its default, the leaf itself.
        mapping = with_leaves(self.mapping, changed.get)
        return function(self.call.but(weights=mapping))


class TreeCarrier:
    """A tree of JAX: an Equinox module, or an argument with weights."""

    def __init__(self, call: Call) -> None:
        import jax

        self.call = call
        tree = call.owner
        if tree is None:
            tree = call.get("weights")
        values_by_keys, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        self.values = {tuple(map(_name_of, keys)): value for keys, value in values_by_keys}
        self.leaves = {
            path: value for path, value in self.values.items() if hasattr(value, "shape")
        }

    def run(self, function: Function, changed: Leaves) -> Any:
        """Call a function with some of the arrays replaced."""
        import jax

        values = [changed.get(path, value) for path, value in self.values.items()]
        tree = jax.tree_util.tree_unflatten(self.structure, values)
        if self.call.owner is None:
            return function(self.call.but(weights=tree))
        return function(replace(self.call, owner=tree))


def _name_of(key: Any) -> Any:
    """Return the name of an attribute, the key of a mapping or the index in a list."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return ""


# ---- Modules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplacedTensors:
    """A call of a torch module with some of its parameters and buffers temporarily replaced.

    Attributes:
        call: the call.
        changed: the other tensors, by the names of the module's own.
    """

    call: Call
    changed: Mapping[str, Any]

    def run(self, function: Function) -> Any:
        """Call the module, then restore its tensors."""
        # A module does not accept a plain tensor as a parameter, but its dictionaries do.
        replaced = []
        for name, array in self.changed.items():
            prefix, _, last = name.rpartition(".")
            module = self.call.owner.get_submodule(prefix)
            tensors = module._parameters
            if last not in tensors:
                tensors = module._buffers
            replaced.append((tensors, last, tensors[last], array))
        try:
            for tensors, last, _, array in replaced:
                tensors[last] = array
            return function(self.call)
        finally:
            for tensors, last, original, _ in replaced:
                tensors[last] = original


class TorchCarrier:
    """A module of torch."""

    def __init__(self, call: Call) -> None:
        self.call = call
        parameters = call.owner.named_parameters()
        self.leaves = {tuple(name.split(".")): array for name, array in parameters}

    def run(self, function: Function, changed: Leaves) -> Any:
        """Call a function with some of the arrays replaced."""
        by_name = {".".join(path): array for path, array in changed.items()}
        return ReplacedTensors(self.call, by_name).run(function)


class NnxCarrier:
    """A module of Flax NNX, whose parameters are temporarily replaced."""

    def __init__(self, call: Call) -> None:
        from flax import nnx

        self.call = call
        self.parameters = dict(nnx.to_flat_state(nnx.state(call.owner, nnx.Param)))
        self.leaves = {path: parameter[...] for path, parameter in self.parameters.items()}

    def run(self, function: Function, changed: Leaves) -> Any:
        """Call a function with some of the arrays replaced."""
        self._put(changed)
        try:
            return function(self.call)
        finally:
            self._put({path: self.leaves[path] for path in changed})

    def _put(self, arrays: Leaves) -> None:
        from flax import nnx

        changed = [(path, self.parameters[path].replace(x)) for path, x in arrays.items()]
        nnx.update(self.call.owner, nnx.from_flat_state(changed))


class LinenCarrier:
    """A module of flax.linen, bound to its parameters."""

    def __init__(self, call: Call) -> None:
        from flax import core, traverse_util

        self.call = call
        params = core.unfreeze(call.owner.variables.get("params", {}))
        self.leaves = traverse_util.flatten_dict(params)

    def run(self, function: Function, changed: Leaves) -> Any:
        """Call a function with a copy of the module that has the replaced arrays. Values that the
        copy writes to other collections are put into the module.
        """
        from flax import traverse_util

        owner = self.call.owner
        params = traverse_util.unflatten_dict({**self.leaves, **changed})
        rngs = {name: owner.make_rng(name) for name in owner.scope.rngs}
        module = owner.clone(parent=None)
        variables = {**owner.variables, "params": params}
        copy = module.bind(variables, rngs=rngs, mutable=owner.scope.mutable)
        result = function(replace(self.call, owner=copy))
        for collection, values in copy.variables.items():
            if collection == "params" or not owner.is_mutable_collection(collection):
                continue
            for name, value in values.items():
                owner.put_variable(collection, name, value)
        return result
