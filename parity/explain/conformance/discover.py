"""Make a subject of a user's own attention; properties that are not declared are detected."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from mha_spec import InputError, InputTypeError
from mha_spec.rules import as_count, as_one_of
from parity.explain.conformance.calls import Failed, Refused, fresh_copies, run
from parity.explain.conformance.functional import (
    WithParams,
    arrays_in,
    cast_in_jax,
    check_has_weights,
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
    Call,
    Path,
    Subject,
)
from parity.measure.core.user_code import name_of, user_code
from parity.measure.text import did_you_mean

OF_MASKS = {"torch": "torch", "jax": "jax.numpy", "ttnn": "numpy"}
"""Modules of the arrays that masks consist of."""

OF_LIBRARY = {**{name: name for name in FRAMEWORKS}, "jaxlib": "jax"}
"""Frameworks by the top-level package of their definitions."""


def load_callable(target: str) -> Any:
    """Import `pkg.module:callable` from the current folder or the environment.

    Raises:
        ValueError: if the name is malformed, or does not refer to a callable.
        ImportError: if the module cannot be imported.
    """
    found = _load(target, "the subject", "callable")
    if not callable(found):
        raise InputError("the subject", "be callable", f"{type(found).__name__} for {target!r}")
    return found


def load_params(target: str) -> Any:
    """Import the weights `pkg.module:NAME`: a tree of arrays, or a function that returns one.

    Raises:
        ValueError: if the name is malformed, or does not refer to arrays.
        ImportError: if the module cannot be imported.
    """
    found = _load(target, "params", "NAME")
    if callable(found) and not any(True for _ in arrays_in(found)):
        try:
            with user_code(target):
                found = found()
        except Exception as error:  # a user's function may raise anything
            raise InputError(
                "params", "need no arguments", f"{type(error).__name__}: {error}"
            ) from error
    if not any(True for _ in arrays_in(found)):
        raise InputError(
            "params",
            "be a mapping or another tree of arrays",
            f"{type(found).__name__} for {target!r}",
        )
    return found


def _load(target: str, argument: str, kind: str) -> Any:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise InputError(argument, f"be given as pkg.module:{kind}", repr(target))
    folder = str(FilePath.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with user_code(module_name):
            found = importlib.import_module(module_name)
    except Exception as error:  # importing may raise anything
        is_absent = (
            isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        )
        advice = "; run from the folder of the module, or set PYTHONPATH" if is_absent else ""
        raise ImportError(
            f"{module_name} must be importable, got {type(error).__name__}: {error}{advice}"
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            names = [each for each in dir(found) if not each.startswith("_")]
            raise InputError(
                target,
                "name an attribute of its module",
                f"no {name!r}",
                hint=did_you_mean(name, names),
            )
        found = getattr(found, name)
    return found


def subject_of(
    target: Any,
    name: str | None = None,
    *,
    framework: str | None = None,
    axes: str | None = None,
    params: Any = None,
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
        target: a function, a module, or a class or factory of modules that needs no arguments, in
            torch, JAX or ttnn.
        name: name for reports; default: its own name.
        framework: `torch`, `jax` or `ttnn`, if neither the module's class nor the function's
            imports show it.
        axes: axes of its inputs, one of `AXES`.
        params: weights of a function `attention(params, x)`, of a flax.linen module, or of its
            `apply`: a mapping or another tree of arrays.
        d_model: width of a layer's inputs.
        num_heads: its number of query heads, for a mask (B * N, T, S).
        mask_name, causal_name: names of its parameters; `""` if it has none.
        mask_true, causal, num_kv_heads: its claims, see `Subject`.

    Raises:
        ValueError: if a required property is neither declared nor detectable.
        TypeError: if constructing the target requires arguments.
    """
    for what, value, known in (
        ("framework", framework, FRAMEWORKS),
        ("axes", axes, AXES),
        ("mask_true", mask_true, ("hides", "shows")),
        ("causal", causal, ("top-left", "bottom-right")),
    ):
        if value is not None:
            as_one_of(what, value, known)
    for what, number in (
        ("d_model", d_model),
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
    ):
        if number is not None:
            as_count(what, number)
    name = name or name_of(target)
    target = made(target, name, params)
    library = library_of(target)
    framework = framework or framework_of(target)
    if framework not in FRAMEWORKS:
        raise InputError(
            "framework",
            "be declared as torch, jax or ttnn if it cannot be detected",
            framework=name,
        )
    parameters = parameters_of(target)
    roles = roles_of(name, parameters, mask_name=mask_name, causal_name=causal_name)
    if library:
        num_heads = num_heads or _size(target, HEADS)
        roles.pop("dropout", None)  # handled by the module itself
    call = _AsCall(target, library, framework, roles, parameters is None, num_heads)
    takes = {role for role in ("mask", "is_causal", "need_weights", "dropout") if role in roles}
    takes |= (
        {"train"} if library == "torch" or roles.keys() & {"training", "deterministic"} else set()
    )
    takes |= {"key", "value"} if parameters is None or roles.keys() >= {"key", "value"} else set()
    takes |= {"key"} if "key" in roles else set()
    head_dim = TTNN_HEAD_DIM if framework == "ttnn" else HEAD_DIM
    subject = Subject(
        name,
        framework,
        axes or "BTE",
        call.on_path,
        takes=frozenset(takes),
        padding="mask" if "padding" in roles else "lengths" if "lengths" in roles else None,
        width=d_model or NUM_HEADS * head_dim,
        num_heads=num_heads,
        head_dim=head_dim,
        mask_true=mask_true,
        causal=causal,
        num_kv_heads=num_kv_heads,
    )
    if axes is not None or library:
        return (
            subject
            if d_model or not subject.is_layer
            else _with_width(subject, _widths(target, library))
        )
    if isinstance(
        target, WithParams
    ):  # its weights show the width of a layer, unless it accepts split heads
        try:
            return _with_width(subject, [d_model] if d_model else _widths(target, library))
        except InputError:
            if d_model or "value" not in subject.takes:
                raise
            return _with_axes(subject)
    try:
        return _with_axes(subject)
    except InputError as error:
        check_has_weights(target, error.argument, str(error.got))
        if d_model is None:
            error.remedy = {"d_model": "E"}
            error.hint = "sets the width of the inputs"
        raise


