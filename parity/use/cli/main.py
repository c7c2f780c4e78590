"""The command line, `mha-parity`.

Exit status: 0 all well, 1 a mismatch, 2 bad usage, something missing or not compared, 70 a bug in
this program, 128 + signal.
"""

from __future__ import annotations

import importlib
import math
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource
from click.shell_completion import shell_complete

from parity.port.conversion.ignored_settings import IgnoredSettingsWarning
from parity.use.cli.clone import FROM_A_CLONE, commands_of_a_clone
from parity.use.cli.command import (
    HELP_FLAGS,
    Command,
    OneOf,
    Option,
    Options,
    help_option_of,
    name_of,
    output_options,
)
from parity.use.cli.messages import (
    input_error,
    is_writable,
    print_out,
    print_traceback,
    say,
    say_error,
    warn,
)
from parity.use.cli.project import ProjectOptions
from parity.use.cli.running import run_command
from parity.use.cli.usage import words_of_usage_error

if TYPE_CHECKING:
    from types import FrameType

COMMANDS: dict[str, str] = {
    "run": "parity.use.cli.run",
    "compare": "parity.use.cli.compare",
    "doctor": "parity.use.cli.doctor",
    "bugs": "parity.use.cli.bugs",
    "cache-size": "parity.use.cli.cache_size",
    "convert": "parity.use.cli.convert",
    "spec": "parity.use.cli.spec",
    "inspect": "parity.use.cli.inspect",
    "write": "parity.use.cli.write",
    "plot": "parity.use.cli.plot",
    "conformance": "parity.use.cli.conformance",
    "mutate": "parity.use.cli.mutate",
    "diagnose": "parity.use.cli.diagnose",
    **commands_of_a_clone(),
}
"""The module of each command, which is its `run`. Slow imports are in functions, because the help
must be fast.
"""

GROUPS = {
    "check": ("run", "compare", "conformance", "mutate"),
    "explain": ("diagnose", "bugs", "plot"),
    "models": ("spec", "inspect", "convert", "write", "cache-size"),
    "about": ("doctor", *FROM_A_CLONE),
}
"""Commands in the order of the help, by the kind of their work."""

EXIT_STATUS = """
Exit status:
  0 all is well
  1 a mismatch
  2 bad usage, something is missing, or not everything was compared
  70 a bug in mha-parity
  128 + n stopped by signal n
"""

SHELLS = ("bash", "zsh", "fish")
"""Shells whose command lines can be completed."""

COMPLETE = "_MHA_PARITY_COMPLETE"
"""The variable that a shell sets to get completions."""

PROJECT = "parity.project"
"""Key of the options of the project in click's context."""

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
    project = ProjectOptions()
    with _SignalHandlers(for_good=arguments is None) as signals:
        try:
            with _warnings_in_a_line():
                status = _run(words, project)
            # The command may have ended between an import and the next look at it.
            signals.raise_deferred()
            _check_output()
            return status
        except (Exception, KeyboardInterrupt) as error:
            if _is_verbose(words) and not isinstance(error, click.ClickException):
                print_traceback()
            # An import that a signal interrupts may fail in any way.
            if signals.received is not None:
                return _say_interrupted(signals.received)
            if isinstance(error, KeyboardInterrupt):
                return _say_interrupted(signal.SIGINT)
            if isinstance(error, click.ClickException):
                return say_error(project.named_in(words_of_usage_error(error, words)), 2)
            if isinstance(error, EXPECTED):
                return say_error(project.named_in(_words_of(error)), 2)
            return say_error(_report_of_bug(error, words), 70)
        finally:
            for stream in (sys.stdout, sys.stderr):
                is_writable(stream)


def _run(words: list[str], project: ProjectOptions) -> int:
    """Run a command line, or complete the one of a shell, and return the exit status.

    Args:
        words: the command line.
        project: what the project sets, which is read here.
    """
    instruction = os.environ.get(COMPLETE)
    if instruction:
        return _complete(instruction)
    try:
        options = _parsed(words or ["--help"], project)
        # Errors are about this command line.
        with options.context.scope(cleanup=False):
            return run_command(options)
    except click.exceptions.Exit as done:  # after --help, for example
        return done.exit_code
    except BrokenPipeError:
        return 0  # the reader of the help needs no more


def _parsed(words: list[str], project: ProjectOptions) -> Options:
    """Return the options of a command line and, where it has none, of the project."""
    try:
        with PROGRAM.make_context(PROGRAM.name, list(words), obj=words) as context:
            context.meta[PROJECT] = project
            options = PROGRAM.invoke(context)
    except click.UsageError as error:
        project.forget_typed(error.ctx)
        raise
    project.forget_typed(options.context)
    return options


def _complete(instruction: str) -> int:
    """Print completions of a shell's command line, and return the exit status."""
    try:
        status = shell_complete(PROGRAM, {}, PROGRAM.name or "", COMPLETE, instruction)
    except (KeyError, ValueError):
        raise input_error(
            COMPLETE, "be set by a shell, with COMP_WORDS and COMP_CWORD", instruction
        ) from None
    if status != 0:
        instructions = [f"{shell}_{what}" for shell in SHELLS for what in ("source", "complete")]
        raise input_error(COMPLETE, f"be one of {', '.join(instructions)}", instruction)
    return status


def _is_verbose(words: Sequence[str]) -> bool:
    """Return whether a command line, which may be wrong, has --verbose."""
    own_words = words[: words.index("--")] if "--" in words else words
    return not {"-v", "--verbose"}.isdisjoint(own_words)


def _say_interrupted(number: int) -> int:
    """Print that a signal ended the command, and return the exit status."""
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    return say(f"interrupted{by}", 128 + number)


