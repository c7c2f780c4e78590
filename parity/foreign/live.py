"""Live attention modules of transformers: what they compute, and their canonical weights."""

from __future__ import annotations

from typing import Any

from mha_spec import AttentionSpec
from parity.conversion.layouts import LAYOUTS, to_canonical
from parity.conversion.layouts.detection import DoesNotFit
from parity.core.weights import Weights
from parity.models.config import values_of
from parity.models.specs import known_parts, sections_named, sections_of, specs_of


def from_transformers(
    module: Any, config: Any, layer_idx: int | None = None, *, path: str | None = None
) -> tuple[AttentionSpec, Weights]:
    """The specification and canonical weights of an attention module of transformers, bit for bit.

    Args:
        module: of one layer: `model.model.layers[3].self_attn`.
        config: of the model: its `config`, or the values of one by name, or the path of its folder.
        layer_idx: which layer it is, from 0; `module.layer_idx` when absent.
        path: where it lies, in models in which several modules of one number fit: `decoder.layers.3.encoder_attn`.

    Returns:
        What it computes, by the configuration alone; and its weights by their canonical names, (out, in).

    Raises:
        OSError: if there is no such folder.
        TypeError: if the number of the layer is not known.
        ValueError: if the configuration is not understood, has no such layer, or the module holds other weights than
            that layer.
    """
    values = values_of(config)
    index = getattr(module, "layer_idx", None) if layer_idx is None else layer_idx
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"layer_idx must be the number of a layer, got layer_idx={index!r}")
    parts = known_parts(values) or {"": values}
    named = sections_named(path or "", sections_of(values))
    layers = [layer for name, part in parts.items() if not named or name in named for layer in specs_of(part)]
    of_index = [layer for layer in layers if layer.index == index and (path is None or layer.is_at(path))]
    tensors = module.state_dict()
    found: dict[AttentionSpec, Weights] = {}
    refusals = [f"the model has no layer {index}{'' if path is None else f' at {path}'}"] if not of_index else []
    for layer in of_index:
        if layer.spec is None:
            refusals.append(f"layer {index} is {layer.kind}, which is not attention over keys")
            continue
        try:
            found[layer.spec], _ = to_canonical(tensors, LAYOUTS[layer.layout], spec=layer.spec)
        except DoesNotFit as error:
            refusals.append(str(error))
    if len(found) != 1:
        which = "; path=… tells which" if found else ""
        reasons = [str(spec) for spec in found] if found else refusals
        raise ValueError(f"module must be one layer of the model, got {' or '.join(reasons)}{which}")
    return next(iter(found.items()))