def made(target: Any, name: str, params: Any = None) -> Any:
    """Construct a module from a class or factory; bind `params` to a function; return other targets
    unchanged.
    """
    if params is not None:
        return with_params(target, params, name)
    if linen_module(target):
        rule = "be given: a module of flax.linen has no weights of its own"
        raise InputTypeError(
            "params", rule, type(target).__name__, remedy={"params": "pkg.module:NAME"}
        )
    parameters = parameters_of(target)
    if inspect.isclass(target):
        if missing := required(parameters or {}):
            raise InputTypeError("a class", "need no arguments", f"{name}({', '.join(missing)})")
        with user_code(name):
            return target()
    if parameters is not None and not parameters and inspect.isroutine(target):
        with user_code(name):
            made = target()
        if not callable(made):
            raise InputTypeError(
                "a factory", "return a callable", f"{type(made).__name__} from {name}"
            )
        return made
    return target


def framework_of(target: Any) -> str | None:
    """Return the framework of a function's or module's arrays, one of `FRAMEWORKS`; None if
    unknown.
    """
    if isinstance(target, WithParams) and (found := _only(map(type, arrays_in(target.params)))):
        return found
    if library := library_of(linen_module(target) or target):
        return "torch" if library == "torch" else "jax"
    return _imported(target)


