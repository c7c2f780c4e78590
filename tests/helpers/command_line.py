"""Runs of the command line, and its errors."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from parity.use.cli.main import command_named, main


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of a command line, whose first word is a command."""
    name, *others = words
    return dict(command_named(name).make_context(name, list(others)).params)


def run_in_pipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process whose output is a pipe, without variables about the width and
    colors of a terminal.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")
    }
    command = [sys.executable, "-m", "parity", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def error_line(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """Run a command that fails because of its arguments, and return its error: one printable line,
    and no output.
    """
    assert main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mha-parity: ")
    (line,) = printed.err.splitlines()
    assert line.isprintable()
    return line
