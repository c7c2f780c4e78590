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
    Config,
    MissingKeyError,
    Value,
    is_about_attention,
    values_of,
)
from parity.port.models.families import FAMILIES
from parity.port.models.families.not_covered import NOT_COVERED, WITHOUT_ATTENTION
from parity.port.models.keys import MOST_LAYERS
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

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 16}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        >>> model = LlamaModel(LlamaConfig(**sizes, **heads)).eval()
        >>> [layer.spec.num_kv_heads for layer in parity.specs_of(model.config)]
        [2]
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
    where = f"{part}." if part else ""
    family = _family(values, where)
    keys = Config(values, defaults=family.defaults)
    _check_fixed(family, keys)
    layers: list[ModelLayer] = []
    try:
        for stack in family.stacks:
            layers += _layers(stack, keys)
    except InputError:
        raise
    except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
        # Each value is of the right kind, as checked when it was read. Together they are wrong: for
        # example, their product is beyond the largest float.
        raise InputError(
            "the values of a configuration", "fit each other", keys.numbers_read()
        ) from error
    return layers, dict(keys.unread(family.says_nothing))


def part_of(config: Mapping[str, Any], part: str | None) -> Mapping[str, Any]:
    """Return the configuration of a part, by its path of keys; None for the whole.

    Raises:
        ValueError: if the part does not exist.
    """
    if part is None:
        return config
    where = ""
    for name in part.split("."):
        config = _part(config, name, where)
        where += f"{name}."
    return config


