"""Weights of two files on the command line of `compare`: whether they are the same attention,
whatever their layouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parity.use.cli.command import Options, Result
from parity.use.cli.layers import pairs_of_layers, status_of
from parity.use.cli.messages import warn

if TYPE_CHECKING:
    from parity.measure.core.compare import Comparison


def compare_weight_files(options: Options) -> Result:
    """Compare the layers of two files, tensor by tensor and stage by stage, and print the
    verdicts.
    """
    from dataclasses import replace

    from parity.explain.diagnosis.diagnose import Diagnosis
    from parity.explain.diagnosis.weights.diagnose import diagnose_weights
    from parity.explain.diagnosis.weights.differences import compare_weights
    from parity.explain.diagnosis.weights.verify import verify
    from parity.use.reporting.console import console, progress_bar
    from parity.use.reporting.conversion import Verdict, print_verdicts

    verdicts: list[Verdict] = []
    results: list[Comparison] = []
    diagnosis = Diagnosis()
    are_same = True
    quantized: dict[str, set[str]] = {path: set() for path in options.files}
    with pairs_of_layers(options) as pairs, progress_bar(len(pairs.layers)) as on_layer:
        for one, other in pairs.layers:
            on_layer(one.label)
            layers = (*one.load(), *other.load())
            weights = compare_weights(*layers)
            stages = verify(*layers)
            if len(pairs.layers) > 1:
                stages = [replace(comparison, case=one.label) for comparison in stages]
            for path, layer in zip(options.files, (one, other), strict=True):
                quantized[path].update(layer.quantized)
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
    if not (options.quiet and are_same):
        print_verdicts(verdicts, diagnosis, options.files, console(), pairs.not_compared)
    content = {
        "results": results,
        "layers": verdicts,
        "diagnosis": diagnosis,
        "not_compared": pairs.not_compared,
        "only_in_one": pairs.only_in_one,
    }
    return status_of(are_same, pairs), content
