"""Identify attention layers of a live model by observation.

- `Identification`: the specification and weights of a layer, and the evidence for them.
- `observe`: the recorded calls of a layer; `observe_flax` those of JAX.
- `fit`: the fields of the specification that explain them, one module for each kind.

Start at `identify`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.explain.diagnosis.taps import check_tap
from parity.explain.identification.call_masks import with_call_mask
from parity.explain.identification.ends import between, words_of
from parity.explain.identification.fit import LEAST_TOKENS, fit, fit_clip, positions_on_axes
from parity.explain.identification.found import Evidence, Fit
from parity.explain.identification.fresh import WAYS, Way, fresh_arrays
from parity.explain.identification.from_call import with_segments
from parity.explain.identification.observe import ObservedLayer, observe_layers
from parity.explain.identification.padding import without_padding
from parity.explain.identification.sharing import words_of_source
from parity.measure.core.arrays import to_numpy
from parity.measure.core.records import JsonRecord
from parity.measure.core.weights import Weights
from parity.port.tapping.record import Tapped

if TYPE_CHECKING:
    import torch

FACTORS = {"large inputs": 16.0, "small inputs": 1.0 / 64.0}
"""Factors of the inputs of projections in the calls that verify a layer."""

FRESH, FAR_AWAY, FEWER = "fresh inputs", "far positions", "fewer tokens"
"""Names of the other calls that verify it."""

FAR = 20000
"""Position of the first token in the call that verifies RoPE at large positions."""


@dataclass(frozen=True)
class Identification(JsonRecord):
    """An identified attention layer, or the reason why it was not identified.

    Attributes:
        name: of the module.
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
        refusal: first stage that no field explains; empty if there is none.
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
    refusal: str = ""

    IN_JSON = (
        *(
            "name",
            "spec",
            "names",
            "rows",
            "inputs",
            "output",
            "from_call",
            "is_causal",
            "evidence",
        ),
        *("num_tokens", "fewest_tokens", "positions", "share", "refusal"),
    )

    def __str__(self) -> str:
        if self.spec is None:
            return f"{self.name}: not identified, {self.refusal}"
        causal = "causal" if self.is_causal else "not causal"
        places = " and ".join(f"{first} to {last}" for first, last in self.positions)
        counts = " and ".join(map(str, sorted({self.fewest_tokens, self.num_tokens})))
        verified = f"verified with {counts} tokens at positions {places}"
        lines = [f"{self.name}: {self.spec}, {causal}, {verified}: {self.share:.2g} of its budget"]
        lines.append(
            f"  inputs: {', '.join(f'{side}={words}' for side, words in self.inputs.items())}"
        )
        lines.append(f"  output: {self.output}")
        if self.from_call:
            lines.append(
                f"  from its call: "
                f"{', '.join(f'{part}={name}' for part, name in self.from_call.items())}"
            )
        return "\n".join([*lines, *(f"  {each}" for each in self.evidence)])


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
    """
    if is_flax(model):
        return _identify_flax(model, inputs, layers)
    import torch

    from parity.port.tapping.torch import CACHES

    if not isinstance(model, torch.nn.Module):
        raise InputTypeError("model", "be a module of torch or Flax", type(model).__name__)
    if cache := [name for name in CACHES if inputs.get(name) is not None]:
        raise InputError("inputs", "have no cache, which the calls would share", str(cache))
    if model.training:
        raise InputError("model", "be in evaluation, model.eval()", training=True)
    if dtypes := {x.dtype for x in model.parameters() if x.is_floating_point()} - {torch.float32}:
        raise InputError("model", "compute in float32, model.float()", ", ".join(map(str, dtypes)))
    with _unchanged(model):
        return _identify_torch(model, inputs, layers)


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Restore attributes and buffers of modules on exit: some RoPE modules grow with the positions
    of a call.
    """
    before = {module: (dict(vars(module)), dict(module._buffers)) for module in model.modules()}
    try:
        yield
    finally:
        for module, (values, buffers) in before.items():
            for name in vars(module).keys() - values.keys():
                del module.__dict__[name]
            module.__dict__.update(values)
            module._buffers.clear()
            module._buffers.update(buffers)


