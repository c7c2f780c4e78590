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

    `NOTICED`: the tests fail, and the callable's result is changed; `REFUSED`: the callable itself
    raises an error, whatever the tests check; `SURVIVED`: the tests pass; `UNCHANGED`: no call
    returns a different result; `NOT_REACHED`: no call allows it, for example because none has a
    mask; `TIMED_OUT`. `NOT_INJECTED` is not a gap: the calls show that the callable does not allow
    it.
    """

    NOTICED = "noticed"
    REFUSED = "refused"
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
        return self.status in (Status.NOTICED, Status.REFUSED)


@dataclass(frozen=True)
class Run:
    """One run of the tests.

    Attributes:
        status: the exit status; None if it took too long.
        told: recorded events.
        said: end of its printed output.
        seconds: duration.
    """

    status: int | None
    told: list[Event]
    said: str
    seconds: float

    def first(self, event: str) -> str | None:
        """Return the details of the first event of a kind; None if there was none."""
        return next((more for kind, more in self.told if kind == event), None)


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
        self.view, self.command, self.timeout = view, [*command], timeout
        self.running: set[subprocess.Popen[bytes]] = set()
        self.is_over = False

    def run(self, bug: str = "", *, is_hooked: bool = True) -> Run:
        """Run the tests with a bug, or with none.

        Raises:
            OSError: if the command cannot be started.
        """
        with tempfile.TemporaryDirectory(prefix="mha-parity-mutate-") as folder:
            record, printed = Path(folder) / "record", Path(folder) / "printed"
            environment = self._environment(folder)
            if is_hooked:
                told = {"module": self.module, "attribute": self.attribute, "bug": bug}
                environment[VARIABLE] = json.dumps(
                    {**told, "view": asdict(self.view), "record": str(record)}
                )
                _prepend(environment, "PYTHONPATH", str(STARTUP), os.pathsep)
                _prepend(
                    environment, "PYTEST_PLUGINS", "parity.explain.mutating.pytest_plugin", ","
                )
            begun = time.monotonic()
            with printed.open("wb") as out:
                status = self._wait(environment, out)
            said = printed.read_bytes().decode(errors="replace").strip()
            return Run(status, events(record), said, time.monotonic() - begun)

    def _environment(self, folder: str) -> dict[str, str]:
        """Return the environment: programs of this Python come first, and pytest's cache stays
        unchanged.
        """
        environment = dict(os.environ)
        _prepend(environment, "PATH", str(Path(sys.executable).parent), os.pathsep)
        options = environment.get("PYTEST_ADDOPTS", "")
        cache = shlex.quote(
            f"cache_dir={folder}/pytest_cache"
        )  # pytest splits the variable as a shell does
        environment["PYTEST_ADDOPTS"] = f"{options} -o {cache}".strip()
        return environment

    def _wait(self, environment: dict[str, str], out: Any) -> int | None:
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


def _prepend(environment: dict[str, str], name: str, value: str, between: str) -> None:
    environment[name] = value + (between + environment[name] if environment.get(name) else "")


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
        alone = tests.run(is_hooked=False)
        how = "also by themselves" if alone.status else f"only while {target} is wrapped"
        raise InputError(
            "the tests", "pass without a bug", f"exit status {run.status}, {how}: {_last(run.said)}"
        )
    if run.first("injected") is None:
        raise InputError(
            "the tests",
            f"import {tests.module} with the Python that mha-parity runs in ({sys.executable})",
            "no import of it",
        )
    if run.first("called") is None:
        raise InputError(
            "the tests",
            f"call {target} by its name",
            "no call",
            hint=(
                f"functions made from it while {tests.module} was imported, such as its jax.jit, "
                f"are not replaced"
            ),
        )
    return run


def _last(text: str) -> str:
    return text.splitlines()[-1].strip("= ") if text else "it printed nothing"


def mutate(
    tests: Suite,
    names: Sequence[str],
    *,
    jobs: int = 1,
    on_bug: Callable[[str], None] = lambda name: None,
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
    first = baseline(tests)
    if tests.timeout is None:
        tests.timeout = max(LEAST_TIMEOUT, TIMES_LONGER * first.seconds)
    allowed = {more for event, more in first.told if event == "fits"}
    reasons = dict(more.split(": ", 1) for event, more in reversed(first.told) if event == "unfit")

    def outcome(name: str) -> Outcome:
        on_bug(name)
        if name not in allowed:
            reason = reasons.get(name, "")
            found = (
                (Status.NOT_INJECTED, reason, 0.0)
                if reason
                else (Status.NOT_REACHED, "no call allows it", 0.0)
            )
        else:
            run = tests.run(name)
            found = (*_result_of(run), run.seconds)
        return Outcome(name, about_of(name), page_of(name), *found)

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(outcome, name) for name in names]
        try:
            for future in waiting:
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            tests.stop()
            raise


def _result_of(run: Run) -> tuple[Status, str]:
    """Return the result of a run with a bug, and the reason."""
    kinds = {event for event, _ in run.told}
    if run.status is None:
        return Status.TIMED_OUT, f"after {run.seconds:.0f} s"
    fails = run.first("failed") or f"exit status {run.status}"
    if "reached" not in kinds:
        reason = run.first("unfit")
        return (
            (Status.NOT_INJECTED, reason) if reason else (Status.NOT_REACHED, "no call allows it")
        )
    if kinds & {"changed", "uncompared"}:
        how = (
            "" if "changed" in kinds else f"; outputs were not compared: {run.first('uncompared')}"
        )
        return (
            (Status.SURVIVED, how.strip("; ")) if run.status == 0 else (Status.NOTICED, fails + how)
        )
    if "raised" in kinds:
        raised = run.first("raised") or ""
        return (
            (Status.REFUSED, raised)
            if run.status
            else (Status.SURVIVED, f"though it raises {raised}")
        )
    also = f"; yet {fails} fails" if run.status else ""
    return Status.UNCHANGED, f"every call returns the same result without it{also}"
