"""What is known of layers beside their tensors, layout, prefix and specification, and what is written of it."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mha_spec import AttentionSpec, Refusal, Rope
from parity.conversion.layouts import LAYOUTS, Layout, find_layout, find_spec
from parity.conversion.layouts.layout import DROPPABLE, UNSAID
from parity.conversion.model_config import HEADS, Beside, beside, is_of_rope
from parity.conversion.prefixes import fitting_prefixes, numbered
from parity.conversion.ranks import NORMS, SAID, open_checkpoint
from parity.core.weights import FORMAT, read_spec
from parity.files import TensorFile
from parity.files.reading import SUFFIXES
from parity.files.tensor_file import parse_json
from parity.files.writing import COMPUTED
from parity.models.specs import ModelLayer, sections_named

Heads = dict[str, Any]
"""What a checkpoint's shapes may leave open: num_heads, num_kv_heads, head_dim, rope; or all of it, spec."""

ENTRY = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)
"""The prefix of one layer of a stack, such as `layers.self_attn[3]`."""


@dataclass(frozen=True)
class Known:
    """What is known of the layers of a file beside their names and shapes.

    Attributes:
        said: what the caller says of the heads, or the file's own metadata.
        spec: of every layer, if the caller or the file's own metadata say it.
        specs: of each layer by its label, in the file's own metadata.
        dropped: what layers computed that the file does not say, by its own metadata.
        ignored: names (with wildcards) under the prefix of a layer that are none of its weights, likewise.
        unread: keys about attention of its source that are in no specification, with their values, likewise.
        rope: of all layers, in the file's own metadata or of a model without a known family
        beside: what others tell of the model, where the caller says nothing of its heads.
    """

    said: Heads
    spec: AttentionSpec | None = None
    specs: Mapping[str, AttentionSpec] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unread: Mapping[str, Any] = field(default_factory=dict)
    rope: Rope | None = None
    beside: Beside = field(default_factory=Beside)

    @cached_property
    def _paths(self) -> dict[str, dict[str, ModelLayer]]:
        """The model's layers by what their prefixes end with, numbered or in a stack, and then by their parts."""
        found: dict[str, dict[str, ModelLayer]] = {}
        for section, layers in self.beside.parts.items():
            for layer in layers:
                if not layer.path or (layer.spec is not None and _contradicted(layer.spec, self.said)):
                    continue  # the caller knows better
                for path in (layer.path, f"{_unnumbered(layer.path)}[{layer.index}]"):
                    found.setdefault(path, {}).setdefault(section, layer)  # the first of those that share their weights
        return found

    def layer_at(self, label: str) -> ModelLayer | None:
        """The layer of the model whose weights have a label, a prefix or one with an index.

        Of layers that end alike it is that of the part that the label names; nothing is known where it names none.
        """
        named = sections_named(label, self.beside.sections)
        for tail in (tail for tail in _tails(label) if tail in self._paths):
            found = [layer for section, layer in self._paths[tail].items() if not named or section in named]
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def missing(self, labels: Iterable[str], file: TensorFile) -> list[str]:
        """The paths of attention layers, in the parts of the model that layers of some labels are of, without a tensor.

        Of a stack, which is one array for all of them, none is said to be missing.
        """
        found = {id(self.layer_at(label)) for label in labels if not ENTRY.fullmatch(label)}
        parts = {name for name, layers in self.beside.parts.items() if any(id(layer) in found for layer in layers)}
        prefixes = set(_all_prefixes(file.infos))
        there = {id(self.layer_at(prefix)) for prefix in prefixes}
        return [label for label in self.specs if label.partition("[")[0] not in prefixes] + [
            f"{path} of {section}" if len(self.beside.parts) > 1 else path
            for path, layers in self._paths.items()
            for section, layer in layers.items()
            if section in parts and layer.spec is not None and path == layer.path and id(layer) not in there
        ]

    def unread_of(self, label: str, origin: str) -> dict[str, Any]:
        """The keys about attention, with their values, that the specification of a layer does not have.

        Args:
            label: of the layer.
            origin: of its heads, as `spec_at` and `find_spec` return it.
        """
        is_said = self.said.get("rope") is not None
        if self.layer_at(label) is not None:
            return {
                key: value for key, value in self.beside.unread_of_known.items() if not (is_said and is_of_rope(key))
            }
        named = sections_named(label, self.beside.sections)
        others = [f"{name}." for name in self.beside.sections if named and name not in named]
        unread = {
            name: value
            for name, value in {**self.unread, **self.beside.unread}.items()
            if not (name.startswith(tuple(others)) or name in self.dropped or (is_said and is_of_rope(name)))
        }
        if not origin and "rope" in self.beside.heads:  # its heads do not fit, so that nothing of it was taken
            unread["rope_theta"] = self.beside.heads["rope"].theta
        return unread

    def overridden(self, label: str) -> float | None:
        """The theta of RoPE that a file says of a layer, if the caller says another one."""
        layer, said = self.layer_at(label), self.said.get("rope")
        spec = self.specs.get(label) or (layer.spec if layer is not None else None)
        rope = self.rope if spec is None else spec.rope
        return rope.theta if said is not None and rope is not None and rope.theta != said.theta else None

    @property
    def attention_keys(self) -> set[str]:
        """All keys that `unread_of` may return."""
        return {*self.unread, *self.beside.unread, *self.beside.unread_of_known, "rope_theta"}

    def without_unsaid(self, names: Iterable[str], layouts: Iterable[Layout]) -> Known:
        """The same of layers without what no specification says, if any of a file's names is of that."""
        unsaid = dict.fromkeys(pattern for layout in layouts for pattern in layout.unsaid)
        if not any(fnmatch.fnmatchcase(name, f"*{pattern}") for name in names for pattern in unsaid):
            return self
        return replace(self, ignored=(*self.ignored, *unsaid), dropped=tuple(dict.fromkeys((*self.dropped, UNSAID))))

    def is_other(self, prefix: str) -> bool:
        """Whether what has a prefix is none of the attention layers that are known of a model, or of a file of ours."""
        if self.specs:
            return prefix not in self.specs and f"{prefix}[0]" not in self.specs
        layer = self.layer_at(prefix)
        return layer is None or layer.spec is None  # beyond the last one there may be some that predict more tokens

    def spec_at(self, label: str) -> tuple[AttentionSpec, str] | None:
        """The specification of the layer of a label, and where it comes from, if from another file."""
        if label in self.specs:
            _check_counts(self.specs[label], self.said, label)
            nobody_rotates = all(each.rope is None for each in self.specs.values())
            return _with_rope(self.specs[label], self.said.get("rope"), label, may_have_none=nobody_rotates), ""
        if self.spec is not None:
            return self.spec, ""
        layer = self.layer_at(label)
        if layer is None or layer.spec is None:
            return None
        return _with_rope(layer.spec, self.said.get("rope"), label), self.beside.origin

    def find_spec(self, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> tuple[AttentionSpec, str]:
        """The specification of a layer by its shapes, and where its heads come from, if from another file."""
        if self.beside.heads:
            with suppress(ValueError):  # that may be of other layers, or of another model
                return find_spec(shapes, layout, **self.said | self.beside.heads), self.beside.origin
        return find_spec(shapes, layout, **self.said), ""


def what_is_known(file: TensorFile, said: Heads) -> Known:
    """What the caller says of the layers, the file's own metadata, and what lies beside it.

    Raises:
        ValueError: if the file's own metadata, or the configuration beside it, cannot be understood.
    """
    said = dict(said)
    spec, counts = said.pop("spec", None), [said.get(name) for name in HEADS[:3]]
    if spec is not None and (given := [name for name, value in said.items() if value is not None]):
        raise Refusal(", ".join(given), "not be said beside a spec")
    own = _own_specs(file) if _is_ours(file.metadata) else {}
    saved = own.get("")
    told = {name: getattr(saved, name) for name in HEADS} if saved is not None else {}
    merged = {name: said.get(name) if said.get(name) is not None else told.get(name) for name in (*told, *said)}
    if saved is not None and spec is None:
        _check_counts(saved, said, str(file.path))
        saved = _with_rope(saved, said.get("rope"), str(file.path), may_have_none=True)
    if spec is not None or own:
        dropped, ignored = (_names(file, what) if own else () for what in ("dropped", "ignored"))
        unread = _unread(file) if own else {}
        if unknown := sorted({*dropped} - {*DROPPABLE} - {*unread}):
            raise Refusal(file.path, f"name some of {', '.join(DROPPABLE)} as dropped", ", ".join(unknown))
        if spec is not None:
            dropped, unread = tuple(name for name in dropped if name not in unread), {}
        if spec is not None or said.get("rope") is not None:  # which says what was dropped
            dropped = tuple(name for name in dropped if name != "rope")
        specs = own if spec is None and "" not in own else {}
        return Known(merged, spec or saved, specs, dropped, ignored, unread, own[""].rope if saved else None)
    has_counts = any(count is not None for count in counts)
    found = beside(file, is_told=has_counts)
    heads = {name: value for name, value in found.heads.items() if said.get(name) is None}
    if has_counts:
        heads = {name: value for name, value in heads.items() if name == "rope"}  # counts of two origins do not mix
    return Known(merged, rope=found.heads.get("rope"), beside=replace(found, heads=heads))


def _contradicted(spec: AttentionSpec, said: Heads) -> list[str]:
    """The counts of a layer of which the caller says other ones."""
    return [name for name in HEADS[:3] if said.get(name) not in (None, getattr(spec, name))]


def _check_counts(spec: AttentionSpec, said: Heads, label: str) -> None:
    if wrong := _contradicted(spec, said):
        got, told = (", ".join(f"{name}={of[name]}" for name in wrong) for of in (said, spec.values()))
        raise Refusal(wrong[0], f"be what the file's metadata say of {label}, {told}", got)


def _with_rope(spec: AttentionSpec, rope: Rope | None, label: str, *, may_have_none: bool = False) -> AttentionSpec:
    """A layer with the RoPE that the caller says, if any.

    Args:
        spec: what is known of the layer.
        rope: which may have another base than the layer's, and nothing else.
        label: of the layer, for messages.
        may_have_none: RoPE may not have been said when the spec was written.

    Raises:
        ValueError: if it is known to rotate in another way, or not at all.
    """
    if rope is None or (spec.rope is None and may_have_none):
        return spec if rope is None else replace(spec, rope=rope)
    if spec.rope is None or replace(spec.rope, theta=rope.theta) != rope:
        raise Refusal("rope", f"not be said of {label}, which has {spec.rope or 'none'} by what is known", rope=rope)
    return replace(spec, rope=rope)


def _names(file: TensorFile, what: str) -> tuple[str, ...]:
    """A list of names in the metadata of a file of ours."""
    names = parse_json(file.metadata.get(what, "[]").encode())
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Refusal(file.path, f"hold a list of names as {what} in its metadata", repr(names))
    return tuple(names)


def _unread(file: TensorFile) -> dict[str, Any]:
    """The keys that were not read when a file of ours was written."""
    held = parse_json(file.metadata.get("unread", "{}").encode())
    if not isinstance(held, dict):
        raise Refusal(file.path, "hold values by name as unread in its metadata", f"{held!r:.80}")
    return held


def _own_specs(file: TensorFile) -> dict[str, AttentionSpec]:
    """The specifications in the metadata of a file of ours: of each layer by its label, or of all under no name."""
    metadata = {**file.metadata, "format": FORMAT}
    if "specs" in metadata:
        held = parse_json(metadata["specs"].encode())
        if not isinstance(held, Mapping):
            raise Refusal(file.path, "hold specs by name in its metadata", repr(metadata["specs"][:80]))
        return {label: read_spec(file.path, {**metadata, "spec": json.dumps(each)}) for label, each in held.items()}
    return {"": read_spec(file.path, metadata)} if "spec" in metadata else {}


def tells_layout(path: str | os.PathLike[str]) -> bool:
    """Whether a file was written here, and says where its layers are, and in which layout."""
    with open_checkpoint(path) as file:
        return _is_ours(file.metadata) and "layout" in file.metadata


# ---- Where layers are, and in which layout ---------------------------------------------------------------------------


def sources(
    file: TensorFile, known: Known, prefix: str | None, layout: str | None, path: str | os.PathLike[str], what: str
) -> list[tuple[str, Layout]]:
    """The prefixes of a file's layers, `{i}` standing for numbers, each with the layout of its layers.

    They are those that the caller says, or the file's own metadata, or those of the model.

    Args:
        file: open.
        known: of its layers.
        prefix, layout: as the caller says them.
        path: of the file, for messages.
        what: the argument that names the layout, for messages.

    Raises:
        ValueError: if a layout is not known, or there is none of that name.
    """
    is_ours = _is_ours(file.metadata)
    told = layout or file.metadata.get("layout") or ("canonical" if "spec" in file.metadata else None)
    if prefix is None and is_ours and known.specs:
        prefixes = list(dict.fromkeys(numbered(label.partition("[")[0]) for label in known.specs))
    elif prefix is not None or (is_ours and "prefix" in file.metadata):
        prefixes = [file.metadata.get("prefix", "") if prefix is None else prefix]
    else:
        of_model = _of_model(file, known)
        if of_model:
            return [(each, find_layout(layout, what) if layout else LAYOUTS[name]) for each, name in of_model.items()]
        prefixes = [""]
    if told is not None:
        return [(each, find_layout(told, what)) for each in prefixes]
    layouts = [_layout_under(file, known, each) for each in prefixes]
    if layouts and all(layouts):
        return [(each, LAYOUTS[layout]) for each, layout in zip(prefixes, layouts, strict=True)]
    shapes = {name: info.shape for name, info in file.infos.items()}
    found = [(each, p) for each in LAYOUTS.values() for p in fitting_prefixes(shapes, each)]
    packings = {each.packing for each, _ in found}
    fitting = [{what: each.name, "prefix": p} for each, p in found]
    packed = [f"{each.name} is {each.packing}" for each, _ in found if each.packing]
    hint = ["fits" if fitting else "`mha-parity inspect` lists what is in it"]
    if len(packings) > 1:
        hint += ["no shape shows the order of packed heads", *dict.fromkeys(packed)]
    hint += filter(None, [known.beside.why_unknown])
    raise Refusal(what, f"be given for {path}, whose metadata do not have it", remedy=fitting, hint="; ".join(hint))


def _of_model(file: TensorFile, known: Known) -> dict[str, str]:
    """The prefixes of the model's attention layers in a file, and the layout of each.

    Raises:
        ValueError: if several in the file could be one of them: it holds more than the model.
    """
    found: dict[str, str] = {}
    places: dict[int, str] = {}  # of each layer of the model
    for prefix in _all_prefixes(file.infos):
        layer = known.layer_at(prefix)
        if layer is None or layer.spec is None:
            continue
        found.setdefault(numbered(prefix), layer.layout)
        if (first := places.setdefault(id(layer), prefix)) != prefix:
            remedy = [{"prefix": numbered(each)} for each in (first, prefix)]
            raise Refusal("prefix", f"tell which layers of {file.path} are those of config.json", remedy=remedy)
    return found


def _all_prefixes(names: Iterable[str]) -> Iterator[str]:
    """Whatever names begin with, up to a dot, each once."""
    seen: set[str] = set()
    for prefix in names:
        while (prefix := prefix.rpartition(".")[0]) and prefix not in seen:
            seen.add(prefix)
            yield prefix


def _tails(label: str) -> Iterator[str]:
    """What a label ends with, from all of it to its last word."""
    while label:
        yield label
        label = label.partition(".")[2]


def _unnumbered(path: str) -> str:
    """A path without its numbers."""
    return ".".join(word for word in path.split(".") if not word.isdigit())


def _layout_under(file: TensorFile, known: Known, prefix: str) -> str:
    """The layout of the model's attention layers under a prefix, or nothing: the first layers may be no attention."""
    concrete = dict.fromkeys(match[0] for name in file.infos if (match := concrete_prefix(prefix, name)))
    layers = (known.layer_at(each) for each in concrete)
    return next((layer.layout for layer in layers if layer is not None and layer.spec is not None), "")


def concrete_prefix(pattern: str, name: str) -> tuple[str, tuple[str, ...], str] | None:
    """What a name begins with if it is under a prefix, the numbers that `{i}` stands for there, and the rest of it."""
    parts = (r"(\d+)" if part == "{i}" else re.escape(part) for part in re.split(r"(\{i\})", pattern))
    match = re.fullmatch(rf"({''.join(parts)})\.(.+)" if pattern else r"()(.+)", name)
    return None if match is None else (match[1], match.groups()[1:-1], match.groups()[-1])


# ---- What is written of layers ---------------------------------------------------------------------------------------


def metadata_of(
    layout: Layout,
    specs: Mapping[str, AttentionSpec],
    prefix: str | None,
    dropped: Collection[str] = (),
    ignored: Collection[str] = (),
    unread: Mapping[str, Any] | None = None,
    *,
    has_others: bool = False,
) -> dict[str, str]:
    """What is written of layers beside their tensors.

    Args:
        layout: theirs.
        specs: theirs, by their labels.
        prefix: of all of them, `{i}` standing for numbers; None where there are several.
        dropped: what they computed that the file does not say.
        ignored: names (with wildcards) under the prefix of a layer that are none of its weights.
        unread: keys about attention that are in no specification, with their values. Fields that are None are then not
            written, because they may be what such a key says.
        has_others: there are layers of other kinds under such prefixes: each label is then said.
    """
    different = list(dict.fromkeys(specs.values()))
    fields = {label: json.loads(spec.to_json()) for label, spec in specs.items()}
    if unread:
        fields = {
            label: {name: value for name, value in each.items() if value is not None} for label, each in fields.items()
        }
    # transformers 4 refuses files of another format than "pt"; `load_weights` knows canonical ones by ours.
    form = FORMAT if layout.name == "canonical" and not prefix else "pt"
    metadata = {"format": form, "mha_parity": FORMAT, "layout": layout.name, "rope": layout.rope}
    if prefix is not None:
        metadata["prefix"] = prefix
    if len(different) == 1 and prefix is not None and not has_others:
        (spec,) = different
        held = json.dumps(next(iter(fields.values())), sort_keys=True)
        metadata |= {"spec": held, "num_heads": str(spec.num_heads), "num_kv_heads": str(spec.num_kv_heads)}
        metadata["head_dim"] = str(spec.head_dim)
    else:
        metadata["specs"] = json.dumps(fields)
    found = {"dropped": dropped, "ignored": ignored}
    metadata |= {what: json.dumps(sorted(names)) for what, names in found.items() if names}
    return metadata | ({"unread": json.dumps(unread, sort_keys=True)} if unread else {})


OURS = {"format", "mha_parity", "layout", "rope", "prefix", "spec", "specs", "num_heads", "num_kv_heads", "head_dim"}
OURS |= {"dropped", "ignored", "unread", SAID, NORMS}
"""Names in metadata that mean something here: values that others have under them are not written."""

MOST_IN_ZIP = 65_000
"""Bytes of metadata that a file of npz or torch holds, which has them in the comment of an archive."""


def with_source(metadata: Mapping[str, str], file: TensorFile, suffix: str) -> tuple[dict[str, str], list[str]]:
    """Metadata of a target with that of its source, and the entries of the source that the target does not hold.

    Args:
        metadata: of the target; they precede those of the source.
        file: the source.
        suffix: of the target.
    """
    others = {name: text for name, text in file.metadata.items() if name not in COMPUTED}
    theirs = {name: text for name, text in others.items() if metadata.get(name) != text}
    if _is_ours(file.metadata):
        theirs = {name: text for name, text in theirs.items() if name not in OURS}
    is_list = file.format == "gguf"  # whose lists are not read
    lost = {name for name, text in theirs.items() if name in OURS or (is_list and text.startswith("a list of "))}
    found = dict(metadata)
    room = MOST_IN_ZIP - len(json.dumps(found)) if SUFFIXES.get(suffix.lower()) in ("npz", "torch") else math.inf
    for name, text in sorted(theirs.items(), key=lambda entry: len(entry[1])):
        size = len(json.dumps({name: text}))
        if name not in lost and size <= room:
            found[name] = text
            room -= size
    return found, sorted(theirs.keys() - found.keys() | lost & theirs.keys())


def _is_ours(metadata: Mapping[str, str]) -> bool:
    """Whether metadata were written here; other programs use some of the same words."""
    return metadata.get("mha_parity", metadata.get("format")) == FORMAT
