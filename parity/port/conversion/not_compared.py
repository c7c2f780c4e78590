"""Parts of two files that a comparison of their layers leaves out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from parity.measure.core.records import JsonRecord
from parity.measure.text import counted, some_of
from parity.port.conversion.layers import FileLayer, OpenLayers, key_in_words
from parity.port.conversion.prefixes import join
from parity.port.conversion.verify import same_array

Path = str | os.PathLike[str]


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
    files: Sequence[Path],
    opened: Sequence[OpenLayers],
) -> list[OnlyInOne]:
    """Return the tensors that only one of two files has, apart from differences of layouts.

    They are tensors of no layer, and copies of a weight that the other file has once for several
    layers.
    """
    found: list[OnlyInOne] = []
    for (file, other), mine, theirs, swap in (
        (files, *opened, False),
        (files[::-1], *opened[::-1], True),
    ):
        # If only some layers were requested, the rest is of no interest.
        if mine.rest is not None and theirs.rest is not None:
            of_layers = {name for layer in theirs.layers for name in layer.sources.values()}
            others = {*theirs.rest, *of_layers}
            rest = [name for name in mine.rest if name not in others]
            if rest:
                found.append(OnlyInOne(str(file), str(other), rest))
        copies: dict[str, list[str]] = {}
        for pair in pairs:
            layer, beside = pair[::-1] if swap else pair
            for name, repeated in _copies(layer, beside):
                copies.setdefault(repeated, []).append(name)
        found += [
            OnlyInOne(str(file), str(other), names, repeated) for repeated, names in copies.items()
        ]
    return found


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
    reasons = dict.fromkeys(each.reason for each in parts)
    return [
        f"{some_of([each.what for each in parts if each.reason == reason])} ({reason})"
        for reason in reasons
    ]


def find_not_compared(
    pairs: Sequence[tuple[FileLayer, FileLayer]],
    files: Sequence[Path],
    opened: Sequence[OpenLayers],
) -> list[NotCompared]:
    """Return what a comparison of pairs of layers in two files leaves out, each once."""
    found: dict[NotCompared, NotCompared] = {}
    for pair in pairs:
        for each in _of_pair(pair, files):
            found.setdefault(each, each).labels.append(pair[0].label)
    return [*found, *of_files(files, opened)]


def of_files(files: Sequence[Path], opened: Sequence[OpenLayers]) -> list[NotCompared]:
    """Return layers that only the configurations of two files have, or only the files."""
    found: list[NotCompared] = []
    for path, file in zip(files, opened, strict=True):
        if file.missing:
            found.append(
                NotCompared(
                    some_of(file.missing), f"not in {path}, although its configuration has it"
                )
            )
        if file.others:
            found.append(
                NotCompared(
                    some_of(file.others), f"in {path}, whose config.json does not describe it"
                )
            )
    return found


def _of_pair(pair: tuple[FileLayer, FileLayer], files: Sequence[Path]) -> Iterator[NotCompared]:
    layers = dict(
        zip(map(str, files), pair, strict=True)
    )  # a single entry if a file is compared with itself
    for path, layer in layers.items():
        for name in layer.dropped:
            yield NotCompared(name, f"left out when {path} was written")
        if layer.hints.overridden is not None:
            reason = f"the value in {path} is overridden by the caller"
            yield NotCompared(f"rope_theta={layer.hints.overridden:g}", reason, is_open=False)
    dropped = {name for layer in pair for name in layer.dropped}
    configs = [{**layer.known.model.values, **layer.hints.unread} for layer in pair]
    for name in dict.fromkeys(
        name for layer in pair for name in layer.hints.unread if name not in dropped
    ):
        values = [known[name] for known in configs if name in known]
        if len(values) == 2 and values[0] == values[1]:
            yield NotCompared(
                key_in_words(name, values[0]), "not understood, equal in both files", is_open=False
            )
            continue
        for path, layer in layers.items():
            if name in layer.hints.unread:
                yield NotCompared(
                    key_in_words(name, layer.hints.unread[name]), f"not understood, in {path}"
                )
