"""The backends: how canonical weights get into a sibling's modules, and how a case runs there, stage by stage.

Each is a module of plain functions, a `Port`, which `driver` takes through the stages of a case. None is imported
before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np

from mha_spec import AttentionSpec
from parity.backends.driver import Port
from parity.core.spec import Case

NEEDS = {"jax": ("jax", "flax", "mha_jax"), "torch": ("torch", "mha_torch"), "tt": ("ttnn", "mha_tt")}
"""The packages that each backend needs."""


class Backend(Port, Protocol):
    """What a backend module offers."""

    HAS_GRADIENTS: bool

    def load_into(self, module: Any, weights: Mapping[str, np.ndarray]) -> Any: ...
    def weights_of(self, module: Any) -> dict[str, np.ndarray]: ...
    def spec_of(self, module: Any) -> AttentionSpec: ...
    def why_skipped(self, case: Case, dtype: str) -> str | None: ...
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
