"""Live attention modules of transformers: what they compute, and their canonical weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mha_spec import AttentionSpec, Refusal, WrongType
from parity.conversion.layouts import LAYOUTS, to_canonical
from parity.conversion.layouts.canonical import shapes_in
from parity.conversion.layouts.detection import DoesNotFit
from parity.core.weights import Weights
from parity.models.config import values_of
from parity.models.specs import ModelLayer, known_parts, sections_named, sections_of, specs_of, why_unknown

OBSERVE = "parity.identify finds what a live layer computes without rules of its family"


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
        What it computes, by the configuration alone; and its weights by their canonical names, (out, in). The last
        layer of GPT-NeoX-Japanese includes the bias of the output, which its module returns for the caller to add.

    Raises:
        OSError: if there is no such folder.
        TypeError: if the number of the layer is not known.
        ValueError: if the configuration is not understood, has no such layer, the module holds other weights than
            that layer or has other heads, or it computes with a weight that another module holds.
    """
    values = values_of(config)
    index = getattr(module, "layer_idx", None) if layer_idx is None else layer_idx
    if isinstance(index, bool) or not isinstance(index, int):
        raise WrongType("layer_idx", "be the number of a layer", layer_idx=index)
    parts = _parts_of(module, values)
    named = sections_named(path or "", sections_of(values))
    layers = [layer for name, part in parts.items() if not named or name in named for layer in specs_of(part)]
    of_index = [layer for layer in layers if layer.index == index and (path is None or layer.is_at(path))]
    tensors = module.state_dict()
    found: dict[AttentionSpec, Weights] = {}
    refusals = [f"the model has no layer {index}{'' if path is None else f' at {path}'}"] if not of_index else []
    for layer in of_index:
        if layer.spec is None:
            refusals.append(f"layer {index} is {layer.kind}, which is not attention over keys")
        elif (count := _num_heads(module)) not in (None, layer.spec.num_heads):
            refusals.append(f"{count} heads where layer {index} has {layer.spec.num_heads}")
        else:
            try:
                found[layer.spec], _ = to_canonical(tensors, LAYOUTS[layer.layout], spec=layer.spec)
            except DoesNotFit as error:
                _check_borrowed(tensors, layer, path)
                refusals.append(str(error))
    if len(found) != 1:
        which = "; path=… tells which" if found else ""
        reasons = [str(spec) for spec in found] if found else refusals
        raise Refusal("module", "be one layer of the model", f"{' or '.join(reasons)}{which}", hint=OBSERVE)
    return next(iter(found.items()))


def _parts_of(module: Any, values: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The configurations of the parts that a module may belong to, by their keys.

    A module of transformers keeps the configuration of its own part.

    Raises:
        ValueError: if that part is of an unknown family.
    """
    parts = known_parts(values) or {"": values}
    own = getattr(getattr(module, "config", None), "model_type", None)
    names = [name for name in sections_of(values) if own and values[name].get("model_type") == own]
    if names and parts.keys().isdisjoint(names):
        unknown = f"one of {names[0]}: {why_unknown(values[names[0]])}"
        raise Refusal("module", "be of a part of a known family", unknown, hint=OBSERVE)
    return {name: part for name, part in parts.items() if not names or name in names}


def _check_borrowed(tensors: Mapping[str, Any], layer: ModelLayer, path: str | None) -> None:
    """Refuse a module that computes with a weight of another module, as T5's blocks after the first.

    Raises:
        ValueError: if the tensors are those of the layer but for such a weight.
    """
    borrowed = layer.shared.keys() - tensors.keys()
    wanted = shapes_in(LAYOUTS[layer.layout], layer.spec) if borrowed and layer.spec is not None else {}
    own = {name: shape for name, shape in wanted.items() if name not in borrowed}
    if borrowed and own == {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        which = "" if path else ", unless path=… names another layer"
        raise Refusal(
            "module",
            "hold all that it computes with",
            f"none of {layer.shared[min(borrowed)]}, which {layer.path} uses{which}",
            hint="parity.load reads such a layer from the files of the model",
        )


HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
"""Attributes with the number of query heads in modules of transformers."""


def _num_heads(module: Any) -> int | None:
    """The number of query heads that a module says it has, or None."""
    for each in module.modules():
        for name in HEAD_COUNTS:
            if type(count := getattr(each, name, None)) is int:
                return count
    return None
