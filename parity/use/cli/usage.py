"""Errors of a command line that click rejects, in one line."""

from __future__ import annotations

from collections.abc import Sequence

import click


def words_of_usage_error(error: click.ClickException, words: Sequence[str]) -> str:
    """Return what is wrong with a command line, and how to go on.

    Args:
        error: the error.
        words: the command line.
    """
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = "mha-parity" if context is None else context.command_path
    if isinstance(error, click.NoSuchCommand):
        similar = _did_you_mean(error.possibilities)
        return (
            f"unknown command {error.command_name!r}; {similar or '`mha-parity help` lists them'}"
        )
    if isinstance(error, click.NoSuchOption):
        if path.endswith(" mutate") and "--" not in words:
            # Without --, options of the user's own command look like ours.
            hint = "put -- before the command that runs your tests"
        else:
            hint = _did_you_mean(error.possibilities) or f"`{path} --help` lists its options"
        return f"unknown option {error.option_name!r}; {hint}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"missing {_name(error.param)}; usage: {_usage(context)}"
    text = error.message.rstrip(".")
    if isinstance(error, click.BadParameter) and error.param is not None:
        text = f"{_name(error.param).removeprefix('argument ').removeprefix('option ')} {text}"
    else:
        text = text[:1].lower() + text[1:]
    return f"{text}; `{path} --help` describes the options"


def _name(parameter: click.Parameter) -> str:
    """Return what kind of argument a parameter is, and its name in the help."""
    if isinstance(parameter, click.Argument):
        return f"argument {parameter.metavar}"
    # The last of -j and --jobs is the long one.
    return f"option {parameter.opts[-1]}"


def _did_you_mean(names: Sequence[str] | None) -> str:
    """Return a question about similar names; empty if there are none."""
    if not names:
        return ""
    return f"did you mean {' or '.join(repr(name) for name in names)}?"


def _usage(context: click.Context | None) -> str:
    """Return the usage of a command in one line, with its required options."""
    if context is None:
        return "mha-parity COMMAND"
    pieces = [context.command_path, "[OPTIONS]"]
    arguments: list[str] = []
    for parameter in context.command.params:
        if isinstance(parameter, click.Argument):
            arguments += parameter.get_usage_pieces(context)
        elif parameter.required:
            pieces.append(f"{parameter.opts[-1]} {parameter.metavar or 'VALUE'}")
    return " ".join([*pieces, *arguments])