def _words_of(error: Exception) -> str:
    """Return the text of an error; the error of a file begins with its path."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _report_of_bug(error: Exception, words: Sequence[str]) -> str:
    """Return how to report an error of this program.

    A file has its traceback.
    """
    version, issues = _version_and_issues()
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    where = f" at {issues}" if issues else ""
    advice = f"a bug in mha-parity, {what}; please report it{where} with"
    command = shlex.join(("mha-parity", *words))
    heading = f"mha-parity {version}, Python {sys.version}\n{command}\n\n"
    text = heading + "".join(traceback.format_exception(error))
    # A disk that is full must not hide the error.
    with suppress(OSError):
        path = _write_bug(text)
        return f"{advice} {path}, which has the command and the traceback"
    return f"{advice} this command and its traceback, which --verbose prints"


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
    """Print warnings on standard error, each once and in one line; warnings of libraries with their
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
        self._former_hook = sys.unraisablehook

    def __enter__(self) -> _SignalHandlers:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python allows handlers in the main thread only
        for name in self.NAMES:
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is None or signal.getsignal(number) in (signal.SIG_IGN, None):
                continue
            self._replaced[number] = signal.signal(number, self._interrupt)
        self._former_hook = sys.unraisablehook
        sys.unraisablehook = self._raise_again
        return self

    def __exit__(self, *_: object) -> None:
        if sys.unraisablehook == self._raise_again:
            sys.unraisablehook = self._former_hook
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

    def _raise_again(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Raise KeyboardInterrupt once more if Python dropped it: exceptions in a finalizer or a
        callback reach nobody.
        """
        if self.received is None or not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._former_hook(unraisable)
            return
        self._has_raised = False
        if hasattr(signal, "setitimer"):
            self._handle_alarm()
            signal.setitimer(signal.ITIMER_REAL, POLL)

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


# ---- The program ---------------------------------------------------------------------------------


class CommandGroup(click.Group):
    """The commands, each imported when it runs."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option for the help."""
        return help_option_of(super().get_help_option(ctx))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        return [name for names in GROUPS.values() for name in names if name in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> Command | None:
        """Import a command; return None if there is none of this name.

        Raises:
            ModuleNotFoundError: if only a clone has it.
        """
        if cmd_name in COMMANDS:
            return command_named(cmd_name)
        if cmd_name in FROM_A_CLONE:
            raise ModuleNotFoundError(
                f"{cmd_name} is not in the wheel: it needs a clone, and there `make` or pip "
                f"install --editable"
            )
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command and its words, which begin with the options before the command.

        The error for an unknown command has similar names. The options of the project become
        defaults of the command.
        """
        if args[0] == "help" and not ctx.resilient_parsing:
            args = self._words_with_help(ctx, args[1:])
        try:
            name, command, words = super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            raise click.NoSuchCommand(error.command_name, possibilities=COMMANDS, ctx=ctx) from None
        words = [*_words_of_options(ctx), *words]
        project = ctx.meta.get(PROJECT)
        # The help does not depend on a project, whose file may be wrong.
        if project is not None and name is not None and HELP_FLAGS.isdisjoint(words):
            project.read(self, name)
            ctx.default_map = {name: project.values}
        return name, command, words

    def _words_with_help(self, ctx: click.Context, names: list[str]) -> list[str]:
        """Return the command line that prints the help of a command; without one, print the help
        of the program.
        """
        if len(names) > 1:
            raise click.UsageError(f"help describes one command, got {' '.join(names)}")
        if not names:
            click.echo(ctx.get_help())
            ctx.exit()
        return [*names, "--help"]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands in groups."""
        for group, names in GROUPS.items():
            lines = [(name, command_named(name).line) for name in names if name in COMMANDS]
            with formatter.section(group.capitalize()):
                formatter.write_dl(lines)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write where more help is, and the meaning of the exit status."""
        formatter.write("\n`mha-parity help COMMAND` has an example of each command.\n")
        formatter.write(EXIT_STATUS)


def command_named(name: str) -> Command:
    """Import a command."""
    command = cast(Command, importlib.import_module(COMMANDS[name]).run)
    command.name = name
    return command


def _words_of_options(context: click.Context) -> list[str]:
    """Return the options of all commands that precede the command on a command line."""
    words: list[str] = []
    for option in context.command.params:
        if not isinstance(option, Option):
            continue  # --version, for example, has ended the program
        if context.get_parameter_source(str(option.name)) is not ParameterSource.COMMANDLINE:
            continue
        word = name_of(option)
        if not option.is_flag:
            word += f"={context.params[str(option.name)]}"
        words.append(word)
    return words


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the version."""
    if value:
        from importlib import metadata

        print_out(f"mha-parity {metadata.version('mha-parity')}\n")
        context.exit()


def _print_completion(context: click.Context, parameter: click.Parameter, shell: str) -> None:
    """Print a script that completes command lines in a shell."""
    if shell:
        shell_complete(PROGRAM, {}, "mha-parity", COMPLETE, f"{shell}_source")
        context.exit()


PROGRAM = CommandGroup(
    "mha-parity",
    help=(
        "Find out whether attention layers in JAX, PyTorch and TTNN are right and, if one is not, "
        "which bug it has."
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[
        click.Option(
            ["-V", "--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="show the version and exit",
        ),
        click.Option(
            ["--print-completion"],
            type=OneOf(SHELLS),
            is_eager=True,
            expose_value=False,
            callback=_print_completion,
            help="print a script that completes command lines in this shell, and exit",
        ),
        # Before the command they mean the same as after it.
        *output_options(),
    ],
)
"""The command line."""
