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

OURS, LIMIT = "ours", "limit"
"""Names of our contender and of the probe of the limit."""

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

    def ms_of(self, name: str) -> float | None:
        """Return the time of a contender in milliseconds; None if it was not measured."""
        if name == OURS:
            return self.ours_ms
        return self.peers.get(name)

    def peak_bytes_of(self, name: str) -> int | None:
        """Return the memory of a contender beyond inputs and results; None if unknown."""
        if name == OURS:
            return self.peak_bytes
        return self.peers_peak_bytes.get(name)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return asdict(self)


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
    ours_ms = 1e3 * statistics.median(seconds[OURS])
    peers = {}
    for name, times in seconds.items():
        if name not in (OURS, LIMIT):
            peers[name] = 1e3 * statistics.median(times)

    counted_peers = {name: ms for name, ms in peers.items() if name not in not_counted}
    best_peer = None
    ratio = None
    if counted_peers:
        best_peer = min(counted_peers, key=counted_peers.__getitem__)
        ratio = counted_peers[best_peer] / ours_ms

    limit_ms = None
    limit_ratio = None
    if amount is not None and probe and LIMIT in seconds:
        # The machine's full speed is the probe's fastest run, not of its median.
        limit_ms = 1e3 * min(seconds[LIMIT]) * amount / probe
        limit_ratio = ours_ms / limit_ms

    return {
        "ours_ms": ours_ms,
        "peers": peers,
        "best_peer": best_peer,
        "ratio": ratio,
        "limit_ms": limit_ms,
        "limit_ratio": limit_ratio,
        "not_counted": [name for name in peers if name in not_counted],
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

    def seconds_of_turn(name: str, num_repeats: int) -> float:
        if warm_up:
            runs[name]()
        begin = clock()
        for _ in range(num_repeats):
            runs[name]()
        return (clock() - begin) / num_repeats

    limits = dict.fromkeys(runs, MOST_REPEATS) | dict(most_repeats or {})
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        # A first turn shows how often each contender has to run in the later ones.
        repeats = {}
        seconds_of_round = 0.0
        for name in runs:
            seconds = seconds_of_turn(name, 1)
            repeats_to_fill = math.ceil(TURN_S / max(seconds, 1e-9))
            repeats[name] = min(limits[name], max(1, repeats_to_fill))
            seconds_of_round += (repeats[name] + warm_up) * seconds
        affordable = int(budget_s / max(seconds_of_round, 1e-9))
        least_rounds, most_rounds = rounds
        num_rounds = max(least_rounds, min(most_rounds, affordable))

        times: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        rng = random.Random(0)
        for _ in range(num_rounds):
            rng.shuffle(names)
            for name in names:
                time.sleep(PAUSE_S)
                times[name].append(seconds_of_turn(name, repeats[name]))
    finally:
        if was_enabled:
            gc.enable()
    return times


def difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Return the largest difference of two contenders' arrays as a share of our largest value; inf
    if shapes differ.
    """
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return math.inf
    worst = 0.0
    for our_values, their_values in zip(ours, theirs, strict=True):
        our_values = our_values.astype(np.float32)
        their_values = their_values.astype(np.float32)
        scale = float(np.abs(our_values).max(initial=0.0)) or 1.0
        error = float(np.abs(our_values - their_values).max(initial=0.0)) / scale
        # `max` would drop a NaN.
        if not math.isfinite(error):
            return math.inf
        worst = max(worst, error)
    return worst


# ---- Growth --------------------------------------------------------------------------------------


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the growth of a value with a size: the slope of their logarithms over the larger half;
    None if unknown.
    """
    points = sorted((size, value) for size, value in zip(sizes, values, strict=True) if value > 0)
    if len(points) < 2:
        return None
    # The smaller half also has costs that do not grow. A slope needs two points.
    first = min(len(points) // 2, len(points) - 2)
    x, y = np.array(points[first:], np.float64).T
    if x[0] == x[-1]:
        return None
    slope, _ = np.polyfit(np.log(x), np.log(y), 1)
    return float(slope)


def growth(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the growth of time and memory with the tokens S and the batch B, by work, framework,
    dtype, contender.
    """
    series: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        if not row.group.startswith("growth"):
            continue
        for name in (OURS, *row.peers):
            series.setdefault((row.what, row.framework, row.dtype, name), []).append(row)

    exponents = []
    for (what, framework, dtype, name), rows_of_series in series.items():
        facts = {"what": what, "framework": framework, "dtype": dtype, "name": name}
        for axis, letter in enumerate(rows_of_series[0].axes.split()):
            if letter not in "BS":
                continue
            line = _longest_line(rows_of_series, axis)
            if len(line) < 2:
                continue
            sizes = [row.shape[axis] for row in line]
            ms = [row.ms_of(name) or 0.0 for row in line]
            peaks = [row.peak_bytes_of(name) or 0.0 for row in line]
            for of, values in (("time", ms), ("memory", peaks)):
                slope = exponent(sizes, values)
                exponents.append({**facts, "of": of, "over": letter, "exponent": slope})
    return exponents


def _longest_line(rows: Sequence[Row], axis: int) -> list[Row]:
    """Return the most rows whose shapes differ along one axis only.

    Along S, these are the rows of the smallest batch; along B, the rows of the length with the most
    batches.
    """
    lines: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        other_sizes = (*row.shape[:axis], *row.shape[axis + 1 :])
        lines.setdefault(other_sizes, []).append(row)
    return max(lines.values(), key=len)
