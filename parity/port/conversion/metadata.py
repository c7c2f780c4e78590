"""Hints about layers apart from their tensors: layout, prefix and specification; and the metadata
to write.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mha_spec import AttentionSpec, InputError
from parity.measure.core.weights import FORMAT, read_spec
from parity.measure.files import TensorFile
from parity.measure.files.reading import SUFFIXES
from parity.measure.files.tensor_file import parse_json
from parity.measure.files.writing import COMPUTED
from parity.port.conversion.hints import COUNTS, METADATA, HintSource, LayerHints, is_of_rope, merge
from parity.port.conversion.layouts import LAYOUTS, Layout, find_layout, register_packages
from parity.port.conversion.layouts.layout import DROPPABLE, GRID_BIAS
from parity.port.conversion.model_config import ModelHints, model_hints
from parity.port.conversion.prefixes import (
    ENTRY,
    all_prefixes,
    concrete_prefix,
    fitting_prefixes,
    numbered,
)
from parity.port.conversion.ranks import NORMS, NUM_RANKS, open_checkpoint
from parity.port.conversion.sharing import holders_in_model, name_in_file
from parity.port.models.config import read_config
from parity.port.models.specs import layers_of_parts

Held = TypeVar("Held", list, dict)


@dataclass(frozen=True)
class FileHints:
    """Hints about the layers of a file, in addition to their names and shapes.

    Attributes:
        sources: sources of hints, by precedence; the model's comes last, if there is one.
        specs: specification of each layer by its label, from the file's own metadata.
        dropped: features that the file lost, from its metadata.
        ignored: names (with wildcards) under the prefix of a layer that are not its weights, from
            its metadata.
        unread: attention keys of its source that no specification contains, with their values, from
            its metadata.
        shared: weights that layers share, from its metadata: by label and canonical name, each with
            its holder (see `sharing`).
        model: the model of the layers, if neither the caller nor the file's metadata specifies each
            layer.
    """

    sources: tuple[HintSource, ...]
    specs: Mapping[str, AttentionSpec] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unread: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    model: ModelHints = field(default_factory=ModelHints)

    def at(self, label: str) -> LayerHints:
        """Return the merged hints about the layer with a label."""
        return merge(label, self.sources)

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
        if label in self.shared:
            return self.shared[label]
        holders = holders_in_model(label, self.model)
        return {
            weight: holder
            for weight, holder in holders.items()
            if name_in_file(holder, weight, layout, names) is not None
        }

    def without_heads_of_model(self, label: str) -> LayerHints:
        """Return the hints without heads from a configuration, which may describe other layers, or
        another model.

        RoPE from the configuration then counts as unread.
        """
        full, others = (
            self.at(label),
            merge(label, self.sources[:-1] if self.model.origin else self.sources),
        )
        lost = full.rope if others.rope is None else None
        unread = full.unread if lost is None else {**full.unread, "rope_theta": lost.theta}
        return replace(others, unread=unread, overridden=full.overridden)

    def missing(self, labels: Iterable[str], file: TensorFile) -> list[str]:
        """List the paths of attention layers without a tensor, in the parts of the model that found
        layers belong to.

        A stack, which is one array for all layers, cannot miss any.
        """
        model = self.model
        found = {id(model.layer_at(label)) for label in labels if not ENTRY.fullmatch(label)}
        parts = {
            name
            for name, layers in model.parts.items()
            if any(id(layer) in found for layer in layers)
        }
        prefixes = all_prefixes(file.infos)
        there = {id(model.layer_at(prefix)) for prefix in prefixes}
        return [label for label in self.specs if label.partition("[")[0] not in prefixes] + [
            f"{path} of {section}" if len(model.parts) > 1 else path
            for path, layers in model.paths.items()
            for section, layer in layers.items()
            if section in parts
            and layer.spec is not None
            and path == layer.path
            and id(layer) not in there
        ]

    @property
    def attention_keys(self) -> set[str]:
        """Return all keys that may be unread."""
        return {*self.unread, *self.model.plain.unread, *self.model.unread_of_known, "rope_theta"}

    def without_unsaid(self, names: Iterable[str], layouts: Iterable[Layout]) -> FileHints:
        """Return the hints without biases on a grid, if the file has such biases."""
        unsaid = dict.fromkeys(pattern for layout in layouts for pattern in layout.grid_biases)
        if not any(
            fnmatch.fnmatchcase(name, f"*{pattern}") for name in names for pattern in unsaid
        ):
            return self
        return replace(
            self,
            ignored=(*self.ignored, *unsaid),
            dropped=tuple(dict.fromkeys((*self.dropped, GRID_BIAS))),
        )

    def is_other(self, prefix: str) -> bool:
        """Return whether a prefix belongs to no attention layer of the model, or of a file of
        ours.
        """
        if self.specs:
            return prefix not in self.specs and f"{prefix}[0]" not in self.specs
        return (
            self.model.attention_at(prefix) is None
        )  # extra layers after the last one may predict further tokens


def file_hints(file: TensorFile, caller: LayerHints) -> FileHints:
    """Find the sources of hints about the layers of a file: the caller, then its own metadata,
    otherwise the model's.

    Raises:
        ValueError: if the file's own metadata or the configuration next to it is not understood, or
            contradicts the caller.
    """
    spec = caller.spec
    if spec is not None and (given := [name for name in caller.given if name != "spec"]):
        raise InputError(", ".join(given), "not be combined with spec")
    own = _own_specs(file)
    if not own:
        if spec is not None:
            return FileHints((lambda label: caller,))
        model = model_hints(file, caller)
        return FileHints((lambda label: caller, model.hints), model=model)
    dropped, ignored, unread = (
        _read(file, "dropped", list),
        _read(file, "ignored", list),
        _read(file, "unread", dict),
    )
    dropped, ignored = (tuple(map(str, names)) for names in (dropped, ignored))
    shared = _shared(file)
    if unknown := sorted({*dropped} - {*DROPPABLE} - {*unread}):
        raise InputError(
            file.path, f"list only {', '.join(DROPPABLE)} as dropped", ", ".join(unknown)
        )
    if spec is not None or caller.rope is not None:  # which restores dropped features
        dropped = tuple(name for name in dropped if name != "rope")
    if spec is not None:
        dropped = tuple(name for name in dropped if name not in unread)
        return FileHints((lambda label: caller,), {}, dropped, ignored, shared=shared)
    sources = (
        lambda label: caller,
        partial(_own_hints, own, {k: v for k, v in unread.items() if k not in dropped}),
    )
    if "" in own:
        merge(str(file.path), sources)  # reject contradictions before searching for layers
    return FileHints(sources, {} if "" in own else own, dropped, ignored, unread, shared)


def _own_hints(
    specs: Mapping[str, AttentionSpec], unread: Mapping[str, Any], label: str
) -> LayerHints:
    """Return the hints about a layer from our file's metadata; one specification may serve all
    layers.
    """
    if "" in specs:
        label, unread = (
            "",
            {
                name: value
                for name, value in unread.items()
                if not (specs[""].rope and is_of_rope(name))
            },
        )
    may_rotate = all(each.rope is None for each in specs.values())
    return replace(
        LayerHints.by(METADATA, spec=specs.get(label)), unread=unread, may_rotate=may_rotate
    )


def _own_specs(file: TensorFile) -> dict[str, AttentionSpec]:
    """Return the specifications in our file's metadata, by label; one for all layers has an empty
    label.
    """
    metadata = {**file.metadata, "format": FORMAT}
    if not _is_ours(file.metadata) or not {"spec", "specs"} & metadata.keys():
        return {}
    if "specs" not in metadata:
        return {"": read_spec(file.path, metadata)}
    held = _read(file, "specs", dict)
    return {
        label: read_spec(file.path, {**metadata, "spec": json.dumps(each)})
        for label, each in held.items()
    }


def _read(file: TensorFile, name: str, kind: type[Held]) -> Held:
    """Return a list or dict from our file's metadata; empty if it is missing."""
    held = parse_json(file.metadata[name].encode()) if name in file.metadata else kind()
    if not isinstance(held, kind) or (
        isinstance(held, list) and not all(isinstance(each, str) for each in held)
    ):
        raise InputError(
            file.path, f"hold a JSON {kind.__name__} as {name} in its metadata", f"{held!r:.80}"
        )
    return held


