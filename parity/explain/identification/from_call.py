"""Find what a call passes to a layer besides its inputs: segments, masks, biases, positions, a
scale.

A specification says nothing of them, so a report names the arguments that hold them. They are found
by experiment: the layer is called again with one argument changed, and the first stage that changes
shows what the argument is.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.identification.call_masks import HIDES
from parity.explain.identification.changed_arguments import (
    changed_argument,
    segment_ids_of,
)
from parity.explain.identification.evidence import FittedLayer
from parity.explain.identification.observe import ObservedLayer
from parity.measure.core.arrays import to_numpy
from parity.port.tapping.record import TappedLayer, is_hidden

SEGMENTS, MASK, BIAS, SCALE, POSITIONS = "segment_ids", "mask", "bias", "scale", "positions"
"""Parts of a call, by the names of the arguments of our own layers."""

UNKNOWN = "unknown"
"""Arguments with no other value that the layer accepts, so that their effect is not observed."""


def parts_from_call(layer: ObservedLayer, inputs: Collection[str]) -> dict[str, str]:
    """Return the arguments that a layer's attention depends on, by the part of a call that they
    are.

    Args:
        layer: the observed layer.
        inputs: names of arguments that are inputs of projections, or added to the output.

    Raises:
        ValueError: if an argument has any other effect.
    """
    if layer.call is None:
        return {}
    num_tokens = layer.values["q"].shape[2]
    arguments = _arguments_of(layer)
    changed: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in inputs:
            continue
        other = changed_argument(value, num_tokens)
        if other is not None:
            changed[name] = other
    if not changed:
        return {}

    try:
        before = _call_again(layer, *layer.call)
    except Exception as error:  # the layer may raise anything
        rule = "run by itself with its arguments of a call"
        raise InputError("the layer", rule, f"{error!r:.120}") from error
    names_of_part: dict[str, list[str]] = {}
    for name, other in changed.items():
        try:
            after = _call_again(layer, *_with_argument(layer, name, other))
        except Exception as error:  # the layer may raise anything
            if segment_ids_of(arguments[name], num_tokens) is not None:
                rule = "have an effect that other values show, because it may hold segments"
                raise InputError(name, rule, f"{error!r:.120}") from error
            names_of_part.setdefault(UNKNOWN, []).append(name)
            continue
        part = _Experiment(name, arguments[name], other, before, after).part()
        if part:
            names_of_part.setdefault(part, []).append(name)
    return {part: " and ".join(names) for part, names in names_of_part.items()}


# ---- Experiments ---------------------------------------------------------------------------------

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def _arguments_of(layer: ObservedLayer) -> dict[str, Any]:
    """Return the arguments of a layer's call, by name."""
    from parity.port.tapping.arguments import arguments_of

    args, kwargs = layer.call or ((), {})
    return arguments_of(layer.module.forward, args, kwargs)


