"""Events of an injected bug, written by the test processes as lines of JSON for the process that
started them.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "MHA_PARITY_MUTATE"
"""Environment variable with the order: `module`, `attribute`, `bug`, `view`, and the file
`record`.
"""

Event = tuple[str, str]
"""An event and its details: `injected`, called, fits (a bug), reached, changed, raised, unfit,
uncompared, or failed (a test).
"""


_noted: set[Event] = set()


@cache
def order() -> dict[str, Any]:
    """Return the order of a test process."""
    return json.loads(os.environ[VARIABLE])


def note(event: str, more: str = "") -> None:
    """Record an event, unless it is already recorded."""
    if (event, more) in _noted:
        return
    _noted.add((event, more))
    line = json.dumps([event, more[:300]]) + "\n"
    descriptor = os.open(order()["record"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        # One write, so that lines of several processes do not mix.
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def is_noted(event: str) -> bool:
    """Return whether this process has recorded an event."""
    return any(kind == event for kind, _ in _noted)


def events(path: Path) -> list[Event]:
    """Return the recorded events, in order."""
    if not path.exists():
        return []
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]