def _identify_torch(
    model: torch.nn.Module, inputs: Mapping[str, Any], layers: Any
) -> list[Identification]:
    """Identify the attention layers of a torch model."""
    values: Any = getattr(model, "config", None)
    config = (
        json.loads(json.dumps(values.to_dict(), default=str)) if hasattr(values, "to_dict") else {}
    )
    seen = observe_layers(model, inputs, layers)
    if any(layer.values["positions"].min() > 0 for layer in seen if "positions" in layer.values):
        seen = observe_layers(
            model, _at(model, inputs, 0) or inputs, layers
        )  # RoPE does not rotate a token at position 0
    elif (apart := _apart(model, inputs, seen)) is not None:
        inputs = apart
        seen = observe_layers(model, inputs, layers)
    found = {layer.tapped.name: _fitted(layer, config, seen) for layer in reversed(seen)}
    ends = {
        end._replace(name=_joined(name, end.name))
        for name, each in found.items()
        for end in each.entries
    }
    other, first = _first_fresh(model, inputs, layers)
    calls = [VerifyingCall(FRESH, 1.0, first)]
    for what, factor in FACTORS.items():
        calls.append(
            VerifyingCall(
                what,
                factor,
                observe_layers(model, other, layers, factors=dict.fromkeys(ends, factor)),
            )
        )
    for what, given in ((FAR_AWAY, _at(model, other, FAR)), (FEWER, _fewer(other))):
        if given is not None:
            with suppress(
                Exception
            ):  # learned positions may end earlier, and a module may need its own lengths
                calls.append(VerifyingCall(what, 1.0, observe_layers(model, given, layers)))
    return [_identified(name, each, calls) for name, each in reversed(found.items())]


def _first_fresh(
    model: torch.nn.Module, inputs: Mapping[str, Any], layers: Any
) -> tuple[dict[str, Any], list[ObservedLayer]]:
    """Return fresh inputs that the model accepts, and its layers in a call with them.

    Raises:
        ValueError: if the model fails with each way to draw them.
    """
    error: Exception | None = None
    for way in WAYS:
        other = _fresh(inputs, way)
        try:
            return other, observe_layers(model, other, layers)
        except Exception as wrong:  # the model's own code may raise anything
            error = wrong
    raise InputError(
        "model", "run with other inputs of the same shapes", f"{error!r:.200}"
    ) from error


def is_flax(model: Any) -> bool:
    """Return whether a model is a Flax module, without importing Flax."""
    return any(each.__module__.partition(".")[0] == "flax" for each in type(model).__mro__)


def _identify_flax(model: Any, inputs: Mapping[str, Any], layers: Any) -> list[Identification]:
    """Identify the attention layers of a Flax model."""
    from parity.explain.identification.observe_flax import FlaxObserver

    observer = FlaxObserver(model, inputs, layers)
    found: dict[str, Fit] = {}
    for each in observer.seen:
        name = each.tapped.name
        found[name] = _fitted(each, observer.bases(name), from_call=observer.from_call(name))
        if words := observer.arranged[name].words_of_order:
            found[name].evidence.append(Evidence("num_kv_heads", each.values["k"].shape[1], words))
    other = fresh_arrays({name: np.asarray(x) for name, x in observer.inputs.items()})
    calls = [VerifyingCall(FRESH, 1.0, observer.observe(other, 1.0))]
    calls += [
        VerifyingCall(what, factor, observer.observe(other, factor))
        for what, factor in FACTORS.items()
    ]
    far = VerifyingCall(FAR_AWAY, 1.0, observer.observe_far(other, FAR))
    identified = []
    for name in observer.layers:
        if name in observer.refusals:
            identified.append(Identification(name, refusal=observer.refusals[name]))
            continue
        is_far = any(each.tapped.name == name for each in far.layers)
        layer = _identified(name, found[name], [*calls, far] if is_far else calls)
        names = {
            weight: observer.names.get(f"{name} {each}", each)
            for weight, each in layer.names.items()
        }
        identified.append(replace(layer, names=names))
    return identified


def _joined(name: str, other: str) -> str:
    """Return the full name of a submodule of a layer."""
    return f"{name}.{other}" if name else other


