"""Loads what the tests of `mha_tt` share: fixtures.py. `tests/conftest.py` needs JAX and is left out."""

import os

import pytest

from . import MOCK_BOARD, RECORDED_BOARD

pytest_plugins = ["samples"]

collect_ignore = [] if MOCK_BOARD == RECORDED_BOARD else ["test_recorded_cases.py"]

# Two workers share two cores: threads of one that wait for those of the other take three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Load it where tests run: a process that only hands them to workers need not import ttnn, which takes seconds."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin(f"{__package__}.fixtures")
