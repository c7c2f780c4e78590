"""Layouts from outside: a table, as a mapping or a TOML file, becomes a checked `Layout`.

A table has the fields of `Layout` under the same names, and a tensor in each entry of `tensors`:

    name = "nebula"
    prefix = "blk.{i}"
    grouped = true

    [tensors]
    mix = { holds = "vkq", axes = "d (n h)" }
    back = { holds = "out", axes = "(n h) e" }

`layout_from_table` knows the keys and their types, `check_layout` which values fit together. Text
of a table is data: no part of it is run, and names that a terminal would obey are rejected.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mha_spec import InputError, InputTypeError
from mha_spec.score_weights import SCORE_WEIGHTS
from parity.measure.files.small import read_text
from parity.measure.text import and_listed, did_you_mean
from parity.port.conversion.layouts.layout import (
    CARRIED,
    PROJECTIONS,
    RULES,
    Layout,
    Tensor,
    parts_of,
)
from parity.port.conversion.layouts.tensors import EVERYTHING, NARROW

SUFFIX = ".toml"
"""Suffix, in any case, by which a command line distinguishes the file of a table from the name of a
layout.
"""

LARGEST_TABLE = 1 << 16
"""Bytes of the largest file of a table.

Real ones have a few thousand. The time of tomllib grows with the square of the number of dots in a
key: one of 50 kB takes seconds, and one as large as other small files may be would take days.
"""

MOST_DOTS = 1000
"""Dots in a line of a table.

