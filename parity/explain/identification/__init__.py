"""Identify attention layers of a live model by observation.

- `Identification`: the specification and weights of a layer, and the evidence for them.
- `observe`: the recorded calls of a layer; `observe_flax` does so in JAX, by `program`,
  `attention_finder` and `arrangement`.
- `fit`: the fields of the specification that explain them, one module for each kind; `evidence`
  collects them.
- `verify`: the fitted layer in other calls, which `torch_calls` makes.

Start at `identify`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.explain.identification.endpoints import Endpoint
from parity.explain.identification.evidence import Evidence, FittedLayer
from parity.explain.identification.fit import fit
from parity.explain.identification.fresh_inputs import fresh_arrays
from parity.explain.identification.observe import ObservedLayer, observe_layers
from parity.explain.identification.torch_calls import (
    observe_fresh,
    unchanged,
    with_different_axes,
    with_fewer_tokens,
    with_positions_from,
)
from parity.explain.identification.verify import (
    FACTORS,
    FAR,
    FAR_AWAY,
    FEWER,
    FRESH,
    VerifyingCall,
    verify,
)
from parity.measure.core.records import JsonRecord
from parity.measure.core.weights import Weights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Identification(JsonRecord):
    """An identified attention layer, or the reason why it was not identified.

    Attributes:
        name: name of the module.
        spec: its specification; None if it was not identified.
        weights: its canonical weights.
        names: parameter of the module that holds each weight; its full name if another module holds
            it.
        rows: rows of that parameter, for each weight that does not hold all of them once and in
            order: of a packed projection, or with copies of heads.
        inputs: description of the inputs of its projections, by `query`, `key` and `value`:
            arguments of the module, sums of them, and outputs of submodules.
        output: description of the path of its output through the module.
        from_call: arguments that each call must pass in addition to the inputs, by their meaning:
            `segment_ids`, `mask`, `bias`, `positions`, `scale`, or `unknown` if the layer accepts
            no other value. Without them, the specification alone does not compute the layer.
        is_causal: whether queries attend to no later key.
        evidence: how each field was found.
        num_tokens: largest number of tokens that it was verified with; behavior with more is
            unknown.
        fewest_tokens: smallest such number; `num_tokens` if the inputs cannot be cut.
        positions: first and last position of each verified run of positions.
        share: error of the layer on fresh inputs, relative to its budget; at most 1.
        reason: first stage that no field explains; empty if there is none.
    """

    name: str
    spec: AttentionSpec | None = None
    weights: Weights = field(default_factory=dict, repr=False)
    names: dict[str, str] = field(default_factory=dict, repr=False)
    rows: dict[str, list[int]] = field(default_factory=dict, repr=False)
    inputs: dict[str, str] = field(default_factory=dict, repr=False)
    output: str = ""
    from_call: dict[str, str] = field(default_factory=dict, repr=False)
    is_causal: bool | None = None
    evidence: list[Evidence] = field(default_factory=list, repr=False)
    num_tokens: int = 0
    fewest_tokens: int = 0
    positions: tuple[tuple[int, int], ...] = ()
    share: float | None = None
    reason: str = ""

    IN_JSON = (
        "name",
        "spec",
        "names",
        "rows",
        "inputs",
        "output",
        "from_call",
        "is_causal",
        "evidence",
        "num_tokens",
        "fewest_tokens",
        "positions",
        "share",
        "reason",
    )

    def __str__(self) -> str:
        if self.spec is None:
            return f"{self.name}: not identified, {self.reason}"
        causal = "not causal"
        if self.is_causal:
            causal = "causal"
        ranges = " and ".join(f"{first} to {last}" for first, last in self.positions)
        counts = " and ".join(map(str, sorted({self.fewest_tokens, self.num_tokens})))
        verified = f"verified with {counts} tokens at positions {ranges}"
        lines = [
            f"{self.name}: {self.spec}, {causal}, {verified}: {self.share:.2g} of its budget",
            f"  inputs: {_listed(self.inputs)}",
            f"  output: {self.output}",
        ]
        if self.from_call:
            lines.append(f"  from its call: {_listed(self.from_call)}")
        lines += [f"  {entry}" for entry in self.evidence]
        return "\n".join(lines)


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def identify(model: Any, inputs: Mapping[str, Any], layers: Any = None) -> list[Identification]:
    """Identify the attention layers of a live torch or Flax model by observing calls of it.

    The first call is fitted field by field. The second call has fresh inputs of the same shapes,
    and every stage of it must be within the budget of the float64 reference, otherwise the layer is
    rejected. A field that the inputs are too short to show, such as a window of 4096 tokens, is
    read from attributes of the module, and its evidence reports that.

    Args:
        model: a float32 model in evaluation mode: a `torch.nn.Module`, a `flax.nnx.Module`, or a
            `flax.linen.Module` that is bound to its variables.
        inputs: keyword arguments of a call: at least 8 tokens of 2 sequences, or 16 of one. An
            attention mask may mark padding.
        layers: names of modules or classes, as in `parity.tap`.

    Returns:
        One result per layer, in order.

    Raises:
        TypeError: if the model is neither a torch nor a Flax module.
        ValueError: if it is in training mode, or has no such layers.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 16}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        >>> model = LlamaModel(LlamaConfig(**sizes, **heads)).eval()
        >>> inputs = {"input_ids": torch.arange(16).reshape(2, 8)}
        >>> parity.identify(model, inputs)[0].spec.num_kv_heads
        2
    """
    if is_flax(model):
        return _identify_flax(model, inputs, layers)
    _check_torch_model(model, inputs)
    with unchanged(model):
        return _identify_torch(model, inputs, layers)


def is_flax(model: Any) -> bool:
    """Return whether a model is a Flax module, without importing Flax."""
    return any(base.__module__.partition(".")[0] == "flax" for base in type(model).__mro__)


# ---- torch ---------------------------------------------------------------------------------------


def _check_torch_model(model: Any, inputs: Mapping[str, Any]) -> None:
    """Check that a model can be identified.

    Raises:
        TypeError: if it is not a torch module.
        ValueError: if it is in training mode, computes in a different dtype, or has a cache.
    """
    import torch

    from parity.port.tapping.torch import CACHES

    if not isinstance(model, torch.nn.Module):
        raise InputTypeError("model", "be a module of torch or Flax", type(model).__name__)
    caches = [name for name in CACHES if inputs.get(name) is not None]
    if caches:
        raise InputError("inputs", "have no cache, which the calls would share", str(caches))
    if model.training:
        raise InputError("model", "be in evaluation, model.eval()", training=True)
    dtypes = {x.dtype for x in model.parameters() if x.is_floating_point()}
    others = dtypes - {torch.float32}
    if others:
        listed = ", ".join(map(str, others))
        raise InputError("model", "compute in float32, model.float()", listed)


def _identify_torch(
    model: torch.nn.Module, inputs: Mapping[str, Any], layers: Any
) -> list[Identification]:
    """Identify the attention layers of a torch model."""
    config = _config_of(model)
    inputs, observed = _observe_torch(model, inputs, layers)
    fitted: dict[str, FittedLayer] = {}
    # The last layers first, so that the first run of a layer is the one that counts.
    for layer in reversed(observed):
        fitted[layer.tapped.name] = _fitted_layer(layer, config, observed)
    calls = _verifying_calls(model, inputs, layers, _entries_of(fitted))
    return [_identified(name, layer, calls) for name, layer in reversed(fitted.items())]


def _config_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the configuration of a model of transformers, as in its file; nothing of others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    return json.loads(json.dumps(config.to_dict(), default=str))


def _observe_torch(
    model: torch.nn.Module, inputs: Mapping[str, Any], layers: Any
) -> tuple[Mapping[str, Any], list[ObservedLayer]]:
    """Call a model at positions that show RoPE; return the inputs and its layers."""
    observed = observe_layers(model, inputs, layers)
    positions = [layer.values["positions"] for layer in observed if "positions" in layer.values]
    if any(x.min() > 0 for x in positions):
        # RoPE does not rotate a token at position 0, which identifies features.
        from_zero = with_positions_from(model, inputs, 0)
        return inputs, observe_layers(model, from_zero or inputs, layers)
    on_axes = with_different_axes(model, inputs, observed)
    if on_axes is not None:
        return on_axes, observe_layers(model, on_axes, layers)
    return inputs, observed


def _entries_of(fitted: Mapping[str, FittedLayer]) -> set[Endpoint]:
    """Return the submodules that receive inputs of attention, by their full names."""
    entries = set()
    for name, layer in fitted.items():
        for entry in layer.entries:
            full_name = entry.name
            if name:
                full_name = f"{name}.{entry.name}"
            entries.add(Endpoint(full_name, entry.call))
    return entries


def _verifying_calls(
    model: torch.nn.Module, inputs: Mapping[str, Any], layers: Any, entries: set[Endpoint]
) -> list[VerifyingCall]:
    """Call a model with other inputs."""
    fresh, observed = observe_fresh(model, inputs, layers)
    calls = [VerifyingCall(FRESH, 1.0, observed)]
    for name, factor in FACTORS.items():
        factors: dict[tuple[str, int], float] = dict.fromkeys(entries, factor)
        observed = observe_layers(model, fresh, layers, factors=factors)
        calls.append(VerifyingCall(name, factor, observed))
    far, fewer = with_positions_from(model, fresh, FAR), with_fewer_tokens(fresh)
    for name, other_inputs in ((FAR_AWAY, far), (FEWER, fewer)):
        if other_inputs is None:
            continue
        # Learned positions may end earlier, and a module may need its own lengths.
        with suppress(Exception):
            observed = observe_layers(model, other_inputs, layers)
            calls.append(VerifyingCall(name, 1.0, observed))
    return calls


# ---- Flax ----------------------------------------------------------------------------------------


def _identify_flax(model: Any, inputs: Mapping[str, Any], layers: Any) -> list[Identification]:
    """Identify the attention layers of a Flax model."""
    from parity.explain.identification.observe_flax import FlaxObserver

    observer = FlaxObserver(model, inputs, layers)
    fitted: dict[str, FittedLayer] = {}
    for layer in observer.observed:
        name = layer.tapped.name
        bases = observer.possible_bases(name)
        fitted[name] = _fitted_layer(layer, bases, from_call=observer.from_call(name))
        order = observer.arrangements[name].order_description
        if order:
            num_kv_heads = layer.values["k"].shape[1]
            fitted[name].evidence.append(Evidence("num_kv_heads", num_kv_heads, order))

    fresh = fresh_arrays({name: np.asarray(x) for name, x in observer.inputs.items()})
    calls = [VerifyingCall(FRESH, 1.0, observer.observe(fresh))]
    for call_name, factor in FACTORS.items():
        calls.append(VerifyingCall(call_name, factor, observer.observe(fresh, factor)))
    far = VerifyingCall(FAR_AWAY, 1.0, observer.observe_far(fresh, FAR))

    identified = []
    for name in observer.layers:
        if name in observer.rejections:
            identified.append(Identification(name, reason=observer.rejections[name]))
            continue
        calls_of_layer = list(calls)
        if far.runs_of(name):
            calls_of_layer.append(far)
        layer = _identified(name, fitted[name], calls_of_layer)
        identified.append(replace(layer, names=observer.parameter_names(name, layer.names)))
    return identified


# ---- One layer -----------------------------------------------------------------------------------


def _fitted_layer(
    layer: ObservedLayer,
    config: Mapping[str, Any],
    others: Sequence[ObservedLayer] = (),
    from_call: Mapping[str, str] | None = None,
) -> FittedLayer:
    """Fit a layer among others of the same call; if that fails, record the reason.

    Args:
        layer: the layer.
        config: configuration of its model.
        others: other layers of its model.
        from_call: arguments that hold parts of the call, if they are known.
    """
    fitted = FittedLayer(from_call=dict(from_call or {}))
    try:
        fit(layer, config, fitted, others)
    except (ValueError, TypeError) as error:
        fitted.reason = str(error)
    return fitted


def _identified(name: str, fitted: FittedLayer, calls: Sequence[VerifyingCall]) -> Identification:
    """Verify a fitted layer in other calls, and return it."""
    rejected = Identification(name, from_call=fitted.from_call, evidence=fitted.evidence)
    if fitted.reason:
        return replace(rejected, reason=fitted.reason)
    try:
        verification = verify(name, fitted, calls)
    except (ValueError, TypeError) as error:
        return replace(rejected, reason=str(error))
    inputs = dict(fitted.descriptions)
    output = inputs.pop("output")
    return Identification(
        name,
        spec=fitted.spec,
        weights=fitted.weights,
        names=fitted.names,
        rows=fitted.rows,
        inputs=inputs,
        output=output,
        from_call=fitted.from_call,
        is_causal=fitted.is_causal,
        evidence=fitted.evidence,
        num_tokens=verification.num_tokens,
        fewest_tokens=verification.fewest_tokens,
        positions=verification.positions,
        share=verification.share,
    )
