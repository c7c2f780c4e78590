"""Weights that several layers share, such as T5's table of relative positions.

In T5 the first block of a stack holds the table that all its blocks add; in MPNet the encoder holds
it, outside of its layers. Modules of this project hold a copy each. So that a conversion back
writes the table once, as transformers does, our files record the *holder* of each shared weight:
`LABEL.WEIGHT`, with the canonical name of the weight, if a layer holds it, otherwise the full name
of the tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from parity.port.conversion.layouts import LAYOUTS, Layout
from parity.port.conversion.model_config import ModelHints
from parity.port.conversion.prefixes import join


def holders_in_model(prefix: str, model: ModelHints) -> dict[str, str]:
    """Return the weights that the layer under a prefix shares in its model, by canonical name, with
    their holders.
    """
    layer = model.layer_at(prefix)
    if layer is None or not layer.shared:
        return {}
    weights = {tensor.name: tensor.holds for tensor in LAYOUTS[layer.layout].others}
    before_path = prefix.removesuffix(layer.path)
    holders: dict[str, str] = {}
    for short, path in layer.shared.items():
        name = f"{before_path}{path}"
        label = name.removesuffix(f".{short}")
        if label == prefix:  # this layer is the holder
            continue
        weight = weights[short]
        # A path that ends with the name of the tensor is of a layer, or of another module.
        if label != name and model.attention_at(label) is not None:
            holders[weight] = join(label, weight)
        else:
            holders[weight] = name
    return holders


def label_of_holder(holder: str, weight: str) -> str | None:
    """Return the label of the layer that a holder names; None if it names a tensor outside of the
    layers.
    """
    label = holder.removesuffix(f".{weight}")
    if label == holder:
        return None
    return label


def name_in_file(holder: str, weight: str, layout: Layout, names: Collection[str]) -> str | None:
    """Return the full name of a shared weight's tensor in a file; None if the file does not have
    it.
    """
    name = holder
    label = label_of_holder(holder, weight)
    short = layout.name_of(weight)
    if label is not None and short is not None:
        name = join(label, short)
    if name not in names:
        return None
    return name


def renamed(holders: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Return holders with the labels that their layers have in another file; others are
    unchanged.
    """
    new_holders: dict[str, str] = {}
    for weight, holder in holders.items():
        label = label_of_holder(holder, weight)
        if label is not None and label in labels:
            holder = join(labels[label], weight)
        new_holders[weight] = holder
    return new_holders
