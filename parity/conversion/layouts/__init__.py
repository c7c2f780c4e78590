"""Foreign layouts of attention weights: what each tensor of a checkpoint holds, and how it is laid out."""

from mha_spec import Refusal
from parity.conversion.layouts.canonical import from_canonical, to_canonical
from parity.conversion.layouts.detection import find_spec
from parity.conversion.layouts.layout import Layout, Tensor
from parity.conversion.layouts.tables import ALIASES, LAYOUTS
from parity.text import did_you_mean

__all__ = ["LAYOUTS", "Layout", "Tensor", "find_layout", "find_spec", "from_canonical", "to_canonical"]


def find_layout(name: str, what: str = "layout") -> Layout:
    """Return the layout of a name, or refuse it as the argument `what`; `mha_torch` is another name of `canonical`."""
    name = ALIASES.get(name, name)
    if name not in LAYOUTS:
        advice = filter(None, (_nearest(str(name)), "`mha-parity layouts` lists them"))
        raise Refusal(what, "be a known layout", {what: name}, hint=" ".join(advice))
    return LAYOUTS[name]


def _nearest(name: str) -> str:
    """Return a question about the layouts of that model family, or of similar names."""
    word = name.rpartition(".")[2].lower()
    words = {
        each: {each.rpartition(".")[2], *layout.about.replace(",", " ").split()} for each, layout in LAYOUTS.items()
    }
    if of_family := [each for each, its in words.items() if word in map(str.lower, its)]:
        return f"did you mean {' or '.join(of_family[:3])}?"
    return did_you_mean(name, LAYOUTS) or did_you_mean(f"transformers.{name}", LAYOUTS)
