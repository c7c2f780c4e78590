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
    """Return environment variables that limit a process to its share of the cores, unless they are
    set already.

    Args:
        num_processes: number of processes that compute at once. If each used all cores, their
            threads would wait for each other and small cases take three times as long.
    """
    share = str(max((os.cpu_count() or 1) // num_processes, 1))
    return {
        name: os.environ.get(name, share) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    }


@contextmanager
def single_threaded() -> Iterator[None]:
    """Limit NumPy's OpenBLAS to one thread: on a busy machine, several wait for each other longer
    than they compute.

    If NumPy uses another library, its threads are unchanged.
    """
    if (found := _threads()) is None:
        yield
        return
    count, set_count = found
    before = int(count())
    set_count(1)
    try:
        yield
    finally:
        set_count(before)


@cache
def _threads() -> tuple[Any, Any] | None:
    """Return functions of the OpenBLAS in NumPy's wheel that get and set the number of threads."""
    folder = Path(np.__file__).parent
    for path in sorted(
        [
            *(folder.parent / "numpy.libs").glob("lib*openblas*"),
            *(folder / ".dylibs").glob("*openblas*"),
        ]
    ):
        library = ctypes.CDLL(str(path))
        for prefix, suffix in itertools.product(("scipy_openblas", "openblas"), ("64_", "")):
            names = [f"{prefix}_{verb}_num_threads{suffix}" for verb in ("get", "set")]
            if all(hasattr(library, name) for name in names):
                return getattr(library, names[0]), getattr(library, names[1])
    return None
