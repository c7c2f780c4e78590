"""Plan a conversion: list the tensors of the target with their sources, and write them.

`Plan.place_layers` gives each layer its prefix in the target, `Plan.add_tensors` lists the tensors,
and `Plan.write` writes them with their metadata and records what was done.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.measure.core.records import JsonRecord
from parity.measure.files import FileTensor, write_tensors
from parity.measure.files.reading import SUFFIXES
from parity.port.conversion.bits import same_array
from parity.port.conversion.file_hints import FileHints
from parity.port.conversion.hints import CALLER, COUNTS, METADATA
from parity.port.conversion.layers import (
    FileLayer,
    LayerGroup,
    TensorCache,
    key_in_words,
    unread_of,
)
from parity.port.conversion.layouts import Layout
from parity.port.conversion.layouts.detection import LayoutMismatchError, placement_for, placements
from parity.port.conversion.layouts.layout import (
    CARRIED,
    Tensor,
    lost_in,
    matches,
    matches_any,
    unused_in,
    without,
)
from parity.port.conversion.layouts.losses import Written, check_losses, with_all_biases
from parity.port.conversion.layouts.placement import Placement
from parity.port.conversion.metadata import metadata_of, with_source
from parity.port.conversion.prefixes import ENTRY, concrete_prefix, fitting_prefixes, join
from parity.port.conversion.ranks import norms_to_join, write_ranks
from parity.port.conversion.sharing import label_of_holder, name_in_file, renamed
from parity.port.conversion.target_tensors import (
    CopiedTensor,
    LayerTensor,
    SharedTensor,
    TargetTensor,
)

OPTIMIZER_STATE = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
)
"""Names under which torch's optimizers store one tensor per weight, in its shape; optax uses the
weights' names.
"""


# ---- Records -------------------------------------------------------------------------------------


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
        layers: prefixes of the converted layers; layers of a stack have an index in brackets.
        spec: their specification, if all have the same.
        copied, dropped: names of the other tensors.
        heads_from: the file that specified the heads, if it was neither the caller nor the source
            itself.
        left_out: names of entries that are not tensors, such as numbers and text, and are not in
            the target.
        unconverted: prefixes of other layers in the source's layout, which were copied unchanged.
        optimizer_state: names of optimizer tensors for the layers, which are in the target in the
            old layout.
        ignored_settings: attention settings of the source that are not read; if one concerns RoPE,
            the specification has no RoPE.
        path: the written file, or the index of its shards.
        missing: paths of attention layers that the model's configuration requires and the file
            lacks, with the part if the model has several.
        dequantized: names of quantized source tensors, which were written as the values that they
            represent.
        joined: names of norms over the width of all heads in rank files. Each rank has its own
            weights, but their mean squares must be computed over all ranks.
        metadata_left_out: names in the metadata of the source whose values are not in the target's.
        plan: the plan, if `dry_run` was set.
    """

    source: str
    layers: list[str]
    spec: AttentionSpec | None
    copied: list[str]
    dropped: list[str]
    heads_from: str = ""
    left_out: list[str] = field(default_factory=list)
    unconverted: list[str] = field(default_factory=list)
    optimizer_state: list[str] = field(default_factory=list)
    ignored_settings: list[str] = field(default_factory=list)
    path: str = ""
    missing: list[str] = field(default_factory=list)
    dequantized: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    metadata_left_out: list[str] = field(default_factory=list)
    plan: ConversionPlan | None = None


# ---- Planning ------------------------------------------------------------------------------------


