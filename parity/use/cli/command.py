"""A command: its options, its help, and the values of a command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any, Protocol

import click
from click.core import augment_usage_errors
from click.shell_completion import CompletionItem

ALL_COMMANDS = "all commands"
"""Title above the options that every command has."""

HELP_FLAGS = frozenset({"-h", "--help", "--help-all"})
"""Options that print a help."""

HELP_ALL = "parity.help_all"
"""Key in click's context that is set if a help shows hidden options."""


class Record(Protocol):
    """A result that can be written as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        ...


Result = tuple[int, Mapping[str, Any] | Record]
"""The exit status of a command, and what `--json` writes."""


class Options(SimpleNamespace):
    """The values of a command line, by the names of its options and arguments.

    Attributes:
        command: name of the command.
        words: the whole command line.
        context: the command line as click has it.
    """

    command: str
    words: list[str]
    context: click.Context

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Command(click.Command):
    """A command of mha-parity.

    Attributes:
        line: its work, in the list of commands.
        about: its work, in a few sentences.
        example: a command line; a backslash continues it on the next line.
        well: when the exit status is 0.
        wrong: when it is 1; empty if it never is.
        forms: arguments in each form of the command, and their meaning.
        has_quiet_form: whether it prints less by itself if that is requested; all others print
            nothing then.
        may_write: returns whether the command may write a file besides its reports; None if it
            writes no other.
    """

    def __init__(
        self,
        line: str,
        *,
        about: str,
        example: str,
        well: str,
        wrong: str = "",
        forms: Sequence[tuple[str, str]] = (),
        has_quiet_form: bool = False,
        may_write: Callable[[Options, str], bool] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(
            None,  # the list of commands has the names
            help=about,
            short_help=line,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
            **attributes,
        )
        self.line = line
        self.about = about
        self.example = example
        self.well = well
        self.wrong = wrong
        self.forms = forms
        self.has_quiet_form = has_quiet_form
        self.may_write = may_write

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of a command line into the context."""
        # An error of click's parser does not know the command.
        with augment_usage_errors(ctx):
            return super().parse_args(ctx, args)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option for the help."""
        return help_option_of(super().get_help_option(ctx))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups; options of all commands come last."""
        by_group: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                by_group.setdefault(group_of(parameter), []).append(record)
        for group, records in by_group.items():
            with formatter.section(group.capitalize()):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the forms, an example and the exit status."""
        if self.forms:
            with formatter.section("Forms"):
                formatter.write_dl(self.forms, col_max=45)
        formatter.write(f"\nExample:\n  {self.example}\n")
        status = f"0 {self.well}"
        if self.wrong:
            status += f"; 1 {self.wrong}"
        formatter.write(f"\nExit status:\n  {status}; 2 bad usage or something missing\n")

    def invoke(self, ctx: click.Context) -> Options:
        """Return the values of a command line: `parity.use.cli.running` runs the command."""
        values: dict[str, Any] = {}
        for name, value in ctx.params.items():
            values[name] = list(value) if isinstance(value, tuple) else value
        words = ctx.obj or []
        return Options(command=self.name, words=words, context=ctx, **values)


class Argument(click.Argument):
    """A positional argument, whose number of values the usage shows."""

    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the argument as the usage shows it."""
        text = self.metavar or ""
        if self.nargs == -1:
            text = f"{text}…"
        return [text] if self.required else [f"[{text}]"]


class Option(click.Option):
    """An option with its group in the help.

    Attributes:
        group: title above it and others.
    """

    group = "options"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its meaning; None if it is hidden, unless the help shows all."""
        if self.hidden and ctx.meta.get(HELP_ALL):
            shown = copy(self)
            shown.hidden = False
            return shown.get_help_record(ctx)
        return super().get_help_record(ctx)

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Reject an option where the value is expected."""
        if isinstance(value, str) and value.startswith("-") and not self.is_flag:
            flags = {flag for parameter in ctx.command.params for flag in parameter.opts}
            if value in flags:
                name = name_of(self)
                raise click.BadOptionUsage(name, f"Option {name!r} requires an argument", ctx)
        return super().process_value(ctx, value)


def help_option_of(parameter: click.Option | None) -> click.Option | None:
    """Return click's option for the help, described in the style of the other options."""
    if parameter is not None:
        parameter.help = "show this help and exit"
    return parameter


def name_of(parameter: click.Parameter) -> str:
    """Return an argument or an option as the help calls it."""
    if isinstance(parameter, click.Argument):
        return str(parameter.metavar)
    # The last of -j and --jobs is the long one.
    return parameter.opts[-1]


