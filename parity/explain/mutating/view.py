"""Known properties of a user's attention: its parameters, axes and polarities."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.conformance.calls import Failed, Refused, run
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
        has = {
            "heads": self.axes != "BTE",
            "layer": self.axes == "BTE",
            "polarity": bool(self.mask_true),
            "padding polarity": bool(self.padding_true) or "padding" not in self.roles,
            "top-left": self.causal == "top-left",
            "bottom-right": self.causal == "bottom-right",
            "groups": self.has_groups,
            "ours": self.is_ours,
            "projections": self.projections,
            "biases": self.biases,
            "module": self.is_module,
            "rotation": self.is_module
            or bool(self.roles.keys() & {"theta", "position_embeddings", "cos"}),
            "padding": bool(self.roles.keys() & {"padding", "lengths"}),
            "cos": "position_embeddings" in self.roles or self.roles.keys() >= {"cos", "sin"},
        }
        if has.get(need, need in self.roles):
            return ""
        return OTHER_NEEDS.get(need) or f"it has no {WORDS[need]} among its parameters"


def place_of(module: Any, attribute: str) -> tuple[Any, str, bool]:
    """Return where bugs are injected for a dotted name: the holder, the attribute, and whether it
    is a method.

    For a class this is its `forward` or `__call__`; for a module instance, or the `apply` of a
    linen one, that of its class.

    Raises:
        AttributeError: if the name does not exist.
    """
    holder, found = None, module
    for name in attribute.split("."):
        holder, found = found, getattr(found, name)
    last = attribute.rpartition(".")[2]
    if module_of_linen := linen_module(found):
        return type(module_of_linen), "__call__", True
    if inspect.isclass(found) or not (inspect.isroutine(found) or hasattr(found, "__wrapped__")):
        owner = found if inspect.isclass(found) else type(found)
        return owner, "forward" if hasattr(owner, "forward") else "__call__", True
    return holder, last, inspect.isclass(holder)


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
    import importlib

    found = load_callable(target)
    module, _, attribute = target.partition(":")
    holder, name, is_method = place_of(importlib.import_module(module), attribute)
    function = getattr(holder, name)
    parameters = parameters_of(function)
    if parameters is None:
        raise InputError(
            target, "be a function with inspectable parameters", type(function).__name__
        )
    parameters = dict(list(parameters.items())[is_method:])
    roles = _roles(target, holder if is_method else function, parameters, mask_name, causal_name)
    taken = found if params is None else with_params(found, params, target)
    framework = framework or (framework_of(holder) if is_method else None) or framework_of(taken)
    if framework not in ("torch", "jax"):
        raise InputError(
            "framework", "be declared as torch or jax if it cannot be detected", target
        )
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    has_weights, left = is_method or "weights" in roles, parameters.keys() - {*roles.values()}
    plain = View(
        framework,
        axes or "",
        tuple(name for name, parameter in parameters.items() if parameter.kind in kinds),
        tuple(name for name, parameter in parameters.items() if parameter.default is None),
        roles,
        mask_true or "",
        padding_true or "",
        causal=causal or "",
        projections=has_weights or bool(left & {*PACKED, *PROJECTION_NAMES}),
        biases=has_weights or any(left & {*names} for names in BIASES.values()),
        is_module=is_method,
    )
    declared = {
        "axes": axes,
        "mask_name": mask_name,
        "mask_true": mask_true,
        "causal_name": causal_name,
    }
    try:
        module_or_function = made(taken, target)
        subject = subject_of(
            module_or_function,
            target,
            framework=framework,
            causal=causal,
            **declared,  # type: ignore[arg-type]
        )
        found_out = _examined(plain, subject)
    except (ValueError, TypeError, Refused, Failed) as error:
        if not axes and {"key", "value"} <= roles.keys() and not plain.projections:
            raise InputError(
                "axes", "be declared if they cannot be detected", str(error)
            ) from error
        error = error.renamed(_in_flags) if isinstance(error, InputError) else error
        return replace(plain, axes=axes or "BTE", note=str(error).split("\n")[0])
    if mask_true and mask_true != found_out.mask_true:
        seen = found_out.mask_true or "neither"
        raise InputError(
            "mask_true",
            f"be the meaning of True in the mask of {target}",
            mask_true=mask_true,
            hint=f"seen: {seen}",
        )
    return found_out


def _in_flags(name: str, value: Any) -> tuple[str, Any]:
    """Return a declaration as a command-line flag and its value."""
    return f"--{name.replace('_', '-')}" if name in (
        "params",
        "d_model",
        "mask_name",
        "framework",
    ) else name, value


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
    inputs = {"query", "key", "value", "k", "v"}
    others = {
        name: each for name, each in parameters.items() if name not in PROJECTION_NAMES - inputs
    }
    roles = roles_of(target, others, mask_name=mask_name, causal_name=causal_name)
    if weights := weights_parameter(function, parameters):
        roles["weights"] = weights
    known = {*PROJECTION_NAMES, *roles.values()} - {"query", "q"}
    return {
        "query": next((name for name in parameters if name not in known), next(iter(parameters))),
        **roles,
    }


def _examined(view: View, subject: Subject) -> View:
    """Return the view with properties that are detected by calling it."""
    exam = Examination(subject, ("float32",))
    found = replace(view, axes=subject.axes)
    if exam.takes_mask:
        found = replace(found, mask_true=exam.polarity.words)
    if subject.padding == "mask" and not view.padding_true:
        with suppress(Refused, Failed):
            found = replace(found, padding_true="hides" if exam.padding_true_hides else "shows")
    if not found.causal and "is_causal" in subject.takes:
        words = asks_causal.ask(exam).words
        found = replace(found, causal=words if words in ("top-left", "bottom-right") else "")
    if subject.axes != "BTE":
        query, key, value = exam.inputs()
        found = replace(found, is_ours=_is_ours(exam))
        with suppress(Refused, Failed):
            run(
                subject,
                exam.base,
                (query, key[:, :NUM_KV_HEADS].copy(), value[:, :NUM_KV_HEADS].copy()),
            )
            found = replace(found, has_groups=True)
    return found


def _is_ours(exam: Examination) -> bool:
    """Return whether a plain call computes softmax(q k^T / sqrt(H)) v."""
    query, key, value = exam.inputs()
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ value
    return bool(np.abs(run(exam.subject, exam.base, exam.inputs()).output - expected).max() < 1e-5)
