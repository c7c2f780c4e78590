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


@dataclass(frozen=True)
class LiveLayer(JsonRecord):
    """An attention layer of a live model, found by rules, by observation, or by both.

    Attributes:
        name: of the module.
        spec: its verified specification; None if there is a refusal.
        weights: its canonical weights.
        is_causal: whether queries attend to no later key.
        from_call: arguments that each call must pass in addition to the inputs, as in
            `Identification`.
        source: origin of the specification: `rules` of its family, `observation`, or `both`; empty
            if there is a refusal.
        share: error of its recorded outputs, relative to its budget.
        not_ruled: why no rules describe it; empty if rules do.
        refusal: why it has no specification; empty if it has one.
        comparisons: comparison of each recorded stage with the reference; empty if its inputs or
            its output are not those of attention.
        identification: result of observation alone.
    """

    name: str
    spec: AttentionSpec | None = None
    weights: Weights = field(default_factory=dict, repr=False)
    is_causal: bool | None = None
    from_call: dict[str, str] = field(default_factory=dict, repr=False)
    source: Literal["rules", "observation", "both", ""] = ""
    share: float | None = None
    not_ruled: str = ""
    refusal: str = ""
    comparisons: list[Comparison] = field(default_factory=list, repr=False)
    identification: Identification = field(default_factory=lambda: Identification(""))

    def at(self, index: int) -> ModelLayer:
        """Return it as layer `index` of its model, in the form that `check_tap` accepts."""
        return ModelLayer(index, "", self.spec, {}, is_causal=bool(self.is_causal), path=self.name)

    def __str__(self) -> str:
        if self.spec is None:
            return f"{self.name}: refused, {self.refusal}"
        if self.name == self.identification.name and self.identification.spec is not None:
            rules = "rules agree" if self.source == "both" else f"no rules: {self.not_ruled}"
            return f"{self.identification}\n  {rules}"
        causal = "causal" if self.is_causal else "not causal"
        lines = [f"{self.name}: {self.spec}, {causal}, by rules: {self.share:.2g} of its budget"]
        lines += [f"from its call: {part}={name}" for part, name in self.from_call.items()]
        return "\n  ".join([*lines, str(self.identification)])


def layers_of(model: Any, inputs: Mapping[str, Any], layers: Any = None) -> list[LiveLayer]:
    """Return the specifications of the attention layers of a live model, each checked by
    observation.

    Rules of a family (see `from_transformers`) and observation (see `identify`) must agree. A layer
    that only one of them supports is compared with the reference on the inputs.

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
    """
    observed = {each.name: each for each in identify(model, inputs, layers)}
    if is_flax(model):
        return [_observed(each) for each in observed.values()]
    import torch

    with torch.no_grad(), tap(model, layers) as tapped, user_code(model):
        model(**inputs)
    return [
        _known(observed[layer.name], replace(tapped, layers=[layer]), model)
        if layer.name in observed
        else LiveLayer(layer.name, refusal="it did not run with these inputs")
        for layer in tapped.layers
    ]


def _observed(observed: Identification) -> LiveLayer:
    """Return an observed Flax layer; rules do not cover Flax."""
    source = "observation" if observed.spec is not None else ""
    known = observed.spec, observed.weights, observed.is_causal, observed.from_call, source
    why = "rules are for models of torch"
    return LiveLayer(
        observed.name, *known, observed.share, why, observed.refusal, identification=observed
    )


