"""Work divided among processes, each with frameworks of its own."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from parity.core.blas import share_of_cores
from parity.core.safe_path import safe_path

Item = TypeVar("Item")
Result = TypeVar("Result")


def by_processes(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, *, cost: Callable[[Item], float]
) -> Generator[Result, None, None]:
    """The results of a function for each item, in their order, from so many processes; what costs most begins first.

    The function, what it takes and what it gives are pickled. Processes begin at once, and whoever closes the iterator
    ends them, as do an error and a signal where results are asked for.

    Raises:
        BrokenProcessPool: if one of the processes ends, for want of memory, say.
    """
    results = _results(function, items, jobs, cost)
    next(results)
    return results


def _results(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, cost: Callable[[Item], float]
) -> Generator[Any, None, None]:
    """Nothing, when processes have begun; then the results."""
    others = set(multiprocessing.active_children())
    # A process that is forked would share the threads and locks of frameworks that are loaded here.
    num_processes = max(1, min(jobs, len(items)))
    context, surroundings = multiprocessing.get_context("spawn"), share_of_cores(num_processes)
    dearest_first = sorted(range(len(items)), key=lambda i: -cost(items[i]))
    with safe_path(**surroundings):
        pool = ProcessPoolExecutor(num_processes, context, initializer=_end_with_parent)
    try:
        with safe_path(**surroundings):
            begun = {i: pool.submit(function, items[i]) for i in dearest_first}
        yield None
        for i in range(len(items)):
            yield begun.pop(i).result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()


def _end_with_parent() -> None:
    """End this process when its parent does, also where that had no time to say so."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
