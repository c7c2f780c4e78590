"""Processes of Python that import no files of the current folder, which may be anyone's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Of an environment: `python -c` and `python -m` do not look into the current folder first."""


@contextmanager
def safe_path(**more: str) -> Iterator[None]:
    """Start processes inside with `SAFE_PATH` and more variables; multiprocessing starts them with `python -c`."""
    variables = SAFE_PATH | more
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
