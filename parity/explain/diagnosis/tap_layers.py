"""The specification and the weights of each tapped layer, and whether it can be compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.explain.diagnosis.tapped import Sequences, sequences_of
from parity.port.models.specs import ModelLayer
from parity.port.tapping.record import TappedLayer

CROSS = "cross_attention"
"""The kind of layers that attend to another sequence."""

Specs = Sequence[ModelLayer] | Mapping[int, AttentionSpec | None]
LayerWeights = Mapping[int, Mapping[str, Any]] | Mapping[str, Mapping[str, Any]]
PlainSpecs = Sequence[AttentionSpec | None]
PlainWeights = Sequence[Mapping[str, Any]]
"""A specification, or weights, for each tapped layer, in their order."""

# ---- Arguments -----------------------------------------------------------------------------------


def specs_of_layers(specs: Specs | PlainSpecs, layers: Sequence[TappedLayer]) -> Specs:
    """Return specifications by index, or from `specs_of`.

    Raises:
        TypeError: if they are anything else.
        ValueError: if a list of plain specifications has the wrong length than the tapped layers.
    """
    rule = "be AttentionSpecs by index, one for each tapped layer, or from parity.specs_of"
    if isinstance(specs, Mapping):
        for spec in specs.values():
            if spec is not None and not isinstance(spec, AttentionSpec):
                raise InputTypeError("specs", rule, type(spec).__name__)
        return specs
    if isinstance(specs, (str, AttentionSpec)) or not isinstance(specs, Sequence):
        raise InputTypeError("specs", rule, type(specs).__name__)
    of_models, plain = list[ModelLayer](), list[AttentionSpec | None]()
    for spec in specs:
        if isinstance(spec, ModelLayer):
            of_models.append(spec)
        elif spec is None or isinstance(spec, AttentionSpec):
            plain.append(spec)
        else:
            raise InputTypeError("specs", rule, type(spec).__name__)
    if not plain:
        return of_models
    if of_models:
        raise InputTypeError("specs", rule, "some of both")
    return dict(zip(_indices("specs", len(plain), layers), plain, strict=True))


def weights_of_layers(
    weights: LayerWeights | PlainWeights, layers: Sequence[TappedLayer]
) -> LayerWeights:
    """Return weights by index or by name.

    Raises:
        TypeError: if they are anything else.
        ValueError: if a list of weights has the wrong length than the tapped layers.
    """
    rule = "be the weights of each layer, by index, by name, or one mapping for each tapped layer"
    if isinstance(weights, str) or not isinstance(weights, (Mapping, Sequence)):
        raise InputTypeError("weights", rule, type(weights).__name__)
    of_layers = list(weights.values()) if isinstance(weights, Mapping) else list(weights)
    for each in of_layers:
        if not isinstance(each, Mapping):
            raise InputTypeError("weights", rule, f"one that is {type(each).__name__}")
    if isinstance(weights, Mapping):
        return weights
    return dict(zip(_indices("weights", len(of_layers), layers), of_layers, strict=True))


def _indices(what: str, count: int, layers: Sequence[TappedLayer]) -> list[int]:
    """Return the index of each tapped layer, which a list has one entry for.

    Raises:
        ValueError: if the list has the wrong length, or two layers have one index.
    """
    indices = [layer.index for layer in layers]
    if count != len(indices):
        raise InputError(
            what,
            f"be a list of {len(indices)}, one for each tapped layer, or by index",
            f"{count} of them",
        )
    if len(set(indices)) < len(indices):
        raise InputError(
            what, "be passed by the names of modules, because layers share an index", str(indices)
        )
    return indices


# ---- One layer -----------------------------------------------------------------------------------


def title_of(layer: ModelLayer) -> str:
    """Return the title of a layer in reports."""
    return f"{layer.part} {TappedLayer('', layer.index, '', layer.kind).title}".strip()


def layers_of_model(layer: TappedLayer, specs: Specs) -> list[ModelLayer]:
    """Return the layer of the model that was tapped, by the longest match of its name or by its
    index; several if it is ambiguous.

    Parts of a model may have layers of the same path: then the part in the layer's name decides.
    """
    if isinstance(specs, Mapping):
        spec = specs.get(layer.index)
        return [ModelLayer(layer.index, "", spec, {}, is_causal=not layer.is_cross)]
    at_name = [known for known in specs if _is_at(layer.name, known.path)]
    longest = max((len(known.path) for known in at_name), default=0)
    matching = [known for known in at_name if len(known.path) == longest]
    of_index = [known for known in matching or specs if known.index == layer.index]
    matching = of_index or matching
    of_part = [known for known in matching if known.part and _is_in_part(layer.name, known.part)]
    different: dict[tuple[AttentionSpec | None, bool], ModelLayer] = {}
    for known in of_part or matching:
        different[known.spec, known.is_causal] = known
    return list(different.values())


def _is_in_part(name: str, part: str) -> bool:
    """Return True if a module is in a part of a model, such as the decoder."""
    return any(word.startswith(part) for word in name.split("."))


def weights_of_layer(layer: TappedLayer, weights: LayerWeights) -> Mapping[str, Any] | None:
    """Return the weights of a layer, by its name, which may lack its beginning or its end, or by
    its index.

    Modules of another library have other names; there the number in the name decides if it is
    unique.
    """
    by_name: dict[str, Mapping[str, Any]] = {}
    by_index: dict[int, Mapping[str, Any]] = {}
    for key, of_layer in weights.items():
        if isinstance(key, str):
            by_name[key] = of_layer
        else:
            by_index[key] = of_layer
    if layer.name in by_name:
        return by_name[layer.name]
    # A whole Flax model is called by its class.
    if not layer.name and layer.module in by_name:
        return by_name[layer.module]
    matching = [of_layer for name, of_layer in by_name.items() if _is_at(layer.name, name)]
    if not matching:
        number = str(layer.index)
        matching = [
            of_layer for name, of_layer in by_name.items() if number in re.split(r"[.\[\]]", name)
        ]
    if len(matching) == 1:
        return matching[0]
    return by_index.get(layer.index)


def _is_at(name: str, other: str) -> bool:
    """Return True if one name contains all parts of the other, in sequence."""
    return bool(other) and (f".{other}." in f".{name}." or f".{name}." in f".{other}.")


def sources_of(
    layer: TappedLayer, known: ModelLayer, layers: Sequence[TappedLayer], count: int
) -> Sequence[Sequences | None]:
    """Return the same sequences of the layer whose keys and values a layer shares; None if it was
    not tapped.
    """
    if known.kv_source is None:
        return [None] * count
    sources = [other for other in layers if other.index == known.kv_source]
    if known.path == layer.name:
        name = re.sub(r"\d+", str(known.kv_source), layer.name)
        sources = [other for other in sources if other.name == name] or sources
    if not sources:
        return [None] * count
    return sequences_of(sources[0])


def other_specs(known: ModelLayer, specs: Specs) -> dict[str, AttentionSpec]:
    """Return the specifications of the other layers, each once, by the title of the first layer
    that has it.
    """
    if isinstance(specs, Sequence):
        layers = list(specs)
    else:
        layers = [ModelLayer(index, "", spec, {}) for index, spec in specs.items()]
    titles: dict[AttentionSpec, str] = {}
    for layer in layers:
        if layer.spec is not None and layer.spec != known.spec:
            titles.setdefault(layer.spec, title_of(layer))
    return {title: spec for spec, title in titles.items()}


def before_out_proj(spec: AttentionSpec) -> AttentionSpec:
    """Return the specification of the part of a layer whose output is the context of all heads."""
    return replace(spec, out_proj=False)


# ---- Reasons not to compare it -------------------------------------------------------------------


def why_not_compared(layer: TappedLayer, known: ModelLayer, *, has_weights: bool) -> str:
    """Return the reason why a layer cannot be compared; empty if it can."""
    spec = known.spec
    if spec is None:
        return "it has no attention over keys, or no spec"
    if not any("output" in call.values for call in layer.calls):
        return "it was not called"
    reason = _why_not_cross(layer, known, spec)
    if reason:
        return reason
    if not has_weights:
        return "it has no weights"
    if spec.shared_kv:
        if not all({"k", "v"} <= call.values.keys() for call in layer.calls):
            return "the keys and values of another layer, to which it attends, were not observed"
        if layer.calls[0].past:
            return "it received only the last tokens of the prompt"
    if layer.training and (spec.dropout or spec.output_dropout):
        return "it was called in training mode, with dropout"
    return ""


def _why_not_cross(layer: TappedLayer, known: ModelLayer, spec: AttentionSpec) -> str:
    """Return the reason why a layer with another sequence of keys, or without one, cannot be
    compared.
    """
    should_be_cross = known.kind == CROSS
    if not layer.is_cross:
        return "the sequence that it attends to was not observed" if should_be_cross else ""
    if known.kind and not should_be_cross:
        return "it attends to another sequence, and should not"
    if any(call.past is None for call in layer.calls):
        return (
            "it attends to another sequence, with a cache that does not say how many tokens came "
            "before"
        )
    if spec.has_positions or spec.has_distance_bias or spec.window_size:
        return "it attends to another sequence, whose positions are not known"
    return ""


def with_kind_of(layer: TappedLayer, known: ModelLayer) -> ModelLayer:
    """Return a layer of the model with the kind of the tapped one, if it has none of its own."""
    return replace(known, kind=known.kind or layer.kind)
