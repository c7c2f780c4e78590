"""Run a user's tests once unchanged, and once for each bug."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from mha_spec import InputError
from parity.explain.mutating.bugs import about_of, page_of
from parity.explain.mutating.record import VARIABLE, Event, events
from parity.explain.mutating.view import View
from parity.measure.core.records import JsonRecord

STARTUP = Path(__file__).parent / "startup"
LEAST_TIMEOUT, TIMES_LONGER = 60.0, 10.0
"""Default limits of a run: a number of seconds, and a multiple of the tests' own duration; the
larger counts.
"""


class Status(Enum):
    """Result of an injected bug; all but the first two are gaps of the tests.

    `NOTICED`: the tests fail, and the callable's result is changed; `REJECTED`: the callable itself
    raises an error, whatever the tests check; `SURVIVED`: the tests pass; `UNCHANGED`: no call
    returns a different result; `NOT_REACHED`: no call allows it, for example because none has a
    mask; `TIMED_OUT`. `NOT_INJECTED` is not a gap: the calls show that the callable does not allow
    it.
    """

    NOTICED = "noticed"
    REJECTED = "rejected"
    SURVIVED = "not noticed"
    UNCHANGED = "changed nothing"
    NOT_REACHED = "not reached"
    TIMED_OUT = "timed out"
    NOT_INJECTED = "not injected"


@dataclass(frozen=True)
class Outcome(JsonRecord):
    """Result of one injected bug.

    Attributes:
        bug: its name.
        about: its description.
        page: its page in `mha-parity bugs`.
        status: the result.
        by: first failing test, or the exit status of other runners; for a bug that was not noticed,
            the known reason.
        seconds: duration of the tests.
    """

    bug: str
    about: str
    page: str
    status: Status
    by: str = ""
    seconds: float = 0.0

    IN_JSON = ("*", "is_caught")

    @property
    def is_caught(self) -> bool:
        """Return whether no further test is needed for it."""
        return self.status in (Status.NOTICED, Status.REJECTED)


@dataclass(frozen=True)
class Run:
    """One run of the tests.

    Attributes:
        status: the exit status; None if it took too long.
        events: what the test processes recorded.
        printed: what the tests printed.
        seconds: duration.
    """

    status: int | None
    events: list[Event]
    printed: str
    seconds: float

    def first(self, event: str) -> str | None:
        """Return the details of the first event of a kind; None if there was none."""
        for kind, details in self.events:
            if kind == event:
                return details
        return None

    def allows(self, bug: str) -> bool:
        """Return whether a call of the run allows a bug."""
        return ("fits", bug) in self.events

    def why_not(self, bug: str) -> str:
        """Return why a call of the run does not allow a bug; empty if no call has a reason."""
        for event, details in self.events:
            if event == "unfit":
                name, _, reason = details.partition(": ")
                if name == bug:
                    return reason
        return ""


class Suite:
    """A user's tests as a command, which can be run with a bug in the callable.

    Args:
        target: `pkg.module:callable`.
        view: known properties of the callable.
        command: command that runs the tests; it must start Python.
        timeout: seconds for one run.
    """

    def __init__(
        self, target: str, view: View, command: Sequence[str], timeout: float | None = None
    ) -> None:
        self.module, _, self.attribute = target.partition(":")
        self.view = view
        self.command = [*command]
        self.timeout = timeout
        self.running: set[subprocess.Popen[bytes]] = set()
        self.is_over = False

    def run(self, bug: str = "", *, is_hooked: bool = True) -> Run:
        """Run the tests with a bug, or with none.

        Args:
            bug: name of the bug; empty for none.
            is_hooked: whether the callable is replaced. Otherwise the tests run as usual.

        Raises:
            OSError: if the command cannot be started.
        """
        with tempfile.TemporaryDirectory(prefix="mha-parity-mutate-") as folder:
            record = Path(folder) / "record"
            output = Path(folder) / "printed"
            environment = _environment(folder)
            if is_hooked:
                self._add_hooks(environment, bug, record)
            begin = time.monotonic()
            with output.open("wb") as out:
                status = self._wait(environment, out)
            printed = output.read_bytes().decode(errors="replace").strip()
            return Run(status, events(record), printed, time.monotonic() - begin)

    def _add_hooks(self, environment: dict[str, str], bug: str, record: Path) -> None:
        """Let the processes of the tests replace the callable, and record events in a file."""
        order = {
            "module": self.module,
            "attribute": self.attribute,
            "bug": bug,
            "view": asdict(self.view),
            "record": str(record),
        }
        environment[VARIABLE] = json.dumps(order)
        _prepend(environment, "PYTHONPATH", str(STARTUP), os.pathsep)
        _prepend(environment, "PYTEST_PLUGINS", "parity.explain.mutating.pytest_plugin", ",")

    def _wait(self, environment: dict[str, str], out: Any) -> int | None:
        """Run the command; return its exit status, or None if it took too long."""
        process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.running.add(process)
        try:
            if self.is_over:
                return None
            return process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
            self.running.discard(process)

    def stop(self) -> None:
        """Stop all runs."""
        self.is_over = True
        for process in list(self.running):
            _end(process)


def _environment(folder: str) -> dict[str, str]:
    """Return the environment of tests: programs of this Python come first, and pytest's cache
    stays unchanged.
    """
    environment = dict(os.environ)
    _prepend(environment, "PATH", str(Path(sys.executable).parent), os.pathsep)
    # pytest splits the variable as a shell does.
    cache = shlex.quote(f"cache_dir={folder}/pytest_cache")
    options = environment.get("PYTEST_ADDOPTS", "")
    environment["PYTEST_ADDOPTS"] = f"{options} -o {cache}".strip()
    return environment


def _prepend(environment: dict[str, str], name: str, value: str, separator: str) -> None:
    if environment.get(name):
        value += separator + environment[name]
    environment[name] = value


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its remaining children."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()


def baseline(tests: Suite) -> Run:
    """Run the tests without a bug.

    Raises:
        ValueError: if they fail, or the callable is never replaced or never called.
    """
    run = tests.run()
    target = f"{tests.module}:{tests.attribute}"
    if run.status is None:
        raise InputError("the tests", "end within --timeout", f"no end after {tests.timeout:g} s")
    if run.status != 0:
        how = f"only while {target} is wrapped"
        if tests.run(is_hooked=False).status:
            how = "also by themselves"
        last_line = "it printed nothing"
        if run.printed:
            last_line = run.printed.splitlines()[-1].strip("= ")
        failure = f"exit status {run.status}, {how}: {last_line}"
        raise InputError("the tests", "pass without a bug", failure)
    if run.first("injected") is None:
        python = f"the Python that mha-parity runs in ({sys.executable})"
        raise InputError("the tests", f"import {tests.module} with {python}", "no import of it")
    if run.first("called") is None:
        hint = (
            f"functions made from it while {tests.module} was imported, such as its jax.jit, "
            f"are not replaced"
        )
        raise InputError("the tests", f"call {target} by its name", "no call", hint=hint)
    return run


def _announce_nothing(name: str) -> None:
    """Ignore the name of the next bug."""


def mutate(
    tests: Suite,
    names: Sequence[str],
    *,
    jobs: int = 1,
    on_bug: Callable[[str], None] = _announce_nothing,
) -> Iterator[Outcome]:
    """Inject bugs one at a time, and run the tests for each bug that some call allows.

    Args:
        tests: the tests; without a timeout, the first run sets it.
        names: names of the bugs, in the order of the outcomes.
        jobs: number of parallel runs.
        on_bug: called before each bug, with its name.

    Raises:
        ValueError: if the tests fail without a bug.
    """
    on_bug("nothing")
    without_bug = baseline(tests)
    if tests.timeout is None:
        tests.timeout = max(LEAST_TIMEOUT, TIMES_LONGER * without_bug.seconds)
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_outcome, tests, name, without_bug, on_bug) for name in names]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            tests.stop()
            raise


def _outcome(tests: Suite, name: str, without_bug: Run, on_bug: Callable[[str], None]) -> Outcome:
    """Run the tests with a bug, if a call of the run without one allows it."""
    on_bug(name)
    if without_bug.allows(name):
        run = tests.run(name)
        status, by = _result_of(run)
        return Outcome(name, about_of(name), page_of(name), status, by, run.seconds)
    status, by = _not_injected(without_bug.why_not(name))
    return Outcome(name, about_of(name), page_of(name), status, by)


def _not_injected(reason: str | None) -> tuple[Status, str]:
    """Return the result of a bug that no call allows, by the reason that a call has, if any."""
    if reason:
        return Status.NOT_INJECTED, reason
    return Status.NOT_REACHED, "no call allows it"


def _result_of(run: Run) -> tuple[Status, str]:
    """Return the result of a run with a bug, and the reason."""
    kinds = {event for event, _ in run.events}
    has_passed = run.status == 0
    failure = run.first("failed") or f"exit status {run.status}"
    if run.status is None:
        return Status.TIMED_OUT, f"after {run.seconds:.0f} s"
    if "reached" not in kinds:
        return _not_injected(run.first("unfit"))
    if "changed" in kinds:
        if has_passed:
            return Status.SURVIVED, ""
        return Status.NOTICED, failure
    if "uncompared" in kinds:
        uncompared = f"outputs were not compared: {run.first('uncompared')}"
        if has_passed:
            return Status.SURVIVED, uncompared
        return Status.NOTICED, f"{failure}; {uncompared}"
    if "raised" in kinds:
        raised = run.first("raised") or ""
        if has_passed:
            return Status.SURVIVED, f"though it raises {raised}"
        return Status.REJECTED, raised
    reason = "every call returns the same result without it"
    if not has_passed:
        reason += f"; yet {failure} fails"
    return Status.UNCHANGED, reason
