"""`mha-parity run`."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parity.measure.backends import BACKENDS
from parity.use.cli.cases import chosen_cases, num_runs
from parity.use.cli.command import OneOf, Options, Result, command, group, option
from parity.use.cli.layers import layer_options, passed_layer_flags, weight_options
from parity.use.cli.messages import (
    add_hint,
    check_exclusive,
    contradiction,
    input_error,
    no_framework,
    requires,
)
from parity.use.cli.options import (
    backend_options,
    cases_option,
    check_names,
    check_range,
    flag_of,
    from_option,
    named_path,
    range_list,
)
from parity.use.cli.reports import (
    attention_maps,
    print_and_write,
    report_options,
    skip_option,
)

if TYPE_CHECKING:
    from parity.measure.core.case import Case
    from parity.use.running.report import Report

MOST_RANDOM = 10_000
"""The largest number of random cases. It is a choice: that many run for hours."""


@command(
    "run test cases or a model's layers, and check every stage",
    about=(
        "Run test cases in each framework and compare each stage (q, k, v, scores, attention "
        "weights, context, output, cache, gradients) with the float64 reference. The tolerance "
        "follows from rounding in the dtype."
    ),
    example="mha-parity run --model checkpoints/llama --layers 0,5-7 --against transformers",
    well="every requested stage agrees",
    wrong="a stage differs",
    has_quiet_form=True,
)
@group(
    "what to run",
    cases_option(),
    option("--list", "is_list", is_flag=True, help="list the cases (default: all), and run none"),
    option(
        "--random",
        type=int,
        default=0,
        metavar="N",
        help="also run N random cases",
    ),
    option(
        "--model",
        metavar="FOLDER",
        help="run every layer of this model instead: config.json, weights",
    ),
    option(
        "--weights",
        metavar="FILE",
        help="run one layer of this file instead, in any layout",
    ),
    option(
        "--layers",
        type=range_list,
        metavar="0,5-7",
        help="layers of --model; default: all",
    ),
    option(
        "--against",
        type=OneOf(("transformers",)),
        help=(
            "with --model: also check transformers' own modules, and observe a model of an unknown "
            "family"
        ),
    ),
    option(
        "--seq-len",
        type=int,
        metavar="N",
        help=(
            "tokens for --model or --weights; default: 9, and in a further case as many as its "
            "windows need"
        ),
    ),
)
@group(
    "how to run",
    backend_options(),
    option(
        "-j",
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="number of processes; default: 1",
    ),
    option(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="device of torch, such as cpu, cuda or cuda:1; JAX uses its default device",
    ),
    option(
        "--python",
        multiple=True,
        type=named_path,
        metavar="BACKEND=PATH",
        help="run this backend with the Python of another environment",
    ),
    option(
        "--join",
        multiple=True,
        metavar="DIR",
        help="also check the traces of this folder",
    ),
)
@group(
    "reading weights",
    from_option(is_hidden=True),
    weight_options("the layers", are_hidden=True),
)
@group(
    "output",
    option(
        "--save-traces",
        metavar="DIR",
        help="save every stage, for `compare` and --join",
    ),
    skip_option(),
    report_options(),
)
def run(options: Options) -> Result:
    """Run the cases, print the report and write it."""
    from parity.measure.backends import why_missing
    from parity.use.reporting.console import progress_bar
    from parity.use.running.elsewhere import Elsewhere
    from parity.use.running.models import with_exercised
    from parity.use.running.run import run_cases

    if options.is_list:
        return _list_cases(options)
    _check_numbers_and_names(options)
    cases = _chosen_cases(options)
    maps = attention_maps(options)
    _check_weight_options(options)
    pythons = dict(options.python)
    check_names("--python", [*pythons], BACKENDS)
    installed = [name for name in BACKENDS if why_missing(name) is None]
    if not set(pythons).isdisjoint(installed):
        # A backend that another Python runs must not run here also.
        requested = installed if options.backends is None else options.backends
        options.backends = [name for name in requested if name not in pythons]
    backends = installed
    if options.backends is not None:
        backends = [name for name in options.backends if name in installed]
    if not (backends or options.backends or options.join or pythons):
        raise ModuleNotFoundError(no_framework())
    arguments: dict[str, Any] = {
        "with_gradients": options.grad,
        "on_compared": maps,
        # The device is torch's, wherever it runs.
        "device": "cpu" if "torch" in pythons else options.device,
    }
    if options.model is not None:
        report = _run_model(options, {**arguments, "seq_len": options.seq_len})
        return print_and_write(options, report, maps)
    weights: Any = None
    cases_by_layer: dict[str, list[Case]] = {}
    further: dict[str, list[Case]] = {}
    if options.weights is not None:
        weights, cases_by_layer, further = _weights_and_cases(options)
        (name,) = cases_by_layer
        cases = [*cases_by_layer[name], *further[name]]
    with ExitStack() as stack:
        on_case = stack.enter_context(progress_bar(num_runs(cases, options.dtypes, backends)))
        num_processes = max(options.jobs, 1) + len(pythons)
        join: list[Any] = [*options.join]
        for name, path in pythons.items():
            elsewhere = Elsewhere(path, _options_elsewhere(options, name), num_processes)
            join.append(stack.enter_context(elsewhere))
        report = run_cases(
            cases,
            options.backends,
            options.dtypes,
            **arguments,
            weights=weights,
            traces=options.save_traces,
            join=join,
            jobs=options.jobs,
            on_case=on_case,
        )
    report = with_exercised(report, cases_by_layer, further, options.dtypes)
    return print_and_write(options, report, maps)


def _list_cases(options: Options) -> Result:
    """Print the cases of --cases, or all, one in a line."""
    from dataclasses import asdict

    from parity.use.reporting.cases import covers, print_cases
    from parity.use.reporting.console import console

    for name in ("model", "weights", "random", "save_traces", "join", "python", "junit", "html"):
        if getattr(options, name):
            raise contradiction(flag_of(name), "--list")
    cases = chosen_cases(options.cases or ["all"])
    if not options.quiet:
        print_cases(cases, console())
    return 0, {"cases": [{"covers": covers(case), **asdict(case)} for case in cases]}


def _check_numbers_and_names(options: Options) -> None:
    """Reject unknown names, and numbers that are out of range."""
    from parity.measure.core.case import DTYPES
    from parity.use.running.models import LONGEST, SHORTEST

    check_exclusive(options, "--model", "--weights")
    check_names("--backends", options.backends, BACKENDS)
    check_names("--dtypes", options.dtypes, DTYPES)
    check_range(options, "jobs", 1)
    if options.seq_len is not None:
        check_range(options, "seq_len", SHORTEST, LONGEST)
    if options.jobs > 1 and options.model is not None:
        rule = "be 1 with --model, because layers are read one at a time"
        raise input_error("--jobs", rule, {"--jobs": options.jobs})


def _weights_and_cases(
    options: Options,
) -> tuple[dict[str, Any], dict[str, list[Case]], dict[str, list[Case]]]:
    """Return the weights of a file, and by the name of its layer the usual cases and further ones,
    which exercise what these do not.
    """
    from parity.port.conversion.convert import load
    from parity.use.running.lengths import further_cases
    from parity.use.running.models import SEQ_LEN, cases_of

    weights, spec = load(
        options.weights, options.layout, prefix=options.prefix, **layer_options(options)
    )
    seq_len = SEQ_LEN if options.seq_len is None else options.seq_len
    name = f"weights-{Path(options.weights).stem}"
    cases = {name: cases_of(name, spec, seq_len=seq_len)}
    further = further_cases(cases, options.dtypes, with_more_tokens=options.seq_len is None)
    return weights, cases, further


def _options_elsewhere(options: Options, backend: str) -> list[str]:
    """Return the options of `run` for the same cases on a backend with another Python."""
    words = ["--backends", backend, "--dtypes", ",".join(options.dtypes)]
    words += ["--random", str(options.random)]
    # Cases that it skips count in the report of all.
    words.append("--allow-skipped")
    if options.cases is not None:
        words += ["--cases", ",".join(options.cases)]
    if backend == "torch":
        words += ["--device", options.device]
    if options.grad:
        words.append("--grad")
    return words


def _check_weight_options(options: Options) -> None:
    """Reject options about weights without weights, and options about cases with weights."""
    if options.model is None and options.weights is None:
        needless = passed_layer_flags(options)
        if options.layout_files:
            needless.append("--layout")
        if options.seq_len is not None:
            needless.append("--seq-len")
        if needless:
            raise requires(needless, "--weights or --model")
    else:
        of_cases = ("cases", "random", "save_traces", "join", "python")
        passed = [flag_of(name) for name in of_cases if getattr(options, name)]
        if passed:
            raise contradiction("--model" if options.model is not None else "--weights", passed)
    if options.model is None:
        flags = [f"--{name}" for name in ("layers", "against") if getattr(options, name)]
        if flags:
            raise requires(flags, "--model")


def _run_model(options: Options, arguments: dict[str, Any]) -> Report:
    """Run the layers of a model."""
    from mha_spec import InputError
    from parity.port.conversion.checkpoint import Checkpoint
    from parity.use.reporting.console import progress_bar
    from parity.use.running.models import run_model

    if options.against == "transformers" and find_spec("transformers") is None:
        raise ModuleNotFoundError(
            "--against transformers needs transformers; pip install transformers"
        )
    with progress_bar(None) as on_case:
        try:
            return run_model(
                options.model,
                options.backends,
                options.dtypes,
                layers=options.layers,
                against=options.against,
                layout=options.layout,
                prefix=options.prefix,
                on_case=on_case,
                **arguments,
                **layer_options(options),
            )
        except InputError as error:
            if options.against is None:
                with Checkpoint.open(options.model) as checkpoint:
                    is_unknown = checkpoint.is_unknown
                if is_unknown:
                    add_hint(error, "--against transformers observes its layers")
            raise


def _chosen_cases(options: Options) -> list[Case]:
    from parity.measure.core.cases import random_case

    check_range(options, "random", 0, MOST_RANDOM)
    cases = chosen_cases(options.cases, may_be_none=options.random > 0)
    named = {case.name: case for case in cases}
    # A random case that is also named runs once.
    drawn = {}
    for number in range(options.random):
        case = random_case(number)
        drawn[case.name] = case
    return list((named | drawn).values())
