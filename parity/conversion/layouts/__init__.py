"""Foreign layouts of attention weights: what each tensor of a checkpoint holds, and how it is laid out."""

from difflib import get_close_matches

from mha_spec import Refusal
from parity.conversion.layouts.canonical import from_canonical, to_canonical
from parity.conversion.layouts.detection import find_spec
from parity.conversion.layouts.layout import Layout, Tensor
from parity.conversion.layouts.tables import ALIASES, LAYOUTS

__all__ = ["LAYOUTS", "Layout", "Tensor", "find_layout", "find_spec", "from_canonical", "to_canonical"]


def find_layout(name: str, what: str = "layout") -> Layout:
    """Return the layout of a name, or refuse it as the argument `what`; `mha_torch` is another name of `canonical`."""
    name = ALIASES.get(name, name)
    if name not in LAYOUTS:
        nearest = _nearest(str(name))
        hint = f"{nearest} is the nearest" if nearest else ""
        raise Refusal(what, f"be one of {', '.join(LAYOUTS)}", {what: name}, hint=hint)
    return LAYOUTS[name]


def _nearest(name: str) -> str:
    """The layout that somebody means: of the model's family, or with nearly that name."""
    word = name.rpartition(".")[2].lower()
    for layout in LAYOUTS.values():
        if word in layout.about.lower().replace(",", " ").split():
            return layout.name
    found = get_close_matches(name, LAYOUTS, 1)
    return found[0] if found else ""
