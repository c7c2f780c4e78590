"""The tests of a user, run once as they are and once for each mistake."""

from __future__ import annotations

import json
import os
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

from mha_spec import Refusal
from parity.core.records import JsonRecord
from parity.mutating.mistakes import about_of, page_of
from parity.mutating.record import VARIABLE, Event, events
from parity.mutating.view import View

STARTUP = Path(__file__).parent / "startup"
LEAST_TIMEOUT, TIMES_LONGER = 60.0, 10.0
"""A run may take so many seconds, and so many times what the tests take by themselves, where nothing is declared."""


class Status(Enum):
    """What became of a mistake; all but the first two are gaps.

    `NOTICED`: the tests fail, and what the callable gives is changed; `REFUSED`: the callable raises an error by
    itself, whatever the tests look at; `SURVIVED`: the tests pass; `UNCHANGED`: no call gives anything else than
    without it; `NOT_REACHED`: no call allows it, such as one with a mask; `TIMED_OUT`. `NOT_PLANTED` is no
    gap of the tests: what a call shows of the callable does not allow it.
    """

    NOTICED = "noticed"
    REFUSED = "refused"
    SURVIVED = "not noticed"
    UNCHANGED = "changed nothing"
    NOT_REACHED = "not reached"
    TIMED_OUT = "timed out"
    NOT_PLANTED = "not planted"


@dataclass(frozen=True)
class Outcome(JsonRecord):
    """What became of a mistake that was planted.

    Attributes:
        mistake: its name.
        about: in words.
        page: that of `mha-parity bugs`.
        status: what became of it.
        by: the first test that fails; of other runners the exit status. Of what was not noticed, what is known why.
        seconds: that the tests took.
    """

    mistake: str
    about: str
    page: str
    status: Status
    by: str = ""
    seconds: float = 0.0

    IN_JSON = ("*", "is_caught")

    @property
    def is_caught(self) -> bool:
        """Whether nobody needs another test for it."""
        return self.status in (Status.NOTICED, Status.REFUSED)


@dataclass(frozen=True)
class Run:
    """One run of the tests.

    Attributes:
        status: the exit status; None if it took too long.
        told: what happened.
        said: the end of what it printed.
        seconds: that it took.
    """

    status: int | None
    told: list[Event]
    said: str
    seconds: float

    def first(self, event: str) -> str | None:
        """What was told with the first event of a kind; None if there was none."""
        return next((more for kind, more in self.told if kind == event), None)


class Suite:
    """A user's tests as a command, which can be run with a mistake in the callable.

    Args:
        target: `pkg.module:callable`.
        view: what is known of it.
        command: what runs the tests: any that starts Python.
        timeout: seconds for one run.
    """

    def __init__(self, target: str, view: View, command: Sequence[str], timeout: float | None = None) -> None:
        self.module, _, self.attribute = target.partition(":")
        self.view, self.command, self.timeout = view, [*command], timeout
        self.running: set[subprocess.Popen[bytes]] = set()
        self.is_over = False

    def run(self, mistake: str = "", *, is_hooked: bool = True) -> Run:
        """Run the tests with a mistake, or with none.

        Raises:
            OSError: if the command cannot be started.
        """
        with tempfile.TemporaryDirectory(prefix="mha-parity-mutate-") as folder:
            record, printed = Path(folder) / "record", Path(folder) / "printed"
            environment = self._environment(folder)
            if is_hooked:
                told = {"module": self.module, "attribute": self.attribute, "mistake": mistake}
                environment[VARIABLE] = json.dumps({**told, "view": asdict(self.view), "record": str(record)})
                _prepend(environment, "PYTHONPATH", str(STARTUP), os.pathsep)
                _prepend(environment, "PYTEST_PLUGINS", "parity.mutating.pytest_plugin", ",")
            begun = time.monotonic()
            with printed.open("wb") as out:
                status = self._wait(environment, out)
            said = printed.read_bytes().decode(errors="replace").strip()
            return Run(status, events(record), said, time.monotonic() - begun)

    def _environment(self, folder: str) -> dict[str, str]:
        """Programs of this environment first; what pytest remembers stays as it was."""
        environment = dict(os.environ)
        _prepend(environment, "PATH", str(Path(sys.executable).parent), os.pathsep)
        options = environment.get("PYTEST_ADDOPTS", "")
        environment["PYTEST_ADDOPTS"] = f"{options} -o cache_dir={folder}/pytest_cache".strip()
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
        """End what runs."""
        self.is_over = True
        for process in list(self.running):
            _end(process)


