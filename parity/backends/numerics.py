"""The numerics lock: what changes numbers is set, recorded, and put back."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from mha_spec import Refusal
from parity.backends import load_backend, why_missing
from parity.core.packages import installed


@contextmanager
def numerics_lock(backends: Iterable[str], dtype: str = "float32") -> Iterator[dict[str, dict[str, Any]]]:
    """Hold still what changes numbers: matmul precision, TF32, x64, fast paths; and put it back afterwards.

    Args:
        backends: names of the backends to hold.
        dtype: of what is computed; float64 switches JAX's x64 on.

    Yields:
        The settings in force, by backend.
    """
    with ExitStack() as stack:
        yield {name: stack.enter_context(load_backend(name).lock(dtype)) for name in backends}


def on_device(device: str) -> AbstractContextManager[None]:
    """Return a context in which torch's arrays lie on a device, `cpu` or a GPU; JAX has a default device of its own.

    Raises:
        ModuleNotFoundError: if it is a GPU, and torch is not installed.
        ValueError: if there is no such device here.
    """
    if device == "cpu":
        return nullcontext()
    if reason := why_missing("torch"):
        raise ModuleNotFoundError(reason)
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise Refusal("device", "be one that torch has here", f"{device}: {str(error).splitlines()[0]}") from None
    from parity.backends import torch as port

    return port.on_device(device)


def environment(backends: Iterable[str]) -> dict[str, Any]:
    """What a report says of where it was made: Python, packages, machine, and each backend's devices and settings."""
    names = list(backends)
    with numerics_lock(names) as settings:
        return {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "packages": installed(),
            "backends": {name: {**load_backend(name).environment(), "numerics": settings[name]} for name in names},
        }
