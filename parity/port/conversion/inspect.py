"""Find every attention layer in a file, in every layout that fits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np

from parity.measure.files import TensorFile
from parity.port.conversion.hints import CALLER, LayerHints, LayerKeywords
from parity.port.conversion.layers import TensorCache, key_in_words, layers_under
from parity.port.conversion.layouts import LAYOUTS, Layout, register_packages
from parity.port.conversion.layouts.detection import HeadsMismatchError, LayoutMismatchError
from parity.port.conversion.metadata import FileHints, file_hints
from parity.port.conversion.prefixes import numbered
from parity.port.conversion.ranks import open_checkpoint


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
        heads: their heads, if the shapes or another file determine them; otherwise why they are
            unknown.
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
    cache, depend_on_names = TensorCache(file), _depend_on_names(known)
    found: list[Found] = []
    of_other_heads: list[Found] = []
    candidates: dict[str, _Candidate] = {}
    for layout in LAYOUTS.values():
        prefixes = cache.names.possible_prefixes(layout)
        # Layers with one pattern and equal shapes: one of each is examined.
        alike: dict[tuple[str, Kind], list[str]] = {}
        for concrete in prefixes:
            if concrete not in candidates:
                of_model = known.model.layer_at(concrete)
                own_layout = None if of_model is None else of_model.layout
                candidates[concrete] = _Candidate(
                    numbered(concrete), _kind_of(cache, concrete), own_layout
                )
            candidate = candidates[concrete]
            if candidate.layout in (None, layout.name):
                alike.setdefault((candidate.pattern, candidate.kind), []).append(concrete)
        examined: dict[Kind, _Examined | None] = {}
        for (prefix, kind), members in alike.items():
            first = members[0]
            if kind not in examined or depend_on_names:
                examined[kind] = _examine(cache, first, layout, known)
            result = examined[kind]
            if result is None:
                continue
            dtype, count = file.infos[prefixes[first]].dtype.name, len(members) * result.size
            keys = tuple(key_in_words(*each) for each in result.unread.items())
            layers = Found(
                prefix,
                count,
                layout.name,
                result.words,
                dtype,
                result.is_stacked,
                layout.packing,
                keys,
            )
            (of_other_heads if result.has_other_heads else found).append(layers)
    # Packages are imported for their layouts only if no other fits. A second call returns none.
    if not found and not of_other_heads and register_packages():
        return find_layers(file, **keywords)
    fitting = {each.prefix for each in found}
    return found + [each for each in of_other_heads if each.prefix not in fitting]


Kind = tuple[tuple[str, tuple[int, ...], np.dtype], ...]
"""The names after a layer's prefix, shapes and dtypes of its tensors."""


class _Candidate(NamedTuple):
    """A prefix that may be one of a layer: its pattern, its tensors, and its layout by the model's
    configuration.
    """

    pattern: str
    kind: Kind
    layout: str | None


class _Examined(NamedTuple):
    """A layer that fits a layout, or the reason why its heads are unknown."""

    words: str
    size: int = 1
    is_stacked: bool = False
    unread: Mapping[str, Any] = {}
    has_other_heads: bool = False


def _kind_of(file: TensorCache, prefix: str) -> Kind:
    kinds = []
    for name in sorted(file.names.under(prefix)):
        info = file.infos[name]
        kinds.append((name[len(prefix) :], info.shape, info.dtype))
    return tuple(kinds)


def _depend_on_names(known: FileHints) -> bool:
    """Return whether hints differ by the names of layers, so that layers of equal shapes may
    differ.
    """
    return bool(known.specs or known.model.paths or known.model.sections)


def _examine(file: TensorCache, prefix: str, layout: Layout, known: FileHints) -> _Examined | None:
    """Return what is known of the layer under a prefix; None if it does not fit the layout."""
    try:
        layers = layers_under(file, prefix, layout, known)
    except ValueError as error:
        of_model = known.model.layer_at(prefix)
        if type(error) is LayoutMismatchError and (of_model is None or of_model.spec is None):
            return None  # report the reason only for layers in the configuration
        words = str(error).removeprefix(f"{prefix or file.path}: ")
        unread = known.unread
        with suppress(ValueError):  # its configuration may itself be the reason
            unread = known.without_heads_of_model(prefix).unread
        return _Examined(
            words, unread=unread, has_other_heads=isinstance(error, HeadsMismatchError)
        )
    hints, spec = layers[0].hints, layers[0].spec
    words = f"{spec.num_heads} x {spec.head_dim}, key/value {spec.num_kv_heads}"
    words += f" ({hints.from_model})" if hints.from_model else ""
    return _Examined(words, len(layers), layers[0].index is not None, hints.unread)
