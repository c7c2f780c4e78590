"""Which rows of a test `make test` runs: those of its `@sample`. `SAMPLES=all` makes every row.

A test without `@sample` runs in full. Rows outside a sample do not exist, unless `SAMPLES=all` is set or a row of the
test is named on the command line, `test_x.py::test_y[row]`; then they are marked `thorough`.
"""

from __future__ import annotations

import inspect
import itertools
import os
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

EVERY_ROW = "all"
HAS_JAX = find_spec("jax") is not None


def sample(
    number: int | None = None,
    /,
    *,
    jax: int | None = None,
    where: Callable[..., bool] | None = None,
    seed: int = 0,
    **values: Collection[Any],
) -> pytest.MarkDecorator:
    """Mark a test with the rows that `make test` runs.

        @sample(name=["OLMo 2"])            # rows with this value of the parameter
        @sample(where=lambda case, name: (case, name) in FIRST)     # rows that a function of its parameters accepts
        @sample(jax=1)                      # one row in JAX, which compiles a program for each; all in torch
        @sample(12, jax=2)                  # twelve rows, two of them in JAX

    A number of rows covers as many pairs of values as it can. The choice depends on the seed and the ids of the rows:
    not on their order, the order of decorators or the name of the test.
    """
    return pytest.mark.sample(number, jax=jax, where=where, seed=seed, values=values)


@dataclass(frozen=True)
class Row:
    """A row of a test: its item, and what the choice depends on."""

    item: pytest.Item
    parameters: dict[str, Any]
    pairs: frozenset[Any]
    """Its values by name, alone and in pairs."""
    draw: int
    """Decides between rows of as many new pairs."""

    @classmethod
    def of(cls, item: Any, seed: int) -> Row:
        parameters = dict(item.callspec.params)
        values = []
        for name in sorted(parameters):
            value = parameters[name]
            is_plain = isinstance(value, str | int | float | None)
            values.append((name, value if is_plain else item.callspec.indices[name]))
        pairs = frozenset([*values, *itertools.combinations(values, 2)])
        # The id without the order of its parts, which is that of the decorators.
        parts = sorted(item.callspec.id.split("-"))
        return cls(item, parameters, pairs, zlib.crc32(repr((seed, parts)).encode()))

    @property
    def is_jax(self) -> bool:
        return self.parameters.get("sibling") == "jax"


def chosen(rows: list[Row], number: int) -> list[Row]:
    """Return that many rows, each with the most values and pairs that those before it lack."""
    rows = sorted(rows, key=lambda row: row.draw)
    covered: set[Any] = set()
    sampled: list[Row] = []
    while rows and len(sampled) < number:
        best = max(rows, key=lambda row: len(row.pairs - covered))
        rows.remove(best)
        covered |= best.pairs
        sampled.append(best)
    return sampled


def sampled_rows(items: list[Any], mark: pytest.Mark) -> list[Row]:
    """Return the rows of a test that its `@sample` chooses.

    Raises:
        ValueError: if it names parameters, values or numbers of rows that the test does not have.
    """
    if not all(hasattr(item, "callspec") for item in items):
        raise ValueError("a test without parameters has no rows to sample")
    if any(item.get_closest_marker("thorough") for item in items):
        raise ValueError("a row of it is marked thorough")
    (number,) = mark.args
    jax, where, values = mark.kwargs["jax"], mark.kwargs["where"], mark.kwargs["values"]
    rows = [Row.of(item, mark.kwargs["seed"]) for item in items]

    names = set(values) if where is None else {*values, *inspect.signature(where).parameters}
    unknown = names - rows[0].parameters.keys()
    if unknown:
        raise ValueError(f"no such parameters: {sorted(unknown)}")
    for name, wanted in values.items():
        present = [row.parameters[name] for row in rows]
        absent = [value for value in wanted if value not in present]
        if absent:
            raise ValueError(f"{name} is never {absent}")
        rows = [row for row in rows if row.parameters[name] in wanted]
    if where is not None:
        of_where = inspect.signature(where).parameters
        rows = [row for row in rows if where(**{name: row.parameters[name] for name in of_where})]

    if jax is not None and not HAS_JAX:
        # The sample is that of the other environment: here are the rows of ttnn, of which there may be fewer.
        jax = None
        number = None if number is None or number >= len(rows) else number
    if jax is not None:
        in_jax = [row for row in rows if row.is_jax]
        if len(in_jax) <= jax:
            raise ValueError(f"jax is {jax}, of {len(in_jax)} rows")
        rows = chosen(in_jax, jax) + [row for row in rows if not row.is_jax]
    if number is not None:
        if len(rows) <= number:
            raise ValueError(f"the number is {number}, of {len(rows)} rows")
        # With `jax`, its rows are chosen already.
        first = [row for row in rows if jax is not None and row.is_jax]
        rest = [row for row in rows if row not in first]
        rows = first + chosen(rest, number - len(first))
    if not rows:
        raise ValueError("no row is left")
    return rows


def is_named(collector: pytest.Collector, name: str) -> bool:
    """Return whether a row of the test is named on the command line."""
    config = collector.config
    for argument in config.args:
        path, _, test = argument.partition("::")
        test, bracket, _ = test.partition("[")
        if bracket and test == name and config.invocation_params.dir / path == collector.path:
            return True
    return False


# ---- The plugin ------------------------------------------------------------------------------------------------------

COUNT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sample: the rows that `make test` runs, see tests/helpers/samples.py")
    config.stash[COUNT] = 0
    if os.environ.get("SAMPLES", EVERY_ROW) != EVERY_ROW:
        raise pytest.UsageError(f"SAMPLES is {EVERY_ROW!r} or not set, not {os.environ['SAMPLES']!r}")


def pytest_report_header() -> str:
    if "SAMPLES" in os.environ:
        return "samples: all rows"
    return "samples: the rows of each test's @sample; SAMPLES=all makes all"


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Any:
    """Leave out the rows of a test that are not in its sample, or mark them as thorough."""
    items = yield
    marks = list(items[0].iter_markers("sample")) if isinstance(items, list) and items else []
    if not marks:
        return items
    try:
        if len(marks) > 1:
            raise ValueError("a test has one @sample")
        sampled = {row.item for row in sampled_rows(items, marks[0])}
    except ValueError as error:
        raise collector.CollectError(f"@sample of {name}: {error}") from None
    outside = [item for item in items if item not in sampled]
    if "SAMPLES" in os.environ or is_named(collector, name):
        for item in outside:
            item.add_marker(pytest.mark.thorough)
        return items
    collector.config.stash[COUNT] += len(outside)
    return [item for item in items if item in sampled]


def pytest_report_collectionfinish(config: pytest.Config) -> str | list[str]:
    if not config.stash[COUNT]:
        return []
    return f"{config.stash[COUNT]} rows are outside of samples"
