"""Which rows of a test run when: its `@sample` in `make test`, twice as many rows in CI, and all of
them each night.

A test without `@sample` runs in full. The rows outside a sample are in two groups:

- `SAMPLES=thorough` makes as many as the sample has, with the most values and pairs of values that
  it lacks. They are marked `thorough`, and `make test-thorough` runs them;
- `SAMPLES=all` makes all. The rest is marked `nightly`, and `make nightly` runs it.

A row that is named on the command line, `test_x.py::test_y[row]`, exists and is marked as with
`SAMPLES=all`.
"""

from __future__ import annotations

import inspect
import itertools
import os
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest

from helpers import HAS_JAX

THOROUGH, EVERY_ROW = "thorough", "all"
"""Values of the variable SAMPLES."""
TIMES = 2
"""The number of rows of a test in `make test` and `make test-thorough` together, in samples."""


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

        @sample(name=["OLMo 2"])  # rows with this value of the parameter
        @sample(where=is_usual)  # rows whose parameters a function of them accepts
        @sample(jax=1)  # one row in JAX, which compiles a program for each row; all in torch
        @sample(12, jax=2)  # twelve rows, two of them in JAX

    A number of rows covers as many pairs of values as it can. The choice depends on the seed and
    the ids of the rows: not on their order, the order of decorators or the name of the test. With
    `jax`, rows in JAX and others are counted apart, also those that `make test-thorough` adds.
    """
    return pytest.mark.sample(number, jax=jax, where=where, seed=seed, values=values)


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a test: its item, and the values that determine the choice."""

    item: pytest.Item
    parameters: dict[str, Any]
    pairs: frozenset[Any]
    """Its values by name, alone and in pairs."""
    draw: int
    """Decides between rows with the same number of new pairs."""

    @classmethod
    def of(cls, item: Any, seed: int) -> Row:
        parameters = dict(item.callspec.params)
        values = []
        for name in sorted(parameters):
            value = parameters[name]
            is_plain = isinstance(value, str | int | float | None)
            values.append((name, value if is_plain else item.callspec.indices[name]))
        pairs = frozenset([*values, *itertools.combinations(values, 2)])
        # The id without the order of its parts, which depends on the decorators.
        parts = sorted(item.callspec.id.split("-"))
        return cls(item, parameters, pairs, zlib.crc32(repr((seed, parts)).encode()))

    @property
    def is_jax(self) -> bool:
        return self.parameters.get("sibling") == "jax"


def chosen(rows: list[Row], number: int, before: Collection[Row] = ()) -> list[Row]:
    """Return that many rows, each with the most values and pairs that those before it lack."""
    rows = sorted(rows, key=lambda row: row.draw)
    covered = {pair for row in before for pair in row.pairs}
    sampled: list[Row] = []
    while rows and len(sampled) < number:
        best = max(rows, key=lambda row: len(row.pairs - covered))
        rows.remove(best)
        covered |= best.pairs
        sampled.append(best)
    return sampled


def rows_of(items: list[Any], mark: pytest.Mark) -> list[Row]:
    """Return the rows of a test with a `@sample`.

    Raises:
        ValueError: if it has none, or says otherwise which of them run.
    """
    if not all(hasattr(item, "callspec") for item in items):
        raise ValueError("a test without parameters has no rows to sample")
    for name in ("thorough", "nightly"):
        if any(item.get_closest_marker(name) for item in items):
            raise ValueError(f"a row of it is marked {name}")
    return [Row.of(item, mark.kwargs["seed"]) for item in items]


def sampled_rows(rows: list[Row], mark: pytest.Mark) -> list[Row]:
    """Return the rows of a test that its `@sample` chooses.

    Raises:
        ValueError: if it names parameters, values or numbers of rows that the test does not have.
    """
    (number,) = mark.args
    jax, where, values = mark.kwargs["jax"], mark.kwargs["where"], mark.kwargs["values"]

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
        # The sample belongs to the other environment: here are the rows of ttnn, of which there may
        # be fewer.
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
        # With `jax`, the rows in JAX have already been chosen.
        first = [row for row in rows if jax is not None and row.is_jax]
        rest = [row for row in rows if row not in first]
        rows = first + chosen(rest, number - len(first))
    if not rows:
        raise ValueError("no row is left")
    return rows


def thorough_rows(rows: list[Row], sampled: list[Row], mark: pytest.Mark) -> list[Row]:
    """Return the rows outside a sample that `make test-thorough` adds to it."""
    groups = [rows]
    if mark.kwargs["jax"] is not None:
        groups = [[row for row in rows if row.is_jax], [row for row in rows if not row.is_jax]]
    added: list[Row] = []
    for group in groups:
        inside = [row for row in group if row in sampled]
        outside = [row for row in group if row not in sampled]
        # At least one: with `jax=0`, the sample has none.
        number = max(1, (TIMES - 1) * len(inside))
        added += chosen(outside, number, before=inside)
    return added


def is_named(collector: pytest.Collector, name: str) -> bool:
    """Return whether a row of the test is named on the command line."""
    config = collector.config
    for argument in config.args:
        path, _, test = argument.partition("::")
        test, bracket, _ = test.partition("[")
        if bracket and test == name and config.invocation_params.dir / path == collector.path:
            return True
    return False


# ---- The plugin ----------------------------------------------------------------------------------

COUNT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sample: the rows that `make test` runs, see tests/helpers/samples.py"
    )
    config.stash[COUNT] = 0
    value = os.environ.get("SAMPLES")
    if value not in (None, THOROUGH, EVERY_ROW):
        raise pytest.UsageError(f"SAMPLES is {THOROUGH!r}, {EVERY_ROW!r} or not set, not {value!r}")


def pytest_report_header() -> str:
    if os.environ.get("SAMPLES") == EVERY_ROW:
        return "samples: all rows"
    if os.environ.get("SAMPLES") == THOROUGH:
        return f"samples: {TIMES} times the rows of each test's @sample; SAMPLES=all makes all"
    return "samples: the rows of each test's @sample; SAMPLES=all makes all"


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Any:
    """Leave out the rows of a test that SAMPLES does not ask for, and mark those outside of its
    sample.
    """
    items = yield
    marks = list(items[0].iter_markers("sample")) if isinstance(items, list) and items else []
    if not marks:
        return items
    try:
        if len(marks) > 1:
            raise ValueError("a test has one @sample")
        rows = rows_of(items, marks[0])
        sampled = sampled_rows(rows, marks[0])
    except ValueError as error:
        raise collector.CollectError(f"@sample of {name}: {error}") from None

    wanted = EVERY_ROW if is_named(collector, name) else os.environ.get("SAMPLES")
    sampled_items = {row.item for row in sampled}
    if wanted is not None:
        for row in thorough_rows(rows, sampled, marks[0]):
            row.item.add_marker(pytest.mark.thorough)
            sampled_items.add(row.item)
    if wanted == EVERY_ROW:
        for row in rows:
            if row.item not in sampled_items:
                row.item.add_marker(pytest.mark.nightly)
        return items
    collector.config.stash[COUNT] += len(items) - len(sampled_items)
    return [item for item in items if item in sampled_items]


def pytest_report_collectionfinish(config: pytest.Config) -> str | list[str]:
    if not config.stash[COUNT]:
        return []
    return f"{config.stash[COUNT]} rows are outside of samples"
