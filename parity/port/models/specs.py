"""Specifications of all attention layers of a model from its configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mha_spec import AttentionSpec, InputError
from mha_spec.rules import as_count
from parity.measure.text import did_you_mean, some_of
from parity.port.models.config import (
    ABOUT_ATTENTION,
    SAYS_NOTHING,
    Config,
    MissingKeyError,
    Value,
    values_of,
)
from parity.port.models.families import FAMILIES
from parity.port.models.families.not_covered import NOT_COVERED, WITHOUT_ATTENTION
from parity.port.models.rules import ConfigLayer, Family, Stack

KINDS = {
    "full_attention": None,
    "sliding_attention": "window_size",
    "chunked_attention": "chunk_size",
    "cross_attention": None,
}
"""Kinds of attention layers in `layer_types`, and the field that each requires."""

SIZES = ("d_model", "num_heads", "num_kv_heads", "head_dim", "rope")
"""Fields that others are derived from."""

KEYS_OF_KINDS = (
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "block_types",
    "attn_type_list",
)
"""Keys that set the kind of each layer."""

OLDER_KINDS = {"attention": "full_attention"}
"""Older names of kinds in `layer_types`."""

NOT_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent", "moe", "mlp")
"""Kinds in `layer_types` that are not attention over keys."""


@dataclass(frozen=True)
class ModelLayer:
    """Layer of a model.

    Attributes:
        index: index of the layer, from 0.
        kind: name in the configuration: `full_attention`, `sliding_attention`, `linear_attention`,
            …
        spec: specification; None if it is not attention over keys.
        origins: sources of the spec's fields by name: keys, or this family. Other fields have the
            defaults of `AttentionSpec`.
        part: part of the model, if it has several stacks: `encoder`, `decoder`.
        is_causal: attention is causal.
        path: prefix of its weights in checkpoints, after the prefix of all layers.
        layout: layout of these weights, by its name.
        shared: names of weights that it shares with another layer unless it has its own, each with
            its path.
        ignored: names of irrelevant entries in released checkpoints.
        keys_are_values: values use the projection of keys, before the norms of both.
        kv_source: index of the layer whose keys and values it shares, or None.
    """

    index: int
    kind: str
    spec: AttentionSpec | None
    origins: Mapping[str, str]
    part: str = ""
    is_causal: bool = True
    path: str = ""
    layout: str = ""
    shared: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    keys_are_values: bool = False
    kv_source: int | None = None

    def is_at(self, name: str) -> bool:
        """Return whether the name of a module ends with the layer's path."""
        return bool(self.path) and f".{name}".endswith(f".{self.path}")

    def to_dict(self) -> dict[str, Any]:
        """Return the layer as JSON values."""
        spec = None if self.spec is None else json.loads(self.spec.to_json())
        return {
            **vars(self),
            "spec": spec,
            "origins": dict(self.origins),
            "shared": dict(self.shared),
        }


def specs_of(config: Any, *, part: str | None = None) -> list[ModelLayer]:
    """Return the specification of each layer of a Hugging Face model from its configuration.

    Both dialects are supported: `rope_parameters`, and `rope_theta` with `rope_scaling` from before
    transformers 5.

    Args:
        config: the configuration of a live model, `model.config`; its values by name; or the path
            of a config.json or its folder.
        part: for a model with several parts, the key of one part's configuration: `text_config`;
            for nested parts the path of keys: `thinker_config.text_config`.

    Returns:
        All layers in order, for models with several parts one part after the other; `spec` is None
        for layers without attention.

    Raises:
        OSError: if the file cannot be read.
        TypeError: if it is not a configuration, or the number of layers is not an integer.
        ValueError: if the family is unknown, a key is missing, one that may concern attention is
            unknown or leads to unsupported layers, or there are several parts and `part` is None.
    """
    layers, unread = read_layers(values_of(config), part)
    if unread:
        family = part_of(values_of(config), part)["model_type"]
        names = ", ".join(f"{name}={value!r}" for name, value in unread.items())
        raise InputError(
            "every key about attention", f"be supported for model_type={family!r}", names
        )
    return layers


def read_layers(
    config: Mapping[str, Any], part: str | None = None
) -> tuple[list[ModelLayer], dict[str, Any]]:
    """Return the layers like `specs_of`, and unread keys about attention with their values.

    Raises:
        see `specs_of`, except for unread keys.
    """
    values = part_of(config, part)
    family = _family(values, f"{part}." if part else "")
    read = Config(values, defaults=family.defaults)
    _check_fixed(family, read)
    try:
        layers = [layer for stack in family.stacks for layer in _layers(stack, read)]
    except InputError:
        raise
    except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
        # Each value is of the right kind, as checked when it was read. Together they are wrong: for
        # example, their product is beyond the largest float.
        raise InputError(
            "the values of a configuration", "fit each other", read.numbers_read()
        ) from error
    return layers, dict(read.unread(family.says_nothing))


def part_of(config: Mapping[str, Any], part: str | None) -> Mapping[str, Any]:
    """Return the configuration of a part, by its path of keys; None for the whole.

    Raises:
        ValueError: if the part does not exist.
    """
    where = ""
    for name in () if part is None else part.split("."):
        config, where = _part(config, name, where), f"{where}{name}."
    return config


