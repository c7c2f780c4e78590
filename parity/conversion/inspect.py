"""Find every attention layer in a file, in every layout that fits."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Unpack

from parity.conversion.hints import CALLER, LayerHints, LayerKeywords
from parity.conversion.layers import TensorCache, key_in_words, layers_under
from parity.conversion.layouts import LAYOUTS
from parity.conversion.layouts.detection import DoesNotFit, HeadsDoNotFit
from parity.conversion.metadata import file_hints
from parity.conversion.prefixes import names_under, numbered, possible_prefixes
from parity.conversion.ranks import open_checkpoint
from parity.files import TensorFile


def count_tensors(path: str | os.PathLike[str]) -> int:
    """Count the tensors of a file, which is about the number that its conversion writes."""
    with open_checkpoint(path) as file:
        return len(file.infos)


@dataclass(frozen=True)
class Found:
    """Attention layers of one kind in a file.

    Attributes:
        prefix: prefix of their tensor names; `{i}` stands for numbers.
        layers: number of layers.
        layout: name of a layout that fits.
        heads: their heads, if the shapes or another file determine them; otherwise why they are unknown.
        dtype: dtype of their tensors.
        is_stacked: whether they are stacked on a leading axis.
        packing: order of heads in packed tensors, which shapes do not show.
        unread: attention keys next to the file that no specification contains, with their values.
    """

    prefix: str
    layers: int
    layout: str
    heads: str
    dtype: str
    is_stacked: bool = False
    packing: str = ""
    unread: tuple[str, ...] = ()


def find_layers(file: TensorFile, **keywords: Unpack[LayerKeywords]) -> list[Found]:
    """Find every attention layer in an open file, in every layout that fits its names.

    If no layout fits with the given heads, return those that fit with other heads.
    """
    known = file_hints(file, LayerHints.by(CALLER, **keywords))
    found: list[Found] = []
    of_other_heads: list[Found] = []
    for layout in LAYOUTS.values():
        prefixes = possible_prefixes(file.infos, layout)
        alike: dict[Any, list[str]] = {}  # layers with one pattern and equal shapes: one of each is examined
        for concrete, names in names_under(file.infos, prefixes).items():
            of_model = known.model.layer_at(concrete)
            if of_model is None or of_model.layout == layout.name:
                infos = ((name[len(concrete) :], file.infos[name]) for name in names)
                kind = tuple(sorted((name, info.shape, info.dtype.name) for name, info in infos))
                alike.setdefault((numbered(concrete), kind), []).append(concrete)
        for (prefix, _), members in alike.items():
            first = members[0]
            is_stacked, size, among, unread = False, 1, found, known.unread
            try:
                layers = layers_under(TensorCache(file), first, layout, known)
                is_stacked, size, spec = layers[0].index is not None, len(layers), layers[0].spec
                hints, unread = layers[0].hints, layers[0].hints.unread
                words = f"{spec.num_heads} x {spec.head_dim}, key/value {spec.num_kv_heads}"
                words += f" ({hints.from_model})" if hints.from_model else ""
            except ValueError as error:
                of_model = known.model.layer_at(first)
                if type(error) is DoesNotFit and (of_model is None or of_model.spec is None):
                    continue  # report the reason only for layers in the configuration
                among = of_other_heads if isinstance(error, HeadsDoNotFit) else found
                words = str(error).removeprefix(f"{first or file.path}: ")
                with suppress(ValueError):  # its configuration may itself be the reason
                    unread = known.without_heads_of_model(first).unread
            dtype, count = file.infos[prefixes[first]].dtype.name, len(members) * size
            keys = tuple(key_in_words(*each) for each in unread.items())
            among.append(Found(prefix, count, layout.name, words, dtype, is_stacked, layout.packing, keys))
    fitting = {each.prefix for each in found}
    return found + [each for each in of_other_heads if each.prefix not in fitting]
