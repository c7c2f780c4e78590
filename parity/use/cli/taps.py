"""Recordings of `parity.tap` on the command lines of `compare` and `diagnose`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from parity.use.cli.command import Options, Result
from parity.use.cli.messages import input_error, requires

if TYPE_CHECKING:
    from parity.explain.diagnosis.tap_pairs import TapDifference


def are_taps(paths: Sequence[str], kinds: Sequence[str]) -> bool:
    """Return whether paths, of these kinds, are recordings, one or two; reject a mixture."""
    if "tap" not in kinds:
        return False
    is_mixture = set(kinds) != {"tap"}
    is_repeated = len(set(paths)) < len(paths)
    if is_mixture or is_repeated or len(paths) > 2:
        raise input_error("recordings", "be one or two, without other files", " ".join(paths))
    return True


def compare_recordings(options: Options) -> Result:
    """Compare recordings with their model, as a report; or two with each other."""
    from parity.use.cli.reports import attention_maps, print_and_write
    from parity.use.reporting.console import working
    from parity.use.running.taps import compare_with, report_of

    if options.model is None:
        _check_no_report({"--html": options.html, "--junit": options.junit})
        if options.output_format != "text":
            raise requires("--output-format", "--model")
        difference = _compare_two(options.files, with_table=True)
        if not difference.agrees:
            return 1, difference
        # Layers of one recording alone have nothing to be compared with.
        if difference.alone and not options.allow_skipped:
            return 2, difference
        return 0, difference
    maps = attention_maps(options)
    with working("comparing the recording with its model"):
        verdicts = compare_with(options.model, options.files)
    return print_and_write(options, report_of(verdicts), maps)


def diagnose_recordings(options: Options) -> Result:
    """Print which layer goes wrong, at which stage, and why."""
    from parity.use.cli.reports import attention_maps, write_page
    from parity.use.reporting.console import console, working
    from parity.use.reporting.taps import print_verdict
    from parity.use.running.taps import compare_with, report_of

    if options.model is None:
        _check_no_report({"--html": options.html})
        difference = _compare_two(options.files, with_table=False)
        if difference.agrees:
            return 0, difference
        return 1, difference
    maps = attention_maps(options)
    with working("comparing the recording with its model"):
        verdicts = compare_with(options.model, options.files)
    status = 0
    recordings = []
    for path, verdict in verdicts.items():
        title = ""
        if len(verdicts) > 1:
            title = path
        print_verdict(verdict, title, console(), verbose=options.verbose)
        recordings.append({"recording": path, **verdict.to_dict()})
        if not verdict.passed:
            status = 1
    write_page(options, report_of(verdicts), maps)
    return status, {"recordings": recordings}


def _check_no_report(paths: Mapping[str, str | None]) -> None:
    flags = [flag for flag, path in paths.items() if path is not None]
    if flags:
        raise requires(flags, "--model")


def _compare_two(paths: Sequence[str], *, with_table: bool) -> TapDifference:
    """Compare two recordings, and print how they differ."""
    from parity.explain.diagnosis.tap_pairs import compare_taps
    from parity.port.tapping.record import load_tap
    from parity.use.reporting.console import console, working
    from parity.use.reporting.taps import print_difference

    if len(paths) < 2:
        raise input_error(
            "--model", f"be the folder of the model of {paths[0]}, unless there are two recordings"
        )
    first, second = paths
    with working("comparing the recordings"):
        difference = compare_taps(load_tap(first), load_tap(second))
    print_difference(difference, console(), with_table=with_table)
    return difference
