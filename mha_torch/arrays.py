"""Array helpers."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)
"""Types of tensors on one device; subclasses may be distributed, fake or quantized."""


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x in at least float32."""
    if x.dtype == torch.float64:
        return x
    return x.to(torch.float32)


def values_at_hand(x: Tensor) -> Any:
    """Return `x.tolist()`, or None if values are unavailable or reading them waits for a device."""
    if not x.is_cpu:
        return None
    return values_of(x)


def values_of(x: Tensor) -> Any:
    """Return `x.tolist()`, or None if values are unavailable (compiling, meta, fake, vmap)."""
    if is_graph():
        return None
    try:
        values = x.tolist()
    except RuntimeError:
        return None
    first = values
    while isinstance(first, list) and first:
        first = first[0]
    # A fake tensor may return symbols.
    if isinstance(first, (bool, int, float, list)):
        return values
    return None


def is_graph() -> bool:
    """Return whether operations are being compiled or captured in a CUDA graph, which rules out
    reading values.
    """
    if torch.compiler.is_compiling():  # first, because the compiler cannot trace the rest
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def constant(x: np.ndarray, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an array on the device of a tensor; cached on a GPU, where a copy synchronizes and
    breaks CUDA graphs.
    """
    if (
        like.is_cuda
        and type(like) in _PLAIN
        and not (torch.compiler.is_compiling() or is_transformed())
    ):
        return _on_gpu(x.tobytes(), x.dtype, dtype, like.device).view(x.shape)
    return torch.as_tensor(x, dtype=dtype, device=like.device)


@cache  # forever, because a CUDA graph keeps the address
def _on_gpu(
    x: bytes, array_dtype: np.dtype, dtype: torch.dtype | None, device: torch.device
) -> Tensor:
    """Return the values of an array on a GPU, (L,), in a different dtype if requested."""
    with torch.inference_mode(False):  # autograd rejects inference tensors
        return torch.tensor(np.frombuffer(x, array_dtype), dtype=dtype, device=device)


def is_transformed() -> bool:
    """Return whether a transform such as `vmap`, or a mode such as the mode of fake tensors,
    intercepts operations.
    """
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context without autocast. Devices such as meta have none."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def is_autocast_on(device: torch.device) -> bool:
    """Return whether autocast is on for a device. Devices such as meta have none."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def needs_gradient(*arrays: Tensor) -> bool:
    """Return whether any of these requires a gradient."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in arrays)


def is_distributed(x: object) -> bool:
    """Return whether x is a DTensor."""
    # Looks at the type, because torch.compile evaluates it.
    return type(x) not in _PLAIN and hasattr(type(x), "to_local")


def replicate_like(x: Tensor, other: Tensor) -> Tensor:
    """Return x, which is equal on all ranks, as a replicated DTensor if another tensor is a
    DTensor.
    """
    if not is_distributed(other):
        return x
    # Imported only if something is distributed.
    from torch.distributed.tensor import DTensor, Replicate

    mesh = other.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)


def zero_where(x: Float[Tensor, "..."], where: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x with 0 at `where`, which blocks the gradient."""
    return x.masked_fill(replicate_like(where, x), 0.0)


def nan_where(x: Float[Tensor, "..."], where: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x with NaN at `where`; the gradient passes unchanged, NaN only if the incoming
    one is NaN.
    """
    return x + replicate_like(torch.where(where, torch.nan, 0.0).to(x.dtype), x)
