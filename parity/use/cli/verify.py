"""`mha-parity verify`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from parity.use.cli.help import Page, Result
from parity.use.cli.layers import add_layer_options, pairs_of_layers, status_of
from parity.use.cli.messages import warn

if TYPE_CHECKING:
    from parity.measure.core.compare import Comparison

PAGE = Page(
    "compare the attention weights of two files",
    "Check that two files hold the same attention, whatever their layouts. Tensors are compared "
    "one by one, and so are the stages computed with them. With {i} in --prefix, or a "
    "stack, all layers are compared. Parts that cannot be compared are named, and then the exit "
    "status is not 0. Tensors that only one file has are named. --from and --prefix hold for both "
    "files if passed once, and for each in turn if passed twice.",
    "mha-parity verify model.safetensors flax.safetensors --from transformers.LLaMA \\\n"
    "      --from flax.nnx --prefix model.layers.0.self_attn --num-heads 32",
    "the same attention",
    "not the same",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs=2, metavar="FILE", help="two files or folders of weights")
    parser.add_argument(
        "--from",
        dest="layouts",
        action="append",
        default=[],
        metavar="LAYOUT",
        help="layout of both files, or of each",
    )
    add_layer_options(parser, "the layer, in both files or each", many=True)


def run(options: argparse.Namespace) -> Result:
    """Compare the layers, and print the verdicts."""
    from dataclasses import replace

    from parity.explain.diagnosis.diagnose import Diagnosis
    from parity.explain.diagnosis.weights.diagnose import diagnose_weights
    from parity.explain.diagnosis.weights.differences import compare_weights
    from parity.explain.diagnosis.weights.verify import verify
    from parity.use.reporting.console import console
    from parity.use.reporting.conversion import Verdict, print_verdicts

    verdicts: list[Verdict] = []
    results: list[Comparison] = []
    diagnosis = Diagnosis()
    are_same = True
    quantized: dict[str, set[str]] = {path: set() for path in options.files}
    with pairs_of_layers(options) as pairs:
        for one, other in pairs.layers:
            layers = (*one.load(), *other.load())
            weights = compare_weights(*layers)
            stages = verify(*layers)
            if len(pairs.layers) > 1:
                stages = [replace(comparison, case=one.label) for comparison in stages]
            for path, layer in zip(options.files, (one, other), strict=True):
                quantized[path].update(layer.quantised)
            if are_same and not weights.same:
                diagnosis = diagnose_weights(*layers)
                are_same = False
            verdicts.append(Verdict(one.label, other.label, weights, stages))
            results += stages
    for tensors in pairs.only_in_one:
        warn(str(tensors))
    for path, kinds in quantized.items():
        if kinds:
            names = ", ".join(sorted(kinds))
            warn(f"{path} is quantized ({names}): its dequantized weights are compared")
    print_verdicts(verdicts, diagnosis, options.files, console(), pairs.not_compared)
    content = {
        "results": results,
        "layers": verdicts,
        "diagnosis": diagnosis,
        "not_compared": pairs.not_compared,
        "only_in_one": pairs.only_in_one,
    }
    return status_of(are_same, pairs), content