def _imported(target: Any) -> str | None:
    """Return the framework that a function's own module imports, otherwise that of the modules it
    uses.
    """
    function = inspect.unwrap(getattr(target, "func", target))
    if not hasattr(function, "__globals__"):
        # An instance whose class defines a call.
        call = getattr(type(function), "__call__", None)  # noqa: B004
        if inspect.isfunction(call):
            function = call
    if found := _only([function]):
        return found
    used = [*getattr(function, "__globals__", {}).values()]
    names = {
        each.__name__ if inspect.ismodule(each) else getattr(each, "__module__", None)
        for each in used
    }
    further = [
        vars(sys.modules[name]).values()
        for name in names
        if name in sys.modules and name != "builtins"
    ]
    return _only(used) or _only(each for values in further for each in values)


def _only(used: Iterable[Any]) -> str | None:
    """Return the only framework of some modules, types or functions."""
    names = [
        each.__name__ if inspect.ismodule(each) else getattr(each, "__module__", None)
        for each in used
    ]
    found = {OF_LIBRARY.get(name.split(".")[0]) for name in names if isinstance(name, str)} - {None}
    return found.pop() if len(found) == 1 else None


def _size(target: Any, names: Sequence[str]) -> int | None:
    return next(
        (size for name in names if isinstance(size := getattr(target, name, None), int)), None
    )


def _widths(target: Any, library: str) -> list[int]:
    """Return candidates for the width of a module's inputs: its attributes, then every size of its
    parameters.
    """
    width = _size(target, WIDTHS)
    tree = (
        [*target.parameters()]
        if library == "torch"
        else target.params
        if isinstance(target, WithParams)
        else target
    )
    sizes = [size for leaf in arrays_in(tree) if len(leaf.shape) > 1 for size in leaf.shape]
    return list(dict.fromkeys([*([width] if width else []), *sizes]))


def _with_width(subject: Subject, widths: Sequence[int]) -> Subject:
    """Return the layer with the first input width that it accepts."""
    errors = []
    for width in widths:
        found = replace(subject, width=width)
        if not (error := _error_as_layer(found)):
            return found
        errors.append(error)
    got = f"{subject.name}{f' with {widths[0]}: {errors[0]}' if errors else ''}"
    raise InputError("d_model", "be declared if no width of its parameters works", got)


def _error_as_layer(subject: Subject) -> Refused | Failed | None:
    """Return the error of a plain call with the inputs of a layer; None if the call succeeds."""
    x = np.random.default_rng(0).standard_normal((BATCH, NUM_HEADS, subject.width))
    try:
        run(subject, Path(subject.dtypes[0]), (x, x, x))
    except (Refused, Failed) as error:
        return error
    return None


