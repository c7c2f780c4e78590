"""Rules that read fields of specifications from configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mha_spec import InputError, Norm, Temperature
from mha_spec.rules import as_count
from parity.port.models.config import Config, MissingKeyError, Value
from parity.port.models.rope import read_rope

NOTHING = Value(None, "")
"""The value of a field that has its default."""


@dataclass(frozen=True)
class ConfigLayer:
    """Layer of a model.

    Attributes:
        config: configuration of the model.
        index: index of the layer, from 0.
        kind: `full_attention`, `sliding_attention`, …
        kinds: kinds of all layers of its stack.
    """

    config: Config
    index: int
    kind: str
    kinds: tuple[str, ...] = ()


FieldRule = Callable[[ConfigLayer], Value]


def _always_full(config: Config, index: int) -> str:
    return "full_attention"


def _never(layer: ConfigLayer) -> bool:
    return False


def _no_layer(layer: ConfigLayer) -> None:
    return None


@dataclass(frozen=True)
class Stack:
    """Consecutive attention layers of a model: the layers of a decoder, or of one part of a model.

    Attributes:
        fields: fields of `AttentionSpec`, each a value or a rule.
        kind: kind of each layer, if `layer_types` is missing.
        part: part of the model, if it has several stacks: `encoder`, `decoder`.
        count: keys of the number of layers, or of a list with one entry per layer; the first that
            is present.
        path: prefix of a layer's weights in checkpoints, after the prefix of all layers.
        layout: layout of these weights.
        is_causal: attention is causal, or a rule for it.
        shared: names of weights after a layer's path, and the path of the one that all layers
            share.
        ignored: names after a layer's path that are irrelevant entries of released checkpoints.
        keys_are_values: values use the projection of keys.
        kv_source: index of the layer whose keys and values a layer shares, or None.
    """

    fields: Mapping[str, Any]
    kind: Callable[[Config, int], str] = _always_full
    part: str = ""
    count: tuple[str, ...] = ("num_hidden_layers", "n_layer")
    path: str = "layers.{i}.self_attn"
    layout: str = "transformers.LLaMA"
    is_causal: bool | Callable[[Config], bool] = True
    shared: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    keys_are_values: Callable[[ConfigLayer], bool] = _never
    kv_source: Callable[[ConfigLayer], int | None] = _no_layer


@dataclass(frozen=True)
class Family:
    """Meaning of the configurations of a family.

    Attributes:
        stacks: stacks of layers.
        says_nothing: keys of this family that are irrelevant for attention layers.
        defaults: defaults of keys.
        fixed: keys with one supported value; other values would change the layers.
    """

    stacks: tuple[Stack, ...]
    says_nothing: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


# ---- Rules for the values of keys ----------------------------------------------------------------


def key(*names: str, default: Any = None, power: float = 1.0) -> FieldRule:
    """Return a rule for the value of a key, or a power of it; default: the family's, if any."""

    def rule(layer: ConfigLayer) -> Value:
        value = layer.config.read(*names, default=default)
        if power == 1.0:
            return value
        return Value(value.value**power, f"{value.origin} ** {power}")

    return rule


def optional(*names: str) -> FieldRule:
    """Return a rule for the value of a key, if present."""

    def rule(layer: ConfigLayer) -> Value:
        return layer.config.find(*names) or NOTHING

    return rule


def required_or_none(*names: str) -> FieldRule:
    """Return a rule for a required key, which may be None: without it transformers has its own
    default.
    """

    def rule(layer: ConfigLayer) -> Value:
        return layer.config.required_or_none(*names) or NOTHING

    return rule


def entry_of(values: Value, index: int, rule: str = "be one for each layer") -> Any:
    """Return the entry of a layer in a list with one for each.

    Raises:
        ValueError: if the list is shorter; `rule` is the rule that it breaks.
    """
    if index >= len(values.value):
        raise InputError(values.origin, rule, str(len(values.value)))
    return values.value[index]


def rope(
    *, theta: float | None = None, of: str | None = None, count: str | None = None, **options: Any
) -> FieldRule:
    """Return a rule for RoPE; `of` is the key of the number of features, if not the features of a
    head.

    `count` is an optional key of the number of rotated features, if no key has their fraction. With
    `fraction` some features may be rotated, by default this fraction; without it all are.
    """

    def rule(layer: ConfigLayer) -> Value:
        fields = dict(options)
        if of is None:
            size = head_dim(layer)
        else:
            size = layer.config.read(of).value
            fields |= {"rotary_dim": size, "rotated": "last", "fraction": 1.0}
        num_rotated = None if count is None else layer.config.find(count)
        if num_rotated is not None:
            fields["fraction"] = num_rotated.value / size
        rotation = read_rope(layer.config, size, layer_type=layer.kind, theta=theta, **fields)
        if num_rotated is None:
            return rotation
        return Value.derived(rotation.value, rotation, num_rotated)

    return rule


def norm(*args: Any, eps: str = "rms_norm_eps", **fields: Any) -> FieldRule:
    """Return a rule for a norm with the model's eps."""

    def rule(layer: ConfigLayer) -> Value:
        value = layer.config.read(eps)
        origin = f"{value.origin}; else as every layer of this family"
        return Value(Norm(*args, eps=value.value, **fields), origin)

    return rule


def head_dim(layer: ConfigLayer) -> int:
    """Return the features of a head."""
    size = layer.config.find("head_dim")
    if size is not None:
        return size.value
    return layer.config.read("hidden_size").value // heads(layer)


