"""Layouts of attention weights in checkpoints: the name, content and axes of each tensor."""

from mha_spec import InputError
from parity.measure.text import did_you_mean
from parity.port.conversion.layouts.canonical import from_canonical, to_canonical
from parity.port.conversion.layouts.detection import find_spec
from parity.port.conversion.layouts.layout import Layout, Tensor
from parity.port.conversion.layouts.tables import ALIASES, LAYOUTS

__all__ = [
    "LAYOUTS",
    "Layout",
    "Tensor",
    "find_layout",
    "find_spec",
    "from_canonical",
    "to_canonical",
]


def find_layout(name: str, what: str = "layout") -> Layout:
    """Return a layout by name, or reject the name as argument `what`. `mha_torch` is an alias of
    `canonical`.
    """
    name = ALIASES.get(name, name)
    if name not in LAYOUTS:
        advice = filter(None, (_nearest(str(name)), "`mha-parity layouts` lists them"))
        raise InputError(what, "be a known layout", {what: name}, hint=" ".join(advice))
    return LAYOUTS[name]


def _nearest(name: str) -> str:
    """Return a "did you mean" question with the layouts of that model family, or with similar
    names.
    """
    word = name.rpartition(".")[2].lower()
    words = {
        each: {each.rpartition(".")[2], *layout.about.replace(",", " ").split()}
        for each, layout in LAYOUTS.items()
    }
    if of_family := [each for each, its in words.items() if word in map(str.lower, its)]:
        return f"did you mean {' or '.join(of_family[:3])}?"
    return did_you_mean(name, LAYOUTS) or did_you_mean(f"transformers.{name}", LAYOUTS)
