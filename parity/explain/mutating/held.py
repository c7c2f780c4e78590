"""Find the projection weights of a call: in its module, in a mapping, or in its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parity.explain.conformance.functional import leaves_in, with_leaves
from parity.explain.conformance.signatures import BIASES, LEAVES, PACKED, PROJECTIONS, library_of
from parity.explain.mutating.calls import Call, Function
from parity.explain.mutating.compare import Unfit
from parity.measure.text import some_of

PACKED_PROJECTION = "qkv_proj"
ALIASES = {
    name: projection
    for projection, names in {**PROJECTIONS, PACKED_PROJECTION: PACKED}.items()
    for name in names
}
BIAS_ALIASES = {name: projection for projection, names in BIASES.items() for name in names}
"""Projections by the usual names of themselves and their biases."""

Arrays = dict[str, Any]
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Held:
    """The projections of a call.

    Attributes:
        arrays: by `q_proj.weight`, `q_proj.bias` and so on, or `qkv_proj` for a packed projection;
            kernels with their own order of axes.
        out_first: kernels known to be (out, in).
        in_first: kernels known to be (in, out).
        owners: modules from the one that is called to the one that holds the projections, the
            latter first.
        run: calls the function with some of them changed.
    """

    arrays: Arrays
    out_first: frozenset[str]
    in_first: frozenset[str]
    owners: tuple[Any, ...]
    run: Callable[[Function, Arrays], Any]


@dataclass(frozen=True)
class _Carrier:
    """An object with weights: each by its path, and a function that calls it with others."""

    leaves: Mapping[Path, Any]
    run: Callable[[Function, Mapping[Path, Any]], Any]


def held_in(call: Call) -> Held:
    """Return the projections of a call.

    Raises:
        Unfit: if it has none with recognized names, or those of several layers.
    """
    carrier = _carrier(call)
    places = _projections({path: ".".join(map(str, path)).split(".") for path in carrier.leaves})
    library = library_of(call.owner)
    kernels = {
        leaf: str(places[leaf][-1]).split(".")[-1] for leaf in places if leaf.endswith(".weight")
    }
    out_first = {
        leaf
        for leaf, name in kernels.items()
        if library == "equinox"
        or name == "in_proj_weight"
        or (library == "torch" and _is_linear(call, places[leaf]))
    }
    in_first = {
        leaf for leaf, name in kernels.items() if name == "kernel" and call.view.framework == "jax"
    }
    return Held(
        {leaf: carrier.leaves[path] for leaf, path in places.items()},
        frozenset(out_first),
        frozenset(in_first),
        _owners(call.owner, next(places[leaf] for leaf in kernels if leaf != "out_proj.weight")),
        lambda function, changed: carrier.run(
            function, {places[leaf]: x for leaf, x in changed.items()}
        ),
    )


def _owners(module: Any, path: Path) -> tuple[Any, ...]:
    found = [] if module is None else [module]
    for word in path[:-1]:
        if found and isinstance(word, str) and hasattr(found[-1], word):
            found.append(getattr(found[-1], word))
    return tuple(reversed(found))


def _is_linear(call: Call, path: Path) -> bool:
    from torch import nn

    return isinstance(call.owner.get_submodule(".".join(path[:-1])), nn.Linear)


# ---- By their names ------------------------------------------------------------------------------


def leaf_of(words: list[str]) -> tuple[str, int]:
    """Return `q_proj.weight` or similar for a path of names, and how many of them it uses; empty
    for other paths.
    """
    *above, last = ["", "", *(word.lower() for word in words)]
    if last in LEAVES and above[-1] in ALIASES:
        return f"{ALIASES[above[-1]]}.{LEAVES[last]}", 2
    if last in ALIASES:
        return f"{ALIASES[last]}.weight", 1
    if last in BIAS_ALIASES:
        return f"{BIAS_ALIASES[last]}.bias", 1
    return "", 0


def _projections(words_by_path: Mapping[Path, list[str]]) -> dict[str, Path]:
    """Return the paths of the projections of the only attention layer.

    Raises:
        Unfit: if there is none, or more than one.
    """
    groups: dict[tuple[str, ...], dict[str, Path]] = {}
    for path, words in words_by_path.items():
        leaf, count = leaf_of(words)
        if not leaf:
            continue
        group = groups.setdefault(tuple(words[:-count]), {})
        if leaf in group:
            two = " and ".join(".".join(map(str, each)) for each in (group[leaf], path))
            raise Unfit(f"two of its weights may be {leaf}: {two}")
        group[leaf] = path
    layers = [prefix for prefix, group in groups.items() if _is_attention(group)]
    if not layers:
        names = some_of(map(".".join, words_by_path.values()), 6) or "it has none"
        raise Unfit(f"no projections of q and k are known among its weights: {names}")
    if len(layers) > 1:
        named = ", ".join(".".join(prefix) or "itself" for prefix in layers[:4])
        raise Unfit(f"it holds {len(layers)} attention layers, {named}: select the class of one")
    found = groups[layers[0]]
    beside = [
        {leaf: path for leaf, path in group.items() if leaf.startswith("out_proj.")}
        for prefix, group in groups.items()
        if layers[0] and prefix != layers[0] and prefix[: len(layers[0]) - 1] == layers[0][:-1]
    ]
    beside = [each for each in beside if each]
    if "out_proj.weight" not in found and len(beside) == 1:  # as in BERT: self.query, output.dense
        return {**found, **beside[0]}
    return found


def _is_attention(group: Mapping[str, Path]) -> bool:
    return (
        f"{PACKED_PROJECTION}.weight" in group or {"q_proj.weight", "k_proj.weight"} <= group.keys()
    )


# ---- Carriers ------------------------------------------------------------------------------------


def _carrier(call: Call) -> _Carrier:
    if call.owner is not None:
        carriers = {"torch": _of_torch, "equinox": _of_equinox, "linen": _of_linen, "nnx": _of_nnx}
        if library_of(call.owner) not in carriers:
            raise Unfit("weights of modules of its library cannot be changed here")
        return carriers[library_of(call.owner)](call)
    weights = call.get("weights")
    if weights is not None and call.view.framework == "jax" and not hasattr(weights, "shape"):
        return _of_tree(weights, lambda tree: call.but(weights=tree))
    if weights is not None:
        return _of_mapping(call, weights)
    data = {call.view.roles.get(role) for role in ("query", "key", "value")}
    others = {
        name: call.named(name) for name in (*call.view.order, *call.kwargs) if name not in data
    }
    given = {name: x for name, x in others.items() if hasattr(x, "shape")}
    return _Carrier(
        {(name,): x for name, x in given.items()},
        lambda function, changed: function(
            call.but_named({path[0]: x for path, x in changed.items()})
        ),
    )


def _of_torch(call: Call) -> _Carrier:
    leaves = {tuple(name.split(".")): x for name, x in call.owner.named_parameters()}

    def run(function: Function, changed: Mapping[Path, Any]) -> Any:
        return replaced_in_torch(call, {".".join(path): x for path, x in changed.items()}, function)

    return _Carrier(leaves, run)


def replaced_in_torch(call: Call, changed: Mapping[str, Any], function: Function) -> Any:
    """Call a torch module with some of its parameters and buffers temporarily replaced, by name."""
    places = []
    for name, x in changed.items():
        prefix, _, last = name.rpartition(".")
        module = call.owner.get_submodule(prefix)
        held = module._parameters if last in module._parameters else module._buffers
        places.append((held, last, held[last], x))
    try:
        for held, last, _, x in places:
            held[last] = x
        return function(call)
    finally:
        for held, last, before, _ in places:
            held[last] = before


def _of_nnx(call: Call) -> _Carrier:
    from flax import nnx

    parameters = dict(nnx.to_flat_state(nnx.state(call.owner, nnx.Param)))
    leaves = {path: parameter[...] for path, parameter in parameters.items()}

    def put(values: Mapping[Path, Any]) -> None:
        nnx.update(
            call.owner,
            nnx.from_flat_state(
                [(path, parameters[path].replace(x)) for path, x in values.items()]
            ),
        )

    def run(function: Function, changed: Mapping[Path, Any]) -> Any:
        put(changed)
        try:
            return function(call)
        finally:
            put({path: leaves[path] for path in changed})

    return _Carrier(leaves, run)


def _of_equinox(call: Call) -> _Carrier:
    return _of_tree(call.owner, lambda tree: replace(call, owner=tree))


def _of_tree(tree: Any, call_with: Callable[[Any], Call]) -> _Carrier:
    """Return the weights of a JAX tree, such as an Equinox module or a nested mapping."""
    import jax

    flat, form = jax.tree_util.tree_flatten_with_path(tree)
    words = [
        tuple(getattr(key, "name", getattr(key, "key", getattr(key, "idx", ""))) for key in path)
        for path, _ in flat
    ]

    def run(function: Function, changed: Mapping[Path, Any]) -> Any:
        leaves = [changed.get(path, x) for path, (_, x) in zip(words, flat, strict=True)]
        return function(call_with(jax.tree_util.tree_unflatten(form, leaves)))

    return _Carrier(
        {path: x for path, (_, x) in zip(words, flat, strict=True) if hasattr(x, "shape")}, run
    )


def _of_linen(call: Call) -> _Carrier:
    """Return the weights of a flax.linen module, called by a copy bound to other parameters; its
    writes are kept.
    """
    from flax import core, traverse_util

    flat = traverse_util.flatten_dict(core.unfreeze(call.owner.variables.get("params", {})))

    def run(function: Function, changed: Mapping[Path, Any]) -> Any:
        owner = call.owner
        params = traverse_util.unflatten_dict({**flat, **changed})
        rngs = {name: owner.make_rng(name) for name in owner.scope.rngs}
        other = owner.clone(parent=None).bind(
            {**owner.variables, "params": params}, rngs=rngs, mutable=owner.scope.mutable
        )
        result = function(replace(call, owner=other))
        for collection, values in other.variables.items():
            for name, value in values.items() if owner.is_mutable_collection(collection) else ():
                if collection != "params":
                    owner.put_variable(collection, name, value)
        return result

    return _Carrier(flat, run)


def _of_mapping(call: Call, mapping: Any) -> _Carrier:
    """Return the weights in a mapping, which may be nested or have dotted names."""
    paths = {path: x for path, x in leaves_in(mapping) if path and hasattr(x, "shape")}
    if not paths:
        raise Unfit(
            f"its weights are not a mapping of arrays by name, but {type(mapping).__name__}"
        )

    def run(function: Function, changed: Mapping[Path, Any]) -> Any:
        return function(
            call.but(weights=with_leaves(mapping, lambda path, x: changed.get(path, x)))
        )

    return _Carrier(paths, run)