def known_parts(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the configurations of parts with known families, by their keys; the model's own under
    the empty key.
    """
    if _is_known(config) and "text_config" not in config:
        return {"": config}
    parts = {name: _part(config, name) for name in sections_of(config)}
    return {name: part for name, part in parts.items() if _is_known(part)}


def layers_of_parts(config: Mapping[str, Any]) -> list[ModelLayer]:
    """Return the layers of all parts with known families; each has its part, by its own name or its
    key.

    Raises:
        see `specs_of`.
    """
    return [
        replace(layer, part=layer.part or name.removesuffix("_config"))
        for name, part in (known_parts(config) or {"": config}).items()
        for layer in specs_of(part)
    ]


def sections_of(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of the configurations of parts, with known and unknown families."""
    return [
        name
        for name, part in config.items()
        if isinstance(part, Mapping)
        and (part.get("model_type") or name in ("vision_config", "audio_config"))
    ]


def unknown_parts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return why other parts are not read, by their keys; the model's own layers under the empty
    key.
    """
    known = known_parts(config)
    others = {name: _part(config, name) for name in sections_of(config) if name not in known}
    beside = {"": config} if str(config.get("model_type")) in NOT_COVERED else {}
    return {name: why_unknown(part) for name, part in (beside | others).items()}


def sections_named(label: str, sections: Iterable[str]) -> set[str]:
    """Return the parts of a model that occur in the name of a layer: `text_config` in
    `text_model.layers.0`.
    """
    words = label.split(".")
    return {
        name
        for name in sections
        if any(word.startswith(name.removesuffix("_config")) for word in words)
    }


def _part(config: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    """Return the configuration of a part; older ones have no family, or that of the whole model.

    `where` is the path of keys to `config`, for nested parts.
    """
    if name not in sections_of(config):
        parts = (
            _in_words(config, where) or f"none, for {where.removesuffix('.') or 'the model'} is one"
        )
        raise InputError("part", f"be a part of the model: {parts}", part=where + name)
    part, whole = config[name], config.get("model_type")
    own = part.get("model_type")
    return (
        part
        if own and own != whole
        else {**part, "model_type": f"{whole}_{name.removesuffix('_config')}"}
    )


def _in_words(config: Mapping[str, Any], where: str) -> str:
    return " or ".join(
        f"{where}{name} ({_part(config, name)['model_type']})" for name in sections_of(config)
    )


def _is_known(config: Mapping[str, Any]) -> bool:
    name = config.get("model_type")
    return isinstance(name, str) and name in FAMILIES


MOST_LAYERS = 10_000
"""No model has more; prevents small files from using up memory."""

PART_ALONE = re.compile("Encoder|Decoder|CausalLM|Audio|TokenClassification")
"""Matches class names of models with only some stacks of their family."""


def _check_fixed(family: Family, read: Config) -> None:
    """Refuse keys with values that would change layers, and incomplete models."""
    for name, value in family.fixed.items():
        section, _, leaf = name.rpartition(".")
        if section and section not in read:
            continue
        found = (read.section(section) if section else read).find(leaf)
        if found is not None and found.value != value:
            raise InputError(name, f"be {value!r} in models of this family", {name: found.value})
    classes = read.find("architectures")
    if classes is None or len({stack.part for stack in family.stacks}) == 1:
        return
    if any(PART_ALONE.search(str(each)) for each in classes.value):
        raise InputError("architectures", "be those of a whole model", architectures=classes.value)


def _layers(stack: Stack, read: Config) -> list[ModelLayer]:
    """Return the layers of a stack, in order."""
    found = read.read(*stack.count)
    count = as_count(
        found.origin, len(found.value) if isinstance(found.value, list | tuple) else found.value
    )
    if count > MOST_LAYERS:
        raise InputError(found.origin, f"be at most {MOST_LAYERS}", str(count))
    told = read.find("layer_types")
    if told is not None and (not isinstance(told.value, list | tuple) or len(told.value) != count):
        raise InputError(
            "layer_types", f"be one for each of {count} layers", layer_types=told.value
        )
    kinds = []
    for index in range(count):
        if told is None:
            kind = stack.kind(read, index)
        else:
            kind = str(told.value[index])
            kind = OLDER_KINDS.get(kind, kind)
            with suppress(TypeError, ValueError):  # other keys with the same meaning count as read
                stack.kind(read, index)
        kinds.append(kind)
    layers = [
        _layer(stack, ConfigLayer(read, index, kind, tuple(kinds)))
        for index, kind in enumerate(kinds)
    ]
    if all(layer.spec is None for layer in layers):  # keys of other kinds count as read
        for rule in stack.fields.values():
            with suppress(TypeError, ValueError):
                _ruled(rule, ConfigLayer(read, 0, "full_attention"))
    return layers


def _family(values: Mapping[str, Any], where: str) -> Family:
    if "" in known_parts(values):
        return FAMILIES[str(values["model_type"])]
    if sections_of(values) and str(values.get("model_type")) not in NOT_COVERED:
        if not any(map(_is_known, (_part(values, name) for name in sections_of(values)))):
            why = "; ".join(
                f"{where}{name}: {why_unknown(_part(values, name))}" for name in sections_of(values)
            )
            raise InputError("a part of the model", f"have a known family: {why}")
        part = where.removesuffix(".") or None
        raise InputError(
            "part", f"select a part of the model: {_in_words(values, where)}", part=part
        )
    name = str(values.get("model_type"))
    if name in NOT_COVERED or name in WITHOUT_ATTENTION:
        hint = why_unknown(values)
    else:
        near = f"{did_you_mean(name, FAMILIES)} {_unknown_keys(values)}".strip()
        hint = f"{near}; `mha-parity spec --families` lists {len(FAMILIES)} families"
    raise InputError(
        "model_type", "be a known family", model_type=values.get("model_type"), hint=hint
    )


def why_unknown(values: Mapping[str, Any]) -> str:
    """Return why a configuration without a known family is not read."""
    name = values.get("model_type")
    if isinstance(name, str) and name in NOT_COVERED:
        return f"model_type {name!r} is not covered: {NOT_COVERED[name]}"
    if isinstance(name, str) and name in WITHOUT_ATTENTION:
        return f"model_type {name!r} has no attention"
    if parts := sections_of(values):
        return f"model_type {name!r} has several parts of its own: {', '.join(parts)}"
    return f"model_type {name!r} is unknown; {_unknown_keys(values)}"


def _unknown_keys(values: Mapping[str, Any]) -> str:
    """Name the keys about attention of a configuration without a known family."""
    read = sorted(
        key for key in values if ABOUT_ATTENTION.search(key) and not SAYS_NOTHING.fullmatch(key)
    )
    return f"the meaning of {some_of(read)} is unknown" if read else "no key is about attention"


def _ruled(rule: Any, place: ConfigLayer) -> Value:
    if not callable(rule):
        return Value(rule, "every layer of this family")
    found: Any = rule(place)
    return found


def _keys_of(error: InputError, config: Config) -> str:
    """Return the keys that a rule read, unless its refusal names one of them."""
    keys = [
        name
        for name in dict.fromkeys(config.looked_up)
        if name.rpartition(".")[2] in config.names_read()
    ]
    if not keys or any(name.rpartition(".")[2] in str(error) for name in keys):
        return ""
    return f"it follows from {', '.join(keys)}"


def _origins_in(error: InputError, held: Mapping[str, Value]) -> str:
    """Return the keys of the fields that a refusal names or, if it names none of them, those of its
    sizes.
    """
    words = set(re.findall(r"\w+", str(error)))
    fields = [name for name in held if name in words] or [name for name in SIZES if name in held]
    return ", ".join(f"{name} is {held[name].origin}" for name in fields)


def _layer(stack: Stack, place: ConfigLayer) -> ModelLayer:
    path = stack.path.replace("{i}", str(place.layer))
    if place.kind in NOT_ATTENTION:
        return ModelLayer(place.layer, place.kind, None, {}, stack.part, path=path)
    if place.kind not in KINDS:
        hint = " and ".join(name for name in KEYS_OF_KINDS if name in place.config)
        known = ", ".join((*KINDS, *NOT_ATTENTION))
        raise InputError(
            f"layer {place.layer}",
            f"be one of {known}",
            repr(place.kind),
            hint=hint and f"by {hint}",
        )
    found: dict[str, Value] = {}
    for name, rule in stack.fields.items():
        place.config.looked_up.clear()
        try:
            found[name] = _ruled(rule, place)
        except MissingKeyError:
            raise
        except InputError as error:
            rule, keys = f"be supported by AttentionSpec: {error}", _keys_of(error, place.config)
            raise InputError(f"layer {place.layer}", rule, hint=keys) from error
    held = {name: each for name, each in found.items() if each.value is not None}
    try:
        spec = AttentionSpec(**{name: each.value for name, each in held.items()})
    except InputError as error:
        rule = f"be supported by AttentionSpec: {error}"
        raise InputError(f"layer {place.layer}", rule, hint=_origins_in(error, held)) from error
    needed = KINDS[place.kind]
    if needed is not None and getattr(spec, needed) is None:
        place.config.looked_up.clear()
        _ruled(stack.fields.get(needed), place)
        keys = " or ".join(dict.fromkeys(place.config.looked_up))
        rule = f"have a {needed} to be of kind {place.kind!r}"
        if keys:
            raise InputError(f"layer {place.layer}", rule, "none", hint=f"{keys} sets it")
        raise InputError(f"layer {place.layer}", rule, "none in this family")
    origins = {name: each.origin for name, each in held.items()}
    is_causal = stack.is_causal(place.config) if callable(stack.is_causal) else stack.is_causal
    return ModelLayer(
        place.layer,
        place.kind,
        spec,
        origins,
        stack.part,
        is_causal,
        path,
        stack.layout,
        stack.shared,
        stack.ignored,
        stack.keys_are_values(place),
        stack.kv_source(place),
    )