def _shared(file: TensorFile) -> dict[str, dict[str, str]]:
    """Return the weights that layers share, in our file's metadata, with their holders."""
    shared = _read(file, "shared", dict)
    for holders in shared.values():
        if not isinstance(holders, dict) or not all(
            isinstance(holder, str) for holder in holders.values()
        ):
            raise InputError(
                file.path, "name a holder for each shared weight in its metadata", f"{shared!r:.80}"
            )
    return shared


def tells_layout(path: str | os.PathLike[str]) -> bool:
    """Return whether mha-parity wrote a file with the prefixes and layouts of its layers."""
    with open_checkpoint(path) as file:
        return _is_ours(file.metadata) and "layout" in file.metadata


def is_unknown(folder: str | os.PathLike[str]) -> bool:
    """Return whether a path is a model folder whose layers neither rules nor its metadata specify.

    Raises:
        OSError, ValueError: if its config.json cannot be read.
    """
    path = Path(folder) / "config.json"
    if not os.path.lexists(path) or tells_layout(folder):
        return False
    config = read_config(path)
    try:
        return not layers_of_parts(config)
    except (TypeError, ValueError):
        return True


NOT_LISTED = (
    "no layout fits its names: describe them in a table, which --layout passes, as "
    "docs/how-to/own-layouts.md shows under 'A table for a file'"
)
"""Advice for a file in a layout that is not in `LAYOUTS`."""


