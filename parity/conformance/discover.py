"""A user's own attention as a subject: what is not declared is found out."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from mha_spec import Refusal, WrongType
from parity.conformance.calls import Failed, Refused, fresh_copies, run
from parity.conformance.subjects import (
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

ROLES = {
    "key": ("key_", "key", "keys", "k", "inputs_k", "key_states"),
    "value": ("value", "values", "v", "inputs_v", "value_states"),
    "mask": ("mask", "attn_mask", "attention_mask"),
    "is_causal": ("is_causal", "causal", "use_causal_mask"),
    "need_weights": ("need_weights", "return_weights", "return_attention_scores", "output_attentions"),
    "padding": ("key_padding_mask",),
    "lengths": ("key_padding_lengths", "key_value_seq_lengths"),
    "training": ("training", "train"),
    "deterministic": ("deterministic",),
    "dropout": ("dropout_p", "dropout_rate", "dropout"),
    "rng": ("dropout_rng", "rng"),
}
"""The names that a parameter may have, by what it is for."""

NO_MASKS = (
    *("scale", "softmax_scale", "bias", "attn_bias", "positions", "position_ids", "position_embeddings"),
    *(
        "enable_gqa",
        "average_attn_weights",
        "inference",
        "rngs",
        "decode",
        "cache",
        "new_lengths",
        "theta",
        "rope_theta",
    ),
)
"""Parameters that are asked nothing, and are no mask either."""

WIDTHS = ("d_model", "embed_dim", "in_features", "query_size", "hidden_size", "dim")
HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")


def load_callable(target: str) -> Any:
    """What `pkg.module:callable` names, from the working directory or the environment.

    Raises:
        ValueError: if it is no such name, or there is nothing callable by it.
        ImportError: if the module cannot be imported.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise Refusal("the subject", "be given as pkg.module:callable", repr(target))
    folder = str(FilePath.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = importlib.import_module(module_name)
    except Exception as error:  # whatever runs when it is imported
        raise ImportError(f"{module_name} must be importable, got {type(error).__name__}: {error}") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise Refusal(module_name, "have what was named", f"no {name!r} for {target!r}")
        found = getattr(found, name)
    if not callable(found):
        raise Refusal("the subject", "be callable", f"{type(found).__name__} for {target!r}")
    return found


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
    """A user's attention as a subject: what is not declared is found out.

    Args:
        target: a function, a module, or a class or factory of modules that needs no arguments, in torch, JAX or ttnn.
        name: what to call it; its own name when absent.
        framework: `torch`, `jax` or `ttnn`, where the kind of module or the function's own imports do not tell.
        axes: of its inputs, one of `AXES`.
        d_model: width of a layer's inputs.
        num_heads: its query heads, for a mask (B * N, T, S).
        mask_name, causal_name: names of its parameters; `""` says that it has none.
        mask_true, causal, num_kv_heads: what it claims, see `Subject`.

    Raises:
        ValueError: if something is needed that is neither declared nor to be found.
        TypeError: if the target needs arguments to be made.
    """
    for what, value, known in (
        ("framework", framework, FRAMEWORKS),
        ("axes", axes, AXES),
        ("mask_true", mask_true, ("hides", "shows")),
        ("causal", causal, ("top-left", "bottom-right")),
    ):
        if value is not None and value not in known:
            raise Refusal(what, f"be one of {', '.join(known)}", {what: value})
    for what, number in (("d_model", d_model), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if number is not None and number < 1:
            raise Refusal(what, "be at least 1", {what: number})
    name = name or name_of(target)
    target = made(target, name)
    library = _library(target)
    framework = framework or framework_of(target)
    if framework not in FRAMEWORKS:
        raise Refusal("framework", "be declared as torch, jax or ttnn where it cannot be seen", framework=name)
    parameters = parameters_of(target)
    roles = roles_of(name, parameters, mask_name=mask_name, causal_name=causal_name)
    if library is not None:
        num_heads = num_heads or _size(target, HEADS)
        roles.pop("dropout", None)  # the module's own
    call = _AsCall(target, library, framework, roles, parameters is None, num_heads)
    takes = {role for role in ("mask", "is_causal", "need_weights", "dropout") if role in roles}
    takes |= {"train"} if library == "torch" or roles.keys() & {"training", "deterministic"} else set()
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
    if axes is None and library is None:
        return _with_axes(subject)
    return subject if d_model or not subject.is_layer else _with_width(subject, _widths(target, library))


def roles_of(
    name: str,
    parameters: Mapping[str, inspect.Parameter] | None,
    *,
    mask_name: str | None = None,
    causal_name: str | None = None,
) -> dict[str, str]:
    """What the parameters of a user's attention are for: their names, by the keys of `ROLES`.

    Args:
        name: of the attention, for the messages.
        parameters: of its call, see `parameters_of`.
        mask_name, causal_name: names that are declared; `""` says that it has none.

    Raises:
        ValueError: if a name that is declared is none of them, or one may be a mask by a name that is not known.
    """
    declared = {"mask": mask_name, "is_causal": causal_name}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in (parameters or {}).values())
    for role, wanted in declared.items():
        if wanted and parameters is not None and wanted not in parameters and not takes_any:
            raise Refusal(role, f"be a parameter of {name}", {role: wanted}, hint=f"there are {', '.join(parameters)}")
    roles: dict[str, str] = {}
    for role, names in ROLES.items():
        found = next((known for known in names if known in (parameters or ())), "")
        if found := found if declared.get(role) is None else declared[role]:
            roles[role] = found
    if mask_name is None and "mask" not in roles:
        _check_for_a_mask(name, parameters, roles)
    return roles


def _check_for_a_mask(name: str, parameters: Mapping[str, inspect.Parameter] | None, roles: Mapping[str, str]) -> None:
    """Refuse to examine without a mask what may take one by a name that is not known."""
    if parameters is None:
        unknown = ["parameters that cannot be seen"]
    else:
        unknown = [  # what is required and not given fails by itself
            str(parameter)
            for parameter in parameters.values()
            if parameter.name not in {*roles.values(), *NO_MASKS}
            and (parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD)
        ]
    if unknown:
        raise Refusal(
            "mask_name", f"say which parameter of {name} is the mask, or '' for none (--mask-name)", ", ".join(unknown)
        )


def name_of(target: Any) -> str:
    """What a user's attention is called."""
    return str(getattr(target, "__qualname__", type(target).__name__))


def made(target: Any, name: str) -> Any:
    """The module that a class or factory makes; anything else as it is."""
    parameters = parameters_of(target)
    required = [
        parameter
        for parameter in (parameters or {}).values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if inspect.isclass(target):
        if required:
            raise WrongType("a class", "need no arguments", f"{name}({', '.join(p.name for p in required)})")
        return target()
    if parameters is not None and not parameters and inspect.isroutine(target):
        made = target()
        if not callable(made):
            raise WrongType("a factory", "make something callable", f"{type(made).__name__} from {name}")
        return made
    return target


def parameters_of(target: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a call, or None where a compiled function does not tell."""
    if not inspect.isclass(target) and hasattr(target, "forward") and not inspect.isroutine(target):
        target = target.forward
    elif not inspect.isclass(target) and not inspect.isroutine(target) and hasattr(type(target), "__call__"):  # noqa: B004
        target = target if hasattr(target, "func") else target.__call__
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def framework_of(target: Any) -> str | None:
    """Whose arrays a function or module takes, one of `FRAMEWORKS`, or None if it cannot be seen."""
    library = _library(target)
    return {"flax": "jax", "equinox": "jax"}.get(library or "", library) or _imported(target)


def _library(target: Any) -> str | None:
    """The library whose module it is: `torch`, `flax` or `equinox`."""
    for kind in type(target).__mro__:
        if kind.__module__.startswith("flax.linen") and kind.__name__ == "Module":
            raise WrongType(
                "a module of flax.linen",
                "be given as a function that applies it to its parameters",
                type(target).__name__,
            )
        library = kind.__module__.split(".")[0]
        if library in ("torch", "flax", "equinox") and kind.__name__ == "Module":
            return library
    return None


def _imported(target: Any) -> str | None:
    """The one of the frameworks that a function's own module uses."""
    function = inspect.unwrap(getattr(target, "func", target))
    if not hasattr(function, "__globals__") and inspect.isfunction(getattr(type(function), "__call__", None)):  # noqa: B004
        function = type(function).__call__
    own = (getattr(function, "__module__", None) or "").split(".")[0]
    if own in FRAMEWORKS or own == "torch._C":
        return own
    modules = {
        (value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None) or "").split(".")[0]
        for value in getattr(function, "__globals__", {}).values()
    }
    found = [framework for framework in FRAMEWORKS if framework in modules]
    return found[0] if len(found) == 1 else None


def _size(target: Any, names: Sequence[str]) -> int | None:
    return next((size for name in names if isinstance(size := getattr(target, name, None), int)), None)


def _widths(target: Any, library: str | None) -> list[int]:
    """What the width of a module's inputs may be: what it says, then every size of its parameters."""
    told = _size(target, WIDTHS)
    if library == "torch":
        shapes = [tuple(parameter.shape) for parameter in target.parameters()]
    else:
        import jax

        shapes = [leaf.shape for leaf in jax.tree.leaves(target) if hasattr(leaf, "shape")]
    sizes = [size for shape in shapes if len(shape) > 1 for size in shape]
    return list(dict.fromkeys([*([told] if told else []), *sizes]))


def _with_width(subject: Subject, widths: Sequence[int]) -> Subject:
    """The layer with the first width of inputs that it takes."""
    reasons = []
    for width in widths:
        found = replace(subject, width=width)
        x = np.random.default_rng(0).standard_normal((BATCH, NUM_HEADS, width))
        try:
            run(found, Path(), (x, x, x))
        except (Refused, Failed) as error:
            reasons.append(str(error))
            continue
        return found
    raise ValueError(
        f"d_model must be declared where no width seen in its parameters is taken, got {subject.name}"
        + (f" with {widths[0]}: {reasons[0]}" if reasons else "")
    )


@dataclass
class _AsCall:
    """A user's callable as a `Call`: parameters by their names, the mask in the first shape that it takes."""

    target: Any
    library: str | None
    framework: str
    roles: Mapping[str, str]
    is_opaque: bool
    num_heads: int | None
    mask_shape: Callable[[Any], Any] | None = None
    is_batched: bool | None = None

    def on_path(self, path: Path) -> Call:
        """The callable in the dtype and mode of the path."""
        function = self._prepared(path)
        modes: dict[str, Any] = {"training": path.train, "deterministic": not path.train}
        if path.drops or (path.dropout and modes.keys() & self.roles.keys()):
            modes["dropout"] = path.dropout  # in evaluation too, where a function is told which it is
        if path.drops and self.framework == "jax":
            import jax

            modes["rng"] = jax.random.key(0)
        modes["need_weights"] = False  # unless asked for below: some return them by default
        fixed = {self.roles[role]: value for role, value in modes.items() if role in self.roles}

        def call(query: Any, key: Any, value: Any, *, mask: Any = None, **options: Any) -> tuple[Any, Any]:
            if "padding" in options and "padding" not in self.roles:
                options["lengths"] = options.pop("padding")
            named = fixed | {self.roles[role]: option for role, option in options.items()}
            if mask is None:
                return self._parsed(self._call(function, query, key, value, named))
            errors: list[Exception] = []
            for shape in [self.mask_shape] if self.mask_shape else self._mask_shapes(query):
                try:
                    given = {**named, self.roles["mask"]: shape(mask)}
                    output = self._parsed(self._call(function, query, key, value, given))
                except Exception as error:  # the next shape may do
                    errors.append(error)
                    continue
                if tuple(output[0].shape)[:-1] == tuple(query.shape)[:-1]:
                    self.mask_shape = shape
                    return output
            raise errors[0] if errors else ValueError("the mask is taken in no shape")

        return call

    def _prepared(self, path: Path) -> Callable[..., Any]:
        if self.library == "torch":
            import torch

            return copy.deepcopy(self.target).to(getattr(torch, path.dtype)).train(path.train)
        if self.library in ("flax", "equinox"):
            import jax
            import jax.numpy as jnp

            def cast(leaf: Any) -> Any:
                floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
                return leaf.astype(path.dtype) if floating else leaf

            if self.library == "equinox":
                return jax.tree.map(cast, self.target)
            fresh = fresh_copies(self.target, cast)
            return lambda *args, **named: fresh()(*args, **named)
        return self.target

    def _call(self, function: Callable[..., Any], query: Any, key: Any, value: Any, named: dict[str, Any]) -> Any:
        def direct(query: Any, key: Any, value: Any) -> Any:
            if self.is_opaque:
                return function(query, key, value, **named)
            # By name, for not everybody's second argument is the key.
            rest = {self.roles[role]: x for role, x in (("key", key), ("value", value)) if role in self.roles}
            return function(query, **rest, **named)

        if self.library != "equinox" or self.is_batched:
            return direct(query, key, value)
        import jax

        if self.is_batched is None:  # layers of Equinox take one sequence, by custom
            try:
                jax.eval_shape(direct, query, key, value)
                self.is_batched = True
                return direct(query, key, value)
            except Exception:  # whatever the layer raises
                self.is_batched = False
        return jax.vmap(direct)(query, key, value)

    def _mask_shapes(self, query: Any) -> list[Callable[[Any], Any]]:
        batch = query.shape[0]

        def expand(mask: Any, *shape: int) -> Any:
            shape = (*shape, *mask.shape[-2:])
            if self.framework == "torch":
                return mask[0].expand(shape)
            if self.framework == "ttnn":  # whose masks are NumPy's
                return np.broadcast_to(mask[0], shape)
            import jax.numpy as jnp

            return jnp.broadcast_to(mask[0], shape)

        shapes: list[Callable[[Any], Any]] = [lambda mask: mask[0, 0]]
        if self.library != "equinox":
            shapes.insert(0, lambda mask: expand(mask[None], batch, 1))
            shapes.append(lambda mask: expand(mask, batch))
        if self.num_heads is not None:
            heads = self.num_heads
            shapes.append(lambda mask: expand(mask, batch * heads))
        return shapes

    @staticmethod
    def _parsed(result: Any) -> tuple[Any, Any]:
        if not isinstance(result, (tuple, list)):
            return result, None
        output, *others = result
        return output, next((other for other in others[:1] if len(getattr(other, "shape", ())) >= 3), None)


def _with_axes(subject: Subject) -> Subject:
    """The subject with the order of its axes: a change of one entry spreads over tokens, and not over heads."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, NUM_HEADS, subject.width))
    heads = (BATCH, NUM_HEADS, NUM_HEADS, subject.head_dim)
    query, key, value = (rng.standard_normal(heads) for _ in range(3))
    as_given, path = replace(subject, axes="BNTH"), Path(subject.dtypes[0])
    try:
        if "key" not in subject.takes:  # of itself over itself: it must project, or have no heads
            run(subject, path, (x, x, x))
            return subject
        before = run(as_given, path, (query, key, value)).output
        value[0, 1, 2] += 10.0
        after = run(as_given, path, (query, key, value)).output
    except (Refused, Failed) as error:
        try:
            run(subject, path, (x, x, x))
        except (Refused, Failed):
            raise Refusal(subject.name, f"take split heads {heads} or (B, T, E) = {x.shape}", str(error)) from error
        return subject
    changed = np.abs(after - before).max(axis=-1)[0] > 1e-6
    if changed[1].sum() > 1 and not np.delete(changed, 1, axis=0).any():
        return as_given
    if changed[:, 2].sum() > 1 and not np.delete(changed, 2, axis=1).any():
        return replace(subject, axes="BTNH")
    raise Refusal("axes", "be declared where they cannot be seen", str(subject.name))
