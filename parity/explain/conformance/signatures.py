"""Names and roles of the parameters of attention functions."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any, Unpack, get_args, get_origin

from mha_spec import InputError

ROLES = {
    "key": ("key_", "key", "keys", "k", "inputs_k", "key_states"),
    "value": ("value", "values", "v", "inputs_v", "value_states"),
    "mask": ("mask", "attn_mask", "attention_mask"),
    "is_causal": ("is_causal", "causal", "use_causal_mask"),
    "need_weights": (
        "need_weights",
        "return_weights",
        "return_attention_scores",
        "output_attentions",
    ),
    "padding": ("key_padding_mask",),
    "lengths": ("key_padding_lengths", "key_value_seq_lengths"),
    "training": ("training", "train"),
    "deterministic": ("deterministic",),
    "dropout": ("dropout_p", "dropout_rate", "dropout"),
    "rng": ("dropout_rng", "rng"),
    "weights": ("weights", "params", "variables", "parameters"),
    "bias": ("attn_bias", "score_bias", "position_bias", "bias"),
    "positions": ("positions", "position_ids", "input_pos"),
    "cos": ("cos",),
    "sin": ("sin",),
    "position_embeddings": ("position_embeddings",),
    "cache": ("cache", "kv_cache", "past_key_values", "past_key_value", "layer_past"),
    "window": ("window_size", "sliding_window", "window"),
    "soft_cap": ("soft_cap", "softcap", "logits_soft_cap"),
    "sinks": ("sinks",),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "theta": ("theta", "rope_theta"),
}
"""Usual names of a parameter, by its role."""

FIRST_WEIGHTS = ("p", "w")
"""Usual names of a mapping of weights if it is the first of several parameters."""

NO_MASKS = ("enable_gqa", "average_attn_weights", "inference", "rngs", "decode", "new_lengths")
"""Parameters without a role that are not masks."""


def _input_names(input_name: str) -> tuple[str, ...]:
    """Return the usual names of the projection of `query`, `key` or `value`."""
    q = input_name[0]
    return (
        *(f"{q}_proj", f"w{q}", f"w_{q}", f"{q}_weight", f"{q}_kernel", f"{q}_lin"),
        *(input_name, f"{input_name}_proj", f"to_{q}"),
        *(f"linear_{q}", f"{q}_linear", q),
    )


PROJECTIONS = {
    "q_proj": _input_names("query"),
    "k_proj": _input_names("key"),
    "v_proj": _input_names("value"),
    "out_proj": (
        *("out_proj", "o_proj", "wo", "w_o", "o_weight", "out_weight", "o_kernel", "out_kernel"),
        *("to_out", "out_lin", "output_proj", "linear_out", "out_linear", "dense", "out", "proj"),
        *("c_proj", "o"),
    ),
}
"""Usual names of a projection in lower case: a parameter, a key of `weights` or an attribute of a
module.
"""

PROJECTION_NAMES = frozenset(itertools.chain.from_iterable(PROJECTIONS.values()))

PACKED = (
    *("qkv_proj", "qkv", "wqkv", "w_qkv", "qkv_weight", "qkv_kernel", "to_qkv", "c_attn"),
    *("in_proj", "in_proj_weight", "query_key_value", "w_pack", "qkv_linear"),
)
"""Usual names of a packed projection of queries, keys and values."""

BIASES = {
    "q_proj": ("bq", "b_q", "q_bias", "q_proj_bias"),
    "k_proj": ("bk", "b_k", "k_bias", "k_proj_bias"),
    "v_proj": ("bv", "b_v", "v_bias", "v_proj_bias"),
    "out_proj": ("bo", "b_o", "o_bias", "out_bias", "out_proj_bias", "o_proj_bias"),
    "qkv_proj": ("bqkv", "b_qkv", "qkv_bias", "qkv_proj_bias", "in_proj_bias"),
}
"""Usual names of the bias of a projection as a parameter."""

LEAVES = {"weight": "weight", "kernel": "weight", "w": "weight", "bias": "bias", "b": "bias"}
"""Usual names of the arrays of a projection."""

WIDTHS = ("d_model", "embed_dim", "in_features", "query_size", "hidden_size", "dim")
HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
HEAD_DIMS = ("head_dim", "head_size", "d_head", "d_k")

Parameters = Mapping[str, inspect.Parameter]


def parameters_of(target: Any) -> Parameters | None:
    """Return the parameters of a call, or None if a compiled function does not show them."""
    function = _called_by(target)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    by_name: dict[str, inspect.Parameter] = {}
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords = _keywords_of(function, parameter)
        else:
            keywords = [parameter]
        for keyword in keywords:
            by_name[keyword.name] = keyword
    return by_name


def _called_by(target: Any) -> Any:
    """Return the method that a call of a module or instance runs; other targets are returned."""
    if inspect.isclass(target) or inspect.isroutine(target):
        return target
    if hasattr(target, "forward"):
        return target.forward
    if callable(target) and not hasattr(target, "func"):  # a partial shows its own signature
        return target.__call__
    return target


def _keywords_of(function: Any, parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Expand a parameter `**keywords: Unpack[AsTypedDict]` into its keywords; return others
    unchanged.
    """
    annotation = parameter.annotation
    if isinstance(annotation, str):
        try:
            evaluated = inspect.signature(function, eval_str=True)
        except Exception:  # names that only a type checker can resolve
            return [parameter]
        annotation = evaluated.parameters[parameter.name].annotation
    if get_origin(annotation) is not Unpack:
        return [parameter]
    names = get_args(annotation)[0].__annotations__
    return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]