# ---- Prefixes and layouts of layers --------------------------------------------------------------


def sources(
    file: TensorFile, known: FileHints, prefix: str | None, layout: str | None, what: str
) -> list[tuple[str, Layout]]:
    """Return the prefixes of a file's layers, with `{i}` for numbers, each with the layout of its
    layers.

    They come from the caller, or the file's own metadata, or the model. Messages call the layout
    argument `what`.

    Raises:
        ValueError: if a layout is unknown, or no layer has it.
    """
    is_ours = _is_ours(file.metadata)
    layout_name = (
        layout or file.metadata.get("layout") or ("canonical" if "spec" in file.metadata else None)
    )
    if prefix is None and is_ours and known.specs:
        prefixes = list(dict.fromkeys(numbered(label.partition("[")[0]) for label in known.specs))
    elif prefix is not None or (is_ours and "prefix" in file.metadata):
        prefixes = [file.metadata.get("prefix", "") if prefix is None else prefix]
    elif layout is not None and find_layout(layout, what).prefix:
        prefixes = [find_layout(layout, what).prefix]
    elif of_model := _prefixes_of(file, known.model):
        return [
            (each, find_layout(layout, what) if layout else LAYOUTS[name])
            for each, name in of_model.items()
        ]
    else:
        prefixes = [""]
    if layout_name is not None:
        return [(each, find_layout(layout_name, what)) for each in prefixes]
    layouts = [_layout_under(file, known.model, each) for each in prefixes]
    if layouts and all(layouts):
        return [(each, LAYOUTS[layout]) for each, layout in zip(prefixes, layouts, strict=True)]
    shapes = {name: info.shape for name, info in file.infos.items()}
    found = [(each, p) for each in LAYOUTS.values() for p in fitting_prefixes(shapes, each)]
    if not found:
        found = [(each, p) for each in register_packages() for p in fitting_prefixes(shapes, each)]
    fitting = [{what: each.name, "prefix": p} for each, p in found]
    hint = ["fits" if fitting else NOT_LISTED]
    if len({each.packing for each, _ in found}) > 1:
        hint.append("shapes do not show the order of packed heads")
        hint += dict.fromkeys(f"{each.name} is {each.packing}" for each, _ in found if each.packing)
    hint += filter(None, [known.model.why_unknown])
    raise InputError(
        what,
        f"be given for {file.path}, whose metadata do not have it",
        remedy=fitting,
        hint="; ".join(hint),
    )


def _prefixes_of(file: TensorFile, model: ModelHints) -> dict[str, str]:
    """Return the prefixes of a model's attention layers in a file, each with its layout; reject
    duplicates.
    """
    found: dict[str, str] = {}
    places: dict[int, str] = {}  # prefix of each layer of the model
    for prefix in all_prefixes(file.infos):
        layer = model.attention_at(prefix)
        if layer is None:
            continue
        found.setdefault(numbered(prefix), layer.layout)
        if (first := places.setdefault(id(layer), prefix)) != prefix:
            remedy = [{"prefix": numbered(each)} for each in (first, prefix)]
            raise InputError(
                "prefix",
                f"select the layers of {file.path} that config.json describes",
                remedy=remedy,
            )
    return found


