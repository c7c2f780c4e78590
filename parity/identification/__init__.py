"""Identify attention layers of a live model by what they do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mha_spec import AttentionSpec, Refusal
from parity.core.weights import Weights
from parity.diagnosis.taps import judge_tap
from parity.identification.fit import Evidence, fit
from parity.identification.observe import ObservedLayer, observe
from parity.tapping.record import Tapped

SEED = 0  # of fresh inputs


@dataclass(frozen=True)
class Identification:
    """An attention layer, identified by what it did; or why it was not.

    Attributes:
        name: of the module.
        spec: what it computes; None if it was refused.
        weights: its canonical weights.
        names: the parameter of the module that each weight is, or is part of.
        is_causal: whether queries attend to no later key.
        evidence: how each field was found.
        share: error of the layer on fresh inputs, as a share of its budget; at most 1.
        refusal: the first stage that nothing explains; empty if there is none.
    """

    name: str
    spec: AttentionSpec | None = None
    weights: Weights = field(default_factory=dict, repr=False)
    names: dict[str, str] = field(default_factory=dict, repr=False)
    is_causal: bool | None = None
    evidence: list[Evidence] = field(default_factory=list, repr=False)
    share: float | None = None
    refusal: str = ""

    def __str__(self) -> str:
        if self.spec is None:
            return f"{self.name}: not identified, {self.refusal}"
        causal = "causal" if self.is_causal else "not causal"
        lines = [f"{self.name}: {self.spec}, {causal}; {self.share:.2g} of its budget on fresh inputs"]
        return "\n".join([*lines, *(f"  {each}" for each in self.evidence)])


def identify(model: Any, inputs: Mapping[str, Any], layers: Any = None) -> list[Identification]:
    """Return what the attention layers of a live torch model compute, by observing two calls.

    The first call is fitted, field by field. The second one has fresh inputs of the same shapes, and every stage of it
    must be within the budget of the float64 reference. What is not is refused. What the inputs are too short to show,
    such as a window of 4096 tokens, is read from attributes of the module, and its evidence says so.

    Args:
        model: a `torch.nn.Module` in float32 and in evaluation, whose layers call the attention function of
            transformers.
        inputs: keywords of a call: tokens without padding, at least 8 of at least 2 sequences.
        layers: names of modules or classes, as `parity.tap` takes them.

    Returns:
        One for each layer, in order.

    Raises:
        TypeError: if the model is not a torch module.
        ValueError: if it is training, or has no such layers.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if model.training:
        raise Refusal("model", "be in evaluation, model.eval()", training=True)
    seen = observe(model, inputs, layers)
    fresh = {layer.tapped.name: layer for layer in observe(model, _fresh(model, inputs), layers)}
    values = getattr(model, "config", None)
    config = json.loads(json.dumps(values.to_dict(), default=str)) if hasattr(values, "to_dict") else {}
    return [_identified(layer, fresh[layer.tapped.name], config) for layer in seen]


def _identified(layer: ObservedLayer, fresh: ObservedLayer, config: Mapping[str, Any]) -> Identification:
    name = layer.tapped.name
    try:
        found = fit(layer, config)
        spec = found.spec
    except ValueError as error:
        return Identification(name, refusal=str(error))
    index = fresh.tapped.index
    verdict = judge_tap(
        Tapped([fresh.tapped]), {index: spec}, {name: found.weights}, is_causal=found.is_causal
    ).layers[0]
    if verdict.not_judged or verdict.difference is not None:
        where = verdict.not_judged or f"{verdict.difference.stage} is {verdict.difference.worse_ratio:.2g} of its budget"
        return Identification(name, evidence=found.evidence, refusal=f"on fresh inputs {where}")
    share = max(comparison.worse_ratio for comparison in verdict.comparisons)
    return Identification(name, spec, found.weights, found.names, found.is_causal, found.evidence, share)


def _fresh(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of the same shapes with other tokens or numbers."""
    generator = torch.Generator().manual_seed(SEED)
    fresh = dict(inputs)
    for name, x in inputs.items():
        if not isinstance(x, torch.Tensor) or name.endswith("mask") or "position" in name:
            continue
        if x.is_floating_point():
            fresh[name] = torch.randn(x.shape, generator=generator, dtype=x.dtype) * x.std() + x.mean()
        else:
            fresh[name] = x.flatten()[torch.randperm(x.numel(), generator=generator)].reshape(x.shape)
    return fresh
