"""Help of each command: its work, an example, and the meaning of its exit status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class Record(Protocol):
    """A result that can be written as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        ...


Result = tuple[int, Mapping[str, Any] | Record]
"""The exit status of a command, and what `--json` writes."""

EXIT_STATUS = """exit status:
  0 all is well
  1 a mismatch
  2 bad usage, something is missing, or not everything was compared
  70 a bug in mha-parity
  128 + n stopped by signal n"""


class Page(NamedTuple):
    """The help of one command.

    Attributes:
        line: its work, in the list of commands.
        about: its work, in a few sentences.
        example: a command line; a backslash continues it on the next line.
        well: when the exit status is 0.
        wrong: when it is 1; empty if it never is.
        forms: arguments in each form of the command, and their meaning.
    """

    line: str
    about: str
    example: str
    well: str
    wrong: str = ""
    forms: tuple[tuple[str, str], ...] = ()

    @property
    def epilog(self) -> str:
        """Forms, example and exit status, below the options."""
        parts = []
        if self.forms:
            parts.append("forms:")
            for arguments, meaning in self.forms:
                parts.append(f"  {arguments:38} {meaning}")
            parts.append("")
        status = f"0 {self.well}"
        if self.wrong:
            status += f"; 1 {self.wrong}"
        parts += ["example:", f"  {self.example}", ""]
        parts += ["exit status:", f"  {status}; 2 bad usage or something missing"]
        return "\n".join(parts)
