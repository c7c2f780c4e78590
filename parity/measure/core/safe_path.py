"""Python processes that do not import files from the current folder, which may be untrusted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment variable that keeps the current folder out of the path of `python -c` and `python
-m`.
"""


@contextmanager
def safe_path(**more: str) -> Iterator[None]:
    """Set `SAFE_PATH` and more variables for processes started within.

    multiprocessing uses `python -c`.
    """
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