def library_of(module: Any) -> str:
    """Return the library of a module or its class: `torch`, `equinox`, `linen` or `nnx`; empty for
    any other.
    """
    kind = type(module)
    if inspect.isclass(module):
        kind = module
    for base in kind.__mro__:
        if base.__name__ != "Module":
            continue
        package, _, inner = base.__module__.partition(".")
        if package in ("torch", "equinox"):
            return package
        if package == "flax":
            return inner.split(".")[0]
    return ""


def required(parameters: Parameters) -> list[str]:
    """Return the names of the required parameters of a call."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = []
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in variable:
            names.append(name)
    return names


def role_names(parameters: Parameters) -> dict[str, str]:
    """Return the names of the parameters with a role, by role."""
    roles: dict[str, str] = {}
    for role, usual_names in ROLES.items():
        for name in usual_names:
            if name in parameters:
                roles[role] = name
                break
    first = next(iter(parameters), "")
    if "weights" not in roles and first in FIRST_WEIGHTS and len(parameters) > 1:
        roles["weights"] = first
    return roles


def roles_of(
    name: str,
    parameters: Parameters | None,
    *,
    mask_name: str | None = None,
    causal_name: str | None = None,
) -> dict[str, str]:
    """Return the names of the parameters of a user's attention, by the keys of `ROLES`.

    Args:
        name: name of the attention, for messages.
        parameters: parameters of its call, see `parameters_of`.
        mask_name: declared name of the mask; `""` if there is none.
        causal_name: declared name of the causal flag; `""` if there is none.

    Raises:
        ValueError: if a declared name is not a parameter, or an unrecognized parameter may be a
            mask.
    """
    roles = role_names(parameters or {})
    for role, declared_name in (("mask", mask_name), ("is_causal", causal_name)):
        if declared_name is None:
            continue
        if declared_name:
            _check_is_parameter(name, parameters, role, declared_name)
            roles[role] = declared_name
        else:
            roles.pop(role, None)
    if mask_name is None and "mask" not in roles:
        _check_for_a_mask(name, parameters, roles)
    return roles


def _check_is_parameter(
    name: str, parameters: Parameters | None, role: str, declared_name: str
) -> None:
    """Reject a declared name that is not a parameter, as far as the parameters are known."""
    if parameters is None or declared_name in parameters:
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    raise InputError(
        role,
        f"be a parameter of {name}",
        {role: declared_name},
        hint=f"there are {', '.join(parameters)}",
    )


def _check_for_a_mask(name: str, parameters: Parameters | None, roles: Mapping[str, str]) -> None:
    """Reject an attention whose mask may be an unrecognized parameter.

    Missing required parameters need no check: the call fails without them.
    """
    if parameters is None:
        candidates = ["unknown parameters"]
    else:
        recognized = {*roles.values(), *NO_MASKS, *itertools.chain.from_iterable(ROLES.values())}
        candidates = []
        for parameter in parameters.values():
            is_optional = (
                parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD
            )
            if is_optional and parameter.name not in recognized:
                candidates.append(str(parameter))
    if candidates:
        raise InputError(
            "mask_name",
            f"be the parameter of {name} for the mask, or '' if there is none (--mask-name)",
            ", ".join(candidates),
        )
