"""`mha-parity bugs`."""

from __future__ import annotations

import argparse

from parity.use.cli.help import Page, Result
from parity.use.cli.messages import refusal

PAGE = Page(
    "describe known bugs: symptoms, reproduction, fix",
    "Describe known bugs: their symptoms, a few lines that reproduce them, and the fix. Without a "
    "name, list the pages. `diagnose` and failing tests name these pages.",
    "mha-parity bugs rope-pairs",
    "printed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a page or a bug; default: list the pages"
    )
    parser.add_argument("--all", action="store_true", help="list every bug with its page")


def run(options: argparse.Namespace) -> Result:
    """Print pages, or a list."""
    from parity.use.reporting.bugs import (
        bug_lines,
        bug_page,
        bug_pages,
        print_bugs,
        print_list,
        print_pages,
    )
    from parity.use.reporting.console import console

    if options.all and options.names:
        raise refusal("--all", "be passed without NAME", " ".join(options.names))
    if options.all:
        bugs = bug_pages()
        print_bugs(bugs, console())
        return 0, {"bugs": bugs}
    if not options.names:
        lines = bug_lines()
        print_list(lines, console())
        return 0, {"list": lines}
    pages = {name: bug_page(name) for name in options.names}
    print_pages(pages.values(), console())
    return 0, {"pages": pages}
