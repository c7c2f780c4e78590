"""Make a subject of a user's own attention; properties that are not declared are detected."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from mha_spec import InputError, InputTypeError
from mha_spec.rules import as_count, as_one_of
from parity.explain.conformance.calls import Failed, RejectedCall, run
from parity.explain.conformance.functional import (
    WithParams,
    arrays_in,
    check_has_weights,
    has_arrays,
    linen_module,
    with_params,
)
from parity.explain.conformance.signatures import (
    HEADS,
    WIDTHS,
    library_of,
    parameters_of,
    required,
    roles_of,
)
from parity.explain.conformance.subjects import (
    AXES,
    BATCH,
    FRAMEWORKS,
    HEAD_DIM,
    NUM_HEADS,
    TTNN_HEAD_DIM,
    Path,
    Subject,
)
from parity.explain.conformance.user_calls import UserAttention
from parity.measure.core.user_code import line_of, name_of, user_code
from parity.measure.text import did_you_mean, some_of

OF_LIBRARY = {**{name: name for name in FRAMEWORKS}, "jaxlib": "jax"}
"""Frameworks by the top-level package of their definitions."""


# ---- Targets by name -----------------------------------------------------------------------------


def load_callable(target: str) -> Any:
    """Import `pkg.module:callable` from the current folder or the environment.

    Raises:
        ValueError: if the name is malformed, or does not refer to a callable.
        ImportError: if the module cannot be imported.
    """
    attention = _load(target, "the subject", "callable")
    if not callable(attention):
        raise InputError("the subject", "be callable", f"{type(attention).__name__} for {target!r}")
    if _is_async(attention):
        rule = "return its result when it is called"
        raise InputError("the subject", rule, f"an async function for {target!r}")
    return attention


def _is_async(target: Any) -> bool:
    """Return whether the calls of a function, of a module or of another object are coroutines."""
    calls = (target, getattr(target, "forward", None), type(target).__call__)
    return any(inspect.iscoroutinefunction(call) for call in calls)


def load_params(target: str) -> Any:
    """Import the weights `pkg.module:NAME`: a tree of arrays, or a function that returns one.

    Raises:
        ValueError: if the name is malformed, or does not refer to arrays.
        ImportError: if the module cannot be imported.
    """
    params = _load(target, "params", "NAME")
    if callable(params) and not has_arrays(params):
        try:
            with user_code(target):
                params = params()
        except Exception as error:  # a user's function may raise anything
            raise InputError(
                "params", "need no arguments", f"{type(error).__name__}: {error}"
            ) from error
    if not has_arrays(params):
        raise InputError(
            "params",
            "be a mapping or any other tree of arrays",
            f"{type(params).__name__} for {target!r}",
        )
    return params


def _load(target: str, argument: str, kind: str) -> Any:
    """Import `pkg.module:NAME`, where the name may have dots."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise InputError(argument, f"be given as pkg.module:{kind}", repr(target))
    value = _import_from_here(module_name)
    owner = f"module {module_name!r}"
    for name in attribute.split("."):
        if not hasattr(value, name):
            public_names = [other for other in dir(value) if not other.startswith("_")]
            hint = did_you_mean(name, public_names) or f"it has {some_of(public_names)}"
            raise ImportError(f"{owner} has no {name!r}; {hint}")
        value = getattr(value, name)
        owner = repr(name)
    return value


