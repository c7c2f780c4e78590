"""Work divided among processes, each with its own frameworks."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from parity.measure.core.blas import share_of_cores
from parity.measure.core.safe_path import safe_path

Item = TypeVar("Item")
Result = TypeVar("Result")


def by_processes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    *,
    cost: Callable[[Item], float],
) -> Generator[Result, None, None]:
    """Return the results of a function for each item, in their order, from `jobs` processes.

    Items of the highest cost begin first. The function, its arguments and its results are pickled.
    Processes begin at once. They end when the iterator is closed, and if an error or a signal
    interrupts the wait for a result.

    Raises:
        BrokenProcessPool: if one of the processes ends, for example for lack of memory.
    """
    results = _results(function, items, jobs, cost)
    next(results)
    return results


def _results(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    cost: Callable[[Item], float],
) -> Generator[Any, None, None]:
    """Yield None when processes have begun, then the results."""
    others = set(multiprocessing.active_children())
    # A forked process would share the threads and locks of frameworks that are loaded here.
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
    """End this process when its parent ends, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
