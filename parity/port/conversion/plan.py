"""The plan of a conversion, which lists the tensors of the target and their sources, and the
records of both.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.measure.core.records import JsonRecord
from parity.measure.files import FileTensor
from parity.port.conversion.hints import COUNTS, METADATA
from parity.port.conversion.layers import FileLayer, TensorCache
from parity.port.conversion.layouts import Layout
from parity.port.conversion.layouts.detection import placement_for
from parity.port.conversion.layouts.layout import CARRIED, lost_in
from parity.port.conversion.layouts.placement import Placement
from parity.port.conversion.metadata import metadata_of
from parity.port.conversion.prefixes import concrete_prefix, join
from parity.port.conversion.sharing import label_of_holder, name_in_file, renamed
from parity.port.conversion.verify import same_array


@dataclass(frozen=True)
class PlannedLayer(JsonRecord):
    """A layer to convert.

    Attributes:
        label, to: its prefix in the source and in the target, with its index if it is in a stack.
        layout: its layout in the source.
        layout_from: source of the layout: the caller, the file's metadata, `config.json` or `GGUF`.
        spec: its specification.
        hints: source of each head count and each non-default field: one of those, or the shapes.
    """

    label: str
    to: str
    layout: str
    layout_from: str
    spec: AttentionSpec
    hints: dict[str, str]


@dataclass(frozen=True)
class ConversionPlan(JsonRecord):
    """Record of a conversion that `convert_file` would write.

    Attributes:
        layers: layers to convert.
        tensors: names in the target, each with the names of its sources.
        size: total bytes of the target's tensors.
        left_out: features of layers that the target loses.
    """

    layers: list[PlannedLayer]
    tensors: dict[str, list[str]]
    size: int
    left_out: list[str]


@dataclass(frozen=True)
class Converted(JsonRecord):
    """Record of a conversion by `convert_file`.

    Attributes:
        source: name of the layers' layout in the source.
        layers: prefixes of the converted layers; those of a stack have an index in brackets.
        spec: their specification, if all have the same.
        kept, dropped: names of the other tensors.
        heads_from: the file that specified the heads, if it was neither the caller nor the source
            itself.
        left_out: names of entries that are not tensors, such as numbers and text, and are not in
            the target.
        unconverted: prefixes of other layers in the source's layout, which were copied unchanged.
        optimizer_state: names of optimizer tensors for the layers, which are in the target in the
            old layout.
        not_carried: attention settings of the source that are not read; if one concerns RoPE, the
            specification has no RoPE.
        path: the written file, or the index of its shards.
        missing: paths of attention layers that the model's configuration requires and the file
            lacks, with the part if the model has several.
        `dequantised`: names of quantized source tensors, which were written as the values that they
            represent.
        joined: names of norms over the width of all heads in rank files. Each rank has its own
            weights, but their mean squares must be computed over all ranks.
        metadata_left_out: names in the metadata of the source whose values are not in the target's.
        plan: the plan, if `dry_run` was set.
    """

    source: str
    layers: list[str]
    spec: AttentionSpec | None
    kept: list[str]
    dropped: list[str]
    heads_from: str = ""
    left_out: list[str] = field(default_factory=list)
    unconverted: list[str] = field(default_factory=list)
    optimizer_state: list[str] = field(default_factory=list)
    not_carried: list[str] = field(default_factory=list)
    path: str = ""
    missing: list[str] = field(default_factory=list)
    dequantised: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    metadata_left_out: list[str] = field(default_factory=list)
    plan: ConversionPlan | None = None


# ---- Planning ------------------------------------------------------------------------------------


class PlannedTensor(NamedTuple):
    """A tensor of a target.

    Attributes:
        shape, dtype: of the tensor.
        make: function that returns the tensor, called when it is written.
        sources: function that returns the names of its source tensors.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray | FileTensor]
    sources: Callable[[], list[str]]


