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
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

from parity.measure.core.problem import Problem
from parity.measure.core.safe_path import safe_path
from parity_lab.mesh.backend import MeshTrace
from parity_lab.mesh.plan import MeshPlan

PATIENCE = 600
"""Timeout of a problem in seconds: longer waits are deadlocks."""

CLONE = str(Path(__file__).parents[2])
"""Folder of `parity_lab`, which no installation lists: other processes must find it by path."""


class ProblemPart(NamedTuple):
    """Part of a `Reference` that a process needs, computed already.

    Its fields are named as in `Reference`.
    """

    problem: Problem
    with_gradients: bool
    rounded: dict[str, Any]


# Forks of a process that has imported everything and started no thread: imports take several
# seconds each.
START = "forkserver" if sys.platform == "linux" else "spawn"

Work = Callable[[ProblemPart, MeshPlan], MeshTrace]
"""Function that each process calls with a problem, together with the others; importable from a
module.
"""


class Processes:
    """Processes that share problems, until this one ends."""

    def __init__(self, size: int, work: Work) -> None:
        self.size, context = size, torch.multiprocessing.get_context(START)
        context.set_forkserver_preload(["__main__", work.__module__])
        self._folder = tempfile.TemporaryDirectory()
        if CLONE not in sys.path:
            sys.path.append(CLONE)
        # The fork server imports before it knows this process's path.
        with safe_path(PYTHONPATH=os.pathsep.join(folder for folder in sys.path if folder)):
            self._problems = [context.SimpleQueue() for _ in range(size)]
            self._results: Any = context.Queue()
            self._running = []
            for rank in range(size):
                arguments = (
                    rank,
                    size,
                    work,
                    self._folder.name,
                    self._problems[rank],
                    self._results,
                )
                process = context.Process(target=_run, args=arguments, daemon=True)
                process.start()
                self._running.append(process)
        atexit.register(self.stop)

    def record(self, part: ProblemPart, plan: MeshPlan) -> MeshTrace:
        """Run a problem on all processes, as a mesh; return the result of the first, with gathered
        stages.

        Raises:
            RuntimeError: if one of them raises an error; all are then stopped, because others may
                wait for it.
        """
        for problems in self._problems:
            problems.put((part, plan))
        waited = 0
        while True:
            try:
                rank, error, result = self._results.get(timeout=1)
            except queue.Empty:
                waited += 1
                reason = self._why_in_vain(waited)
                if reason is not None:
                    self.stop()
                    raise RuntimeError(reason) from None
                continue
            if error:
                self.stop()
                raise RuntimeError(f"process {rank}: {error}")
            if result is not None:
                return result

    def _why_in_vain(self, waited: int) -> str | None:
        """Return why no result will come, after a number of seconds, or None."""
        for rank, process in enumerate(self._running):
            if not process.is_alive():
                return f"process {rank} ended"
        if waited > PATIENCE:
            return f"there was no result within {PATIENCE} seconds"
        return None

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


def _run(rank: int, size: int, work: Work, folder: str, problems: Any, results: Any) -> None:
    """Run all received problems in one process."""
    torch.set_num_threads(1)  # processes share the cores
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE),
    )
    while True:
        part, plan = problems.get()
        try:
            result = work(part, plan)
            if rank > 0:
                result = None  # all have gathered the same stages
            results.put((rank, "", result))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            results.put((rank, f"{type(error).__name__}: {error} ({where.name})", None))