def group_of(parameter: click.Parameter) -> str:
    """Return the title above an option."""
    # --help is an option of click.
    return parameter.group if isinstance(parameter, Option) else ALL_COMMANDS


# ---- Declarations --------------------------------------------------------------------------------


def command(line: str, **attributes: Any) -> Callable[[Callable[[Options], Result]], Command]:
    """Make a function a command with the options above it, and the options of all commands."""

    def make(function: Callable[[Options], Result]) -> Command:
        # Decorators run from the last to the first.
        params = list(reversed(getattr(function, "__click_params__", [])))
        params += [_json_option(), *output_options()]
        if any(getattr(parameter, "hidden", False) for parameter in params):
            params.append(_help_all_option())
        return Command(line, params=params, callback=function, **attributes)

    return make


def _json_option() -> Option:
    json = Option(
        ["--json"],
        metavar="PATH",
        help="also write the result as JSON; - is standard output, and nothing else is printed",
        shell_complete=files,
    )
    json.group = ALL_COMMANDS
    return json


def output_options() -> list[Option]:
    """Return the options for what a command prints, which may also precede the command."""
    options = [
        Option(
            ["-v", "--verbose"],
            is_flag=True,
            help="print more: every comparison and alternative, and the traceback of an error",
        ),
        Option(
            ["-q", "--quiet"],
            is_flag=True,
            help="print less: failures and the verdict of a report, else only errors",
        ),
        Option(
            ["--color"],
            type=OneOf(("auto", "always", "never")),
            default="auto",
            help="colors; default: auto, on a terminal",
        ),
    ]
    for each in options:
        each.group = ALL_COMMANDS
    return options


def _help_all_option() -> Option:
    """Return the option for a help with the options that `--help` hides."""
    help_all = Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help="show the help with all options, also about reading weights, and exit",
    )
    help_all.group = ALL_COMMANDS
    return help_all


def _show_all(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the help with all options."""
    if value and not context.resilient_parsing:
        context.meta[HELP_ALL] = True
        click.echo(context.get_help())
        context.exit()


def option(*flags: str, **attributes: Any) -> Callable[[Any], Any]:
    """Declare an option; a last name without dashes names its value."""
    attributes.setdefault("shell_complete", COMPLETIONS.get(attributes.get("metavar", "")))
    return click.option(*flags, cls=Option, **attributes)


def argument(name: str, **attributes: Any) -> Callable[[Any], Any]:
    """Declare a positional argument."""
    attributes.setdefault("shell_complete", COMPLETIONS.get(attributes["metavar"]))
    return click.argument(name, cls=Argument, **attributes)


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return one decorator for several options, in their order."""

    def decorate(function: Any) -> Any:
        for each in reversed(options):
            function = each(function)
        return function

    return decorate


def group(title: str, *options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return one decorator for several options, with a title above them in the help."""

    def decorate(function: Any) -> Any:
        num_before = len(getattr(function, "__click_params__", []))
        function = together(*options)(function)
        for parameter in function.__click_params__[num_before:]:
            parameter.group = title
        return function

    return decorate


class OneOf(click.Choice[str]):
    """One of some words."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the words as the help shows them."""
        return "{" + ",".join(self.choices) + "}"


# ---- Completion ----------------------------------------------------------------------------------


Completions = list[CompletionItem]


def files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Completions:
    """Let the shell complete a file."""
    return [CompletionItem(incomplete, type="file")]


def folders(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Completions:
    """Let the shell complete a folder."""
    return [CompletionItem(incomplete, type="dir")]


def beginning_with(names: Iterable[str], incomplete: str) -> Completions:
    """Return the names that begin with a word."""
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def layouts(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Completions:
    """Complete the name of a layout."""
    from parity.port.conversion.layouts import LAYOUTS

    return beginning_with(LAYOUTS, incomplete)


def cases(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Completions:
    """Complete the last name in a list of cases."""
    from parity.measure.core.cases import CASES

    before = incomplete[: incomplete.rfind(",") + 1]
    return beginning_with([f"{before}{name}" for name in ("all", *CASES)], incomplete)


COMPLETIONS = {
    **dict.fromkeys(("DIR", "FOLDER"), folders),
    **dict.fromkeys(("PATH", "FILE", "FILE.py", "FILE.toml", "SRC", "DST", "NPY"), files),
    **dict.fromkeys(("INPUT", "MODEL"), files),
    **dict.fromkeys(("CASE", "CASES"), cases),
    "LAYOUT": layouts,
}
"""The completion of a value, by its name in the help."""
