"""Options that a project repeats: the table `[tool.mha-parity]` of its pyproject.toml."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from parity.use.cli.command import name_of
from parity.use.cli.messages import input_error, names_like

NAME = "pyproject.toml"

PROJECT = "mha-parity"

TABLE = f"tool.{PROJECT}"


@dataclass
class ProjectOptions:
    """Values for the options of a command from the nearest pyproject.toml.

    Attributes:
        path: the file; empty if there is none with a table.
        values: the values by the names of their parameters.
        keys: the key of each value, with its table, by its option, such as `--seq-len`.
    """

    path: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def read(self, program: click.Group, command: str) -> None:
        """Read the values for a command, whose command line comes first.

        The table has options of all commands by their names, and a table with the name of a command
        the options of this command alone. A command ignores options of others.

        Raises:
            ValueError: if the file is not TOML, a name is not an option, or a value has a different
                type than its option.
        """
        path = _nearest_file()
        if path is None:
            return
        table = _table_in(path)
        if not table:
            return
        options_by_command: dict[str, dict[str, click.Option]] = {}
        context = click.Context(program)
        for name in program.list_commands(context):
            options_by_command[name] = _options_of(program.get_command(context, name))
        _check_names(table, options_by_command, str(path))
        table_of_command = table.get(command, {})
        for name, option in options_by_command.get(command, {}).items():
            if name in table_of_command:
                key = f"[{TABLE}.{command}] {name}"
                value = table_of_command[name]
            elif name in table:
                key = f"[{TABLE}] {name}"
                value = table[name]
            else:
                continue
            self.values[str(option.name)] = _as_typed(value, option, f"{path}: {key}")
            self.keys[name_of(option)] = key
        self.path = str(path)

    def forget_typed(self, context: click.Context | None) -> None:
        """Forget the keys of options that the command line of a context sets itself."""
        if context is None:
            return
        for parameter in context.command.params:
            source = context.get_parameter_source(str(parameter.name))
            if isinstance(parameter, click.Option) and source is not ParameterSource.DEFAULT_MAP:
                self.keys.pop(name_of(parameter), None)

    def named_in(self, text: str) -> str:
        """Return the text of an error with the keys of the file instead of the options that it
        sets.
        """
        is_named = False
        for flag, key in self.keys.items():
            pattern = rf"(?<![\w-]){re.escape(flag)}(?![\w-])"
            if re.search(pattern, text) is None:
                continue
            is_named = True
            _, _, name = key.partition(" ")
            # Its table once is enough.
            before, after = re.split(pattern, text, maxsplit=1)
            after = re.sub(pattern, name, after)
            text = f"{before}{key}{after}"
        if not is_named:
            return text
        return f"{self.path}: {text}"


def _check_names(
    table: Mapping[str, Any], options_by_command: Mapping[str, Collection[str]], path: str
) -> None:
    """Reject names that are neither options nor commands."""
    all_options: set[str] = set()
    for names in options_by_command.values():
        all_options.update(names)
    for name, value in table.items():
        if isinstance(value, Mapping):
            _check_table(name, value, options_by_command, path)
        elif name not in all_options:
            hint = names_like(name, all_options, "`mha-parity help COMMAND` lists options")
            raise input_error(f"[{TABLE}]", "have options", name, where=path, hint=hint)


def _check_table(
    command: str,
    table: Mapping[str, Any],
    options_by_command: Mapping[str, Collection[str]],
    path: str,
) -> None:
    """Reject the table of an unknown command, and names that are not options of it."""
    if command not in options_by_command:
        hint = names_like(command, options_by_command, "`mha-parity` lists the commands")
        raise input_error(f"[{TABLE}.{command}]", "be a command", command, where=path, hint=hint)
    known = options_by_command[command]
    for name in table:
        if name not in known:
            hint = names_like(name, known, f"`mha-parity help {command}` lists options")
            rule = "have options of it"
            raise input_error(f"[{TABLE}.{command}]", rule, name, where=path, hint=hint)


def _nearest_file() -> Path | None:
    """Return the pyproject.toml in the current folder or the nearest one above it."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        return None  # the command reports that the folder was deleted
    for parent in (folder, *folder.parents):
        path = parent / NAME
        if path.is_file():
            return path
    return None


def _table_in(path: Path) -> Mapping[str, Any]:
    """Return the table of a file; empty if there is none."""
    from parity.measure.files.small import read_text

    text = read_text(path)
    # Most files have no such table, and need not be parsed. TOML has many forms of its heading.
    if PROJECT not in text:
        return {}
    import tomllib

    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise input_error(str(path), "be TOML", str(error)) from None
    tools = content.get("tool", {})
    if not isinstance(tools, Mapping):
        return {}
    table = tools.get(PROJECT, {})
    if not isinstance(table, Mapping):
        raise input_error(f"[{TABLE}]", "be a table", type(table).__name__, where=str(path))
    return table


def _options_of(command: click.Command | None) -> dict[str, click.Option]:
    """Return the options of a command by their long names without dashes."""
    options: dict[str, click.Option] = {}
    if command is None:
        return options
    for parameter in command.params:
        # --help-all, for example, has no value.
        if isinstance(parameter, click.Option) and parameter.expose_value:
            options[name_of(parameter).lstrip("-")] = parameter
    return options


def _as_typed(value: Any, option: click.Option, where: str) -> Any:
    """Return a value as it would be typed: a list has commas between its items, or its option is
    repeated.

    Raises:
        ValueError: if the value has a different type than the option.
    """
    if option.is_flag:
        if not isinstance(value, bool):
            raise input_error(where, "be true or false", repr(value))
        return value
    items = value
    if not isinstance(value, list):
        items = [value]
    for item in items:
        # A Boolean would pass as the number 1.
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise input_error(where, "be a text, a number or a list", repr(value))
    # Text, because 3.5 would pass as the integer 3.
    typed = [str(item) for item in items]
    if option.multiple:
        return typed
    return ",".join(typed)
