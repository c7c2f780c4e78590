"""A Flax model as a function of its parameters and of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen, nnx

from mha_spec import InputError
from parity.measure.core.user_code import user_code


@dataclass(frozen=True)
class FlaxModel:
    """A Flax model as a function of its parameters and of arrays.

    Attributes:
        call: the function: leaves, then keyword arguments.
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
        paths = [leaf.split(self.separator)[:-1] for leaf in leaves]
        shared = paths[0]
        for path in paths[1:]:
            shared = _common_beginning(shared, path)
        while shared and self.separator.join(shared) not in self.classes:
            shared = shared[:-1]
        return self.separator.join(shared)

    def is_inside(self, name: str, module: str) -> bool:
        """Return whether a module or a parameter is inside a module."""
        return not module or name.startswith(f"{module}{self.separator}")


def _common_beginning(one: Sequence[str], other: Sequence[str]) -> list[str]:
    common = []
    for part, other_part in zip(one, other, strict=False):
        if part != other_part:
            break
        common.append(part)
    return common


def flax_model(model: Any) -> FlaxModel:
    """Return an nnx module, or a bound linen module, as a function.

    Raises:
        ValueError: if it is a linen module without variables.
    """
    if isinstance(model, nnx.Module):
        return _nnx_model(model)
    if model.scope is None:
        got = f"an unbound {type(model).__name__}"
        hint = "model.bind(variables) returns one"
        raise InputError("model", "be bound to its variables", got, hint=hint)
    return _linen_model(model)


def _nnx_model(model: nnx.Module) -> FlaxModel:
    classes = {}
    for path, module in nnx.iter_modules(model):
        classes[".".join(map(str, path))] = type(module).__name__
    graph, state = nnx.split(model)
    structure = jax.tree.structure(state)

    def call(leaves: list[Any], arguments: dict[str, Any]) -> Any:
        with user_code(model):
            return nnx.merge(graph, jax.tree.unflatten(structure, leaves))(**arguments)

    return FlaxModel(call, _leaves_by_name(state, "."), ".", classes)


def _linen_model(model: Any) -> FlaxModel:
    module, variables = model.unbind()
    structure = jax.tree.structure(variables)
    recorder = _ClassRecorder({})

    def call(leaves: list[Any], arguments: dict[str, Any]) -> Any:
        with linen.intercept_methods(recorder.record), user_code(model):
            return module.apply(jax.tree.unflatten(structure, leaves), **arguments)

    leaves = {}
    for name, leaf in _leaves_by_name(variables, "/").items():
        leaves[name.removeprefix("params/")] = leaf
    return FlaxModel(call, leaves, "/", recorder.classes)


@dataclass(frozen=True)
class _ClassRecorder:
    """Notes the classes of linen modules while they run.

    Attributes:
        classes: by the name of the module.
    """

    classes: dict[str, str]

    def record(
        self,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: Any,
    ) -> Any:
        """Call a method, and note the class of its module."""
        self.classes["/".join(context.module.path)] = type(context.module).__name__
        return method(*args, **kwargs)


def _leaves_by_name(tree: Any, separator: str) -> dict[str, Any]:
    """Return the leaves of a tree by the keys on their path."""
    leaves = {}
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in paths:
        keys = [_key_of(entry) for entry in path]
        leaves[separator.join(filter(None, keys))] = leaf
    return leaves


def _key_of(entry: Any) -> str:
    """Return a step of a path as text; empty for an attribute, such as the value of a variable."""
    if hasattr(entry, "key"):
        return str(entry.key)
    return str(getattr(entry, "idx", ""))
