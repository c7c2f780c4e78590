"""Files and folders of a command line: rejected before the work if they cannot be written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from parity.use.cli.command import Options, name_of
from parity.use.cli.messages import input_error
from parity.use.cli.options import flag_of

REPORTS = ("json", "junit", "html")
"""Options whose result can go to standard output."""

STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")

PATHS = ("path", "source", "target", "file", "files")
PATHS += ("weights", "input", "key_input", "labels_file", "join", "model", "layout_files")
PATHS += ("save_traces", "plot", "output", *REPORTS)
"""Options and positional arguments that are paths."""


def check_paths(options: Options, may_write: Callable[[Options, str], bool] | None) -> None:
    """Reject reports that cannot be written, or that would overwrite another file, before the work.

    Args:
        options: the parsed command line.
        may_write: returns whether the command may write a file besides its reports; None if it
            writes no other.
    """
    from parity.measure.files.target import check_writable
    from parity.use.reporting.earlier import check_report

    paths = _paths_of(options)
    for name, path in paths:
        if name == "save_traces":
            # Files in the folder decide whether it is writable. No file has this name.
            folder = _existing_folder(path)
            check_writable(os.path.join(folder, f".{os.getpid()}"), "--save-traces", path)
        if name not in (*REPORTS, "output") or path in STANDARD_OUTPUT:
            continue
        flag = _flag(name, options)
        check_writable(path, flag)
        for other_name, other_path in paths:
            if name != other_name and _is_same(path, other_path):
                other_flag = _flag(other_name, options)
                values = {flag: path, other_flag: other_path}
                raise input_error(flag, f"differ from the file of {other_flag}", values)
        if name in REPORTS:
            if may_write is not None and may_write(options, path):
                raise input_error(flag, "differ from the files to write", {flag: path})
            check_report(path, flag)


def _paths_of(options: Options) -> list[tuple[str, str]]:
    """Return the paths of a command line, each with the name of its option."""
    paths = []
    for name in PATHS:
        value = getattr(options, name, None)
        for path in value if isinstance(value, list) else [value]:
            if path == "":
                raise input_error(_flag(name, options), "be a file or a folder", "an empty name")
            if path is not None:
                paths.append((name, path))
    return paths


def _existing_folder(path: str) -> str:
    """Return the nearest folder above a path, or the path itself, that exists."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _flag(name: str, options: Options) -> str:
    """Return an argument as the help of its command calls it."""
    for parameter in options.context.command.params:
        if parameter.name == name:
            return name_of(parameter)
    return flag_of(name)


def _is_same(path: str, other: str) -> bool:
    """Return whether two names are of one file, which may not exist yet."""
    try:
        return os.path.samefile(path, other) and os.path.isfile(path)
    except OSError:
        return os.path.realpath(path) == os.path.realpath(other)


def kind_of(path: str) -> str:
    """Return the kind of a file by its metadata: `trace`, `tap`, or empty."""
    from parity.measure.files import open_tensors

    with open_tensors(path) as file:
        return str(file.metadata.get("kind", ""))


def kinds_of(paths: Sequence[str]) -> list[str]:
    """Return the kind of each path as `kind_of` does; empty if it is not a file."""
    kinds = []
    for path in paths:
        kind = ""
        if os.path.isfile(path):
            kind = kind_of(path)
        kinds.append(kind)
    return kinds


def is_name_of_shards(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the name that `convert` got for a file that it wrote in shards."""
    return os.path.isfile(f"{os.fspath(path)}.index.json")


def missing_in(paths: Sequence[str]) -> str | None:
    """Return the first path without a file or folder; None if there is none."""
    for path in paths:
        if not os.path.exists(path) and not is_name_of_shards(path):
            return path
    return None
