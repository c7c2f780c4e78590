"""Find what a call passes to a layer besides its inputs: segments, masks, biases, positions, a
scale.

A specification says nothing of them, so a report names the arguments that hold them. They are found
by experiment: the layer is called again with one argument changed, and the first stage that changes
shows what the argument is.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mha_spec import InputError
from parity.explain.identification.call_masks import HIDES
from parity.explain.identification.found import Fit
from parity.explain.identification.observe import ObservedLayer
from parity.measure.core.arrays import to_numpy
from parity.port.tapping.record import TappedLayer, is_hidden

SEGMENTS, MASK, BIAS, SCALE, POSITIONS = "segment_ids", "mask", "bias", "scale", "positions"
"""Parts of a call, by the names of the arguments of our own layers."""

INTEGERS = ("torch.int32", "torch.int64")
"""Dtypes of torch that hold boundaries, lengths and numbers of segments, and positions."""

UNKNOWN = "unknown"
"""Arguments with no other value that the layer accepts, so that their effect is not seen."""

NUDGE = 0.1
"""Size of the change of numbers: large next to rounding, too small to hide a key."""


def parts_from_call(layer: ObservedLayer, inputs: Collection[str]) -> dict[str, str]:
    """Return the arguments that a layer's attention depends on, by the part of a call that they
    are.

    Args:
        layer: the observed layer.
        inputs: names of arguments that are inputs of projections, or added to the output.

    Raises:
        ValueError: if an argument has another effect.
    """
    if layer.call is None:
        return {}
    num_tokens = layer.values["q"].shape[2]
    arguments, others = _arguments(layer), dict[str, Any]()
    for name, value in arguments.items():
        other = None if name in inputs else _changed(value, num_tokens)
        if other is not None:
            others[name] = other
    if not others:
        return {}
    try:
        before = _called_again(layer, *layer.call)
    except Exception as error:  # the layer may raise anything
        raise InputError(
            "the layer", "run by itself with its arguments of a call", f"{error!r:.120}"
        ) from error
    found: dict[str, list[str]] = {}
    for name, other in others.items():
        try:
            after = _called_again(layer, *_with_argument(layer, name, other))
        except Exception as error:  # the layer may raise anything
            if _segment_ids(arguments[name], num_tokens) is not None:
                rule = "have an effect that other values show, because it may hold segments"
                raise InputError(name, rule, f"{error!r:.120}") from error
            found.setdefault(UNKNOWN, []).append(name)
            continue
        if part := _part_of(name, arguments[name], other, before, after):
            found.setdefault(part, []).append(name)
    return {part: " and ".join(names) for part, names in found.items()}


def with_segments(layer: ObservedLayer, found: Fit) -> ObservedLayer:
    """Return a layer with the segments that its call passes, or without any.

    Segments that no argument of the call determines are hidden keys like others, such as those of
    chunks.

    Raises:
        ValueError: if the layer attends within others.
    """
    values = layer.values
    seen = values.get(SEGMENTS)
    if SEGMENTS not in found.from_call and seen is None and MASK in found.from_call:
        blocks = _blocks(values["mask"]) if "mask" in values else None
        return layer if blocks is None else layer.with_values({**values, SEGMENTS: blocks})
    if SEGMENTS not in found.from_call:
        if seen is None:
            return layer
        others = {name: x for name, x in values.items() if name != SEGMENTS}
        hidden = (seen[:, :, None] != seen[:, None])[:, None]
        if "mask" in others:
            raise InputError(
                "segments",
                "be passed by an argument of the call",
                "a mask in addition to other segments",
            )
        return layer.with_values({**others, "mask": hidden})
    batch_size, _, num_tokens, _ = values["q"].shape
    name = found.from_call[SEGMENTS]
    ids = _segment_ids(layer.numbers.get(name), num_tokens)
    if ids is None:
        raise InputError(name, "be boundaries, lengths or numbers of segments", "another array")
    ids = np.broadcast_to(ids, (batch_size, num_tokens))
    if seen is not None and not np.array_equal(_same(seen), _same(ids)):
        raise InputError("segments", f"be those of {name}", "others")
    return layer.with_values({**values, SEGMENTS: ids.copy()})


def _blocks(mask: np.ndarray) -> np.ndarray | None:
    """Return the segment of each token, (B, T), by a mask (B, heads, T, S) that hides other
    segments alone; else None.

    Causal masks that hide earlier chunks too are those of a specification.
    """
    hidden = is_hidden(mask)
    if hidden.shape[2] != hidden.shape[3] or not (hidden == hidden[:, :1]).all():
        return None
    begins = np.diagonal(
        hidden[:, 0, 1:, :-1], axis1=1, axis2=2
    )  # of a token that does not see the one before
    ids = np.pad(np.cumsum(begins, axis=1), ((0, 0), (1, 0)))
    return ids if begins.any() and np.array_equal(hidden[:, 0], ~_same(ids)) else None


def are_segments(value: Any, hidden: np.ndarray) -> bool:
    """Return whether a mask (B, heads, T, S) hides the keys of other segments, by an argument that
    may hold these.
    """
    num_tokens = hidden.shape[2]
    ids = _segment_ids(value, num_tokens)
    if ids is None or hidden.shape[3] != num_tokens or (ids == ids[:, :1]).all():
        return False
    hidden = np.broadcast_to(hidden, (max(len(hidden), len(ids)), *hidden.shape[1:]))
    is_other = np.broadcast_to(~_same(ids)[:, None], hidden.shape)
    return bool(hidden[is_other].all())


def _same(ids: np.ndarray) -> np.ndarray:
    """Return which tokens are in one segment, (B, T, T)."""
    return ids[:, :, None] == ids[:, None]


# ---- Experiments ---------------------------------------------------------------------------------

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def _arguments(layer: ObservedLayer) -> dict[str, Any]:
    """Return the arguments of a layer's call, by name."""
    from parity.port.tapping.arguments import arguments_of

    args, kwargs = layer.call or ((), {})
    return arguments_of(layer.module.forward, args, kwargs)


