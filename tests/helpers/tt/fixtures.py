"""Fixtures of the tests of `mha_tt`: the device, and the arrays uploaded to it."""

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
import ttnn_mock
from helpers.siblings import fixture_of
from parity.measure.backends import tt as backend
from ttnn_mock import hooks

from . import MOCK_BOARD
from .formulas import IS_MOCK
from .sibling import TtSibling

torch.set_num_threads(1)

# Long-lived objects of torch and ttnn need not be searched for garbage repeatedly.
gc.freeze()
gc.set_threshold(50_000, 20, 50)
# At exit they are garbage; otherwise nanobind reports remaining ttnn objects as leaks.
atexit.register(gc.unfreeze)
# Tests are garbage as well, but pytest's module loader outlives the interpreter and holds them in
# its configuration.
atexit.register(vars(__loader__).pop, "config", None)


sibling = fixture_of({"tt": TtSibling()})


def pytest_report_header() -> str:
    """Report the device that the tests use."""
    target = f"mock {MOCK_BOARD}" if IS_MOCK else mha_tt.describe_target()
    return f"device: {target}"


@pytest.fixture(scope="session")
def opened_device() -> ttnn.MeshDevice:
    """The device, opened once; a mock device computes no values."""
    return backend.open_device()


@pytest.fixture
def device(opened_device: ttnn.MeshDevice) -> Iterator[ttnn.MeshDevice]:
    """The device with values; on a mock device, ttnn's golden functions compute them."""
    with ttnn_mock.shadow() if IS_MOCK else nullcontext():
        yield opened_device


@pytest.fixture
def only_mock() -> None:
    """Skip a test on a card or a simulator."""
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
    """Return a list to which each call of a ttnn operation is appended."""
    made: list[Call] = []

    def note(operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        made.append(Call(operation.python_fully_qualified_name, arguments, keywords))

    fast = ttnn.CONFIG.enable_fast_runtime_mode
    ttnn.CONFIG.enable_fast_runtime_mode = False  # ttnn calls hooks only outside of the fast mode
    with ttnn.register_pre_operation_hook(note):
        yield made
    ttnn.CONFIG.enable_fast_runtime_mode = fast


@pytest.fixture
def uploads(device: ttnn.MeshDevice) -> Iterator[list[np.ndarray]]:
    """Return a list to which each array uploaded to the device is appended."""
    made: list[np.ndarray] = []

    def note(tensor: ttnn.Tensor, array: np.ndarray, pad_value: float) -> None:
        made.append(array)

    hooks.observers.append(note)
    yield made
    hooks.observers.remove(note)


@pytest.fixture
def host_tensors(device: ttnn.MeshDevice, monkeypatch: pytest.MonkeyPatch) -> list[ttnn.Tensor]:
    """Return a list of host tensors before their upload, including the padding of tiles."""
    made: list[ttnn.Tensor] = []
    to_device = ttnn.to_device

    def note(tensor: ttnn.Tensor, *arguments: Any, **keywords: Any) -> ttnn.Tensor:
        made.append(tensor)
        return to_device(tensor, *arguments, **keywords)

    monkeypatch.setattr(ttnn, "to_device", note)
    return made


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a program in an empty folder, with an empty home and no
    device.
    """
    for folder in ("home", "work"):
        (tmp_path / folder).mkdir()
    names = ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    root = Path(mha_tt.__file__).parents[1]
    surroundings = {
        **variables,
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(root),
        "LOGURU_LEVEL": "WARNING",
    }

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
