"""`mha-parity verify`."""

from __future__ import annotations

import argparse
from typing import Any, cast

from parity.cli.help import Page
from parity.cli.layers import add_layer_options, pairs_of_layers
from parity.cli.messages import warn
from parity.cli.options import add_json_option

PAGE = Page(
    "do two files hold the same attention?",
    "Say whether two files hold the same attention, whatever their layouts: both are computed, and compared stage "
    "by stage, layer by layer where {i} in --prefix, or a stack, stands for many. What --from and --prefix say "
    "once holds for both files; said twice, for each in turn.",
    "mha-parity verify model.safetensors flax.safetensors --from transformers.LLaMA \\\n"
    "      --from flax.nnx --prefix model.layers.0.self_attn --num-heads 32",
    "the same attention",
    "not the same",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("files", nargs=2, metavar="FILE")
    parser.add_argument(
        "--from", dest="layouts", action="append", default=[], metavar="LAYOUT", help="of both, or each"
    )
    add_layer_options(parser, "the layer, in both files or each", many=True)
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Compare the layers, and print the verdicts."""
    from dataclasses import replace

    from parity.conversion.verify import same_bits, verify
    from parity.diagnosis.diagnose import diagnose_weights
    from parity.reporting.console import console
    from parity.reporting.conversion import print_verdicts
    from parity.reporting.json import write_json

    verdicts, wrong, diagnosis = [], False, None
    quantised: dict[str, set[str]] = {path: set() for path in options.files}
    with pairs_of_layers(options) as pairs:
        for one, other in pairs:
            layers = (*one.load(), *other.load())
            comparisons = verify(*layers)
            if len(pairs) > 1:
                comparisons = [replace(each, case=one.label) for each in comparisons]
            for path, layer in zip(options.files, (one, other), strict=True):
                quantised[path].update(layer.quantised)
            verdicts.append((one.label, other.label, comparisons, same_bits(layers[0], layers[2])))
            differs = not all(each.passed for each in comparisons)
            if diagnosis is None or (differs and not wrong):
                diagnosis = diagnose_weights(*layers)
            wrong |= differs
    for path, kinds in quantised.items():
        if kinds:
            warn(f"{path} is quantised, {', '.join(sorted(kinds))}: compared is what is left of its weights")
    print_verdicts(verdicts, cast(Any, diagnosis), options.files, console())
    if options.json is not None:
        results = [each.to_dict() for _, _, comparisons, _ in verdicts for each in comparisons]
        layers = [
            {"layers": [one, other], "same": all(each.passed for each in comparisons), "same_bits": same}
            for one, other, comparisons, same in verdicts
        ]
        told = {"results": results, "layers": layers, "diagnosis": cast(Any, diagnosis).to_dict()}
        write_json(options.json, {"format": 1, **told})
    return 1 if wrong else 0
