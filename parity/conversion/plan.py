"""A conversion before it is written: the tensors of a target, how each is made, and the metadata beside them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, Refusal
from parity.conversion.converted import ConversionPlan, PlannedLayer
from parity.conversion.hints import COUNTS, METADATA
from parity.conversion.layers import FileLayer
from parity.conversion.layouts import Layout
from parity.conversion.layouts.layout import CARRIED, Tensor, lost_in, matches, shapes_of
from parity.conversion.layouts.views import form_for
from parity.conversion.metadata import concrete_prefix, metadata_of
from parity.conversion.prefixes import join


@dataclass(frozen=True)
class Plan:
    """The tensors of a target, in their order, and how each is made.

    Attributes:
        path: of the target.
        layout: of its layers.
        layers: those that go under each prefix of the target.
        stacked: the prefixes under which they are stacked.
        infos: shape and dtype of each tensor by name.
        makers: give a tensor when it is written.
        made_of: give the names in the source of what it is made of.
        added: the prefixes whose tensors are among them.
    """

    path: str | os.PathLike[str]
    layout: Layout
    layers: dict[str, list[FileLayer]] = field(default_factory=dict)
    stacked: set[str] = field(default_factory=set)
    infos: dict[str, tuple[tuple[int, ...], np.dtype]] = field(default_factory=dict)
    makers: dict[str, Callable[[], np.ndarray]] = field(default_factory=dict)
    made_of: dict[str, Callable[[], list[str]]] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)

    def take(self, layers: dict[str, list[FileLayer]], is_stacked: bool) -> None:
        """Plan for layers under prefixes of the target."""
        self.layers.update(layers)
        self.stacked.update(layers if is_stacked else ())

    @property
    def specs(self) -> dict[str, AttentionSpec]:
        """Layers to be written, by labels of the target."""
        return {
            f"{prefix}[{index}]" if prefix in self.stacked else prefix: layer.to_spec
            for prefix, group in self.layers.items()
            for index, layer in enumerate(group)
        }

    def metadata(
        self,
        prefix: str | None,
        kept: Collection[str],
        ignored: Collection[str],
        unread: Mapping[str, Any],
        drop: Collection[str],
    ) -> dict[str, str]:
        """Return the metadata to be written beside the tensors.

        Args:
            prefix: of all of them; None where there are several.
            kept: the names of the other tensors.
            ignored: names (with wildcards) under the prefix of a layer in the source that are none of its weights.
            unread: keys about attention that are in no specification, with their values.
            drop: what may be left out.
        """
        layers = [layer for group in self.layers.values() for layer in group]
        lost = {name for layer in layers for name in (*layer.dropped, *_lost(layer, self.layout))}
        lost |= set() if {*CARRIED} <= {*self.layout.carries} else {*unread} & {*drop}
        under = [concrete_prefix(prefix or "", name) for name in kept]
        has_others = any(at is not None and at[0] not in self.layers for at in under)
        ignored = ignored if kept else ()
        return metadata_of(self.layout, self.specs, prefix, lost, ignored, unread, has_others=has_others)

    @cached_property
    def own(self) -> set[str]:
        """The names of tensors in the source that are those of one layer, and not lent to it."""
        layers = [layer for group in self.layers.values() for layer in group]
        return {name for layer in layers for name, short in layer.sources.items() if name == join(layer.prefix, short)}

    @cached_property
    def prefixes_of(self) -> dict[str, list[str]]:
        """By the name of a tensor in the source, the prefixes of the target that it goes under."""
        prefixes: dict[str, dict[str, None]] = {}
        for prefix, group in self.layers.items():
            for name in (name for layer in group for name in layer.sources):
                prefixes.setdefault(name, {})[prefix] = None
        return {name: list(under) for name, under in prefixes.items()}

    def add(self, name: str, shape: tuple[int, ...], dtype: np.dtype, make: Callable[[], np.ndarray]) -> None:
        """Add a tensor.

        Raises:
            ValueError: if there is one of that name.
        """
        if name in self.infos:
            raise Refusal("names", f"differ in {self.path}", f"{name} twice")
        self.infos[name], self.makers[name] = (shape, dtype), make

    def add_layers(self, prefixes: Iterable[str]) -> None:
        """Add the layers that a tensor goes into and that are not there yet.

        They are one, or all of a stack, which then is read once.
        """
        new = [prefix for prefix in prefixes if prefix not in self.added]
        if not new:
            return
        self.added.update(new)
        first = self.layers[new[0]][0]
        spec, forms = first.to_spec, {prefix: self._form(prefix) for prefix in new}
        shapes = {prefix: shapes_of(form, spec, self.layout) for prefix, form in forms.items()}
        for name in dict.fromkeys(name for each in shapes.values() for name in each):
            for prefix in (prefix for prefix in new if name in shapes[prefix]):
                group, is_stacked = self.layers[prefix], prefix in self.stacked
                whole, axis = shapes[prefix][name], self.layout.stack_axis
                whole = (*whole[:axis], len(group), *whole[axis:]) if is_stacked else whole
                make = partial(_laid_out, group, name, self.layout, forms[prefix], is_stacked)
                self.made_of[join(prefix, name)] = partial(_made_of, group, name, forms[prefix])
                self.add(join(prefix, name), whole, first.dtype, make)

    def told(self, layout_from: str, metadata: Mapping[str, str]) -> ConversionPlan:
        """Return the plan as a record.

        Args:
            layout_from: the source of the layout, if it is the caller.
            metadata: to be written.
        """
        specs = dict(zip(self.specs, (layer for group in self.layers.values() for layer in group), strict=True))
        return ConversionPlan(
            layers=[_layer_record(layer, label, layout_from) for label, layer in specs.items()],
            tensors={name: self.made_of[name]() if name in self.made_of else [name] for name in self.infos},
            size=sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.infos.values()),
            left_out=json.loads(metadata.get("dropped", "[]")),
        )

    def _form(self, prefix: str) -> tuple[Tensor, ...]:
        """The tensors in which the layers under a prefix are written."""
        group = self.layers[prefix]
        return form_for([layer.read_written for layer in group], group[0].to_spec, self.layout)


def _layer_record(layer: FileLayer, to: str, layout_from: str) -> PlannedLayer:
    """Return the record of a layer; the layout is by the caller if `layout_from` says so."""
    is_of_model = layer.model is not None and layer.model.layout == layer.layout.name
    layout_from = layout_from or (layer.known.model.origin if is_of_model else METADATA)
    counts = {name: getattr(layer.spec, name) for name in COUNTS}
    plain = AttentionSpec(layer.spec.d_model, **counts).values()
    values = {name: value for name, value in layer.spec.values().items() if name in COUNTS or value != plain[name]}
    hints = {name: layer.hints.origin_of(name) for name in values}
    return PlannedLayer(layer.label, to, layer.layout.name, layout_from, layer.spec, hints)


def _made_of(group: list[FileLayer], name: str, form: tuple[Tensor, ...]) -> list[str]:
    """The names in the source of the tensors that one of a target is made of."""
    parts = {part for tensor in form if matches(tensor.name, [name]) for part in tensor.parts}
    return [
        full
        for layer in group
        for full, short in layer.sources.items()
        if any(parts & {*tensor.parts} and matches(tensor.name, [short]) for tensor in layer.form)
    ]


def _lost(layer: FileLayer, target: Layout) -> set[str]:
    """Return the features of a layer that are lost in writing it."""
    return lost_in(target, layer.spec).keys() - lost_in(target, layer.to_spec).keys()


def _laid_out(group: list[FileLayer], name: str, target: Layout, form: tuple[Tensor, ...], stacked: bool) -> np.ndarray:
    """A tensor of another layout, of one layer or of all in a stack."""
    first = group[0].write(name, target, form)
    if not stacked:
        return first
    axis = target.stack_axis
    tensor = np.empty((*first.shape[:axis], len(group), *first.shape[axis:]), first.dtype)
    layers = np.moveaxis(tensor, axis, 0)  # a view
    layers[0] = first
    for index, layer in enumerate(group[1:], 1):
        layers[index] = layer.write(name, target, form)
    return tensor