def _fitted(
    layer: ObservedLayer,
    config: Mapping[str, Any],
    others: Sequence[ObservedLayer] = (),
    from_call: Mapping[str, str] | None = None,
) -> Fit:
    """Fit a layer among others of the same call; if that fails, record the reason.

    Args:
        layer: the layer.
        config: configuration of its model.
        others: other layers of its model.
        from_call: arguments that hold parts of the call, if they are known.
    """
    found = Fit(from_call=dict(from_call or {}))
    try:
        fit(layer, config, found, others)
    except (ValueError, TypeError) as error:
        found.refusal = str(error)
    return found


def _identified(name: str, found: Fit, calls: list[VerifyingCall]) -> Identification:
    """Verify a fitted layer in other calls, and return it."""
    if found.refusal:
        return Identification(
            name, from_call=found.from_call, evidence=found.evidence, refusal=found.refusal
        )
    own = [
        call._replace(
            layers=[each for each in call.layers if each.tapped.name == name], others=call.layers
        )
        for call in calls
    ]
    try:
        for call in own:
            _check_seen(call)
        large = next(call.layers[0] for call in own if call.what == "large inputs")
        if not {"latent", "shared_kv"} & found.fields.keys():
            fit_clip(large, [large.submodule(*found.ends["value"])], found)
        share = max(_share(call, found) for call in own)
    except (ValueError, TypeError) as error:
        return Identification(
            name, from_call=found.from_call, evidence=found.evidence, refusal=str(error)
        )
    counts = [without_padding(call.layers[0]).values["q"].shape[2] for call in own]
    num_tokens = max(counts)
    places: list[Any] = [
        each.values.get("positions", np.arange(num_tokens)) for call in own for each in call.layers
    ]
    spec = found.spec
    runs = (
        {(int(x.min()), int(x.max())) for x in places}
        if spec.has_positions
        else {(0, num_tokens - 1)}
    )
    ranges = {x for x in runs if not any(y != x and y[0] <= x[0] and x[1] <= y[1] for y in runs)}
    inputs = {side: words for side, words in found.words.items() if side != "output"}
    known = found.weights, found.names, found.rows, inputs, found.words["output"], found.from_call
    known = *known, found.is_causal, found.evidence
    return Identification(name, spec, *known, num_tokens, min(counts), tuple(sorted(ranges)), share)


class VerifyingCall(NamedTuple):
    """A call that verifies layers.

    Attributes:
        what: its name, for messages.
        factor: of the inputs of projections.
        layers: layers observed in it.
        others: all layers of the model in it.
    """

    what: str
    factor: float
    layers: list[ObservedLayer]
    others: Sequence[ObservedLayer] = ()


def _check_seen(call: VerifyingCall) -> None:
    """Reject a layer that did not run in a call, or whose attention was not observed in it."""
    if not call.layers:
        raise InputError("the layer", "run in each call", f"none with {call.what}")
    for layer in call.layers:
        if missing := [
            name for name in ("q", "k", "v", "context", "output") if name not in layer.values
        ]:
            reason = layer.tapped.not_seen or f"no {' or '.join(missing)}"
            raise InputError("the layer", f"be attention with {call.what}", reason)


def _share(call: VerifyingCall, found: Fit) -> float:
    """Return the largest error of a layer in a call, relative to its budget.

    Raises:
        ValueError: if it exceeds the budget, or the inputs are described differently from before.
    """
    what, factor, layers, _ = call
    spec, shares = found.spec, list[float]()
    for layer in layers:
        if spec.rope is None and what == FAR_AWAY:
            layer = _counted(layer)
        if (
            spec.rope is not None
            and spec.rope.sections is not None
            and "positions" not in layer.values
        ):
            layer.values["positions"] = positions_on_axes(layer, found)
        words = words_of(layer, found.ends, factor) | words_of_source(
            layer, call.others if "shared_kv" in found.fields else []
        )
        if words != found.words:
            raise InputError("inputs", f"be what they were with {what}", f"{words}")
        layer = with_segments(between(layer, found.ends), found)
        tapped = with_call_mask(layer, found.mask, is_large=factor > 1.0).tapped
        judged = Tapped([tapped]), {tapped.index: spec}, {tapped.index: found.weights}
        verdict = check_tap(*judged, is_causal=found.is_causal, diagnoses=False).layers[0]
        difference = verdict.difference
        if verdict.not_compared:
            raise InputError("the layer", f"be comparable on {what}", verdict.not_compared)
        if difference is not None:
            ratio = f"{difference.worse_ratio:.2g} times that"
            raise InputError(difference.stage, f"be within its budget on {what}", ratio)
        shares += [comparison.worse_ratio for comparison in verdict.comparisons]
    return max(shares)


