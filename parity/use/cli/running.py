"""A run of a command: its paths are checked before, and its JSON is written after it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from parity.use.cli.command import Command, Options
from parity.use.cli.messages import contradiction, input_error
from parity.use.cli.options import in_flags, register_tables
from parity.use.cli.paths import REPORTS, STANDARD_OUTPUT, check_paths


def run_command(options: Options) -> int:
    """Run the command of a command line, write its JSON, and return its exit status."""
    command = options.context.command
    if not isinstance(command, Command):
        raise TypeError(type(command).__name__)
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries would end the process
        raise FileNotFoundError("the current folder must exist, but it was deleted") from None
    if options.verbose and options.quiet:
        raise contradiction("--quiet", "--verbose")
    check_paths(options, command.may_write)
    to_stdout = [flag for flag in REPORTS if getattr(options, flag, None) in STANDARD_OUTPUT]
    if not to_stdout:
        if options.quiet and not command.has_quiet_form:
            with _no_output():
                return _run_and_write(command, options)
        return _run_and_write(command, options)
    if len(to_stdout) > 1:
        raise input_error(f"--{' and --'.join(to_stdout)}", "not both be standard output")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report"
        setattr(options, to_stdout[0], str(path))
        with _no_output():
            status = _run_and_write(command, options)
        from parity.measure.files.target import errors_name

        with suppress(BrokenPipeError), errors_name("standard output"):  # the reader has stopped
            sys.stdout.flush()
            sys.stdout.buffer.write(path.read_bytes())
            sys.stdout.flush()
    return status


@contextmanager
def _no_output() -> Iterator[None]:
    """Drop what is printed on standard output."""
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        yield


def _run_and_write(command: Command, options: Options) -> int:
    from mha_spec import InputError
    from parity.measure.core.user_code import user_code
    from parity.use.reporting.console import colored

    run: Any = command.callback
    try:
        # Code of the user may call sys.exit(0), which would end without a result.
        with user_code(f"code that mha-parity {options.command} ran"), colored(options.color):
            register_tables(options)
            status, content = run(options)
    except InputError as error:
        raise in_flags(error, options) from None
    if options.json is not None:
        from parity.use.reporting.json import write_json

        # Only now, because the JSON of many cases or layers is long.
        values = content if isinstance(content, Mapping) else content.to_dict()
        write_json(options.json, options.command, values)
    return status
