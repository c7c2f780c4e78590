"""Names and roles of the parameters of attention functions."""

from __future__ import annotations

import inspect
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

PROJECTIONS = {
    f"{name[0]}_proj": (
        *(
            f"{name[0]}_proj",
            f"w{name[0]}",
            f"w_{name[0]}",
            f"{name[0]}_weight",
            f"{name[0]}_kernel",
            f"{name[0]}_lin",
        ),
        *(name, f"{name}_proj", f"to_{name[0]}", f"linear_{name[0]}", f"{name[0]}_linear", name[0]),
    )
    for name in ("query", "key", "value")
} | {
    "out_proj": (
        *(
            "out_proj",
            "o_proj",
            "wo",
            "w_o",
            "o_weight",
            "out_weight",
            "o_kernel",
            "out_kernel",
            "to_out",
            "out_lin",
        ),
        *("output_proj", "linear_out", "out_linear", "dense", "out", "proj", "c_proj", "o"),
    )
}
"""Usual names of a projection in lower case: a parameter, a key of `weights` or an attribute of a
module.
"""

PROJECTION_NAMES = frozenset(name for names in PROJECTIONS.values() for name in names)

PACKED = (
    *(
        "qkv_proj",
        "qkv",
        "wqkv",
        "w_qkv",
        "qkv_weight",
        "qkv_kernel",
        "to_qkv",
        "c_attn",
        "in_proj",
        "in_proj_weight",
    ),
    *("query_key_value", "w_pack", "qkv_linear"),
)
"""Usual names of a packed projection of queries, keys and values."""

BIASES = {
    f"{name}_proj": (f"b{name}", f"b_{name}", f"{name}_bias", f"{name}_proj_bias") for name in "qkv"
} | {
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
    if not inspect.isclass(target) and hasattr(target, "forward") and not inspect.isroutine(target):
        target = target.forward
    elif not inspect.isclass(target) and not inspect.isroutine(target) and callable(target):
        target = target if hasattr(target, "func") else target.__call__
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None
    return {
        own.name: own for parameter in parameters.values() for own in _spread(target, parameter)
    }


def _spread(target: Any, parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Expand a parameter `**keywords: Unpack[AsTypedDict]` into its keywords; return others
    unchanged.
    """
    kind = parameter.annotation
    if parameter.kind is parameter.VAR_KEYWORD and isinstance(kind, str):
        try:
            kind = inspect.signature(target, eval_str=True).parameters[parameter.name].annotation
        except Exception:  # names that only a type checker can resolve
            return [parameter]
    if parameter.kind is not parameter.VAR_KEYWORD or get_origin(kind) is not Unpack:
        return [parameter]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in get_args(kind)[0].__annotations__
    ]


def library_of(module: Any) -> str:
    """Return the library of a module or its class: `torch`, `equinox`, `linen` or `nnx`; empty if
    it is another.
    """
    for kind in (module if inspect.isclass(module) else type(module)).__mro__:
        library, _, rest = kind.__module__.partition(".")
        if kind.__name__ == "Module" and library in ("torch", "equinox", "flax"):
            return {"flax": rest.split(".")[0]}.get(library, library)
    return ""


def required(parameters: Parameters) -> list[str]:
    """Return the names of the required parameters of a call."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, each in parameters.items()
        if each.default is each.empty and each.kind not in variable
    ]


def role_names(parameters: Parameters) -> dict[str, str]:
    """Return the names of the parameters with a role, by role."""
    found = {
        role: next((name for name in names if name in parameters), "")
        for role, names in ROLES.items()
    }
    first = next(iter(parameters), "")
    if not found["weights"] and first in FIRST_WEIGHTS and len(parameters) > 1:
        found["weights"] = first
    return {role: name for role, name in found.items() if name}


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
    declared = {"mask": mask_name, "is_causal": causal_name}
    takes_any = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in (parameters or {}).values()
    )
    for role, wanted in declared.items():
        if wanted and parameters is not None and wanted not in parameters and not takes_any:
            raise InputError(
                role,
                f"be a parameter of {name}",
                {role: wanted},
                hint=f"there are {', '.join(parameters)}",
            )
    roles = role_names(parameters or {}) | {
        role: wanted for role, wanted in declared.items() if wanted is not None
    }
    roles = {role: found for role, found in roles.items() if found}
    if mask_name is None and "mask" not in roles:
        _check_for_a_mask(name, parameters, roles)
    return roles


def _check_for_a_mask(name: str, parameters: Parameters | None, roles: Mapping[str, str]) -> None:
    """Reject an attention whose mask may be an unrecognized parameter.

    Missing required parameters need no check: the call fails without them.
    """
    if parameters is None:
        unknown = ["unknown parameters"]
    else:
        known = {*roles.values(), *NO_MASKS, *(name for names in ROLES.values() for name in names)}
        unknown = [
            str(parameter)
            for parameter in parameters.values()
            if parameter.name not in known
            and (
                parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD
            )
        ]
    if unknown:
        raise InputError(
            "mask_name",
            f"be the parameter of {name} for the mask, or '' if there is none (--mask-name)",
            ", ".join(unknown),
        )
