"""Rules that read fields of specifications from configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mha_spec import InputError, Norm, Temperature
from mha_spec.rules import as_count
from parity.port.models.config import Config, MissingKeyError, Value
from parity.port.models.rope import read_rope

NOTHING = Value(None, "")


class ConfigLayer(NamedTuple):
    """Layer of a model.

    Attributes:
        config: configuration of the model.
        layer: index of the layer, from 0.
        kind: `full_attention`, `sliding_attention`, …
        kinds: of all layers of its stack.
    """

    config: Config
    layer: int
    kind: str
    kinds: tuple[str, ...] = ()


Rule = Callable[[ConfigLayer], Value]


@dataclass(frozen=True)
class Stack:
    """Consecutive attention layers of a model: those of a decoder, or of one part of a model.

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
    kind: Callable[[Config, int], str] = lambda config, index: "full_attention"
    part: str = ""
    count: tuple[str, ...] = ("num_hidden_layers", "n_layer")
    path: str = "layers.{i}.self_attn"
    layout: str = "transformers.LLaMA"
    is_causal: bool | Callable[[Config], bool] = True
    shared: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    keys_are_values: Callable[[ConfigLayer], bool] = lambda place: False
    kv_source: Callable[[ConfigLayer], int | None] = lambda place: None


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


def key(*names: str, default: Any = None, power: float = 1.0) -> Rule:
    """Return a rule for the value of a key, or a power of it; default: the family's, if any."""

    def rule(place: ConfigLayer) -> Value:
        found = place.config.read(*names, default=default)
        return found if power == 1.0 else Value(found.value**power, f"{found.origin} ** {power}")

    return rule


def optional(*names: str) -> Rule:
    """Return a rule for the value of a key, if present."""
    return lambda place: place.config.find(*names) or NOTHING


def asked(*names: str) -> Rule:
    """Return a rule for a required key, which may be None: without it transformers has its own
    default.
    """
    return lambda place: place.config.asked(*names) or NOTHING


def rope(
    *, theta: float | None = None, of: str | None = None, count: str | None = None, **options: Any
) -> Rule:
    """Return a rule for RoPE; `of` is the key of the number of features, if not those of a head.

    `count` is an optional key of the number of rotated features, if no key has their fraction. With
    `fraction` some features may be rotated, by default this fraction; without it all are.
    """

    def rule(place: ConfigLayer) -> Value:
        fields = dict(options)
        size = head_dim(place) if of is None else place.config.read(of).value
        if of is not None:
            fields |= {"rotary_dim": size, "rotated": "last", "fraction": 1.0}
        told = None if count is None else place.config.find(count)
        if told is not None:
            fields["fraction"] = told.value / size
        found = read_rope(place.config, size, layer_type=place.kind, theta=theta, **fields)
        return found if told is None else Value(found.value, f"{found.origin}, {told.origin}")

    return rule


def head_dim(place: ConfigLayer) -> int:
    """Return the features of a head."""
    found = place.config.find("head_dim")
    return found.value if found else place.config.read("hidden_size").value // heads(place)


def heads(place: ConfigLayer) -> int:
    """Return the number of query heads."""
    return place.config.read("num_attention_heads").value


def only(kind: str, rule: Rule) -> Rule:
    """Return a rule for layers of one kind; its keys also count as read in the others."""

    def in_kind(place: ConfigLayer) -> Value:
        if place.kind == kind:
            return rule(place)
        with suppress(MissingKeyError):  # not required here
            rule(place)
        return NOTHING

    return in_kind


def where(name: str, rule: Rule, *, default: bool | None = None) -> Rule:
    """Return a rule that applies if a key is true."""

    def if_true(place: ConfigLayer) -> Value:
        found, then = place.config.read(name, default=default), rule(place)
        return Value(then.value, f"{found.origin}, {then.origin}") if found.value else NOTHING

    return if_true


def positioned(word: str, rule: Rule, *, others: tuple[str, ...]) -> Rule:
    """Return a rule for RoPE in models that select it by a word; its keys also count as read in the
    others.

    Raises:
        ValueError: if the word is unknown.
    """

    def if_asked(place: ConfigLayer) -> Value:
        told = place.config.find("position_embedding_type")
        if told is not None and told.value not in (word, *others):
            raise InputError(
                "position_embedding_type",
                f"be one of {(word, *others)}",
                position_embedding_type=told.value,
            )
        if told is not None and told.value == word:
            found = rule(place)
            return Value(found.value, f"{told.origin} {word}, {found.origin}")
        with suppress(MissingKeyError):
            rule(place)
        return NOTHING

    return if_asked


def norm(*args: Any, eps: str = "rms_norm_eps", **fields: Any) -> Rule:
    """Return a rule for a norm with the model's eps."""

    def rule(place: ConfigLayer) -> Value:
        found = place.config.read(eps)
        return Value(
            Norm(*args, eps=found.value, **fields),
            f"{found.origin}; else as every layer of this family",
        )

    return rule


def kv_source(place: ConfigLayer) -> int | None:
    """The last layer of its kind before those that share keys and values, for each of the last
    `num_kv_shared_layers`.

    Raises:
        ValueError: if there is no such layer.
    """
    told = place.config.find("num_kv_shared_layers")
    count = 0 if told is None else told.value
    before = len(place.kinds) - as_count("num_kv_shared_layers", count, minimum=0)
    if place.layer < before:
        return None
    found = [
        index for index, kind in enumerate(place.kinds[: max(before, 0)]) if kind == place.kind
    ]
    if not found:
        rule = f"leave a layer of kind {place.kind!r} with keys of its own"
        raise InputError("num_kv_shared_layers", rule, num_kv_shared_layers=count)
    return found[-1]


def own_keys(rule: Rule) -> Rule:
    """A field of layers that make their own keys and values."""

    def if_own(place: ConfigLayer) -> Value:
        found = rule(place)
        return found if kv_source(place) is None else NOTHING

    return if_own


def shares_keys(place: ConfigLayer) -> Value:
    """True for a layer that shares the keys and values of another one."""
    source = kv_source(place)
    return (
        NOTHING if source is None else Value(True, f"num_kv_shared_layers: those of layer {source}")
    )


def of_kind(kind: str) -> Callable[[Config, int], str]:
    """Return a rule for stacks with layers of one kind."""
    return lambda config, index: kind


def told_kind(config: Config, index: int) -> str:
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
        told = config.find(*names)
        count = period if told is None else as_count(told.origin, told.value)
        return "sliding_attention" if index % count else "full_attention"

    return kind


SLIDING = only("sliding_attention", asked("sliding_window"))


def every(period: int, *names: str) -> Callable[[Config, int], str]:
    """Return a rule for windows in all layers but the last of each period; keys may change the
    period.
    """

    def kind(config: Config, index: int) -> str:
        last = is_last(index, config.find(*names), period)
        return "full_attention" if last else "sliding_attention"

    return kind


def is_last(index: int, told: Value | None, period: int) -> bool:
    """Return whether a layer is the last of its period, which the configuration may contain."""
    return (index + 1) % (period if told is None else as_count(told.origin, told.value)) == 0


def tempered_by_rope(place: ConfigLayer) -> Value:
    """Return the temperature, which Mistral stores among the parameters of RoPE."""
    values = place.config.section("rope_parameters")
    values.find("max_position_embeddings")  # also a key of the model
    scale = values.find("llama_4_scaling_beta")
    if scale is None:
        return NOTHING
    length = values.read("original_max_position_embeddings")
    return Value(Temperature(length.value, scale.value), f"{scale.origin}, {length.origin}")
