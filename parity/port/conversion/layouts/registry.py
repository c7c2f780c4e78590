"""All layouts by name: the ones of this package, and the ones that users and other packages
register.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from mha_spec import InputError, InputTypeError
from parity.measure.core.plugins import load_plugins
from parity.measure.text import did_you_mean
from parity.port.conversion.layouts.layout import Layout
from parity.port.conversion.layouts.tables import ALIASES, LAYOUTS

ENTRY_POINTS = "mha_parity.layouts"
"""Group of the entry points by which installed packages offer layouts."""

BUILT_IN = frozenset({*LAYOUTS, *ALIASES})
"""Names of the layouts of this package, which cannot be replaced."""

LayoutSource = Layout | Mapping[str, Any] | str | os.PathLike[str]
"""Arguments of `register_layout`: a layout, its table, or the path of its TOML file."""


def register_layout(layout: LayoutSource) -> Layout:
    """Make a layout known by its name, in this process, to every function that takes a layout.

    It replaces a layout that was registered earlier under its name, so that a table can be edited
    and registered again.

    Args:
        layout: a `Layout`; its table, a mapping as docs/how-to/own-layouts.md describes; or the
            path of a TOML file with that table.

    Returns:
        The layout.

    Raises:
        OSError: if the file cannot be read.
        TypeError: if it has a wrong type.
        ValueError: if the table does not describe a layout, or a layout of this package has its
            name.

    Example:
        >>> qkv = {"holds": "qkv", "axes": "d (n h)"}
        >>> out = {"holds": "out", "axes": "(n h) e"}
        >>> parity.register_layout({"name": "mine", "tensors": {"mix": qkv, "back": out}}).name
        'mine'
    """
    new = _read(layout)
    _check_free(new, BUILT_IN)
    LAYOUTS[new.name] = new
    return new


def _read(layout: LayoutSource) -> Layout:
    from parity.port.conversion.layouts.custom import check_layout, layout_from_table, read_table

    if isinstance(layout, Layout):
        check_layout(layout)
        return layout
    if isinstance(layout, Mapping):
        return layout_from_table(layout)
    if isinstance(layout, str | os.PathLike):
        return read_table(layout)
    raise InputTypeError("layout", "be a Layout, a table, or the path of one", repr(layout))


def _check_free(layout: Layout, taken: Collection[str]) -> None:
    """Reject a layout whose name is taken."""
    if layout.name in taken:
        rule = "be a name that no other layout has"
        raise InputError("the key name", rule, repr(layout.name), where=layout.source)


def register_packages() -> list[Layout]:
    """Register the layouts of installed packages, and return those that were not known before.

    This imports the packages. So callers do it only when a name is unknown, a file fits no layout,
    or layouts are listed.
    """
    known = {*LAYOUTS}
    load_entry_points()
    return [layout for name, layout in LAYOUTS.items() if name not in known]


@cache  # a package that fails is reported once
def load_entry_points() -> None:
    """Register the entry points of the group `mha_parity.layouts`, once in a process.

    Each is anything that `register_layout` accepts, or a list of such things.
    """
    load_plugins(ENTRY_POINTS, "layouts", _register_package)


def _register_package(sources: Any) -> None:
    """Register the layouts of an entry point's value; reject names that are taken."""
    if isinstance(sources, Layout | Mapping | str | os.PathLike):
        sources = [sources]
    layouts: dict[str, Layout] = {}
    for source in sources:
        layout = _read(source)
        # Installing a package must not replace a layout that users registered themselves.
        _check_free(layout, {*BUILT_IN, *LAYOUTS, *layouts})
        layouts[layout.name] = layout
    # Only now, so that a list whose last layout fails leaves none.
    LAYOUTS.update(layouts)


def find_layout(name: str, what: str = "layout") -> Layout:
    """Return a layout by name, or reject the name as argument `what`.

    `mha_torch` is an alias of `canonical`.
    """
    name = ALIASES.get(name, name)
    if name not in LAYOUTS:
        register_packages()
    if name not in LAYOUTS:
        advice = [
            _nearest(str(name)),
            "`mha-parity inspect --layouts` lists them, and a table describes another one:",
            "--layout FILE.toml or parity.register_layout",
        ]
        hint = " ".join(filter(None, advice))
        raise InputError(what, "be a known layout", {what: name}, hint=hint)
    return LAYOUTS[name]


def _nearest(name: str) -> str:
    """Return a "did you mean" question with layouts of that model family, or of similar names."""
    word = name.rpartition(".")[2].lower()
    of_family = [layout.name for layout in LAYOUTS.values() if word in _words_of(layout)]
    if of_family:
        return f"did you mean {' or '.join(of_family[:3])}?"
    return did_you_mean(name, LAYOUTS) or did_you_mean(f"transformers.{name}", LAYOUTS)


def _words_of(layout: Layout) -> Iterable[str]:
    """Return the words by which users may know a layout, in lower case."""
    words = [layout.name.rpartition(".")[2], *layout.about.replace(",", " ").split()]
    return {word.lower() for word in words}
