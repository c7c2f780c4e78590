"""What is in a file: every attention layer, in every layout that fits."""

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
    """How many tensors a file holds: about as many as its conversion writes."""
    with open_checkpoint(path) as file:
        return len(file.infos)


@dataclass(frozen=True)
class Found:
    """Attention layers of one kind in a file.

    Attributes:
        prefix: what their names begin with, `{i}` standing for numbers.
        layers: how many there are.
        layout: name of a layout that fits.
        heads: the heads, if the shapes or another file determine them, or why not.
        dtype: of their tensors.
        is_stacked: they are one array on a leading axis.
        packing: the order of heads in packed tensors, which no shape shows.
        unread: keys about attention beside the file that are in no specification, with their values.
    """

    prefix: str
    layers: int
    layout: str
    heads: str
    dtype: str
    is_stacked: bool = False
    packing: str = ""
    unread: tuple[str, ...] = ()


def find_layers(file: TensorFile, **said: Unpack[LayerKeywords]) -> list[Found]:
    """Every attention layer in a file, in every layout that fits its names.

    Where none fits with the heads that are given, those that would with others.

    Args:
        file: an open file.
        said: of the layers, as far as they are known.
    """
    found, known = [], file_hints(file, LayerHints.by(CALLER, **said))
    of_other_heads: list[Found] = []
    for layout in LAYOUTS.values():
        groups: dict[str, list[str]] = {}
        prefixes = possible_prefixes(file.infos, layout)
        for concrete in prefixes:
            groups.setdefault(numbered(concrete), []).append(concrete)
        under = names_under(file.infos, prefixes)
        for prefix, members in groups.items():
            alike: dict[Any, list[str]] = {}  # layers of the same shapes, of which one is looked at
            for concrete in members:
                of_model, begin = known.model.layer_at(concrete), f"{concrete}." if concrete else ""
                if of_model is not None and of_model.layout != layout.name:
                    continue
                infos = {name.removeprefix(begin): file.infos[name] for name in under[concrete]}
                kind = tuple(sorted((name, info.shape, info.dtype.name) for name, info in infos.items()))
                alike.setdefault(kind, []).append(concrete)
            for first, *others in alike.values():
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
                        continue  # of a layer that a configuration tells of whoever looks shall know why
                    among = of_other_heads if isinstance(error, HeadsDoNotFit) else found
                    words = str(error).removeprefix(f"{first}: ")
                    with suppress(ValueError):  # what is known of it may be why
                        unread = known.without_heads_of_model(first).unread
                dtype = file.infos[prefixes[first]].dtype.name
                count = (1 + len(others)) * size
                keys = tuple(key_in_words(*each) for each in unread.items())
                among.append(Found(prefix, count, layout.name, words, dtype, is_stacked, layout.packing, keys))
    fitting = {each.prefix for each in found}
    return found + [each for each in of_other_heads if each.prefix not in fitting]
