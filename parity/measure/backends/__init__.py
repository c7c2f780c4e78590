"""Backends: mha_jax, mha_torch and mha_tt with canonical weights, running cases stage by stage.

- `Backend`: facts about a backend, a record in `BACKENDS`.
- `Port` (`port`): its module of plain functions, imported on demand; `jax`, `torch` and `tt`.
- `FilledModule` (`port`): a layer of the implementation with the weights of a problem.

Start at `record.record`, which runs the stages of `driver` with a port.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from parity.measure.backends.port import Port


class Backend(NamedTuple):  # a dataclass would take a tenth of the time of --help
    """Facts about a backend that need no import.

    Attributes:
        name: name in the command line and reports.
        sibling: package with the implementation.
        needs: other required packages.
        arrays: module of functions on its arrays; for tensors on a device, on the arrays of masks.
        paths: supported paths of a module, from `parity.measure.core.stages`; the tutorial's is
            supported by all.
        has_all_bugs: all known bugs can be injected, not only those in masks.
        wheels: platforms with wheels of its packages, if not all.
        why_no_cache_files: reason why its caches cannot be saved; empty if they can.
        has_own_device: it blocks a device for other processes.
        has_own_arithmetic: its hardware may deviate from IEEE 754.
    """

    name: str
    sibling: str
    needs: tuple[str, ...]
    arrays: str
    paths: tuple[str, ...] = ("module", "fused")
    has_all_bugs: bool = True
    wheels: Mapping[str, str] = MappingProxyType({})
    why_no_cache_files: str = ""
    has_own_device: bool = False
    has_own_arithmetic: bool = False


_BACKENDS = (
    Backend(
        "jax",
        "mha_jax",
        ("jax", "flax"),
        "jax.numpy",
        paths=("module", "fused", "blocks"),
    ),
    Backend("torch", "mha_torch", ("torch",), "torch"),
    Backend(
        "tt",
        "mha_tt",
        ("ttnn",),
        "numpy",
        has_all_bugs=False,
        wheels={"ttnn": "CPython 3.10 and 3.12 on x86-64 Linux"},
        why_no_cache_files="its caches are padded to device tiles",
        has_own_device=True,
        has_own_arithmetic=True,
    ),
)

BACKENDS = {backend.name: backend for backend in _BACKENDS}
"""Backends by name."""

FRAMEWORKS = {"torch": "torch", "jax": "jax", "ttnn": "tt"}
"""Backend of each framework's arrays."""


def why_missing(name: str) -> str | None:
    """Return why a backend cannot run here, or None if it can.

    Raises:
        ValueError: if no backend has this name.
    """
    if name not in BACKENDS:
        from mha_spec import InputError

        raise InputError("backend", f"be one of {list(BACKENDS)}", backend=name)
    from importlib.util import find_spec

    backend = BACKENDS[name]
    packages = (*backend.needs, backend.sibling)
    missing = [package for package in packages if find_spec(package) is None]
    if not missing:
        return None
    reason = f"{name} needs {' and '.join(missing)}, not installed here"
    for package in missing:
        if package in backend.wheels:
            reason += f"; it has wheels for {backend.wheels[package]}"
    return reason


def load_backend(name: str) -> Port:
    """Import a backend.

    Raises:
        ValueError: if no backend has this name.
        ModuleNotFoundError: if it needs a package that is not installed.
    """
    reason = why_missing(name)
    if reason is not None:
        raise ModuleNotFoundError(reason)
    return cast("Port", importlib.import_module(f"{__name__}.{name}"))


def backend_of(value: object) -> str | None:
    """Return the backend whose package defines the class of a value, or a base class, or None.

    Layers of the tutorial belong to none, because they have no specification.
    """
    modules = [kind.__module__ for kind in type(value).__mro__]
    packages = {module.partition(".")[0] for module in modules if not module.endswith(".plain")}
    for name, backend in BACKENDS.items():
        if backend.sibling in packages:
            return name
    return None
