"""What `--help` says of each command: what it does, an example, and what its exit status means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Result = tuple[int, Mapping[str, Any]]
"""The exit status of a command, and what `--json` writes."""

EXIT_STATUS = (
    "exit status: 0 all well, 1 a mismatch, 2 bad usage or something missing, 70 a bug in this program, "
    "128 + n stopped by signal n"
)


class Page(NamedTuple):
    """The help of one command.

    Attributes:
        line: what it does, in the list of commands.
        about: the same in a sentence or two.
        example: a command line, as one would type it; it may go on after a backslash at the end of a line.
        well: when the exit status is 0.
        wrong: when it is 1; empty where it never is.
    """

    line: str
    about: str
    example: str
    well: str
    wrong: str = ""

    @property
    def epilog(self) -> str:
        """Example and exit status, as they stand below the options."""
        wrong = f"; 1 {self.wrong}" if self.wrong else ""
        status = f"0 {self.well}{wrong}; 2 bad usage or something missing"
        return f"example:\n  {self.example}\n\nexit status:\n  {status}"