def heads(layer: ConfigLayer) -> int:
    """Return the number of query heads."""
    return layer.config.read("num_attention_heads").value


def tempered_by_rope(layer: ConfigLayer) -> Value:
    """Return the temperature, which Mistral stores among the parameters of RoPE."""
    values = layer.config.section("rope_parameters")
    values.find("max_position_embeddings")  # also a key of the model
    scale = values.find("llama_4_scaling_beta")
    if scale is None:
        return NOTHING
    length = values.read("original_max_position_embeddings")
    return Value.derived(Temperature(length.value, scale.value), scale, length)


# ---- Rules for some layers -----------------------------------------------------------------------


def read_if_possible(rule: FieldRule, layer: ConfigLayer) -> Value:
    """Return the value of a rule, whose keys then count as read; nothing if a key is missing.

    A layer to which a rule does not apply has its keys all the same, because a configuration has
    the keys of all layers.
    """
    with suppress(MissingKeyError):
        return rule(layer)
    return NOTHING


def only(kind: str, rule: FieldRule) -> FieldRule:
    """Return a rule for layers of one kind; its keys also count as read in the others."""

    def in_kind(layer: ConfigLayer) -> Value:
        if layer.kind == kind:
            return rule(layer)
        read_if_possible(rule, layer)
        return NOTHING

    return in_kind


def where(name: str, rule: FieldRule, *, default: bool | None = None) -> FieldRule:
    """Return a rule that applies if a key is true."""

    def if_true(layer: ConfigLayer) -> Value:
        condition = layer.config.read(name, default=default)
        value = rule(layer)
        if not condition.value:
            return NOTHING
        return Value.derived(value.value, condition, value)

    return if_true


def positioned(word: str, rule: FieldRule, *, without: tuple[str, ...]) -> FieldRule:
    """Return a rule for RoPE in models that select it by a word, and no RoPE by the words
    `without`; its keys also count as read in models without RoPE.

    Raises:
        ValueError: if the word is unknown.
    """

    def if_selected(layer: ConfigLayer) -> Value:
        selected = layer.config.find("position_embedding_type")
        if selected is not None and selected.value not in (word, *without):
            raise InputError(
                "position_embedding_type",
                f"be one of {(word, *without)}",
                position_embedding_type=selected.value,
            )
        if selected is not None and selected.value == word:
            rotation = rule(layer)
            return Value(rotation.value, f"{selected.origin} {word}, {rotation.origin}")
        read_if_possible(rule, layer)
        return NOTHING

    return if_selected


# ---- Layers that share keys and values -----------------------------------------------------------


def kv_source(layer: ConfigLayer) -> int | None:
    """Return the last layer of the same kind before those that share keys and values, for each of
    the last `num_kv_shared_layers`; None for the others.

    Raises:
        ValueError: if there is no such layer.
    """
    shared = layer.config.find("num_kv_shared_layers")
    num_shared = 0 if shared is None else shared.value
    num_own = len(layer.kinds) - as_count("num_kv_shared_layers", num_shared, minimum=0)
    if layer.index < num_own:
        return None
    for index in reversed(range(num_own)):
        if layer.kinds[index] == layer.kind:
            return index
    rule = f"leave a layer of kind {layer.kind!r} with keys of its own"
    raise InputError("num_kv_shared_layers", rule, num_kv_shared_layers=num_shared)


def own_keys(rule: FieldRule) -> FieldRule:
    """Return a rule for layers that make their own keys and values."""

    def if_own(layer: ConfigLayer) -> Value:
        value = rule(layer)
        if kv_source(layer) is not None:
            return NOTHING
        return value

    return if_own


def shares_keys(layer: ConfigLayer) -> Value:
    """Return True for a layer that shares the keys and values of another one."""
    source = kv_source(layer)
    if source is None:
        return NOTHING
    return Value(True, f"num_kv_shared_layers: shared with layer {source}")


# ---- Kinds of layers -----------------------------------------------------------------------------


def of_kind(kind: str) -> Callable[[Config, int], str]:
    """Return a rule for stacks with layers of one kind."""
    return lambda config, index: kind


def require_layer_types(config: Config, index: int) -> str:
    """Return the default kind, for families that require `layer_types`.

    Raises:
        MissingKeyError: if `layer_types` is missing.
    """
    config.read("layer_types")
    return "full_attention"


def first_of(period: int, *names: str) -> Callable[[Config, int], str]:
    """Return a rule for windows in all layers but the first of each period; keys may change the
    period.
    """

    def kind(config: Config, index: int) -> str:
        is_first = index % _length_of(period, config.find(*names)) == 0
        return "full_attention" if is_first else "sliding_attention"

    return kind


def every(period: int, *names: str) -> Callable[[Config, int], str]:
    """Return a rule for windows in all layers but the last of each period; keys may change the
    period.
    """

    def kind(config: Config, index: int) -> str:
        is_full = is_last(index, config.find(*names), period)
        return "full_attention" if is_full else "sliding_attention"

    return kind


def is_last(index: int, configured: Value | None, period: int) -> bool:
    """Return whether a layer is the last of its period, which the configuration may contain."""
    return (index + 1) % _length_of(period, configured) == 0


def _length_of(period: int, configured: Value | None) -> int:
    """Return the length of a period: the configuration's, or the family's."""
    if configured is None:
        return period
    return as_count(configured.origin, configured.value)


SLIDING = only("sliding_attention", required_or_none("sliding_window"))
"""The rule for the window of most families."""
