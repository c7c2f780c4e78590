"""`mha-parity bench`."""

from __future__ import annotations

from collections.abc import Sequence

from parity.use.cli.command import Options, Result, command, group, option
from parity.use.cli.layers import layer_options, passed_layer_flags, weight_options
from parity.use.cli.messages import contradiction, input_error, requires
from parity.use.cli.options import (
    backend_list,
    check_names,
    dtype_list,
    from_option,
    name_list,
    range_list,
)


@command(
    "measure speed compared with other libraries",
    about=(
        "Measure the layers of this project and of other libraries, in turn in one process, and "
        "compare them with the limits of the machine. With --model, measure the layers of a model "
        "with their own weights. Only ratios are meaningful."
    ),
    example="mha-parity bench --suites cores,decode --quick",
    well="measured",
)
@option(
    "--suites",
    type=name_list,
    metavar="A,B",
    help=(
        "cores, scores, varlen, layers, decode, memory, import, convert, growth, growth-long;"
        " default: all"
    ),
)
@option(
    "--backends",
    type=backend_list,
    metavar="A,B",
    help="jax, torch; default: all that are installed",
)
@option(
    "--dtypes",
    type=dtype_list,
    metavar="A,B",
    help="dtypes of the inputs; default: float32, or bfloat16 on a GPU",
)
@option(
    "--device",
    default="cpu",
    metavar="DEVICE",
    help="device of torch, cpu or cuda; JAX uses its default device",
)
@option("--quick", is_flag=True, help="fewer rows and smaller shapes, in less than 90 s")
@option("--profile", is_flag=True, help="also count kernels, copies and waits for the device")
@option(
    "--plot", metavar="PATH", help="also draw time and memory over sequence length, .png or .svg"
)
@option(
    "--model", metavar="FOLDER", help="measure this model's layers instead: config.json, weights"
)
@option(
    "--layers", type=range_list, metavar="0,5-7", help="layers of --model; default: all that differ"
)
@group(
    "reading weights",
    from_option(is_hidden=True),
    weight_options("its layers", are_hidden=True),
)
def run(options: Options) -> Result:
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
        _check_plot(options.plot, groups)
    _check_model_options(options)
    effort = {"dtypes": options.dtypes, "device": options.device, "quick": options.quick}
    if options.model is not None:
        from parity_lab.bench.models import bench_model

        with progress_bar(None) as on_row:
            measurements = bench_model(
                options.model,
                options.backends,
                **effort,
                layers=options.layers,
                layout=options.layout,
                prefix=options.prefix,
                profile=options.profile,
                on_row=on_row,
                **layer_options(options),
            )
    else:
        num_rows = count_rows(groups, options.backends, **effort)
        with progress_bar(num_rows) as on_row:
            measurements = bench(
                groups, options.backends, **effort, profile=options.profile, on_row=on_row
            )
    print_bench(measurements, console())
    if options.plot is not None:
        plot_growth(measurements, options.plot)
    return 0, measurements.to_dict()


def _check_plot(path: str, groups: Sequence[str]) -> None:
    """Reject a picture that cannot be written, or has nothing to show."""
    from parity.use.reporting.plot import check_destination

    check_destination(path, "--plot")
    if "growth" not in groups:
        groups_in_words = ",".join(groups)
        expected = "be passed with growth among --suites"
        raise input_error("--plot", expected, {"--suites": groups_in_words})


def _check_model_options(options: Options) -> None:
    """Reject options about a model without --model, and options about other work with it."""
    if options.model is None:
        flags = list(passed_layer_flags(options))
        if options.layers is not None:
            flags.insert(0, "--layers")
        if flags:
            raise requires(flags, "--model")
    elif options.suites is not None or options.plot is not None:
        raise contradiction("--model", "--suites or --plot")