def _known(observed: Identification, tapped: Tapped, model: Any) -> LiveLayer:
    """Return an observed layer, combined with the rules for it."""
    ruled, why = _ruled(model, observed.name)
    live = LiveLayer(
        observed.name if ruled is None else ruled[0].path, not_ruled=why, identification=observed
    )
    if ruled is None and observed.spec is None:
        return replace(live, refusal=f"{observed.refusal}; and no rules, {why}")
    if ruled is None:
        told = replace(live, spec=observed.spec, is_causal=observed.is_causal)
        layer, weights = told.at(tapped.layers[0].index), observed.weights
    else:
        layer, weights = ruled
        if differences := _differences(layer, weights, observed):
            return replace(live, refusal=f"rules say {', '.join(differences)}")
    verdict = check_tap(tapped, [layer], {observed.name: weights}, diagnoses=False).layers[0]
    is_verified = (
        observed.spec is not None and live.name == observed.name
    )  # verified between its projections at least
    if not (verdict.passed or is_verified):
        wrong = verdict.difference and (
            f"{verdict.difference.stage} is {verdict.difference.worse_ratio:.2g} times its budget"
        )
        words = [f"it is not {layer.spec}", verdict.not_compared or wrong, observed.refusal]
        return replace(live, refusal="; ".join(filter(None, words)))
    comparisons = verdict.comparisons if verdict.passed else []
    source = "observation" if ruled is None else "rules" if observed.spec is None else "both"
    share = max([*(comparison.worse_ratio for comparison in comparisons), observed.share or 0.0])
    from_call = dict(observed.from_call)
    if any("segment_ids" in call.values for call in tapped.layers[0].calls):
        from_call.setdefault("segment_ids", "an argument that observation does not name")
    live = replace(live, from_call=from_call)
    known = replace(
        live,
        spec=layer.spec,
        weights=weights,
        is_causal=layer.is_causal,
        source=source,
        share=share,
    )
    return replace(known, comparisons=comparisons)


def _ruled(model: Any, name: str) -> tuple[tuple[ModelLayer, Weights] | None, str]:
    """Return the layer that rules describe at the name of a module, or the reason why there is
    none.
    """
    why = ""
    for path in (
        name,
        name.rpartition(".")[0],
    ):  # BERT's attention is a module inside the layer of the rules
        try:
            layer, weights = find_layer(model, path=path)
        except (OSError, TypeError, ValueError) as error:
            why = why or _reason(error)
        else:
            return (replace(layer, path=path), weights), ""
    return None, why


def _reason(error: Exception) -> str:
    """Return why there are no rules, without the hint."""
    return error.got if isinstance(error, InputError) and isinstance(error.got, str) else str(error)


def _differences(ruled: ModelLayer, weights: Weights, observed: Identification) -> list[str]:
    """Describe the differences between rules and observation; empty if the layer was not
    identified.
    """
    if ruled.spec is None or observed.spec is None:
        return []
    one, other = unheld(ruled.spec).values(), unheld(observed.spec).values()
    if (
        not observed.spec.out_proj and ruled.path != observed.name
    ):  # such a module ends before the output projection
        other |= {name: one[name] for name in ("out_proj", "out_bias", "d_model")}
    unseen = [
        name for name in SPANS if other[name] is None and (one[name] or 0) >= observed.num_tokens
    ]
    said = {
        name: (value, other[name])
        for name, value in one.items()
        if value != other[name] and name not in unseen
    }
    said |= (
        {}
        if ruled.is_causal == observed.is_causal
        else {"is_causal": (ruled.is_causal, observed.is_causal)}
    )
    if ruled.kv_source is not None and (source := observed.inputs["key"]) != _keys_of(
        ruled, observed.name
    ):
        said["key"] = (_keys_of(ruled, observed.name), source)
    found = [f"{name}={value!r}, and observation {seen!r}" for name, (value, seen) in said.items()]
    own = {name: weight for name, weight in weights.items() if name in observed.weights}
    changed = [
        name for name, weight in own.items() if not np.array_equal(weight, observed.weights[name])
    ]
    return found or [f"other values of {name} than were observed" for name in changed]


def _keys_of(ruled: ModelLayer, name: str) -> str:
    """Return the keys that a layer shares by rules, in the words of observation."""
    words = (str(ruled.kv_source) if word == str(ruled.index) else word for word in name.split("."))
    return f"the keys of {'.'.join(words)}"


SPANS = ("window_size", "chunk_size")
"""Fields that a shorter input does not show."""