@dataclass(frozen=True)
class Plan:
    """The tensors of a target, in order.

    Attributes:
        path: path of the target.
        layout: layout of its layers.
        layers: layers under each prefix of the target.
        stacked: prefixes under which they are stacked.
        tensors: tensors by name.
        holders: weights that layers share, by label in the target and canonical name, each with its
            holder.
        held_elsewhere: names of tensors that are not written, because the holder of their weight
            has them.
    """

    path: str | os.PathLike[str]
    layout: Layout
    layers: dict[str, list[FileLayer]] = field(default_factory=dict)
    stacked: set[str] = field(default_factory=set)
    tensors: dict[str, PlannedTensor] = field(default_factory=dict)
    holders: dict[str, dict[str, str]] = field(default_factory=dict)
    held_elsewhere: set[str] = field(default_factory=set)

    def take(self, layers: dict[str, list[FileLayer]], is_stacked: bool) -> None:
        """Add layers under prefixes of the target."""
        self.layers.update(layers)
        self.stacked.update(layers if is_stacked else ())

    def fill(self, file: TensorCache, *, keep_rest: bool) -> list[str]:
        """Add all tensors, in the order of the source; return the names of tensors that belong to
        no layer.

        A layer is added with the first of its tensors. Every use of a tensor is added at once, so
        that a stack is read only once.

        Raises:
            ValueError: if two tensors have the same name, or the target has one tensor for copies
                that differ.
        """
        self._find_holders(file, keep_rest=keep_rest)
        rest, added = [], set()
        for name, info in file.infos.items():
            new = [prefix for prefix in self._prefixes_of.get(name, ()) if prefix not in added]
            added.update(new)
            self._add_layers(new)
            if name not in self._own:
                rest.append(name)
                if keep_rest:
                    make, sources = partial(file.tensor, name), partial(list, [name])
                    self._add(name, PlannedTensor(info.shape, info.dtype, make, sources))
        return rest

    @cached_property
    def _own(self) -> set[str]:
        """Return the names of source tensors that belong to exactly one layer and are not
        shared.
        """
        layers = [layer for group in self.layers.values() for layer in group]
        return {
            name
            for layer in layers
            for short, name in layer.sources.items()
            if name == join(layer.prefix, short)
        }

    @cached_property
    def _prefixes_of(self) -> dict[str, dict[str, None]]:
        """Return the prefixes of the target that use each tensor of the source."""
        prefixes: dict[str, dict[str, None]] = {}
        for prefix, group in self.layers.items():
            for name in (name for layer in group for name in layer.sources.values()):
                prefixes.setdefault(name, {})[prefix] = None
        return prefixes

    def _add(self, name: str, tensor: PlannedTensor) -> None:
        if name in self.tensors:
            raise InputError("names", f"differ in {self.path}", f"{name} twice")
        self.tensors[name] = tensor

    def _add_layers(self, prefixes: Iterable[str]) -> None:
        placements = {
            prefix: placement_for(
                [layer.read_written for layer in group], group[0].to_spec, self.layout
            )
            for prefix, group in ((prefix, self.layers[prefix]) for prefix in prefixes)
        }
        for name in dict.fromkeys(name for each in placements.values() for name in each.shapes):
            for prefix, placement in placements.items():
                if name not in placement.shapes or join(prefix, name) in self.held_elsewhere:
                    continue
                group, shape, make = self.layers[prefix], placement.shapes[name], _laid_out
                if prefix in self.stacked:
                    axis = self.layout.stack_axis
                    shape, make = (*shape[:axis], len(group), *shape[axis:]), _stacked
                made = (
                    partial(make, group, name, placement),
                    partial(_sources_of, group, name, placement),
                )
                self._add(join(prefix, name), PlannedTensor(shape, group[0].dtype, *made))

    def _find_holders(self, file: TensorCache, *, keep_rest: bool) -> None:
        """Find the holders of shared weights in the target, and the copies that it does not need.

        Raises:
            ValueError: if a copy is not equal to its holder.
        """
        layers = self.labels
        new_labels = {layer.label: label for label, layer in layers.items()}
        makers: dict[
            str, FileLayer
        ] = {}  # the layer whose copy becomes a tensor outside of the layers
        for label, layer in layers.items():
            holders = renamed(layer.shared, new_labels)
            if not holders:
                continue
            self.holders[label] = holders
            for weight, holder in holders.items():
                if weight not in self.layout.shares or weight not in layer.placement.weights:
                    continue
                if (
                    label not in self.layers
                ):  # an entry of a stack, which is one array with an entry for each layer
                    continue
                holder_label = label_of_holder(holder, weight)
                kept_name = (
                    name_in_file(holder, weight, self.layout, file.infos) if keep_rest else None
                )
                if holder_label in layers:
                    held = layers[holder_label].read(weight)
                elif kept_name is not None:
                    held = file.read_finite(kept_name)
                elif holder_label is None:
                    maker = makers.setdefault(holder, layer)
                    held = maker.read(weight)
                else:
                    continue  # the target has no holder, so the layer keeps its copy
                if not same_array(layer.read(weight), held):
                    rule = f"equal {holder}, because layers in {self.layout.name} share one"
                    raise InputError(f"{weight} of {label}", rule, "a copy that differs")
                self.held_elsewhere.add(join(label, str(self.layout.name_of(weight))))
        for holder, layer in makers.items():
            ((weight, _),) = [item for item in layer.shared.items() if item[1] == holder]
            make = partial(layer.read, weight)
            sources = partial(list, [layer.sources[str(layer.layout.name_of(weight))]])
            self._add(
                holder, PlannedTensor(layer.placement.weights[weight], layer.dtype, make, sources)
            )

    @property
    def labels(self) -> dict[str, FileLayer]:
        """Return the layers by their labels in the target."""
        return {
            f"{prefix}[{index}]" if prefix in self.stacked else prefix: layer
            for prefix, group in self.layers.items()
            for index, layer in enumerate(group)
        }

    @property
    def specs(self) -> dict[str, AttentionSpec]:
        """Return the layers' specifications in the target, by label."""
        return {label: layer.to_spec for label, layer in self.labels.items()}

    def metadata(
        self,
        prefix: str | None,
        kept: Collection[str],
        ignored: Collection[str],
        unread: Mapping[str, Any],
        drop: Collection[str],
    ) -> dict[str, str]:
        """Return the metadata to write with the tensors.

        Args:
            prefix: common prefix of the layers; None if there are several.
            kept: names of the other tensors.
            ignored, unread: as in `metadata_of`.
            drop: features that may be left out.
        """
        lost = set() if {*CARRIED} <= {*self.layout.carries} else {*unread} & {*drop}
        for layer in self.labels.values():
            lost |= {*layer.dropped} | (
                lost_in(self.layout, layer.spec).keys() - lost_in(self.layout, layer.to_spec).keys()
            )
        under = [concrete_prefix(prefix or "", name) for name in kept]
        has_others = any(at is not None and at[0] not in self.layers for at in under)
        ignored = ignored if kept else ()
        known = lost, ignored, unread, self.holders
        return metadata_of(self.layout, self.specs, prefix, *known, has_others=has_others)

    def record(self, layout_from: str, metadata: Mapping[str, str]) -> ConversionPlan:
        """Return the plan as a record; `layout_from` is CALLER if the caller specified the
        layout.
        """
        return ConversionPlan(
            layers=[
                _layer_record(layer, label, layout_from) for label, layer in self.labels.items()
            ],
            tensors={name: tensor.sources() for name, tensor in self.tensors.items()},
            size=sum(
                math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors.values()
            ),
            left_out=json.loads(metadata.get("dropped", "[]")),
        )


