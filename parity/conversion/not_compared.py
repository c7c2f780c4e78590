"""Parts of two files that a comparison of their layers leaves out, by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parity.conversion.layers import FileLayer, OpenLayers, key_in_words
from parity.core.records import JsonRecord
from parity.text import some_of

Path = str | os.PathLike[str]


@dataclass(frozen=True)
class NotCompared(JsonRecord):
    """Something that a comparison of two files leaves out.

    Attributes:
        what: a field of the specification, a key of a configuration with its value, or the path of a layer.
        reason: why it is not compared.
        labels: of the layers in the first file that it is about; empty if it is about a file.
        is_open: it may make the layers differ, so that nobody can say that both files hold the same attention.
    """

    what: str
    reason: str
    labels: list[str] = field(default_factory=list, compare=False)
    is_open: bool = True


def by_reason(parts: Sequence[NotCompared]) -> list[str]:
    """What is not compared, in words: a text for each reason."""
    reasons = dict.fromkeys(each.reason for each in parts)
    return [f"{some_of([each.what for each in parts if each.reason == reason])} ({reason})" for reason in reasons]


def find_not_compared(
    pairs: Sequence[tuple[FileLayer, FileLayer]], files: Sequence[Path], opened: Sequence[OpenLayers]
) -> list[NotCompared]:
    """What a comparison of layers leaves out, each once.

    Args:
        pairs: the layers that are compared.
        files: the paths of both files.
        opened: both files.
    """
    found: dict[NotCompared, NotCompared] = {}
    for one, other in pairs:
        for each in _of_pair(one, other, files):
            found.setdefault(each, each).labels.append(one.label)
    return [*found, *of_files(files, opened)]


def of_files(files: Sequence[Path], opened: Sequence[OpenLayers]) -> list[NotCompared]:
    """Layers that only the configurations of two files have, or only the files.

    Args:
        files: the paths of both files.
        opened: both files.
    """
    found: list[NotCompared] = []
    for path, file in zip(files, opened, strict=True):
        if file.missing:
            found.append(NotCompared(some_of(file.missing), f"not in {path}, although its configuration has it"))
        if file.others:
            found.append(NotCompared(some_of(file.others), f"in {path}, whose config.json does not describe it"))
    return found


def _of_pair(one: FileLayer, other: FileLayer, files: Sequence[Path]) -> Iterator[NotCompared]:
    layers = dict(zip(map(str, files), (one, other), strict=True))
    dropped = {name for layer in layers.values() for name in layer.dropped}
    for path, layer in layers.items():
        for name in layer.dropped:
            yield NotCompared(name, f"left out when {path} was written")
        if layer.hints.overridden is not None:
            reason = f"what {path} says is overridden by the caller"
            yield NotCompared(f"rope_theta={layer.hints.overridden:g}", reason, is_open=False)
    for name in dict.fromkeys((*one.hints.unread, *other.hints.unread)):
        values = [_value(name, layer) for layer in (one, other)]
        if name in dropped:
            continue
        if len(values[0]) and values[0] == values[1]:
            yield NotCompared(key_in_words(name, values[0][0]), "not understood, equal in both files", is_open=False)
            continue
        for path, layer in layers.items():
            if name in layer.hints.unread:
                yield NotCompared(key_in_words(name, layer.hints.unread[name]), f"not understood, in {path}")


def _value(name: str, layer: FileLayer) -> list[Any]:
    """The value of a key in what describes a layer, as a list; empty if it is not there."""
    sources: tuple[Mapping[str, Any], ...] = (layer.hints.unread, layer.known.model.values)
    return next(([source[name]] for source in sources if name in source), [])
