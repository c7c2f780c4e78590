"""Contenders for the same work that run in turn, and statistics of their times."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from parity_lab.bench.operations import Operations

TURN_S = 0.01  # shorter work is repeated within its turn
MOST_REPEATS = 100
# between turns, because the threads of a library spin for a while before they release their cores
PAUSE_S = 0.002
ALLOWED = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 3e-2}
"""Difference of two contenders, as a share of the largest value: far above rounding, far below
other mathematics.
"""


@dataclass(frozen=True)
class Contender:
    """An implementation that is ready to do a piece of work.

    Attributes:
        run: do the work once, and return its results when it is done.
        arrays: results as arrays to compare: the output, the attention weights, the gradients of
            the inputs.
        peak_bytes: memory during a run beyond inputs and results; None if unknown.
        counts: compare it with ours; others are only shown.
        carries: every run changes the state of the next one: a cache holds one token more.
        operations: counts of a run; None if unknown.
    """

    run: Callable[[], Any]
    arrays: Callable[[Any], list[np.ndarray]]
    peak_bytes: Callable[[], int | None] = lambda: None
    counts: bool = True
    carries: bool = False
    operations: Callable[[], Operations | None] = lambda: None


@dataclass(frozen=True)
class Probe:
    """Measurement of the limit: an amount of work at the full speed of the machine.

    Attributes:
        run: do it, and return when it is done.
        amount: floating-point operations, or bytes.
    """

    run: Callable[[], Any]
    amount: float


def large_enough(make: Callable[[int], Probe], largest: int) -> Probe:
    """Return a probe of the smallest size that fills a turn, or of the largest, because half
    precision can be slow.

    Args:
        make: a function of the size.
        largest: power of 2, at least 256.
    """
    size = 256
    while True:
        probe = make(size)
        probe.run()
        begin = time.perf_counter()
        probe.run()
        if size >= largest or time.perf_counter() - begin > 2 * TURN_S:
            return probe
        size *= 2


@dataclass(frozen=True)
class Row:
    """Measurements of a piece of work in a framework; times are medians in milliseconds.

    Attributes:
        what, framework, shape, dtype: the work.
        ours_ms: our time.
        peers: times of other libraries by name.
        best_peer: the fastest library of the same framework.
        ratio: its time / ours.
        limit_ms: time of the same matrix products, or of reading the same bytes, at the measured
            speed of the machine.
        limit_ratio: our time / the limit.
        peak_bytes: our memory beyond inputs and results.
        group: group of the benchmark.
        axes: letters of the shape.
        peers_peak_bytes: memory of other libraries, by name.
        not_counted: names among `peers` that `best_peer` disregards.
        range_ms: our fastest and slowest run.
        rounds: number of runs of each.
        left_out: by name, the reason why a library was not measured.
        extra_ms: for an import, our time after the import of the framework.
        operations: counts of a run, by contender.
    """

    what: str
    framework: str
    shape: list[int]
    dtype: str
    ours_ms: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    best_peer: str | None = None
    ratio: float | None = None
    limit_ms: float | None = None
    limit_ratio: float | None = None
    peak_bytes: int | None = None
    group: str = ""
    axes: str = ""
    peers_peak_bytes: dict[str, int] = field(default_factory=dict)
    not_counted: list[str] = field(default_factory=list)
    range_ms: list[float] | None = None
    rounds: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    extra_ms: float | None = None
    operations: dict[str, Operations] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return asdict(self)


OURS, LIMIT = "ours", "limit"


def times_of(
    seconds: Mapping[str, Sequence[float]],
    *,
    not_counted: Sequence[str] = (),
    amount: float | None = None,
    probe: float | None = None,
) -> dict[str, Any]:
    """Return the fields of a row that follow from the times of all runs.

    Args:
        seconds: times of every round, by contender; ours is `OURS`, and the probe, if any, `LIMIT`.
        not_counted: names that `best_peer` disregards.
        amount: least amount of work, in the probe's unit.
        probe: amount of work of the probe.
    """
    medians = {
        name: 1e3 * statistics.median(times) for name, times in seconds.items() if name != LIMIT
    }
    ours = medians.pop(OURS)
    counted = {name: ms for name, ms in medians.items() if name not in not_counted}
    best = min(counted, key=counted.__getitem__, default=None)
    limit = (
        1e3 * min(seconds[LIMIT]) * amount / probe
        if amount is not None and probe and LIMIT in seconds
        else None
    )
    return {
        "ours_ms": ours,
        "peers": medians,
        "best_peer": best,
        "ratio": None if best is None else counted[best] / ours,
        "limit_ms": limit,
        "limit_ratio": None if limit is None else ours / limit,
        "not_counted": [name for name in medians if name in not_counted],
        "range_ms": [1e3 * min(seconds[OURS]), 1e3 * max(seconds[OURS])],
        "rounds": len(seconds[OURS]),
    }


def run_in_turn(
    runs: Mapping[str, Callable[[], Any]],
    *,
    budget_s: float,
    rounds: tuple[int, int] = (5, 15),
    most_repeats: Mapping[str, int] | None = None,
    warm_up: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of every run: each contender runs once per round, in random order.

    Args:
        runs: contenders by name; each has run before.
        budget_s: approximate time of all rounds, in seconds.
        rounds: least and largest number of rounds.
        most_repeats: most runs within a turn, by name; default: `MOST_REPEATS`.
        warm_up: begin each turn with a run that is not timed, because the previous contender has
            left caches, threads and the allocator in a different state, and repeated use is
            measured.
        clock: function that returns the time in seconds.
    """

    def turn(name: str, repeats: int) -> float:
        if warm_up:
            runs[name]()
        begin = clock()
        for _ in range(repeats):
            runs[name]()
        return (clock() - begin) / repeats

    most = dict.fromkeys(runs, MOST_REPEATS) | dict(most_repeats or {})
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        first = {name: turn(name, 1) for name in runs}
        repeats = {
            name: min(most[name], max(1, math.ceil(TURN_S / max(seconds, 1e-9))))
            for name, seconds in first.items()
        }
        a_round = sum((repeats[name] + warm_up) * seconds for name, seconds in first.items())
        count = max(rounds[0], min(rounds[1], int(budget_s / max(a_round, 1e-9))))
        found: dict[str, list[float]] = {name: [] for name in runs}
        names, shuffle = list(runs), random.Random(0).shuffle
        for _ in range(count):
            shuffle(names)
            for name in names:
                time.sleep(PAUSE_S)
                found[name].append(turn(name, repeats[name]))
    finally:
        if was_enabled:
            gc.enable()
    return found


def difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Return the largest difference of two contenders' arrays as a share of our largest value; inf
    if shapes differ.
    """
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return math.inf
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        mine, other = mine.astype(np.float32), other.astype(np.float32)
        scale = float(np.abs(mine).max(initial=0.0)) or 1.0
        error = float(np.abs(mine - other).max(initial=0.0)) / scale
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the growth of a value with a size: the slope of their logarithms over the larger half;
    None if unknown.
    """
    pairs = sorted((size, value) for size, value in zip(sizes, values, strict=True) if value > 0)
    pairs = pairs[max(0, min(len(pairs) // 2, len(pairs) - 2)) :]  # at least two
    if len(pairs) < 2 or pairs[0][0] == pairs[-1][0]:
        return None
    x, y = np.log([pair[0] for pair in pairs]), np.log([pair[1] for pair in pairs])
    return float(np.polyfit(x, y, 1)[0])


def growth(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the growth of time and memory with the tokens S and the batch B, by work, framework,
    dtype, contender.
    """
    found = []
    series: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        if row.group.startswith("growth"):
            for name in (OURS, *row.peers):
                series.setdefault((row.what, row.framework, row.dtype, name), []).append(row)
    for (what, framework, dtype, name), of_name in series.items():
        for axis, over in enumerate(of_name[0].axes.split()):
            # Along S rows of the smallest batch, along B rows of the length with the most batches.
            others = {tuple(n for i, n in enumerate(row.shape) if i != axis) for row in of_name}
            lines = [
                [row for row in of_name if tuple(np.delete(row.shape, axis)) == rest]
                for rest in others
            ]
            line = max(lines, key=len)
            if over not in "BS" or len(line) < 2:
                continue
            sizes = [row.shape[axis] for row in line]
            ours = name == OURS
            ms = [(row.ours_ms if ours else row.peers.get(name)) or 0.0 for row in line]
            peak = [
                (row.peak_bytes if ours else row.peers_peak_bytes.get(name)) or 0.0 for row in line
            ]
            for of, values in (("time", ms), ("memory", peak)):
                key = {
                    "what": what,
                    "framework": framework,
                    "dtype": dtype,
                    "name": name,
                    "of": of,
                    "over": over,
                }
                found.append({**key, "exponent": exponent(sizes, values)})
    return found