def _layer_record(layer: FileLayer, to: str, layout_from: str) -> PlannedLayer:
    is_of_model = layer.model is not None and layer.model.layout == layer.layout.name
    layout_from = layout_from or (layer.known.model.origin if is_of_model else METADATA)
    counts = {name: getattr(layer.spec, name) for name in COUNTS}
    plain = AttentionSpec(layer.spec.d_model, **counts).values()
    values = {
        name: value
        for name, value in layer.spec.values().items()
        if name in COUNTS or value != plain[name]
    }
    hints = {name: layer.hints.origin_of(name) for name in values}
    return PlannedLayer(layer.label, to, layer.layout.name, layout_from, layer.spec, hints)


def _sources_of(group: list[FileLayer], name: str, placement: Placement) -> list[str]:
    """Return the names of the source tensors of a target tensor."""
    parts = {*placement.holders[name].parts}
    return [
        full
        for layer in group
        for short, full in layer.sources.items()
        if short in layer.placement.holders and parts & {*layer.placement.holders[short].parts}
    ]


def _laid_out(group: list[FileLayer], name: str, placement: Placement) -> np.ndarray:
    """Return a tensor of the target, for one layer."""
    return placement.lay_out(name, group[0].read_written)


def _stacked(group: list[FileLayer], name: str, placement: Placement) -> np.ndarray:
    """Return a tensor of the target, for all layers of a stack."""
    shape, axis = placement.shapes[name], placement.layout.stack_axis
    tensor = np.empty((*shape[:axis], len(group), *shape[axis:]), group[0].dtype)
    layers = np.moveaxis(tensor, axis, 0)  # a view
    for index, layer in enumerate(group):
        layers[index] = placement.lay_out(name, layer.read_written)
    return tensor
