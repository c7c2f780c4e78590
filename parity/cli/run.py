"""`mha-parity run`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parity.backends import BACKENDS
from parity.cli.cases import cases_named
from parity.cli.help import Page
from parity.cli.layers import add_layer_options, in_flags, layer_options
from parity.cli.messages import no_framework
from parity.cli.options import check_names, flag_of, name_list
from parity.cli.reports import add_report_options, attention_maps, print_and_write

if TYPE_CHECKING:
    from parity.core.cases import Case

MOST_RANDOM = 10_000  # cases, which take hours

PAGE = Page(
    "run cases on backends and judge every stage",
    "Run cases on every backend and compare each stage (q, k, v, scores, attention weights, context, output, "
    "cache, gradients) with the float64 reference. What is allowed follows from the rounding of the dtype.",
    "mha-parity run --backends jax,torch --cases 'rope*' --dtypes float32,bfloat16",
    "every stage that ran agrees",
    "a stage does not",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "--backends",
        type=name_list,
        metavar="A,B",
        help=f"{', '.join(BACKENDS)}; all that are installed by default",
    )
    parser.add_argument(
        "--cases",
        metavar="GLOB",
        help="names such as 'rope*', see `mha-parity cases`; all; every feature once by default",
    )
    parser.add_argument("--random", type=int, default=0, metavar="N", help="also run N cases drawn at random")
    parser.add_argument(
        "--dtypes",
        type=name_list,
        default=["float32"],
        metavar="A,B",
        help="float32, bfloat16, float16, float64; float32 by default",
    )
    parser.add_argument("--grad", action="store_true", help="also compare gradients")
    parser.add_argument("--weights", metavar="FILE", help="run a layer of this file instead, in any layout")
    parser.add_argument("--from", dest="layout", metavar="LAYOUT", help="of --weights; from its metadata by default")
    parser.add_argument("--save-traces", metavar="DIR", help="keep every stage as a file, for `compare` and --join")
    parser.add_argument(
        "--join", action="append", default=[], metavar="DIR", help="also judge the traces of this folder"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--verbose", action="store_true", help="print every comparison")
    length.add_argument("--quiet", action="store_true", help="print failures and the last line only")
    add_layer_options(parser, "the layer of --weights")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run the cases, print the report and write it."""
    from parity.backends import why_missing
    from parity.conversion.convert import load
    from parity.core.cases import DTYPES
    from parity.reporting.console import progress_bar
    from parity.running.run import run_cases

    check_names("--backends", options.backends, BACKENDS)
    check_names("--dtypes", options.dtypes, DTYPES)
    weights, cases, maps = None, _chosen_cases(options), attention_maps(options)
    of_weights = {"--from": options.layout, "--prefix": options.prefix}
    of_weights |= {flag_of(name): value for name, value in layer_options(options).items()}
    if options.weights is None and (needless := [flag for flag, value in of_weights.items() if value is not None]):
        raise ValueError(f"{', '.join(needless)} must come with --weights")
    if options.weights is not None:
        if options.cases is not None or options.random or options.save_traces or options.join:
            raise ValueError("--weights must not be combined with --cases, --random, --save-traces or --join")
        with in_flags(options):
            weights, spec = load(options.weights, options.layout, prefix=options.prefix, **layer_options(options))
        cases = _weight_cases(Path(options.weights).stem, spec)
    backends = [name for name in options.backends or BACKENDS if name in BACKENDS and why_missing(name) is None]
    if not (backends or options.backends or options.join):
        raise ModuleNotFoundError(no_framework())
    runs = sum(1 if case.dtype else len(options.dtypes) for case in cases) * len(backends)
    with progress_bar(runs) as on_case:
        results = run_cases(
            cases,
            options.backends,
            options.dtypes,
            with_gradients=options.grad,
            weights=weights,
            traces=options.save_traces,
            join=options.join,
            on_case=on_case,
            on_judged=maps,
        )
    return print_and_write(options, results, maps)


def _chosen_cases(options: argparse.Namespace) -> list[Case]:
    from parity.core.cases import QUICK, random_case

    if options.random < 0:
        raise ValueError(f"--random must be at least 0, got {options.random}")
    if options.random > MOST_RANDOM:
        raise ValueError(f"--random must be at most {MOST_RANDOM}, got {options.random}")
    drawn = {case.name: case for case in map(random_case, range(options.random))}
    named = QUICK
    if options.cases is not None:
        pattern = "*" if options.cases == "all" else options.cases
        named = {case.name: case for case in cases_named("--cases", pattern, bool(drawn))}
    return list((named | drawn).values())


def _weight_cases(name: str, spec: Any) -> list[Case]:
    """What a layer of unknown purpose is tried on: all keys seen, causal and cached; or, if it must be, across."""
    from parity.core.cases import Case

    if spec.d_kv != spec.d_in:
        return [Case(f"weights-{name}-cross", spec, "queries over keys of another width", seq_len=6, seq_len_k=9)]
    return [
        Case(f"weights-{name}-full", spec, "every token sees every token", seq_len=9),
        Case(f"weights-{name}-causal", spec, "no token sees a later one", seq_len=9, is_causal=True),
        Case(f"weights-{name}-decode", spec, "a prompt, then token by token", seq_len=7, chunks=(5, 1, 1), capacity=8),
    ]