@dataclass
class _AsCall:
    """Wrap a user's callable as a `Call`: parameters by name, and the mask in the first shape that
    works.
    """

    target: Any
    library: str
    framework: str
    roles: Mapping[str, str]
    is_opaque: bool
    num_heads: int | None
    mask_axes: tuple[int, ...] | None = None
    is_batched: bool | None = None

    def on_path(self, path: Path) -> Call:
        """Return the callable in the dtype and mode of the path."""
        function = self._prepared(path)
        modes: dict[str, Any] = {"training": path.train, "deterministic": not path.train}
        if path.drops or (path.dropout and modes.keys() & self.roles.keys()):
            modes["dropout"] = path.dropout  # in evaluation too, if a flag selects the mode
        if path.drops and self.framework == "jax":
            import jax

            modes["rng"] = jax.random.key(0)
        modes["need_weights"] = False  # overridden below; some return weights by default
        fixed = {self.roles[role]: value for role, value in modes.items() if role in self.roles}
        broadcast_to = importlib.import_module(OF_MASKS[self.framework]).broadcast_to

        def call(
            query: Any, key: Any, value: Any, *, mask: Any = None, **options: Any
        ) -> tuple[Any, Any]:
            if "padding" in options and "padding" not in self.roles:
                options["lengths"] = options.pop("padding")
            named = fixed | {self.roles[role]: option for role, option in options.items()}
            if mask is None:
                return self._parsed(self._call(function, query, key, value, named))
            errors: list[Exception] = []
            for axes in (
                self._mask_axes(query.shape[0]) if self.mask_axes is None else [self.mask_axes]
            ):
                try:
                    given = {
                        **named,
                        self.roles["mask"]: broadcast_to(mask[0, 0], (*axes, *mask.shape[-2:])),
                    }
                    output = self._parsed(self._call(function, query, key, value, given))
                except Exception as error:  # the next shape may work
                    errors.append(error)
                    continue
                if tuple(output[0].shape)[:-1] == tuple(query.shape)[:-1]:
                    self.mask_axes = axes
                    return output
            raise errors[0] if errors else ValueError("the mask is not accepted in any shape")

        return call

    def _prepared(self, path: Path) -> Callable[..., Any]:
        if self.library == "torch":
            import torch

            return copy.deepcopy(self.target).to(getattr(torch, path.dtype)).train(path.train)
        if self.library == "equinox":
            import jax

            return jax.tree.map(lambda leaf: cast_in_jax(leaf, path.dtype), self.target)
        if self.library == "nnx":
            fresh = fresh_copies(self.target, lambda leaf: cast_in_jax(leaf, path.dtype))
            return lambda *args, **named: fresh()(*args, **named)
        return (
            self.target.in_dtype(path.dtype, self.framework)
            if isinstance(self.target, WithParams)
            else self.target
        )

    def _call(
        self, function: Callable[..., Any], query: Any, key: Any, value: Any, named: dict[str, Any]
    ) -> Any:
        def direct(query: Any, key: Any, value: Any) -> Any:
            if self.is_opaque:
                return function(query, key, value, **named)
            # By name, because the second argument is not always the key.
            rest = {
                self.roles[role]: x
                for role, x in (("key", key), ("value", value))
                if role in self.roles
            }
            return function(query, **rest, **named)

        if self.library != "equinox" or self.is_batched:
            return direct(query, key, value)
        import jax

        if self.is_batched is None:  # Equinox layers usually accept one sequence
            try:
                jax.eval_shape(direct, query, key, value)
                self.is_batched = True
                return direct(query, key, value)
            except Exception:  # the layer may raise anything
                self.is_batched = False
        return jax.vmap(direct)(query, key, value)

    def _mask_axes(self, batch: int) -> list[tuple[int, ...]]:
        """Return shapes that may precede (T, S) in a mask, the usual ones first."""
        axes = [()] if self.library == "equinox" else [(batch, 1), (), (batch,)]
        return axes if self.num_heads is None else [*axes, (batch * self.num_heads,)]

    @staticmethod
    def _parsed(result: Any) -> tuple[Any, Any]:
        if not isinstance(result, (tuple, list)):
            return result, None
        output, *others = result
        return output, next(
            (other for other in others[:1] if len(getattr(other, "shape", ())) >= 3), None
        )


def _with_axes(subject: Subject) -> Subject:
    """Return the subject with detected axes: a change of one entry spreads over tokens, but not
    over heads.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, NUM_HEADS, subject.width))
    heads = (BATCH, NUM_HEADS, NUM_HEADS, subject.head_dim)
    query, key, value = (rng.standard_normal(heads) for _ in range(3))
    as_given, path = replace(subject, axes="BNTH"), Path(subject.dtypes[0])
    try:
        if "key" not in subject.takes:  # self-attention with one input projects it, or has no heads
            run(subject, path, (x, x, x))
            return subject
        before = run(as_given, path, (query, key, value)).output
        value[0, 1, 2] += 10.0
        after = run(as_given, path, (query, key, value)).output
    except (Refused, Failed) as error:
        if _error_as_layer(subject):
            raise InputError(
                subject.name, f"accept split heads {heads} or (B, T, E) = {x.shape}", str(error)
            ) from error
        return subject
    changed = np.abs(after - before).max(axis=-1)[0] > 1e-6
    if changed[1].sum() > 1 and not np.delete(changed, 1, axis=0).any():
        return as_given
    if changed[:, 2].sum() > 1 and not np.delete(changed, 2, axis=1).any():
        return replace(subject, axes="BTNH")
    raise InputError("axes", "be declared if they cannot be detected", subject.name)
