"""Parts of two files that a comparison of their layers leaves out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from parity.measure.core.records import JsonRecord
from parity.measure.text import counted, some_of
from parity.port.conversion.bits import same_array
from parity.port.conversion.layers import FileLayer, key_in_words
from parity.port.conversion.prefixes import join

if TYPE_CHECKING:
    from parity.port.conversion.checkpoint import CheckpointLayers

FilePath = str | os.PathLike[str]


@dataclass(frozen=True)
class NotCompared(JsonRecord):
    """Something that a comparison of two files leaves out.

    Attributes:
        what: a field of the specification, a key of a configuration with its value, or the path of
            a layer.
        reason: why it is not compared.
        labels: labels of the affected layers in the first file; empty if it concerns a whole file.
        is_open: whether it may make the layers differ, so that equality cannot be concluded.
    """

    what: str
    reason: str
    labels: list[str] = field(default_factory=list, compare=False)
    is_open: bool = True


@dataclass(frozen=True)
class OnlyInOne(JsonRecord):
    """Tensors that one of two files has, and the other lacks.

    Attributes:
        file: path of the file that has them.
        other: path of the file that lacks them.
        names: their names.
        copy_of: name of the tensor in the same file that they repeat bit for bit, and that layers
            of the other file share; empty if they belong to no layer, and were not compared.
    """

    file: str
    other: str
    names: list[str]
    copy_of: str = ""

    def __str__(self) -> str:
        if not self.copy_of:
            return (
                f"only in {self.file}: {counted(len(self.names), 'tensor')} of no layer: "
                f"{some_of(self.names, 3)}"
            )
        repeated = f"the same bits as {self.copy_of}, which layers of {self.other} share"
        return f"only in {self.file}: {some_of(self.names)}: {repeated}"


def find_only_in_one(
    pairs: Sequence[tuple[FileLayer, FileLayer]],
    files: Sequence[FilePath],
    opened: Sequence[CheckpointLayers],
) -> list[OnlyInOne]:
    """Return the tensors that only one of two files has, apart from differences of layouts.

    They are tensors of no layer, and copies of a weight that the other file has once for several
    layers.
    """
    (first, second), (of_first, of_second) = files, opened
    swapped = [(other, layer) for layer, other in pairs]
    return [
        *_only_in_first(first, second, of_first, of_second, pairs),
        *_only_in_first(second, first, of_second, of_first, swapped),
    ]


def _only_in_first(
    file: FilePath,
    other_file: FilePath,
    layers: CheckpointLayers,
    other_layers: CheckpointLayers,
    pairs: Sequence[tuple[FileLayer, FileLayer]],
) -> list[OnlyInOne]:
    """Return the tensors that a file has, and another file lacks."""
    only_here: list[OnlyInOne] = []
    # If only some layers were requested, the rest is of no interest.
    if layers.rest is not None and other_layers.rest is not None:
        other_names = {*other_layers.rest}
        for layer in other_layers.in_order:
            other_names.update(layer.sources.values())
        rest = [name for name in layers.rest if name not in other_names]
        if rest:
            only_here.append(OnlyInOne(str(file), str(other_file), rest))
    copies: dict[str, list[str]] = {}
    for layer, other_layer in pairs:
        for name, repeated in _copies(layer, other_layer):
            copies.setdefault(repeated, []).append(name)
    for repeated, names in copies.items():
        only_here.append(OnlyInOne(str(file), str(other_file), names, repeated))
    return only_here


def _copies(layer: FileLayer, other: FileLayer) -> Iterator[tuple[str, str]]:
    """Yield a layer's own tensors that the same layer in another file shares, each with the tensor
    that it repeats.
    """
    if layer.layout != other.layout:
        return
    for short, shared_name in other.sources.items():
        own_name = layer.sources.get(short)
        is_own = own_name == join(layer.prefix, short)
        is_shared = shared_name != join(other.prefix, short)
        if own_name is None or not is_own or not is_shared or shared_name not in layer.file.infos:
            continue
        if same_array(layer.file.read_finite(own_name), layer.file.read_finite(shared_name)):
            yield own_name, shared_name


def by_reason(parts: Sequence[NotCompared]) -> list[str]:
    """Describe what is not compared, one text per reason."""
    whats_by_reason: dict[str, list[str]] = {}
    for part in parts:
        whats_by_reason.setdefault(part.reason, []).append(part.what)
    lines: list[str] = []
    for reason, whats in whats_by_reason.items():
        lines.append(f"{some_of(whats)} ({reason})")
    return lines


def find_not_compared(
    pairs: Sequence[tuple[FileLayer, FileLayer]],
    files: Sequence[FilePath],
    opened: Sequence[CheckpointLayers],
) -> list[NotCompared]:
    """Return what a comparison of pairs of layers in two files leaves out, each once."""
    # Equal ones are one, because labels do not count.
    distinct: dict[NotCompared, NotCompared] = {}
    for pair in pairs:
        for part in _of_pair(pair, files):
            distinct.setdefault(part, part).labels.append(pair[0].label)
    return [*distinct, *of_files(files, opened)]


def of_files(files: Sequence[FilePath], opened: Sequence[CheckpointLayers]) -> list[NotCompared]:
    """Return layers that only the configurations of two files have, or only the files."""
    parts: list[NotCompared] = []
    for path, layers in zip(files, opened, strict=True):
        if layers.missing:
            reason = f"not in {path}, although its configuration or its metadata has it"
            parts.append(NotCompared(some_of(layers.missing), reason))
        if layers.undescribed:
            reason = f"in {path}, whose config.json does not describe it"
            parts.append(NotCompared(some_of(layers.undescribed), reason))
    return parts


def _of_pair(pair: tuple[FileLayer, FileLayer], files: Sequence[FilePath]) -> Iterator[NotCompared]:
    """Yield what the comparison of a layer in two files leaves out."""
    # By path, so that a file that is compared with itself is reported once.
    layers = dict(zip(map(str, files), pair, strict=True))
    dropped: set[str] = set()
    configs: list[dict[str, Any]] = []
    unread: dict[str, None] = {}
    for layer in pair:
        dropped.update(layer.dropped)
        configs.append({**layer.file_hints.model.values, **layer.hints.unread})
        unread.update(dict.fromkeys(layer.hints.unread))
    for path, layer in layers.items():
        for name in layer.dropped:
            yield NotCompared(name, f"left out when {path} was written")
        if layer.hints.overridden is not None:
            reason = f"the value in {path} is overridden by the caller"
            yield NotCompared(f"rope_theta={layer.hints.overridden:g}", reason, is_open=False)
    for name in unread:
        if name in dropped:
            continue
        values = [config[name] for config in configs if name in config]
        if len(values) == 2 and values[0] == values[1]:
            key = key_in_words(name, values[0])
            yield NotCompared(key, "not understood, equal in both files", is_open=False)
            continue
        for path, layer in layers.items():
            if name in layer.hints.unread:
                key = key_in_words(name, layer.hints.unread[name])
                yield NotCompared(key, f"not understood, in {path}")
