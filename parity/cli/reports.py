"""What `run` and `compare` do with a report: print it, and write it."""

from __future__ import annotations

import argparse
from typing import Any

from parity.cli.help import Result


def add_report_options(parser: argparse._ActionsContainer) -> None:
    """Add the options for the files of a report."""
    parser.add_argument("--junit", metavar="PATH", help="also write the result as JUnit XML")
    parser.add_argument("--html", metavar="PATH", help="also write the result as one HTML page, which needs no network")


def attention_maps(options: argparse.Namespace) -> Any:
    """What keeps the attention maps for a page, if there shall be one, and refuses to where it cannot be made."""
    if options.html is None:
        return lambda trace, reference, comparisons: None
    from parity.reporting.html import AttentionMaps

    return AttentionMaps()


def print_and_write(options: argparse.Namespace, results: Any, maps: Any) -> Result:
    """Print a report, and write it where the options say."""
    from parity.reporting.console import console
    from parity.reporting.run import print_report

    print_report(results, console(), verbose=options.verbose, quiet=options.quiet)
    if options.junit is not None:
        from parity.reporting.junit import write_junit

        write_junit(options.junit, results)
    if options.html is not None:
        from parity.reporting.html import write_html

        write_html(options.html, results, maps)
    return results.status, {} if options.json is None else results.to_dict()
