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
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from mha_spec import AttentionSpec
from parity.backends.driver import Port
from parity.core.spec import Case, unheld

if TYPE_CHECKING:
    from parity.foreign.adapters import Adapter

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


def load_into(module: Any, weights: Any, spec: AttentionSpec | None = None) -> Any:
    """Fill a module of any sibling from canonical weights, bit for bit, or leave it as it was.

    Args:
        module: a module of mha_jax, mha_torch or mha_tt, a `torch.nn.MultiheadAttention` or a
            `flax.nnx.MultiHeadAttention`.
        weights: canonical weights, as arrays of any framework, in the dtype of the module; or another such module.
        spec: the layer that the weights are of, as `load` and `spec_of` give it. Then the module must compute the same:
            weights alone tell neither the number of heads nor RoPE. That of another module is known.

    Returns:
        The module.

    Raises:
        TypeError: if the module is none of these, or dtypes differ.
        ValueError: if names or shapes do not fit, a value is not finite, or the specifications differ.
    """
    backend = _backend_of(module)
    if not isinstance(weights, Mapping):
        spec = spec_of(weights) if spec is None else spec
        weights = weights_of(weights)
    if spec is not None:
        check_same_layer(backend.spec_of(module), spec, "the module", "the weights")
    return backend.load_into(module, weights)


def weights_of(module: Any) -> dict[str, np.ndarray]:
    """The canonical weights of a module of any sibling, bit for bit.

    Args:
        module: one that `load_into` takes.

    Raises:
        TypeError: if it is none of these.
        ValueError: if it does not hold just the weights of its specification, as where a projection is wrapped.
    """
    return _backend_of(module).weights_of(module)


def spec_of(module: Any) -> AttentionSpec:
    """The specification of a module of any sibling: what `save`, `verify` and `load_into` want beside its weights.

    Args:
        module: one that `load_into` takes. Of another library's it is what the module computes itself, which is no
            RoPE.

    Raises:
        TypeError: if it is none of these.
    """
    return _backend_of(module).spec_of(module)


def check_same_layer(spec: AttentionSpec, other: AttentionSpec, what: str, whose: str) -> None:
    """Refuse specifications of layers that compute different things from the same weights.

    Raises:
        ValueError: if they differ in more than dropout and in whether q, k and v are held as one.
    """
    fields, others = vars(unheld(spec)), vars(unheld(other))
    differ = [name for name in fields if fields[name] != others[name]]
    if differ:
        one, two = (", ".join(f"{name}={each[name]}" for name in differ) for each in (fields, others))
        raise ValueError(f"{what} must be of one specification with {whose}, got {one} and {two}")


def _backend_of(module: Any) -> Backend | Adapter:
    packages = {base.__module__.split(".")[0] for base in type(module).__mro__}
    for name in NEEDS:
        if f"mha_{name}" in packages:
            return load_backend(name)
    from parity.foreign.adapters import ADAPTERS, adapter_of

    if adapter := adapter_of(module):
        return adapter
    if isinstance(module, type):
        raise TypeError(f"module must be a module and not its class, got {module.__name__}")
    others = " or a ".join(ADAPTERS)
    raise TypeError(f"module must be one of mha_jax, mha_torch or mha_tt, or a {others}, got {type(module).__name__}")
