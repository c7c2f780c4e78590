"""`mha-parity compare`."""

from __future__ import annotations

import argparse

from parity.cli.help import Page
from parity.cli.reports import add_report_options, attention_maps, print_and_write

PAGE = Page(
    "judge saved traces, also from other machines",
    "Judge the traces that `run --save-traces` wrote, in another environment or on another machine, as `run` "
    "judges its own.",
    "mha-parity compare traces/torch traces/tt",
    "every stage agrees",
    "a stage does not",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("traces", nargs="+", metavar="DIR", help="folders of traces, or single files")
    parser.add_argument("--verbose", action="store_true", help="print every comparison")
    parser.set_defaults(quiet=False)
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Judge the traces, print the report and write it."""
    from parity.running.run import compare_traces

    maps = attention_maps(options)
    return print_and_write(options, compare_traces(options.traces, on_judged=maps), maps)
