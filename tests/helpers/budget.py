"""The budget of each test file: a row of tests/budget.json for its items, programs and processes.

    pytest --budget=check    a file that exceeds its row fails the run. `make test` does this.
    pytest --budget=write    of one file alone: its row becomes lower, or higher for a reason. `make
    budget` does this.

None of the numbers depends on the load of the machine, or on the worker that runs a test:

- Items are those that `make test` runs.
- Programs are those that JAX asks its persistent cache for, each counted once, whether it lies
  there or is compiled. A file that runs alone finds no programs of other files in its process, so
  that its row is the most it can need.
- Processes are those that the tests start, without those that these start in turn. A fixture of a
  module counts once, although both workers may set it up. Only the largest pool of multiprocessing
  counts, since the first of several tests starts a pool for all of them, and which test that is
  depends on the worker.

Processor seconds depend on the machine. They are printed, and kept in tests/budget-seconds.json for
people.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers import HAS_JAX

ENVIRONMENT = ".venv" if HAS_JAX else ".venv-tt"
"""Each has its own rows, because some files run in both."""

NUMBERS = ("items", "programs", "processes")

ALONE, IN_POOL = "alone", "in a pool"
"""Kinds of processes: processes of multiprocessing are in a pool."""

SHORT = "not thorough and not nightly"
"""The expression of marks of `make test`."""

MOST_SECONDS = 2.0
"""A test that takes more processor time says why, by @costly."""


# ---- Counts --------------------------------------------------------------------------------------


@dataclass
class Cost:
    """Cost of the tests of a file."""

    items: int = 0
    programs: set[str] = field(default_factory=set)
    """Names and hashes, by which JAX finds them in its persistent cache."""
    processes: dict[str, int] = field(default_factory=dict)
    """How many a test or a fixture starts, by its name."""
    unmarked: set[str] = field(default_factory=set)
    """Tests that start processes without @costly."""
    seconds: float = 0.0
    slow: dict[str, float] = field(default_factory=dict)
    """Seconds of tests above MOST_SECONDS without @costly."""

    def numbers(self) -> dict[str, int]:
        return {
            "items": self.items,
            "programs": len(self.programs),
            "processes": sum(self.processes.values()),
        }

    def note_processes(self, name: str, number: int) -> None:
        """Note the costs of a test or fixture. It may run again, in this worker or in another, and
        then counts once.
        """
        if number:
            self.processes[name] = max(number, self.processes.get(name, 0))

    def add(self, other: Cost) -> None:
        """Add what the tests cost that another worker ran. Both workers collected all of them."""
        self.items = max(self.items, other.items)
        self.programs |= other.programs
        for name, number in other.processes.items():
            self.note_processes(name, number)
        self.unmarked |= other.unmarked
        self.seconds += other.seconds
        self.slow |= other.slow


class Meter:
    """Counts what happens in this process while a file is imported or one of its tests runs."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}
        self.current: Cost | None = None
        self.started: list[str] = []
        """The kind of each process of the test or fixture that runs now."""
        self.fixtures_that_start: list[object] = []

    def cost_of(self, node: pytest.Item | pytest.Collector) -> Cost:
        file = node.nodeid.partition("::")[0]
        return self.costs.setdefault(file, Cost())

    def note_program(self, key: str) -> None:
        if self.current is not None:
            self.current.programs.add(key)

    def note_process(self, kind: str) -> None:
        self.started.append(kind)

    @contextmanager
    def charging(self, cost: Cost) -> Iterator[None]:
        """Charge this file with everything that happens within."""
        self.current = cost
        try:
            yield
        finally:
            self.current = None

    @contextmanager
    def counting_processes(self, name: str) -> Iterator[None]:
        """Note processes that start within for this test or fixture. Imports belong to no test."""
        outside, self.started = self.started, []
        try:
            yield
        finally:
            if self.current is not None:
                self.current.note_processes(name, self.started.count(ALONE))
                self.current.note_processes("pool", self.started.count(IN_POOL))
            self.started = outside

    # ---- Hooks of pytest, in each process that runs tests ----------------------------------------

    def pytest_collection(self) -> None:
        watch_processes()
        if "jax" in sys.modules:
            watch_programs()
        METERS.append(self)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker of xdist sends its counts to the process that started it."""
        if hasattr(session.config, "workeroutput"):
            counts = {file: dataclasses.asdict(cost) for file, cost in self.costs.items()}
            session.config.workeroutput["budget"] = counts

    def pytest_unconfigure(self) -> None:
        if self in METERS:
            METERS.remove(self)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        if not isinstance(collector, pytest.Module):
            return (yield)
        with self.charging(self.cost_of(collector)):
            return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.cost_of(item).items += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        cost = self.cost_of(item)
        test = item.nodeid.partition("::")[2]
        before = processor_seconds()
        with self.charging(cost), self.counting_processes(test):
            result = yield
            starts = bool(self.started) or self.uses_fixture_that_starts(item)
        seconds = processor_seconds() - before
        cost.seconds += seconds
        if item.get_closest_marker("costly") is None:
            if starts:
                cost.unmarked.add(test)
            elif seconds > MOST_SECONDS:
                cost.slow[test] = seconds
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        """Count processes of a fixture that tests share on its own. The fixture of one test is part
        of the test.
        """
        if fixturedef.scope == "function":
            return (yield)
        name = f"{fixturedef.argname}[{getattr(request, 'param_index', 0)}]"
        with self.counting_processes(name):
            result = yield
            if self.started:
                self.fixtures_that_start.append(fixturedef)
        return result

    def uses_fixture_that_starts(self, item: Any) -> bool:
        """Return whether a fixture of the test starts a process, even if an earlier test of this
        worker set it up.
        """
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        return any(
            fixture in self.fixtures_that_start for same_name in fixtures for fixture in same_name
        )


METERS: list[Meter] = []
"""Those that count. There are two while a test of this file runs pytest within pytest."""


def processor_seconds() -> float:
    """Processor time of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@functools.cache