def _with_argument(layer: ObservedLayer, name: str, value: Any) -> Call:
    """Return the arguments of a layer's call with another value for one."""
    args, kwargs = layer.call or ((), {})
    if name in kwargs:
        return args, {**kwargs, name: value}
    place = 0
    for parameter in inspect.signature(layer.module.forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            place += int(name.removeprefix(parameter.name))
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL or parameter.name == name:
            break
        place += 1
    return (*args[:place], value, *args[place + 1 :]), kwargs


def _called_again(
    layer: ObservedLayer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TappedLayer:
    """Call a layer by itself, and return its record."""
    import torch

    from parity.port.tapping.torch import tap_torch

    with torch.no_grad(), tap_torch(layer.module, ("",), sees_functions=True) as tapped:
        layer.module(*args, **kwargs)
    return tapped.layers[0]


def _part_of(
    name: str, value: Any, other_value: Any, before: TappedLayer, after: TappedLayer
) -> str:
    """Return the part of a call that an argument is, by the first stage that it changes; empty if
    it changes none.

    Raises:
        ValueError: if it changes anything else.
    """
    one, other = before.calls[0].values, after.calls[0].values

    def differs(stage: str) -> bool:
        return not np.array_equal(one.get(stage, 0), other.get(stage, 0), equal_nan=True)

    if "q" in one and "q" not in other:
        raise InputError(
            name, "have other values with which the layer is one attention", after.not_seen
        )
    if differs("q") or differs("k"):
        return POSITIONS
    if differs("v"):
        raise InputError("v", f"depend on the input of values, not on {name}")
    if before.scale != after.scale:
        return SCALE
    if differs(SEGMENTS):
        return SEGMENTS
    if differs("mask") and "mask" in other:
        hidden = is_hidden(other["mask"])
        if "mask" not in one or not np.array_equal(is_hidden(one["mask"]), hidden):
            return SEGMENTS if are_segments(other_value, hidden) else MASK
    if differs("mask") or differs("scores"):
        numbers = to_numpy(value)
        return MASK if (numbers < HIDES).any() or not numbers.any() else BIAS
    if differs("context"):
        raise InputError("context", f"depend on the stages before it, not on {name}")
    return ""


# ---- Values of arguments -------------------------------------------------------------------------


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "is_floating_point")


def _is_integer(x: Any) -> bool:
    if _is_tensor(x):
        return str(x.dtype) in INTEGERS
    return isinstance(x, (list, tuple)) and bool(x) and all(type(each) is int for each in x)


def _ends_of(numbers: np.ndarray, num_tokens: int) -> tuple[np.ndarray, bool] | None:
    """Return the boundaries of segments, from 0 on, and whether the numbers are lengths; None if
    they are neither.
    """
    if (
        numbers.ndim != 1
        or numbers.dtype.kind not in "iu"
        or not numbers.size
        or (numbers < 0).any()
    ):
        return None
    if (
        len(numbers) > 1
        and numbers[0] == 0
        and numbers[-1] >= num_tokens
        and (np.diff(numbers) >= 0).all()
    ):
        return numbers, False
    if numbers.sum() == num_tokens:
        return np.concatenate([[0], np.cumsum(numbers)]), True
    return None


def _segment_ids(x: Any, num_tokens: int) -> np.ndarray | None:
    """Return the segment of each token, (B or 1, T), by boundaries, lengths or numbers of segments;
    else None.
    """
    if not (_is_integer(x) or isinstance(x, np.ndarray)):
        return None
    numbers = np.asarray(to_numpy(x) if _is_tensor(x) else x)
    known = _ends_of(numbers, num_tokens)
    if known is not None:
        return np.searchsorted(known[0][1:], np.arange(num_tokens), "right")[None]
    if numbers.ndim in (1, 2) and numbers.shape[-1] == num_tokens and numbers.dtype.kind in "iu":
        return numbers.reshape(-1, num_tokens)
    return None


def _changed(x: Any, num_tokens: int) -> Any:
    """Return another value of an argument; None if there is no experiment with it."""
    if type(x) is float:
        return 1.25 * x if x else None
    if isinstance(x, (list, tuple)) and x and all(map(_is_tensor, x)):
        return (
            type(x)(_changed(each, num_tokens) for each in x) if type(x) in (list, tuple) else None
        )
    if _is_integer(x):
        return _changed_integers(x, num_tokens)
    return _changed_numbers(x) if _is_tensor(x) else None


def _changed_numbers(x: Any) -> Any:
    """Return a tensor of other numbers or booleans."""
    import torch

    if not x.numel():
        return None
    if x.dtype == torch.bool:
        other = x.clone()
        last = other.reshape(-1)[-1:] if x.ndim < 2 else other[..., -1, 0]
        last.logical_not_()  # a view
        return other
    if x.numel() == 1:
        return 1.25 * x
    if x.is_complex():
        return x * torch.polar(
            torch.ones(x.shape), torch.linspace(0.0, 1.0, x.numel()).reshape(x.shape)
        ).to(x.dtype)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    return torch.where(x.abs() < abs(HIDES), x + NUDGE * noise, x)


def _changed_integers(x: Any, num_tokens: int) -> Any:
    """Return integers of the same kind: moved boundaries, other lengths, or larger numbers in the
    second half.
    """
    numbers = np.asarray(to_numpy(x) if _is_tensor(x) else x)
    if numbers.ndim == 0 or not numbers.size:
        return None
    known = _ends_of(numbers, num_tokens)
    if known is None and numbers.shape[-1] == num_tokens and np.isin(numbers, (0, 1)).all():
        other = numbers.copy()  # a mask of padding, or two segments
        other[..., -1] = 1 - other[..., -1]
    elif known is None:
        other = numbers.copy()
        other.reshape(-1)[numbers.size // 2 :] += 1
    else:
        ends, are_lengths = known
        moved = _moved(ends, num_tokens)
        other = np.diff(moved).astype(numbers.dtype) if are_lengths else moved
    if not _is_tensor(x):
        return type(x)(other.tolist())
    import torch

    return torch.as_tensor(other, dtype=x.dtype, device=x.device)


def _moved(ends: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return other boundaries of segments: one more if there is a single segment, else the first
    one elsewhere.
    """
    if len(ends) == 2:
        return np.array([ends[0], num_tokens // 2, ends[1]], ends.dtype)
    moved = ends.copy()
    length = moved[2] - moved[0]
    moved[1] = moved[0] + (length // 2 if moved[1] != moved[0] + length // 2 else length // 2 + 1)
    return moved
