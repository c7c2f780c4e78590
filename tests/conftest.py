"""What the tests share: the siblings behind one small adapter, and strict settings of the frameworks."""

import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# Most of what JAX compiles here runs once: so it compiles in a fifth of the time, and runs slower. XLA reads this as it
# starts, and processes that tests start inherit it. test_run judges trained layers compiled as users have it;
# `XLA_FLAGS= pytest` compiles so for all tests, and `XLA_FLAGS= make parity` for all cases.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # no operation needs to say which line it comes from
# Two workers share two cores: threads of one that wait for those of the other take three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("NPROC", "1")  # that of XLA

import jax
import numpy as np
import pytest
import torch
from flax import nnx
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
# Most of the time goes into compiling, and most of what one test compiles another has compiled before: often a mistake
# is planted in one stage of a case, and the others are as they were. (For subprocesses the Makefile says the same.)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / "build" / "jax-cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# JAX makes a context for each function that it lowers, which takes a fifth of the time of a small one. Here one serves
# all of them, except those that are lowered while another one is.
_shared, _make = functools.cache(mlir.make_ir_context), mlir.make_ir_context
mlir.make_ir_context = lambda: _shared() if ir.Context.current is None else _make()

# What the frameworks hold for good need not be looked through for garbage, again and again, while JAX traces.
gc.freeze()
gc.set_threshold(50_000, 20, 50)

pytest_plugins = ["pytester"]  # for tests/test_pytest_plugin.py

collect_ignore = ["tt", "cuda"]  # see the Makefile: where JAX is not, without this file; and where a GPU is


@dataclass(frozen=True)
class Sibling:
    """One of the sibling packages, driven with NumPy arrays."""

    name: str
    package: ModuleType
    backend: ModuleType

    def array(self, x: Any) -> Any:
        """The framework's array of the same values and dtype; lists become int32 arrays or boolean ones."""
        if not isinstance(x, np.ndarray):
            x = np.asarray(x)
            x = x.astype(np.int32) if np.issubdtype(x.dtype, np.integer) else x
        return self.backend.from_numpy(x)

    def numpy(self, x: Any) -> np.ndarray:
        """The NumPy array of the same values and dtype."""
        return self.backend.to_numpy(x)

    def module(self, kind: str, spec: AttentionSpec, seed: int = 0, **options: Any) -> Any:
        """A module of the package, `kind` being its class name, with weights drawn from the seed."""
        if self.name == "jax":
            return nnx.clone(_drawn(getattr(self.package, kind), spec, seed, jax.config.jax_enable_x64, **options))
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for each kind of accelerator
        return getattr(self.package, kind)(spec, **options)

    def weights_of(self, module: Any) -> Any:
        """The weights of a module in the container that functions take."""
        return nnx.to_pure_dict(nnx.state(module, nnx.Param)) if self.name == "jax" else dict(module.state_dict())


@functools.lru_cache(maxsize=256)
def _drawn(kind: type, spec: AttentionSpec, seed: int, is_wide: bool, **options: Any) -> Any:
    """A module of JAX, to be copied: to draw its weights takes twenty times as long."""
    return kind(spec, rngs=nnx.Rngs(seed), **options)


SIBLINGS = {
    "jax": Sibling("jax", mha_jax, jax_backend),
    "torch": Sibling("torch", mha_torch, torch_backend),
}


@pytest.fixture(params=list(SIBLINGS))
def sibling(request: pytest.FixtureRequest) -> Sibling:
    """Each sibling package in turn."""
    return SIBLINGS[request.param]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what JAX repeats: of a test for both siblings it runs the last combination of parameters.

    Every third one of the others is thorough. Compiling takes most of its time, and test_siblings shows that both are
    made of the same functions. A test marked `compiles` takes so long to compile that JAX runs none of it in make test.
    A refusal, which the name of its test says, compiles nothing.
    """
    by_test: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("sibling")
        if name and "refuse" not in item.name.partition("[")[0]:
            by_test.setdefault(item.nodeid.partition("[")[0], {}).setdefault(name, []).append(item)
    left_out = set[pytest.Item]()
    for of_test in by_test.values():
        if len(of_test) > 1:
            compiles = of_test["jax"][0].get_closest_marker("compiles")
            others = of_test["jax"][: None if compiles else -1]
            for item in others[::3]:
                item.add_marker(pytest.mark.thorough)
            left_out.update(others[1::3], others[2::3])
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])


MOST_MAPS = 20_000  # parts of memory; a third of what Linux lets a process have


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Let go of what JAX has compiled before it takes more maps of memory than a process may have, which kills it."""
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
    """Let pytest look once through what is left, for errors while objects are deleted, instead of five times."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(0)


@pytest.fixture
def let_need(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Called with the names of a backend and of the one package that it needs from then on."""

    def let_need(name: str, package: str) -> None:
        monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(needs=(package,)))

    return let_need
