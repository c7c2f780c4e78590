"""Metadata about layers that mha-parity writes into a file, and reads back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mha_spec import AttentionSpec, InputError
from parity.measure.core.weights import FORMAT, read_spec
from parity.measure.files import TensorFile
from parity.measure.files.reading import SUFFIXES
from parity.measure.files.tensor_file import parse_json, text_by_name
from parity.measure.files.writing import COMPUTED
from parity.port.conversion.hints import COUNTS, METADATA, LayerHints, without_rope_keys
from parity.port.conversion.layouts import Layout
from parity.port.conversion.layouts.layout import DROPPABLE
from parity.port.conversion.layouts.registry import BUILT_IN
from parity.port.conversion.ranks import NORMS, NUM_RANKS

DIGEST = "layout_digest"
"""Key of the digest of a layout that is not of this package, whose table may change."""

JsonValue = TypeVar("JsonValue", list, dict)


# ---- Reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnMetadata:
    """The metadata of a file about its layers, which are almost empty unless mha-parity wrote it.

    Attributes:
        is_ours: whether mha-parity wrote the file.
        names_layout: whether mha-parity wrote it with the prefixes and layouts of its layers.
        layout: name of the layout of the layers; empty if unknown.
        prefix: common prefix of the layers, with `{i}` for numbers; None if unknown.
        specs: specification of each layer by its label; a single one for all has an empty label.
        dropped: features that the file lost.
        ignored: names (with wildcards) under the prefix of a layer that are not its weights.
        unread: attention keys of the file's source that no specification contains, with their
            values.
        shared: weights that layers share, by label and canonical name, each with its holder (see
            `sharing`).
        layout_digest: `Layout.digest` of the layout that wrote the file; empty if it is one of this
            package.
    """

    is_ours: bool = False
    names_layout: bool = False
    layout: str = ""
    prefix: str | None = None
    specs: Mapping[str, AttentionSpec] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unread: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    layout_digest: str = ""

    @classmethod
    def read(cls, file: TensorFile) -> OwnMetadata:
        """Read the metadata of an open file about its layers.

        Raises:
            ValueError: if mha-parity wrote the file, and an entry is malformed.
        """
        metadata = file.metadata
        is_ours = _is_ours(metadata)
        layout = metadata.get("layout", "")
        names_layout = is_ours and "layout" in metadata
        if not layout and "spec" in metadata:
            layout = "canonical"  # `save_weights` writes no other, and does not name it
        prefix: str | None = None
        digest = ""
        specs: dict[str, AttentionSpec] = {}
        if is_ours:
            prefix = metadata.get("prefix")
            digest = metadata.get(DIGEST, "")
            specs = _read_specs(file)
        if not specs:
            return cls(is_ours, names_layout, layout, prefix, layout_digest=digest)
        dropped = tuple(_read_json(file, "dropped", list))
        ignored = tuple(_read_json(file, "ignored", list))
        unread = _read_json(file, "unread", dict)
        shared = _read_shared(file)
        unknown = {*dropped} - {*DROPPABLE} - {*unread}
        if unknown:
            raise InputError(
                file.path,
                f"list only {', '.join(DROPPABLE)} as dropped",
                ", ".join(sorted(unknown)),
            )
        return cls(
            is_ours,
            names_layout,
            layout,
            prefix,
            specs,
            dropped,
            ignored,
            unread,
            shared,
            digest,
        )

    def check_layout(self, layout: Layout, path: str | os.PathLike[str]) -> None:
        """Reject a layout that has the name of the one that wrote the file, and differs from it.

        Args:
            layout: the layout.
            path: path of the file.
        """
        if layout.name != self.layout or self.layout_digest in ("", layout.digest):
            return
        raise InputError(
            f"the table of {layout.name}",
            f"be the one that {path} was written by",
            f"a different one from {layout.source}",
            hint="pass that table, or give this one a different name if the file follows it",
        )

    @property
    def specs_by_label(self) -> Mapping[str, AttentionSpec]:
        """Return the specification of each layer by its label; empty if a single one is for all."""
        return {} if "" in self.specs else self.specs

    def without_overridden(self, caller: LayerHints) -> OwnMetadata:
        """Return the metadata without what the hints of a caller replace."""
        if caller.spec is not None:
            # A whole specification has the RoPE that the file lost, and settles what the keys mean
            # that were not understood.
            lost = [name for name in self.dropped if name != "rope" and name not in self.unread]
            return replace(self, specs={}, dropped=tuple(lost), unread={})
        if caller.rope is not None:
            lost = [name for name in self.dropped if name != "rope"]
            return replace(self, dropped=tuple(lost))
        return self

    def hints_at(self, label: str) -> LayerHints:
        """Return the hints about the layer with a label."""
        # Where a specification has RoPE, the source's was read, so that None elsewhere means none.
        may_rotate = all(spec.rope is None for spec in self.specs.values())
        unread = {name: value for name, value in self.unread.items() if name not in self.dropped}
        spec_for_all = self.specs.get("")
        spec = self.specs.get(label) if spec_for_all is None else spec_for_all
        if spec_for_all is not None and spec_for_all.rope is not None:
            unread = without_rope_keys(unread)
        return replace(LayerHints.by(METADATA, spec=spec), unread=unread, may_rotate=may_rotate)


def _is_ours(metadata: Mapping[str, str]) -> bool:
    """Return whether mha-parity wrote these metadata; other programs use some of the same keys."""
    return metadata.get("mha_parity", metadata.get("format")) == FORMAT


def _read_specs(file: TensorFile) -> dict[str, AttentionSpec]:
    """Return the specifications in our file's metadata, by label; one for all layers has an empty
    label.
    """
    # In files for transformers, `format` is "pt"; `read_spec` expects ours.
    metadata = {**file.metadata, "format": FORMAT}
    if "specs" in metadata:
        specs = {}
        for label, fields in _read_json(file, "specs", dict).items():
            specs[label] = read_spec(file.path, {**metadata, "spec": json.dumps(fields)})
        return specs
    if "spec" in metadata:
        return {"": read_spec(file.path, metadata)}
    return {}


def _read_json(file: TensorFile, name: str, kind: type[JsonValue]) -> JsonValue:
    """Return a list of text or a dict from our file's metadata; empty if it is missing."""
    if name not in file.metadata:
        return kind()
    value = parse_json(file.metadata[name].encode())
    if isinstance(value, kind) and (kind is dict or all(isinstance(entry, str) for entry in value)):
        return value
    raise InputError(
        file.path, f"hold a JSON {kind.__name__} as {name} in its metadata", f"{value!r:.80}"
    )


