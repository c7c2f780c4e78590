"""What happens to a planted mistake, told by the processes of the tests to the one that started them: lines of JSON."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "MHA_PARITY_MUTATE"
"""The environment variable with what to plant: `module`, `attribute`, `mistake`, `view`; and the file `record`."""

Event = tuple[str, str]
"""What happened and more about it: planted, called, fits (a mistake), reached, changed, raised, unfit, uncompared, or
failed (a test)."""


_told: set[Event] = set()


@cache
def order() -> dict[str, Any]:
    """What to plant, in a process of the tests."""
    return json.loads(os.environ[VARIABLE])


def note(event: str, more: str = "") -> None:
    """Tell once that something happened; what was told before is not told again."""
    if (event, more) in _told:
        return
    _told.add((event, more))
    line = json.dumps([event, more[:300]]) + "\n"
    descriptor = os.open(order()["record"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())  # at once, so that lines of several processes do not mix
    finally:
        os.close(descriptor)


def is_noted(event: str) -> bool:
    """Whether this process has told so."""
    return any(kind == event for kind, _ in _told)


def events(path: Path) -> list[Event]:
    """What was told, in order."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(event, more) for event, more in map(json.loads, lines)]
