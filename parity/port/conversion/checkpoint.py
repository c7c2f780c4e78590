"""A checkpoint: its tensors, its own metadata and the configuration of its model, each read once.

The way of a conversion, and with fewer steps of everything else that reads layers of files:

    with Checkpoint.open("model.safetensors") as checkpoint:
        layers = checkpoint.layers(LayerHints.by(CALLER, num_heads=8))
        plan = layers.plan(LAYOUTS["flax.nnx"])
        plan.write("flax.safetensors")
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mha_spec import InputError
from parity.measure.files import TensorFile
from parity.measure.text import some_of
from parity.port.conversion.file_hints import FileHints, locations_of_layers
from parity.port.conversion.hints import LayerHints
from parity.port.conversion.ignored_settings import IgnoredSettingsWarning
from parity.port.conversion.layers import FileLayer, LayerGroup, TensorCache, layers_under
from parity.port.conversion.layouts import Layout
from parity.port.conversion.layouts.layout import GRID_BIAS
from parity.port.conversion.metadata import OwnMetadata
from parity.port.conversion.model_config import (
    ModelConfig,
    ModelHints,
    hints_of_config,
    hints_of_gguf,
)
from parity.port.conversion.plan import Plan
from parity.port.conversion.prefixes import fitting_prefixes, numbered
from parity.port.conversion.ranks import open_checkpoint
from parity.port.models.specs import sections_named


class Checkpoint:
    """An open checkpoint, and context manager. Nothing of it is read before it is needed.

    Attributes:
        path: its path, as it was passed.
        file: the open file.
        tensors: its tensors.
    """

    def __init__(self, path: str | os.PathLike[str], file: TensorFile) -> None:
        self.path = path
        self.file = file
        self.tensors = TensorCache(file)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open a file, a folder of shards, or a folder of rank files, which are read as one.

        Raises:
            OSError: if it cannot be read.
            ValueError: if it is not a file of tensors, or a rank is missing.
        """
        return cls(path, open_checkpoint(path))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was read remains."""
        self.file.close()

    @cached_property
    def own(self) -> OwnMetadata:
        """Return its own metadata about its layers.

        Raises:
            ValueError: if mha-parity wrote it, and an entry is malformed.
        """
        return OwnMetadata.read(self.file)

    @cached_property
    def config(self) -> ModelConfig | None:
        """Return the configuration in the config.json of its folder; None if there is no such file.

        Raises:
            OSError: if it cannot be read.
            ValueError: if it is not a configuration.
        """
        path = Path(self.file.path)
        folder = path if path.is_dir() else path.parent
        path = folder / "config.json"
        if not os.path.lexists(path):
            return None
        try:
            return ModelConfig.read(path)
        except InputError as error:
            # The file is truncated or of the wrong kind. Without its hints a wrong layer may
            # result.
            error.hint = "correct it, or remove it"
            raise

    @property
    def config_of_folder(self) -> ModelConfig | None:
        """Return the config.json of a model folder; None for a file, next to which there may be
        files of another model.

        Raises:
            OSError, ValueError: as `config`.
        """
        return self.config if os.path.isdir(self.path) else None

    @property
    def is_unknown(self) -> bool:
        """Return whether it is a model folder whose layers neither rules nor its metadata specify.

        Raises:
            OSError, ValueError: as `config`.
        """
        if self.own.names_layout or self.own.specs:
            return False
        config = self.config_of_folder
        return config is not None and not config.specifies_layers

    def hints(self, caller: LayerHints) -> FileHints:
        """Return everything known of its layers, apart from their tensors.

        `FileHints.at` has the order of precedence. A source is read only if an earlier one leaves
        a question open: a config.json next to a file of ours may be damaged.

        Raises:
            OSError: if the configuration cannot be read.
            ValueError: if the metadata or the configuration is not understood, or contradicts the
                caller.
        """
        if caller.spec is not None:
            conflicting = [name for name in caller.values if name != "spec"]
            if conflicting:
                raise InputError(", ".join(conflicting), "not be combined with spec")
        own = self.own.without_overridden(caller)
        model = ModelHints()
        if caller.spec is None and not self.own.specs:
            model = self._hints_of_model(caller)
        hints = FileHints(caller, own, model, own.dropped, own.ignored)
        if "" in own.specs:
            # One specification is for all layers: reject contradictions before searching for them.
            hints.at(str(self.file.path))
        return hints

    def _hints_of_model(self, caller: LayerHints) -> ModelHints:
        """Return the hints of the configuration; empty ones if there is none."""
        if self.file.format == "gguf":
            return hints_of_gguf(self.file, caller)
        if self.config is None:
            return ModelHints(why_unknown="there is no config.json next to it")
        return hints_of_config(self.config, self.file.path, caller)

    def layers(
        self,
        caller: LayerHints,
        layout: str | None = None,
        prefix: str | None = None,
        *,
        argument: str = "layout",
        drop: Collection[str] = (),
    ) -> CheckpointLayers:
        """Find its attention layers.

        Args:
            caller: hints of the caller.
            layout: name of their layout; default: from the metadata or the model's family.
            prefix: prefix of their tensor names, without the last dot; `{i}` stands for numbers,
                and the prefix of a stack means all its layers. Default: from the metadata or
                the model, otherwise empty.
            argument: name of the layout argument in messages.
            drop: features that may be left out, as in `convert_file`.

        Raises:
            OSError, ValueError: as in `load`.

        Warns:
            IgnoredSettingsWarning: as in `load`.
        """
        hints = self.hints(caller)
        if drop:
            hints.check_droppable(drop)
        locations = locations_of_layers(self.file, hints, prefix, layout, argument)
        if GRID_BIAS in drop:
            layouts = [location.layout for location in locations]
            hints = hints.without_grid_biases(self.tensors.infos, layouts)
        groups: list[LayerGroup] = []
        for location in locations:
            try:
                layers = layers_under(self.tensors, location.prefix, location.layout, hints)
            except InputError as error:
                own_prefix = location.layout.prefix
                is_of_table = prefix is None and own_prefix and location.prefix == own_prefix
                if error.argument == "prefix" and is_of_table:
                    # The caller passed no prefix that could be wrong.
                    error.argument, error.got = "the key prefix", repr(location.prefix)
                    error.where = f"the layout {location.layout.name}"
                raise
            groups.append(LayerGroup(location.prefix, layers))
        return CheckpointLayers(self, hints, groups, layout, prefix)


@dataclass(frozen=True)
class CheckpointLayers:
    """The attention layers of an open checkpoint.

    Attributes:
        checkpoint: the checkpoint.
        hints: what is known of its layers.
        groups: the layers under each prefix.
        layout, prefix: those that the caller requested, or None.
    """

    checkpoint: Checkpoint
    hints: FileHints
    groups: list[LayerGroup]
    layout: str | None = None
    prefix: str | None = None

    @cached_property
    def in_order(self) -> list[FileLayer]:
        """Return the layers under one prefix after the other, each in numerical order."""
        layers: list[FileLayer] = []
        for group in self.groups:
            layers += sorted(group.layers, key=lambda layer: layer.indices)
        return layers

    @cached_property
    def missing(self) -> list[str]:
        """Return the paths of layers that the configuration or the file's metadata requires."""
        labels = [layer.label for layer in self.in_order]
        missing = self.hints.missing(labels, self.checkpoint.tensors.infos)
        if self.prefix is None:
            return missing
        if "{i}" not in self.prefix:
            return []  # one layer was requested, so the others are not missing
        requested = f".{self.prefix}"
        return [path for path in missing if requested.endswith(f".{numbered(path)}")]

    @cached_property
    def undescribed(self) -> list[str]:
        """Return the prefixes of layers that the configuration does not describe."""
        layers = self.in_order
        if self.prefix is not None or not any(layer.model is not None for layer in layers):
            return []
        shapes = self.checkpoint.tensors.shapes
        other_shapes = {name: shapes[name] for name in self._names_of_no_layer}
        model = self.hints.model
        unknown_parts = {*model.sections} - {*model.parts}
        undescribed: list[str] = []
        for prefix in fitting_prefixes(other_shapes, layers[0].layout):
            # Layers in parts of unknown families are reported as such.
            if not sections_named(prefix, unknown_parts):
                undescribed.append(prefix)
        return undescribed

    @property
    def rest(self) -> list[str] | None:
        """Return the names of the tensors that belong to no layer; None if only some layers were
        requested.
        """
        return self._names_of_no_layer if self.prefix is None else None

    @cached_property
    def _names_of_no_layer(self) -> list[str]:
        of_layers: set[str] = set()
        for layer in self.in_order:
            of_layers.update(layer.sources.values())
        return [name for name in self.checkpoint.tensors.infos if name not in of_layers]

    def warn_if_incomplete(self) -> None:
        """Warn if the layers differ from the configuration.

        Warns:
            IgnoredSettingsWarning: for missing layers, and for layers that the configuration does
                not describe.
        """
        path = self.checkpoint.path
        # The level is the level of the caller of `load`. Other callers are programs of the command
        # line, which prints warnings without their locations.
        if self.missing:
            words = f"not in {path}, although its configuration or its metadata describes them: "
            warnings.warn(words + some_of(self.missing), IgnoredSettingsWarning, stacklevel=3)
        if self.undescribed:
            words = f"not read, because the config.json of {path} does not describe them: "
            warnings.warn(words + some_of(self.undescribed), IgnoredSettingsWarning, stacklevel=3)

    def plan(
        self,
        target: Layout,
        *,
        to_prefix: str | None = None,
        keep_rest: bool = True,
        drop: Collection[str] = (),
        fill_bias: bool = False,
    ) -> Plan:
        """Plan their conversion to another layout; the arguments are as in `convert_file`.

        Raises:
            ValueError: if the layout cannot hold the layers, two tensors would have the same name,
                or layers cannot be stacked.
        """
        plan = Plan(
            self.checkpoint.tensors,
            self.checkpoint.path,
            self.hints,
            target,
            drop,
            keep_rest=keep_rest,
            is_layout_given=self.layout is not None,
        )
        plan.place_layers(self.groups, to_prefix, fill_bias=fill_bias)
        plan.add_tensors()
        return plan
