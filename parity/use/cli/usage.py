"""Errors of a command line that click rejects, in one line."""

from __future__ import annotations

from collections.abc import Sequence

import click

from parity.use.cli.command import name_of


def words_of_usage_error(error: click.ClickException, words: Sequence[str]) -> str:
    """Return what is wrong with a command line, and how to go on.

    Args:
        error: the error.
        words: the command line.
    """
    context: click.Context | None = None
    if isinstance(error, click.UsageError):
        context = error.ctx
    path = "mha-parity"
    if context is not None:
        path = context.command_path
    if isinstance(error, click.NoSuchCommand):
        hint = _did_you_mean(error.possibilities) or "`mha-parity help` lists them"
        return f"unknown command {error.command_name!r}; {hint}"
    if isinstance(error, click.NoSuchOption):
        if path.endswith(" mutate") and "--" not in words:
            # Without --, options of the user's own command look like ours.
            hint = "put -- before the command that runs your tests"
        else:
            hint = _did_you_mean(error.possibilities) or f"`{path} --help` lists its options"
        return f"unknown option {error.option_name!r}; {hint}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        kind = "option"
        if isinstance(error.param, click.Argument):
            kind = "argument"
        return f"missing {kind} {name_of(error.param)}; usage: {_usage(context)}"
    text = error.message.rstrip(".")
    if isinstance(error, click.BadParameter) and error.param is not None:
        text = f"{name_of(error.param)} {text}"
    else:
        text = text[:1].lower() + text[1:]
    return f"{text}; `{path} --help` describes the options"


def _did_you_mean(names: Sequence[str] | None) -> str:
    """Return a question about similar names; empty if there are none."""
    if not names:
        return ""
    alternatives = " or ".join(repr(name) for name in names)
    return f"did you mean {alternatives}?"


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
            pieces.append(f"{name_of(parameter)} {parameter.metavar or 'VALUE'}")
    return " ".join([*pieces, *arguments])