def _read_shared(file: TensorFile) -> dict[str, dict[str, str]]:
    """Return the weights that layers share, in our file's metadata, with their holders."""
    shared = _read_json(file, "shared", dict)
    for holders in shared.values():
        if not isinstance(holders, dict) or holders != text_by_name(holders):
            raise InputError(
                file.path, "name a holder for each shared weight in its metadata", f"{shared!r:.80}"
            )
    return shared


# ---- Writing -------------------------------------------------------------------------------------


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
        for label, values in fields.items():
            fields[label] = {name: value for name, value in values.items() if value is not None}
    # transformers 4 rejects files with a format other than "pt"; `load_weights` recognizes
    # canonical files by ours.
    file_format = FORMAT if layout.name == "canonical" and not prefix else "pt"
    metadata = {
        "format": file_format,
        "mha_parity": FORMAT,
        "layout": layout.name,
        "rope": layout.rope,
    }
    if layout.name not in BUILT_IN:
        metadata[DIGEST] = layout.digest
    if prefix is not None:
        metadata["prefix"] = prefix
    distinct = {*specs.values()}
    if len(distinct) == 1 and prefix is not None and not has_others:
        (spec,) = distinct
        metadata["spec"] = json.dumps(next(iter(fields.values())), sort_keys=True)
        metadata |= {name: str(getattr(spec, name)) for name in COUNTS}
    else:
        metadata["specs"] = json.dumps(fields)
    about_layers = {
        "dropped": sorted(dropped),
        "ignored": sorted(ignored),
        "unread": unread,
        "shared": shared,
    }
    for name, value in about_layers.items():
        if value:
            metadata[name] = json.dumps(value, sort_keys=True)
    return metadata


OURS = {"format", "mha_parity", "layout", "rope", "prefix", "spec", "specs", *COUNTS}
OURS |= {"dropped", "ignored", "unread", "shared", NUM_RANKS, NORMS, DIGEST}
"""Reserved names in metadata: values that other programs store under them are not copied."""

MOST_IN_ZIP = 65_000
"""Largest metadata in bytes of an npz or torch file, which stores them in the comment of an
archive: its length has 16 bits.
"""


def with_source(
    metadata: Mapping[str, str], file: TensorFile, suffix: str
) -> tuple[dict[str, str], list[str]]:
    """Return metadata of a target, including the metadata of its source, and the names of source
    entries that were left out.

    Entries of the target take precedence; its suffix limits how many fit.
    """
    combined = dict(metadata)
    left_out: list[str] = []
    replaced = {*COMPUTED}
    if _is_ours(file.metadata):
        replaced |= OURS
    room = math.inf
    if SUFFIXES.get(suffix.lower()) in ("npz", "torch"):
        room = MOST_IN_ZIP - len(json.dumps(combined))
    # The shortest first, so that as many as possible fit.
    for name, text in sorted(file.metadata.items(), key=lambda entry: len(entry[1])):
        if name in replaced or metadata.get(name) == text:
            continue
        size = len(json.dumps({name: text}))
        # The reader of GGUF describes lists instead of reading them.
        is_list = file.format == "gguf" and text.startswith("a list of ")
        if name in OURS or is_list or size > room:
            left_out.append(name)
        else:
            combined[name] = text
            room -= size
    return combined, sorted(left_out)
