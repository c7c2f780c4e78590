"""Find layers in a checkpoint: the prefixes whose names and shapes fit a layout."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

from parity.conversion.hints import LayerHints
from parity.conversion.layouts import Layout, find_spec
from parity.conversion.layouts.detection import HeadsUnknown, stack_size

ENTRY = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)
"""The label of one layer of a stack, such as `layers.self_attn[3]`."""


def join(prefix: str, name: str) -> str:
    """Return the full name of a tensor under a prefix."""
    return f"{prefix}.{name}" if prefix else name


def numbered(prefix: str) -> str:
    """Return a prefix with `{i}` instead of its numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "{i}", prefix)


def concrete_prefix(pattern: str, name: str) -> tuple[str, tuple[str, ...], str] | None:
    """Split a name by a prefix pattern: the concrete prefix, the numbers for `{i}`, and the remainder."""
    number = r"(\d+)"
    begin = number.join(map(re.escape, pattern.split("{i}")))
    match = re.fullmatch(rf"({begin})\.(.+)" if pattern else r"()(.+)", name)
    return None if match is None else (match[1], match.groups()[1:-1], match.groups()[-1])


def all_prefixes(names: Iterable[str]) -> dict[str, None]:
    """Return all beginnings of names, up to a dot."""
    found: dict[str, None] = {}
    for prefix in names:
        while (prefix := prefix.rpartition(".")[0]) and prefix not in found:
            found[prefix] = None
    return found


def fitting_prefixes(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> list[str]:
    """Return the prefixes of all layers that fit a layout, with `{i}` for numbers."""
    found: dict[str, None] = {}
    seen: dict[tuple[tuple[str, tuple[int, ...]], ...], bool] = {}  # most layers of a model are equal
    for concrete, names in names_under(shapes, possible_prefixes(shapes, layout)).items():
        pattern, begin = numbered(concrete), f"{concrete}." if concrete else ""
        if pattern in found:
            continue
        under = {name.removeprefix(begin): shapes[name] for name in names}
        under = {name: shape for name, shape in under.items() if not layout.ignores(name)}
        kind = tuple(under.items())
        if kind not in seen:
            seen[kind] = _fits(under, layout)
        if seen[kind]:
            found[pattern] = None
    return list(found)


def names_under(names: Iterable[str], prefixes: Iterable[str]) -> dict[str, list[str]]:
    """Return the names under each prefix, found in one pass, because a file may have 90,000 names."""
    found: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for name in names:
        words = name.split(".")
        for prefix in ("", *itertools.accumulate(words[:-1], "{}.{}".format)):
            if prefix in found:
                found[prefix].append(name)
    return found


def _fits(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> bool:
    """Return whether tensors are a layer in a layout, or a stack of layers, for some number of heads."""
    try:
        is_stacked = stack_size(shapes, layout) is not None
        find_spec({name: shape[is_stacked:] for name, shape in shapes.items()}, layout, LayerHints())
    except HeadsUnknown:
        return True
    except ValueError:
        return False
    return True


def possible_prefixes(names: Iterable[str], layout: Layout) -> dict[str, str]:
    """Return candidate prefixes of a layout's layers, each with a name that ends like one of its tensors."""
    endings = {tensor.name.replace("{n}", "0") for tensor in layout.tensors if tensor.kind == "weight"}
    found: dict[str, str] = {}
    for name in names:
        for ending in endings:
            if name == ending:
                found.setdefault("", name)
            elif name.endswith(f".{ending}"):
                found.setdefault(name.removesuffix(f".{ending}"), name)
    return found
