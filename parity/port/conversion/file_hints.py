"""Hints about the layers of a file apart from their tensors: all sources in one order.

The sources, those that take precedence first:

1. the caller: arguments and options;
2. the file's own metadata, if mha-parity wrote it;
3. the configuration of the model, a config.json or the keys of a GGUF file, only without 2;
4. the names and shapes of tensors, for all other questions: `layouts.detection`.

`FileHints.at` has this order for heads, RoPE and specifications, `locations_of_layers` for prefixes
and layouts. docs/reference/conversion.md shows it as a table.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mha_spec import InputError
from parity.measure.files import TensorFile
from parity.port.conversion.hints import LayerHints, merge
from parity.port.conversion.layouts import LAYOUTS, Layout, find_layout, register_packages
from parity.port.conversion.layouts.layout import DROPPABLE, GRID_BIAS
from parity.port.conversion.metadata import OwnMetadata
from parity.port.conversion.model_config import ModelHints
from parity.port.conversion.prefixes import (
    ENTRY,
    all_prefixes,
    concrete_prefix,
    fitting_prefixes,
    numbered,
)
from parity.port.conversion.sharing import holders_in_model, name_in_file


@dataclass(frozen=True)
class FileHints:
    """Everything known of the layers of a file, in addition to their names and shapes.

    Attributes:
        caller: hints of the caller, about every layer.
        own: the file's own metadata, without what the caller replaces.
        model: the configuration of the model; empty if the caller or the file's own metadata
            specify the layers.
        dropped: features that the file lost, or that the caller drops while it is read.
        ignored: names (with wildcards) under the prefix of a layer that are not its weights.
    """

    caller: LayerHints = field(default_factory=LayerHints)
    own: OwnMetadata = field(default_factory=OwnMetadata)
    model: ModelHints = field(default_factory=ModelHints)
    dropped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def at(self, label: str) -> LayerHints:
        """Return the merged hints about the layer with a label.

        Raises:
            ValueError: if sources contradict each other.
        """
        if self.caller.spec is not None:
            return self.caller
        if self.own.specs:
            return merge(label, [self.caller, self.own.hints_at(label)])
        return merge(label, [self.caller, self.model.hints_at(label)])

    def without_heads_of_model(self, label: str) -> LayerHints:
        """Return the hints without heads from a configuration, which may describe other layers, or
        another model.

        RoPE from the configuration then counts as unread.
        """
        hints = self.at(label)
        if not self.model.origin:
            return hints
        unread = hints.unread
        if self.caller.rope is None and hints.rope is not None:
            unread = {**unread, "rope_theta": hints.rope.theta}
        return replace(self.caller, unread=unread, overridden=hints.overridden)

    def holders_at(self, label: str, layout: Layout, names: Collection[str]) -> Mapping[str, str]:
        """Return the weights that the layer with a label shares, by canonical name, each with its
        holder.

        By the rules of a family a layer may also have its own, as in BEiT: it shares only what the
        file has once.

        Args:
            label: label of the layer.
            layout: its layout.
            names: names of the tensors of the file.
        """
        if label in self.own.shared:
            return self.own.shared[label]
        holders: dict[str, str] = {}
        for weight, holder in holders_in_model(label, self.model).items():
            if name_in_file(holder, weight, layout, names) is not None:
                holders[weight] = holder
        return holders

    def missing(self, labels: Iterable[str], names: Collection[str]) -> list[str]:
        """List the paths of attention layers without a tensor, in the parts of the model that found
        layers belong to.

        A stack, which is one array for all layers, cannot miss any.

        Args:
            labels: labels of the layers that were found.
            names: names of the tensors of the file.
        """
        prefixes = all_prefixes(names)
        missing: list[str] = []
        for label in self.own.specs_by_label:
            prefix_of_stack = label.partition("[")[0]
            if prefix_of_stack not in prefixes:
                missing.append(label)
        # Layers are distinguished by identity, because layers of two parts may be equal.
        model = self.model
        read_layers: set[int] = set()
        for label in labels:
            if not ENTRY.fullmatch(label):
                read_layers.add(id(model.layer_at(label)))
        read_parts: set[str] = set()
        for section, layers in model.parts.items():
            if any(id(layer) in read_layers for layer in layers):
                read_parts.add(section)
        in_file = {id(model.layer_at(prefix)) for prefix in prefixes}
        for path, by_section in model.paths.items():
            for section, layer in by_section.items():
                is_of_stack = path != layer.path
                if section not in read_parts or layer.spec is None or is_of_stack:
                    continue
                if id(layer) not in in_file:
                    missing.append(f"{path} of {section}" if len(model.parts) > 1 else path)
        return missing

    def is_other(self, prefix: str) -> bool:
        """Return whether a prefix belongs to no attention layer of the model, or of a file of
        ours.
        """
        specs = self.own.specs_by_label
        if specs:
            return prefix not in specs and f"{prefix}[0]" not in specs
        # Extra layers after the last one of the configuration may predict further tokens.
        return self.model.attention_at(prefix) is None

    def check_droppable(self, drop: Collection[str]) -> None:
        """Reject names of features that neither a layout nor a configuration can lose."""
        keys = {*self.own.unread, *self.model.plain.unread, *self.model.unread_of_known}
        unknown = {*drop} - {*DROPPABLE} - keys - {"rope_theta"}
        if unknown:
            rule = f"consist of names from {', '.join(DROPPABLE)}"
            raise InputError("drop", rule, drop=", ".join(sorted(unknown)))

    def without_grid_biases(self, names: Iterable[str], layouts: Iterable[Layout]) -> FileHints:
        """Return the hints without biases on a grid, if the file has such biases."""
        patterns: dict[str, None] = {}
        for layout in layouts:
            patterns.update(dict.fromkeys(layout.grid_biases))
        for name in names:
            if any(fnmatch.fnmatchcase(name, f"*{pattern}") for pattern in patterns):
                break
        else:
            return self
        dropped = dict.fromkeys((*self.dropped, GRID_BIAS))
        return replace(self, ignored=(*self.ignored, *patterns), dropped=tuple(dropped))


# ---- Prefixes and layouts of layers --------------------------------------------------------------


class LayerLocation(NamedTuple):
    """The location of similar layers in a file.

    Attributes:
        prefix: prefix of their tensors, with `{i}` for numbers.
        layout: their layout.
    """

    prefix: str
    layout: Layout


NOT_LISTED = (
    "no layout fits its names: describe them in a table, which --layout passes, as "
    "docs/how-to/own-layouts.md shows under 'A table for a file'"
)
"""Advice for a file in a layout that is not in `LAYOUTS`."""


def locations_of_layers(
    file: TensorFile, hints: FileHints, prefix: str | None, layout: str | None, argument: str
) -> list[LayerLocation]:
    """Return the locations of a file's layers, by the caller, the file's own metadata, or the
    model.

    Args:
        file: the open file.
        hints: what is known of its layers.
        prefix, layout: those that the caller requests; None if the file or the model decides.
        argument: name of the layout argument in messages.

    Raises:
        ValueError: if a layout is unknown, or no layer has it.
    """
    prefixes = _requested_prefixes(hints, prefix)
    if prefixes is None and layout is not None and find_layout(layout, argument).prefix:
        prefixes = [find_layout(layout, argument).prefix]
    if prefixes is None:
        of_model = _prefixes_in_model(file, hints.model)
        if of_model and not layout:
            return [LayerLocation(pattern, LAYOUTS[name]) for pattern, name in of_model.items()]
        prefixes = list(of_model) or [""]
    layout = layout or hints.own.layout
    if layout:
        one_layout = find_layout(layout, argument)
        return [LayerLocation(pattern, one_layout) for pattern in prefixes]
    locations: list[LayerLocation] = []
    for pattern in prefixes:
        name = _layout_in_model(file, hints.model, pattern)
        if not name:
            raise _unknown_layout(file, hints.model, argument)
        locations.append(LayerLocation(pattern, LAYOUTS[name]))
    return locations


def _requested_prefixes(hints: FileHints, prefix: str | None) -> list[str] | None:
    """Return the prefixes that the caller or the file's own metadata name; None if neither does."""
    own = hints.own
    if prefix is not None:
        return [prefix]
    if own.specs_by_label:
        patterns: dict[str, None] = {}
        for label in own.specs_by_label:
            prefix_of_stack = label.partition("[")[0]
            patterns[numbered(prefix_of_stack)] = None
        return list(patterns)
    if own.prefix is not None:
        return [own.prefix]
    return None