def watch_processes() -> None:
    """Let the meters count processes. An audit hook sees them however they are started, and cannot
    be removed.
    """
    # Imported here, since most tests do without.
    from multiprocessing.process import BaseProcess

    sys.addaudithook(_note_process)
    start = BaseProcess.start

    @functools.wraps(start)
    def start_and_note(process: BaseProcess) -> None:
        for meter in METERS:
            meter.note_process(IN_POOL)
        start(process)

    # Python has no audit event for it. This leaves out what multiprocessing starts for itself, once
    # in each worker: the server that forks, and the tracker of resources.
    BaseProcess.start = start_and_note


PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}


ASKED_ONCE = {"uname", "lscpu", "ldconfig"}
"""Programs by which Python, NumPy and CUDA ask about the machine: once in a process, whichever test
comes first.
"""


def _note_process(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in PROCESS_EVENTS:
        return
    if event == "subprocess.Popen" and os.path.basename(os.fsdecode(arguments[0])) in ASKED_ONCE:
        return
    caller = sys._getframe(1).f_globals.get("__name__")
    is_counted_already = (event, caller) in {
        ("os.posix_spawn", "subprocess"),
        ("os.fork", "multiprocessing.popen_fork"),
    }
    if not is_counted_already:
        for meter in METERS:
            meter.note_process(ALONE)


@functools.cache
def watch_programs() -> None:
    """Let the meters note each program that JAX asks its persistent cache for."""
    # The public jax.monitoring tells that there was a program, but not which.
    from jax._src import compilation_cache

    get_cache_key = compilation_cache.get_cache_key

    @functools.wraps(get_cache_key)
    def get_and_note(*arguments: Any, **keywords: Any) -> str:
        key = get_cache_key(*arguments, **keywords)
        for meter in METERS:
            meter.note_program(key)
        return key

    compilation_cache.get_cache_key = get_and_note


# ---- The rows ------------------------------------------------------------------------------------


@dataclass
class Budget:
    """The file tests/budget.json."""

    most_items: int
    """The bound of the items of both environments."""
    rows: dict[str, dict[str, dict[str, Any]]]
    """By environment and file: the numbers, and the reason of the last raise."""

    @classmethod
    def parse(cls, text: str) -> Budget:
        rows = json.loads(text)
        return cls(rows.pop("most_items"), rows)

    def text(self) -> str:
        return text_of_rows({"most_items": self.most_items}, self.rows)

    def own_rows(self) -> dict[str, dict[str, Any]]:
        """Return the rows of this environment."""
        return self.rows.setdefault(ENVIRONMENT, {})

    def problems(self, costs: dict[str, Cost], root: Path) -> list[str]:
        """Return a line for each number that exceeds its row or bound. Files that did not run may
        be missing.
        """
        problems = []
        for file, cost in sorted(costs.items()):
            problems += unmarked(file, cost)
            problems += self.exceeded(file, cost)
        for environment, file in vanished(self.rows, root):
            problems.append(
                f"{environment}: {file} has a row and does not exist: `make budget` removes it"
            )
        items = sum(row["items"] for rows in self.rows.values() for row in rows.values())
        if items > self.most_items:
            problems.append(
                f"all rows together have {items} items, and most_items is {self.most_items}"
            )
        return problems

    def exceeded(self, file: str, cost: Cost) -> list[str]:
        row = self.own_rows().get(file)
        if row is None:
            return [f"{ENVIRONMENT}: {file} has no row: `make budget FILES={file}` adds it"]
        return [
            f"{ENVIRONMENT}: {file} exceeds its row, {name} {number} > {row[name]}: "
            f"`make budget FILES={file} REASON='...'` raises it"
            for name, number in cost.numbers().items()
            if number > row[name]
        ]

    def update(self, file: str, cost: Cost, reason: str) -> None:
        """Add the row of a file that has none, or lower it. A number becomes higher only for a
        reason.
        """
        numbers = cost.numbers()
        row = self.own_rows().setdefault(file, dict(numbers))
        is_higher = any(numbers[name] > row[name] for name in NUMBERS)
        if is_higher and reason:
            row |= numbers
            row["raised"] = reason
        for name in NUMBERS:
            row[name] = min(row[name], numbers[name])


def unmarked(file: str, cost: Cost) -> list[str]:
    """Say which tests start processes without a reason."""
    return [
        f'{file}::{test} starts a process without @pytest.mark.costly("why")'
        for test in sorted(cost.unmarked)
    ]


def vanished(rows: dict[str, dict[str, Any]], root: Path) -> list[tuple[str, str]]:
    """Return the environments and files of rows whose file does not exist."""
    return [
        (environment, file)
        for environment in rows
        for file in rows[environment]
        if not (root / file).exists()
    ]


def remove_vanished(rows: dict[str, dict[str, Any]], root: Path) -> None:
    for environment, file in vanished(rows, root):
        del rows[environment][file]


def text_of_rows(first: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    """Return JSON with a row to a line, so that a difference of two versions shows rows."""
    sections = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in first.items()]
    for environment in sorted(rows):
        lines = [
            f"    {json.dumps(file)}: {json.dumps(row)}"
            for file, row in sorted(rows[environment].items())
        ]
        sections.append(f"  {json.dumps(environment)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


# ---- The plugin ----------------------------------------------------------------------------------


class Report:
    """Compares what was counted with the rows, or writes these: in the process that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self.root = config.rootpath
        self.rows_file = config.rootpath / "tests" / "budget.json"
        self.seconds_file = config.rootpath / "tests" / "budget-seconds.json"
        self.may_write = config.getoption("budget") == "write"
        self.reason = config.getoption("budget_reason")
        self.meter = Meter()
        self.problems: list[str] = []

    def costs(self) -> dict[str, Cost]:
        """Return the cost of each file that has selected tests."""
        return {file: cost for file, cost in self.meter.costs.items() if cost.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of xdist has ended. One that crashed sends nothing, but then the run fails
        anyway.
        """
        counts = getattr(node, "workeroutput", {}).get("budget", {})
        for file, values in counts.items():
            self.meter.costs.setdefault(file, Cost()).add(Cost(**values))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        did_pass = session.exitstatus == pytest.ExitCode.OK
        if self.may_write and did_pass:
            self.write()
        budget = Budget.parse(self.rows_file.read_text())
        self.problems = budget.problems(self.costs(), self.root)
        if self.problems and did_pass:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def write(self) -> None:
        """Write the row of the file that ran."""
        import fcntl  # absent in Windows

        ((file, cost),) = self.costs().items()
        # `make budget` measures two files at a time.
        with self.rows_file.open("r+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            budget = Budget.parse(stream.read())
            budget.update(file, cost, self.reason)
            remove_vanished(budget.rows, self.root)
            seconds = json.loads(self.seconds_file.read_text())
            today = datetime.date.today().isoformat()
            seconds.setdefault(ENVIRONMENT, {})[file] = [round(cost.seconds, 1), today]
            remove_vanished(seconds, self.root)
            self.seconds_file.write_text(text_of_rows({}, seconds))
            stream.seek(0)
            stream.truncate()
            stream.write(budget.text())

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("budget: processor seconds, items, programs, processes")
        costs = self.costs()
        for file in sorted(costs, key=lambda file: -costs[file].seconds):
            numbers = "".join(f"{number:7}" for number in costs[file].numbers().values())
            terminalreporter.line(f"{costs[file].seconds:7.1f}{numbers}  {file}")
        for file, cost in costs.items():
            for test, seconds in cost.slow.items():
                terminalreporter.line(
                    f"{seconds:.1f} s without @costly, which says why: {file}::{test}", yellow=True
                )
        for problem in self.problems:
            terminalreporter.line(f"budget: {problem}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("budget", "what each test file may cost: tests/helpers/budget.py")
    group.addoption(
        "--budget",
        choices=["check", "write"],
        help="compare with tests/budget.json, or write a file's row",
    )
    group.addoption("--budget-reason", default="", help="why the row becomes higher")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "costly(why): takes over two processor seconds, or starts processes"
    )
    if not config.getoption("budget"):
        return
    if "SAMPLES" in os.environ or config.getoption("markexpr") != SHORT:
        raise pytest.UsageError(f"--budget needs -m '{SHORT}' and no SAMPLES, as in `make test`")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Meter())
        return
    report = Report(config)
    config.pluginmanager.register(report)
    is_distributed = bool(config.getoption("numprocesses", None))
    if not is_distributed:
        config.pluginmanager.register(report.meter)
    elif report.may_write:
        raise pytest.UsageError("--budget=write counts one file in one process")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Require a reason of each mark, and one file if its row is to be written."""
    for item in session.items:
        for mark in item.iter_markers("costly"):
            if len(mark.args) != 1 or mark.kwargs or not isinstance(mark.args[0], str):
                raise pytest.UsageError(f'{item.nodeid}: the mark is @pytest.mark.costly("why")')
    files = {item.nodeid.partition("::")[0] for item in session.items}
    if session.config.getoption("budget") == "write" and len(files) != 1:
        raise pytest.UsageError(f"--budget=write counts one file alone, not {len(files)}")
