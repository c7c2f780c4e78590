"""Times of imports, each in its own process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from parity_lab.bench.measure import OURS, Row, run_in_turn, times_of

IMPORTS = {"jax": "import jax, flax.nnx", "torch": "import torch"}

EMPTY = "python -c pass"

PROGRAM = """
import json, time
begin = time.perf_counter()
{framework}
middle = time.perf_counter()
import mha_{name}
print(json.dumps([middle - begin, time.perf_counter() - begin]))
"""


def bench_imports(
    frameworks: Sequence[str], *, repeats: int, on_row: Callable[..., Any] = lambda *what: None
) -> list[Row]:
    """Return a row for the import of each implementation and of its framework, and one for
    `mha-parity --help`.

    Args:
        frameworks: frameworks of the implementations.
        repeats: number of processes for each.
        on_row: called before each row, with its description.
    """
    rows = [_import_row(name, repeats, on_row) for name in frameworks]
    rows.append(_help_row(repeats, on_row))
    return rows


def _import_row(name: str, repeats: int, on_row: Callable[..., Any]) -> Row:
    """Return the row of an implementation and of its framework, imported in one process."""
    what = f"{IMPORTS[name]}, mha_{name}"
    on_row(what)
    program = PROGRAM.format(framework=IMPORTS[name], name=name)
    run_python("-c", program)  # the first fills the disk cache
    framework_seconds = []
    total_seconds = []
    extra_seconds = []
    for _ in range(repeats):
        of_framework, total = json.loads(run_python("-c", program))
        framework_seconds.append(of_framework)
        total_seconds.append(total)
        extra_seconds.append(total - of_framework)
    extra_ms = 1e3 * statistics.median(extra_seconds)
    fields = times_of({OURS: total_seconds, IMPORTS[name]: framework_seconds})
    return Row(what, name, [], "", group="import", extra_ms=extra_ms, **fields)


def _help_row(repeats: int, on_row: Callable[..., Any]) -> Row:
    """Return the row of `mha-parity --help`, next to a process that does nothing."""
    on_row("mha-parity --help")
    runs = {
        OURS: partial(run_python, "-m", "parity", "--help"),
        EMPTY: partial(run_python, "-c", "pass"),
    }
    seconds = run_in_turn(runs, budget_s=0.0, rounds=(repeats, repeats), warm_up=False)
    extra_ms = 1e3 * (statistics.median(seconds[OURS]) - statistics.median(seconds[EMPTY]))
    fields = times_of(seconds, not_counted=[EMPTY])
    return Row("mha-parity --help", "", [], "", group="import", extra_ms=extra_ms, **fields)


def run_python(*arguments: str) -> str:
    """Return the output of a new Python process."""
    done = subprocess.run(
        [sys.executable, "-P", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"python {arguments[0]} must end well, got {done.stderr.strip()[-500:]}")
    return done.stdout
