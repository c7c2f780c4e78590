"""Collectives of a compiled program, parsed from XLA's text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from parity_lab.mesh.collectives import FLAGS, Counts

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


class Collective(NamedTuple):
    """Collective operation.

    Attributes:
        kind: one of `KINDS`.
        is_of_flags: operands are booleans.
        nbytes: bytes of its result on a device.
        times: number of executions; a loop of unknown length counts once.
    """

    kind: str
    is_of_flags: bool
    nbytes: int
    times: int


def collectives_in(program: str) -> list[Collective]:
    """Return the collectives of a compiled program, from `jax.stages.Compiled.as_text`."""
    computations: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in program.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            is_entry, current = header.groups()
            computations[current] = []
            if is_entry:
                entry = current
        elif current:
            computations[current].append(line)
    # From the entry, because computations that nothing calls never run.
    return list(_collectives_of(entry, computations, times=1))


def _collectives_of(
    name: str, computations: Mapping[str, Sequence[str]], times: int
) -> Iterator[Collective]:
    """Yield the collectives of a computation, and of those that it calls.

    Args:
        name: name of the computation.
        computations: lines of all computations, by name.
        times: how often this one runs.
    """
    for line in computations.get(name, ()):
        match = _OPERATION.match(line)
        if match is None:
            continue
        result, operation = match.groups()
        # A `-done` belongs to a `-start`, which counts.
        kind = operation.removesuffix("-start")
        if kind in KINDS:
            yield _collective(kind, result, times)
        elif operation == "while":
            body, trips = _BODY.search(line), _TRIPS.search(line)
            if body is not None:
                count = int(trips[1]) if trips is not None else 1
                yield from _collectives_of(body[1], computations, times * count)
        elif operation in ("call", "conditional", "async-start"):
            for called in _called_by(line):
                yield from _collectives_of(called, computations, times)


def _collective(kind: str, result: str, times: int) -> Collective:
    """Return the collective with this text of its result: an array, or a tuple of arrays."""
    arrays = _ARRAY.findall(result)
    dtypes = {dtype for dtype, _ in arrays}
    nbytes = sum(_nbytes(dtype, shape) for dtype, shape in arrays)
    return Collective(kind, dtypes == {"pred"}, nbytes, times)


def _called_by(line: str) -> list[str]:
    """Return the names of the computations that an operation calls; all branches of a condition."""
    names = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names


def counts_of(collectives: Iterable[Collective]) -> Counts:
    """Return the number of collectives by kind; collectives of booleans are counted separately."""
    counts: Counter[str] = Counter()
    for collective in collectives:
        counts[FLAGS if collective.is_of_flags else collective.kind] += collective.times
    return dict(sorted(counts.items()))


def nbytes_of(collectives: Iterable[Collective]) -> int:
    """Return the total bytes of their results on a device."""
    return sum(collective.nbytes * collective.times for collective in collectives)


def _nbytes(dtype: str, shape: str) -> int:
    """Return the bytes of an array such as `f32` and `8,16`; a scalar has an empty shape."""
    sizes = [int(size) for size in shape.split(",") if size]
    bits = re.search(r"\d+", dtype)
    if bits is None:
        return math.prod(sizes)  # `pred`, a byte each
    # An element of 4 bits counts as a byte.
    itemsize = max(int(bits[0]) // 8, 1)
    return itemsize * math.prod(sizes)
