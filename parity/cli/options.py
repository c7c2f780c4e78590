"""Options: their names, and the types of their values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from parity.cli.messages import refusal
from parity.text import did_you_mean

if TYPE_CHECKING:
    from mha_spec import Refusal

HEADS = ("num_heads", "num_kv_heads", "head_dim")

ARGUMENTS = (
    *("prefix", "to_prefix", "drop", "fill_bias", "ranks", "against", "layers", *HEADS),
    *(
        "case",
        "framework",
        "params",
        "axes",
        "d_model",
        "mask_name",
        "mask_true",
        "padding_true",
        "causal_name",
        "causal",
    ),
)
"""Arguments of the functions behind the commands that are the options of the same names."""


def flag_of(name: str) -> str:
    """An option as one types it: `--head-dim` for `head_dim`."""
    return f"--{name.replace('_', '-')}"


def in_flags(refused: Refusal, options: argparse.Namespace) -> Refusal:
    """Return a refusal of an argument of a function as that of the flag behind it: `--to-prefix` for `to_prefix`."""
    flags = {name: flag_of(name) for name in ARGUMENTS if hasattr(options, name)}
    if hasattr(options, "layout") or hasattr(options, "layouts"):
        flags |= {"source": "--from", "layout": "--from"}
    if hasattr(options, "to"):
        flags |= {"target": "--to"}

    def rename(name: str, value: Any) -> tuple[str, Any]:
        if name == "keep_rest":
            return "--rest", "drop"
        # Layouts have rules about numbers of heads that nobody passed.
        is_passed = name not in HEADS or (value is not None and value == getattr(options, name, None))
        return flags.get(name, name) if is_passed else name, value

    return refused.renamed(rename)


def add_params_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the weights of a function that accepts them as an argument."""
    parser.add_argument(
        "--params",
        metavar="PKG.MODULE:NAME",
        help="weights for attention(params, x): a mapping, or a function that returns one",
    )


def add_declarations(parser: argparse.ArgumentParser, frameworks: Sequence[str]) -> None:
    """Add options that declare properties of an attention that cannot be inferred."""
    parser.add_argument("--framework", choices=frameworks, help="framework of a function, if its module uses several")
    add_params_option(parser)
    parser.add_argument(
        "--axes", choices=("BNTH", "BTNH", "BTE"), help="axes of the inputs, if they cannot be inferred"
    )
    parser.add_argument("--mask-name", metavar="NAME", help="name of the mask parameter")
    parser.add_argument("--mask-true", choices=("hides", "shows"), help="effect of True in a mask")
    parser.add_argument("--causal-name", metavar="NAME", help="name of the causal flag")
    parser.add_argument("--causal", choices=("top-left", "bottom-right"), help="alignment of the causal mask")


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


def range_list(text: str) -> list[int]:
    """The type of an option that takes numbers and ranges of them: `0,5-7`."""
    found: list[int] = []
    with suppress(ValueError):
        for first, dash, last in (word.partition("-") for word in name_list(text)):
            found += range(int(first), int(last if dash else first) + 1)
        if found:
            return found
    raise argparse.ArgumentTypeError(f"must be numbers and ranges of them, such as 0,5-7, got {text}")


def check_range(options: argparse.Namespace, name: str, least: int, most: float = math.inf) -> None:
    """Refuse a number that is too small or too large."""
    value = getattr(options, name)
    if value < least:
        raise refusal(flag_of(name), f"be at least {least}", {flag_of(name): value})
    if value > most:
        raise refusal(flag_of(name), f"be at most {most}", {flag_of(name): value})


def check_names(flag: str, given: Sequence[str] | None, known: Collection[str]) -> None:
    """Refuse an unknown name."""
    for name in given or ():
        if name not in known:
            raise refusal(flag, f"be one of {', '.join(known)}", {flag: name}, hint=did_you_mean(name, known))
