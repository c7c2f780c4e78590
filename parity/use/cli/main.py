"""The command line, `mha-parity`.

Exit status: 0 all well, 1 a mismatch, 2 bad usage, something missing or not compared, 70 a bug in
this program, 128 + signal.
"""

from __future__ import annotations

import argparse
import importlib
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parity.measure.text import and_listed, did_you_mean
from parity.port.conversion.ignored_settings import IgnoredSettingsWarning
from parity.use.cli.clone import FROM_A_CLONE, commands_of_a_clone
from parity.use.cli.completion import SHELLS
from parity.use.cli.help import EXIT_STATUS
from parity.use.cli.messages import (
    is_writable,
    names_like,
    print_out,
    refusal,
    say,
    say_error,
    warn,
)
from parity.use.cli.options import in_flags, register_tables
from parity.use.cli.paths import REPORTS, STANDARD_OUTPUT, check_paths

if TYPE_CHECKING:
    from types import FrameType

COMMANDS: dict[str, str] = {
    "run": "parity.use.cli.run",
    "cases": "parity.use.cli.cases",
    "compare": "parity.use.cli.compare",
    "doctor": "parity.use.cli.doctor",
    "bugs": "parity.use.cli.bugs",
    "cache-size": "parity.use.cli.cache_size",
    "convert": "parity.use.cli.convert",
    "layouts": "parity.use.cli.layouts",
    "spec": "parity.use.cli.spec",
    "inspect": "parity.use.cli.inspect",
    "write": "parity.use.cli.write",
    "verify": "parity.use.cli.verify",
    "plot": "parity.use.cli.plot",
    "conformance": "parity.use.cli.conformance",
    "mutate": "parity.use.cli.mutate",
    "diagnose": "parity.use.cli.diagnose",
    **commands_of_a_clone(),
}
"""The module of each command, with its `PAGE` of help, `add_arguments`, and `run`, which has all
slow imports.
"""

GROUPS = {
    "check": ("run", "compare", "conformance", "mutate", "verify"),
    "explain": ("diagnose", "bugs", "plot"),
    "models": ("spec", "inspect", "convert", "layouts", "write", "cache-size"),
    "about": ("cases", "doctor", *FROM_A_CLONE),
}
"""Commands in the order of the help, by the kind of their work."""

PATIENCE = 5.0
"""Seconds for which an import may continue after a signal.

The number is a choice: most imports of a framework take less, and one that hangs must end as well.
"""

POLL = 0.02
"""Seconds until the next look whether such an import is done. Also a choice, below what a person
notices.
"""

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
    with _SignalHandlers(for_good=arguments is None) as signals:
        try:
            options = _parse(words)
            signals.raise_deferred()
            with _warnings_in_a_line():
                status = _run_command(options)
            # The command may have ended between an import and the next look at it.
            signals.raise_deferred()
            _check_output()
            return status
        except (Exception, KeyboardInterrupt) as error:
            if os.environ.get("MHA_PARITY_TRACEBACK"):
                traceback.print_exc()
            # An import that a signal interrupts may fail in any way.
            if signals.received is not None:
                return _say_interrupted(signals.received)
            if isinstance(error, KeyboardInterrupt):
                return _say_interrupted(signal.SIGINT)
            if isinstance(error, EXPECTED):
                return say_error(_words_of(error), 2)
            return say_error(_report_of_bug(error, words), 70)
        finally:
            for stream in (sys.stdout, sys.stderr):
                is_writable(stream)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line.

    Raises:
        ModuleNotFoundError: if only a clone has the command.
        ValueError: if there is no such command, or an argument is unknown, missing or wrong.
    """
    name = words[0] if words else ""
    if name in FROM_A_CLONE and name not in COMMANDS:
        raise ModuleNotFoundError(
            f"{name} is not in the wheel: it needs a clone, and there `make` or pip install "
            f"--editable"
        )
    if name in COMMANDS:
        parser = make_parser([name])
    elif name.startswith("-"):
        # An option of the whole program, such as --help, which lists all commands.
        parser = make_parser()
    else:
        hint = names_like(name, COMMANDS, "`mha-parity --help` lists them")
        raise refusal("COMMAND", "be a known command", name or "none", hint=hint)
    options, unknown = parser.parse_known_args(words)
    options.words = words
    if unknown:
        _refuse_argument(unknown[0], name, options)
    return options


def _refuse_argument(word: str, name: str, options: argparse.Namespace) -> NoReturn:
    """Reject an unknown argument of a command, and name the options that are spelled like it."""
    if not word.startswith("-"):
        raise refusal("arguments", f"be those of {options.parser.usage_line()}", word)
    flag = word.partition("=")[0]
    flags = re.findall(r"--[\w-]+", options.parser.format_help())
    hint = did_you_mean(flag, flags)
    if not hint:
        hint = f"`mha-parity {name} --help` lists its options"
    if name == "mutate" and "--" not in options.words:
        # Without --, options of the user's own command look like ours.
        hint = "put -- before the command that runs your tests"
    raise refusal(flag, f"be an option of {name}", hint=hint)


def _say_interrupted(number: int) -> int:
    """Print that a signal ended the command, and return the exit status."""
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    return say(f"interrupted{by}", 128 + number)


def _words_of(error: Exception) -> str:
    """Return the text of an error; that of a file begins with its path."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _report_of_bug(error: Exception, words: Sequence[str]) -> str:
    """Return how to report an error of this program.

    A file has its traceback, unless that was printed.
    """
    version, issues = _version_and_issues()
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    where = f" at {issues}" if issues else ""
    advice = f"a bug in mha-parity, {what}; please report it{where} with"
    if not os.environ.get("MHA_PARITY_TRACEBACK"):
        command = shlex.join(("mha-parity", *words))
        heading = f"mha-parity {version}, Python {sys.version}\n{command}\n\n"
        text = heading + "".join(traceback.format_exception(error))
        # A disk that is full must not hide the error.
        with suppress(OSError):
            path = _write_bug(text)
            return f"{advice} {path}, which has the command and the traceback"
    return f"{advice} this command and its traceback, which MHA_PARITY_TRACEBACK=1 prints"


