"""JAX and PyTorch behind one small adapter, and strict settings of both. A plugin, loaded by tests/conftest.py."""

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from helpers import ROOT

# Most programs compiled here run only once. These flags make compilation five times faster and the programs slower.
# XLA reads them at startup, and subprocesses inherit them. test_run checks trained layers compiled with the default
# settings; `XLA_FLAGS= pytest` uses those for all tests, and `XLA_FLAGS= make parity` for all cases.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # no operation needs its source location

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis.internal.conjecture import providers
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

import mha_jax
import mha_torch
from mha_spec import AttentionSpec
from parity.backends import BACKENDS
from parity.backends import jax as jax_backend
from parity.backends import torch as torch_backend

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
torch.set_num_threads(1)
# Compilation dominates the run time, and most programs have been compiled by another test: often a bug is injected into
# one stage of a case and the other stages are unchanged. (The Makefile sets the same for subprocesses.)
jax.config.update("jax_compilation_cache_dir", str(ROOT / "build" / "jax-cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# JAX creates an MLIR context for each function that it lowers, which takes a fifth of the time of a small one. Here
# they all share one, except functions lowered during the lowering of another.
_shared, _make = functools.cache(mlir.make_ir_context), mlir.make_ir_context
mlir.make_ir_context = lambda: _shared() if ir.Context.current is None else _make()

# Hypothesis would parse each module of the project to draw the numbers in it. That takes seconds in each worker, and
# what is drawn would depend on which modules other tests have imported. It keeps its own list of special numbers.
providers._get_local_constants = lambda: providers._local_constants

# Keep long-lived framework objects out of the garbage collections that run while JAX traces.
gc.freeze()
gc.set_threshold(50_000, 20, 50)


@dataclass(frozen=True)
class Sibling:
    """An implementation, called with NumPy arrays."""

    name: str
    package: ModuleType
    backend: ModuleType

    def array(self, x: Any) -> Any:
        """Return a framework array with the same values and dtype; lists become int32 or boolean arrays."""
        if not isinstance(x, np.ndarray):
            x = np.asarray(x)
            x = x.astype(np.int32) if np.issubdtype(x.dtype, np.integer) else x
        return self.backend.from_numpy(x)

    def numpy(self, x: Any) -> np.ndarray:
        """Return a NumPy array with the same values and dtype."""
        return self.backend.to_numpy(x)

    def module(self, kind: str, spec: AttentionSpec, seed: int = 0, **options: Any) -> Any:
        """Return a module of the class named `kind`, with weights drawn from the seed."""
        if self.name == "jax":
            return nnx.clone(_drawn(getattr(self.package, kind), spec, seed, jax.config.jax_enable_x64, **options))
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for each kind of accelerator
        return getattr(self.package, kind)(spec, **options)

    def weights_of(self, module: Any) -> Any:
        """Return the weights of a module in the container that the functions accept."""
        return nnx.to_pure_dict(nnx.state(module, nnx.Param)) if self.name == "jax" else dict(module.state_dict())


@functools.lru_cache(maxsize=256)
def _drawn(kind: type, spec: AttentionSpec, seed: int, is_wide: bool, **options: Any) -> Any:
    """Return a JAX module to be copied: drawing its weights takes twenty times as long."""
    return kind(spec, rngs=nnx.Rngs(seed), **options)


SIBLINGS = {
    "jax": Sibling("jax", mha_jax, jax_backend),
    "torch": Sibling("torch", mha_torch, torch_backend),
}


@pytest.fixture(params=list(SIBLINGS))
def sibling(request: pytest.FixtureRequest) -> Sibling:
    """Each implementation in turn."""
    return SIBLINGS[request.param]


MOST_MAPS = 20_000  # memory mappings; a third of the Linux limit per process


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Clear the JAX caches before they exceed the limit of memory mappings, which would kill the process."""
    _NUM_RUN[0] += 1
    if _NUM_RUN[0] % 20 == 0:
        _forget_compiled()


_NUM_RUN = [0]


def _forget_compiled() -> None:
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax_backend._compiled.cache_clear()
        jax.clear_caches()


def pytest_unconfigure() -> None:
    """Collect garbage once before pytest does so five times to find errors in finalizers."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def importable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules can be imported during the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def let_need(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Function of a backend name and a package name that makes the package the backend's only requirement."""

    def let_need(name: str, package: str) -> None:
        monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(needs=(package,)))

    return let_need
