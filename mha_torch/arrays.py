"""Small functions of arrays that the others share."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x in the dtype of sums: float64 stays, anything narrower becomes float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


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