def _prefixes_in_model(file: TensorFile, model: ModelHints) -> dict[str, str]:
    """Return the prefixes of a model's attention layers in a file, each with its layout; reject
    duplicates.
    """
    layouts: dict[str, str] = {}
    first_prefixes: dict[int, str] = {}  # by the identity of a layer of the model
    for prefix in all_prefixes(file.infos):
        layer = model.attention_at(prefix)
        if layer is None:
            continue
        layouts.setdefault(numbered(prefix), layer.layout)
        first = first_prefixes.setdefault(id(layer), prefix)
        if first != prefix:
            remedy = [{"prefix": numbered(first)}, {"prefix": numbered(prefix)}]
            raise InputError(
                "prefix",
                f"select the layers of {file.path} that config.json describes",
                remedy=remedy,
            )
    return layouts


def _layout_in_model(file: TensorFile, model: ModelHints, prefix: str) -> str:
    """Return the layout of the model's attention layers under a prefix; empty if there are none."""
    examined: set[str] = set()
    for name in file.infos:
        match = concrete_prefix(prefix, name)
        if match is None or match[0] in examined:
            continue
        examined.add(match[0])
        layer = model.attention_at(match[0])
        if layer is not None:
            return layer.layout
    return ""


def _unknown_layout(file: TensorFile, model: ModelHints, argument: str) -> InputError:
    """Return the error for layers of an unknown layout; it lists the layouts that fit."""
    shapes = {name: info.shape for name, info in file.infos.items()}
    fitting: list[LayerLocation] = []
    for layout in LAYOUTS.values():
        fitting += [LayerLocation(prefix, layout) for prefix in fitting_prefixes(shapes, layout)]
    if not fitting:
        # Packages are imported for their layouts only if no other fits.
        for layout in register_packages():
            fitting += [
                LayerLocation(prefix, layout) for prefix in fitting_prefixes(shapes, layout)
            ]
    remedy: list[dict[str, Any]] = []
    packings: dict[str, str] = {}
    for prefix, layout in fitting:
        remedy.append({argument: layout.name, "prefix": prefix})
        packings[layout.name] = layout.packing
    hint = ["fits" if fitting else NOT_LISTED]
    if len({*packings.values()}) > 1:
        hint.append("shapes do not show the order of packed heads")
        hint += [f"{name} is {packing}" for name, packing in packings.items() if packing]
    if model.why_unknown:
        hint.append(model.why_unknown)
    return InputError(
        argument,
        "be passed",
        statement=f"{file.path} does not record its layout",
        remedy=remedy,
        hint="; ".join(hint),
    )
