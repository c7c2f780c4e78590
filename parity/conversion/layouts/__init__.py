"""Foreign layouts of attention weights: what each tensor of a checkpoint holds, and how it is laid out."""

from parity.conversion.layouts.detection import find_spec
from parity.conversion.layouts.layout import Layout, Tensor
from parity.conversion.layouts.tables import ALIASES, LAYOUTS
from parity.conversion.layouts.views import from_canonical, to_canonical

__all__ = ["LAYOUTS", "Layout", "Tensor", "find_layout", "find_spec", "from_canonical", "to_canonical"]


def find_layout(name: str, what: str = "layout") -> Layout:
    """The layout of that name; `mha_torch` is another name of `canonical`.

    Args:
        name: of the layout.
        what: the argument that names it, for the message.

    Raises:
        ValueError: if there is none.
    """
    name = ALIASES.get(name, name)
    if name not in LAYOUTS:
        raise ValueError(f"{what} must be one of {', '.join(LAYOUTS)}, got {what}={name!r}")
    return LAYOUTS[name]