def _import_from_here(module_name: str) -> Any:
    """Import a module from the current folder or the environment."""
    folder = str(FilePath.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with user_code(module_name):
            return importlib.import_module(module_name)
    except Exception as error:  # importing may raise anything
        # The module itself is absent, instead of one that it imports.
        top_package = module_name.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == top_package:
            reason = f"{error}; run from the folder of the module, or set PYTHONPATH"
        else:
            reason = f"{type(error).__name__}: {error}; {line_of(error)}"
        raise ImportError(f"cannot import {module_name!r}: {reason}") from error


# ---- The subject ---------------------------------------------------------------------------------


def subject_of(
    target: Any,
    name: str | None = None,
    *,
    framework: str | None = None,
    axes: str | None = None,
    d_model: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    mask_name: str | None = None,
    mask_true: str | None = None,
    causal_name: str | None = None,
    causal: str | None = None,
) -> Subject:
    """Return a user's attention as a subject; properties that are not declared are detected.

    Args:
        target: a function or a module in torch, JAX or ttnn; `made` constructs it from a class or
            a factory, and binds a function to its weights.
        name: name for reports; default: its own name.
        framework: `torch`, `jax` or `ttnn`, if neither the module's class nor the function's
            imports show it.
        axes: axes of its inputs, one of `AXES`.
        d_model: width of a layer's inputs.
        num_heads: its number of query heads, for a mask (B * N, T, S).
        mask_name, causal_name: names of its parameters; `""` if it has none.
        mask_true, causal, num_kv_heads: its claims, see `Subject`.

    Raises:
        ValueError: if a required property is neither declared nor detectable.
    """
    _check_choice("framework", framework, FRAMEWORKS)
    _check_choice("axes", axes, AXES)
    _check_choice("mask_true", mask_true, ("hides", "shows"))
    _check_choice("causal", causal, ("top-left", "bottom-right"))
    _check_count("d_model", d_model)
    _check_count("num_heads", num_heads)
    _check_count("num_kv_heads", num_kv_heads)
    name = name or name_of(target)
    library = library_of(target)
    framework = framework or framework_of(target)
    if framework not in FRAMEWORKS:
        raise InputError(
            "framework",
            "be declared as torch, jax or ttnn if it cannot be detected",
            framework=name,
        )
    parameters = parameters_of(target)
    is_opaque = parameters is None
    roles = roles_of(name, parameters, mask_name=mask_name, causal_name=causal_name)
    if library:
        num_heads = num_heads or _size(target, HEADS)
        roles.pop("dropout", None)  # handled by the module itself
    padding = None
    if "padding" in roles:
        padding = "mask"
    elif "lengths" in roles:
        padding = "lengths"
    head_dim = HEAD_DIM
    if framework == "ttnn":
        head_dim = TTNN_HEAD_DIM
    attention = UserAttention(target, library, framework, roles, is_opaque, num_heads)
    subject = Subject(
        name,
        framework,
        axes or "BTE",
        attention.on_path,
        takes=_supported(roles, library, is_opaque),
        padding=padding,
        width=d_model or NUM_HEADS * head_dim,
        num_heads=num_heads,
        head_dim=head_dim,
        mask_true=mask_true,
        causal=causal,
        num_kv_heads=num_kv_heads,
    )
    if axes is not None or library:
        if d_model is not None or not subject.is_layer:
            return subject
        return _with_width(subject, _widths(target, library))
    if isinstance(target, WithParams):
        return _with_form_of_params(subject, target, d_model)
    try:
        return _with_axes(subject)
    except InputError as error:
        check_has_weights(target, error.argument, str(error.got))
        if d_model is None:
            error.remedy = {"d_model": "E"}
            error.hint = "sets the width of the inputs"
        raise


def _check_choice(argument: str, value: str | None, choices: Sequence[str]) -> None:
    if value is not None:
        as_one_of(argument, value, choices)


def _check_count(argument: str, value: int | None) -> None:
    if value is not None:
        as_count(argument, value)


def _supported(roles: Mapping[str, str], library: str, is_opaque: bool) -> frozenset[str]:
    """Return the arguments that a callable supports, see `Subject.takes`."""
    takes = {"mask", "is_causal", "need_weights", "dropout", "key"} & roles.keys()
    if library == "torch" or "training" in roles or "deterministic" in roles:
        takes.add("train")
    # A value alone does not show which argument is the key.
    if is_opaque or ("key" in roles and "value" in roles):
        takes |= {"key", "value"}
    return frozenset(takes)


def made(target: Any, name: str, params: Any = None) -> Any:
    """Construct a module from a class or factory; bind `params` to a function; return other targets
    unchanged.

    Args:
        target: a function, a module, or a class or factory of modules that needs no arguments.
        name: name of the target, for messages.
        params: weights of a function `attention(params, x)`, of a flax.linen module, or of its
            `apply`: a mapping or any other tree of arrays.

    Raises:
        ValueError: if `params` do not belong to the target.
        TypeError: if constructing the target requires arguments.
    """
    if params is not None:
        return with_params(target, params, name)
    if linen_module(target) is not None:
        rule = "be given: a module of flax.linen has no weights of its own"
        raise InputTypeError(
            "params", rule, type(target).__name__, remedy={"params": "pkg.module:NAME"}
        )
    parameters = parameters_of(target)
    if inspect.isclass(target):
        missing = required(parameters or {})
        if missing:
            raise InputTypeError("a class", "need no arguments", f"{name}({', '.join(missing)})")
        with user_code(name):
            return target()
    is_factory = inspect.isroutine(target) and parameters == {}
    if not is_factory:
        return target
    with user_code(name):
        module = target()
    if not callable(module):
        raise InputTypeError(
            "a factory", "return a callable", f"{type(module).__name__} from {name}"
        )
    return module


# ---- The framework -------------------------------------------------------------------------------


def framework_of(target: Any) -> str | None:
    """Return the framework of a function's or module's arrays, one of `FRAMEWORKS`; None if
    unknown.
    """
    if isinstance(target, WithParams):
        framework = _only_framework(map(type, arrays_in(target.params)))
        if framework is not None:
            return framework
    module = linen_module(target)
    library = library_of(target if module is None else module)
    if library == "torch":
        return "torch"
    if library:
        return "jax"
    return _imported_framework(target)


def _imported_framework(target: Any) -> str | None:
    """Return the framework that a function's own module imports, otherwise the framework of the
    modules it uses.
    """
    function = inspect.unwrap(getattr(target, "func", target))
    if not hasattr(function, "__globals__"):
        # An instance whose class defines a call.
        call = getattr(type(function), "__call__", None)  # noqa: B004
        if inspect.isfunction(call):
            function = call
    framework = _only_framework([function])
    if framework is not None:
        return framework
    used = list(getattr(function, "__globals__", {}).values())
    framework = _only_framework(used)
    if framework is not None:
        return framework
    return _only_framework(_names_in_modules_of(used))


def _names_in_modules_of(used: Iterable[Any]) -> Iterator[Any]:
    """Yield all objects in the modules that some objects are, or that define them."""
    for module_name in dict.fromkeys(map(_module_name, used)):
        if module_name in sys.modules and module_name != "builtins":
            yield from list(vars(sys.modules[module_name]).values())


def _only_framework(used: Iterable[Any]) -> str | None:
    """Return the only framework of some modules, types or functions; None if there is none, or
    several.
    """
    frameworks = {OF_LIBRARY.get(_module_name(value).split(".")[0]) for value in used} - {None}
    if len(frameworks) == 1:
        return frameworks.pop()
    return None


def _module_name(value: Any) -> str:
    """Return the name of a module, or of the one that defines a type or function; empty if
    unknown.
    """
    if inspect.ismodule(value):
        return value.__name__
    name = getattr(value, "__module__", None)
    if isinstance(name, str):
        return name
    return ""


# ---- Width and axes ------------------------------------------------------------------------------


def _size(target: Any, names: Sequence[str]) -> int | None:
    """Return the first attribute with one of some names that is a number."""
    for name in names:
        size = getattr(target, name, None)
        if isinstance(size, int):
            return size
    return None


def _widths(target: Any, library: str) -> list[int]:
    """Return candidates for the width of a module's inputs: its attributes, then every size of its
    parameters.
    """
    widths: list[int] = []
    width = _size(target, WIDTHS)
    if width:
        widths.append(width)
    parameters = target
    if library == "torch":
        parameters = list(target.parameters())
    elif isinstance(target, WithParams):
        parameters = target.params
    for array in arrays_in(parameters):
        if len(array.shape) > 1:
            widths.extend(array.shape)
    return list(dict.fromkeys(widths))


def _with_width(subject: Subject, widths: Sequence[int]) -> Subject:
    """Return the layer with the first input width that it accepts."""
    first_error = None
    for width in widths:
        candidate = replace(subject, width=width)
        error = _error_as_layer(candidate)
        if error is None:
            return candidate
        if first_error is None:
            first_error = error
    got = subject.name
    if first_error is not None:
        got += f" with {widths[0]}: {first_error}"
    raise InputError("d_model", "be declared if no width of its parameters works", got)


def _error_as_layer(subject: Subject) -> RejectedCall | Failed | None:
    """Return the error of a plain call with the inputs of a layer; None if the call succeeds."""
    x = np.random.default_rng(0).standard_normal((BATCH, NUM_HEADS, subject.width))
    try:
        run(subject, Path(subject.dtypes[0]), (x, x, x))
    except (RejectedCall, Failed) as error:
        return error
    return None


def _with_form_of_params(subject: Subject, target: WithParams, d_model: int | None) -> Subject:
    """Return the function of weights with the width that its weights show, unless it accepts split
    heads.
    """
    if d_model is not None:
        return _with_width(subject, [d_model])
    try:
        return _with_width(subject, _widths(target, ""))
    except InputError:
        if "value" not in subject.takes:
            raise
        return _with_axes(subject)


def _with_axes(subject: Subject) -> Subject:
    """Return the subject with detected axes: a change of one entry spreads over tokens, but not
    over heads.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, NUM_HEADS, subject.width))
    heads = (BATCH, NUM_HEADS, NUM_HEADS, subject.head_dim)
    query, key, value = (rng.standard_normal(heads) for _ in range(3))
    other_value = value.copy()
    other_value[0, 1, 2] += 10.0
    with_heads_first, path = replace(subject, axes="BNTH"), Path(subject.dtypes[0])
    try:
        if "key" not in subject.takes:  # self-attention with one input projects it, or has no heads
            run(subject, path, (x, x, x))
            return subject
        before = run(with_heads_first, path, (query, key, value)).output
        after = run(with_heads_first, path, (query, key, other_value)).output
    except (RejectedCall, Failed) as error:
        if _error_as_layer(subject) is None:
            return subject
        raise InputError(
            subject.name, f"accept split heads {heads} or (B, T, E) = {x.shape}", str(error)
        ) from error
    changed = np.abs(after - before).max(axis=-1)[0] > 1e-6
    if changed[1].sum() > 1 and not np.delete(changed, 1, axis=0).any():
        return with_heads_first
    if changed[:, 2].sum() > 1 and not np.delete(changed, 2, axis=1).any():
        return replace(subject, axes="BTNH")
    raise InputError("axes", "be declared if they cannot be detected", subject.name)
