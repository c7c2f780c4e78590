"""`mha-parity bugs`."""

from __future__ import annotations

import argparse

from parity.cli.help import Page, Result

PAGE = Page(
    "describe known bugs: symptoms, reproduction, fix",
    "Describe known bugs: their symptoms, a few lines that reproduce them, and the fix. `diagnose` and failing "
    "tests name these pages.",
    "mha-parity bugs rope-pairs",
    "printed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="a page or a bug; default: the list")


def run(options: argparse.Namespace) -> Result:
    """Print pages."""
    from parity.reporting.bugs import bug_page, print_pages
    from parity.reporting.console import console

    pages = {name: bug_page(name) for name in options.names or ["README"]}
    print_pages(pages.values(), console())
    return 0, {"pages": pages}
