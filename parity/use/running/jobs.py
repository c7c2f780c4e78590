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
    next(results)  # starts the processes
    return results


def _results(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    cost: Callable[[Item], float],
) -> Generator[Any, None, None]:
    """Yield None when processes have begun, then the results."""
    processes_of_others = set(multiprocessing.active_children())
    num_processes = max(1, min(jobs, len(items)))
    # A forked process would share the threads and locks of frameworks that are loaded here.
    context = multiprocessing.get_context("spawn")
    surroundings = share_of_cores(num_processes)
    # The dearest first: an expensive item that begins last would keep one process busy alone.
    indices = sorted(range(len(items)), key=lambda index: -cost(items[index]))
    with safe_path(**surroundings):
        pool = ProcessPoolExecutor(num_processes, context, initializer=_end_with_parent)
    try:
        # The first items start the processes, which inherit the surroundings.
        with safe_path(**surroundings):
            futures = {index: pool.submit(function, items[index]) for index in indices}
        yield None
        for index in range(len(items)):
            # A future keeps its result: it is dropped, because traces are large.
            yield futures.pop(index).result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - processes_of_others:
            process.terminate()


def _end_with_parent() -> None:
    """End this process when its parent ends, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
