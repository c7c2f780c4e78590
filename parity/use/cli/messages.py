"""Messages of several commands."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

import click

from parity.measure.text import and_listed, did_you_mean, in_line, printable

if TYPE_CHECKING:
    from mha_spec import InputError

MAX_LINE = 2000
"""Characters of a message. The number is a choice: text of hostile files may be of any length."""


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


def print_traceback() -> None:
    """Print the traceback of the current exception on standard error."""
    # Its message may have lines of a file.
    _print_error(printable(traceback.format_exc().rstrip("\n")))


def _print(text: str) -> None:
    """Print a line on standard error."""
    _print_error(in_line(text, MAX_LINE))


def _print_error(text: str) -> None:
    """Print text on standard error if possible: the exit status must not depend on it."""
    if sys.stderr is None:  # it is closed, and print would write to standard output
        return
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def print_out(text: str, stream: TextIO | None = None) -> None:
    """Print text on standard output. If the reader of a pipe has stopped, drop it: the status is
    the status of the work.

    Args:
        text: the text, with its line ends.
        stream: default: standard output.
    """
    if stream is None:
        stream = sys.stdout
    try:
        print(text, end="", file=stream, flush=True)
    except BrokenPipeError:
        is_writable(stream)


def is_writable(stream: TextIO | None) -> bool:
    """Flush a stream of this process, and return whether that worked.

    If it fails, the output is dropped, so that the interpreter does not try again.
    """
    if stream is None:
        return True
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def input_error(
    argument: str, rule: str, got: Mapping[str, Any] | str = "", /, **values: Any
) -> InputError:
    """Return an error about an argument of a command line."""
    # The import is here because help must be fast, and needs no errors.
    from mha_spec import InputError

    return InputError(argument, rule, got, **values)


def requires(flags: Sequence[str] | str, needed: str) -> click.UsageError:
    """Return the error if options were passed without what they belong to."""
    if isinstance(flags, str):
        flags = [flags]
    verb = "require"
    if len(flags) == 1:
        verb = "requires"
    return click.UsageError(f"{and_listed(flags)} {verb} {needed}", _context())


def contradiction(flag: str, others: Sequence[str] | str) -> click.UsageError:
    """Return the error if an option was passed with others that exclude it."""
    if isinstance(others, str):
        others = [others]
    return click.UsageError(f"{flag} cannot be combined with {and_listed(others)}", _context())


def _context() -> click.Context | None:
    return click.get_current_context(silent=True)


def check_exclusive(options: Any, *flags: str) -> None:
    """Reject more than one of some options."""
    passed = []
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        if getattr(options, name) is not None:
            passed.append(flag)
    if len(passed) > 1:
        raise contradiction(passed[1], passed[0])


def names_like(name: str, known_names: Iterable[str], listed: str) -> str:
    """Return a hint for an unknown name: names that are spelled like it, and what lists all."""
    similar = did_you_mean(name, known_names)
    if not similar:
        return listed
    return f"{similar} {listed}"


def add_hint(error: InputError, hint: str) -> None:
    """Append a sentence to the hint of an error."""
    if error.hint:
        hint = f"{error.hint}; {hint}"
    error.hint = hint


def no_framework() -> str:
    """Return why no backend can run, and how to install one."""
    from parity.measure.backends import BACKENDS, why_missing

    reasons = "; ".join(str(why_missing(name)) for name in BACKENDS)
    return (
        f"at least one backend must be installed: {reasons}. One is enough: pip install torch, or "
        f"jax and flax"
    )
