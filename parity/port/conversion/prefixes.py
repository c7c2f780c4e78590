"""Find layers in a checkpoint: the prefixes whose names and shapes fit a layout."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache

from parity.port.conversion.layouts import Layout
from parity.port.conversion.layouts.detection import fits_layer, stack_sizes, without_axis

ENTRY = re.compile(r"(.*)\[(\d+)\]", re.DOTALL)
"""The label of one layer of a stack, such as `layers.self_attn[3]`."""


def join(prefix: str, name: str) -> str:
    """Return the full name of a tensor under a prefix."""
    if not prefix:
        return name
    return f"{prefix}.{name}"


def _start_of_names(prefix: str) -> str:
    """Return the text with which all names under a prefix begin."""
    return join(prefix, "")


def numbered(prefix: str) -> str:
    """Return a prefix with `{i}` instead of its numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "{i}", prefix)


def concrete_prefix(pattern: str, name: str) -> tuple[str, tuple[str, ...], str] | None:
    """Split a name by a prefix pattern: the concrete prefix, the numbers for `{i}`, and the
    remainder.
    """
    match = _expression(pattern).fullmatch(name)
    if match is None:
        return None
    concrete, *numbers, remainder = match.groups()
    return concrete, tuple(numbers), remainder


# As many as Python's own cache of expressions; a file has a few patterns.
@lru_cache(maxsize=512)
def _expression(pattern: str) -> re.Pattern[str]:
    """Return the expression of the names under a prefix pattern."""
    if not pattern:
        return re.compile(r"()(.+)")
    prefix = r"(\d+)".join(map(re.escape, pattern.split("{i}")))
    return re.compile(rf"({prefix})\.(.+)")


def all_prefixes(names: Iterable[str]) -> dict[str, None]:
    """Return all beginnings of names, up to a dot."""
    prefixes: dict[str, None] = {}
    for name in names:
        prefix = name.rpartition(".")[0]
        # If a prefix was added before, so were its own prefixes.
        while prefix and prefix not in prefixes:
            prefixes[prefix] = None
            prefix = prefix.rpartition(".")[0]
    return prefixes


def fitting_prefixes(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> list[str]:
    """Return the prefixes of all layers that fit a layout, with `{i}` for numbers."""
    fitting: dict[str, None] = {}
    # Most layers of a model have equal tensors, so the answer for these is kept.
    fits: dict[tuple[tuple[str, tuple[int, ...]], ...], bool] = {}
    names = Names(shapes)
    for prefix in names.possible_prefixes(layout):
        pattern = numbered(prefix)
        if pattern in fitting:
            continue
        start = _start_of_names(prefix)
        own_shapes: dict[str, tuple[int, ...]] = {}
        for name in names.under(prefix):
            short = name.removeprefix(start)
            if not layout.ignores(short):
                own_shapes[short] = shapes[name]
        kind = tuple(own_shapes.items())
        if kind not in fits:
            fits[kind] = _fits(own_shapes, layout)
        if fits[kind]:
            fitting[pattern] = None
    return list(fitting)


def _fits(shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> bool:
    """Return whether tensors are a layer in a layout, or a stack of layers, for some number of
    heads.
    """
    try:
        sizes = stack_sizes(shapes, layout)
    except ValueError:
        return False
    if sizes is None:
        return fits_layer(shapes, layout)
    return any(fits_layer(without_axis(axis, shapes), layout) for axis in sizes)


class Names:
    """The names in a file, sorted once, so that a search is fast: a file may have 200,000 names.

    Attributes:
        order: index of each name in the file.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.order = {name: index for index, name in enumerate(names)}
        self._sorted = sorted(self.order)
        self._by_ending: dict[int, dict[str, list[str]]] = {}

    def beginning(self, start: str) -> list[str]:
        """Return the names that begin with a text, in the order of the file."""
        if not start:
            return list(self.order)
        first = bisect_left(self._sorted, start)
        end = first
        while end < len(self._sorted) and self._sorted[end].startswith(start):
            end += 1
        return sorted(self._sorted[first:end], key=self.order.__getitem__)

    def under(self, prefix: str) -> list[str]:
        """Return the names under a prefix, in the order of the file."""
        return self.beginning(_start_of_names(prefix))

    def possible_prefixes(self, layout: Layout) -> dict[str, str]:
        """Return candidate prefixes of a layout's layers, each with a name that ends like one of
        its tensors.
        """
        endings: set[str] = set()
        for tensor in layout.tensors:
            if tensor.kind == "weight":
                endings.add(tensor.name.replace("{n}", "0"))  # of the first head
        matches: list[tuple[int, str, str]] = []
        for ending in endings:
            for name in self._ending_with(ending):
                matches.append((self.order[name], name, ending))
        prefixes: dict[str, str] = {}
        for _, name, ending in sorted(matches):
            prefixes.setdefault(name.removesuffix(ending).removesuffix("."), name)
        return prefixes

    def _ending_with(self, ending: str) -> list[str]:
        """Return the names whose last words are the words of an ending."""
        num_words = ending.count(".") + 1
        if num_words not in self._by_ending:
            self._by_ending[num_words] = self._by_last_words(num_words)
        return self._by_ending[num_words].get(ending, [])

    def _by_last_words(self, count: int) -> dict[str, list[str]]:
        """Return the names by a number of their last words."""
        by_ending: dict[str, list[str]] = {}
        for name in self.order:
            words = name.rsplit(".", count)
            if len(words) >= count:
                ending = ".".join(words[-count:])
                by_ending.setdefault(ending, []).append(name)
        return by_ending