def known_parts(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the configurations of parts with known families, by their keys; the model's own under
    the empty key.
    """
    # A model of text and images may have the name of a family and its keys in the text section.
    if _is_known(config) and "text_config" not in config:
        return {"": config}
    parts = {}
    for name in sections_of(config):
        part = _part(config, name)
        if _is_known(part):
            parts[name] = part
    return parts


def layers_of_parts(config: Mapping[str, Any]) -> list[ModelLayer]:
    """Return the layers of all parts with known families; each has its part, by its own name or its
    key.

    Raises:
        see `specs_of`.
    """
    # Without a known part, `specs_of` says what is unknown about the whole.
    parts = known_parts(config) or {"": config}
    layers = []
    for name, part in parts.items():
        for layer in specs_of(part):
            layers.append(replace(layer, part=layer.part or name.removesuffix("_config")))
    return layers


def sections_of(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of the configurations of parts, with known and unknown families."""
    names = []
    for name, part in config.items():
        if not isinstance(part, Mapping):
            continue
        # Other sections, such as `rope_parameters`, are no parts; older models have parts of these
        # names without a family.
        if part.get("model_type") or name in ("vision_config", "audio_config"):
            names.append(name)
    return names


def unknown_parts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return why other parts are not read, by their keys; the model's own layers under the empty
    key.
    """
    reasons = {}
    if str(config.get("model_type")) in NOT_COVERED:
        reasons[""] = why_unknown(config)
    readable_parts = known_parts(config)
    for name in sections_of(config):
        if name not in readable_parts:
            reasons[name] = why_unknown(_part(config, name))
    return reasons


def sections_named(label: str, sections: Iterable[str]) -> set[str]:
    """Return the parts of a model that occur in the name of a layer: `text_config` in
    `text_model.layers.0`.
    """
    words = label.split(".")
    named = set()
    for section in sections:
        part = section.removesuffix("_config")
        if any(word.startswith(part) for word in words):
            named.add(section)
    return named


def _part(config: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    """Return the configuration of a part; older ones have no family, or the family of the whole
    model.

    `where` is the path of keys to `config`, for nested parts.
    """
    if name not in sections_of(config):
        whole_name = where.removesuffix(".") or "the model"
        parts = _in_words(config, where) or f"none, for {whole_name} is one"
        raise InputError("part", f"be a part of the model: {parts}", part=where + name)
    part = config[name]
    family_of_part, family_of_whole = part.get("model_type"), config.get("model_type")
    if family_of_part and family_of_part != family_of_whole:
        return part
    return {**part, "model_type": f"{family_of_whole}_{name.removesuffix('_config')}"}


def _in_words(config: Mapping[str, Any], where: str) -> str:
    """Return the parts of a configuration, each with its family."""
    parts = []
    for name in sections_of(config):
        family = _part(config, name)["model_type"]
        parts.append(f"{where}{name} ({family})")
    return " or ".join(parts)


def _is_known(config: Mapping[str, Any]) -> bool:
    name = config.get("model_type")
    return isinstance(name, str) and name in FAMILIES


PART_ALONE = re.compile("Encoder|Decoder|CausalLM|Audio|TokenClassification")
"""Matches class names of models with only some stacks of their family."""


def _check_fixed(family: Family, config: Config) -> None:
    """Reject keys with values that would change layers, and incomplete models."""
    for name, value in family.fixed.items():
        section, _, leaf = name.rpartition(".")
        keys = config
        if section:
            if section not in config:
                continue
            keys = config.section(section)
        configured = keys.find(leaf)
        if configured is not None and configured.value != value:
            rule = f"be {value!r} in models of this family"
            raise InputError(name, rule, {name: configured.value})
    classes = config.find("architectures")
    parts = {stack.part for stack in family.stacks}
    if classes is None or len(parts) == 1:
        return
    if any(PART_ALONE.search(str(name)) for name in classes.value):
        raise InputError("architectures", "belong to a whole model", architectures=classes.value)


def _layers(stack: Stack, config: Config) -> list[ModelLayer]:
    """Return the layers of a stack, in order."""
    kinds = _kinds(stack, config)
    layers = []
    for index, kind in enumerate(kinds):
        layers.append(_layer(stack, ConfigLayer(config, index, kind, kinds)))
    if all(layer.spec is None for layer in layers):
        # Keys about attention count as read, although no layer has any.
        for rule in stack.fields.values():
            with suppress(TypeError, ValueError):
                _ruled(rule, ConfigLayer(config, 0, "full_attention"))
    return layers


def _kinds(stack: Stack, config: Config) -> tuple[str, ...]:
    """Return the kind of each layer of a stack."""
    count = _number_of_layers(stack, config)
    layer_types = config.find("layer_types")
    if layer_types is None:
        return tuple(stack.kind(config, index) for index in range(count))
    is_list = isinstance(layer_types.value, list | tuple)
    if not is_list or len(layer_types.value) != count:
        raise InputError(
            "layer_types", f"be one for each of {count} layers", layer_types=layer_types.value
        )
    kinds = []
    for index, name in enumerate(layer_types.value):
        # Other keys with the same meaning count as read, whether or not they are right.
        with suppress(TypeError, ValueError):
            stack.kind(config, index)
        kinds.append(OLDER_KINDS.get(str(name), str(name)))
    return tuple(kinds)


def _number_of_layers(stack: Stack, config: Config) -> int:
    """Return the number of layers; the key may also be a list with an entry for each."""
    configured = config.read(*stack.count)
    number = configured.value
    if isinstance(number, list | tuple):
        number = len(number)
    count = as_count(configured.origin, number)
    if count > MOST_LAYERS:
        raise InputError(configured.origin, f"be at most {MOST_LAYERS}", str(count))
    return count


def _family(values: Mapping[str, Any], where: str) -> Family:
    """Return the family of a configuration, which is at `where` in the configuration of the whole
    model.
    """
    if "" in known_parts(values):
        return FAMILIES[str(values["model_type"])]
    name = str(values.get("model_type"))
    sections = sections_of(values)
    if sections and name not in NOT_COVERED:
        reasons = []
        has_known_part = False
        for section in sections:
            part = _part(values, section)
            has_known_part = has_known_part or _is_known(part)
            reasons.append(f"{where}{section}: {why_unknown(part)}")
        if not has_known_part:
            raise InputError("a part of the model", f"have a known family: {'; '.join(reasons)}")
        rule = f"select a part of the model: {_in_words(values, where)}"
        raise InputError("part", rule, part=where.removesuffix(".") or None)
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
    parts = sections_of(values)
    if parts:
        return f"model_type {name!r} has several parts of its own: {', '.join(parts)}"
    return f"model_type {name!r} is unknown; {_unknown_keys(values)}"


def _unknown_keys(values: Mapping[str, Any]) -> str:
    """Name the keys about attention of a configuration without a known family."""
    keys = sorted(filter(is_about_attention, values))
    if not keys:
        return "no key is about attention"
    return f"the meaning of {some_of(keys)} is unknown"


# ---- One layer -----------------------------------------------------------------------------------


def _layer(stack: Stack, layer: ConfigLayer) -> ModelLayer:
    """Return a layer of a stack.

    Raises:
        ValueError: if its kind is unknown, or no specification has these values.
    """
    path = stack.path.replace("{i}", str(layer.index))
    if layer.kind in NOT_ATTENTION:
        return ModelLayer(layer.index, layer.kind, None, {}, stack.part, path=path)
    if layer.kind not in KINDS:
        raise _unknown_kind(layer)
    fields = _fields(stack, layer)
    spec = _spec(layer, fields)
    required = KINDS[layer.kind]
    if required is not None and getattr(spec, required) is None:
        raise _missing_field(required, stack, layer)
    is_causal = stack.is_causal
    if callable(is_causal):
        is_causal = is_causal(layer.config)
    return ModelLayer(
        layer.index,
        layer.kind,
        spec,
        {name: value.origin for name, value in fields.items()},
        stack.part,
        is_causal,
        path,
        stack.layout,
        stack.shared,
        stack.ignored,
        stack.keys_are_values(layer),
        stack.kv_source(layer),
    )


def _ruled(rule: Any, layer: ConfigLayer) -> Value:
    """Return the value of a field of a stack, which is a rule or the value itself."""
    if not callable(rule):
        return Value(rule, "every layer of this family")
    value: Any = rule(layer)
    return value


def _fields(stack: Stack, layer: ConfigLayer) -> dict[str, Value]:
    """Return the fields of a specification that have a value, by the rules of a stack."""
    fields: dict[str, Value] = {}
    for name, rule in stack.fields.items():
        layer.config.looked_up.clear()
        try:
            value = _ruled(rule, layer)
        except MissingKeyError:
            raise
        except InputError as error:
            hint = _keys_of(error, layer.config)
            raise _unsupported(layer, error, hint) from error
        if value.value is not None:
            fields[name] = value
    return fields


def _spec(layer: ConfigLayer, fields: Mapping[str, Value]) -> AttentionSpec:
    """Return the specification with these fields."""
    try:
        return AttentionSpec(**{name: value.value for name, value in fields.items()})
    except InputError as error:
        raise _unsupported(layer, error, _origins_in(error, fields)) from error


def _unsupported(layer: ConfigLayer, error: InputError, hint: str) -> InputError:
    """Return the error for a layer that no specification has; `hint` has the keys at fault."""
    rule = f"be supported by AttentionSpec: {error}"
    return InputError(f"layer {layer.index}", rule, hint=hint)


def _keys_of(error: InputError, config: Config) -> str:
    """Return the keys that a rule read, unless its error names one of them."""
    names_read = config.names_read()
    keys = []
    for key in dict.fromkeys(config.looked_up):
        if _name_in_section(key) in names_read:
            keys.append(key)
    message = str(error)
    if not keys or any(_name_in_section(key) in message for key in keys):
        return ""
    return f"it follows from {', '.join(keys)}"


def _name_in_section(key: str) -> str:
    """Return the name of a key without the name of its section: `rope_theta` of
    `rope_parameters.rope_theta`.
    """
    return key.rpartition(".")[2]


def _origins_in(error: InputError, fields: Mapping[str, Value]) -> str:
    """Return the keys of the fields that an error names or, if it names none of them, the keys of
    the sizes.
    """
    words = set(re.findall(r"\w+", str(error)))
    named = [name for name in fields if name in words]
    if not named:
        named = [name for name in SIZES if name in fields]
    return ", ".join(f"{name} is {fields[name].origin}" for name in named)


def _unknown_kind(layer: ConfigLayer) -> InputError:
    """Return the error for an unknown kind of layer."""
    kinds = ", ".join((*KINDS, *NOT_ATTENTION))
    keys = [name for name in KEYS_OF_KINDS if name in layer.config]
    hint = f"by {' and '.join(keys)}" if keys else ""
    return InputError(f"layer {layer.index}", f"be one of {kinds}", repr(layer.kind), hint=hint)


def _missing_field(name: str, stack: Stack, layer: ConfigLayer) -> InputError:
    """Return the error for a layer without the field that its kind requires."""
    layer.config.looked_up.clear()
    _ruled(stack.fields.get(name), layer)
    keys = dict.fromkeys(layer.config.looked_up)
    rule = f"have a {name} to be of kind {layer.kind!r}"
    if keys:
        hint = f"{' or '.join(keys)} sets it"
        return InputError(f"layer {layer.index}", rule, "none", hint=hint)
    return InputError(f"layer {layer.index}", rule, "none in this family")
