"""Options: their names, and the parsers of their values."""

from __future__ import annotations

import fnmatch
import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from parity.measure.backends import BACKENDS
from parity.measure.text import did_you_mean, some_of
from parity.use.cli.command import OneOf, Options, option, together
from parity.use.cli.messages import add_hint, input_error, names_like

if TYPE_CHECKING:
    from mha_spec import InputError
    from parity.port.conversion.layouts import Layout

Decorator = Callable[[Any], Any]

HEADS = ("num_heads", "num_kv_heads", "head_dim")

ARGUMENTS = (
    *("prefix", "to_prefix", "drop", "fill_bias", "ranks", "against", "layers", *HEADS),
    *("case", "heads", "sequence", "framework", "params", "axes", "d_model", "device"),
    *("mask_name", "mask_true", "padding_true", "causal_name"),
)
"""Arguments of the functions behind the commands that are options of the same names."""

OTHER_ARGUMENTS = {
    "tokens": "labels",
    "query_tokens": "query_labels",
    "questions": "checks",
    "causal": "causal_alignment",
}
"""Arguments of these functions that are options of other names."""

LAYOUT_OPTIONS = ("layout_files", "layout", "layouts", "to", "weight_names")
"""Options and positional arguments that name layouts, or files with their tables."""

SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


MOST_NUMBERS = 100_000
"""Most layers or heads of an option. It is a choice: more than any model has, and few bytes."""


def first_or_none(values: Sequence[str]) -> str | None:
    """Return the first value of an option that may be passed several times; None if it was not
    passed.
    """
    if not values:
        return None
    return values[0]


def flag_of(name: str) -> str:
    """Return the option of a name: `--head-dim` for `head_dim`."""
    return f"--{name.replace('_', '-')}"


def in_flags(error: InputError, options: Options) -> InputError:
    """Return an error about a function's argument as one about the option for it: `--to-prefix` for
    `to_prefix`.
    """
    flags = {}
    for name in (*ARGUMENTS, *OTHER_ARGUMENTS):
        option = OTHER_ARGUMENTS.get(name, name)
        if hasattr(options, option):
            flags[name] = flag_of(option)
    if hasattr(options, "layout") or hasattr(options, "layouts"):
        flags |= {"source": "--from", "layout": "--from"}
    if hasattr(options, "to"):
        flags |= {"target": "--to"}
    if hasattr(options, "weight_names"):
        flags |= {"target": "--names"}
    if hasattr(options, "layer"):
        flags |= {"layers": "--layer"}

    def rename(name: str, value: Any) -> tuple[str, Any]:
        if name == "keep_rest":
            return "--rest", "drop"
        if name in HEADS and (value is None or value != getattr(options, name, None)):
            # Layouts have rules about numbers of heads that were not passed.
            return name, value
        return flags.get(name, name), value

    about_flags = error.renamed(rename)
    command = _command_with(about_flags, options)
    if command:
        add_hint(about_flags, f"try `{command}`")
    return about_flags


def _command_with(error: InputError, options: Options) -> str:
    """Return the command line with the only layout that fits, if the layout is missing; else an
    empty text.
    """
    alternatives = error.remedy
    if error.argument != "--from" or isinstance(alternatives, Mapping) or len(alternatives) != 1:
        return ""
    (remedy,) = alternatives
    words = ["mha-parity", *options.words]
    for flag, value in remedy.items():
        # Another value of an option that was passed would be added to it.
        if not flag.startswith("--") or flag in words:
            return ""
        words += [flag, str(value)]
    return shlex.join(words)


def register_tables(options: Options) -> None:
    """Register the tables of layouts on a command line, and replace the path of each by its name.

    This comes before the work, so that a bad table costs nothing. Each value of `--layout` is a
    file, whatever its suffix. Elsewhere a name of a layout does not end with `.toml`, so files are
    not confused with names; names in the metadata of files are not read here, so no file can have
    another one opened.
    """
    values_by_option = {name: getattr(options, name, None) for name in LAYOUT_OPTIONS}
    tables: dict[str, tuple[str, Layout]] = {}
    for name, value in values_by_option.items():
        if name == "layout_files":
            setattr(options, name, [_registered_name(path, tables) for path in value or ()])
        elif isinstance(value, list):
            setattr(options, name, [_layout_name(text, tables) for text in value])
        elif value is not None:
            setattr(options, name, _layout_name(value, tables))


def _layout_name(text: str, tables: dict[str, tuple[str, Layout]]) -> str:
    """Return the name of a layout, and register it if it is described in a file."""
    # Suffixes in upper case are usual on some systems.
    if not text.lower().endswith(".toml"):
        return text
    return _registered_name(text, tables)


def _registered_name(path: str, tables: dict[str, tuple[str, Layout]]) -> str:
    """Return the name of the layout that a file describes, and register it.

    Args:
        path: the path of the file.
        tables: the file and the layout of each name on this command line, to which this one is
            added. A second table of a name would replace the first, which was passed for other
            files.
    """
    from parity.port.conversion.layouts import register_layout

    layout = register_layout(path)
    first_path, first_layout = tables.setdefault(layout.name, (path, layout))
    if not layout.equals(first_layout):
        rule = f"differ from the name in {first_path}, whose table is different"
        raise input_error("the key name", rule, repr(layout.name), where=path)
    return layout.name


def backend_options() -> Decorator:
    """Declare the options for the backends of a run, their dtypes, and gradients."""
    return together(
        option(
            "--backends",
            type=backend_list,
            metavar="A,B",
            help=f"{', '.join(BACKENDS)}; default: all that are installed",
        ),
        option(
            "--dtypes",
            type=dtype_list,
            default="float32",
            metavar="A,B",
            help="float32, bfloat16, float16, float64, or fp32, …; default: float32",
        ),
        option("--grad", is_flag=True, help="also compare gradients"),
    )


