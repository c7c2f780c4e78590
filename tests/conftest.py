"""Settings and fixtures of all tests, in every environment: threads, the selection of rows, random
numbers.

`helpers/frameworks.py` is loaded where JAX and PyTorch are installed, and `helpers/tt/fixtures.py`
where ttnn is.
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import HAS_JAX

# Two workers share two cores. Threads that wait for the other worker's take three times as
# long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("NPROC", "1")  # read by XLA

# No test shows what a crash of the machine leaves, and to wait for the disk takes half a minute.
os.fsync = lambda descriptor: None

pytest_plugins = ["pytester", "helpers.samples", "helpers.budget"]  # the first for tests of plugins


def pytest_configure(config: pytest.Config) -> None:
    """Load the frameworks where tests run: the process that only hands them to workers need not
    import any.
    """
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        plugin = "helpers.frameworks" if HAS_JAX else "helpers.tt.fixtures"
        config.pluginmanager.import_plugin(plugin)


@pytest.fixture
def rng() -> np.random.Generator:
    """Random number generator with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture
def own_registrations() -> Iterator[None]:
    """Forget the layouts and bugs that a test registers: they would appear in other tests."""
    from parity.explain.diagnosis.bugs.registry import OWN_BUGS
    from parity.port.conversion.layouts import LAYOUTS

    layouts, bugs = dict(LAYOUTS), dict(OWN_BUGS)
    yield
    LAYOUTS.clear()
    LAYOUTS.update(layouts)
    OWN_BUGS.clear()
    OWN_BUGS.update(bugs)
