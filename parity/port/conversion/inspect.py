"""Find every attention layer in a checkpoint, in every layout that fits."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack

import numpy as np

from parity.port.conversion.checkpoint import Checkpoint
from parity.port.conversion.file_hints import FileHints
from parity.port.conversion.hints import CALLER, LayerHints, LayerKeywords
from parity.port.conversion.layers import TensorCache, key_in_words, layers_under
from parity.port.conversion.layouts import LAYOUTS, Layout, register_packages
from parity.port.conversion.layouts.detection import HeadsMismatchError, LayoutMismatchError
from parity.port.conversion.prefixes import numbered


@dataclass(frozen=True)
class InspectedLayers:
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


def find_layers(checkpoint: Checkpoint, **keywords: Unpack[LayerKeywords]) -> list[InspectedLayers]:
    """Find every attention layer in a checkpoint, in every layout that fits its names.

    If no layout fits with the given heads, return those that fit with other heads.
    """
    search = LayerSearch(checkpoint.tensors, checkpoint.hints(LayerHints.by(CALLER, **keywords)))
    for layout in LAYOUTS.values():
        search.examine(layout)
    if not search.fitting and not search.of_other_heads:
        # Packages are imported for their layouts only if no other fits.
        for layout in register_packages():
            search.examine(layout)
    all_layers = list(search.fitting)
    fitting = {layers.prefix for layers in search.fitting}
    for layers in search.of_other_heads:
        if layers.prefix not in fitting:
            all_layers.append(layers)
    return all_layers


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


@dataclass
class LayerSearch:
    """The search for layers in a file, one layout after the other.

    Attributes:
        file: the tensors of the file.
        hints: what is known of its layers.
        fitting: layers that fit a layout.
        of_other_heads: layers that fit a layout with heads other than the given ones.
    """

    file: TensorCache
    hints: FileHints
    fitting: list[InspectedLayers] = field(default_factory=list)
    of_other_heads: list[InspectedLayers] = field(default_factory=list)
    _candidates: dict[str, _Candidate] = field(default_factory=dict)

    def examine(self, layout: Layout) -> None:
        """Add the layers that fit a layout."""
        name_by_prefix = self.file.names.possible_prefixes(layout)
        # Layers with one pattern and equal shapes: one of each is examined.
        alike: dict[tuple[str, Kind], list[str]] = {}
        for prefix in name_by_prefix:
            candidate = self._candidate_at(prefix)
            if candidate.layout in (None, layout.name):
                alike.setdefault((candidate.pattern, candidate.kind), []).append(prefix)
        hints = self.hints
        # If hints differ by the names of layers, layers of equal shapes may differ.
        depends_on_names = bool(
            hints.own.specs_by_label or hints.model.paths or hints.model.sections
        )
        examined: dict[Kind, _Examined | None] = {}
        for (pattern, kind), prefixes in alike.items():
            first = prefixes[0]
            if kind not in examined or depends_on_names:
                examined[kind] = _examine(self.file, first, layout, hints)
            result = examined[kind]
            if result is None:
                continue
            layers = InspectedLayers(
                pattern,
                len(prefixes) * result.size,
                layout.name,
                result.words,
                self.file.infos[name_by_prefix[first]].dtype.name,
                result.is_stacked,
                layout.packing,
                tuple(key_in_words(name, value) for name, value in result.unread.items()),
            )
            if result.has_other_heads:
                self.of_other_heads.append(layers)
            else:
                self.fitting.append(layers)

    def _candidate_at(self, prefix: str) -> _Candidate:
        """Return the candidate under a prefix, which may fit several layouts."""
        if prefix not in self._candidates:
            of_model = self.hints.model.layer_at(prefix)
            layout = None if of_model is None else of_model.layout
            kind = _kind_of(self.file, prefix)
            self._candidates[prefix] = _Candidate(numbered(prefix), kind, layout)
        return self._candidates[prefix]


def _kind_of(file: TensorCache, prefix: str) -> Kind:
    kinds = []
    for name in sorted(file.names.under(prefix)):
        info = file.infos[name]
        kinds.append((name[len(prefix) :], info.shape, info.dtype))
    return tuple(kinds)


def _examine(file: TensorCache, prefix: str, layout: Layout, hints: FileHints) -> _Examined | None:
    """Return what is known of the layer under a prefix; None if it does not fit the layout."""
    try:
        layers = layers_under(file, prefix, layout, hints)
    except ValueError as error:
        of_model = hints.model.layer_at(prefix)
        # The reason is reported only for layers in the configuration.
        if type(error) is LayoutMismatchError and (of_model is None or of_model.spec is None):
            return None
        words = str(error).removeprefix(f"{prefix or file.path}: ")
        unread = hints.own.unread
        with suppress(ValueError):  # its configuration may itself be the reason
            unread = hints.without_heads_of_model(prefix).unread
        return _Examined(
            words, unread=unread, has_other_heads=isinstance(error, HeadsMismatchError)
        )
    layer_hints, spec = layers[0].hints, layers[0].spec
    words = f"{spec.num_heads} x {spec.head_dim}, key/value {spec.num_kv_heads}"
    if layer_hints.from_model:
        words += f" ({layer_hints.from_model})"
    return _Examined(words, len(layers), layers[0].index is not None, layer_hints.unread)
