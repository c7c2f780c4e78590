"""Checks of arrays, made before any work: `<what> must <rule>, got <name>=<value>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mha_spec import Refusal, WrongType
from mha_spec.rules import as_count

_PLAIN = (Tensor, nn.Parameter)


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Refuse what is not an integer of at least `minimum`."""
    as_count(name, value, minimum)


def values_of(x: Tensor) -> Any:
    """Return the values of x as Python's; None if unknown: in a compiled graph, on meta, of a fake, under vmap."""
    if torch.compiler.is_compiling():
        return None
    try:
        values = x.tolist()
    except RuntimeError:
        return None
    first = values
    while isinstance(first, list) and first:
        first = first[0]
    return values if isinstance(first, (bool, int, float, list)) else None  # a fake tensor may give symbols


def is_autocast_on(device: torch.device) -> bool:
    """Whether autocast narrows what is computed on a device; some, such as meta, have none."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def needs_gradient(*arrays: Tensor) -> bool:
    """Return whether a gradient of any of these is asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in arrays)


def is_distributed(x: object) -> bool:
    """Return whether x is a DTensor, of which each process has a part."""
    return type(x) not in _PLAIN and hasattr(type(x), "to_local")  # of the type, which a compiler asks, too


def replicate_like(x: Tensor, other: Tensor) -> Tensor:
    """Return x, which all processes have, as a DTensor if another tensor is one."""
    if not is_distributed(other):
        return x
    from torch.distributed.tensor import DTensor, Replicate  # not imported unless something is distributed

    mesh = other.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)


def check_array(name: str, x: object) -> None:
    """Refuse what is not an array of the framework."""
    if not isinstance(x, Tensor):
        raise WrongType(name, "be a torch.Tensor", type(x).__name__)


def check_floating(name: str, x: Tensor, rank: int) -> None:
    """Refuse an array of another rank, or one that does not hold floating-point numbers."""
    if isinstance(x, Tensor) and x.ndim == rank and x.is_floating_point():
        return
    check_array(name, x)
    if x.ndim != rank:
        raise Refusal(name, f"have {rank} axes", {f"{name}.shape": tuple(x.shape)})
    raise WrongType(name, "be floating point", {f"{name}.dtype": x.dtype})


def check_device(name: str, x: Tensor, expected: torch.device, of: str) -> None:
    """Refuse an array that lies on another device than the one that it meets."""
    if x.device != expected:
        raise Refusal(name, f"lie on the device of {of}", {f"{name}.device": x.device, "expected": expected})


def check_broadcasts(name: str, shape: tuple[int, ...], scores_shape: tuple[int, ...]) -> None:
    """Refuse a shape that does not broadcast to the scores, or that would stretch them."""
    fits = len(shape) <= 4 and all(a in (1, b) for a, b in zip(reversed(shape), reversed(scores_shape), strict=False))
    if not fits:
        raise Refusal(name, f"broadcast to the scores (B, N, T, S) = {scores_shape}", {f"{name}.shape": shape})


def check_lengths(name: str, lengths: Tensor | Sequence[int], batch_size: int | None, maximum: int) -> list[int] | None:
    """Refuse lengths that are not one integer in 0..maximum for each sequence.

    Returns:
        The lengths where they are known: a list is, in a compiled graph, too.
    """
    if isinstance(lengths, (list, tuple)) and all(type(length) is int for length in lengths):
        shape, values = (len(lengths),), list(lengths)
    else:
        array = torch.as_tensor(lengths)
        if array.is_floating_point() or array.is_complex() or array.dtype == torch.bool:
            raise WrongType(name, "be integers", {f"{name}.dtype": array.dtype})
        shape, values = tuple(array.shape), values_of(array)
    if len(shape) != 1 or (batch_size is not None and shape[0] != batch_size):
        expected = "(B,)" if batch_size is None else f"(B,) = ({batch_size},)"
        raise Refusal(name, f"have shape {expected}", {f"{name}.shape": shape})
    if values is not None and any(not 0 <= value <= maximum for value in values):
        raise Refusal(name, f"lie in 0..{maximum}", {name: values})
    return values
