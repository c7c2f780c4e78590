"""`mha-parity diagnose`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from parity.use.cli.command import Options, Result, argument, command, group, option
from parity.use.cli.layers import (
    ASSUMED_CAUSAL,
    pairs_of_layers,
    status_of,
    weight_options,
)
from parity.use.cli.messages import add_hint, contradiction, input_error, requires
from parity.use.cli.options import (
    FrameworkName,
    causal_option,
    check_range,
    params_option,
    size_list,
)
from parity.use.cli.own_layer import names_of_weights, own_layer
from parity.use.cli.paths import kind_of, kinds_of, missing_in
from parity.use.cli.reports import attention_maps, html_option, write_page

if TYPE_CHECKING:
    from rich.console import Console

    from parity.explain.diagnosis.diagnose import Diagnosis
    from parity.explain.diagnosis.weights.differences import WeightsComparison
    from parity.use.running.report import Report

INPUTS = "PKG.MODULE:FUNCTION, one or two traces, one or two recordings, or two weight files"


@command(
    "name the wrong layer, the wrong stage and the bug",
    about=(
        "Find out why an implementation differs from the reference. The result names the known "
        "bug that explains the difference, or two that do so together."
    ),
    example="mha-parity diagnose my_port:layer --model checkpoints/llama --layer 3",
    well="nothing differs by more than rounding",
    wrong="something differs",
    forms=(
        (
            "MODULE:FUNCTION --model FOLDER --layer 3",
            "your layer, and the model that it is part of",
        ),
        ("MODULE:FUNCTION --weights FILE", "your layer, and the file of its right weights"),
        ("TRACE", "a trace that `run --save-traces` wrote"),
        ("TRACE TRACE", "two traces of one case"),
        ("FILE FILE", "two files of weights"),
        ("RECORDING --model FOLDER", "a recording of parity.tap, and its model"),
        ("RECORDING RECORDING", "two recordings of one model"),
        ("FILE… --mesh tensor=4 --weights FILE", "the stages of each rank"),
    ),
)
@argument(
    "files",
    nargs=-1,
    required=True,
    metavar="INPUT",
    help="a function, traces, recordings or weight files: see the forms below",
)
@option(
    "--weights",
    metavar="FILE",
    help="right weights of your function, or of the layer that ranks divide",
)
@option(
    "--model",
    metavar="FOLDER",
    help="model of your function or of recordings, with config.json and weights",
)
@group(
    "your function",
    option(
        "--layer",
        type=int,
        metavar="N",
        help="number of its layer in --model or --weights",
    ),
    option(
        "--names",
        "weight_names",
        metavar="LAYOUT",
        help=(
            "names of the weights that it receives: canonical (default), model for the names of "
            "the file, or a layout, such as flax.nnx or the file of a table"
        ),
    ),
    option(
        "--chunks",
        type=size_list,
        metavar="48,1,1",
        help=(
            "call it once for each chunk, with this many tokens; its parameter for a cache "
            "receives the second value that the previous call returned"
        ),
    ),
    option(
        "--seq-len",
        type=int,
        metavar="N",
        help="tokens to draw; default: 19, or as many as its window needs",
    ),
    option(
        "--input",
        metavar="NPY",
        help="its input, (tokens, width) or (B, tokens, width)",
    ),
    option(
        "--key-input",
        metavar="NPY",
        help="with --input: sequence to attend to, for cross-attention",
    ),
    option(
        "--cotangent",
        metavar="NPY",
        help=(
            "with --input: gradient of the output, in its shape; its parameter `cotangent` "
            "receives it, for the gradients that it returns"
        ),
    ),
    option(
        "--seconds",
        type=float,
        metavar="S",
        help="limit of the search for bugs, also for traces; inf tries everything; default: 5",
    ),
    option(
        "--framework",
        type=FrameworkName(("torch", "jax", "ttnn")),
        help="its framework, if it cannot be inferred",
    ),
    params_option(),
)
@causal_option("causal mask of a function or of ranks; default: --causal for self-attention")
@option(
    "--mesh",
    metavar="tensor=4",
    help=(
        "files are the stages of ranks, in order; ranks divide the heads (tensor) or tokens "
        "(sequence)"
    ),
)
@option(
    "--case", metavar="CASE", help="with --mesh: the case that ranks computed, instead of --weights"
)
@group(
    "reading weights",
    option(
        "--from",
        "layouts",
        multiple=True,
        metavar="LAYOUT",
        hidden=True,
        help="layout of both weight files, or of each",
    ),
    weight_options("the layer, in both files or each", many=True, are_hidden=True),
)
@html_option()
def run(options: Options) -> Result:
    """Print what explains a difference."""
    from parity.use.cli import ranks, taps
    from parity.use.reporting.console import console
    from parity.use.reporting.diagnosis import print_diagnosis
    from parity.use.running.run import compare_traces

    out = console()
    inputs = " ".join(options.files)
    if options.mesh is not None:
        _check_for_ranks(options)
        return ranks.diagnose_division(options)
    if options.case is not None:
        raise requires("--case", "--mesh")
    is_function = _is_function(options.files)
    missing = None if is_function else missing_in(options.files)
    if missing is not None:
        raise input_error("INPUT", f"be {INPUTS}", f"{missing}, which does not exist")
    kinds = kinds_of(options.files)
    if taps.are_taps(options.files, kinds):
        _check_for_recordings(options, inputs)
        return taps.diagnose_recordings(options)
    if is_function:
        _check_for_function(options)
    else:
        of_right_layer = {"--weights": options.weights, "--model": options.model}
        needless = _passed({**_of_function(options), **of_right_layer})
        if needless:
            raise requires(needless, "MODULE:FUNCTION")
    maps = attention_maps(options)
    if is_function:
        diagnosis, report = _diagnose_function(options, out)
    elif len(options.files) <= 2 and _are_traces(options.files, kinds):
        diagnosis = _diagnose_traces(options, out)
        report = None if options.html is None else compare_traces(options.files, on_compared=maps)
    elif len(options.files) == 2:
        return _diagnose_weights(options, out)
    else:
        raise input_error("INPUT", f"be {INPUTS}", inputs, hint=_hint_for_folder(options.files))
    print_diagnosis(diagnosis, out, is_right=not diagnosis.is_wrong, verbose=options.verbose)
    write_page(options, report, maps)
    return 1 if diagnosis.is_wrong else 0, diagnosis


def _check_for_function(options: Options) -> None:
    """Reject options of a function that contradict each other."""
    from parity.use.running.models import LONGEST

    if options.weights is not None and options.model is not None:
        raise contradiction("--weights", "--model")
    if options.seq_len is not None:
        if options.input is not None or options.chunks is not None:
            raise contradiction("--seq-len", "--input or --chunks")
        check_range(options, "seq_len", 1, LONGEST)
    if options.chunks is not None and sum(options.chunks) > LONGEST:
        rule = f"have at most {LONGEST} tokens"
        raise input_error("--chunks", rule, {"--chunks": sum(options.chunks)})
    for flag, value in (("--key-input", options.key_input), ("--cotangent", options.cotangent)):
        if value is not None and options.input is None:
            raise requires(flag, "--input")
    if options.cotangent is not None and options.chunks is not None:
        raise contradiction("--cotangent", "--chunks")


def _seconds(options: Options) -> float:
    """Return the limit of the search for bugs."""
    from parity.explain.diagnosis.diagnose import SECONDS

    if options.seconds is None:
        return SECONDS
    if not options.seconds > 0:
        raise input_error("--seconds", "be above 0", {"--seconds": options.seconds})
    return options.seconds


def _check_for_ranks(options: Options) -> None:
    """Reject options that do not concern the stages of ranks."""
    # Ranks also may be causal or not.
    of_function = {**_of_function(options), "--causal": None, "--seconds": options.seconds}
    needless = _passed({**of_function, "--model": options.model})
    if needless:
        raise requires(needless, "MODULE:FUNCTION")
    if options.html is not None:
        raise input_error("--html", "be left out with --mesh")


def _check_for_recordings(options: Options, inputs: str) -> None:
    """Reject options that do not concern recordings."""
    if options.weights is not None:
        hint = "--model has the folder of their model"
        raise input_error("--weights", "be left out for recordings", inputs, hint=hint)
    of_files = {"--from": options.layouts or None, "--prefix": options.prefix or None}
    needless = _passed({**_of_function(options), **of_files, "--seconds": options.seconds})
    if needless:
        raise contradiction(needless[0], "recordings")


def _of_function(options: Options) -> dict[str, Any]:
    """Return the options that only a function has, with their values."""
    return {
        "--layer": options.layer,
        "--names": options.weight_names,
        "--chunks": options.chunks,
        "--seq-len": options.seq_len,
        "--input": options.input,
        "--key-input": options.key_input,
        "--cotangent": options.cotangent,
        "--framework": options.framework,
        "--params": options.params,
        "--causal": options.causal,
    }


def _passed(values: Mapping[str, Any]) -> list[str]:
    """Return the options that were passed."""
    return [flag for flag, value in values.items() if value is not None]


def _hint_for_folder(paths: Sequence[str]) -> str:
    """Return how to go on if the input is one folder; else an empty text."""
    folder = Path(paths[0])
    if len(paths) != 1 or not folder.is_dir():
        return ""
    traces = sorted(folder.rglob("*.safetensors"))
    if traces and kind_of(str(traces[0])) == "trace":
        command = shlex.join(["mha-parity", "compare", str(folder)])
        return f"`{command}` compares all traces of a folder, and diagnoses the first wrong ones"
    return "with MODULE:FUNCTION, --model is the folder of its model"


def _is_function(files: Sequence[str]) -> bool:
    """Return whether the input is `package.module:name`, and no file has this name."""
    return len(files) == 1 and ":" in files[0] and not Path(files[0]).exists()


def _diagnose_weights(options: Options, out: Console) -> Result:
    """Print how the layers of two files differ and the bug that explains it; of many, the first
    pair that differs.
    """
    from parity.explain.diagnosis.diagnose import Diagnosis
    from parity.explain.diagnosis.weights.diagnose import diagnose_weights
    from parity.explain.diagnosis.weights.differences import compare_weights
    from parity.use.reporting.console import progress_bar, working
    from parity.use.reporting.diagnosis import print_weights

    if options.html is not None:
        raise input_error("--html", "be left out for weight files")
    if options.seconds is not None:
        raise input_error("--seconds", "be left out for weight files")
    diagnosis = Diagnosis()
    shown: WeightsComparison | None = None
    differing: tuple[Any, ...] = ()
    labels = ""
    with pairs_of_layers(options) as pairs:
        with progress_bar(len(pairs.layers)) as on_layer:
            for one, other in pairs.layers:
                on_layer(one.label)
                layers = (*one.load(), *other.load())
                weights = compare_weights(*layers)
                if shown is None or not weights.same:
                    shown = weights
                if not weights.same:
                    differing = layers
                    labels = f"{one.label} and {other.label}"
                    break
        if differing:
            with working("searching for bugs"):
                diagnosis = diagnose_weights(*differing)
            if len(pairs.layers) > 1:
                text = f"{labels} are the first of {len(pairs.layers)} layers that differ"
                out.print(text, soft_wrap=True)
    comparison = cast("WeightsComparison", shown)  # there is a layer
    print_weights(comparison, diagnosis, out, verbose=options.verbose)
    content = {
        **diagnosis.to_dict(),
        "weights": comparison,
        "not_compared": pairs.not_compared,
    }
    return status_of(comparison.same, pairs), content


def _are_traces(files: Sequence[str], kinds: Sequence[str]) -> bool:
    """Return whether the files, of these kinds, are traces; reject a mixture."""
    if "trace" not in kinds:
        return False
    if set(kinds) != {"trace"}:
        raise input_error("both files", "be traces, or neither", " ".join(files))
    return True


def _diagnose_traces(options: Options, out: Console) -> Diagnosis:
    """Return the diagnosis of one trace, or of the one of two whose first wrong stage comes
    first.
    """
    from parity.explain.diagnosis.traces import compare_together, diagnose_worst, distances
    from parity.measure.core.compare import first_difference
    from parity.use.reporting.console import working
    from parity.use.reporting.diagnosis import print_divergence
    from parity.use.running.traces import check_different, load_trace

    files = options.files
    check_different(files)
    traces = [load_trace(path) for path in files]
    if len({trace.problem.digest for trace in traces}) > 1:
        raise input_error("traces", "be of one case and dtype", " ".join(files))
    if len({trace.title for trace in traces}) < len(traces):
        # Two traces of one backend have the same title: their files distinguish them.
        traces = [
            replace(trace, folder=path, is_named_by_folder=True)
            for trace, path in zip(traces, files, strict=True)
        ]
    sides = compare_together(traces)
    if len(traces) > 1:
        print_divergence(
            sides, distances(traces[0], traces[1], sides), out, verbose=options.verbose
        )
    else:
        difference = first_difference(sides[0])
        if difference is not None:
            # The diagnosis below states how large the error is.
            title, _, numbers = difference.as_text(with_budget=False).partition("\n")
            out.print(title, style="red", soft_wrap=True)
            if options.verbose:
                out.print(numbers, soft_wrap=True)
    with working("searching for bugs"):
        return diagnose_worst(traces, sides, _seconds(options))


def _diagnose_function(options: Options, out: Console) -> tuple[Diagnosis, Report | None]:
    """Return the diagnosis of a function, and a report if a page is requested.

    Prints that the function is assumed to be causal, and what would be found if it is not.
    """
    from mha_spec import InputError
    from parity.explain.diagnosis.diagnose import diagnose, observe
    from parity.measure.backends import FRAMEWORKS, load_backend
    from parity.use.reporting.console import working
    from parity.use.running.report import report_of_stages

    function, problem, framework, is_causal_known = own_layer(options)
    case = problem.case
    is_assumed = case.is_causal and not is_causal_known
    seconds = _seconds(options)
    report = None
    other = None
    # A layer may keep state under these settings, such as a compiled program, for both calls.
    with (
        load_backend(FRAMEWORKS[framework]).lock(problem.dtype) as settings,
        working("calling the layer and searching for bugs"),
    ):
        arithmetic = settings.get("arithmetic", "ieee")
        try:
            observed = observe(function, problem, framework)
        except InputError as error:
            hint = names_of_weights(function, error.__cause__)
            if hint:
                add_hint(error, hint)
            raise
        diagnosis = diagnose(observed, problem, arithmetic=arithmetic, seconds=seconds)
        if options.html is not None:
            report = report_of_stages(
                options.files[0], framework, observed, problem, arithmetic, diagnosis
            )
        if is_assumed and diagnosis.is_wrong:
            not_causal = replace(problem, case=replace(case, is_causal=False))
            observed = observe(function, not_causal, framework)
            # Known bugs are tried at once. The slow search is worth its time only if something is
            # still unknown.
            more = seconds if diagnosis.unnamed else 0.0
            other = diagnose(observed, not_causal, arithmetic=arithmetic, seconds=more)
    if is_assumed:
        out.print(f"{options.files[0]} {ASSUMED_CAUSAL}", soft_wrap=True, highlight=False)
    if other is not None:
        words = _in_words(other)
        if words and words != _in_words(diagnosis):
            text = f"with --no-causal, {words}"
            out.print(text, style="bold", soft_wrap=True, highlight=False)
    return diagnosis, report


def _in_words(diagnosis: Diagnosis) -> str:
    """Return a diagnosis in a few words; empty if something is unexplained."""
    if not diagnosis.is_wrong:
        return "nothing differs"
    if diagnosis.unnamed:
        return ""
    names: list[str] = []
    for finding in diagnosis.named:
        names += finding.bugs
    if not names:
        return ""
    return f"known bugs explain every difference: {', '.join(names)}"
