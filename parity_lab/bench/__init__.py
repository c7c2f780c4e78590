"""Speed of the implementations compared with other libraries, in turn in one process, and with the
machine's limit.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Protocol

from mha_spec import InputError
from parity.measure.backends import why_missing
from parity_lab.bench.measure import (
    ALLOWED,
    LIMIT,
    OURS,
    Contender,
    Probe,
    Row,
    difference,
    growth,
    run_in_turn,
    times_of,
)
from parity_lab.bench.work import DTYPES, GROUPS, Inputs, Work, draw_inputs, plan

FRAMEWORKS = ("jax", "torch")
DEVICES = ("cpu", "cuda")

__all__ = [
    "DEVICES",
    "DTYPES",
    "FRAMEWORKS",
    "GROUPS",
    "Bench",
    "Row",
    "Work",
    "bench",
    "bench_work",
    "count_rows",
    "plan",
]

Make = Callable[[], Contender]


class Side(Protocol):
    """Interface of the benchmark of a framework."""

    def settings(self) -> dict[str, Any]: ...
    def matmul(self, dtype: str) -> Probe: ...
    def reading(self) -> Probe | None: ...
    def contenders(self, work: Work, inputs: Inputs) -> dict[str, Make]: ...


@dataclass(frozen=True)
class Bench:
    """Measurements, with their environment.

    Attributes:
        rows: one for each piece of work in each framework.
        environment: environment of a report, and the settings that change the speed.
        names: descriptions of the contenders, by framework and name.
    """

    rows: list[Row]
    environment: dict[str, Any]
    names: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def growth(self) -> list[dict[str, Any]]:
        """Growth of time and memory, see `measure.growth`."""
        return growth(self.rows)

    @property
    def left_out(self) -> dict[tuple[str, str, str], int]:
        """Contenders that were not measured, as (framework, contender, reason), with the number of
        rows.
        """
        counts: Counter[tuple[str, str, str]] = Counter()
        for row in self.rows:
            for name, reason in row.left_out.items():
                counts[row.framework, name, reason] += 1
        return dict(counts)

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements for JSON."""
        left_out = []
        for (framework, name, reason), count in self.left_out.items():
            facts = {"framework": framework, "name": name, "reason": reason, "rows": count}
            left_out.append(facts)
        return {
            "environment": self.environment,
            "rows": [row.to_dict() for row in self.rows],
            "growth": self.growth,
            "left_out": left_out,
            "names": self.names,
        }


def bench(
    groups: Sequence[str] = GROUPS,
    frameworks: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    *,
    device: str = "cpu",
    quick: bool = False,
    profile: bool = False,
    works: Sequence[Work] | None = None,
    on_row: Callable[..., Any] = lambda *what: None,
) -> Bench:
    """Measure the groups.

    Args:
        groups: some of `GROUPS`.
        frameworks: some of `FRAMEWORKS`; default: those that are installed.
        dtypes: some of `DTYPES`; default: float32, on a GPU bfloat16.
        device: device of torch; JAX uses its default device.
        quick: fewer rows, smaller shapes and less time for each.
        profile: also count the kernels, copies and waits of each contender.
        works: pieces of work to measure instead of the planned ones.
        on_row: called before each row, with its description.

    Raises:
        ModuleNotFoundError: if a framework is not installed.
        RuntimeError: if the device does not exist.
        ValueError: if a name is unknown.
    """
    groups, frameworks, dtypes = checked(groups, frameworks, dtypes, device)
    sides, names = open_sides(frameworks, device)
    if works is None:
        works = plan(groups, dtypes, quick=quick, long=device == "cuda")
    rows = []
    for work in works:
        on_row(f"{work.what} {work.shape}")
        rows += bench_work(work, sides, profile=profile, **effort(quick))
    if "import" in groups:
        from parity_lab.bench.imports import bench_imports

        rows += bench_imports(frameworks, repeats=2 if quick else 7, on_row=on_row)
    if "convert" in groups:
        from parity_lab.bench.conversion import bench_conversion

        on_row("conversion of a checkpoint")
        rows += bench_conversion(num_layers=2 if quick else 8, repeats=3 if quick else 7)
    return Bench(rows, environment_of(sides), names)


