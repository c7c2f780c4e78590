"""The backends: how canonical weights get into a sibling's modules, and how a case runs there, stage by stage.

Each is a module with the same names: `from_numpy`, `to_numpy`, `load_into`, `weights_of`, `why_skipped`, `steps`,
`HAS_GRADIENTS` and, where that is true, `gradients`, `lock` and `environment`. None is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from parity.problem import Problem
from parity.reference import Step
from parity.spec import Case

if TYPE_CHECKING:
    from parity.adapters import Adapter

NEEDS = {"jax": ("jax", "flax", "mha_jax"), "torch": ("torch", "mha_torch"), "tt": ("ttnn", "mha_tt")}
"""The packages that each backend needs."""


class Backend(Protocol):
    """What a backend module offers."""

    HAS_GRADIENTS: bool

    def from_numpy(self, x: np.ndarray) -> Any: ...
    def to_numpy(self, x: Any) -> np.ndarray: ...
    def load_into(self, module: Any, weights: Mapping[str, np.ndarray]) -> Any: ...
    def weights_of(self, module: Any) -> dict[str, np.ndarray]: ...
    def why_skipped(self, case: Case, dtype: str) -> str | None: ...
    def steps(self, problem: Problem) -> list[Step]: ...
    def gradients(self, problem: Problem) -> dict[str, np.ndarray]: ...
    def lock(self, dtype: str) -> AbstractContextManager[dict[str, Any]]: ...
    def environment(self) -> dict[str, Any]: ...


def why_missing(name: str) -> str | None:
    """Why a backend cannot run here, or None if it can.

    Raises:
        ValueError: if there is no backend of that name.
    """
    if name not in NEEDS:
        raise ValueError(f"backend must be one of {list(NEEDS)}, got backend={name!r}")
    missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if not missing:
        return None
    reason = f"{name} needs {' and '.join(missing)}, not installed here"
    return f"{reason}; it has wheels for CPython 3.10 and 3.12 on x86-64 Linux" if "ttnn" in missing else reason


def load_backend(name: str) -> Backend:
    """Import a backend.

    Raises:
        ValueError: if there is no backend of that name.
        ModuleNotFoundError: if it needs a package that is not installed.
    """
    if reason := why_missing(name):
        raise ModuleNotFoundError(reason)
    module: ModuleType = importlib.import_module(f"parity.backends.{name}")
    return cast(Backend, module)


def load_into(module: Any, weights: Mapping[str, np.ndarray]) -> Any:
    """Fill a module of any sibling from canonical weights, bit for bit, or leave it as it was.

    Args:
        module: a module of mha_jax, mha_torch or mha_tt, a `torch.nn.MultiheadAttention` or a
            `flax.nnx.MultiHeadAttention`.
        weights: canonical weights, in the dtype of the module.

    Returns:
        The module.

    Raises:
        TypeError: if the module is none of these, or dtypes differ.
        ValueError: if names or shapes do not fit, or a value is not finite.
    """
    return _backend_of(module).load_into(module, weights)


def weights_of(module: Any) -> dict[str, np.ndarray]:
    """The canonical weights of a module of any sibling, bit for bit.

    Args:
        module: one that `load_into` takes.

    Raises:
        TypeError: if it is none of these.
    """
    return _backend_of(module).weights_of(module)


def _backend_of(module: Any) -> Backend | Adapter:
    packages = {base.__module__.split(".")[0] for base in type(module).__mro__}
    for name in NEEDS:
        if f"mha_{name}" in packages:
            return load_backend(name)
    from parity.adapters import ADAPTERS, adapter_of

    if adapter := adapter_of(module):
        return adapter
    others = " or a ".join(ADAPTERS)
    raise TypeError(f"module must be one of mha_jax, mha_torch or mha_tt, or a {others}, got {type(module).__name__}")
