"""Recordings of live models as a report: a layer is what a case is elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mha_spec import AttentionSpec
from parity.conversion.layers import open_layers
from parity.core.weights import Weights
from parity.diagnosis.taps import TapVerdict, judge_tap
from parity.running.report import Report, SkippedCase
from parity.tapping.record import load_tap


def compare_with(weights: str | os.PathLike[str], paths: Sequence[str]) -> dict[str, TapVerdict]:
    """Judge recordings, each by itself, by the model that they should be of.

    Args:
        weights: the folder of that model.
        paths: of the files that `Tapped.save` wrote.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if it is not what it should be.
    """
    specs, held = layers_in(weights)
    return {path: judge_tap(load_tap(path), specs, held) for path in paths}


def layers_in(folder: str | os.PathLike[str]) -> tuple[dict[int, AttentionSpec], dict[int, Weights]]:
    """The specification and the weights of each attention layer of a model, by its number.

    Args:
        folder: of a model of Hugging Face whose family is known, its config.json and its weights.

    Raises:
        OSError: if the folder cannot be read.
        ValueError: if its layers cannot be told, or several have one number, as those of an encoder and a decoder.
    """
    specs: dict[int, AttentionSpec] = {}
    weights: dict[int, Weights] = {}
    with open_layers(folder) as layers:
        for number, layer in enumerate(layers):
            index = layer.place[-1] if layer.place else number
            if index in specs:
                raise ValueError(f"{folder} must have one layer of each number, got several of {index}")
            weights[index], specs[index] = layer.load()
    return specs, weights


def report_of(verdicts: Mapping[str, TapVerdict]) -> Report:
    """A report of recordings that were judged by the reference, by the names that it shall have for them."""
    layers = dict.fromkeys(layer.layer for verdict in verdicts.values() for layer in verdict.layers)
    report = Report([], {}, {}, layers=tuple(layers))
    for name, verdict in verdicts.items():
        for layer in verdict.layers:
            report.comparisons.extend(replace(comparison, backend=name) for comparison in layer.comparisons)
            if layer.not_judged:
                report.skipped_cases.append(SkippedCase(layer.layer, "", name, f"{layer.layer}: {layer.not_judged}"))
            elif layer.diagnosis is not None:
                report.diagnoses[layer.layer, layer.comparisons[0].dtype, name] = layer.diagnosis
    return report
