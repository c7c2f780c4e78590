"""Numerics lock: settings that affect results are fixed, recorded and restored."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from mha_spec import InputError
from parity.measure.backends import load_backend, why_missing
from parity.measure.core.packages import installed


@contextmanager
def numerics_lock(
    backends: Iterable[str], dtype: str = "float32"
) -> Iterator[dict[str, dict[str, Any]]]:
    """Fix the settings that affect results, and restore them afterwards.

    These are the precision of products, TF32, x64, and fast paths.

    Args:
        backends: names of the backends to lock.
        dtype: dtype of the computation; float64 enables JAX's x64.

    Yields:
        Active settings, by backend.

    Example:
        >>> with parity.numerics_lock(["torch"]) as settings:
        ...     settings["torch"]["float32_matmul_precision"]
        'highest'
    """
    settings = {}
    with ExitStack() as stack:
        for name in backends:
            settings[name] = stack.enter_context(load_backend(name).lock(dtype))
        yield settings


def on_device(device: str) -> AbstractContextManager[None]:
    """Return a context in which torch's arrays are on a device, `cpu` or a GPU; JAX has its own
    default device.

    Raises:
        ModuleNotFoundError: if it is a GPU and torch is not installed.
        ValueError: if the device does not exist.
    """
    if device == "cpu":
        return nullcontext()
    if reason := why_missing("torch"):
        raise ModuleNotFoundError(reason)
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        reason, *_ = str(error).splitlines()
        if device.startswith("cuda") and not torch.backends.cuda.is_built():
            reason = "this PyTorch has no CUDA"
        raise InputError("device", "exist", statement=reason, device=device) from None
    from parity.measure.backends import torch as port

    return port.on_device(device)


def environment(backends: Iterable[str]) -> dict[str, Any]:
    """Return the environment for reports: Python, packages, machine, and devices and settings of
    each backend.
    """
    of_backends = {}
    with numerics_lock(backends) as settings:
        for name, numerics in settings.items():
            of_backends[name] = {**load_backend(name).environment(), "numerics": numerics}
        return {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "packages": installed(),
            "backends": of_backends,
        }
