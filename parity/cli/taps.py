"""Recordings of `parity.tap` on a command line: what `compare` and `diagnose` do with them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parity.cli.help import Result
from parity.cli.messages import refusal
from parity.cli.paths import kind_of

if TYPE_CHECKING:
    from parity.diagnosis.tap_pairs import TapDifference


def are_taps(paths: Sequence[str]) -> bool:
    """Return if paths are recordings, one or two; refuse a mixture."""
    kinds = [Path(path).is_file() and kind_of(path) == "tap" for path in paths]
    if not any(kinds):
        return False
    if not all(kinds) or len(paths) > 2 or len(set(paths)) < len(paths):
        raise refusal("recordings", "be one or two, and nothing else with them", " ".join(paths))
    return True


def compare(options: argparse.Namespace) -> Result:
    """Judge recordings by their model, as a report; or two by each other."""
    from parity.cli.reports import attention_maps, print_and_write
    from parity.running.taps import compare_with, report_of

    if options.weights is None:
        pages = {"--html": options.html, "--junit": options.junit}
        if given := [flag for flag, path in pages.items() if path is not None]:
            raise refusal(", ".join(given), "come with --weights", "recordings without")
        return _compare_two(options.traces, options, with_table=True)
    maps = attention_maps(options)
    verdicts = compare_with(options.weights, options.traces)
    _, content = print_and_write(options, report_of(verdicts), maps)
    return 0 if all(verdict.passed for verdict in verdicts.values()) else 1, content


def diagnose(options: argparse.Namespace) -> Result:
    """Say which layer goes wrong, at which stage, and why."""
    from parity.reporting.console import console
    from parity.reporting.taps import print_verdict
    from parity.running.taps import compare_with

    if options.weights is None:
        return _compare_two(options.files, options, with_table=False)
    verdicts = compare_with(options.weights, options.files)
    for path, verdict in verdicts.items():
        print_verdict(verdict, path if len(verdicts) > 1 else "", console(), verbose=options.verbose)
    told = [{"recording": path, **verdict.to_dict()} for path, verdict in verdicts.items()]
    return 0 if all(verdict.passed for verdict in verdicts.values()) else 1, {"recordings": told}


def _compare_two(paths: Sequence[str], options: argparse.Namespace, *, with_table: bool) -> Result:
    from parity.diagnosis.tap_pairs import judge_taps
    from parity.reporting.console import console
    from parity.reporting.taps import print_difference
    from parity.tapping.record import load_tap

    if len(paths) < 2:
        raise refusal("--weights", f"name the folder of the model that {paths[0]} should be of, or give two")
    difference: TapDifference = judge_taps(*map(load_tap, paths))
    print_difference(difference, console(), with_table=with_table)
    return 0 if difference.agrees else 1, difference.to_dict()
