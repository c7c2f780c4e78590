"""The command line, `mha-parity`.

Exit status: 0 all well, 1 a mismatch, 2 bad usage, something missing or not compared, 70 a bug in
this program, 128 + signal.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parity.measure.text import and_listed, did_you_mean
from parity.port.conversion.not_carried import IgnoredSettingsWarning
from parity.use.cli import (
    bugs,
    cache_size,
    cases,
    compare,
    conformance,
    convert,
    diagnose,
    doctor,
    inspect,
    layouts,
    mutate,
    plot,
    run,
    spec,
    verify,
    write,
)
from parity.use.cli.clone import FROM_A_CLONE, commands_of_a_clone
from parity.use.cli.completion import SHELLS
from parity.use.cli.former import with_new_names
from parity.use.cli.help import EXIT_STATUS
from parity.use.cli.messages import is_writable, print_out, refusal, say, say_error, warn
from parity.use.cli.options import in_flags, register_tables
from parity.use.cli.paths import REPORTS, STANDARD_OUTPUT, check_paths

if TYPE_CHECKING:
    from types import FrameType

COMMANDS: dict[str, Any] = {
    "run": run,
    "cases": cases,
    "compare": compare,
    "doctor": doctor,
    "bugs": bugs,
    "cache-size": cache_size,
    "convert": convert,
    "layouts": layouts,
    "spec": spec,
    "inspect": inspect,
    "write": write,
    "verify": verify,
    "plot": plot,
    "conformance": conformance,
    "mutate": mutate,
    "diagnose": diagnose,
    **dict(commands_of_a_clone()),
}
"""A module for each: its `PAGE` of help, `add_arguments`, and `run`, which has all slow imports."""

GROUPS = {
    "check": ("run", "compare", "conformance", "mutate", "verify"),
    "explain": ("diagnose", "bugs", "plot"),
    "models": ("spec", "inspect", "convert", "layouts", "write", "cache-size"),
    "about": ("cases", "doctor", *FROM_A_CLONE),
}
"""Commands in the order of the help, by the kind of their work."""

PATIENCE = 5.0  # seconds for which an import may continue after a signal

EXPECTED = (OSError, ValueError, TypeError, ImportError, RuntimeError, MemoryError)
"""Errors of a wrong argument, a bad file or a machine; all others are bugs of this program."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    SIGINT, SIGTERM and SIGHUP end it like an error: unfinished files are removed, and the status is
    128 + signal.

    Args:
        arguments: words of the command line; default: the arguments of the process.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _signals_raise(for_good=arguments is None) as received:
        try:
            words = with_new_names(words)
            name = next(iter(words), "")
            if name in FROM_A_CLONE and name not in COMMANDS:
                raise ModuleNotFoundError(
                    f"{name} is not in the wheel: it needs a clone, and there `make` or pip "
                    f"install --editable"
                )
            if not name.startswith("-") and name not in COMMANDS:
                hint = " ".join(
                    filter(None, (did_you_mean(name, COMMANDS), "`mha-parity --help` lists them"))
                )
                raise refusal("COMMAND", "be a known command", name or "none", hint=hint)
            options, unknown = make_parser().parse_known_args(words)
            options.words = words
            if unknown and not unknown[0].startswith("-"):
                raise refusal("arguments", f"be those of {options.parser.usage_line()}", unknown[0])
            if unknown:
                flag = unknown[0].partition("=")[0]
                flags = re.findall(r"--[\w-]+", options.parser.format_help())
                hint = did_you_mean(flag, flags) or f"`mha-parity {name} --help` lists its options"
                if name == "mutate" and "--" not in words:
                    hint = "put -- before the command that runs your tests"
                raise refusal(flag, f"be an option of {name}", hint=hint)
            with _warnings_in_a_line():
                status = _run_command(options)
            _check_output()
            return status
        except (Exception, KeyboardInterrupt) as error:
            if os.environ.get("MHA_PARITY_TRACEBACK"):
                traceback.print_exc()
            if received or isinstance(
                error, KeyboardInterrupt
            ):  # an interrupted import may fail in any way
                number = received[0] if received else signal.SIGINT
                by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
                return say(f"interrupted{by}", 128 + number)
            if isinstance(error, EXPECTED):
                return say_error(_words_of(error), 2)
            return say_error(_report_of_bug(error, words), 70)
        finally:
            for stream in (sys.stdout, sys.stderr):
                is_writable(stream)


