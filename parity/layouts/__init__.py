"""Foreign layouts of attention weights: what each tensor of a checkpoint holds, and how it is laid out."""

from parity.layouts.layout import Layout, Tensor, find_spec, from_canonical, to_canonical
from parity.layouts.tables import LAYOUTS

__all__ = ["LAYOUTS", "Layout", "Tensor", "find_layout", "find_spec", "from_canonical", "to_canonical"]


def find_layout(name: str) -> Layout:
    """The layout of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name]
