"""`mha-parity compare`."""

from __future__ import annotations

import argparse

from parity.cli.help import Page, Result
from parity.cli.messages import refusal
from parity.cli.reports import add_report_options, attention_maps, print_and_write

PAGE = Page(
    "judge traces saved elsewhere, or recordings of models",
    "Judge traces that `run --save-traces` wrote in another environment or on another machine. Or judge a "
    "recording of `parity.tap` layer by layer, by the model in --weights or by a second recording.",
    "mha-parity compare traces/torch traces/tt",
    "every stage agrees",
    "a stage differs",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", metavar="DIR", help="folders of traces, single traces, or recordings")
    parser.add_argument("--weights", metavar="DIR", help="with recordings: the model to judge them by")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every comparison")
    parser.set_defaults(quiet=False)
    add_report_options(parser)


def run(options: argparse.Namespace) -> Result:
    """Judge the traces, print the report and write it."""
    from parity.cli import taps
    from parity.running.run import compare_traces

    if taps.are_taps(options.traces):
        return taps.compare(options)
    if options.weights is not None:
        raise refusal("--weights", "come with recordings", " ".join(options.traces))
    maps = attention_maps(options)
    return print_and_write(options, compare_traces(options.traces, on_judged=maps), maps)
