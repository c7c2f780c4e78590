"""Reports on standard output and in files, for `run`, `compare` and `diagnose`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parity.use.cli.command import OneOf, Options, Result, option, together
from parity.use.cli.messages import print_out
from parity.use.cli.options import Decorator


def skip_option() -> Decorator:
    """Declare the option that makes a report with gaps a success."""
    return option(
        "--allow-skipped",
        is_flag=True,
        help="exit with 0 even if not everything was compared, as long as something was",
    )


def report_options() -> Decorator:
    """Declare the options for the files of a report."""
    return together(
        option("--junit", metavar="PATH", help="also write the result as JUnit XML"),
        html_option(),
        option(
            "--output-format",
            type=OneOf(("text", "github")),
            default="text",
            help="text, or annotations of a GitHub workflow; default: text",
        ),
    )


def html_option() -> Decorator:
    """Declare the option for a page."""
    return option(
        "--html",
        metavar="PATH",
        help="also write the result as one HTML page, which needs no network",
    )


def attention_maps(options: Options) -> Any:
    """Return a function that keeps the attention maps of traces for a page, if one is requested.

    Raises:
        ModuleNotFoundError: if a library that makes the page is not installed.
    """
    if options.html is None:
        return _keep_nothing
    from parity.use.reporting.html import AttentionMaps

    return AttentionMaps()


def _keep_nothing(trace: Any, reference: Any, comparisons: Any) -> None:
    """Ignore the traces of a run without a page."""


def print_and_write(options: Options, report: Any, maps: Any) -> Result:
    """Print a report, and write it to the files of the options."""
    from parity.use.reporting.console import console
    from parity.use.reporting.run import print_report

    report = replace(report, allow_skipped=options.allow_skipped)
    if options.output_format == "github":
        from parity.use.reporting.github import annotation_lines

        for line in annotation_lines(report):
            print_out(f"{line}\n")
    else:
        print_report(report, console(), verbose=options.verbose, quiet=options.quiet)
    if options.junit is not None:
        from parity.use.reporting.junit import write_junit

        write_junit(options.junit, report)
    write_page(options, report, maps)
    return report.status, report


def write_page(options: Options, report: Any, maps: Any) -> None:
    """Write a report as a page, if one is requested."""
    if options.html is not None:
        from parity.use.reporting.html import write_html

        write_html(options.html, report, maps)
