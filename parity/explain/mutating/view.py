"""Known properties of a user's attention: its parameters, axes and polarities."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.conformance.calls import Failed, RejectedCall, run
from parity.explain.conformance.discover import framework_of, load_callable, made, subject_of
from parity.explain.conformance.examination import Examination
from parity.explain.conformance.functional import linen_module, weights_parameter, with_params
from parity.explain.conformance.questions.masks import causal as asks_causal
from parity.explain.conformance.signatures import (
    BIASES,
    PACKED,
    PROJECTION_NAMES,
    Parameters,
    parameters_of,
    roles_of,
)
from parity.explain.conformance.subjects import NUM_KV_HEADS, Subject

WORDS = {
    "mask": "mask",
    "is_causal": "causal flag",
    "key": "keys of its own",
    "value": "values of its own",
    "padding": "padding mask or lengths",
    "bias": "bias of the scores",
    "positions": "positions",
    "cache": "cache",
    "cos": "cosines and sines",
    "window": "window",
    "soft_cap": "soft cap",
    "scale": "scale",
    "sinks": "sinks",
}
OTHER_NEEDS = {
    "heads": "its inputs are not split into heads",
    "layer": "its inputs are split into heads",
    "polarity": "the meaning of True in its mask is unknown: declare it (--mask-true)",
    "padding polarity": (
        "the meaning of True in its padding mask is unknown: declare it (--padding-true)"
    ),
    "top-left": "its causal flag is already aligned to the last key, or its alignment is unknown",
    "bottom-right": (
        "its causal flag is already aligned to the first key, or its alignment is unknown"
    ),
    "groups": "it does not support fewer key/value heads than query heads",
    "ours": "ours cannot replace it: it is not a function of split heads that agrees with ours",
    "projections": "it has no projections: neither a module's nor weights among its parameters",
    "biases": "it has no biases of projections",
    "module": "it has no mask among its parameters",
    "rotation": "it has no recognized RoPE",
}
"""Why a bug cannot be injected into a callable that lacks something other than a parameter."""


@dataclass(frozen=True)
class View:
    """The form of a user's attention, as plain data that another process can read.

    Attributes:
        framework: `torch` or `jax`.
        axes: axes of its inputs: `BNTH`, `BTNH` or `BTE`.
        order: its positional parameters, without `self`.
        optional: parameters whose default is None.
        roles: its parameters by role; `query` is the first one.
        mask_true, padding_true: effect of True, `hides` or `shows`; empty if unknown.
        causal: alignment of its causal flag, `top-left` or `bottom-right`; empty if unknown.
        has_groups: whether it supports fewer key/value heads.
        is_ours: whether it agrees with our attention, so that ours can replace it.
        projections, biases: whether it may have any, in its module or among its parameters.
        is_module: whether it is a method of a module.
        note: properties that could not be detected, and why.
    """

    framework: str
    axes: str
    order: Sequence[str]
    optional: Sequence[str] = ()
    roles: dict[str, str] = field(default_factory=dict)
    mask_true: str = ""
    padding_true: str = ""
    causal: str = ""
    has_groups: bool = False
    is_ours: bool = False
    projections: bool = False
    biases: bool = False
    is_module: bool = False
    note: str = ""

    def lacks(self, need: str) -> str:
        """Return why a bug with a requirement cannot be injected; empty if it can."""
        roles = self.roles.keys()
        has = {
            "heads": self.axes != "BTE",
            "layer": self.axes == "BTE",
            "polarity": bool(self.mask_true),
            "padding polarity": bool(self.padding_true) or "padding" not in roles,
            "top-left": self.causal == "top-left",
            "bottom-right": self.causal == "bottom-right",
            "groups": self.has_groups,
            "ours": self.is_ours,
            "projections": self.projections,
            "biases": self.biases,
            "module": self.is_module,
            "rotation": self.is_module or bool(roles & {"theta", "position_embeddings", "cos"}),
            "padding": bool(roles & {"padding", "lengths"}),
            "cos": "position_embeddings" in roles or roles >= {"cos", "sin"},
        }
        # Other needs are roles.
        if has.get(need, need in roles):
            return ""
        return OTHER_NEEDS.get(need) or f"it has no {WORDS[need]} among its parameters"


def injected_attribute(module: Any, attribute: str) -> tuple[Any, str, bool]:
    """Return where bugs are injected for a dotted name: the holder, the attribute, and whether it
    is a method.

    For a class this is its `forward` or `__call__`; for a module instance, or the `apply` of a
    linen one, the method of its class.

    Raises:
        AttributeError: if the name does not exist.
    """
    holder = None
    target = module
    for name in attribute.split("."):
        holder = target
        target = getattr(holder, name)
    module_of_linen = linen_module(target)
    if module_of_linen is not None:
        return type(module_of_linen), "__call__", True
    if inspect.isroutine(target) or (
        hasattr(target, "__wrapped__") and not inspect.isclass(target)
    ):
        return holder, attribute.rpartition(".")[2], inspect.isclass(holder)
    owner = target
    if not inspect.isclass(target):
        owner = type(target)
    if hasattr(owner, "forward"):
        return owner, "forward", True
    return owner, "__call__", True


def view_of(
    target: str,
    *,
    framework: str | None = None,
    axes: str | None = None,
    params: Any = None,
    mask_name: str | None = None,
    mask_true: str | None = None,
    padding_true: str | None = None,
    causal_name: str | None = None,
    causal: str | None = None,
) -> View:
    """Return the view of `pkg.module:callable`; undeclared properties are detected as in
    `conformance`, or left open.

    Raises:
        ValueError, TypeError: if a required property is neither declared nor detectable.
        ImportError: if the module cannot be imported.
    """
    attention = load_callable(target)
    module, _, attribute = target.partition(":")
    holder, name, is_method = injected_attribute(importlib.import_module(module), attribute)
    function = getattr(holder, name)
    parameters = _parameters_without_self(target, function, is_method)
    takes_weights_from = function
    if is_method:
        takes_weights_from = holder
    roles = _roles(target, takes_weights_from, parameters, mask_name, causal_name)
    if params is not None:
        attention = with_params(attention, params, target)
    if not framework and is_method:
        framework = framework_of(holder)
    framework = framework or framework_of(attention)
    if framework not in ("torch", "jax"):
        rule = "be declared as torch or jax if it cannot be detected"
        raise InputError("framework", rule, target)
    declared = _declared_view(framework, roles, parameters, is_method=is_method)
    declared = replace(
        declared,
        axes=axes or "",
        mask_true=mask_true or "",
        padding_true=padding_true or "",
        causal=causal or "",
    )
    try:
        subject = subject_of(
            made(attention, target),
            target,
            framework=framework,
            axes=axes,
            mask_name=mask_name,
            mask_true=mask_true,
            causal_name=causal_name,
            causal=causal,
        )
        examined = _examined(declared, subject)
    except (ValueError, TypeError, RejectedCall, Failed) as error:
        if not axes and {"key", "value"} <= roles.keys() and not declared.projections:
            rule = "be declared if they cannot be detected"
            raise InputError("axes", rule, str(error)) from error
        if isinstance(error, InputError):
            error = error.renamed(_in_flags)
        return replace(declared, axes=axes or "BTE", note=str(error).split("\n")[0])
    if mask_true and mask_true != examined.mask_true:
        rule = f"be the meaning of True in the mask of {target}"
        hint = f"observed: {examined.mask_true or 'neither'}"
        raise InputError("mask_true", rule, mask_true=mask_true, hint=hint)
    return examined


def _parameters_without_self(target: str, function: Any, is_method: bool) -> Parameters:
    """Return the parameters of a call.

    Raises:
        ValueError: if they cannot be inspected.
    """
    parameters = parameters_of(function)
    if parameters is None:
        rule = "be a function with inspectable parameters"
        raise InputError(target, rule, type(function).__name__)
    if is_method:
        return dict(list(parameters.items())[1:])
    return parameters


def _declared_view(
    framework: str, roles: dict[str, str], parameters: Parameters, *, is_method: bool
) -> View:
    """Return what a view shows by its parameters alone."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    order = [name for name, parameter in parameters.items() if parameter.kind in positional]
    optional = [name for name, parameter in parameters.items() if parameter.default is None]
    # A module, or a mapping of weights, may have any.
    may_have_any = is_method or "weights" in roles
    without_role = parameters.keys() - {*roles.values()}
    has_projections = bool(without_role & {*PACKED, *PROJECTION_NAMES})
    has_biases = any(without_role & {*names} for names in BIASES.values())
    return View(
        framework,
        axes="",
        order=tuple(order),
        optional=tuple(optional),
        roles=roles,
        projections=may_have_any or has_projections,
        biases=may_have_any or has_biases,
        is_module=is_method,
    )


