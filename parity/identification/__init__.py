"""Identify attention layers of a live model by what they do."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_spec import AttentionSpec, Refusal, WrongType
from parity.core.records import JsonRecord
from parity.core.weights import Weights
from parity.diagnosis.taps import judge_tap
from parity.identification.fit import Evidence, Fit, fit
from parity.identification.observe import ObservedLayer, observe
from parity.tapping.record import Tapped

if TYPE_CHECKING:
    import torch

SEED = 0  # of fresh inputs

FACTORS = (1.0, 16.0, 1.0 / 64.0)
"""Factors of the input of each layer in the calls that verify it."""

FAR = 4000
"""Position of the first token in the call that verifies RoPE far away."""


@dataclass(frozen=True)
class Identification(JsonRecord):
    """An attention layer, identified by what it did; or why it was not.

    Attributes:
        name: of the module.
        spec: what it computes; None if it was refused.
        weights: its canonical weights.
        names: the parameter of the module that each weight is, or is part of.
        is_causal: whether queries attend to no later key.
        evidence: how each field was found.
        num_tokens: how many tokens it was verified with; what shows only beyond that is not known.
        positions: the first and the last of each run of positions that it was verified at.
        share: error of the layer on fresh inputs, as a share of its budget; at most 1.
        refusal: the first stage that nothing explains; empty if there is none.
    """

    name: str
    spec: AttentionSpec | None = None
    weights: Weights = field(default_factory=dict, repr=False)
    names: dict[str, str] = field(default_factory=dict, repr=False)
    is_causal: bool | None = None
    evidence: list[Evidence] = field(default_factory=list, repr=False)
    num_tokens: int = 0
    positions: tuple[tuple[int, int], ...] = ()
    share: float | None = None
    refusal: str = ""

    IN_JSON = (*("name", "spec", "names", "is_causal", "evidence", "num_tokens", "positions", "share", "refusal"),)

    def __str__(self) -> str:
        if self.spec is None:
            return f"{self.name}: not identified, {self.refusal}"
        causal = "causal" if self.is_causal else "not causal"
        places = " and ".join(f"{first} to {last}" for first, last in self.positions)
        verified = f"verified with {self.num_tokens} tokens at positions {places}"
        lines = [f"{self.name}: {self.spec}, {causal}, {verified}: {self.share:.2g} of its budget"]
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
    import torch

    from parity.tapping.torch import CACHES

    if not isinstance(model, torch.nn.Module):
        raise WrongType("model", "be a torch.nn.Module", type(model).__name__)
    if cache := [name for name in CACHES if inputs.get(name) is not None]:
        raise Refusal("inputs", "have no cache, which the calls would share", str(cache))
    if model.training:
        raise Refusal("model", "be in evaluation, model.eval()", training=True)
    seen = observe(model, inputs, layers)
    other = _fresh(inputs)
    calls = [observe(model, other, layers, factor=factor) for factor in FACTORS]
    far = _far(model, other)
    if far is not None:
        with suppress(IndexError, RuntimeError):  # learned positions may end before
            calls.append(observe(model, far, layers))
    values: Any = getattr(model, "config", None)
    config = json.loads(json.dumps(values.to_dict(), default=str)) if hasattr(values, "to_dict") else {}
    return [_identified(layer, calls, config) for layer in seen]


def _identified(layer: ObservedLayer, calls: list[list[ObservedLayer]], config: Mapping[str, Any]) -> Identification:
    name = layer.tapped.name
    fresh = [next((each for each in call if each.tapped.name == name), None) for call in calls]
    evidence: list[Evidence] = []
    try:
        found = fit(layer, config)
        spec, evidence = found.spec, found.evidence
        shares = [_share(each, found, what) for each, what in zip(fresh, CALLS, strict=False)]
    except (ValueError, TypeError) as error:
        return Identification(name, evidence=evidence, refusal=str(error))
    num_tokens = layer.values["input"].shape[1]
    places: list[Any] = [each.values.get("positions", np.arange(num_tokens)) for each in fresh if each is not None]
    runs = {(int(x.min()), int(x.max())) for x in places} if spec.rope is not None else {(0, num_tokens - 1)}
    known = found.weights, found.names, found.is_causal, evidence
    return Identification(name, spec, *known, num_tokens, tuple(sorted(runs)), max(shares))


CALLS = ("fresh inputs", "large inputs", "small inputs", "far positions")
"""The calls that verify a layer, in words."""


def _share(layer: ObservedLayer | None, found: Fit, what: str) -> float:
    """Return the error of a layer in a call, as a share of its budget.

    Raises:
        ValueError: if it is above the budget, or the layer did not run.
    """
    if layer is None:
        raise Refusal("the layer", "run in each call", f"none with {what}")
    name, specs = layer.tapped.name, {layer.tapped.index: found.spec}
    verdict = judge_tap(Tapped([layer.tapped]), specs, {name: found.weights}, is_causal=found.is_causal).layers[0]
    difference = verdict.difference
    if verdict.not_judged:
        raise Refusal("the layer", f"be judged on {what}", verdict.not_judged)
    if difference is not None:
        raise Refusal(difference.stage, f"be within its budget on {what}", f"{difference.worse_ratio:.2g} times that")
    return max(comparison.worse_ratio for comparison in verdict.comparisons)


def _far(model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the inputs with positions far away, if the model accepts positions."""
    import torch

    tokens = inputs.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    return {**inputs, "position_ids": FAR + torch.arange(tokens.shape[1])[None].expand(tokens.shape)}


def _fresh(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of the same shapes with other tokens or numbers."""
    import torch

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
