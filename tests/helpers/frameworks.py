"""JAX and PyTorch behind the interface of all implementations, and strict settings. A plugin of
tests/conftest.py.
"""

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from helpers import ROOT
from helpers.siblings import EPSILON, Sibling, fixture_of

# Most programs compiled here run only once. These flags make compilation five times faster and the
# programs slower. XLA reads them at startup, and subprocesses inherit them. test_run checks trained
# layers compiled with the default settings; `XLA_FLAGS= pytest` uses those for all tests, and
# `XLA_FLAGS= make parity` for all cases.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ.setdefault(
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0"
)  # no operation needs its source location

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
from parity.measure.backends import BACKENDS
from parity.measure.backends import jax as jax_backend
from parity.measure.backends import torch as torch_backend

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
torch.set_num_threads(1)
# Compilation dominates the run time, and most programs have been compiled by another test: often a
# bug is injected into one stage of a case and the other stages are unchanged. (The Makefile sets
# the same for subprocesses.)
jax.config.update("jax_compilation_cache_dir", str(ROOT / "build" / "jax-cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# JAX creates an MLIR context for each function that it lowers, which takes a fifth of the time of a
# small one. Here they all share one, except functions lowered during the lowering of another.
_shared, _make = functools.cache(mlir.make_ir_context), mlir.make_ir_context
mlir.make_ir_context = lambda: _shared() if ir.Context.current is None else _make()

# Hypothesis would parse each module of the project to draw the numbers in it. That takes seconds in
# each worker, and what is drawn would depend on which modules other tests have imported. It keeps
# its own list of special numbers.
providers._get_local_constants = lambda: providers._local_constants

# Keep long-lived framework objects out of the garbage collections that run while JAX traces.
gc.freeze()
gc.set_threshold(50_000, 20, 50)


class JaxSibling(Sibling):
    """`mha_jax`."""

    name = "jax"
    package = mha_jax
    backend = jax_backend

    def assert_same(self, actual: np.ndarray, expected: np.ndarray, path: str) -> None:
        """Only the fused kernel is not exact: XLA compiles a different program of it for each
        shape.
        """
        __tracebackhide__ = True
        self.assert_close(actual, expected, within=4 * EPSILON if path.endswith("fused") else 0.0)

    @property
    def required(self) -> dict[str, Any]:
        return {"rngs": nnx.Rngs(0)}

    def module(self, kind: str, spec: AttentionSpec, seed: int = 0, **options: Any) -> Any:
        return nnx.clone(
            _drawn(getattr(mha_jax, kind), spec, seed, jax.config.jax_enable_x64, **options)
        )

    def in_dtype(self, dtype: Any) -> dict[str, Any]:
        return {"param_dtype": self.dtype(dtype)}

    def weights(self, weights: Mapping[str, np.ndarray], spec: AttentionSpec) -> Any:
        return jax_backend.to_params(weights, spec)

    def weight_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1]

    def container(self, tensors: Mapping[str, Any]) -> Any:
        tree: dict[str, dict[str, Any]] = {}
        for name, x in tensors.items():
            projection, leaf = name.split(".")
            tree.setdefault(projection, {})["kernel" if leaf == "weight" else "bias"] = x
        return tree

    def weights_of(self, module: Any) -> Any:
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def call(self, module: Any, *inputs: Any, **options: Any) -> Any:
        return _call_compiled(module, *inputs, **options)

    def seeded(self, function: str, seed: int = 0) -> dict[str, Any]:
        return {"rng" if function == "apply_dropout" else "dropout_rng": jax.random.key(seed)}


def _call(module: Any, *inputs: Any, **options: Any) -> Any:
    return module(*inputs, **options)


_call_compiled = jax.jit(_call, static_argnames=("is_causal", "need_weights"))


class TorchSibling(Sibling):
    """`mha_torch`."""

    name = "torch"
    package = mha_torch
    backend = torch_backend

    def module(self, kind: str, spec: AttentionSpec, seed: int = 0, **options: Any) -> Any:
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed formats a traceback for each kind of accelerator
        return getattr(mha_torch, kind)(spec, **options)

    def weights(self, weights: Mapping[str, np.ndarray], spec: AttentionSpec) -> Any:
        return torch_backend.to_state_dict(weights, spec)

    def weights_of(self, module: Any) -> Any:
        return dict(module.state_dict())

    def without_gradients(self) -> AbstractContextManager[Any]:
        """In which the cache's storage is updated in place."""
        return torch.no_grad()

    def seeded(self, function: str, seed: int = 0) -> dict[str, Any]:
        torch.default_generator.manual_seed(seed)
        return {}


@functools.lru_cache(maxsize=256)
def _drawn(kind: type, spec: AttentionSpec, seed: int, is_wide: bool, **options: Any) -> Any:
    """Return a JAX module to be copied: drawing its weights takes twenty times as long."""
    # The first call may be inside a function that JAX traces, and tracers must not be kept.
    with jax.ensure_compile_time_eval():
        return kind(spec, rngs=nnx.Rngs(seed), **options)


SIBLINGS: dict[str, Sibling] = {"jax": JaxSibling(), "torch": TorchSibling()}
sibling = fixture_of(SIBLINGS)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Clear the JAX caches before they exceed the limit of memory mappings, which would kill the
    process.
    """
    _NUM_RUN[0] += 1
    if _NUM_RUN[0] % 20 == 0:
        jax_backend.free_programs()


_NUM_RUN = [0]


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
    """Function of a backend name and a package name that makes the package the backend's only
    requirement.
    """

    def let_need(name: str, package: str) -> None:
        monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(needs=(package,)))

    return let_need