def _words_of(error: Exception) -> str:
    """Return the text of an error; that of a file begins with its path."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _report_of_bug(error: Exception, words: Sequence[str]) -> str:
    """Return how to report an error of this program. A file has its traceback, unless that was
    printed.
    """
    from importlib import metadata

    version, urls = "not installed", {}
    with suppress(metadata.PackageNotFoundError):
        about = metadata.metadata("mha-parity")
        version, urls = (
            about["Version"],
            dict(url.split(", ", 1) for url in about.get_all("Project-URL") or ()),
        )
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    issues = f" at {urls['Issues']}" if "Issues" in urls else ""
    advice = f"a bug in mha-parity, {what}; please report it{issues} with"
    if not os.environ.get("MHA_PARITY_TRACEBACK"):
        heading = (
            f"mha-parity {version}, Python {sys.version}\n{shlex.join(('mha-parity', *words))}\n\n"
        )
        text = heading + "".join(traceback.format_exception(error))
        with (
            suppress(OSError),
            tempfile.NamedTemporaryFile(
                "wb", prefix="mha-parity-bug-", suffix=".txt", delete=False
            ) as file,
        ):
            file.write(text.encode("utf-8", "backslashreplace"))
            return f"{advice} {file.name}, which has the command and the traceback"
    return f"{advice} this command and its traceback, which MHA_PARITY_TRACEBACK=1 prints"


def _check_output() -> None:
    """Raise an error if something printed cannot be written. Readers of a pipe may stop early."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        return
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print warnings on standard error, each once and in one line; those of libraries with their
    category.
    """
    shown = set()

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        line = (
            f"{message}"
            if issubclass(category, IgnoredSettingsWarning)
            else f"{category.__name__}: {message}"
        )
        if line not in shown:
            shown.add(line)
            warn(line)

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.simplefilter("always", IgnoredSettingsWarning)
        yield


@contextmanager
def _signals_raise(*, for_good: bool) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt once for signals that end a process, so that interrupted work can
    clean up.

    An import continues until it is done. Ignored signals, as under nohup, stay ignored. Afterwards
    the former handlers return or, with `for_good`, a signal ends the process at once.

    Yields:
        The received signals.
    """
    received: list[int] = []
    raised = False
    latest = math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised, latest
        if not received:
            received.append(number)
            latest = time.monotonic() + PATIENCE
        if raised:
            return
        places = {each.f_code.co_filename for each, _ in traceback.walk_stack(frame)}
        is_importing = "<frozen importlib._bootstrap>" in places
        if hasattr(signal, "setitimer") and is_importing and time.monotonic() < latest:
            before.setdefault(signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
            signal.setitimer(
                signal.ITIMER_REAL, 0.02
            )  # libraries in C print a traceback if their import fails
            return
        raised = True
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, interrupt)
    try:
        yield received
    finally:
        if getattr(signal, "SIGALRM", None) in before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            # Nothing would catch a KeyboardInterrupt after the command.
            ends = for_good and handler is signal.default_int_handler
            signal.signal(number, signal.SIG_DFL if ends else handler)


def _run_command(options: argparse.Namespace) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries would end the process
        raise FileNotFoundError("the current folder must exist, but it was deleted") from None
    check_paths(options, getattr(COMMANDS[options.command], "may_write", None))
    to_stdout = [flag for flag in REPORTS if getattr(options, flag, None) in STANDARD_OUTPUT]
    if not to_stdout:
        return _run_and_write(options)
    if len(to_stdout) > 1:
        raise refusal(f"--{' and --'.join(to_stdout)}", "not both be standard output")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report"
        setattr(options, to_stdout[0], str(path))
        with redirect_stdout(sys.stderr):  # output for people
            status = _run_and_write(options)
        from parity.measure.files.target import errors_name

        with suppress(BrokenPipeError), errors_name("standard output"):  # the reader has stopped
            sys.stdout.flush()
            sys.stdout.buffer.write(path.read_bytes())
            sys.stdout.flush()
    return status


