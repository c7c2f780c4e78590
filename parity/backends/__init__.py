"""The backends: how canonical weights get into a sibling's modules, and how a case runs there, stage by stage.

Each is a module with the same names: `from_numpy`, `to_numpy`, `load_into`, `weights_of`, `spec_of`, `why_skipped`,
`steps`, `HAS_GRADIENTS` and, where that is true, `gradients`, `lock` and `environment`. None is imported before it is
asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np

from parity.core.problem import Problem
from parity.core.reference import Step, Values
from parity.core.spec import AttentionSpec, Case

NEEDS = {"jax": ("jax", "flax", "mha_jax"), "torch": ("torch", "mha_torch"), "tt": ("ttnn", "mha_tt")}
"""The packages that each backend needs."""


class Backend(Protocol):
    """What a backend module offers."""

    HAS_GRADIENTS: bool

    def from_numpy(self, x: np.ndarray) -> Any: ...
    def to_numpy(self, x: Any) -> np.ndarray: ...
    def load_into(self, module: Any, weights: Mapping[str, np.ndarray]) -> Any: ...
    def weights_of(self, module: Any) -> dict[str, np.ndarray]: ...
    def spec_of(self, module: Any) -> AttentionSpec: ...
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


def values_to_weigh(problem: Problem, values: Values) -> np.ndarray:
    """The values of a problem for its stage `context`, (B, K, S, H), without NaN.

    A sibling's `attention_context` knows no mask: it is the formula, for which 0 * NaN is NaN. What hides such values
    are the functions made of the stages, and `module.output` and `fused.output` ask it of them. A row that sees a NaN
    is NaN here, too: its attention weights are.
    """
    v = values["v"]
    return v if problem.case.not_finite is None else np.where(np.isfinite(v), v, np.zeros_like(v))
