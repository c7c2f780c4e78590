"""Words that messages of several rooms share."""

from __future__ import annotations

from collections.abc import Iterable


def some_of(names: Iterable[str], most: int = 8) -> str:
    """Names in a line, and how many there are beyond some."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
