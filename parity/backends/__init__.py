"""The backends: how canonical weights get into a sibling's modules, and how a case runs there, stage by stage.

Each is a record in `BACKENDS` and a module of plain functions, a `Port`, which `driver` takes through the stages of a
case. None is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from parity.backends.port import Divided, Port


class Backend(NamedTuple):  # a dataclass would cost every --help a tenth of its time
    """What is known of a backend before it is imported.

    Attributes:
        name: what the command line and the reports call it.
        sibling: the package that it runs.
        needs: the other packages that it needs.
        arrays: the module of functions on its arrays; where tensors lie on a device, on those of masks.
        paths: which of a module's paths it has, of those in `parity.core.stages`.
        has_all_mistakes: whether every known mistake can be planted in it, and not only those in masks.
        wheels: of packages that it needs, where there are any, if not everywhere.
        divided: the module that runs cases on a mesh of several devices, of this package; empty where none does.
        why_no_cache_files: why its caches cannot be kept in files, or nothing.
        has_own_device: whether it holds a device that no other process can use meanwhile.
        has_own_arithmetic: whether its hardware may compute in other ways than IEEE 754 says.
    """

    name: str
    sibling: str
    needs: tuple[str, ...]
    arrays: str
    paths: tuple[str, ...] = ("module", "fused")
    has_all_mistakes: bool = True
    wheels: Mapping[str, str] = MappingProxyType({})
    divided: str = ""
    why_no_cache_files: str = ""
    has_own_device: bool = False
    has_own_arithmetic: bool = False


_BACKENDS = (
    Backend("jax", "mha_jax", ("jax", "flax"), "jax.numpy", paths=("module", "fused", "blocks"), divided="jax_mesh"),
    Backend("torch", "mha_torch", ("torch",), "torch", divided="torch_mesh"),
    Backend(
        "tt",
        "mha_tt",
        ("ttnn",),
        "numpy",
        has_all_mistakes=False,
        wheels={"ttnn": "CPython 3.10 and 3.12 on x86-64 Linux"},
        why_no_cache_files="its caches are padded to device tiles",
        divided="tt_mesh",
        has_own_device=True,
        has_own_arithmetic=True,
    ),
)

BACKENDS = {backend.name: backend for backend in _BACKENDS}
"""The backends by name."""

FRAMEWORKS = {"torch": "torch", "jax": "jax", "ttnn": "tt"}
"""The backend that takes a framework's arrays."""


def why_missing(name: str) -> str | None:
    """Why a backend cannot run here, or None if it can.

    Raises:
        ValueError: if there is no backend of that name.
    """
    if name not in BACKENDS:
        from mha_spec import Refusal

        raise Refusal("backend", f"be one of {list(BACKENDS)}", backend=name)
    from importlib.util import find_spec

    backend = BACKENDS[name]
    missing = [package for package in (*backend.needs, backend.sibling) if find_spec(package) is None]
    if not missing:
        return None
    wheels = (f"; it has wheels for {backend.wheels[package]}" for package in missing if package in backend.wheels)
    return f"{name} needs {' and '.join(missing)}, not installed here{''.join(wheels)}"


def load_backend(name: str) -> Port:
    """Import a backend.

    Raises:
        ValueError: if there is no backend of that name.
        ModuleNotFoundError: if it needs a package that is not installed.
    """
    if reason := why_missing(name):
        raise ModuleNotFoundError(reason)
    return cast("Port", importlib.import_module(f"{__name__}.{name}"))


def load_divided(name: str) -> Divided:
    """Import what runs cases of a backend on a mesh of several devices.

    Raises:
        ValueError: if there is no backend of that name, or it runs on one device only.
        ModuleNotFoundError: if it needs a package that is not installed.
    """
    if reason := why_missing(name):
        raise ModuleNotFoundError(reason)
    if not BACKENDS[name].divided:
        from mha_spec import Refusal

        raise Refusal("mesh", "be of a backend that runs on several devices", backend=name)
    return cast("Divided", importlib.import_module(f"{__name__}.{BACKENDS[name].divided}"))


def backend_of(value: object) -> str | None:
    """The name of the backend whose sibling has the class of a value, or a class that it extends; None if none has."""
    packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return next((name for name, backend in BACKENDS.items() if backend.sibling in packages), None)