def _prepend(environment: dict[str, str], name: str, value: str, between: str) -> None:
    environment[name] = value + (between + environment[name] if environment.get(name) else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, if any is left."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()


def baseline(tests: Suite) -> Run:
    """The tests without a mistake.

    Raises:
        ValueError: if they fail, or the callable is never replaced or never called.
    """
    run = tests.run()
    target = f"{tests.module}:{tests.attribute}"
    if run.status is None:
        raise Refusal("the tests", "end within --timeout", f"{tests.timeout:g} s and no end")
    if run.status != 0:
        alone = tests.run(is_hooked=False)
        how = "also by themselves" if alone.status else f"only while {target} is wrapped"
        raise Refusal(
            "the tests", "pass before a mistake is planted", f"exit status {run.status}, {how}: {_last(run.said)}"
        )
    if run.first("planted") is None:
        raise Refusal(
            "the tests",
            f"import {tests.module} with the Python that mha-parity runs in ({sys.executable})",
            "no import of it",
        )
    if run.first("called") is None:
        raise Refusal(
            "the tests",
            f"call {target} by its name",
            "no call",
            hint=f"what was made of it while {tests.module} was imported, such as jax.jit of it, is not replaced",
        )
    return run


def _last(text: str) -> str:
    return text.splitlines()[-1].strip("= ") if text else "it printed nothing"


def mutate(
    tests: Suite,
    names: Sequence[str],
    *,
    jobs: int = 1,
    on_mistake: Callable[[str], None] = lambda name: None,
) -> Iterator[Outcome]:
    """Plant mistakes one at a time, and run the tests for each that a call of theirs allows.

    Args:
        tests: how to run them; the timeout is set by the first run where there is none.
        names: the mistakes, in the order of the outcomes.
        jobs: how many runs at once.
        on_mistake: called before each.

    Raises:
        ValueError: if the tests do not pass by themselves.
    """
    on_mistake("nothing")
    first = baseline(tests)
    if tests.timeout is None:
        tests.timeout = max(LEAST_TIMEOUT, TIMES_LONGER * first.seconds)
    allowed = {more for event, more in first.told if event == "fits"}
    reasons = dict(more.split(": ", 1) for event, more in reversed(first.told) if event == "unfit")

    def outcome(name: str) -> Outcome:
        on_mistake(name)
        if name not in allowed:
            reason = reasons.get(name, "")
            found = (Status.NOT_PLANTED, reason, 0.0) if reason else (Status.NOT_REACHED, "no call allows it", 0.0)
        else:
            run = tests.run(name)
            found = (*_judged(run), run.seconds)
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


def _judged(run: Run) -> tuple[Status, str]:
    """What a run says of the mistake in it, and why."""
    kinds = {event for event, _ in run.told}
    if run.status is None:
        return Status.TIMED_OUT, f"after {run.seconds:.0f} s"
    fails = run.first("failed") or f"exit status {run.status}"
    if "reached" not in kinds:
        reason = run.first("unfit")
        return (Status.NOT_PLANTED, reason) if reason else (Status.NOT_REACHED, "no call allows it")
    if kinds & {"changed", "uncompared"}:
        how = "" if "changed" in kinds else f"; outputs were not compared: {run.first('uncompared')}"
        return (Status.SURVIVED, how.strip("; ")) if run.status == 0 else (Status.NOTICED, fails + how)
    if "raised" in kinds:
        raised = run.first("raised") or ""
        return (Status.REFUSED, raised) if run.status else (Status.SURVIVED, f"though it raises {raised}")
    also = f"; yet {fails} fails" if run.status else ""
    return Status.UNCHANGED, f"every call gives what it gives without it{also}"
