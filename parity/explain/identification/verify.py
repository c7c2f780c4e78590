"""Verify fitted layers in other calls of their model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mha_spec import InputError
from parity.explain.diagnosis.taps import check_tap
from parity.explain.identification.call_masks import with_call_mask
from parity.explain.identification.endpoints import between_endpoints, describe_endpoints
from parity.explain.identification.evidence import FittedLayer
from parity.explain.identification.fit import fit_clip, positions_on_axes
from parity.explain.identification.from_call import with_segments
from parity.explain.identification.observe import ObservedLayer
from parity.explain.identification.padding import without_padding
from parity.explain.identification.sharing import describe_source
from parity.port.tapping.record import Tapped

FRESH = "fresh inputs"
LARGE = "large inputs"
SMALL = "small inputs"
FAR_AWAY = "far positions"
FEWER = "fewer tokens"
"""Names of the calls that verify a layer."""

FACTORS = {LARGE: 16.0, SMALL: 1.0 / 64.0}
"""Factors of the inputs of projections in calls with fresh inputs: large ones show caps and clips,
small ones the eps of norms.
"""

FAR = 20000
"""Position of the first token in the call that verifies RoPE at large positions."""


@dataclass(frozen=True)
class VerifyingCall:
    """A call that verifies layers.

    Attributes:
        name: its name, for messages.
        factor: factor of the inputs of projections.
        layers: all layers of the model in it.
    """

    name: str
    factor: float
    layers: Sequence[ObservedLayer]

    def runs_of(self, name: str) -> list[ObservedLayer]:
        """Return the runs of a layer in it."""
        return [layer for layer in self.layers if layer.tapped.name == name]


@dataclass(frozen=True)
class Verification:
    """The result of verifying a layer.

    Attributes:
        share: largest error, relative to its budget.
        num_tokens: largest number of tokens of a call.
        fewest_tokens: smallest such number.
        positions: first and last position of each run of positions.
    """

    share: float
    num_tokens: int
    fewest_tokens: int
    positions: tuple[tuple[int, int], ...]


def verify(name: str, fitted: FittedLayer, calls: Sequence[VerifyingCall]) -> Verification:
    """Compare a fitted layer with each of its runs in other calls.

    Args:
        name: name of the layer.
        fitted: its specification and weights. A clip that only large inputs show is added.
        calls: the calls.

    Raises:
        ValueError: if a run exceeds its budget, or is not one of such a layer.
    """
    runs_of_call = {call.name: call.runs_of(name) for call in calls}
    for call_name, runs in runs_of_call.items():
        _check_observed(runs, call_name)
    if "latent" not in fitted.fields and "shared_kv" not in fitted.fields:
        large = runs_of_call[LARGE][0]
        fit_clip(large, [large.submodule(*fitted.endpoints["value"])], fitted)
    counts = []
    for runs in runs_of_call.values():
        counts.append(without_padding(runs[0]).values["q"].shape[2])

    shares = []
    ranges: set[tuple[int, int]] = set()
    for call in calls:
        for run in runs_of_call[call.name]:
            _check_descriptions(run, fitted, call)
            layer = _with_positions_on_axes(run, fitted)
            shares.append(_share_of_budget(layer, fitted, call))
            positions = layer.values.get("positions")
            if positions is None or not fitted.spec.has_positions:
                ranges.add((0, max(counts) - 1))
            else:
                ranges.add((int(positions.min()), int(positions.max())))
    return Verification(max(shares), max(counts), min(counts), _widest(ranges))


def _widest(ranges: set[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges that lie in no other one, in order."""
    widest = []
    for first, last in sorted(ranges):
        others = ranges - {(first, last)}
        if not any(begin <= first and last <= end for begin, end in others):
            widest.append((first, last))
    return tuple(widest)


def _check_observed(runs: Sequence[ObservedLayer], call_name: str) -> None:
    """Reject a layer that did not run in a call, or whose attention was not observed in it."""
    if not runs:
        raise InputError("the layer", "run in each call", f"none with {call_name}")
    for layer in runs:
        stages = ("q", "k", "v", "context", "output")
        missing = [stage for stage in stages if stage not in layer.values]
        if missing:
            reason = layer.tapped.not_observed or f"no {' or '.join(missing)}"
            raise InputError("the layer", f"be attention with {call_name}", reason)


def _check_descriptions(run: ObservedLayer, fitted: FittedLayer, call: VerifyingCall) -> None:
    """Check that the inputs and the output have the positions that they had in the fitted call."""
    descriptions = describe_endpoints(run, fitted.endpoints, call.factor)
    if "shared_kv" in fitted.fields:
        descriptions |= describe_source(run, call.layers)
    if descriptions != fitted.descriptions:
        raise InputError("inputs", f"be what they were with {call.name}", f"{descriptions}")


def _with_positions_on_axes(run: ObservedLayer, fitted: FittedLayer) -> ObservedLayer:
    """Return a layer with positions if RoPE has several axes, and the call has no positions."""
    rope = fitted.spec.rope
    if rope is None or rope.sections is None or "positions" in run.values:
        return run
    return run.with_values({**run.values, "positions": positions_on_axes(run, fitted)})


def _share_of_budget(layer: ObservedLayer, fitted: FittedLayer, call: VerifyingCall) -> float:
    """Return the largest error of a layer in a call, relative to its budget.

    Raises:
        ValueError: if it exceeds the budget.
    """
    if fitted.spec.rope is None and call.name == FAR_AWAY:
        # Such a layer counts tokens itself, from 0.
        values = dict(layer.values)
        values.pop("positions", None)
        layer = layer.with_values(values)
    layer = with_segments(between_endpoints(layer, fitted.endpoints), fitted)
    tapped = with_call_mask(layer, fitted.mask, is_large=call.factor > 1.0).tapped
    verdict = check_tap(
        Tapped([tapped]),
        {tapped.index: fitted.spec},
        {tapped.index: fitted.weights},
        is_causal=fitted.is_causal,
        diagnoses=False,
    ).layers[0]
    if verdict.not_compared:
        raise InputError("the layer", f"be comparable on {call.name}", verdict.not_compared)
    difference = verdict.difference
    if difference is not None:
        ratio = f"{difference.worse_ratio:.2g} times that"
        raise InputError(difference.stage, f"be within its budget on {call.name}", ratio)
    return max(comparison.worse_ratio for comparison in verdict.comparisons)