def _layout_under(file: TensorFile, model: ModelHints, prefix: str) -> str:
    """Return the layout of the model's attention layers under a prefix; empty if there are none."""
    concrete = dict.fromkeys(
        match[0] for name in file.infos if (match := concrete_prefix(prefix, name))
    )
    return next(
        (layer.layout for layer in map(model.attention_at, concrete) if layer is not None), ""
    )


# ---- Metadata to write ---------------------------------------------------------------------------


def metadata_of(
    layout: Layout,
    specs: Mapping[str, AttentionSpec],
    prefix: str | None,
    dropped: Collection[str] = (),
    ignored: Collection[str] = (),
    unread: Mapping[str, Any] | None = None,
    shared: Mapping[str, Mapping[str, str]] | None = None,
    *,
    has_others: bool = False,
) -> dict[str, str]:
    """Return the metadata to write for layers.

    Args:
        layout: their layout.
        specs: their specifications, by label.
        prefix: their common prefix, with `{i}` for numbers; None if there are several.
        dropped: features that the file loses.
        ignored: names (with wildcards) under the prefix of a layer that are not its weights.
        unread: attention keys that no specification contains, with their values. If there are any,
            fields that are None are omitted, because such a key may specify them.
        shared: weights that layers share, by label and canonical name, each with its holder.
        has_others: whether layers of other kinds have such prefixes; each label is then listed.
    """
    fields = {label: json.loads(spec.to_json()) for label, spec in specs.items()}
    if unread:
        for label, each in fields.items():
            fields[label] = {name: value for name, value in each.items() if value is not None}
    # transformers 4 rejects files with a format other than "pt"; `load_weights` recognizes
    # canonical files by ours.
    form = FORMAT if layout.name == "canonical" and not prefix else "pt"
    metadata = {"format": form, "mha_parity": FORMAT, "layout": layout.name, "rope": layout.rope}
    if prefix is not None:
        metadata["prefix"] = prefix
    different = {*specs.values()}
    if len(different) == 1 and prefix is not None and not has_others:
        (spec,) = different
        metadata["spec"] = json.dumps(next(iter(fields.values())), sort_keys=True)
        metadata |= {name: str(getattr(spec, name)) for name in COUNTS}
    else:
        metadata["specs"] = json.dumps(fields)
    found = {
        "dropped": sorted(dropped),
        "ignored": sorted(ignored),
        "unread": unread,
        "shared": shared,
    }
    return metadata | {
        name: json.dumps(held, sort_keys=True) for name, held in found.items() if held
    }


OURS = {"format", "mha_parity", "layout", "rope", "prefix", "spec", "specs", *COUNTS}
OURS |= {"dropped", "ignored", "unread", "shared", NUM_RANKS, NORMS}
"""Reserved names in metadata: values that other programs store under them are not copied."""

MOST_IN_ZIP = 65_000
"""Largest metadata in bytes of an npz or torch file, which stores them in the comment of an
archive.
"""


def with_source(
    metadata: Mapping[str, str], file: TensorFile, suffix: str
) -> tuple[dict[str, str], list[str]]:
    """Return metadata of a target, including that of its source, and the names of source entries
    that were left out.

    Entries of the target take precedence; its suffix limits how many fit.
    """
    known = {*COMPUTED, *(OURS if _is_ours(file.metadata) else ())}
    theirs = {
        name: text
        for name, text in file.metadata.items()
        if name not in known and metadata.get(name) != text
    }
    found, lost = dict(metadata), []
    room = (
        MOST_IN_ZIP - len(json.dumps(found))
        if SUFFIXES.get(suffix.lower()) in ("npz", "torch")
        else math.inf
    )
    for name, text in sorted(theirs.items(), key=lambda entry: len(entry[1])):
        size = len(json.dumps({name: text}))
        is_list = file.format == "gguf" and text.startswith("a list of ")  # lists are not read
        if name in OURS or is_list or size > room:
            lost.append(name)
        else:
            found[name] = text
            room -= size
    return found, sorted(lost)


def _is_ours(metadata: Mapping[str, str]) -> bool:
    """Return whether mha-parity wrote these metadata; other programs use some of the same keys."""
    return metadata.get("mha_parity", metadata.get("format")) == FORMAT
