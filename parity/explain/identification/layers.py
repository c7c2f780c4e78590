"""Find the attention layers of a live model, by rules of its family, by observation, or by both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.explain.diagnosis.taps import check_tap
from parity.explain.identification import Identification, identify, is_flax
from parity.measure.core.compare import Comparison
from parity.measure.core.records import JsonRecord
from parity.measure.core.user_code import user_code
from parity.measure.core.weights import Weights, unheld
from parity.port.foreign.live import find_layer
from parity.port.models.specs import ModelLayer
from parity.port.tapping import tap
from parity.port.tapping.record import Tapped

SPANS = ("window_size", "chunk_size")
"""Fields that a shorter input does not show."""

Source = Literal["rules", "observation", "both", ""]
"""Origin of a specification."""


def _not_identified() -> Identification:
    return Identification("")


@dataclass(frozen=True)
class LiveLayer(JsonRecord):
    """An attention layer of a live model, found by rules, by observation, or by both.

    Attributes:
        name: name of the module.
        spec: its verified specification; None if it is not identified.
        weights: its canonical weights.
        is_causal: whether queries attend to no later key.
        from_call: arguments that each call must pass in addition to the inputs, as in
            `Identification`.
        source: origin of the specification: `rules` of its family, `observation`, or `both`; empty
            if it is not identified.
        share: error of its recorded outputs, relative to its budget.
        no_rules_reason: why no rules describe it; empty if rules do.
        reason: why it has no specification; empty if it has one.
        comparisons: comparison of each recorded stage with the reference; empty if its inputs or
            its output do not belong to attention.
        identification: result of observation alone.
    """

    name: str
    spec: AttentionSpec | None = None
    weights: Weights = field(default_factory=dict, repr=False)
    is_causal: bool | None = None
    from_call: dict[str, str] = field(default_factory=dict, repr=False)
    source: Source = ""
    share: float | None = None
    no_rules_reason: str = ""
    reason: str = ""
    comparisons: list[Comparison] = field(default_factory=list, repr=False)
    identification: Identification = field(default_factory=_not_identified)

    def at(self, index: int) -> ModelLayer:
        """Return it as layer `index` of its model, in the form that `check_tap` accepts."""
        return ModelLayer(index, "", self.spec, {}, is_causal=bool(self.is_causal), path=self.name)

    def __str__(self) -> str:
        if self.spec is None:
            return f"{self.name}: not identified, {self.reason}"
        if self.name == self.identification.name and self.identification.spec is not None:
            rules = f"no rules: {self.no_rules_reason}"
            if self.source == "both":
                rules = "rules agree"
            return f"{self.identification}\n  {rules}"
        causal = "not causal"
        if self.is_causal:
            causal = "causal"
        lines = [f"{self.name}: {self.spec}, {causal}, by rules: {self.share:.2g} of its budget"]
        lines += [f"from its call: {part}={name}" for part, name in self.from_call.items()]
        return "\n  ".join([*lines, str(self.identification)])


@dataclass(frozen=True)
class RuledLayer:
    """A layer as rules describe it, with its weights."""

    layer: ModelLayer
    weights: Weights


def layers_of(model: Any, inputs: Mapping[str, Any], layers: Any = None) -> list[LiveLayer]:
    """Return the specifications of the attention layers of a live model, each checked by
    observation.

    The rules of a family (see `from_transformers`) and observation (see `identify`) must agree. A
    layer that only one of them supports is compared with the reference on the inputs.

    Args:
        model: as in `identify`.
        inputs: as in `identify`.
        layers: as in `identify`.

    Returns:
        One layer per module, in order. If the module is only part of a layer of the rules, as in
        BERT, the layer has the name of the whole.

    Raises:
        TypeError: as in `identify`.
        ValueError: as in `identify`.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 16}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        >>> model = LlamaModel(LlamaConfig(**sizes, **heads)).eval()
        >>> inputs = {"input_ids": torch.arange(16).reshape(2, 8)}
        >>> parity.layers_of(model, inputs)[0].spec.num_kv_heads
        2
    """
    identified = {layer.name: layer for layer in identify(model, inputs, layers)}
    if is_flax(model):
        return [_flax_layer(layer) for layer in identified.values()]
    import torch

    with torch.no_grad(), tap(model, layers) as tapped, user_code(model):
        model(**inputs)
    live = []
    for layer in tapped.layers:
        if layer.name in identified:
            alone = replace(tapped, layers=[layer])
            live.append(_live_layer(identified[layer.name], alone, model))
        else:
            live.append(LiveLayer(layer.name, reason="it did not run with these inputs"))
    return live


def _flax_layer(identified: Identification) -> LiveLayer:
    """Return an identified Flax layer; rules do not cover Flax."""
    source: Source = ""
    if identified.spec is not None:
        source = "observation"
    return LiveLayer(
        identified.name,
        spec=identified.spec,
        weights=identified.weights,
        is_causal=identified.is_causal,
        from_call=identified.from_call,
        source=source,
        share=identified.share,
        no_rules_reason="rules are for models of torch",
        reason=identified.reason,
        identification=identified,
    )


def _live_layer(identified: Identification, tapped: Tapped, model: Any) -> LiveLayer:
    """Return an identified layer, combined with the rules for it.

    Args:
        identified: the layer by observation.
        tapped: a recording of that layer alone.
        model: its model.
    """
    ruled, no_rules_reason = _find_ruled(model, identified.name)
    if ruled is None:
        live = LiveLayer(
            identified.name, no_rules_reason=no_rules_reason, identification=identified
        )
        if identified.spec is None:
            reason = f"{identified.reason}; and no rules, {no_rules_reason}"
            return replace(live, reason=reason)
        observed = replace(live, spec=identified.spec, is_causal=identified.is_causal)
        layer, weights = observed.at(tapped.layers[0].index), identified.weights
    else:
        layer, weights = ruled.layer, ruled.weights
        live = LiveLayer(layer.path, identification=identified)
        differences = _differences(ruled, identified)
        if differences:
            return replace(live, reason=f"rules say {', '.join(differences)}")

    verdict = check_tap(tapped, [layer], {identified.name: weights}, diagnoses=False).layers[0]
    # Observation has verified it between its projections at least.
    is_verified = identified.spec is not None and live.name == identified.name
    if not verdict.passed and not is_verified:
        reason = verdict.not_compared or _describe_difference(verdict.difference)
        reasons = [f"it is not {layer.spec}", reason, identified.reason]
        return replace(live, reason="; ".join(filter(None, reasons)))
    comparisons = []
    if verdict.passed:
        comparisons = verdict.comparisons
    shares = [comparison.worse_ratio for comparison in comparisons]
    return replace(
        live,
        spec=layer.spec,
        weights=weights,
        is_causal=layer.is_causal,
        from_call=_from_call(identified, tapped),
        source=_source(ruled, identified),
        share=max([*shares, identified.share or 0.0]),
        comparisons=comparisons,
    )


def _describe_difference(difference: Comparison | None) -> str:
    """Return how far a stage is from its budget; empty if none differs."""
    if difference is None:
        return ""
    return f"{difference.stage} is {difference.worse_ratio:.2g} times its budget"


def _source(ruled: RuledLayer | None, identified: Identification) -> Source:
    if ruled is None:
        return "observation"
    if identified.spec is None:
        return "rules"
    return "both"


def _from_call(identified: Identification, tapped: Tapped) -> dict[str, str]:
    """Return the arguments that each call must pass, with segments that only the recording has."""
    from_call = dict(identified.from_call)
    if any("segment_ids" in call.values for call in tapped.layers[0].calls):
        from_call.setdefault("segment_ids", "an argument that observation does not name")
    return from_call


# ---- Rules ---------------------------------------------------------------------------------------


def _find_ruled(model: Any, name: str) -> tuple[RuledLayer | None, str]:
    """Return the layer that rules describe at the name of a module, or the reason why there is
    none.
    """
    first_reason = ""
    # BERT's attention is a module inside the layer of the rules.
    for path in (name, name.rpartition(".")[0]):
        try:
            layer, weights = find_layer(model, path=path)
        except (OSError, TypeError, ValueError) as error:
            first_reason = first_reason or _reason(error)
        else:
            return RuledLayer(replace(layer, path=path), weights), ""
    return None, first_reason


def _reason(error: Exception) -> str:
    """Return why there are no rules, without the hint."""
    if isinstance(error, InputError) and isinstance(error.got, str):
        return error.got
    return str(error)


def _differences(ruled: RuledLayer, identified: Identification) -> list[str]:
    """Describe the differences between rules and observation; empty if the layer was not
    identified.
    """
    if ruled.layer.spec is None or identified.spec is None:
        return []
    differences = _different_fields(ruled.layer, ruled.layer.spec, identified, identified.spec)
    if differences:
        return differences
    for name, weight in ruled.weights.items():
        observed = identified.weights.get(name)
        if observed is not None and not np.array_equal(weight, observed):
            differences.append(f"other values of {name} than were observed")
    return differences


def _different_fields(
    ruled: ModelLayer,
    ruled_spec: AttentionSpec,
    identified: Identification,
    identified_spec: AttentionSpec,
) -> list[str]:
    """Describe the fields that differ between rules and observation."""
    by_rules = dict(unheld(ruled_spec).values())
    by_observation = dict(unheld(identified_spec).values())
    if not identified_spec.out_proj and ruled.path != identified.name:
        # Such a module ends before the output projection.
        for name in ("out_proj", "out_bias", "d_model"):
            by_observation[name] = by_rules[name]
    for name in SPANS:
        if by_observation[name] is None and (by_rules[name] or 0) >= identified.num_tokens:
            by_observation[name] = by_rules[name]
    by_rules["is_causal"] = ruled.is_causal
    by_observation["is_causal"] = identified.is_causal
    if ruled.kv_source is not None:
        by_rules["key"] = _describe_keys(ruled, identified.name)
        by_observation["key"] = identified.inputs["key"]

    differences = []
    for name, value in by_rules.items():
        observed = by_observation[name]
        if value != observed:
            differences.append(f"{name}={value!r}, and observation {observed!r}")
    return differences


def _describe_keys(ruled: ModelLayer, name: str) -> str:
    """Return the keys that a layer shares by rules, in the words of observation."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part == str(ruled.index):
            parts[i] = str(ruled.kv_source)
    return f"the keys of {'.'.join(parts)}"
