"""Number of threads of matrix products."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


def share_of_cores(num_processes: int) -> dict[str, str]:
    """Return environment variables that limit a process to its share of the cores.

    Variables that are set already stay.

    Args:
        num_processes: number of processes that compute at once. If each used all cores, their
            threads would wait for each other and small cases take three times as long.
    """
    share = str(max((os.cpu_count() or 1) // num_processes, 1))
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: os.environ.get(name, share) for name in names}


@contextmanager
def single_threaded() -> Iterator[None]:
    """Limit NumPy's OpenBLAS to one thread.

    On a busy machine, several wait for each other longer than they compute. If NumPy uses another
    library, its threads are unchanged.
    """
    functions = _thread_functions()
    if functions is None:
        yield
        return
    get_count, set_count = functions
    before = int(get_count())
    set_count(1)
    try:
        yield
    finally:
        set_count(before)


@cache
def _thread_functions() -> tuple[Any, Any] | None:
    """Return functions of the OpenBLAS in NumPy's wheel that get and set the number of threads."""
    folder = Path(np.__file__).parent
    on_linux = (folder.parent / "numpy.libs").glob("lib*openblas*")
    on_macos = (folder / ".dylibs").glob("*openblas*")
    for path in sorted([*on_linux, *on_macos]):
        library = ctypes.CDLL(str(path))
        for prefix, suffix in itertools.product(("scipy_openblas", "openblas"), ("64_", "")):
            # Wheels rename the functions, in several ways.
            getter = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
            setter = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
            if getter is not None and setter is not None:
                return getter, setter
    return None
