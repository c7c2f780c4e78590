"""Code and data that several tests use. `pythonpath` in pyproject.toml makes the package importable."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""

DATA = ROOT / "tests" / "data"
"""Schemas, and values that other programs computed."""

PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
"""For processes that import this package, `parity_lab` or tests."""
