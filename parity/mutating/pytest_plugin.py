"""A plugin of pytest that tells which tests fail while a mistake is planted."""

from __future__ import annotations

import sys
from typing import Any

from parity.mutating.record import is_noted, note, order

for _finder in [each for each in sys.meta_path if type(each).__module__ == "sitecustomize"]:
    sys.meta_path.remove(_finder)  # before pytest's own, which finds modules of tests
    sys.meta_path.insert(0, _finder)


_sessions: list[Any] = []


def pytest_sessionstart(session: Any) -> None:
    """What is stopped at the first test that fails for the mistake."""
    _sessions.append(session)


def pytest_runtest_logreport(report: Any) -> None:
    """A test, or what it needs, has failed."""
    if report.failed:
        note("failed", report.nodeid)
        if order()["mistake"] and is_noted("changed"):
            _sessions[0].shouldfail = "the planted mistake was noticed"


def pytest_collectreport(report: Any) -> None:
    """A module of tests cannot be imported."""
    if report.failed:
        note("failed", report.nodeid)
