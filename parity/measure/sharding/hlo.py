"""Collectives of a compiled program, parsed from XLA's text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from parity.measure.sharding.mesh import FLAGS, Counts

KINDS = (
    *(
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
        "collective-broadcast",
    ),
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
        if begun := _COMPUTATION.match(line):
            current = begun[2]
            computations[current] = []
            entry = current if begun[1] else entry
        elif current:
            computations[current].append(line)

    def within(name: str, times: int) -> Iterator[Collective]:
        for line in computations.get(name, ()):
            if (found := _OPERATION.match(line)) is None:
                continue
            result, operation = found.groups()
            if (kind := operation.removesuffix("-start")) in KINDS:
                arrays = _ARRAY.findall(result)
                yield Collective(
                    kind, {dtype for dtype, _ in arrays} == {"pred"}, _nbytes(arrays), times
                )
            elif operation == "while":
                trips, body = _TRIPS.search(line), _BODY.search(line)
                yield from within(body[1] if body else "", times * (int(trips[1]) if trips else 1))
            elif operation in ("call", "conditional", "async-start"):
                called = _CALLED.findall(line)
                for branches in _BRANCHES.findall(line):
                    called += [branch.strip().lstrip("%") for branch in branches.split(",")]
                for each in called:
                    yield from within(each, times)

    return list(within(entry, 1))


def counts_of(collectives: Iterable[Collective]) -> Counts:
    """Return the number of collectives by kind; those of booleans are counted separately."""
    found: Counter[str] = Counter()
    for each in collectives:
        found[FLAGS if each.is_of_flags else each.kind] += each.times
    return dict(sorted(found.items()))


def nbytes_of(collectives: Iterable[Collective]) -> int:
    """Return the total bytes of their results on a device."""
    return sum(each.nbytes * each.times for each in collectives)


def _nbytes(arrays: Iterable[tuple[str, str]]) -> int:
    return sum(
        _itemsize(dtype) * math.prod(map(int, filter(None, shape.split(","))))
        for dtype, shape in arrays
    )


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1  # pred