def _counted(layer: ObservedLayer) -> ObservedLayer:
    """Return a layer without RoPE as if positions were 0, 1, …: such a layer counts tokens
    itself.
    """
    return layer.with_values({name: x for name, x in layer.values.items() if name != "positions"})


def _at(model: torch.nn.Module, inputs: Mapping[str, Any], first: int) -> dict[str, Any] | None:
    """Return the inputs with positions from `first` on; None if the model accepts no positions.

    Large positions have a gap, and each sequence begins later than the previous one.
    """
    import torch

    tokens = inputs.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or not _accepts(model, "position_ids"):
        return None
    near = inputs.get("position_ids")
    near = (
        torch.arange(tokens.shape[1], device=tokens.device)[None].expand(tokens.shape)
        if near is None
        else near
    )
    positions = first + near - near.min()
    if first == 0:
        return {**inputs, "position_ids": positions}
    batch_size, num_tokens = tokens.shape
    later = 3 * torch.arange(batch_size)[:, None] + 5 * (
        torch.arange(num_tokens) >= num_tokens // 2
    )
    later = later.to(tokens.device)
    all_seen = (
        {"attention_mask": torch.ones_like(tokens)} if _accepts(model, "attention_mask") else {}
    )
    return {
        **all_seen,
        **inputs,
        "position_ids": positions + later,
    }  # without a mask, a gap starts a segment


def _fewer(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the inputs with about half of the tokens and without the last sequence; None if they
    cannot be cut.
    """
    import torch

    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.ndim > 1}
    first = next(
        (x for x in tensors.values() if x.ndim == (3 if x.is_floating_point() else 2)), None
    )
    if first is None or first.shape[1] < 2 * LEAST_TOKENS - 1:
        return None
    batch_size, num_tokens = first.shape[:2]
    sequences, tokens = max(batch_size - 1, 1), num_tokens // 2 + 1
    cut = dict(inputs)
    for name, x in tensors.items():
        if x.shape[:2] == (batch_size, num_tokens):
            cut[name] = x[:sequences, :tokens]
        elif x.ndim == 3 and x.shape[1:] == (batch_size, num_tokens):  # positions on axes
            cut[name] = x[:, :sequences, :tokens]
        elif x.shape[0] == batch_size:
            cut[name] = x[:sequences]
    is_hidden = any(
        name.endswith("mask") and x.ndim == 2 and not cut[name].any(-1).all()
        for name, x in tensors.items()
    )
    return None if is_hidden else cut


def _apart(
    model: torch.nn.Module, inputs: Mapping[str, Any], seen: list[ObservedLayer]
) -> dict[str, Any] | None:
    """Return the inputs with positions that differ between axes, if they have several equal axes.

    The positions are those of a video of 2 x 3 patches: time, row and column.
    """
    import torch

    found = (layer.values.get("positions") for layer in seen)
    places = next((x for x in found if x is not None and x.ndim == 3 and len(x) == 3), None)
    if places is None or (places != places[:1]).any() or not _accepts(model, "position_ids"):
        return None
    place = torch.arange(places.shape[2])
    frame = place // 6
    apart = torch.stack([frame, frame + place % 6 // 3, frame + place % 3])
    device = next(model.parameters()).device
    return {**inputs, "position_ids": apart[:, None].repeat(1, places.shape[1], 1).to(device)}


def _accepts(model: torch.nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _fresh(inputs: Mapping[str, Any], way: Way) -> dict[str, Any]:
    """Return inputs of the same shapes with other tokens or numbers, on the same device."""
    import torch

    tensors = {
        name: x
        for name, x in inputs.items()
        if isinstance(x, torch.Tensor) and x.dtype != torch.bfloat16
    }
    arrays = fresh_arrays({name: to_numpy(x) for name, x in tensors.items()}, way)
    return {
        **inputs,
        **{name: torch.from_numpy(x).to(tensors[name].device) for name, x in arrays.items()},
    }