def _with_argument(layer: ObservedLayer, name: str, value: Any) -> Call:
    """Return the arguments of a layer's call with a different value for one."""
    args, kwargs = layer.call or ((), {})
    if name in kwargs:
        return args, {**kwargs, name: value}
    index = 0
    for parameter in inspect.signature(layer.module.forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            # Such arguments are named by the parameter and their number.
            index += int(name.removeprefix(parameter.name))
            break
        if parameter.name == name:
            break
        index += 1
    return (*args[:index], value, *args[index + 1 :]), kwargs


def _call_again(
    layer: ObservedLayer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TappedLayer:
    """Call a layer by itself, and return its record."""
    import torch

    from parity.port.tapping.torch import tap_torch

    with torch.no_grad(), tap_torch(layer.module, ("",), sees_functions=True) as tapped:
        layer.module(*args, **kwargs)
    return tapped.layers[0]


@dataclass(frozen=True)
class _Experiment:
    """A layer, called with two values of one argument.

    Attributes:
        name: name of the argument.
        value: in the first call.
        changed_value: in the second call.
        before: record of the first call.
        after: record of the second call.
    """

    name: str
    value: Any
    changed_value: Any
    before: TappedLayer
    after: TappedLayer

    def part(self) -> str:
        """Return the part of a call that the argument is, by the first stage that it changes; empty
        if it changes none.

        Raises:
            ValueError: if it changes anything else.
        """
        before, after = self.before.calls[0].values, self.after.calls[0].values
        if "q" in before and "q" not in after:
            rule = "have other values with which the layer is one attention"
            raise InputError(self.name, rule, self.after.not_observed)
        if self._changes("q") or self._changes("k"):
            return POSITIONS
        if self._changes("v"):
            raise InputError("v", f"depend on the input of values, not on {self.name}")
        if self.before.scale != self.after.scale:
            return SCALE
        if self._changes(SEGMENTS):
            return SEGMENTS
        if self._hides_other_keys():
            if are_segments(self.changed_value, is_hidden(after["mask"])):
                return SEGMENTS
            return MASK
        if self._changes("mask") or self._changes("scores"):
            numbers = to_numpy(self.value)
            # Zeros hide nothing, but their change would not be a bias either.
            if (numbers < HIDES).any() or not numbers.any():
                return MASK
            return BIAS
        if self._changes("context"):
            raise InputError("context", f"depend on the stages before it, not on {self.name}")
        return ""

    def _changes(self, stage: str) -> bool:
        one = self.before.calls[0].values.get(stage, 0)
        other = self.after.calls[0].values.get(stage, 0)
        return not np.array_equal(one, other, equal_nan=True)

    def _hides_other_keys(self) -> bool:
        before = self.before.calls[0].values.get("mask")
        after = self.after.calls[0].values.get("mask")
        if after is None or not self._changes("mask"):
            return False
        return before is None or not np.array_equal(is_hidden(before), is_hidden(after))


# ---- Segments ------------------------------------------------------------------------------------


def with_segments(layer: ObservedLayer, fitted: FittedLayer) -> ObservedLayer:
    """Return a layer with the segments that its call passes, or without any.

    Segments that no argument of the call determines are hidden keys like others, such as keys in
    other chunks.

    Raises:
        ValueError: if the layer attends within others.
    """
    observed_ids = layer.values.get(SEGMENTS)
    if SEGMENTS in fitted.from_call:
        return _with_segments_of(layer, fitted.from_call[SEGMENTS])
    if observed_ids is not None:
        return _with_segments_as_mask(layer, observed_ids)
    if MASK in fitted.from_call and "mask" in layer.values:
        ids = _segments_in(layer.values["mask"])
        if ids is not None:
            return layer.with_values({**layer.values, SEGMENTS: ids})
    return layer


def _with_segments_of(layer: ObservedLayer, name: str) -> ObservedLayer:
    """Return a layer with the segments that an argument holds."""
    batch_size, _, num_tokens, _ = layer.values["q"].shape
    ids = segment_ids_of(layer.numbers.get(name), num_tokens)
    if ids is None:
        raise InputError(name, "be boundaries, lengths or numbers of segments", "a different array")
    ids = np.broadcast_to(ids, (batch_size, num_tokens))
    observed_ids = layer.values.get(SEGMENTS, ids)
    if not np.array_equal(_same_segments(observed_ids), _same_segments(ids)):
        raise InputError("segments", f"agree with {name}", "others")
    return layer.with_values({**layer.values, SEGMENTS: ids.copy()})


def _with_segments_as_mask(layer: ObservedLayer, ids: np.ndarray) -> ObservedLayer:
    """Return a layer whose segments are a mask instead."""
    values = dict(layer.values)
    del values[SEGMENTS]
    if "mask" in values:
        rule = "be passed by an argument of the call"
        raise InputError("segments", rule, "a mask in addition to other segments")
    values["mask"] = ~_same_segments(ids)[:, None]
    return layer.with_values(values)


def _segments_in(mask: np.ndarray) -> np.ndarray | None:
    """Return the segment of each token, (B, T), by a mask (B, heads, T, S) that hides other
    segments alone; else None.

    Causal masks that hide earlier chunks too belong to a specification.
    """
    hidden = is_hidden(mask)
    if hidden.shape[2] != hidden.shape[3] or not (hidden == hidden[:, :1]).all():
        return None
    hidden = hidden[:, 0]
    # A segment begins at a token that does not see the one before.
    begins = np.diagonal(hidden[:, 1:, :-1], axis1=1, axis2=2)
    ids = np.pad(np.cumsum(begins, axis=1), ((0, 0), (1, 0)))
    if begins.any() and np.array_equal(hidden, ~_same_segments(ids)):
        return ids
    return None


def are_segments(value: Any, hidden: np.ndarray) -> bool:
    """Return whether a mask (B, heads, T, S) hides the keys of other segments, by an argument that
    may hold these.
    """
    num_tokens = hidden.shape[2]
    ids = segment_ids_of(value, num_tokens)
    if ids is None or hidden.shape[3] != num_tokens or (ids == ids[:, :1]).all():
        return False
    batch_size = max(len(hidden), len(ids))
    hidden = np.broadcast_to(hidden, (batch_size, *hidden.shape[1:]))
    is_other = np.broadcast_to(~_same_segments(ids)[:, None], hidden.shape)
    return bool(hidden[is_other].all())


def _same_segments(ids: np.ndarray) -> np.ndarray:
    """Return which tokens are in one segment, (B, T, T)."""
    return ids[:, :, None] == ids[:, None]
