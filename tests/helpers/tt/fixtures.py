"""What the tests of `mha_tt` share: the device, and what goes to it."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import ttnn

import mha_tt
from helpers.siblings import fixture_of
from mha_tt.mock.shadows import observers
from parity.backends import tt as backend

from . import MOCK_BOARD
from .formulas import IS_MOCK
from .sibling import TtSibling

torch.set_num_threads(1)

# What torch and ttnn hold for good need not be looked through for garbage, again and again.
gc.freeze()
gc.set_threshold(50_000, 20, 50)
# At exit they are garbage, and nanobind reports what is left of ttnn as leaks.
atexit.register(gc.unfreeze)
# So are tests, but that pytest's loader of modules, which outlives the interpreter, holds them by its configuration.
atexit.register(vars(__loader__).pop, "config", None)


sibling = fixture_of({"tt": TtSibling()})


def pytest_report_header() -> str:
    """What the tests run on."""
    found = f"mock {MOCK_BOARD}" if IS_MOCK else mha_tt.describe_target()
    return f"device: {found}"


@pytest.fixture(scope="session")
def opened_device() -> ttnn.MeshDevice:
    """The device, opened once; a mock one computes no values."""
    return backend.open_device()


@pytest.fixture
def device(opened_device: ttnn.MeshDevice) -> Iterator[ttnn.MeshDevice]:
    """The device, with values: on a mock one those of ttnn's golden functions."""
    with mha_tt.mock.shadow() if IS_MOCK else nullcontext():
        yield opened_device


@pytest.fixture
def only_mock() -> None:
    """Leaves a test out where a card or a simulator is."""
    if not IS_MOCK:
        pytest.skip("is about mock boards")


@dataclass(frozen=True)
class Call:
    """A call of an operation."""

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@pytest.fixture
def calls(device: ttnn.MeshDevice) -> Iterator[list[Call]]:
    """Every call of an operation of ttnn, as it happens."""
    made: list[Call] = []

    def note(operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        made.append(Call(operation.python_fully_qualified_name, arguments, keywords))

    fast = ttnn.CONFIG.enable_fast_runtime_mode
    ttnn.CONFIG.enable_fast_runtime_mode = False  # ttnn calls hooks outside of the fast mode only
    with ttnn.register_pre_operation_hook(note):
        yield made
    ttnn.CONFIG.enable_fast_runtime_mode = fast


@pytest.fixture
def uploads(device: ttnn.MeshDevice) -> Iterator[list[np.ndarray]]:
    """Every array that goes to the device, as it happens."""
    made: list[np.ndarray] = []

    def note(tensor: ttnn.Tensor, array: np.ndarray, pad_value: float) -> None:
        made.append(array)

    observers.append(note)
    yield made
    observers.remove(note)


@pytest.fixture
def host_tensors(device: ttnn.MeshDevice, monkeypatch: pytest.MonkeyPatch) -> list[ttnn.Tensor]:
    """Every tensor as it lies on the host before it goes to the device, tile padding and all."""
    made: list[ttnn.Tensor] = []
    to_device = ttnn.to_device

    def note(tensor: ttnn.Tensor, *arguments: Any, **keywords: Any) -> ttnn.Tensor:
        made.append(tensor)
        return to_device(tensor, *arguments, **keywords)

    monkeypatch.setattr(ttnn, "to_device", note)
    return made


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program on its own, in an empty folder, with an empty home and no device in its environment."""
    for folder in ("home", "work"):
        (tmp_path / folder).mkdir()
    names = ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    root = Path(mha_tt.__file__).parents[1]
    surroundings = {**kept, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(root), "LOGURU_LEVEL": "WARNING"}

    def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={**surroundings, **environment},
            cwd=tmp_path / "work",
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
