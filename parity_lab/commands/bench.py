"""`mha-parity bench`."""

from __future__ import annotations

import argparse

from parity.use.cli.help import Page, Result
from parity.use.cli.layers import add_layer_options, layer_options, passed_layer_flags
from parity.use.cli.messages import refusal
from parity.use.cli.options import check_names, dtype_list, name_list, range_list

PAGE = Page(
    "measure speed compared with other libraries",
    "Measure the layers and those of other libraries, in turn in one process, and compare them "
    "with the limits of "
    "the machine. With --model, measure the layers of a model with their own weights. Only "
    "ratios are meaningful.",
    "mha-parity bench --suites cores,decode --quick",
    "measured",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suites",
        type=name_list,
        metavar="A,B",
        help=(
            "cores, scores, varlen, layers, decode, memory, import, convert, growth, "
            "growth-long; default: all"
        ),
    )
    parser.add_argument(
        "--backends",
        type=name_list,
        metavar="A,B",
        help="jax, torch; default: all that are installed",
    )
    parser.add_argument(
        "--dtypes", type=dtype_list, metavar="A,B", help="default: float32, on a GPU bfloat16"
    )
    parser.add_argument(
        "--device", default="cpu", help="device of torch, cpu or cuda; JAX uses its default device"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rows and smaller shapes, in less than 90 s"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also count kernels, copies and waits for the device"
    )
    parser.add_argument(
        "--plot",
        metavar="PATH",
        help="also draw time and memory over sequence length, .png or .svg",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="measure this model's layers instead: config.json, weights",
    )
    parser.add_argument(
        "--layers",
        type=range_list,
        metavar="0,5-7",
        help="layers of --model; default: all that differ",
    )
    parser.add_argument(
        "--from", dest="layout", metavar="LAYOUT", help="layout; default: from the file's metadata"
    )
    add_layer_options(parser, "its layers")


def run(options: argparse.Namespace) -> Result:
    """Measure, and print the results."""
    from parity.use.reporting.console import console, progress_bar
    from parity_lab.bench import DEVICES, DTYPES, FRAMEWORKS, GROUPS, bench, count_rows
    from parity_lab.bench.report import plot_growth, print_bench

    check_names("--suites", options.suites, GROUPS)
    check_names("--backends", options.backends, FRAMEWORKS)
    check_names("--dtypes", options.dtypes, DTYPES)
    check_names("--device", [options.device], DEVICES)
    groups = options.suites or GROUPS
    if options.plot is not None:
        from parity.use.reporting.plot import check_destination

        check_destination(options.plot, "--plot")
        if "growth" not in groups:
            raise refusal(
                "--plot", "be passed with growth among --suites", {"--suites": ",".join(groups)}
            )
    asked = {"dtypes": options.dtypes, "device": options.device, "quick": options.quick}
    _check_model_options(options)
    if options.model is not None:
        from parity_lab.bench.models import bench_model

        about = {"layers": options.layers, "layout": options.layout, "prefix": options.prefix}
        with progress_bar(None) as on_row:
            found = bench_model(
                options.model,
                options.backends,
                **asked,
                profile=options.profile,
                on_row=on_row,
                **about,
                **layer_options(options),
            )
    else:
        with progress_bar(count_rows(groups, options.backends, **asked)) as on_row:
            found = bench(groups, options.backends, **asked, profile=options.profile, on_row=on_row)
    print_bench(found, console())
    if options.plot is not None:
        plot_growth(found, options.plot)
    return 0, found.to_dict()


def _check_model_options(options: argparse.Namespace) -> None:
    """Reject options about a model without --model, and options about other work with it."""
    if options.model is None:
        if needless := [
            *(["--layers"] if options.layers is not None else []),
            *passed_layer_flags(options),
        ]:
            raise refusal(", ".join(needless), "be passed with --model")
    elif options.suites is not None or options.plot is not None:
        raise refusal("--model", "not be combined with --suites or --plot")
