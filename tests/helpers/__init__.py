"""Code and data that several tests use. `pythonpath` in pyproject.toml makes the package
importable.
"""

import os
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""

DATA = ROOT / "tests" / "data"
"""Schemas, and values that other programs computed."""

PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
"""For processes that import this package, `parity_lab` or tests."""

HAS_JAX = find_spec("jax") is not None
"""True in .venv, which has JAX and PyTorch."""
HAS_TTNN = find_spec("ttnn") is not None
"""True in .venv-tt, which has ttnn."""
