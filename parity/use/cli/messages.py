"""Messages of several commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from parity.measure.text import in_line

if TYPE_CHECKING:
    from mha_spec import InputError

MAX_LINE = 2000  # characters of a message


def say(text: str, status: int) -> int:
    """Print in one line on standard error why a command ends, and return its exit status."""
    _print(f"mha-parity: {text}")
    return status


def say_error(text: str, status: int) -> int:
    """Print an error in one line on standard error, and return the exit status."""
    return say(f"error: {text}", status)


def warn(text: object) -> None:
    """Print a warning in one line on standard error."""
    _print(f"mha-parity: warning: {text}")


def _print(text: str) -> None:
    """Print a line on standard error if possible: the exit status must not depend on it."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:  # if it is closed, print would write to standard output
            print(in_line(text, MAX_LINE), file=sys.stderr, flush=True)


def print_out(text: str, stream: TextIO | None = None) -> None:
    """Print text on standard output. If the reader of a pipe has stopped, drop it: the status is
    that of the work.

    Args:
        text: the text, with its line ends.
        stream: default: standard output.
    """
    stream = sys.stdout if stream is None else stream
    try:
        print(text, end="", file=stream, flush=True)
    except BrokenPipeError:
        is_writable(stream)


def is_writable(stream: TextIO | None) -> bool:
    """Flush a stream of this process. If that fails, drop its output, so that the interpreter does
    not try again.
    """
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # pyright: ignore[reportOptionalMemberAccess]
        return False
    return True


def refusal(
    argument: str, rule: str, got: Mapping[str, Any] | str = "", /, **values: Any
) -> InputError:
    """Return a refusal of an argument of a command line; its class is imported late, because help
    must be fast.
    """
    from mha_spec import InputError

    return InputError(argument, rule, got, **values)


def no_framework() -> str:
    """Return why no backend can run, and how to install one."""
    from parity.measure.backends import BACKENDS, why_missing

    reasons = "; ".join(str(why_missing(name)) for name in BACKENDS)
    return (
        f"at least one backend must be installed: {reasons}. One is enough: pip install torch, "
        f"or jax and flax"
    )
