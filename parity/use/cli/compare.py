"""`mha-parity compare`."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from parity.use.cli.command import Options, Result, argument, command, group, option
from parity.use.cli.layers import layer_options, weight_options
from parity.use.cli.messages import contradiction, input_error, requires
from parity.use.cli.options import flag_of
from parity.use.cli.paths import is_name_of_shards, kind_of, kinds_of, missing_in
from parity.use.cli.reports import attention_maps, print_and_write, report_options, skip_option


@command(
    "compare traces, recordings of models, or files of weights",
    about=(
        "Compare two inputs, or one with the reference. `run --save-traces` writes traces in any "
        "environment, which are compared with the reference. A recording of `parity.tap` "
        "is compared layer by layer, with the model in --model or with a second recording. Two "
        "files of weights are compared tensor by tensor, and stage by stage, whatever their "
        "layouts."
    ),
    example="mha-parity compare traces/torch traces/tt",
    well="everything was compared and agrees",
    wrong="something differs",
    forms=(
        ("TRACES…", "folders of traces, or single traces"),
        ("RECORDING --model FOLDER", "a recording of parity.tap, and its model"),
        ("RECORDING RECORDING", "two recordings of one model"),
        ("FILE FILE --prefix 'layers.{i}.attn'", "the layers of two files or folders of weights"),
    ),
    has_quiet_form=True,
)
@argument(
    "files",
    nargs=-1,
    required=True,
    metavar="INPUT",
    help="traces, recordings or files of weights: see the forms below",
)
@option(
    "--model", metavar="FOLDER", help="with recordings: the model, with config.json and weights"
)
@skip_option()
@report_options()
@group(
    "files of weights; pass each option once for both, or twice",
    option(
        "--from",
        "layouts",
        multiple=True,
        metavar="LAYOUT",
        help="layout of both files, or of each; default: from their metadata",
    ),
    weight_options("the layer, in both files or each", many=True),
)
def run(options: Options) -> Result:
    """Compare the inputs, print the report and write it."""
    from parity.use.cli import taps
    from parity.use.cli.weight_files import compare_weight_files
    from parity.use.reporting.console import working
    from parity.use.running.run import compare_traces

    kinds = kinds_of(options.files)
    if taps.are_taps(options.files, kinds):
        _check_without_weights(options)
        return taps.compare_recordings(options)
    if options.model is not None:
        raise requires("--model", "recordings")
    if _are_weights(options.files, kinds):
        _check_without_report(options)
        return compare_weight_files(options)
    _check_without_weights(options)
    maps = attention_maps(options)
    with working("comparing traces with the reference"):
        report = compare_traces(options.files, on_compared=maps)
    return print_and_write(options, report, maps)


def _are_weights(paths: Sequence[str], kinds: Sequence[str]) -> bool:
    """Return whether paths of these kinds are two files or folders of weights; reject a mixture."""
    are_weights = [_is_weights(Path(path), kind) for path, kind in zip(paths, kinds, strict=True)]
    if not any(are_weights):
        return False  # reading traces reports what is missing
    missing = missing_in(paths)
    if missing is not None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing)
    if not all(are_weights) or len(paths) != 2:
        kinds = "traces, one or two recordings, or two files of weights"
        raise input_error("INPUT", f"be {kinds}", " ".join(paths))
    return True


def _is_weights(path: Path, kind: str) -> bool:
    """Return whether a path has weights, and no trace."""
    if path.is_file():
        return kind != "trace"
    if is_name_of_shards(path):
        return True
    if not path.is_dir():
        return False
    if (path / "config.json").exists():
        return True
    tensors = sorted(path.rglob("*.safetensors"))
    # All files of a folder are of one kind; in a folder of a different format none is a trace.
    if tensors:
        return kind_of(str(tensors[0])) != "trace"
    return any(path.iterdir())


def _check_without_weights(options: Options) -> None:
    """Reject options about files of weights."""
    of_weights = {
        "from": options.layouts,
        "prefix": options.prefix,
        "layout": options.layout_files,
        **layer_options(options),
    }
    passed = [flag_of(name) for name, value in of_weights.items() if value]
    if passed:
        raise requires(passed, "two files of weights")


def _check_without_report(options: Options) -> None:
    """Reject options about reports of stages."""
    for name in ("junit", "html", "allow_skipped"):
        if getattr(options, name):
            raise contradiction(flag_of(name), "files of weights")
    if options.output_format != "text":
        raise contradiction("--output-format", "files of weights")
