"""Recordings of live models as a report, with one case per layer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from parity.explain.diagnosis.taps import TapVerdict, check_tap
from parity.explain.identification.folders import observe_folder
from parity.measure.backends.numerics import environment
from parity.measure.core.weights import Weights
from parity.port.conversion.checkpoint import Checkpoint
from parity.port.conversion.hints import LayerHints
from parity.port.conversion.model_config import ModelConfig
from parity.port.models.specs import ModelLayer, layers_of_parts
from parity.port.tapping.record import load_tap
from parity.use.running.report import Report, SkippedCase


def compare_with(folder: str | os.PathLike[str], paths: Sequence[str]) -> dict[str, TapVerdict]:
    """Compare recordings, files of `Tapped.save`, with the folder of their model; return the
    verdict on each by its path.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not a recording of the model.
    """
    specs, weights_by_layer = layers_in(folder)
    return {path: check_tap(load_tap(path), specs, weights_by_layer) for path in paths}


def layers_in(folder: str | os.PathLike[str]) -> tuple[list[ModelLayer], dict[str, Weights]]:
    """Return the specification of each layer of a Hugging Face model, and the weights of attention
    layers by name.

    Raises:
        OSError: if the folder cannot be read.
        ValueError: if neither rules of its family nor observation specify its layers.
    """
    with Checkpoint.open(folder) as checkpoint:
        if checkpoint.is_unknown:
            observed = observe_folder(folder)
            specs = [layer.at(index) for index, layer in enumerate(observed)]
            known = [layer for layer in observed if layer.spec is not None]
            return specs, {layer.name: layer.weights for layer in known}
        # Without a config.json this raises the error that names it.
        config = checkpoint.config_of_folder or ModelConfig.read(folder)
        layers = checkpoint.layers(LayerHints())
        layers.warn_if_incomplete()
        weights = {layer.label: layer.load()[0] for layer in layers.in_order}
        return layers_of_parts(config.values), weights


def report_of(verdicts: Mapping[str, TapVerdict]) -> Report:
    """Return the report of compared recordings, by the names that it uses for them."""
    report = Report([], {}, environment([]), layers=_layers_of(verdicts))
    for name, verdict in verdicts.items():
        for layer in verdict.layers:
            for comparison in layer.comparisons:
                report.comparisons.append(replace(comparison, backend=name, library=name))
            reason = layer.not_compared or layer.left_out
            if reason:
                report.skipped_cases.append(SkippedCase(layer.layer, "", name, reason))
            if layer.diagnosis is not None and not layer.not_compared:
                report.diagnoses[layer.layer, layer.comparisons[0].dtype, name] = layer.diagnosis
    return report


def _layers_of(verdicts: Mapping[str, TapVerdict]) -> tuple[str, ...]:
    """Return the names of all recorded layers, in order."""
    names: dict[str, None] = {}
    for verdict in verdicts.values():
        for layer in verdict.layers:
            names[layer.layer] = None
    return tuple(names)