The number is a choice: lines of real tables have a few. For a key with this many, tomllib takes
milliseconds, but for one that fills the largest table seconds.
"""

KEYS: dict[str, type] = {
    "name": str,
    "about": str,
    "source": str,
    "prefix": str,
    "grouped": bool,
    "blocks": int,
    "rope": str,
    "padded": bool,
    "rules": list,
    "ignored": list,
    "carries": list,
    "stack_axis": int,
    "tensors": dict,
}
"""Keys of a table, and the types of their values."""

TENSOR_KEYS: dict[str, type] = {"holds": str, "axes": str, "shared": bool}
"""Keys of a tensor in a table, and the types of their values."""

TYPES = {str: "text", bool: "true or false", int: "an integer", list: "a list", dict: "a table"}
"""Types of values in the words of TOML."""

LETTERS = "qkvg"
"""Letters of projections that one tensor may hold."""

BLOCKS = (1, 2, 4, 8)
"""Numbers of blocks that a table may have: for these, `RULES` has a rule that heads divide."""

PROJECTIONS_AND_NORMS = [name for name in EVERYTHING if name not in SCORE_WEIGHTS]

STACK_AXES = (0, 1)
"""Axes on which layers may be stacked: a bias, of one axis, has only these two axes for it."""

WHOLE_WEIGHTS = (
    *SCORE_WEIGHTS,
    *(f"{name}.weight" for name in PROJECTIONS_AND_NORMS),
    *(f"{name}.bias" for name in PROJECTIONS_AND_NORMS),
)
"""Canonical names of weights that only some layers have, which a tensor may hold alone."""

WHOLE_AXES = ("...", "d e", "d n h")
"""Axes of such tensors."""

NAME = re.compile(r"\w[\w.+-]*", re.ASCII)
"""Names of layouts, which are words of a command line."""

ENTRY = re.compile(r"\[\d+\]\Z")
"""End of the label of one layer of a stack, as in `layers[3]`."""

GROUP = r"(?:[nhdep1]|\([nhdep](?: [nhdep])*\))"
AXES = re.compile(rf"{GROUP}(?: {GROUP})*")
"""Axes of tensors with heads: letters, the letters of one axis in parentheses."""

EXAMPLES = {
    "weight": "'(n h) d'",
    "bias": "'(n h)'",
    "out.weight": "'e (n h)'",
    "out.bias": "'e'",
}
"""Usual axes of each kind of tensor."""


def read_table(path: str | os.PathLike[str]) -> Layout:
    """Return the layout that a TOML file describes.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a table of a layout; the message names the file, the key, and what
            is allowed.
    """
    import tomllib

    try:
        text = read_text(path, LARGEST_TABLE)
        if any(line.count(".") > MOST_DOTS for line in text.split("\n")):
            raise InputError(path, f"have at most {MOST_DOTS} dots in a line")
        table = tomllib.loads(text)
    except RecursionError:
        raise InputError(path, "be TOML", "lists or tables that are nested too deeply") from None
    except InputError:
        raise
    except ValueError as error:  # of tomllib, or of an integer with too many digits
        raise InputError(path, "be TOML", str(error)) from None
    return layout_from_table(table, os.fspath(path))


def layout_from_table(table: Mapping[str, Any], where: str = "a table of a layout") -> Layout:
    """Return the layout that a table describes, with the rules that follow from its tensors.

    Args:
        table: values by the names of `KEYS`.
        where: origin of the table, for messages.

    Raises:
        ValueError: if the table is not one of a layout.
    """
    _check_keys(table, KEYS, ("name", "tensors"), "", where)
    weights: list[Tensor] = []
    others: list[Tensor] = []
    for name, entry in table["tensors"].items():
        tensor = _tensor_from_table(name, entry, where)
        if tensor.is_whole:
            others.append(tensor)
        else:
            weights.append(tensor)
    lists = {}
    for key in ("rules", "ignored", "carries"):
        lists[key] = tuple(table.get(key, ()))
        for value in lists[key]:
            if not isinstance(value, str):
                raise InputTypeError(
                    f"the key {key}", "be a list of texts", repr(value), where=where
                )
    layout = Layout(
        name=table["name"],
        about=table.get("about", "a layout from outside"),
        source=table.get("source", where),
        forms=(tuple(weights),),
        others=tuple(others),
        prefix=table.get("prefix", ""),
        grouped=table.get("grouped", False),
        blocks=table.get("blocks", 1),
        rope=table.get("rope", "half"),
        padded=table.get("padded", False),
        rules=lists["rules"],
        ignored=lists["ignored"],
        carries=lists["carries"],
        stack_axis=table.get("stack_axis", 0),
        needs_spec=_needs_spec(weights),
    )
    check_layout(layout, where)
    rules = dict.fromkeys((*layout.rules, *_implied_rules(layout)))
    return replace(layout, rules=tuple(rules))


def _tensor_from_table(name: str, entry: object, where: str) -> Tensor:
    """Return the tensor that an entry of `tensors` describes."""
    if not isinstance(name, str):
        raise InputTypeError("a key of tensors", "be text", repr(name), where=where)
    key = _tensor_key(name)
    if not isinstance(entry, Mapping):
        rule = 'be a table such as { holds = "q", axes = "(n h) d" }'
        raise InputTypeError(f"the key {key}", rule, repr(entry), where=where)
    if entry.get("holds") in WHOLE_WEIGHTS:
        _check_keys(entry, TENSOR_KEYS, ("holds",), f"{key}.", where)
        return Tensor(name, entry["holds"], "whole", entry.get("axes", "..."))
    _check_keys(entry, TENSOR_KEYS, ("holds", "axes"), f"{key}.", where)
    holds, axes = entry["holds"], entry["axes"]
    if holds != "out" and not _are_projections(holds):
        rule = (
            f"be 'out', or different letters of {LETTERS}, or a canonical name such as sinks or "
            f"q_norm.weight"
        )
        raise InputError(f"the key {key}.holds", rule, repr(holds), where=where)
    if "{n}" in name and (holds == "out" or len(holds) > 1):
        rule = f"be one of {and_listed(LETTERS)}, because each head has its own tensor"
        raise InputError(f"the key {key}.holds", rule, repr(holds), where=where)
    # The axes show the kind: a bias has no axis of inputs, and the bias of `out` has only one of
    # outputs.
    axis_of_weights = "d"
    if holds == "out":
        axis_of_weights = "h"
    kind = "weight" if axis_of_weights in axes else "bias"
    return Tensor(name, holds, kind, axes, is_shared=entry.get("shared", False))


def _are_projections(holds: str) -> bool:
    """Return whether text consists of different letters of projections."""
    return 0 < len(holds) == len({*holds}) and {*holds} <= {*LETTERS}


def _check_keys(
    table: Mapping[str, Any],
    types: Mapping[str, type],
    required: Collection[str],
    above: str,
    where: str,
) -> None:
    """Reject unknown and missing keys, and values of a wrong type."""
    for key, value in table.items():
        if not isinstance(key, str):
            owner = above.rstrip(".") or "the table"
            raise InputTypeError(f"a key of {owner}", "be text", repr(key), where=where)
        if key not in types:
            rule = f"be one of {', '.join(types)}"
            hint = did_you_mean(str(key), types)
            raise InputError(f"the key {above}{key}", rule, where=where, hint=hint)
        # In Python, unlike TOML, True is an integer too.
        is_bool = isinstance(value, bool)
        is_right = isinstance(value, types[key]) and is_bool == (types[key] is bool)
        if types[key] is list:
            is_right = isinstance(value, Sequence) and not isinstance(value, str)
        elif types[key] is dict:
            is_right = isinstance(value, Mapping)
        if not is_right:
            raise InputTypeError(
                f"the key {above}{key}", f"be {TYPES[types[key]]}", repr(value), where=where
            )
    for key in required:
        if key not in table:
            raise InputError(f"the key {above}{key}", "be present", where=where)


def _tensor_key(name: str) -> str:
    """Return the key of a tensor as TOML writes it."""
    return f'tensors."{name}"'


# ---- Values --------------------------------------------------------------------------------------


def check_layout(layout: Layout, where: str = "") -> None:
    """Reject a layout whose fields do not fit together.

    Args:
        layout: the layout.
        where: its origin, for messages; default: its name.

    Raises:
        ValueError: if a name is not printable, an axis is missing or repeated, a weight has no
            tensor or two of them, or a rule or feature is unknown.
    """
    where = where or f"the layout {layout.name}"
    if not NAME.fullmatch(layout.name) or layout.name.lower().endswith(SUFFIX):
        rule = f"consist of letters, digits and any of . _ + -, and not end with {SUFFIX}"
        raise InputError("the key name", rule, repr(layout.name), where=where)
    for key, text in {"about": layout.about, "source": layout.source}.items():
        _check_printable(key, text, where)
    _check_prefix(layout.prefix, where)
    for pattern in layout.ignored:
        _check_printable("ignored", pattern, where)
    _check_choice("rope", layout.rope, ("half", "interleaved"), where)
    _check_choice("blocks", layout.blocks, BLOCKS, where)
    if layout.grouped and layout.blocks > 1:
        raise InputError(
            "the key blocks", "be 1 if grouped is true", str(layout.blocks), where=where
        )
    _check_choice("stack_axis", layout.stack_axis, STACK_AXES, where)
    for rule in layout.rules:
        _check_choice("rules", rule, RULES, where)
    for feature in layout.carries:
        _check_choice("carries", feature, CARRIED, where)
    for tensor in (*layout.tensors, *layout.others):
        _check_tensor(tensor, layout, where)
    for form in layout.forms:
        _check_form(form, layout.others, where)


def _check_printable(key: str, text: str, where: str) -> None:
    if not text.isprintable():
        raise InputError(f"the key {key}", "be text that can be printed", repr(text), where=where)


def _check_choice(key: str, value: object, choices: Collection[Any], where: str) -> None:
    if value not in choices:
        rule = f"be one of {', '.join(map(str, choices))}"
        hint = did_you_mean(str(value), map(str, choices))
        raise InputError(f"the key {key}", rule, repr(value), where=where, hint=hint)


def _check_prefix(prefix: str, where: str) -> None:
    _check_printable("prefix", prefix, where)
    has_braces = {"{", "}"} & {*prefix.replace("{i}", "")}
    if has_braces or prefix.startswith(".") or prefix.endswith("."):
        rule = "be the beginning of names up to a dot, with {i} for the number of a layer"
        raise InputError("the key prefix", rule, repr(prefix), where=where)
    if ENTRY.search(prefix):
        rule = "not end with a number in brackets, which is the label of one layer of a stack"
        raise InputError("the key prefix", rule, repr(prefix), where=where)


def _check_tensor(tensor: Tensor, layout: Layout, where: str) -> None:
    key = _tensor_key(tensor.name)
    # Names with {n} are formatted: any other text in braces could read attributes of the number.
    has_braces = {"{", "}"} & {*tensor.name.replace("{n}", "", 1)}
    if not tensor.name or not tensor.name.isprintable() or has_braces:
        rule = "be a name that can be printed, with {n} at most once, for the number of a head"
        hint = ""
        if "{i}" in tensor.name:
            hint = "{i}, the number of a layer, belongs in the key prefix"
        raise InputError(f"the key {key}", rule, where=where, hint=hint)
    _check_choice(f"{key}.kind", tensor.kind, ("weight", "bias", "whole"), where)
    if tensor.is_shared and {*tensor.holds} != {"k", "v"}:
        rule = "be true only if the tensor holds kv or vk"
        raise InputError(f"the key {key}.shared", rule, "true", where=where)
    if not tensor.is_whole:
        _check_axes(tensor, layout, where)
        return
    _check_choice(f"{key}.holds", tensor.holds, WHOLE_WEIGHTS, where)
    # Vectors of each head are stacked in the order of the heads; matrices have no such axis.
    allowed = WHOLE_AXES
    if tensor.is_per_head:
        allowed = ("...",)
    elif "E" in SCORE_WEIGHTS.get(tensor.holds, ""):
        allowed = ("...", "(n h) d")
    _check_choice(f"{key}.axes", tensor.axes, allowed, where)


def _check_axes(tensor: Tensor, layout: Layout, where: str) -> None:
    """Reject axes of a tensor with heads that its content does not have."""
    key = f"the key {_tensor_key(tensor.name)}.axes"
    required = tensor.logical.split()
    if tensor.is_per_head:
        required.remove("n")
    usual = EXAMPLES[f"out.{tensor.kind}" if tensor.holds == "out" else tensor.kind]
    rule = f"have the axes {and_listed(required)}, each once, such as {usual}"
    if not AXES.fullmatch(tensor.axes):
        hint = "features of all heads on one axis are (n h)"
        raise InputError(key, rule, repr(tensor.axes), where=where, hint=hint)
    letters = list(itertools.chain(*tensor.groups))
    if sorted(letter for letter in letters if letter != "p") != sorted(required):
        raise InputError(key, rule, repr(tensor.axes), where=where)
    for group in tensor.groups:
        if len(group) > 1 and {"d", "e"} & {*group}:
            raise InputError(
                key, "have d and e as axes of their own", repr(tensor.axes), where=where
            )
    if "p" not in letters:
        return
    if letters.count("p") > 1 or len(tensor.parts) == 1 or tensor.is_shared:
        rule = "have p, the axis of projections, once, and only if the tensor holds several"
        raise InputError(key, rule, repr(tensor.axes), where=where)
    if layout.grouped or layout.blocks > 1:
        rule = "not have p, the axis of projections, if heads are grouped or in blocks"
        raise InputError(key, rule, repr(tensor.axes), where=where)


def _check_form(form: Sequence[Tensor], others: Sequence[Tensor], where: str) -> None:
    """Reject tensors that do not hold each weight of a layer once."""
    holders: dict[str, str] = {}
    for tensor in (*form, *others):
        for part in tensor.parts:
            if part in holders:
                rule = f"hold each weight once: {part} is in {holders[part]} and {tensor.name}"
                raise InputError("the key tensors", rule, where=where)
            holders[part] = tensor.name
    weights = [tensor for tensor in form if tensor.kind == "weight"]
    has_latents = any(f"{name}.weight" in holders for name in NARROW)
    if not _holds_qkv(weights) and not has_latents:
        missing = [f"{PROJECTIONS[letter]}.weight" for letter in "qkv"]
        missing = [name for name in missing if name not in holders]
        raise InputError("the key tensors", f"hold {and_listed(missing)}", where=where)
    for tensor in form:
        for part in tensor.parts:
            weight = part.replace(".bias", ".weight")
            if weight not in holders:
                rule = f"hold {weight}, of which {tensor.name} is the bias"
                raise InputError("the key tensors", rule, where=where)


def _needs_spec(weights: Sequence[Tensor]) -> bool:
    """Return whether shapes never show a layer with these weights, of latents or with a gate."""
    has_gate = any(not tensor.is_whole and "g" in tensor.holds for tensor in weights)
    return has_gate or not _holds_qkv(weights)


def _holds_qkv(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors hold the weights of q, k and v."""
    return {f"{PROJECTIONS[letter]}.weight" for letter in "qkv"} <= parts_of(tensors)


def _implied_rules(layout: Layout) -> list[str]:
    """Return the rules that follow from the tensors of a layout.

    Without them a layer that the tensors cannot hold would still be rejected, but with a message
    about shapes instead of the layer.
    """
    projections = {tensor.holds for tensor in layout.tensors}
    rules = ["out_proj" if "out" in projections else "no out_proj"]
    if layout.rope == "interleaved":
        rules += ["even", "whole halves"]
    if layout.padded:
        rules += ["whole halves", "one head_dim"]
    if layout.blocks > 1:
        rules.append(f"{layout.blocks} parts")
    for tensor in layout.tensors:
        if tensor.holds == "out":
            continue
        packs_both = bool({*"qg"} & {*tensor.holds}) and bool({*"kv"} & {*tensor.holds})
        if packs_both and tensor.kind == "weight":
            rules.append("one width")
        # Heads of keys and of queries have one number on an axis, or in numbered names.
        if tensor.is_per_head or (packs_both and tensor.has_projection_axis):
            rules.append("no groups")
    return list(dict.fromkeys(rules))