def _in_flags(name: str, value: Any) -> tuple[str, Any]:
    """Return a declaration as a command-line flag and its value."""
    if name in ("params", "d_model", "mask_name", "framework"):
        name = f"--{name.replace('_', '-')}"
    return name, value


def _roles(
    target: str,
    function: Any,
    parameters: Parameters,
    mask_name: str | None,
    causal_name: str | None,
) -> dict[str, str]:
    """Return parameters by role; `query` is the first one that has no other role and is not a
    projection.
    """
    if not parameters:
        raise InputError(target, "accept queries or their input", "no parameters")
    # These are also names of projections.
    inputs = {"query", "key", "value", "k", "v"}
    not_projections = {}
    for name, parameter in parameters.items():
        if name in inputs or name not in PROJECTION_NAMES:
            not_projections[name] = parameter
    roles = roles_of(target, not_projections, mask_name=mask_name, causal_name=causal_name)
    weights = weights_parameter(function, parameters)
    if weights:
        roles["weights"] = weights
    known = {*PROJECTION_NAMES, *roles.values()} - {"query", "q"}
    candidates = [name for name in parameters if name not in known]
    first = candidates[0] if candidates else next(iter(parameters))
    return {"query": first, **roles}


def _examined(view: View, subject: Subject) -> View:
    """Return the view with properties that are detected by calling it."""
    exam = Examination(subject, ("float32",))
    view = replace(view, axes=subject.axes)
    if exam.takes_mask:
        view = replace(view, mask_true=exam.polarity.words)
    if subject.padding == "mask" and not view.padding_true:
        with suppress(RejectedCall, Failed):
            view = replace(view, padding_true=_padding_true(exam))
    if "is_causal" in subject.takes and not view.causal:
        alignment = asks_causal.ask(exam).words
        if alignment in ("top-left", "bottom-right"):
            view = replace(view, causal=alignment)
    if subject.axes != "BTE":
        view = replace(view, is_ours=_is_ours(exam))
        # A call with fewer key/value heads shows whether they are supported.
        with suppress(RejectedCall, Failed):
            query, key, value = exam.inputs()
            fewer_keys = key[:, :NUM_KV_HEADS].copy()
            fewer_values = value[:, :NUM_KV_HEADS].copy()
            run(subject, exam.base, (query, fewer_keys, fewer_values))
            view = replace(view, has_groups=True)
    return view


def _padding_true(exam: Examination) -> str:
    """Return the effect of True in the padding mask of an attention."""
    if exam.padding_true_hides:
        return "hides"
    return "shows"


def _is_ours(exam: Examination) -> bool:
    """Return whether a plain call computes softmax(q k^T / sqrt(H)) v."""
    query, key, value = exam.inputs()
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ value
    output = run(exam.subject, exam.base, exam.inputs()).output
    return bool(np.abs(output - expected).max() < 1e-5)
