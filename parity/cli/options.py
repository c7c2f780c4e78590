"""Options: their names, the types of their values, and the one that every command has."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from parity.cli.messages import refusal


def flag_of(name: str) -> str:
    """An option as one types it: `--head-dim` for `head_dim`."""
    return f"--{name.replace('_', '-')}"


@contextmanager
def named_by_flags(names: Collection[str]) -> Iterator[None]:
    """Raise refusals with the flags of some arguments instead of their names."""
    from mha_spec import Refusal

    def rename(name: str, value: Any) -> tuple[str, Any]:
        return flag_of(name) if name in names else name, value

    try:
        yield
    except Refusal as error:
        raise error.renamed(rename) from error


def add_params_option(parser: argparse.ArgumentParser) -> None:
    """The option for the weights of a function that takes them as an argument."""
    parser.add_argument(
        "--params",
        metavar="PKG.MODULE:NAME",
        help="weights of a function that takes them, attention(params, x): a mapping or a function that returns one",
    )


def name_list(text: str) -> list[str]:
    """The type of an option that takes names with commas between them."""
    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise argparse.ArgumentTypeError("must name at least one")
    return found


def named_path(text: str) -> tuple[str, str]:
    """The type of an option that takes a name and a path: `tt=.venv-tt/bin/python`."""
    name, _, path = text.partition("=")
    if not (name and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text}")
    return name, path


def number_list(text: str) -> list[int]:
    """The type of an option that takes integers with commas between them."""
    try:
        return list(map(int, name_list(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers, got {text}") from None


def range_list(text: str) -> list[int]:
    """The type of an option that takes numbers and ranges of them: `0,5-7`."""
    found: list[int] = []
    for word in name_list(text):
        first, dash, last = word.partition("-")
        try:
            found += range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be numbers and ranges of them, such as 0,5-7, got {text}") from None
    if not found:
        raise argparse.ArgumentTypeError(f"must be numbers and ranges of them, such as 0,5-7, got {text}")
    return found


def check_names(flag: str, given: Sequence[str] | None, known: Collection[str]) -> None:
    """Refuse a name that is not known.

    Raises:
        ValueError: if one of those that are given is not.
    """
    for name in given or ():
        if name not in known:
            raise refusal(flag, f"be of {', '.join(known)}", {flag: name})


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """The option that every command has."""
    parser.add_argument("--json", metavar="PATH", help="also write the result as JSON; - is standard output")


def write_json(options: argparse.Namespace, content: Mapping[str, Any]) -> None:
    """Write a result where `--json` says, if it says anything."""
    if options.json is not None:
        from parity.reporting import json

        json.write_json(options.json, {"format": 1, **content})
