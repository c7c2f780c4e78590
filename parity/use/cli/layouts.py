"""`mha-parity layouts`."""

from __future__ import annotations

import argparse

from parity.use.cli.help import Page, Result
from parity.use.cli.layers import add_table_option

PAGE = Page(
    "list known layouts, or the tensors of one",
    "List the known layouts of weights, or the tensors of one layout with their axes.",
    "mha-parity layouts transformers.LLaMA",
    "listed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "layout_name",
        nargs="?",
        metavar="LAYOUT",
        help="the layout to describe, or the file of its table; default: list all",
    )
    add_table_option(parser)


def run(options: argparse.Namespace) -> Result:
    """Print the layouts, or one."""
    from parity.port.conversion.layouts import LAYOUTS, find_layout, register_packages
    from parity.use.reporting.console import console
    from parity.use.reporting.conversion import print_layout, print_layouts

    out = console()
    if options.layout_name is None:
        register_packages()
        shown = list(LAYOUTS.values())
        print_layouts(shown, out)
    else:
        shown = [find_layout(options.layout_name)]
        print_layout(shown[0], out)
    return 0, {"layouts": shown}
