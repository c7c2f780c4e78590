"""Child processes with torch's gloo, each of which runs its part of the same problems."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

from parity.measure.core.problem import Problem
from parity.measure.core.safe_path import safe_path
from parity.measure.core.trace import Trace
from parity.measure.sharding.mesh import MeshPlan

PATIENCE = 600
"""Timeout of a problem in seconds: longer waits are deadlocks."""


class Given(NamedTuple):
    """Part of a `Reference` that a process needs, without computation."""

    problem: Problem
    with_gradients: bool
    given: dict[str, Any]


# Forks of a process that has imported everything and started no thread: imports take several
# seconds each.
START = "forkserver" if sys.platform == "linux" else "spawn"

Work = Callable[[Given, MeshPlan], Trace]
"""Function that each process calls with a problem, together with the others; importable from a
module.
"""


class Processes:
    """Processes that share problems, until this one ends."""

    def __init__(self, size: int, work: Work) -> None:
        self.size, context = size, torch.multiprocessing.get_context(START)
        context.set_forkserver_preload(["__main__", work.__module__])
        self._folder = tempfile.TemporaryDirectory()
        # The fork server imports before it knows this process's path.
        with safe_path(PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
            self._problems = [context.SimpleQueue() for _ in range(size)]
            self._found: Any = context.Queue()
            args = [
                (rank, size, work, self._folder.name, self._problems[rank], self._found)
                for rank in range(size)
            ]
            self._running = [context.Process(target=_run, args=each, daemon=True) for each in args]
            for process in self._running:
                process.start()
        atexit.register(self.stop)

    def record(self, given: Given, plan: MeshPlan) -> Trace:
        """Run a problem on all processes, as a mesh; return the trace of the first, with gathered
        stages.

        Raises:
            RuntimeError: if one of them raises an error; all are then stopped, because others may
                wait for it.
        """
        for problems in self._problems:
            problems.put((given, plan))
        waited = 0
        while True:
            try:
                rank, error, trace = self._found.get(timeout=1)
            except queue.Empty:
                waited += 1
                ended = [
                    rank for rank, process in enumerate(self._running) if not process.is_alive()
                ]
                if ended or waited > PATIENCE:
                    self.stop()
                    why = (
                        f"process {ended[0]} ended"
                        if ended
                        else f"there was no result within {PATIENCE} seconds"
                    )
                    raise RuntimeError(why) from None
                continue
            if error:
                self.stop()
                raise RuntimeError(f"process {rank}: {error}")
            if trace is not None:
                return trace

    @property
    def is_running(self) -> bool:
        """Return whether all processes are running."""
        return all(process.is_alive() for process in self._running)

    def stop(self) -> None:
        """Stop all processes."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.join()
        self._folder.cleanup()
        atexit.unregister(self.stop)


def _run(rank: int, size: int, work: Work, folder: str, problems: Any, found: Any) -> None:
    """Run all received problems in one process."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE),
    )
    while True:
        given, plan = problems.get()
        try:
            trace = work(given, plan)
            found.put((rank, "", trace if rank == 0 else None))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found.put((rank, f"{type(error).__name__}: {error} ({where.name})", None))
