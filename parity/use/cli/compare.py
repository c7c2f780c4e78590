"""`mha-parity compare`."""

from __future__ import annotations

import argparse

from parity.use.cli.help import Page, Result
from parity.use.cli.messages import refusal
from parity.use.cli.reports import (
    add_length_options,
    add_report_options,
    add_skip_option,
    attention_maps,
    print_and_write,
)

PAGE = Page(
    "check traces saved elsewhere, or recordings of models",
    "Check traces that `run --save-traces` wrote in another environment or on another machine. Or "
    "check a recording of `parity.tap` layer by layer, against the model in --model or a second "
    "recording.",
    "mha-parity compare traces/torch traces/tt",
    "every stage of all inputs agrees",
    "a stage differs",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces", nargs="+", metavar="INPUT", help="folders of traces, single traces, or recordings"
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="with recordings: the model, with config.json and weights"
    )
    add_skip_option(parser)
    add_length_options(parser)
    add_report_options(parser)


def run(options: argparse.Namespace) -> Result:
    """Compare the traces, print the report and write it."""
    from parity.use.cli import taps
    from parity.use.running.run import compare_traces

    if taps.are_taps(options.traces):
        return taps.compare_recordings(options)
    if options.model is not None:
        raise refusal("--model", "be passed with recordings", " ".join(options.traces))
    maps = attention_maps(options)
    return print_and_write(options, compare_traces(options.traces, on_judged=maps), maps)
