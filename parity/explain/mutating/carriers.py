"""Where a call has its weights, and the same call with some of them replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parity.explain.conformance.functional import leaves_in, with_leaves
from parity.explain.conformance.signatures import library_of
from parity.explain.mutating.calls import Call, Function
from parity.explain.mutating.compare import Unfit

LeafPath = tuple[Any, ...]
"""The names that lead to an array, such as `("attn", "q_proj", "weight")`."""


@dataclass(frozen=True)
class Carrier:
    """An object with weights.

    Attributes:
        leaves: the arrays in it, by their paths.
        run: calls a function with some of them replaced, by their paths.
    """

    leaves: Mapping[LeafPath, Any]
    run: Callable[[Function, Mapping[LeafPath, Any]], Any]


def carrier_of(call: Call) -> Carrier:
    """Return what has the weights of a call: its module, else an argument with weights, else its
    parameters.

    Raises:
        Unfit: if weights of such a module cannot be replaced.
    """
    if call.owner is not None:
        by_library = {
            "torch": _carrier_of_torch,
            "equinox": _carrier_of_equinox,
            "linen": _carrier_of_linen,
            "nnx": _carrier_of_nnx,
        }
        library = library_of(call.owner)
        if library not in by_library:
            raise Unfit("weights of modules of its library cannot be changed here")
        return by_library[library](call)
    weights = call.get("weights")
    if weights is None:
        return _carrier_of_parameters(call)
    if call.view.framework == "jax" and not hasattr(weights, "shape"):
        return _carrier_of_tree(weights, lambda tree: call.but(weights=tree))
    return _carrier_of_mapping(call, weights)


def _carrier_of_parameters(call: Call) -> Carrier:
    """Return the arrays among a function's parameters, except queries, keys and values."""
    inputs = {call.view.roles.get(role) for role in ("query", "key", "value")}
    leaves: dict[LeafPath, Any] = {}
    for name in (*call.view.order, *call.kwargs):
        array = call.named(name)
        if name not in inputs and hasattr(array, "shape"):
            leaves[name,] = array

    def run(function: Function, changed: Mapping[LeafPath, Any]) -> Any:
        return function(call.but_named({name: array for (name,), array in changed.items()}))

    return Carrier(leaves, run)


def _carrier_of_mapping(call: Call, mapping: Any) -> Carrier:
    """Return the weights in a mapping, which may be nested or have dotted names."""
    leaves = {path: array for path, array in leaves_in(mapping) if path and hasattr(array, "shape")}
    if not leaves:
        raise Unfit(
            f"its weights are not a mapping of arrays by name, but {type(mapping).__name__}"
        )

    def run(function: Function, changed: Mapping[LeafPath, Any]) -> Any:
        replaced = with_leaves(mapping, lambda path, array: changed.get(path, array))
        return function(call.but(weights=replaced))

    return Carrier(leaves, run)


def _carrier_of_torch(call: Call) -> Carrier:
    leaves = {tuple(name.split(".")): array for name, array in call.owner.named_parameters()}

    def run(function: Function, changed: Mapping[LeafPath, Any]) -> Any:
        by_name = {".".join(path): array for path, array in changed.items()}
        return replaced_in_torch(call, by_name, function)

    return Carrier(leaves, run)


def replaced_in_torch(call: Call, changed: Mapping[str, Any], function: Function) -> Any:
    """Call a torch module with some of its parameters and buffers temporarily replaced, by name."""
    # A module does not accept a plain tensor as a parameter, but its dictionaries do.
    places = []
    for name, array in changed.items():
        prefix, _, last = name.rpartition(".")
        module = call.owner.get_submodule(prefix)
        tensors = module._parameters if last in module._parameters else module._buffers
        places.append((tensors, last, tensors[last], array))
    try:
        for tensors, last, _, array in places:
            tensors[last] = array
        return function(call)
    finally:
        for tensors, last, original, _ in places:
            tensors[last] = original


def _carrier_of_nnx(call: Call) -> Carrier:
    from flax import nnx

    parameters = dict(nnx.to_flat_state(nnx.state(call.owner, nnx.Param)))
    leaves = {path: parameter[...] for path, parameter in parameters.items()}

    def put(arrays: Mapping[LeafPath, Any]) -> None:
        changed = [(path, parameters[path].replace(array)) for path, array in arrays.items()]
        nnx.update(call.owner, nnx.from_flat_state(changed))

    def run(function: Function, changed: Mapping[LeafPath, Any]) -> Any:
        put(changed)
        try:
            return function(call)
        finally:
            put({path: leaves[path] for path in changed})

    return Carrier(leaves, run)


def _carrier_of_equinox(call: Call) -> Carrier:
    return _carrier_of_tree(call.owner, lambda tree: replace(call, owner=tree))


def _carrier_of_tree(tree: Any, call_with: Callable[[Any], Call]) -> Carrier:
    """Return the weights of a JAX tree, such as an Equinox module or a nested mapping."""
    import jax

    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    by_path = {tuple(map(_name_of_key, keys)): value for keys, value in flat}

    def run(function: Function, changed: Mapping[LeafPath, Any]) -> Any:
        values = [changed.get(path, value) for path, value in by_path.items()]
        return function(call_with(jax.tree_util.tree_unflatten(structure, values)))

    leaves = {path: value for path, value in by_path.items() if hasattr(value, "shape")}
    return Carrier(leaves, run)


def _name_of_key(key: Any) -> Any:
    """Return the name of an attribute, the key of a mapping or the index in a list."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return ""


def _carrier_of_linen(call: Call) -> Carrier:
    """Return the weights of a flax.linen module. A copy that is bound to others is called, and what
    it writes to other collections is kept.
    """
    from flax import core, traverse_util

    leaves = traverse_util.flatten_dict(core.unfreeze(call.owner.variables.get("params", {})))

    def run(function: Function, changed: Mapping[LeafPath, Any]) -> Any:
        owner = call.owner
        params = traverse_util.unflatten_dict({**leaves, **changed})
        rngs = {name: owner.make_rng(name) for name in owner.scope.rngs}
        copy = owner.clone(parent=None).bind(
            {**owner.variables, "params": params}, rngs=rngs, mutable=owner.scope.mutable
        )
        result = function(replace(call, owner=copy))
        for collection, values in copy.variables.items():
            if collection == "params" or not owner.is_mutable_collection(collection):
                continue
            for name, value in values.items():
                owner.put_variable(collection, name, value)
        return result

    return Carrier(leaves, run)
