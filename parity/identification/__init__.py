"""Identify attention layers of a live model by observation."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_spec import AttentionSpec, Refusal, WrongType
from parity.core.records import JsonRecord
from parity.core.weights import Weights
from parity.diagnosis.taps import judge_tap
from parity.identification.ends import between, words_of
from parity.identification.fit import fit, fit_clip, positions_on_axes
from parity.identification.found import Evidence, Fit
from parity.identification.observe import ObservedLayer, observe
from parity.identification.padding import without_padding
from parity.tapping.record import Tapped

if TYPE_CHECKING:
    import torch

SEED = 0  # of fresh inputs

FACTORS = (1.0, 16.0, 1.0 / 64.0)
"""Factors of the inputs of projections in the calls that verify a layer."""

FAR = 20000
"""Position of the first token in the call that verifies RoPE far away."""


PLACES = ("position", "grid", "size")
"""Parts of the names of inputs that say where tokens are."""


@dataclass(frozen=True)
class Identification(JsonRecord):
    """An attention layer that was identified, or the reason why not.

    Attributes:
        name: of the module.
        spec: its specification; None if it was not identified.
        weights: its canonical weights.
        names: the parameter of the module that each weight is, or is part of; its full name if another module holds it.
        inputs: inputs of its projections in words, by `query`, `key` and `value`. They name arguments of the module,
            sums of them, and outputs of submodules.
        output: the path of its output through the module, in words.
        is_causal: whether queries attend to no later key.
        evidence: how each field was found.
        num_tokens: tokens that it was verified with; behavior with more of them is unknown.
        positions: the first and the last of each run of positions that it was verified at.
        share: error of the layer on fresh inputs, as a share of its budget; at most 1.
        refusal: the first stage that nothing explains; empty if there is none.
    """

    name: str
    spec: AttentionSpec | None = None
    weights: Weights = field(default_factory=dict, repr=False)
    names: dict[str, str] = field(default_factory=dict, repr=False)
    inputs: dict[str, str] = field(default_factory=dict, repr=False)
    output: str = ""
    is_causal: bool | None = None
    evidence: list[Evidence] = field(default_factory=list, repr=False)
    num_tokens: int = 0
    positions: tuple[tuple[int, int], ...] = ()
    share: float | None = None
    refusal: str = ""

    IN_JSON = (
        *("name", "spec", "names", "inputs", "output", "is_causal", "evidence"),
        *("num_tokens", "positions", "share", "refusal"),
    )

    def __str__(self) -> str:
        if self.spec is None:
            return f"{self.name}: not identified, {self.refusal}"
        causal = "causal" if self.is_causal else "not causal"
        places = " and ".join(f"{first} to {last}" for first, last in self.positions)
        verified = f"verified with {self.num_tokens} tokens at positions {places}"
        lines = [f"{self.name}: {self.spec}, {causal}, {verified}: {self.share:.2g} of its budget"]
        lines.append(f"  inputs: {', '.join(f'{side}={words}' for side, words in self.inputs.items())}")
        lines.append(f"  output: {self.output}")
        return "\n".join([*lines, *(f"  {each}" for each in self.evidence)])


def identify(model: Any, inputs: Mapping[str, Any], layers: Any = None) -> list[Identification]:
    """Identify the attention layers of a live model of torch or Flax by observing calls of it.

    The first call is fitted, field by field. The second one has fresh inputs of the same shapes, and every stage of it
    must be within the budget of the float64 reference. What is not is refused. What the inputs are too short to show,
    such as a window of 4096 tokens, is read from attributes of the module, and its evidence says so.

    Args:
        model: a module in float32 and in evaluation: a `torch.nn.Module`, a `flax.nnx.Module`, or a
            `flax.linen.Module` that is bound to its variables.
        inputs: keywords of a call: at least 8 tokens of 2 sequences, or 16 of one. An attention mask may tell of
            padding.
        layers: names of modules or classes, as `parity.tap` takes them.

    Returns:
        One for each layer, in order.

    Raises:
        TypeError: if the model is of another kind.
        ValueError: if it is training, or has no such layers.
    """
    if any(each.__module__.partition(".")[0] == "flax" for each in type(model).__mro__):
        return _identify_flax(model, inputs, layers)
    import torch

    from parity.tapping.torch import CACHES

    if not isinstance(model, torch.nn.Module):
        raise WrongType("model", "be a module of torch or Flax", type(model).__name__)
    if cache := [name for name in CACHES if inputs.get(name) is not None]:
        raise Refusal("inputs", "have no cache, which the calls would share", str(cache))
    if model.training:
        raise Refusal("model", "be in evaluation, model.eval()", training=True)
    values: Any = getattr(model, "config", None)
    config = json.loads(json.dumps(values.to_dict(), default=str)) if hasattr(values, "to_dict") else {}
    seen = observe(model, inputs, layers)
    if any(layer.values["positions"].min() > 0 for layer in seen if "positions" in layer.values):
        seen = observe(model, _at(model, inputs, 0) or inputs, layers)  # where the first token is not turned
    elif (apart := _apart(model, inputs, seen)) is not None:
        inputs = apart
        seen = observe(model, inputs, layers)
    found = {layer.tapped.name: _fitted(layer, config) for layer in reversed(seen)}
    ends = {_joined(name, end) for name, each in found.items() for end in each.entries}
    other = _fresh(inputs)
    calls = [observe(model, other, layers, factors=dict.fromkeys(ends, factor)) for factor in FACTORS]
    far = _at(model, other, FAR)
    if far is not None:
        with suppress(IndexError, RuntimeError):  # learned positions may end before
            calls.append(observe(model, far, layers))
    return [_identified(name, each, calls) for name, each in reversed(found.items())]


def _identify_flax(model: Any, inputs: Mapping[str, Any], layers: Any) -> list[Identification]:
    """Identify the attention layers of a Flax model."""
    from parity.identification.observe_flax import FlaxObserver, fresh_arrays

    observer = FlaxObserver(model, inputs, layers)
    found = {each.tapped.name: _fitted(each, observer.bases(each.tapped.name)) for each in observer.seen}
    other = fresh_arrays(observer.inputs, SEED)
    calls = [observer.observe(other, factor) for factor in FACTORS]
    far = observer.observe_far(other, FAR)
    identified = []
    for name in observer.layers:
        if name in observer.refusals:
            identified.append(Identification(name, refusal=observer.refusals[name]))
            continue
        is_far = any(each.tapped.name == name for each in far)
        layer = _identified(name, found[name], [*calls, far] if is_far else calls)
        names = {weight: observer.names.get(f"{name} {each}", each) for weight, each in layer.names.items()}
        identified.append(replace(layer, names=names))
    return identified


def _joined(name: str, other: str) -> str:
    """Return the name in its model of a submodule of a layer."""
    return f"{name}.{other}" if name else other


def _fitted(layer: ObservedLayer, config: Mapping[str, Any]) -> Fit:
    """Fit a layer, and note the reason if that fails."""
    found = Fit()
    try:
        fit(layer, config, found)
    except (ValueError, TypeError) as error:
        found.refusal = str(error)
    return found


def _identified(name: str, found: Fit, calls: list[list[ObservedLayer]]) -> Identification:
    """Return a layer that was fitted and is verified."""
    if found.refusal:
        return Identification(name, evidence=found.evidence, refusal=found.refusal)
    own = [[each for each in call if each.tapped.name == name] for call in calls]
    runs = zip(own, (*FACTORS, 1.0), CALLS, strict=False)
    try:
        if own[LARGE] and "latent" not in found.fields:
            fit_clip(own[LARGE][0], [own[LARGE][0].submodule(*found.ends["value"])], found)
        share = max(_share(layers, factor, found, what) for layers, factor, what in runs)
    except (ValueError, TypeError) as error:
        return Identification(name, evidence=found.evidence, refusal=str(error))
    num_tokens = without_padding(own[0][0]).values["q"].shape[2]
    places: list[Any] = [each.values.get("positions", np.arange(num_tokens)) for call in own for each in call]
    spec = found.spec
    ranges = {(int(x.min()), int(x.max())) for x in places} if spec.has_positions else {(0, num_tokens - 1)}
    inputs = {side: words for side, words in found.words.items() if side != "output"}
    known = found.weights, found.names, inputs, found.words["output"], found.is_causal, found.evidence
    return Identification(name, spec, *known, num_tokens, tuple(sorted(ranges)), share)


CALLS = ("fresh inputs", "large inputs", "small inputs", "far positions")
"""The calls that verify a layer, in words."""


LARGE = 1
"""The index of the call with large inputs."""


def _share(layers: list[ObservedLayer], factor: float, found: Fit, what: str) -> float:
    """Return the largest error of the calls of a layer, as a share of its budget.

    Raises:
        ValueError: if it is above the budget, the inputs are others than they were, or the layer did not run.
    """
    if not layers:
        raise Refusal("the layer", "run in each call", f"none with {what}")
    spec, shares = found.spec, list[float]()
    for layer in layers:
        if spec.rope is None and what == CALLS[-1]:
            layer = _counted(layer)
        if spec.rope is not None and spec.rope.sections is not None and "positions" not in layer.values:
            layer.values["positions"] = positions_on_axes(layer, found)
        words = words_of(layer, found.ends, factor)
        if words != found.words:
            raise Refusal("inputs", f"be what they were with {what}", f"{words}")
        tapped = between(layer, found.ends).tapped
        judged = Tapped([tapped]), {tapped.index: spec}, {tapped.index: found.weights}
        verdict = judge_tap(*judged, is_causal=found.is_causal, diagnoses=False).layers[0]
        difference = verdict.difference
        if verdict.not_judged:
            raise Refusal("the layer", f"be judged on {what}", verdict.not_judged)
        if difference is not None:
            ratio = f"{difference.worse_ratio:.2g} times that"
            raise Refusal(difference.stage, f"be within its budget on {what}", ratio)
        shares += [comparison.worse_ratio for comparison in verdict.comparisons]
    return max(shares)


def _counted(layer: ObservedLayer) -> ObservedLayer:
    """Return a layer without RoPE as if positions were 0, 1, …, because it counts tokens itself."""
    (call,) = layer.tapped.calls
    values = {name: x for name, x in call.values.items() if name != "positions"}
    return replace(layer, tapped=replace(layer.tapped, calls=[replace(call, values=values)]))


def _at(model: torch.nn.Module, inputs: Mapping[str, Any], first: int) -> dict[str, Any] | None:
    """Return the inputs at positions from a first one on, if the model accepts positions."""
    import torch

    tokens = inputs.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or not _accepts_positions(model):
        return None
    near = inputs.get("position_ids")
    near = torch.arange(tokens.shape[1])[None].expand(tokens.shape) if near is None else near
    return {**inputs, "position_ids": first + near - near.min()}


def _apart(model: torch.nn.Module, inputs: Mapping[str, Any], seen: list[ObservedLayer]) -> dict[str, Any] | None:
    """Return the inputs with positions that differ on their axes, if they have axes and are the same on all.

    They are those of a video of 2 x 3 patches, in time, row and column.
    """
    import torch

    found = (layer.values.get("positions") for layer in seen)
    places = next((x for x in found if x is not None and x.ndim == 3 and len(x) == 3), None)
    if places is None or (places != places[:1]).any() or not _accepts_positions(model):
        return None
    place = torch.arange(places.shape[2])
    frame = place // 6
    apart = torch.stack([frame, frame + place % 6 // 3, frame + place % 3])
    return {**inputs, "position_ids": apart[:, None].repeat(1, places.shape[1], 1)}


def _accepts_positions(model: torch.nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _fresh(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of the same shapes with other tokens or numbers."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    fresh = dict(inputs)
    for name, x in inputs.items():
        if not isinstance(x, torch.Tensor) or name.endswith("mask") or any(word in name for word in PLACES):
            continue
        if x.is_floating_point():
            fresh[name] = torch.randn(x.shape, generator=generator, dtype=x.dtype) * x.std() + x.mean()
        else:
            fresh[name] = x.flatten()[torch.randperm(x.numel(), generator=generator)].reshape(x.shape)
        first = next(each for each, other in inputs.items() if other is x)
        fresh[name] = fresh[first]  # one tensor stays one input
    return fresh
