"""The files and folders that a command line names: refused before the work, where they cannot be written."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from parity.cli.messages import refusal
from parity.cli.options import flag_of

REPORTS = ("json", "junit", "html")
"""Options whose result can go to standard output."""

STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")

PATHS = ("source", "target", "file", "files", "traces", "weights", "input", "key_input", "tokens_file", "join")
PATHS += ("model", "save_traces", "plot", *REPORTS)
"""Options and positional arguments that are paths."""


def check_destinations(options: argparse.Namespace) -> None:
    """Refuse places that cannot be written to, or that something is read from, before the work and not after it."""
    given = vars(options)
    for name, values in given.items():
        if name in PATHS and "" in (values if isinstance(values, list) else [values]):
            raise refusal(_flag(name), "name a file or a folder", "an empty name")
    if folder := given.get("save_traces"):
        _check_folder("--save-traces", folder)
    written = {name: path for name in (*REPORTS, "plot", "target") if (path := given.get(name)) is not None}
    if options.command == "conformance":
        written.pop("target", None)  # a function
    read = [name for name in PATHS if name not in written]
    for name, path in written.items():
        if name in REPORTS and path in STANDARD_OUTPUT:
            continue
        if name != "target" or options.command != "convert":  # convert itself knows what it may write
            _check_destination(_flag(name), path)
        others = [*(other for other in written if other != name), *(read if name != "target" else ())]
        for other in others:
            values = given.get(other)
            if any(_is_same(path, value) for value in (values if isinstance(values, list) else [values]) if value):
                raise refusal(
                    _flag(name), f"name a file other than {_flag(other)}", {_flag(name): path, _flag(other): path}
                )


def _flag(name: str) -> str:
    positional = {"source": "SRC", "target": "DST", "file": "FILE", "files": "FILE", "traces": "DIR"}
    return positional.get(name) or flag_of(name)


def _is_same(path: str, other: str) -> bool:
    """Whether two names are those of one file, which need not be there yet."""
    try:
        return os.path.samefile(path, other) and os.path.isfile(path)
    except OSError:
        return os.path.realpath(path) == os.path.realpath(other)


def _check_destination(flag: str, path: str) -> None:
    from parity.files.target import check_writable

    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise refusal(flag, "name a file in a folder that exists", {flag: path})
    try:
        check_writable(path)
    except OSError as error:
        raise refusal(flag, "name a file that can be written", f"{path}: {error.strerror}") from None


def _check_folder(flag: str, path: str) -> None:
    """Refuse a folder that can neither be written into nor made."""
    from parity.files.target import check_writable

    there = Path(path).absolute()
    while not os.path.lexists(there):
        there = there.parent
    try:
        check_writable(there / f".{os.getpid()}")
    except OSError as error:
        raise refusal(flag, "name a folder that can be written into", f"{path}: {error.strerror}") from None


def is_trace(path: str) -> bool:
    """Whether a file is a trace."""
    return kind_of(path) == "trace"


def kind_of(path: str) -> str:
    """What a file says that it holds: `trace`, `tap`, or nothing."""
    from parity.files import open_tensors

    with open_tensors(path) as file:
        return str(file.metadata.get("kind", ""))