def cases_option() -> Decorator:
    """Declare the option for cases."""
    return option(
        "--cases",
        type=name_list,
        metavar="CASES",
        help="names and patterns, such as 'rope*,causal', or all; default: each feature once",
    )


def from_option(
    about: str = "layout; default: from the file's metadata", *, is_hidden: bool = False
) -> Decorator:
    """Declare the option for the layout of a file."""
    return option("--from", "layout", metavar="LAYOUT", hidden=is_hidden, help=about)


def params_option() -> Decorator:
    """Declare the option for the weights of a function that accepts them as an argument."""
    return option(
        "--params",
        metavar="PKG.MODULE:NAME",
        help="weights for attention(params, x): a mapping, or a function that returns one",
    )


def declarations(frameworks: Sequence[str]) -> Decorator:
    """Declare options for properties of an attention that cannot be inferred."""
    return together(
        option(
            "--framework",
            type=FrameworkName(frameworks),
            help="framework of your function, if its module uses several",
        ),
        params_option(),
        option(
            "--axes",
            type=OneOf(("BNTH", "BTNH", "BTE")),
            help="axes of the inputs, if they cannot be inferred",
        ),
        option("--mask-name", metavar="NAME", help="name of the mask parameter"),
        option("--mask-true", type=OneOf(("hides", "shows")), help="effect of True in a mask"),
        option("--causal-name", metavar="NAME", help="name of the causal flag"),
        option(
            "--causal-alignment",
            type=OneOf(("top-left", "bottom-right")),
            help=(
                "corner that the causal diagonal passes through, if queries and keys differ in "
                "number"
            ),
        ),
    )


def causal_option(about: str) -> Decorator:
    """Declare `--causal` and `--no-causal`; the value is None if neither is passed."""
    return option("--causal/--no-causal", default=None, help=about)


def backend_list(text: str) -> list[str]:
    """Parse names of backends with commas between them: `ttnn` is `tt`."""
    names = ["tt" if name == "ttnn" else name for name in name_list(text)]
    return list(dict.fromkeys(names))


class FrameworkName(OneOf):
    """A framework, where `tt` is another name of `ttnn`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name of a framework."""
        return super().convert("ttnn" if value == "tt" else value, param, ctx)


def name_list(text: str) -> list[str]:
    """Parse names with commas between them."""
    names = [name.strip() for name in text.split(",")]
    names = list(dict.fromkeys(filter(None, names)))
    if not names:
        raise click.BadParameter("must have at least one name")
    return names


def dtype_name(text: str) -> str:
    """Parse the name of a dtype: `fp32` is `float32`."""
    return SHORT_DTYPES.get(text, text)


def dtype_list(text: str) -> list[str]:
    """Parse names of dtypes with commas between them."""
    return list(dict.fromkeys(map(dtype_name, name_list(text))))


def named_path(text: str) -> tuple[str, str]:
    """Parse a name and a path: `tt=.venv-tt/bin/python`."""
    name, _, path = text.partition("=")
    if name == "ttnn":
        name = "tt"
    if not (name and path):
        raise click.BadParameter(f"must be NAME=PATH, got {text}")
    return name, path


def range_list(text: str) -> list[int]:
    """Parse numbers and ranges of numbers: `0,5-7`."""
    numbers: list[int] = []
    with suppress(ValueError):
        for word in name_list(text):
            first, dash, last = word.partition("-")
            if not dash:
                last = first
            more = range(int(first), int(last) + 1)
            if len(numbers) + len(more) > MOST_NUMBERS:
                raise click.BadParameter(f"must be at most {MOST_NUMBERS} numbers, got {text}")
            numbers += more
        if numbers:
            return numbers
    raise click.BadParameter(f"must be numbers and ranges, such as 0,5-7, got {text}")


def size_list(text: str) -> list[int]:
    """Parse positive numbers with commas between them: `48,1,1`."""
    sizes: list[int] = []
    with suppress(ValueError):
        sizes = [int(word) for word in text.split(",")]
    if not sizes or min(sizes) < 1:
        raise click.BadParameter(f"must be positive numbers, such as 48,1,1, got {text}")
    return sizes


def check_range(options: Options, name: str, least: int, most: float = math.inf) -> None:
    """Reject a number that is too small or too large."""
    value = getattr(options, name)
    if value < least:
        raise input_error(flag_of(name), f"be at least {least}", {flag_of(name): value})
    if value > most:
        raise input_error(flag_of(name), f"be at most {most}", {flag_of(name): value})


def check_names(flag: str, names: Sequence[str] | None, known_names: Collection[str]) -> None:
    """Reject an unknown name of a short list."""
    for name in names or ():
        if name not in known_names:
            hint = did_you_mean(name, known_names)
            raise input_error(flag, f"be one of {', '.join(known_names)}", {flag: name}, hint=hint)


def matching(
    flag: str, globs: Sequence[str], known_names: Collection[str], lister: str = ""
) -> list[str]:
    """Return the known names that patterns match, in their order; reject a pattern that matches
    none.

    Args:
        flag: the option that has the patterns.
        globs: the patterns.
        known_names: all names.
        lister: the command that lists all names, if they are many.
    """
    matches = set()
    for glob in globs:
        if not fnmatch.filter(known_names, glob):
            listed = f"`{lister}` lists all" if lister else f"there are {some_of(known_names)}"
            hint = names_like(glob, known_names, listed)
            raise input_error(flag, "match a known name", {flag: glob}, hint=hint)
        matches.update(name for name in known_names if fnmatch.fnmatchcase(name, glob))
    return [name for name in known_names if name in matches]