def _run_and_write(options: argparse.Namespace) -> int:
    from mha_spec import InputError
    from parity.measure.core.user_code import user_code

    try:
        with user_code(
            f"code that mha-parity {options.command} ran"
        ):  # which sys.exit(0) ends without a result
            register_tables(options)
            status, content = COMMANDS[options.command].run(options)
    except InputError as refused:
        raise in_flags(refused, options) from None
    if options.json is not None:
        from parity.use.reporting.json import write_json

        write_json(options.json, options.command, content)
    return status


FLAG = r"argument (?:-\w/)?(\S+): "

RULES = (
    (FLAG + "invalid int value: '(.*)'", r"\1 must be an integer, got \2"),
    (FLAG + "invalid float value: '(.*)'", r"\1 must be a number, got \2"),
    (FLAG + "not allowed with argument (?:-\\w/)?(.*)", r"\1 must not be combined with \2"),
    (FLAG + "expected one argument", r"\1 must have a value"),
    (FLAG + "ignored explicit argument '(.*)'", r"\1 must have no value, got \2"),
    (FLAG + "must (.*)", r"\1 must \2"),
)
"""Messages of argparse, and ours."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises each error as a line with the way out, and an error if the help cannot
    be written.
    """

    def error(self, message: str) -> NoReturn:
        if missing := re.search(r"arguments are required: (.*)", message):
            raise ValueError(
                f"{and_listed(missing[1].split(', '))} must be passed; usage: {self.usage_line()}"
            )
        for pattern, rule in RULES:
            if found := re.fullmatch(pattern, message):
                message = found.expand(rule)
        raise ValueError(f"{message}; `{self.prog} --help` describes the options")

    def usage_line(self) -> str:
        """Return the usage in one line, without the options that may be left out."""
        words = " ".join(self.format_usage().split()).removeprefix("usage: ")
        return re.sub(r" \[-[^]]*\]", "", words).replace(self.prog, f"{self.prog} [options]", 1)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            flag = "/".join(action.option_strings) or action.metavar
            known = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), known)
            raise refusal(str(flag), f"be one of {', '.join(known)}", {str(flag): value}, hint=hint)

    def print_help(self, file: Any = None) -> None:
        print_out(self.format_help(), file)  # argparse ignores errors

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        _check_output()
        super().exit(status, message)


class _Completion(argparse.Action):
    """Print a completion script."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, *_: Any
    ) -> None:
        from parity.use.cli.completion import completion_for

        print_out(f"{completion_for(values, make_parser())}\n")
        parser.exit()


class _Version(argparse.Action):
    """Print the version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        print_out(f"{parser.prog} {metadata.version('mha-parity')}\n")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    lines = [
        "\n".join(
            (
                f"{group}:",
                *(f"  {name:11} {COMMANDS[name].PAGE.line}" for name in names if name in COMMANDS),
            )
        )
        for group, names in GROUPS.items()
    ]
    parser = _Parser(
        prog="mha-parity",
        usage="mha-parity [-h] [--version] [--print-completion SHELL] COMMAND ...",
        description=(
            "Check that attention layers in JAX, PyTorch and TTNN agree, or find out why they do "
            "not."
        ),
        epilog="\n\n".join(
            (*lines, "`mha-parity COMMAND --help` has an example of each command.", EXIT_STATUS)
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument(
        "--print-completion",
        action=_Completion,
        choices=SHELLS,
        help="print a script that completes command lines in this shell, and exit",
    )
    parsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="mha-parity", help=argparse.SUPPRESS
    )
    for name, command in COMMANDS.items():
        page = command.PAGE
        command_parser = parsers.add_parser(
            name,
            help=page.line,
            allow_abbrev=False,
            description=textwrap.fill(page.about, 78),
            epilog=page.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(command_parser)
        command_parser.add_argument(
            "--json", metavar="PATH", help="also write the result as JSON; - is standard output"
        )
        command_parser.set_defaults(parser=command_parser)
    return parser
