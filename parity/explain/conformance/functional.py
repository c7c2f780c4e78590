"""Functions of weights and inputs, `attention(params, x)`: detect them, and call them with a user's
weights.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mha_spec import InputError, InputTypeError
from parity.explain.conformance.signatures import (
    Parameters,
    library_of,
    parameters_of,
    required,
    role_names,
)
from parity.explain.conformance.subjects import BATCH, HEAD_DIM, NUM_HEADS
from parity.measure.core.user_code import user_code


@dataclass(frozen=True)
class WithParams:
    """A function of weights and inputs, bound to its weights.

    Attributes:
        func: function of the weights and inputs.
        params: the weights, a mapping or any other tree of arrays.
        name: the parameter that receives them.
        signature: signature of `func`.
    """

    func: Callable[..., Any]
    params: Any
    name: str
    signature: inspect.Signature

    @property
    def __signature__(self) -> inspect.Signature:
        parameters = dict(self.signature.parameters)
        del parameters[self.name]
        return self.signature.replace(parameters=list(parameters.values()))

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.name == next(iter(self.signature.parameters)):
            return self.func(self.params, *args, **named)
        return self.func(*args, **{self.name: self.params}, **named)

    def in_dtype(self, dtype: str, framework: str) -> WithParams:
        """Return a copy with floating-point weights in a dtype of a framework."""
        params = self.params
        if framework == "jax":
            import jax

            params = jax.tree.map(partial(cast_in_jax, dtype=dtype), params)
        elif framework == "torch":
            params = _cast_in_torch(params, dtype)
        return replace(self, params=params)


def cast_in_jax(leaf: Any, dtype: str) -> Any:
    """Cast a leaf of a JAX tree to a dtype if it is an array of floating-point numbers."""
    import jax.numpy as jnp

    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.asarray(leaf, dtype)
    return leaf


def _cast_in_torch(tree: Any, dtype: str) -> Any:
    """Return a tree with its arrays as tensors, floating-point ones in a dtype."""
    import torch

    def cast(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.detach().to(getattr(torch, dtype))
        return leaf

    return with_leaves(tree, cast)


def with_params(target: Any, params: Any, name: str) -> WithParams:
    """Bind a function of weights and inputs to its weights.

    Args:
        target: the function, or a flax.linen module or its `apply`.
        params: its weights; for flax.linen with or without `{"params": …}`.
        name: name of the function, for messages.

    Raises:
        ValueError: if `params` contains no arrays, or no parameter accepts weights.
        TypeError: if the target is a module that holds its weights, or a class.
    """
    if not has_arrays(params):
        raise InputError(
            "params", "be a mapping or any other tree of arrays", type(params).__name__
        )
    module = linen_module(target)
    if module is not None:
        return _linen_with_params(module, params)
    if inspect.isclass(target):
        raise InputTypeError(
            "params", "belong to a function that accepts them", f"the class {name}"
        )
    parameters = parameters_of(target)
    if parameters is None:
        raise InputError("params", "belong to a function with inspectable parameters", name)
    if len(required(parameters)) < 2:
        raise InputError(
            "params",
            "belong to a function of weights and inputs",
            f"{name}({', '.join(parameters)})",
        )
    weights_name = weights_parameter(target, parameters) or next(iter(parameters))
    return WithParams(target, params, weights_name, inspect.Signature(list(parameters.values())))


def _linen_with_params(module: Any, params: Any) -> WithParams:
    """Bind a flax.linen module to its weights, with a fixed key for its dropout."""
    if not (isinstance(params, Mapping) and "params" in params):
        params = {"params": params}

    def apply(variables: Any, *args: Any, **named: Any) -> Any:
        import jax

        return module.apply(variables, *args, rngs={"dropout": jax.random.key(0)}, **named)

    # The weights are passed instead of `self`, the first parameter.
    return WithParams(apply, params, "self", inspect.signature(type(module).__call__))


def linen_module(target: Any) -> Any:
    """Return the flax.linen module that a target is, or whose `apply` it is; None if there is
    none.
    """
    if inspect.ismethod(target) and target.__name__ == "apply":
        target = target.__self__
    if library_of(target) == "linen" and not inspect.isclass(target):
        return target
    return None


def weights_parameter(function: Any, parameters: Parameters) -> str:
    """Return the name of the parameter for the weights; empty if there is none.

    It is recognized by its name, or because the function looks up a key in it.
    """
    if linen_module(function) is not None:
        return next(iter(parameters))
    roles = role_names(parameters)
    if "weights" in roles:
        return roles["weights"]
    names = required(parameters)
    if len(names) < 2 or inspect.isclass(function):
        return ""
    for name in names:
        if name not in roles.values() and _looks_up_a_name(function, names, name):
            return name
    return ""


def check_has_weights(target: Any, name: str, why: str = "") -> None:
    """Reject a function that must be called with its weights.

    Raises:
        ValueError: if the function has a required parameter for its weights.
    """
    parameters = parameters_of(target) or {}
    weights_name = weights_parameter(target, parameters)
    if weights_name and weights_name in required(parameters):
        rule = f"be passed: {name} receives its weights as {weights_name}"
        raise InputError("params", rule, why, remedy={"params": "pkg.module:NAME"})


def _looks_up_a_name(function: Callable[..., Any], names: Sequence[str], name: str) -> bool:
    """Return whether a call with an empty mapping fails because a key is missing in it."""
    x = np.zeros((BATCH, NUM_HEADS, NUM_HEADS * HEAD_DIM), np.float32)
    arguments: dict[str, Any] = dict.fromkeys(names, x)
    arguments[name] = {}
    try:
        with user_code(function):
            function(*arguments.values())
    except KeyError as error:
        return bool(error.args) and isinstance(error.args[0], str)
    except Exception:  # such inputs may raise anything
        return False
    return False


# ---- Trees of arrays -----------------------------------------------------------------------------


def leaves_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves of nested mappings, lists and tuples, each with its path."""
    if isinstance(tree, Mapping) and not hasattr(tree, "shape"):
        for name, branch in tree.items():
            yield from leaves_in(branch, (*path, name))
    elif isinstance(tree, list | tuple) and not hasattr(tree, "shape"):
        for i, branch in enumerate(tree):
            yield from leaves_in(branch, (*path, i))
    else:
        yield path, tree


def arrays_in(tree: Any) -> Iterator[Any]:
    """Yield the arrays in nested mappings, lists and tuples or, if JAX is loaded, in any JAX
    tree.
    """
    for _, leaf in leaves_in(tree):
        if hasattr(leaf, "shape"):
            yield leaf
        elif "jax" in sys.modules:
            for jax_leaf in sys.modules["jax"].tree.leaves(leaf):
                if hasattr(jax_leaf, "shape"):
                    yield jax_leaf


def has_arrays(tree: Any) -> bool:
    """Return whether a tree contains an array."""
    return next(arrays_in(tree), None) is not None


def with_leaves(
    tree: Any, change: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()
) -> Any:
    """Return a copy of nested mappings, lists and tuples with leaves `change(path, leaf)`."""
    if isinstance(tree, Mapping):
        by_name: dict[Any, Any] = {}
        for name, branch in tree.items():
            by_name[name] = with_leaves(branch, change, (*path, name))
        with suppress(TypeError):  # the constructor of an npz file or a defaultdict differs
            return type(tree)(by_name)  # type: ignore[call-arg]
        return by_name
    if type(tree) in (list, tuple):
        branches = []
        for i, branch in enumerate(tree):
            branches.append(with_leaves(branch, change, (*path, i)))
        return type(tree)(branches)
    return change(path, tree)