def _version_and_issues() -> tuple[str, str]:
    """Return the installed version, and the address that takes reports; empty if none is known."""
    from importlib import metadata

    try:
        about = metadata.metadata("mha-parity")
    except metadata.PackageNotFoundError:
        return "not installed", ""
    urls = dict(url.split(", ", 1) for url in about.get_all("Project-URL") or ())
    return about["Version"], urls.get("Issues", "")


def _write_bug(text: str) -> str:
    """Write the report of a bug to a file that stays, and return its path."""
    with tempfile.NamedTemporaryFile(
        "wb", prefix="mha-parity-bug-", suffix=".txt", delete=False
    ) as file:
        # Names of files may contain surrogates, which UTF-8 cannot encode.
        file.write(text.encode("utf-8", "backslashreplace"))
        return file.name


def _check_output() -> None:
    """Raise an error if something printed cannot be written. Readers of a pipe may stop early."""
    try:
        if sys.stdout is not None:  # None if it is closed
            sys.stdout.flush()
    except BrokenPipeError:
        return  # the reader needs no more
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print warnings on standard error, each once and in one line; those of libraries with their
    category.
    """
    shown = set()

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        line = str(message)
        if not issubclass(category, IgnoredSettingsWarning):
            line = f"{category.__name__}: {line}"
        if line not in shown:
            shown.add(line)
            warn(line)

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.simplefilter("always", IgnoredSettingsWarning)
        yield


class _SignalHandlers:
    """A context that raises KeyboardInterrupt once for signals that end a process, so that
    interrupted work can clean up.

    An import continues until it is done. Ignored signals, as under nohup, stay ignored. Afterwards
    the former handlers return or, with `for_good`, a signal ends the process at once.

    Attributes:
        received: number of the first signal; None before one.
    """

    NAMES = ("SIGINT", "SIGTERM", "SIGHUP")

    def __init__(self, *, for_good: bool) -> None:
        self.received: int | None = None
        self._for_good = for_good
        self._replaced: dict[int, Any] = {}
        self._has_raised = False
        self._deadline = math.inf

    def __enter__(self) -> _SignalHandlers:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python allows handlers in the main thread only
        for name in self.NAMES:
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is None or signal.getsignal(number) in (signal.SIG_IGN, None):
                continue
            self._replaced[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        if getattr(signal, "SIGALRM", None) in self._replaced:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._replaced.items():
            if self._for_good and handler is signal.default_int_handler:
                # Nothing would catch its KeyboardInterrupt after the command.
                handler = signal.SIG_DFL
            signal.signal(number, handler)

    def raise_deferred(self) -> None:
        """Raise KeyboardInterrupt if a signal came during an import and has not raised it yet."""
        if self.received is not None and not self._has_raised:
            self._has_raised = True
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, or the alarm after one: raise KeyboardInterrupt, or try again if an
        import runs.
        """
        if self.received is None:
            self.received = number
            self._deadline = time.monotonic() + PATIENCE
        if self._has_raised:
            return
        can_wait = hasattr(signal, "setitimer") and time.monotonic() < self._deadline
        if can_wait and _is_importing(frame):
            # Libraries in C print a traceback if their import fails: try again soon.
            self._handle_alarm()
            signal.setitimer(signal.ITIMER_REAL, POLL)
            return
        self._has_raised = True
        raise KeyboardInterrupt

    def _handle_alarm(self) -> None:
        handler = signal.signal(signal.SIGALRM, self._interrupt)
        # The second time, the former handler is our own.
        self._replaced.setdefault(signal.SIGALRM, handler)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame, or one that called it, imports a module."""
    return any(
        caller.f_code.co_filename == "<frozen importlib._bootstrap>"
        for caller, _ in traceback.walk_stack(frame)
    )


def _run_command(options: argparse.Namespace) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries would end the process
        raise FileNotFoundError("the current folder must exist, but it was deleted") from None
    command = command_named(options.command)
    check_paths(options, getattr(command, "may_write", None))
    to_stdout = [flag for flag in REPORTS if getattr(options, flag, None) in STANDARD_OUTPUT]
    if not to_stdout:
        return _run_and_write(command, options)
    if len(to_stdout) > 1:
        raise refusal(f"--{' and --'.join(to_stdout)}", "not both be standard output")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report"
        setattr(options, to_stdout[0], str(path))
        # Only the report may be on standard output: what is for people goes to the other stream.
        with redirect_stdout(sys.stderr):
            status = _run_and_write(command, options)
        from parity.measure.files.target import errors_name

        with suppress(BrokenPipeError), errors_name("standard output"):  # the reader has stopped
            sys.stdout.flush()
            sys.stdout.buffer.write(path.read_bytes())
            sys.stdout.flush()
    return status


def _run_and_write(command: Any, options: argparse.Namespace) -> int:
    from mha_spec import InputError
    from parity.measure.core.user_code import user_code

    try:
        # Code of the user may call sys.exit(0), which would end without a result.
        with user_code(f"code that mha-parity {options.command} ran"):
            register_tables(options)
            status, content = command.run(options)
    except InputError as refused:
        raise in_flags(refused, options) from None
    if options.json is not None:
        from parity.use.reporting.json import write_json

        # Only now, because the JSON of many cases or layers is long.
        values = content if isinstance(content, Mapping) else content.to_dict()
        write_json(options.json, options.command, values)
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
        missing = re.search(r"arguments are required: (.*)", message)
        if missing:
            names = and_listed(missing[1].split(", "))
            raise ValueError(f"{names} must be passed; usage: {self.usage_line()}")
        for pattern, rule in RULES:
            match = re.fullmatch(pattern, message)
            if match:
                message = match.expand(rule)
        raise ValueError(f"{message}; `{self.prog} --help` describes the options")

    def usage_line(self) -> str:
        """Return the usage in one line, without the options that may be left out."""
        words = " ".join(self.format_usage().split()).removeprefix("usage: ")
        return re.sub(r" \[-[^]]*\]", "", words).replace(self.prog, f"{self.prog} [options]", 1)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        argument = "/".join(action.option_strings) or str(action.metavar)
        choices = [str(choice) for choice in action.choices]
        hint = did_you_mean(str(value), choices)
        raise refusal(argument, f"be one of {', '.join(choices)}", {argument: value}, hint=hint)

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


def command_named(name: str) -> Any:
    """Import the module of a command."""
    return importlib.import_module(COMMANDS[name])


def make_parser(names: Iterable[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of some commands; default: of all. Only their modules are imported."""
    commands = {name: command_named(name) for name in (COMMANDS if names is None else names)}
    parser = _Parser(
        prog="mha-parity",
        usage="mha-parity [-h] [--version] [--print-completion SHELL] COMMAND ...",
        description=(
            "Check that attention layers in JAX, PyTorch and TTNN agree, or find out why they do "
            "not."
        ),
        epilog=_epilog(commands),
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
    for name, command in commands.items():
        page = command.PAGE
        command_parser = parsers.add_parser(
            name,
            help=page.line,
            allow_abbrev=False,
            description=textwrap.fill(page.about, 78),  # as wide as argparse's lines on 80 columns
            epilog=page.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(command_parser)
        command_parser.add_argument(
            "--json", metavar="PATH", help="also write the result as JSON; - is standard output"
        )
        command_parser.set_defaults(parser=command_parser)
    return parser


def _epilog(commands: dict[str, Any]) -> str:
    """Return the list of commands in groups, and the meaning of the exit status."""
    parts = []
    for group, names in GROUPS.items():
        lines = [f"{group}:"]
        for name in names:
            if name in commands:
                lines.append(f"  {name:11} {commands[name].PAGE.line}")
        parts.append("\n".join(lines))
    parts.append("`mha-parity COMMAND --help` has an example of each command.")
    parts.append(EXIT_STATUS)
    return "\n\n".join(parts)