def count_rows(
    groups: Sequence[str],
    frameworks: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    *,
    device: str = "cpu",
    quick: bool = False,
) -> int:
    """Return how often `bench` calls `on_row` for the same arguments; it raises the same errors."""
    groups, frameworks, dtypes = checked(groups, frameworks, dtypes, device)
    num_rows = len(plan(groups, dtypes, quick=quick, long=device == "cuda"))
    if "import" in groups:
        num_rows += len(frameworks) + 1  # and `mha-parity --help`
    if "convert" in groups:
        num_rows += 1
    return num_rows


def checked(
    groups: Sequence[str],
    frameworks: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    device: str,
) -> tuple[list[str], list[str], list[str]]:
    """Return the groups, frameworks and dtypes to measure, with defaults; reject what does not
    exist.
    """
    if device not in DEVICES:
        raise InputError("device", f"be one of {', '.join(DEVICES)}", device=device)
    if frameworks is None:
        frameworks = [name for name in FRAMEWORKS if not why_missing(name)]
    if dtypes is None:
        dtypes = ["bfloat16" if device == "cuda" else "float32"]
    _check_names("groups", groups, GROUPS)
    _check_names("frameworks", frameworks, FRAMEWORKS)
    _check_names("dtypes", dtypes, DTYPES)
    for name in frameworks:
        reason = why_missing(name)
        if reason:
            raise ModuleNotFoundError(reason)
    if not frameworks:
        raise ModuleNotFoundError(
            f"the benchmark needs one of {', '.join(FRAMEWORKS)}, none is installed here"
        )
    if device == "cuda" and "torch" in frameworks:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(
                f"a GPU must exist for cuda, got torch {torch.__version__} without one"
            )
    return list(groups), list(frameworks), list(dtypes)


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Reject names that do not exist."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(what, f"be among {', '.join(known)}", ", ".join(unknown))


def open_sides(
    frameworks: Sequence[str], device: str
) -> tuple[dict[str, Side], dict[str, dict[str, str]]]:
    """Return the benchmarks of these frameworks, and the descriptions of their contenders."""
    if device == "cuda":
        # Otherwise JAX allocates most of the memory when it starts.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sides = {}
    names = {}
    for framework in frameworks:
        module = importlib.import_module(f"parity_lab.bench.{framework}")
        sides[framework] = module.Side(device) if framework == "torch" else module.Side()
        names[framework] = module.NAMES
    return sides, names


def effort(quick: bool) -> dict[str, Any]:
    """Return the time budget in seconds and the numbers of rounds of a row, arguments of
    `bench_work`.
    """
    if quick:
        return {"budget_s": 0.3, "rounds": (3, 9)}
    return {"budget_s": 3.0, "rounds": (5, 15)}


def environment_of(sides: Mapping[str, Side]) -> dict[str, Any]:
    """Return the environment, without the numerics lock, which is not held during measurements."""
    from parity.measure.backends.numerics import environment

    facts = environment(sides)
    packages = dict(facts["packages"])
    for name in ("keras", "equinox", "transformers"):
        if find_spec(name):
            packages[name] = metadata.version(name)
    backends = {}
    for name, backend_facts in facts["backends"].items():
        backends[name] = dict(backend_facts)
        backends[name].pop("numerics", None)
    settings = {name: side.settings() for name, side in sides.items()}
    return {**facts, "packages": packages, "backends": backends, "settings": settings}


# ---- A piece of work -----------------------------------------------------------------------------


def bench_work(
    work: Work,
    sides: Mapping[str, Side],
    *,
    budget_s: float = 3.0,
    rounds: tuple[int, int] = (5, 15),
    profile: bool = False,
    inputs: Inputs | None = None,
    more: Mapping[str, Make] | None = None,
) -> list[Row]:
    """Measure a piece of work in each framework.

    Args:
        work: the piece of work.
        sides: benchmarks of the frameworks.
        budget_s: approximate time of all rounds of a row, in seconds.
        rounds: least and largest number of rounds.
        profile: also count the kernels, copies and waits of each contender.
        inputs: arrays; by default they are drawn.
        more: functions that make more contenders of torch, by name.
    """
    if inputs is None:
        inputs = draw_inputs(work)
    if more is None:
        more = {}
    makers = {framework: side.contenders(work, inputs) for framework, side in sides.items()}
    if "torch" in makers:
        makers["torch"] |= more
    if "jax" in makers and "torch" in makers:
        # Rows of JAX also show torch's own functions, which do not count as libraries of JAX.
        for name, make in makers["torch"].items():
            if name == "SDPA" or name in more:
                makers["jax"][f"torch {name}"] = _not_counted(make)
    rows = []
    for framework, side in sides.items():
        probe = _probe(work, side)
        row = _bench_row(work, framework, makers[framework], probe, budget_s, rounds, profile)
        rows.append(row)
    return rows


