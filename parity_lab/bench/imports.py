"""Times of imports, each in its own process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from parity_lab.bench.measure import OURS, Row, run_in_turn, times_of

IMPORTS = {"jax": "import jax, flax.nnx", "torch": "import torch"}

PROGRAM = """
import json, time
begin = time.perf_counter()
{framework}
between = time.perf_counter()
import mha_{name}
print(json.dumps([between - begin, time.perf_counter() - begin]))
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
    return [
        *(_import_row(name, repeats, on_row) for name in frameworks),
        _help_row(repeats, on_row),
    ]


def _import_row(name: str, repeats: int, on_row: Callable[..., Any]) -> Row:
    what = f"{IMPORTS[name]}, mha_{name}"
    on_row(what)
    program = PROGRAM.format(framework=IMPORTS[name], name=name)
    pairs = [json.loads(run_python("-c", program)) for _ in range(repeats + 1)][
        1:
    ]  # the first fills the disk cache
    theirs, ours = zip(*pairs, strict=True)
    extra = 1e3 * statistics.median(total - framework for framework, total in pairs)
    fields = times_of({OURS: ours, IMPORTS[name]: theirs})
    return Row(what, name, [], "", group="import", extra_ms=extra, **fields)


def _help_row(repeats: int, on_row: Callable[..., Any]) -> Row:
    on_row("mha-parity --help")
    runs = {
        OURS: lambda: run_python("-m", "parity", "--help"),
        "python -c pass": lambda: run_python("-c", "pass"),
    }
    seconds = run_in_turn(runs, budget_s=0.0, rounds=(repeats, repeats), warm_up=False)
    extra = 1e3 * (statistics.median(seconds[OURS]) - statistics.median(seconds["python -c pass"]))
    fields = times_of(seconds, not_counted=["python -c pass"])
    return Row("mha-parity --help", "", [], "", group="import", extra_ms=extra, **fields)


def run_python(*arguments: str) -> str:
    """Return the output of a new Python process."""
    done = subprocess.run(
        [sys.executable, "-P", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"python {arguments[0]} must end well, got {done.stderr.strip()[-500:]}")
    return done.stdout
