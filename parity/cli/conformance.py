"""`mha-parity conformance`."""

from __future__ import annotations

import argparse
import fnmatch

from parity.cli.help import Page, Result
from parity.cli.messages import refusal
from parity.cli.options import add_declarations, check_names, flag_of, name_list

PAGE = Page(
    "report how an attention treats masks, empty rows and NaN",
    "Report the conventions of an attention (mask polarity, causal alignment, fully masked rows, …) and the "
    "guarantees that it breaks. It is your own function or module, or one of torch, JAX, Flax, Keras and "
    "Equinox.",
    "mha-parity conformance my_package.attention:attention --mask-true hides",
    "no guarantee is broken",
    "one is broken",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        nargs="?",
        metavar="PKG.MODULE:CALLABLE",
        help="a function, a module, or a function that makes a module",
    )
    parser.add_argument("--peers", action="store_true", help="examine torch, JAX, Flax, Keras, Equinox, and our layers")
    parser.add_argument("--only", default="*", metavar="GLOB", help="with --peers: names such as 'keras*'")
    parser.add_argument("--questions", type=name_list, metavar="A,B", help="rows of the matrix; default: all")
    parser.add_argument(
        "--dtypes", type=name_list, metavar="A,B", help="default: float32,bfloat16,float16; with ttnn bfloat16"
    )
    add_declarations(parser, ("torch", "jax", "ttnn"))
    parser.add_argument("--d-model", type=int, metavar="E", help="width of a layer's inputs")
    parser.add_argument("--num-heads", type=int, metavar="N", help="query heads of a layer")
    parser.add_argument("--num-kv-heads", type=int, metavar="K", help="declare that grouped heads are supported")


def run(options: argparse.Namespace) -> Result:
    """Examine, and print the matrix."""
    from parity.conformance.answers import exit_status
    from parity.conformance.discover import load_callable, load_params
    from parity.conformance.examine import examine, examine_peers
    from parity.conformance.peers import PEERS
    from parity.conformance.subjects import DTYPES
    from parity.core.packages import installed
    from parity.reporting.conformance import print_conformance
    from parity.reporting.console import console, progress_bar

    if options.peers == (options.subject is not None):
        raise refusal("either a subject", "be given as pkg.module:callable, or --peers")
    names = ("framework", "params", "axes", "d_model", "num_heads", "num_kv_heads")
    names += ("mask_name", "mask_true", "causal_name", "causal")
    declared = {name: value for name in names if (value := getattr(options, name)) is not None}
    flags = {flag_of(name): value for name, value in declared.items()}
    check_names("--dtypes", options.dtypes, DTYPES)
    if options.peers:
        if flags:
            raise refusal("--peers", f"not be combined with {', '.join(flags)}")
        peers = fnmatch.filter(PEERS, options.only)
        if not peers:
            raise refusal("--only", "match a peer", {"--only": options.only}, hint=f"there are {', '.join(PEERS)}")
        with progress_bar(len(peers)) as on_subject:
            found = examine_peers(peers, options.questions, options.dtypes, on_subject=on_subject)
    else:
        if options.only != "*":
            raise refusal("--only", "come with --peers", {"--only": options.only})
        if options.params is not None:
            declared["params"] = load_params(options.params)
        target = load_callable(options.subject)
        found = [examine(target, options.questions, options.dtypes, name=options.subject, **declared)]

    def again(subject: str, question: str) -> str:
        given = [f"--peers --only {subject}" if options.peers else options.subject]
        given += [f"{flag} {value}" for flag, value in flags.items()]
        return f"mha-parity conformance {' '.join(given)} --questions '{question}'"

    print_conformance(found, console(), again)
    return exit_status(found), {"packages": installed(), "subjects": found}