def _not_counted(make: Make) -> Make:
    return lambda: replace(make(), counts=False)


def _probe(work: Work, side: Side) -> Probe | None:
    """Return the measurement of the limit: matrix products, or reading if that dominates."""
    if not work.is_timed:
        return None
    if work.flops is not None:
        return side.matmul(work.dtype)
    return side.reading() or _reading()


@cache
def _reading() -> Probe:
    """Return a probe that reads memory with all cores: the largest value of a buffer that exceeds
    every cache.
    """
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    cores = os.cpu_count() or 1
    values = np.ones(2**26, np.float32)  # zeros would not be allocated
    parts = np.array_split(values, cores)
    pool = ThreadPoolExecutor(cores)
    return Probe(lambda: list(pool.map(np.max, parts)), float(values.nbytes))


def _bench_row(
    work: Work,
    framework: str,
    makers: Mapping[str, Make],
    probe: Probe | None,
    budget_s: float,
    rounds: tuple[int, int],
    profile: bool,
) -> Row:
    """Prepare the contenders of a framework, and measure them."""
    contenders, left_out = _prepare(work, framework, makers)
    times: dict[str, Any] = {}
    if work.is_timed:
        times = _measure_times(work, contenders, probe, budget_s, rounds)
    operations = {}
    if profile:
        for name, contender in contenders.items():
            operations[name] = contender.operations()
    peaks = {}
    for name, contender in contenders.items():
        peaks[name] = contender.peak_bytes()
    return Row(
        work.what,
        framework,
        work.shape,
        work.dtype,
        group=work.group,
        axes=work.axes,
        peak_bytes=peaks.pop(OURS),
        peers_peak_bytes=_known(peaks),
        left_out=left_out,
        operations=_known(operations),
        **times,
    )


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a contender knows."""
    return {name: value for name, value in values.items() if value is not None}


def _prepare(
    work: Work, framework: str, makers: Mapping[str, Make]
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders, ours first, that compute the same, and by name the reasons why others
    are left out.

    Raises:
        RuntimeError: if ours fails.
    """
    try:
        ours = makers[OURS]()
        expected = None
        if work.is_timed:
            expected = ours.arrays(ours.run())
    except Exception as error:
        where = f"{work.what} {work.shape} in {work.dtype} on {framework}"
        raise RuntimeError(
            f"mha_{framework} must run {where}, got {type(error).__name__}: {error}"
        ) from error

    contenders = {OURS: ours}
    left_out = {}
    for name, make in makers.items():
        if name == OURS:
            continue
        # A library that is not installed, or does not support the shape or dtype, may raise any
        # error. The row has it as the reason.
        try:
            contender = make()
            reason = None
            if expected is not None:
                reason = why_rejected(work, expected, contender)
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if reason is None:
            contenders[name] = contender
        else:
            left_out[name] = reason
    return contenders, left_out


def _measure_times(
    work: Work,
    contenders: Mapping[str, Contender],
    probe: Probe | None,
    budget_s: float,
    rounds: tuple[int, int],
) -> dict[str, Any]:
    """Return the fields of a row about times, see `times_of`."""
    runs = {name: contender.run for name, contender in contenders.items()}
    probe_amount = None
    if probe is not None:
        runs[LIMIT] = probe.run
        probe_amount = probe.amount
    # A cache fills up: half of its room is for the turns, the rest for warm-up runs.
    _, most_rounds = rounds
    room = max(1, (work.capacity - work.seq_len) // (2 * most_rounds))
    most_repeats = {name: room for name, contender in contenders.items() if contender.carries}
    seconds = run_in_turn(runs, budget_s=budget_s, rounds=rounds, most_repeats=most_repeats)
    return times_of(
        seconds,
        not_counted=[name for name, contender in contenders.items() if not contender.counts],
        amount=work.flops or work.nbytes,
        probe=probe_amount,
    )


def why_rejected(work: Work, expected: Sequence[Any], contender: Contender) -> str | None:
    """Return why a contender is not timed, because its result differs from ours, or None."""
    error = difference(expected, contender.arrays(contender.run()))
    allowed = ALLOWED[work.dtype]
    if error <= allowed:
        return None
    return f"its result differs by {error:.1e} of the largest value, the tolerance is {allowed:.0e}"
