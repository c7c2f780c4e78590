"""Find layers in a checkpoint: the prefixes whose names and shapes fit a layout."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache

from parity.port.conversion.hints import LayerHints
from parity.port.conversion.layouts import Layout, find_spec
from parity.port.conversion.layouts.detection import UnknownHeadsError, stack_size

ENTRY = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)
"""The label of one layer of a stack, such as `layers.self_attn[3]`."""


def join(prefix: str, name: str) -> str:
    """Return the full name of a tensor under a prefix."""
    return f"{prefix}.{name}" if prefix else name


def numbered(prefix: str) -> str:
    """Return a prefix with `{i}` instead of its numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "{i}", prefix)


def concrete_prefix(pattern: str, name: str) -> tuple[str, tuple[str, ...], str] | None:
    """Split a name by a prefix pattern: the concrete prefix, the numbers for `{i}`, and the
    remainder.
    """
    match = _expression(pattern).fullmatch(name)
    return None if match is None else (match[1], match.groups()[1:-1], match.groups()[-1])


@lru_cache(maxsize=512)
def _expression(pattern: str) -> re.Pattern[str]:
    """Return the expression of the names under a prefix pattern."""
    begin = r"(\d+)".join(map(re.escape, pattern.split("{i}")))
    return re.compile(rf"({begin})\.(.+)" if pattern else r"()(.+)")


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
    seen: dict[
        tuple[tuple[str, tuple[int, ...]], ...], bool
    ] = {}  # most layers of a model are equal
    names = Names(shapes)
    for concrete in names.possible_prefixes(layout):
        pattern, begin = numbered(concrete), f"{concrete}." if concrete else ""
        if pattern in found:
            continue
        under = {name.removeprefix(begin): shapes[name] for name in names.under(concrete)}
        under = {name: shape for name, shape in under.items() if not layout.ignores(name)}
        kind = tuple(under.items())
        if kind not in seen:
            seen[kind] = _fits(under, layout)
        if seen[kind]:
            found[pattern] = None
    return list(found)


def _fits(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> bool:
    """Return whether tensors are a layer in a layout, or a stack of layers, for some number of
    heads.
    """
    try:
        is_stacked = stack_size(shapes, layout) is not None
        find_spec(
            {name: shape[is_stacked:] for name, shape in shapes.items()}, layout, LayerHints()
        )
    except UnknownHeadsError:
        return True
    except ValueError:
        return False
    return True


class Names:
    """The names in a file, sorted once, so that a search is fast: a file may have 200,000 names.

    Attributes:
        order: place of each name in the file.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.order = {name: place for place, name in enumerate(names)}
        self._sorted = sorted(self.order)
        self._by_ending: dict[int, dict[str, list[str]]] = {}

    def beginning(self, begin: str) -> list[str]:
        """Return the names that begin with a text, in the order of the file."""
        if not begin:
            return list(self.order)
        first = bisect_left(self._sorted, begin)
        last = first
        while last < len(self._sorted) and self._sorted[last].startswith(begin):
            last += 1
        return sorted(self._sorted[first:last], key=self.order.__getitem__)

    def under(self, prefix: str) -> list[str]:
        """Return the names under a prefix, in the order of the file."""
        return self.beginning(f"{prefix}." if prefix else "")

    def possible_prefixes(self, layout: Layout) -> dict[str, str]:
        """Return candidate prefixes of a layout's layers, each with a name that ends like one of
        its tensors.
        """
        endings = {
            tensor.name.replace("{n}", "0") for tensor in layout.tensors if tensor.kind == "weight"
        }
        matches = [
            (self.order[name], name, ending)
            for ending in endings
            for name in self._ending_with(ending)
        ]
        found: dict[str, str] = {}
        for _, name, ending in sorted(matches):
            found.setdefault(name.removesuffix(ending).removesuffix("."), name)
        return found

    def _ending_with(self, ending: str) -> list[str]:
        """Return the names whose last words are those of an ending."""
        num_words = ending.count(".") + 1
        if num_words not in self._by_ending:
            by_ending: dict[str, list[str]] = {}
            for name in self.order:
                words = name.rsplit(".", num_words)
                if len(words) >= num_words:
                    by_ending.setdefault(".".join(words[-num_words:]), []).append(name)
            self._by_ending[num_words] = by_ending
        return self._by_ending[num_words].get(ending, [])
