"""A pytest plugin that reports which tests fail while a bug is injected."""

from __future__ import annotations

import sys
from typing import Any

from parity.explain.mutating.record import is_noted, note, order

# Our finder comes before pytest's own one, which finds test modules.
for _finder in list(sys.meta_path):
    if type(_finder).__module__ == "sitecustomize":
        sys.meta_path.remove(_finder)
        sys.meta_path.insert(0, _finder)


_sessions: list[Any] = []


def pytest_sessionstart(session: Any) -> None:
    """Record the session, which stops at the first failing test."""
    _sessions.append(session)


def pytest_runtest_logreport(report: Any) -> None:
    """Record a test that failed, or whose setup failed."""
    if report.failed:
        note("failed", report.nodeid)
        if order()["bug"] and is_noted("changed"):
            _sessions[0].shouldfail = "the injected bug was noticed"


def pytest_collectreport(report: Any) -> None:
    """Record a test module that cannot be imported."""
    if report.failed:
        note("failed", report.nodeid)