@dataclass
class Plan:
    """The tensors of a target, in order.

    Attributes:
        source: the tensors of the source.
        source_path: path of the source, as the caller named it.
        hints: what is known of the layers of the source.
        layout: layout of the layers in the target.
        drop: features that may be left out.
        keep_rest: whether tensors of no layer are copied.
        is_layout_given: whether the caller named the layout of the source.
        converted: the layers, in the order of the source.
        prefix: common prefix of the layers in the target; None if there are several.
        layers: layers under each prefix of the target.
        stacked: prefixes under which they are stacked.
        tensors: tensors by name.
        rest: names of the tensors that belong to no layer.
        holders: weights that layers share, by label in the target and canonical name, each with its
            holder.
        held_elsewhere: names of tensors that are not written, because the holder of their weight
            has them.
        written_names: names of the layers' tensors after their prefixes.
    """

    source: TensorCache
    source_path: str | os.PathLike[str]
    hints: FileHints
    layout: Layout
    drop: Collection[str] = ()
    keep_rest: bool = True
    is_layout_given: bool = False
    converted: list[FileLayer] = field(default_factory=list)
    prefix: str | None = None
    layers: dict[str, list[FileLayer]] = field(default_factory=dict)
    stacked: set[str] = field(default_factory=set)
    tensors: dict[str, TargetTensor] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)
    holders: dict[str, dict[str, str]] = field(default_factory=dict)
    held_elsewhere: set[str] = field(default_factory=set)
    written_names: set[str] = field(default_factory=set)

    def place_layers(
        self, groups: Sequence[LayerGroup], to_prefix: str | None, *, fill_bias: bool
    ) -> None:
        """Choose where each layer goes in the target.

        Args:
            groups: the layers of the source.
            to_prefix: prefix in the target, as in `convert_file`; None for the prefix of the
                source.
            fill_bias: add zero biases if the layout requires biases.

        Raises:
            ValueError: if the layout cannot hold a layer, or the prefix does not fit the layers.
        """
        if to_prefix is not None and len(groups) > 1:
            prefixes = ", ".join(group.prefix for group in groups)
            raise InputError("prefix", f"be one of {prefixes} with to_prefix", "none")
        if self.keep_rest and any(ENTRY.fullmatch(group.prefix) for group in groups):
            raise InputError(
                "prefix",
                "be the prefix of a whole stack if the rest is kept",
                prefix=groups[0].prefix,
            )
        if to_prefix is None and self.layout.prefix and len(groups) == 1:
            to_prefix = self.layout.prefix
        to_write: list[Written] = []
        for group in groups:
            to_write += [_to_write(layer) for layer in group.layers]
        check_losses(to_write, self.layout, self.drop, fill_bias=fill_bias)
        for prefix, source_layers in groups:
            entry_of_stack = ENTRY.fullmatch(prefix)
            to = to_prefix
            if to is None:
                to = prefix if entry_of_stack is None else entry_of_stack[1]
            layers: list[FileLayer] = []
            for layer in source_layers:
                written = _spec_in(self.layout, layer.spec, self.drop)
                layers.append(replace(layer, written=written))
            by_prefix, is_stacked = _by_target_prefix(layers, prefix, to)
            self.converted += layers
            self.layers.update(by_prefix)
            if is_stacked:
                self.stacked.update(by_prefix)
            self.prefix = to if len(groups) == 1 else None

    def add_tensors(self) -> None:
        """Add all tensors, in the order of the source.

        A layer is added with the first of its tensors. Every use of a tensor is added at once, so
        that a stack is read only once.

        Raises:
            ValueError: if two tensors have the same name, or the target has one tensor for copies
                that differ.
        """
        self._find_holders()
        added: set[str] = set()
        for name in self.source.infos:
            prefixes = self._prefixes_of.get(name, {}).keys()
            self._add_layers([prefix for prefix in prefixes if prefix not in added])
            added.update(prefixes)
            if name in self._own:
                continue
            self.rest.append(name)
            if self.keep_rest:
                self._add(name, CopiedTensor(self.source, name))
        if self.keep_rest and self.rest:
            self._check_rest()

    def _check_rest(self) -> None:
        """Reject copied tensors with names that the target's layout has for weights of its layers.

        The source's layout ignored them. The target's would read them as weights, which the layers
        do not have, so no program could read the layers.
        """
        patterns = self._ignored_in_source()
        ignored = self._ignored()
        for name in self.rest:
            words = name.split(".")
            for length in range(len(words)):
                prefix, short = ".".join(words[:length]), ".".join(words[length:])
                if prefix not in self.layers or self.layout.ignores(short, ignored):
                    continue
                is_known = bool(self._tensors_named(short)) or matches_any(short, patterns)
                unused = unused_in(self.layout, self.layers[prefix][0].to_spec)
                if is_known and short not in unused and name not in self.held_elsewhere:
                    raise InputError(
                        name,
                        f"not have a name of a weight in {self.layout.name}",
                        "a tensor that the layer ignores",
                        remedy={"keep_rest": False},
                        hint="leaves out the tensors of no layer",
                    )

    def _tensors_named(self, short: str) -> list[Tensor]:
        """Return the tensors of the target's layout that have a name."""
        tensors = (*self.layout.tensors, *self.layout.others)
        return [tensor for tensor in tensors if matches(tensor.name, [short])]

    @cached_property
    def _own(self) -> set[str]:
        """Return the names of source tensors under the prefix of a layer that uses them. Those
        elsewhere are shared, and also count as tensors of no layer.
        """
        own: set[str] = set()
        for layer in self.converted:
            for short, name in layer.sources.items():
                if name == join(layer.prefix, short):
                    own.add(name)
        return own

    @cached_property
    def _prefixes_of(self) -> dict[str, dict[str, None]]:
        """Return the prefixes of the target that use each tensor of the source."""
        prefixes: dict[str, dict[str, None]] = {}
        for prefix, group in self.layers.items():
            for layer in group:
                for name in layer.sources.values():
                    prefixes.setdefault(name, {})[prefix] = None
        return prefixes

    def _add(self, name: str, tensor: TargetTensor) -> None:
        if name in self.tensors:
            raise InputError(
                "names", f"differ in the target of {self.source.path}", f"{name} twice"
            )
        self.tensors[name] = tensor

    def _add_layers(self, prefixes: Iterable[str]) -> None:
        """Add the tensors of the layers under prefixes of the target, tensors of one name
        together.
        """
        placements_by_prefix: dict[str, Placement] = {}
        names: dict[str, None] = {}
        for prefix in prefixes:
            group = self.layers[prefix]
            readers = [layer.read_written for layer in group]
            try:
                placement = placement_for(readers, group[0].to_spec, self.layout)
            except LayoutMismatchError as error:
                raise error.within(prefix or str(self.source.file.path)) from None
            placements_by_prefix[prefix] = placement
            names.update(dict.fromkeys(placement.shapes))
        self.written_names.update(names)
        for name in names:
            for prefix, placement in placements_by_prefix.items():
                full_name = join(prefix, name)
                if name in placement.shapes and full_name not in self.held_elsewhere:
                    is_stacked = prefix in self.stacked
                    tensor = LayerTensor(self.layers[prefix], name, placement, is_stacked)
                    self._add(full_name, tensor)

    # ---- Shared weights --------------------------------------------------------------------------

    def _find_holders(self) -> None:
        """Find the holders of shared weights in the target, and the copies that it does not need.

        Raises:
            ValueError: if a copy is not equal to its holder.
        """
        new_labels = {layer.label: label for label, layer in self.labels.items()}
        # The layer whose copy becomes a tensor outside of the layers, by the tensor's name.
        makers: dict[str, FileLayer] = {}
        for label, layer in self.labels.items():
            holders = renamed(layer.shared, new_labels)
            if not holders:
                continue
            self.holders[label] = holders
            if label not in self.layers:
                continue  # an entry of a stack, which is one array with an entry for each layer
            for weight, holder in holders.items():
                if weight not in self.layout.shares or weight not in layer.placement.weights:
                    continue
                shared = self._read_shared(weight, holder, layer, makers)
                if shared is None:
                    continue  # the target has no holder, so the layer keeps its copy
                if not same_array(layer.read(weight), shared):
                    rule = f"equal {holder}, because layers in {self.layout.name} share one"
                    raise InputError(f"{weight} of {label}", rule, "a copy that differs")
                self.held_elsewhere.add(join(label, str(self.layout.name_of(weight))))
        for holder, layer in makers.items():
            (weight,) = [weight for weight, shared in layer.shared.items() if shared == holder]
            self._add(holder, SharedTensor(layer, weight))

    def _read_shared(
        self, weight: str, holder: str, layer: FileLayer, makers: dict[str, FileLayer]
    ) -> np.ndarray | None:
        """Read a shared weight from its holder in the target; None if the target has no holder.

        A holder outside of the layers that the source lacks is made of the copy of the first layer,
        which is added to `makers`.
        """
        holder_label = label_of_holder(holder, weight)
        if holder_label is not None and holder_label in self.labels:
            return self.labels[holder_label].read(weight)
        if self.keep_rest:
            own_name = name_in_file(holder, weight, self.layout, self.source.infos)
            if own_name is not None:
                return self.source.read_finite(own_name)
        if holder_label is None:
            return makers.setdefault(holder, layer).read(weight)
        return None

    @cached_property
    def labels(self) -> dict[str, FileLayer]:
        """Return the layers by their labels in the target."""
        labels: dict[str, FileLayer] = {}
        for prefix, group in self.layers.items():
            for index, layer in enumerate(group):
                label = f"{prefix}[{index}]" if prefix in self.stacked else prefix
                labels[label] = layer
        return labels

    @cached_property
    def specs(self) -> dict[str, AttentionSpec]:
        """Return the layers' specifications in the target, by label."""
        return {label: layer.to_spec for label, layer in self.labels.items()}

    # ---- Writing ---------------------------------------------------------------------------------

    def write(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_bytes: int | None = None,
        ranks: int | None = None,
        force: bool = False,
        dry_run: bool = False,
        on_tensor: Callable[[str], None] = lambda name: None,
    ) -> Converted:
        """Write the target, and return the record of the conversion.

        Args:
            path: file to write, or with `ranks` a new folder.
            max_shard_bytes, ranks, force, dry_run, on_tensor: as in `convert_file`.

        Raises:
            OSError: if a file cannot be read or written.
            FileExistsError: if the target exists, without `force`.
            ValueError: if a tensor has values that are not finite, or the target is the source, has
                a different format, or cannot be divided.
        """
        if ranks is not None and max_shard_bytes is not None:
            raise InputError("max_shard_bytes", "be left out with ranks", ranks=ranks)
        path_of_file = path
        if ranks and self.layout.ranks is not None:
            # The path is the folder's. How many metadata fit depends on a file in it.
            path_of_file = self.layout.ranks.file
        suffix = Path(path_of_file).suffix
        metadata, metadata_left_out = with_source(self._metadata(), self.source.file, suffix)
        infos = {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

        def read(name: str) -> np.ndarray | FileTensor:
            on_tensor(name)
            return self.tensors[name].make()

        if ranks is None:
            written_path = write_tensors(
                path,
                infos,
                read,
                metadata,
                max_shard_bytes=max_shard_bytes,
                overwrite=force,
                source=self.source_path,
                dry_run=dry_run,
            )
        else:
            written_path = write_ranks(
                path, self.layout, ranks, self.specs, infos, read, metadata, dry_run=dry_run
            )
        if dry_run:
            # Reading rejects values that are not finite, and ranks that differ.
            for name in infos:
                np.asarray(read(name))
        record = replace(
            self._record_of_layers(),
            path=str(written_path),
            joined=norms_to_join(self.layout, self.specs, ranks or 1),
            metadata_left_out=metadata_left_out,
        )
        if dry_run:
            record = replace(record, plan=self._record(metadata))
        return record

    def _metadata(self) -> dict[str, str]:
        """Return the metadata to write with the tensors, without the metadata of the source."""
        ignored: set[str] = set()
        if self.keep_rest and self.rest:
            ignored = self._ignored()
        unread = {**self.hints.own.unread, **unread_of(self.converted)}
        dropped = {*self.hints.dropped}
        if not {*CARRIED} <= {*self.layout.carries}:
            dropped |= {*unread} & {*self.drop}
        for layer in self.labels.values():
            lost_before = lost_in(self.layout, layer.spec).keys()
            dropped |= lost_before - lost_in(self.layout, layer.to_spec).keys()
        return metadata_of(
            self.layout,
            self.specs,
            self.prefix,
            dropped,
            ignored,
            unread,
            self.holders,
            has_others=self._has_others(),
        )

    def _has_others(self) -> bool:
        """Return whether the target has other modules with prefixes like the prefixes of the
        layers.
        """
        if not self.keep_rest:
            return False
        for name in self.rest:
            match = concrete_prefix(self.prefix or "", name)
            if match is not None and match[0] not in self.layers:
                return True
        return False

    def _ignored(self) -> set[str]:
        """Return names (with wildcards) under layer prefixes that are weights of neither the layers
        nor the target.
        """
        names = {tensor.name for tensor in (*self.layout.tensors, *self.layout.others)}
        ignored = self._ignored_in_source() - names
        # A name of another layout may contain wildcards that fit weights of this one.
        return {pattern for pattern in ignored if not self._hides_weights(pattern)}

    def _hides_weights(self, pattern: str) -> bool:
        """Return whether a name with wildcards is the name of a tensor of a layer in the target."""
        return any(matches_any(short, [pattern]) for short in self.written_names)

    def _ignored_in_source(self) -> set[str]:
        """Return names (with wildcards) under layer prefixes that are no weights in the source."""
        ignored = {*self.hints.ignored}
        for layer in self.converted:
            ignored.update(layer.layout.ignored)
            ignored.update(unused_in(layer.layout, layer.spec))
            if layer.model is not None:
                ignored.update(layer.model.ignored)
        return ignored

    def _record_of_layers(self) -> Converted:
        """Return the record of a conversion, without the fields about the written file."""
        copied, dropped = (self.rest, []) if self.keep_rest else ([], self.rest)
        infos = self.source.infos
        first = self.converted[0]
        specs = {layer.spec for layer in self.converted}
        layer_shapes: set[tuple[int, ...]] = set()
        for layer in self.converted:
            layer_shapes.update(infos[name].shape for name in layer.sources.values())
        optimizer_state: list[str] = []
        for name in copied:
            is_state = name.rpartition(".")[2] in OPTIMIZER_STATE
            if is_state and infos[name].shape in layer_shapes:
                optimizer_state.append(name)
        labels = [layer.label for layer in self.converted]
        unread = unread_of(self.converted)
        return Converted(
            source=first.layout.name,
            layers=labels,
            spec=first.spec if len(specs) == 1 else None,
            copied=copied,
            dropped=dropped,
            heads_from=first.hints.from_model,
            left_out=list(self.source.file.ignored),
            unconverted=fitting_prefixes(
                {name: infos[name].shape for name in copied}, first.layout
            ),
            optimizer_state=optimizer_state,
            ignored_settings=[key_in_words(name, value) for name, value in unread.items()],
            missing=self.hints.missing(labels, infos),
            dequantized=[name for name in self.source.quantized if name not in dropped],
        )

    def _record(self, metadata: Mapping[str, str]) -> ConversionPlan:
        """Return the plan as a record."""
        size = 0
        for tensor in self.tensors.values():
            size += math.prod(tensor.shape) * tensor.dtype.itemsize
        layers: list[PlannedLayer] = []
        for label, layer in self.labels.items():
            layers.append(_layer_record(layer, label, is_layout_given=self.is_layout_given))
        return ConversionPlan(
            layers=layers,
            tensors={name: tensor.sources for name, tensor in self.tensors.items()},
            size=size,
            left_out=json.loads(metadata.get("dropped", "[]")),
        )


def target_file(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the file to write for a target: in an existing folder, its weights file, unless it has
    other weights already.

    Raises:
        ValueError: if the path has no suffix, or is a folder with other weights.
    """
    if not Path(path).suffix and not os.path.exists(path):
        raise InputError(path, "have a suffix such as .safetensors, or be an existing folder")
    if not os.path.isdir(path) or Path(path).suffix in SUFFIXES:
        return path
    name = "model.safetensors"
    for other in sorted(os.listdir(path)):
        if Path(other).suffix in SUFFIXES and other != name:
            raise InputError(
                "a folder to write into", "hold no other weights", f"{other} in {os.fspath(path)}"
            )
    return Path(path) / name


# ---- Layers in the target ------------------------------------------------------------------------


def _to_write(layer: FileLayer) -> Written:
    """Return a layer with the features that it may lose unasked: not RoPE, if a configuration says
    that it has it.
    """
    may_lose = () if layer.hints.from_model == "config.json" else ("rope",)
    return Written(layer.spec, may_lose, layer.hints.unread)


def _spec_in(layout: Layout, spec: AttentionSpec, drop: Collection[str]) -> AttentionSpec:
    """Return a layer as a layout holds it: without dropped features, and with added biases."""
    spec = without(spec, [name for name in lost_in(layout, spec) if name in drop])
    try:
        placements(spec, layout)
    except LayoutMismatchError:
        # `check_losses` made sure that biases are all that is missing.
        return with_all_biases(spec)
    return spec


def _by_target_prefix(
    layers: list[FileLayer], prefix: str, to_prefix: str
) -> tuple[dict[str, list[FileLayer]], bool]:
    """Return the layers under each prefix of the target, and whether they are stacked there.

    Args:
        layers: layers under one prefix of the source.
        prefix: that prefix, with `{i}` for numbers.
        to_prefix: prefix in the target: with one more `{i}` a stack is split, with none numbered
            layers are stacked.

    Raises:
        ValueError: if the prefix has the wrong number of `{i}`, or the layers cannot be stacked.
    """
    numbers, to_numbers = prefix.count("{i}"), to_prefix.count("{i}")
    are_in_stack = {layer.index is not None for layer in layers}
    is_stack = are_in_stack == {True} and not ENTRY.fullmatch(prefix)
    splits = is_stack and to_numbers == numbers + 1
    stacks = are_in_stack == {False} and (numbers, to_numbers) == (1, 0)
    if len(are_in_stack) > 1 or not (to_numbers == numbers or splits or stacks):
        raise InputError(
            "to_prefix",
            "have as many {i} as the source, one more to split a stack, or none to stack "
            "numbered layers",
            to_prefix=to_prefix,
            prefix=prefix,
        )
    if stacks:
        return {to_prefix: _in_stack_order(layers, prefix)}, True
    by_prefix: dict[str, list[FileLayer]] = {}
    for layer in layers:
        numbers_of_layer = (*layer.numbers, str(layer.index)) if splits else layer.numbers
        to = to_prefix
        for number in numbers_of_layer:
            to = to.replace("{i}", number, 1)
        by_prefix.setdefault(to, []).append(layer)
    return by_prefix, is_stack and not splits


def _in_stack_order(layers: list[FileLayer], prefix: str) -> list[FileLayer]:
    """Return numbered layers in the order of a stack; reject those that cannot be stacked."""
    layers = sorted(layers, key=lambda layer: int(layer.numbers[0]))
    numbers = [int(layer.numbers[0]) for layer in layers]
    if numbers != list(range(len(layers))):
        raise InputError("layers", "be numbered from 0 without gaps to be stacked", layers=numbers)
    kinds = {(*layer.to_spec.weight_shapes.items(), layer.dtype) for layer in layers}
    if len(kinds) > 1:
        raise InputError(
            "layers", f"have one shape and dtype to be stacked, but the tensors of {prefix} differ"
        )
    return layers


def _layer_record(layer: FileLayer, to: str, *, is_layout_given: bool) -> PlannedLayer:
    """Return the record of a layer, with the sources of its layout and its specification.

    Args:
        layer: the layer.
        to: its label in the target.
        is_layout_given: whether the caller named its layout.
    """
    layout_from = METADATA
    if is_layout_given:
        layout_from = CALLER
    elif layer.model is not None and layer.model.layout == layer.layout.name:
        layout_from = layer.file_hints.model.origin
    # Fields with their default values need no source, but numbers of heads do.
    counts = {name: getattr(layer.spec, name) for name in COUNTS}
    plain = AttentionSpec(layer.spec.d_model, **counts).values()
    origins: dict[str, str] = {}
    for name, value in layer.spec.values().items():
        if name in COUNTS or value != plain[name]:
            origins[name] = layer.hints.origin_of(name)
    return PlannedLayer(layer.label, to, layer.layout.name, layout_from, layer.spec, origins)
